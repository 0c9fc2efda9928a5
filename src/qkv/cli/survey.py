"""`qkv survey`: where does a model attend over a whole corpus?"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.profiler.surveys.corpus import Corpus
    from qkv.profiler.surveys.data import Survey


def survey(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "qkv-mini",
    corpora: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CORPUS …]", help_behavior_hint="")
    ] = (),
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-survey"),
    shards: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    batch_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 4096,
    length: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    overlap: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    long: Literal["split", "refuse"] = "split",
    local_window: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto",
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    patience: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 14_400.0,
) -> None:
    """Where does a model attend over a whole corpus? Exact sums for every head, on one core or on many machines.

    Texts are cut into shards; each that is done is a file in DIR/shards. A survey that was stopped, even killed, goes
    on where it was when the same command is given again. Writes to DIR: survey.qkv.zip (the data, for Survey.load of
    qkv.profiler.survey), heads.csv (a row a head), and figures as PNG. What cannot be read is left out and counted.

    qkv survey                                         (the small model that comes with qkv, on Python's library)

    qkv survey minilm notes/ letters.txt posts.jsonl   (folders, text files, and JSON lines with a "text")

    qkv survey gpt2 hf:NAME:COLUMN --shards 64         (a dataset of the Hugging Face hub)

    torchrun --nproc-per-node 2 -m qkv.cli survey minilm notes/      (two processes; docs/scale.md has more)

    Args:
        model: As in qkv profile: a folder, a name on the hub, "qkv-mini", "minilm" or "random-gpt2".
        corpora: Text files, folders of them, .jsonl files with a field "text"; or one of "library" (the default),
            "shakespeare" and "hf:NAME".
        out: Folder to write to; made if it is not there.
        shards: Parts to cut the corpus into: the more, the less is done again after an interruption.
        batch_tokens: Tokens that run through the model at once.
        length: Longest sequence, special tokens included; if not given, what the model takes, but at most 512.
        overlap: What each piece of a long text repeats of the one before, as context that does not count; an eighth of
            the length if not given.
        long: Split texts longer than that, or refuse them: then they are left out and counted.
        local_window: "Local" is at most this many tokens away.
        dtype: Of the weights.
        device: cpu, cuda, or auto: a card for each process if there are any.
        threads: Threads of torch in each process; as many as it likes if not given.
        patience: How long to wait for other processes before they count as lost; longer than any shard takes.
    """
    import torch

    from qkv.cli.files import folder
    from qkv.profiler.capture import models
    from qkv.profiler.surveys import survey as surveys

    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads is {threads}, expected at least 1")
        torch.set_num_threads(threads)
    if patience <= 0:
        raise InputError(f"--patience is {patience}, expected more than 0 seconds")
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
    with folder(out), _stoppable(out, shards):
        corpus = _corpus(corpora or ("library",))
        loaded = models.load(model, dtype=dtype)
        loaded.model.to(_device(device))
        try:
            with _progress(speaks, corpus, out, shards) as on_batch:
                result = surveys.survey(
                    loaded.model,
                    corpus,
                    tokenizer=loaded.tokenizer,
                    out=out,
                    shards=shards,
                    batch_tokens=batch_tokens,
                    length=length,
                    overlap=overlap,
                    long=long,
                    local_window=local_window,
                    name=loaded.name,
                    patience=patience,
                    on_batch=on_batch,
                )
        except surveys.Incomplete as error:
            if speaks:
                print(f"qkv: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        if speaks:
            _show(result)
            _write(result, out)


def _corpus(names: tuple[str, ...]) -> Corpus:
    """What the names stand for: files and folders, or one corpus that the lab knows."""
    from qkv.lab import corpora
    from qkv.profiler.surveys import corpus

    known = [n for n in names if n in corpora.NAMES or n.startswith("hf:")]
    if not known:
        return corpus.of_files(names)
    if len(names) > 1:
        raise InputError(f"corpus: {known[0]} stands by itself; expected it alone, or files and folders")
    found = corpora.load(known[0])
    return corpus.of_texts(found.documents, found.name, unreadable=found.skipped)


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device is {name!r}, which is not here; expected auto, cpu or cuda") from error
    return name


@contextmanager
def _stoppable(out: Path, shards: int) -> Iterator[None]:
    """What is asked to end, as torchrun asks all others when one process died, says how far it came."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        from qkv.profiler.surveys.survey import finished

        raise KeyboardInterrupt(
            f"stopped with {len(finished(out))} of {shards} shards done; the same command goes on"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(show: bool, corpus: Corpus, out: Path, shards: int) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar over the bytes of the shards that this process has still to survey."""
    from qkv._progress import bar
    from qkv.profiler.surveys.survey import finished

    total = 0
    if show and sys.stderr.isatty():
        done, processes = finished(out), int(os.environ.get("WORLD_SIZE", "1"))
        left = [documents for at, documents in enumerate(corpus.shards(shards)) if at not in done][::processes]
        total = sum(document.size for documents in left for document in documents)
    start, texts, tokens = time.perf_counter(), 0, 0
    with bar("surveying", total=total or None, show=show) as step:

        def on_batch(new_texts: int, new_bytes: int, new_tokens: int) -> None:
            nonlocal texts, tokens
            texts += new_texts
            tokens += new_tokens
            rate = tokens / max(time.perf_counter() - start, 1e-9)
            step(new_bytes, note=f"{texts:,} texts  {rate:,.0f} tokens/s")

        yield on_batch


def _show(result: Survey) -> None:
    """What stands out, as tables in the terminal, and what was left out."""
    from rich.console import Console

    record = result.record
    console = Console(highlight=False)
    for group in result.groups:
        heads = result.heads(group)
        parts = [] if len(result.groups) == 1 else [group]
        parts += [result.definition["model"], f"{heads['layer'].nunique()} layers", f"{len(heads)} heads"]
        parts += [f"{record['documents']:,} texts", f"{record['tokens']:,} tokens"]
        console.print("\n" + " · ".join(parts), style="bold", markup=False)
        console.print(_head_table(heads, (name for name in result.quantities if not name.startswith("entropy"))))
        console.print(_token_table(result, group))
    beside = sorted({*record["sources"].values()} - {"interface", "qkv"})
    if beside:
        console.print(
            f"Some numbers come from: {', '.join(beside)} (record['sources'] says of which modules)", markup=False
        )
    left = sum(record["skipped"].values())
    if left:
        reasons = ", ".join(f"{n:,} × {reason}" for reason, n in record["skipped"].items())
        console.print(f"Left out {left:,} texts: {reasons}", style="yellow", markup=False)
        for example in record["examples"][:3]:
            console.print(f"  {example}", markup=False)


def _head_table(heads: Any, quantities: Iterable[str], most: int = 3) -> Any:
    """The heads that do most of each thing, with how sure one can be of it from text to text."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most telling heads", title_justify="left")
    for name in ("what", "head", "mean", "90 % of texts", "90 % of queries"):
        table.add_column(name, justify="left" if name in ("what", "head") else "right", no_wrap=True)
    for what in quantities:
        if heads[what].max() > 0:
            for row in heads.sort_values(what, ascending=False, kind="stable").head(most).itertuples():
                of_texts, of_queries = (
                    f"{_number(getattr(row, f'{what}{kind}_p5'))} … {_number(getattr(row, f'{what}{kind}_p95'))}"
                    for kind in ("_text", "")
                )
                table.add_row(what, f"{row.layer}.{row.head}", _number(getattr(row, what)), of_texts, of_queries)
    return table


def _token_table(result: Survey, group: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most attended tokens", title_justify="left")
    for name in ("token", "of all attention", "× its share of the text", "occurs"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for row in result.tokens(8, group).itertuples():
        name = row.token or f"token {row.id}"
        table.add_row(
            Text(name if name.isprintable() else repr(name)), f"{row.share:.1%}", f"{row.lift:.1f}", f"{row.count:,}"
        )
    return table


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _write(result: Survey, out: Path) -> None:
    from rich.console import Console

    from qkv._files import write_whole
    from qkv.figures.save import save_figure
    from qkv.figures.survey import FIGURES

    names = []
    try:
        for group in result.groups:
            ending = "" if group == result.main else f"-{group}"
            write_whole(out / f"heads{ending}.csv", result.heads(group).to_csv(index=False).encode())
            for name, draw in FIGURES.items():
                save_figure(draw(result, group=group), out / f"{name}{ending}.png")
                names.append(f"{name}{ending}.png")
    except OSError as error:
        raise InputError(f"cannot write tables and figures to {out} ({error.strerror}); the data is there") from error
    console = Console(highlight=False)
    for line in (
        f"Data     {out / 'survey.qkv.zip'}   (qkv.profiler.Survey.load)",
        f"Heads    {out / 'heads.csv'}",
        f"Figures  {', '.join(names)}",
    ):
        console.print(line, markup=False, soft_wrap=True)
