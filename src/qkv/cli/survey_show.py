"""What `qkv survey` and `qkv survey merge` print and write: tables, figures and a summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from qkv.errors import renamed

if TYPE_CHECKING:
    from qkv.profiler.surveys.data import Survey
    from qkv.profiler.surveys.folder import Folder


def show(result: Survey) -> None:
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


def write(result: Survey, folder: Folder) -> None:
    """Write tables and figures of every group, and print where they are.

    Raises:
        InputError: if they cannot be written.
    """
    from rich.console import Console

    from qkv.figures.layout import png_of
    from qkv.figures.survey import FIGURES

    names = []
    for group in result.groups:
        ending = "" if group == result.main else f"-{group}"
        folder.write(f"heads{ending}.csv", result.heads(group).to_csv(index=False).encode(), "a table")
        for name, draw in FIGURES.items():
            folder.write(f"{name}{ending}.png", png_of(draw(result, group=group)), "a figure")
            names.append(f"{name}{ending}.png")
    console = Console(highlight=False)
    where = f"{folder}".rstrip("/")
    for line in (
        f"Data     {where}/survey.qkv.zip   (qkv.profiler.Survey.load)",
        f"Heads    {where}/heads.csv",
        f"Figures  {', '.join(names)}",
    ):
        console.print(line, markup=False, soft_wrap=True)


@contextmanager
def output_folder(address: str) -> Iterator[Folder]:
    """The folder of a survey. Before the work starts, a local one is created, and another one has to be readable.

    Raises:
        InputError: about ``--out``, if it cannot be used.
    """
    from qkv.cli.files import folder
    from qkv.profiler.surveys.folder import Folder

    with renamed(out="--out"):
        found = Folder(address)
        found.finished()
    with nullcontext() if found.path is None else folder(found.path, resumes=True):
        yield found
