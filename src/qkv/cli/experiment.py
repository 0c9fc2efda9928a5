"""`qkv experiment`: does what the sources claim hold for small models?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.lab.experiments import Result


def experiment(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]", help_behavior_hint="")
    ] = (),
    /,
    *,
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-experiments"),
    jobs: Annotated[int, tyro.conf.arg(metavar="N")] = 1,
    redraw: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Does a claim about attention hold? Small models are trained, and what they show gives the verdict.

    Writes to DIR, for each experiment, all numbers as JSON, a figure, and a verdict on each claim; README.md has all.
    Runs that are there already are not repeated: an interrupted experiment goes on where it stopped.

    qkv experiment                          (what there is)

    qkv experiment learning_rate --quick    (a short form, to see that it works)

    qkv experiment all --jobs 4             (everything, an hour or two)

    Args:
        names: Names of experiments, or all; they are listed if none is given.
        quick: The short form, which is too small to judge by.
        out: Folder to write to; made if it is not there.
        jobs: Runs at a time, each a process on one core.
        redraw: Conclude and draw once more from the numbers that DIR has; nothing is trained.
    """
    from qkv._files import write_whole
    from qkv.lab import experiments

    if not names:
        _list()
        return
    if jobs < 1:
        raise InputError(f"--jobs is {jobs}, expected at least 1")
    chosen = dict.fromkeys(x for name in names for x in (experiments.names() if name == "all" else [name]))
    for name in chosen:
        experiments.experiment(name)  # all are known before the first one runs
    for name in chosen:
        again = experiments.redraw(name, out) if redraw else None
        _show(name, again or experiments.run(name, out, quick=quick, jobs=jobs, progress=True))
        write_whole(out / "README.md", experiments.table(out))


def _list() -> None:
    """Names, questions, and the claims that get a verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from qkv.lab import experiments

    table = Table("experiment", "question", "claims", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in experiments.names():
        try:
            found = experiments.experiment(name)
        except InputError as error:  # a broken entry point of an installed package
            table.add_row(Text(name, no_wrap=True), Text(str(error)), Text(""))
        else:
            table.add_row(Text(name, no_wrap=True), Text(found.question), Text(", ".join(found.claims)))
    console = Console(highlight=False)
    console.print(table)
    console.print("usage: qkv experiment NAME … [--quick] [--jobs N] [--out DIR]", markup=False)


def _show(name: str, result: Result) -> None:
    """The verdicts, and where numbers and figure are."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("claim", "verdict", "because", title=name, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for verdict in result.verdicts:
        table.add_row(Text(verdict.claim, no_wrap=True), Text(verdict.holds), Text(verdict.text))
    console = Console(highlight=False)
    console.print(table)
    console.print(result.paragraph, markup=False)
    console.print(f"\nNumbers  {result.json_path}", markup=False, soft_wrap=True)
    console.print(f"Figure   {result.figure_path}\n", markup=False, soft_wrap=True)
