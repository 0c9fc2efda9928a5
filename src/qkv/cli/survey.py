"""`qkv survey` and `qkv survey merge`: profile a whole corpus, resumable, in parts."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from qkv._files import scheme_of
from qkv._progress import bar
from qkv._survey_settings import Settings
from qkv._untrusted import allow
from qkv.cli.shared import device_named, statistics_of
from qkv.cli.terminal import head_grid, print_line, show, table, token_table
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    from qkv.profiler.surveys.corpus import Corpus
    from qkv.profiler.surveys.data import Survey
    from qkv.profiler.surveys.folder import Folder

DEFAULTS = Settings()


def show_survey(result: Survey) -> None:
    """Print the summary tables of every group, and which texts were skipped."""
    from rich.text import Text

    record = result.record
    for group in result.groups:
        heads = result.heads(group)
        parts = [] if len(result.groups) == 1 else [group]
        parts += [result.definition["model"], f"{heads['layer'].nunique()} layers", f"{len(heads)} heads"]
        parts += [f"{record['documents']:,} texts", f"{record['tokens']:,} tokens"]
        findings = result.findings(group)
        show(Text("\n" + " · ".join(parts), "bold"), f"{findings[0].value} {findings[0].label}.", "")
        show(*head_grid(result.types(group)), "", *(f"{one.value} {one.label}." for one in findings[1:]))
        show(_head_table(heads, (name for name in result.quantities if not name.startswith("entropy"))))
        show(token_table(result.tokens(8, group)))
    other = sorted({*record["sources"].values()} - {"interface", "qkv"})
    if other:
        show(f"Some numbers come from {', '.join(other)}: record['sources'] lists the modules")
    skipped = sum(record["skipped"].values())
    if skipped:
        reasons = ", ".join(f"{n:,} × {reason}" for reason, n in record["skipped"].items())
        show(Text(f"Skipped {skipped:,} texts: {reasons}", "yellow"))
        show(*(f"  {example}" for example in record["examples"][:3]))


def _head_table(heads: Any, quantities: Iterable[str], most: int = 3) -> Any:
    """The heads with the largest means of each quantity, with intervals of 90 % of the texts and of the queries."""
    from qkv.profiler.data.findings import head_name

    columns = "quantity", ">head", ">mean", ">90 % of texts", ">90 % of queries"
    rows = table(*columns, title="Heads with the largest values")
    for name in quantities:
        if heads[name].max() > 0:
            for _, row in heads.sort_values(name, ascending=False, kind="stable").head(most).iterrows():
                of_texts, of_queries = (
                    f"{_number(row[f'{name}{kind}_p5'])} … {_number(row[f'{name}{kind}_p95'])}"
                    for kind in ("_text", "")
                )
                rows.add_row(name, head_name(row), _number(row[name]), of_texts, of_queries)
    return rows


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def write(result: Survey, folder: Folder) -> None:
    """Write tables and figures of every group, and print where they are."""
    from qkv.plot.layout import png_of
    from qkv.plot.survey import FIGURES
    from qkv.report.html import render_survey

    names: list[str] = []
    for group in result.groups:
        ending = "" if group == result.main else f"-{group}"
        folder.write(f"heads{ending}.csv", result.heads(group).to_csv(index=False).encode(), "a table")
        for name, draw in FIGURES.items():
            folder.write(f"{name}{ending}.png", png_of(draw(result, group=group)), "a figure")
            names.append(f"{name}{ending}.png")
        names.append(f"heads{ending}.csv")
    folder.write("report.html", render_survey(result).encode(), "the report")
    where = f"{folder}".rstrip("/")
    print_line("Report", f"{where}/report.html", main=True)
    print_line("Data", f"{where}/survey.qkv.zip   (qkv.profiler.Survey.load)")
    print_line("Files", f"{where}/  {', '.join(names)}")


@contextmanager
def output_folder(address: str) -> Iterator[Folder]:
    """The folder of a survey. Before the work starts, a local one is created, and another one has to be readable."""
    from qkv.cli.shared import folder
    from qkv.profiler.surveys.folder import Folder

    with renamed(out="--out"):
        found = Folder(address)
        found.finished()
    with nullcontext() if found.path is None else folder(found.path, resumes=True):
        yield found


def merge(
    folders: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR …", help_behavior_hint="")
    ] = (),
    /,
    *,
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None,
) -> None:
    """Merge the shards of a survey that several processes computed (qkv survey … --only-shards i/N).

    The result has the same bytes as the survey of a single process. The folders must be of the same survey (model,
    corpus, settings), and together have every shard once; else a sentence says what is missing or differs. Shards are
    only read. Exit code 1: shards are missing; exit code 2: the folders do not fit together.

    qkv survey merge /shared/survey                    (one folder that all processes wrote to)

    qkv survey merge node0/ node1/ node2/ --out all    (a folder of each machine, copied to one)

    Args:
        folders: Folders that qkv survey wrote to, also at addresses such as s3://bucket/survey.
        out: Folder for the result; by default the first of the folders.
    """
    from qkv.profiler.surveys.folder import Folder, Incomplete, merge_folders

    if not folders:
        raise InputError("DIR is missing, expected folders that qkv survey wrote to, for example qkv-survey")
    try:
        with renamed(folders="DIR", out="--out"):
            result = merge_folders(folders, out)
    except Incomplete as error:
        print(f"qkv: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    show_survey(result)
    write(result, Folder(out or folders[0]))


def survey(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "qkv-mini",
    corpora: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CORPUS …]", help_behavior_hint="")
    ] = (),
    /,
    *,
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "qkv-survey",
    stream: bool = False,
    settings: Annotated[Settings, tyro.conf.arg(name="")] = DEFAULTS,
    statistics: Annotated[str | None, tyro.conf.arg(metavar="NAME,…", help_behavior_hint="")] = None,
    device: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto",
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    max_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None,
) -> None:
    """Measure where every attention head of a model attends over a whole corpus.

    The statistics are exact, and the work can be divided among many processes and machines. The texts are divided into
    shards, and every finished shard is saved in DIR/shards. If a survey is interrupted or killed, repeat the same
    command: it continues with the first unfinished shard. The command writes to DIR: report.html (a page that opens
    offline), survey.qkv.zip (all the data, for qkv.profiler.Survey.load), heads.csv (one row per head), and figures as
    PNG. Texts that cannot be read are skipped
    and counted.

    qkv survey                                         (the small model that comes with qkv, on Python's library)

    qkv survey minilm notes/ letters.txt posts.jsonl   (folders, text files, and JSON lines with a field "text")

    qkv survey smollm2 questions.jsonl --chat          (each text is a question to an assistant)

    qkv survey gpt2 hf:NAME:COLUMN --shards 64         (a dataset from the Hugging Face hub)

    qkv survey gpt2 s3://bucket/corpus --shards 4096 --out s3://bucket/survey          (read as with --stream)

    Args:
        model: A folder with a model, a name on the Hugging Face hub, or a built-in model (see qkv profile --help).
        corpora: Text files, folders of text files, and .jsonl files with a field "text"; or a single named corpus:
            "library" (Python's standard library, the default), "shakespeare" or "hf:NAME". Files and folders may be at
            addresses: s3://, gs://, hf:// (pip install 'qkv[cloud]').
        out: Folder for the results. It is created if it does not exist. It may be at an address, too: then a survey can
            be continued on any machine.
        stream: Read nothing but names, and the first and last 64 KiB of files, before surveying: for corpora that are
            large. "hf:NAME" is read row by row. Otherwise files on this machine are read to their end, so that a survey
            that continues notices any change. Each shard reads its own part of the bytes: lines of .jsonl, groups of
            rows of .parquet, whole .tar (WebDataset: members .txt, .json), .zst, .gz and text files. So there should be
            more of such whole files than shards.
        settings: How the texts are divided, and who surveys them.
        statistics: Also measure these statistics, which installed packages provide (see qkv profile --help).
        device: cpu, cuda, or auto, which gives each process a GPU if there is one.
        threads: Number of threads that torch uses in each process; by default torch decides.
        max_size: Memory that a file which is opened may take, such as 8GB: see docs/howto/files-from-strangers.md.
    """
    import torch

    from qkv.models import loading
    from qkv.profiler.surveys import survey as surveys
    from qkv.profiler.surveys.folder import Incomplete

    allow(max_size)
    if settings.engine == "ray":
        threads = threads or 1
    if threads is not None:
        if threads < 1:
            raise InputError(f"--threads is {threads}, expected at least 1")
        torch.set_num_threads(threads)
    own, ray = statistics_of(statistics), settings.engine == "ray"
    options = {one.name: f"--{one.name.replace('_', '-')}" for one in fields(settings)}
    with renamed(**options):
        settings.check()
    with renamed(**options), output_folder(out) as target, _stoppable(target, settings.numbers):
        corpus = _corpus(corpora or ("library",), stream)
        loaded = loading.load_model(model, dtype=settings.dtype)
        loaded.model.to(device_named("cpu" if ray else device))
        settings = replace(settings, statistics=own, name=loaded.name, gpus=_gpus(device) if ray else None)
        try:
            with _progress(corpus, target, settings) as on_batch:
                result = surveys.survey(
                    loaded.model, corpus, tokenizer=loaded.tokenizer, out=out, on_batch=on_batch, **vars(settings)
                )
        except Incomplete as error:
            print(f"qkv: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        if settings.only_shards is None:
            show_survey(result)
            write(result, target)
        else:
            shards, tokens = f"{len(settings.numbers)} of {settings.shards}", f"{result.record['tokens']:,}"
            print(f"Part {settings.only_shards} is finished: {shards} shards, {tokens} tokens")
            print(f"When all parts are finished: qkv survey merge {out}")


def _corpus(names: tuple[str, ...], stream: bool) -> Corpus:
    """The corpus of these files, folders and addresses, or a named corpus of the lab."""
    from qkv.profiler import corpora
    from qkv.profiler.surveys import corpus

    known = [n for n in names if n in corpora.NAMES or (n.startswith("hf:") and not n.startswith("hf://"))]
    if known and len(names) > 1:
        raise InputError(f"corpus: {known[0]} is a named corpus, expected it alone, or files and folders")
    if known and stream:
        if not known[0].startswith("hf:"):
            raise InputError(f"corpus is {known[0]!r}, which cannot be streamed; leave out --stream")
        return corpus.of_dataset(known[0])
    if known:
        return corpora.load(known[0])
    return corpus.of_addresses(names, whole=not stream and all(scheme_of(name) is None for name in names))


def _gpus(device: str) -> Literal[0, 1] | None:
    """The GPUs that a task of Ray reserves."""
    known: dict[str, Literal[0, 1] | None] = {"auto": None, "cpu": 0, "cuda": 1}
    if device not in known:
        raise InputError(f"--device is {device!r}, expected auto, cpu or cuda: Ray chooses the GPU of each task")
    return known[device]


@contextmanager
def _stoppable(folder: Folder, numbers: Sequence[int]) -> Iterator[None]:
    """Report progress on SIGINT and SIGTERM."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        done = len(folder.finished() & {*numbers})
        raise KeyboardInterrupt(
            f"stopped with {done} of {len(numbers)} shards done; repeat the same command to continue"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(corpus: Corpus, folder: Folder, settings: Settings) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar over the bytes of the shards that this process has still to survey."""

    done, parts = folder.finished(), corpus.shards(settings.shards)
    total = sum(parts[number].size for number in settings.numbers if number not in done)
    start, texts, tokens = time.perf_counter(), 0, 0
    with bar("surveying", total=total or None) as step:

        def on_batch(new_texts: int, new_bytes: int, new_tokens: int) -> None:
            nonlocal texts, tokens
            texts += new_texts
            tokens += new_tokens
            rate = tokens / max(time.perf_counter() - start, 1e-9)
            step(new_bytes, note=f"{texts:,} texts  {rate:,.0f} tokens/s")

        yield on_batch
