"""`python -m benchmarks.mechanisms`: time every attention mechanism on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from qkv.cli.shared import folder
from qkv.cli.terminal import print_line
from qkv.errors import InputError


def bench(
    mechanisms: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MECHANISM …]", help_behavior_hint="")
    ] = (),
    /,
    *,
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …")] = (32, 128, 512, 2048, 4096, 8192),
    heads: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    backward: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    queries: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    memory: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …", help_behavior_hint="")] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Annotated[int, tyro.conf.arg(metavar="N")] = 2,
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 2.0,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-bench"),
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
) -> None:
    """Time every attention mechanism on this machine, and the alternatives to it.

    The alternatives are torch's scaled_dot_product_attention, compiled FlexAttention, explicit weights in plain torch,
    and x-transformers if it is installed. They are timed in turns. The command writes the numbers as JSON, a table as
    Markdown, and a figure to DIR. Results of the same machine and lengths that are already in DIR are kept, so you can
    interrupt the command and time the remaining mechanisms later.

    python -m benchmarks.mechanisms                                      (all mechanisms, about fifteen minutes)

    python -m benchmarks.mechanisms alibi window --lengths 4096 16384    (two mechanisms, two lengths)

    python -m benchmarks.mechanisms causal --backward --dtype bfloat16   (a training step)

    python -m benchmarks.mechanisms causal window --queries 1 --lengths 100000    (one step of decoding)

    python -m benchmarks.mechanisms --device cuda --dtype bfloat16       (on a CUDA card)

    Args:
        mechanisms: Mechanisms to time, such as causal, statistics, sink, alibi, window, bigbird, sigmoid, entmax or
            linear; all by default.
        lengths: Numbers of tokens.
        heads: Number of heads, of head dimension 64.
        dtype: Number format of queries, keys and values.
        backward: Time the forward and the backward pass together.
        queries: How many of the last tokens are queries, 1 for a step of decoding; all tokens by default.
        memory: Also measure the peak memory at these lengths, on CPU each in its own process (Linux only).
        device: Where to run: cpu, or cuda for the first CUDA card.
        threads: Number of threads that torch uses.
        seconds: Seconds for each cell of the table; every candidate runs at least three times.
        out: Folder for the results. It is created if it does not exist.
        name: Name of the files, without the ending; by default it states the dtype, the heads, the pass and the card.
    """
    from rich.console import Console

    from benchmarks.mechanisms import run, show
    from benchmarks.mechanisms.contenders import MECHANISMS
    from qkv._progress import bar

    if any(n < 1 for n in (*lengths, *memory, heads, threads, 1 if queries is None else queries)) or not lengths:
        raise InputError("--lengths, --memory, --heads, --queries and --threads are counts, expected at least 1")
    import torch

    chosen = mechanisms or tuple(name for name, one in MECHANISMS.items() if one.trains or not backward)
    with folder(out):
        stem = name or f"{dtype}-{heads}-{'both' if backward else 'forward'}"
        stem += "" if queries is None or name else f"-{queries}-queries"
        stem += "" if device == "cpu" or name else f"-{device}"
        with bar("timing") as step:
            result = run.bench(
                chosen,
                sorted(set(lengths)),
                heads=heads,
                dtype=getattr(torch, dtype),
                backward=backward,
                queries=queries,
                threads=threads,
                seconds=seconds,
                memory=sorted(set(memory)),
                device=device,
                on_cell=lambda cell: step(0, note=cell),
                path=out / f"{stem}.json",
            )
        (out / f"{stem}.md").write_text(show.markdown(result))
        show.figure(result, out / f"{stem}.png")
        Console().print(show.table(result))
        print_line("Files", f"{out / stem}.json, .md, .png")
