"""`qkv bench`: how fast is each mechanism on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from qkv.cli.files import folder
from qkv.cli.terminal import print_line
from qkv.errors import InputError


def bench(
    mechanisms: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MECHANISM …]")] = (),
    /,
    *,
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …")] = (512, 1024, 2048, 4096, 8192),
    heads: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    backward: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    memory: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …", help_behavior_hint="")] = (),
    threads: Annotated[int, tyro.conf.arg(metavar="N")] = 2,
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 2.0,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-bench"),
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
) -> None:
    """How fast is each mechanism on this machine, beside what you would use instead?

    Times every mechanism and its rivals (torch's SDPA, FlexAttention compiled, weights formed by hand, x-transformers
    if it is installed) in alternation, and writes to DIR the numbers as JSON, a table as Markdown, and a figure.
    What is there already from the same machine and lengths stays: an interrupted run can be taken up with the rest.

    qkv bench                                      (everything, about ten minutes)

    qkv bench alibi window --lengths 4096 16384    (two mechanisms, two lengths)

    qkv bench causal --backward --dtype bfloat16   (a training step)

    Args:
        mechanisms: Names such as causal, sink, alibi, window, bigbird, sigmoid, entmax, linear; all if none is given.
        lengths: Tokens.
        heads: Heads, of size 64.
        dtype: Of queries, keys and values.
        backward: Time forward and backward together.
        memory: Also measure memory at these lengths, each in a process of its own (Linux).
        threads: Threads of torch.
        seconds: For each cell of the table; three turns at least.
        out: Folder to write to; made if it is not there.
        name: Of the files; made of the dtype, the heads and the pass if not given.
    """
    from rich.console import Console

    from qkv._progress import bar
    from qkv.bench import run, show
    from qkv.bench.contenders import MECHANISMS

    if any(n < 1 for n in (*lengths, *memory, heads, threads)) or not lengths:
        raise InputError("--lengths, --memory, --heads and --threads are counts, expected at least 1")
    import torch

    chosen = mechanisms or tuple(MECHANISMS)
    with folder(out):
        stem = name or f"{dtype}-{heads}-{'both' if backward else 'forward'}"
        with bar("timing") as step:
            result = run.bench(
                chosen,
                sorted(set(lengths)),
                heads=heads,
                dtype=getattr(torch, dtype),
                backward=backward,
                threads=threads,
                seconds=seconds,
                memory=sorted(set(memory)),
                on_cell=lambda cell: step(0, note=cell),
                path=out / f"{stem}.json",
            )
        (out / f"{stem}.md").write_text(show.markdown(result))
        show.figure(result, out / f"{stem}.png")
        Console().print(show.table(result))
        print_line("Files", f"{out / stem}.json, .md, .png")
