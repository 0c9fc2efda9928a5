"""`qkv experiment`: test claims about attention on small models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv.cli.terminal import print_line, show, table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab.experiments import Result


def experiment(
    names: Annotated[tuple[str, ...], Positional, arg(metavar="[NAME …]", help_behavior_hint="")] = (),
    /,
    *,
    quick: Annotated[bool, FlagCreatePairsOff] = False,
    seeds: Annotated[int | None, arg(metavar="N")] = None,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-experiments"),
    jobs: Annotated[int, arg(metavar="N")] = 1,
    redraw: Annotated[bool, FlagCreatePairsOff] = False,
) -> None:
    """Test claims about attention by training small models and measuring them.

    Each verdict compares a confidence interval over seeds with a bound that was written down before the runs. For each
    experiment the command writes all numbers as JSON and a figure to DIR; README.md collects the verdicts on all
    claims. Finished training runs are not repeated, so an interrupted experiment continues where it stopped.

    qkv experiment                            (list the experiments, with the processor time that each took)

    qkv experiment learning_rate --quick      (a short version, to see that it works)

    qkv experiment weight_decay --seeds 5     (exactly 5 seeds)

    qkv experiment all --jobs 4               (all experiments)

    Args:
        names: Names of experiments, or all. Without a name the command lists the experiments.
        quick: Run the short version, whose models are too small for conclusions.
        seeds: Number of seeds, in place of the experiment's own.
        out: Folder for the results. It is created if it does not exist.
        jobs: Number of seeds at the same time, each in its own process on one core.
        redraw: Draw the conclusions and the figures again from the numbers in DIR, without training.
    """
    from qkv._files import write_atomically
    from qkv_lab import experiments

    if not names:
        _list()
        return
    if jobs < 1:
        raise InputError(f"--jobs is {jobs}, expected at least 1")
    if seeds is not None and seeds < 2:
        raise InputError(f"--seeds is {seeds}, expected at least 2: one seed has no interval")
    chosen = dict.fromkeys(x for name in names for x in (experiments.names() if name == "all" else [name]))
    for name in chosen:
        experiments.experiment(name)  # raises for an unknown name before the first experiment runs
    for name in chosen:
        if redraw:
            result = experiments.redraw(name, out)
        else:
            result = experiments.run(name, out, quick=quick, seeds=seeds, jobs=jobs, progress=True)
        _show(name, result)
        write_atomically(out / "README.md", experiments.table(out))


def _list() -> None:
    """Print the names of all experiments, the processor time of the results that come with qkv, and the questions."""
    from rich.text import Text

    from qkv_lab import experiments

    rows = table("experiment", ">took", "question")
    rows.columns[0].no_wrap = rows.columns[1].no_wrap = True
    for name in experiments.names():
        try:
            found = experiments.experiment(name)
        except InputError as error:  # a broken entry point of an installed package
            rows.add_row(Text(name), "", Text(str(error)))
        else:
            seconds = experiments.cost(name)
            rows.add_row(Text(name), _duration(seconds) if seconds else "", Text(found.question))
    show(rows)
    show("usage: qkv experiment NAME … [--quick] [--seeds N] [--jobs N] [--out DIR]")


def _duration(seconds: float) -> str:
    """A rough duration.

    >>> _duration(20), _duration(400), _duration(8000)
    ('20 s', '7 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _show(name: str, result: Result) -> None:
    """Print the verdicts and the names of the files."""
    from rich.text import Text

    rows = table("claim", "verdict", "because", title=name)
    for verdict in result.verdicts:
        rows.add_row(Text(verdict.claim, no_wrap=True), Text(verdict.holds), Text(verdict.text))
    show(rows)
    print_line("Numbers", result.json_path)
    print_line("Figure", result.figure_path)
