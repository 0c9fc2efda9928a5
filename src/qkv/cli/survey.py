"""`qkv survey`: measure where every head of a model attends over a whole corpus."""

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

from qkv._untrusted import allow
from qkv.cli.inputs import statistics_of
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
    statistics: Annotated[str | None, tyro.conf.arg(metavar="NAME,…", help_behavior_hint="")] = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto",
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    patience: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 14_400.0,
    max_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None,
) -> None:
    """Measure where every attention head of a model attends over a whole corpus.

    The statistics are exact, and the work can be divided among many processes and machines. The texts are divided into
    shards, and every finished shard is saved in DIR/shards. If a survey is interrupted or killed, repeat the same
    command: it continues with the first unfinished shard. The command writes to DIR: survey.qkv.zip (all the data, for
    qkv.profiler.Survey.load), heads.csv (one row per head), and figures as PNG. Texts that cannot be read are skipped
    and counted.

    qkv survey                                         (the small model that comes with qkv, on Python's library)

    qkv survey minilm notes/ letters.txt posts.jsonl   (folders, text files, and JSON lines with a field "text")

    qkv survey gpt2 hf:NAME:COLUMN --shards 64         (a dataset from the Hugging Face hub)

    torchrun --nproc-per-node 2 -m qkv.cli survey minilm notes/      (two processes; see docs/scale.md)

    Args:
        model: A folder with a model, a name on the Hugging Face hub, or a built-in model (see qkv profile --help).
        corpora: Text files, folders of text files, and .jsonl files with a field "text"; or a single named corpus:
            "library" (Python's standard library, the default), "shakespeare" or "hf:NAME".
        out: Folder for the results. It is created if it does not exist.
        shards: Number of parts to divide the corpus into. With more shards, less work is lost if you interrupt.
        batch_tokens: Number of tokens in a batch.
        length: Longest sequence, special tokens included; by default the longest that the model can read, at most 512.
        overlap: Number of tokens that each piece of a split text repeats from the piece before it, as context that is
            not measured again; by default an eighth of the length.
        long: What to do with texts longer than the length: split them, or refuse them (they are skipped and counted).
        local_window: Keys at most this many tokens from the query count as local.
        statistics: Also measure these statistics, which installed packages provide (see qkv profile --help).
        dtype: Number format of the weights.
        device: cpu, cuda, or auto, which gives each process a GPU if there is one.
        threads: Number of threads that torch uses in each process; by default torch decides.
        patience: Seconds to wait for the other processes before they are considered lost. It must be longer than a
            process needs for all its shards.
        max_size: Memory that a file which is opened may take, such as 8GB: see docs/howto/files-from-strangers.md.
    """
    import torch

    from qkv.cli.files import folder
    from qkv.profiler.capture import models
    from qkv.profiler.surveys import survey as surveys

    allow(max_size)
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads is {threads}, expected at least 1")
        torch.set_num_threads(threads)
    if patience <= 0:
        raise InputError(f"--patience is {patience}, expected more than 0 seconds")
    own = statistics_of(statistics)
    prints = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
    with folder(out, resumes=True), _stoppable(out, shards):
        corpus = _corpus(corpora or ("library",))
        loaded = models.load(model, dtype=dtype)
        loaded.model.to(_device(device))
        try:
            with _progress(prints, corpus, out, shards) as on_batch:
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
                    statistics=own,
                    name=loaded.name,
                    patience=patience,
                    on_batch=on_batch,
                )
        except surveys.Incomplete as error:
            if prints:
                print(f"qkv: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        if prints:
            _show(result)
            _write(result, out)


def _corpus(names: tuple[str, ...]) -> Corpus:
    """The corpus of these files and folders, or a named corpus of the lab."""
    from qkv.lab import corpora
    from qkv.profiler.surveys import corpus

    known = [n for n in names if n in corpora.NAMES or n.startswith("hf:")]
    if not known:
        return corpus.of_files(names)
    if len(names) > 1:
        raise InputError(f"corpus: {known[0]} is a named corpus, expected it alone, or files and folders")
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
        raise InputError(
            f"--device is {name!r}, which this machine does not have; expected auto, cpu or cuda"
        ) from error
    return name


@contextmanager
def _stoppable(out: Path, shards: int) -> Iterator[None]:
    """Report progress on SIGINT and SIGTERM, which torchrun sends to all processes when one of them dies."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        from qkv.profiler.surveys.survey import finished

        raise KeyboardInterrupt(
            f"stopped with {len(finished(out))} of {shards} shards done; repeat the same command to continue"
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
    """Print the summary tables of every group, and which texts were skipped."""
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
    other = sorted({*record["sources"].values()} - {"interface", "qkv"})
    if other:
        console.print(f"Some numbers come from {', '.join(other)}: record['sources'] lists the modules", markup=False)
    skipped = sum(record["skipped"].values())
    if skipped:
        reasons = ", ".join(f"{n:,} × {reason}" for reason, n in record["skipped"].items())
        console.print(f"Skipped {skipped:,} texts: {reasons}", style="yellow", markup=False)
        for example in record["examples"][:3]:
            console.print(f"  {example}", markup=False)


def _head_table(heads: Any, quantities: Iterable[str], most: int = 3) -> Any:
    """The heads with the largest means of each quantity, with intervals of 90 % of the texts and of the queries."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Heads with the largest values", title_justify="left")
    for name in ("quantity", "head", "mean", "90 % of texts", "90 % of queries"):
        table.add_column(name, justify="left" if name in ("quantity", "head") else "right", no_wrap=True)
    for name in quantities:
        if heads[name].max() > 0:
            for row in heads.sort_values(name, ascending=False, kind="stable").head(most).itertuples():
                of_texts, of_queries = (
                    f"{_number(getattr(row, f'{name}{kind}_p5'))} … {_number(getattr(row, f'{name}{kind}_p95'))}"
                    for kind in ("_text", "")
                )
                table.add_row(name, f"{row.layer}.{row.head}", _number(getattr(row, name)), of_texts, of_queries)
    return table


def _token_table(result: Survey, group: str) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most attended tokens", title_justify="left")
    for name in ("token", "of all attention", "× its share of the text", "count"):
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

    from qkv._files import write_atomically
    from qkv.figures.save import save_figure
    from qkv.figures.survey import FIGURES

    names = []
    try:
        for group in result.groups:
            ending = "" if group == result.main else f"-{group}"
            write_atomically(out / f"heads{ending}.csv", result.heads(group).to_csv(index=False).encode())
            for name, draw in FIGURES.items():
                save_figure(draw(result, group=group), out / f"{name}{ending}.png")
                names.append(f"{name}{ending}.png")
    except OSError as error:
        raise InputError(
            f"--out: cannot write tables and figures to {out} ({error.strerror}); the data was written"
        ) from error
    console = Console(highlight=False)
    for line in (
        f"Data     {out / 'survey.qkv.zip'}   (qkv.profiler.Survey.load)",
        f"Heads    {out / 'heads.csv'}",
        f"Figures  {', '.join(names)}",
    ):
        console.print(line, markup=False, soft_wrap=True)
