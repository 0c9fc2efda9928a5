"""How many runs experiments still have to train, and about how long that takes, by the times of shipped results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkv._untrusted import load_json
from qkv.errors import InputError
from qkv_lab.experiments.record import load, seconds_in
from qkv_lab.experiments.registry import experiment
from qkv_lab.experiments.run import RUNS, key, looks_of, looks_within
from qkv_lab.loop import RESULT

SHIPPED = Path(__file__).parent / "results"
"""The folder of the results that come with the package."""
UNKNOWN = 15.0
"""The seconds of a run for which no time is known."""


@dataclass(frozen=True)
class Estimate:
    """What is still to be done before the first look at the results."""

    runs: int
    """Runs to train or compute."""
    done: int
    """Runs that are in the folder already."""
    seconds: float
    """Processor time of the runs to do."""


def estimate(
    names: Iterable[str], out: str | Path, *, seeds: int | None = None, most_seeds: int | None = None
) -> Estimate:
    """The runs of some experiments up to their first look, and their processor time.

    Experiments share runs; each is counted once.

    Args:
        names: names of experiments.
        out: the output folder, as for `run`.
        seeds: as for `run`.
        most_seeds: as for `run`.

    Raises:
        InputError: for an unknown experiment, or too few seeds for one of them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     estimate(["norm_place"], folder, seeds=2).runs
    6
    """
    out = Path(out)
    todo: dict[str, float] = {}
    done: set[str] = set()
    for name in names:
        made = experiment(name)
        times = seconds_of(name)
        partial = _kept(out / f"{name}.json.part")
        for seed in range(looks_within(name, looks_of(made, quick=False, seeds=seeds), most_seeds)[0]):
            for variant, setting in made.settings(seed, False).items():
                k = key(setting)
                if k in partial or (out / RUNS / k / RESULT).exists():
                    done.add(k)
                else:
                    todo.setdefault(k, times.get(variant, UNKNOWN))
            for variant in set(times) - set(made.settings(seed, False)):  # computed, not trained
                k = f"{name}, {variant}, {seed}"
                todo[k] = times[variant]
    return Estimate(len(todo), len(done), sum(todo.values()))


def seconds_of(name: str) -> dict[str, float]:
    """The median processor time of a run of each variant, in the results that come with the package; may be empty."""
    try:
        variants = load(SHIPPED / f"{name}.json")["variants"]
    except InputError:
        return {}
    found = {v: [row["seconds"] for row in x["results"] if row.get("seconds")] for v, x in variants.items()}
    return {variant: float(np.median(times)) for variant, times in found.items() if times}


def cost(name: str) -> float:
    """The processor time in seconds of all runs in the results that come with the package; 0 if there are none."""
    try:
        found = load(SHIPPED / f"{name}.json")
    except InputError:
        return 0.0
    return seconds_in(found)


def _kept(file: Path) -> set[str]:
    """The runs in a partial result."""
    try:
        return set(load_json(file)["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
