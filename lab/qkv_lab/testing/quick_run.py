"""The quick form of an experiment, run twice, and its results drawn again from the saved numbers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from qkv.testing.inputs import CheckFailed, calling, fail, shape_of
from qkv_lab.experiments.base import Conclusion, Experiment, Results, Setting
from qkv_lab.experiments.run import redraw_experiment, run_experiment
from qkv_lab.task import Measured
from qkv_lab.testing.randomness import set_generators
from qkv_lab.testing.values import changed, check_entries, first_difference, state_of


def measured_once(e: Experiment, folder: Path) -> Results:
    """The numbers of the quick form, without verdicts or figure; its models stay in the folder for the next call."""
    seen: list[Results] = []
    set_generators(1)
    with calling(e, "quick form", "trained and measured"):
        run_experiment(_recorder(e, seen, only_measured=True), folder, quick=True)
    (results,) = seen
    if not results.variants:
        fail(e, "settings", "gave no run, and compute no variant, expected some of either")
    return results


def _recorder(e: Experiment, seen: list[Results], *, only_measured: bool) -> Experiment:
    """A copy that checks its measurements, keeps its results, and has no verdicts and an empty figure if asked to."""
    from matplotlib.figure import Figure

    made: Any = copy.copy(e)

    def measure(model: nn.Module, setting: Setting) -> Measured:
        before = state_of(model)
        with calling(e, "measure", "called for a model of the quick form"):
            found = e.measure(model, setting)
        check_entries(e, "measure", found)
        wrong = changed(before, state_of(model))
        if wrong is not None:
            fail(e, "measure", f"changed the model, expected it as before: {wrong}")
        return found

    def compute(seed: int, quick: bool) -> Mapping[str, Measured]:
        with calling(e, "compute", f"called as compute({seed}, quick={quick})"):
            found = e.compute(seed, quick)
        if not isinstance(found, Mapping):
            fail(e, "compute", f"returned {shape_of(found)}, expected measurements by the name of their variant")
        for variant, row in found.items():
            if not isinstance(row, Mapping):
                fail(e, "compute", f"returned {shape_of(row)} for {variant!r}, expected numbers by name")
        check_entries(e, "compute", found)
        both = sorted({*found} & {*e.settings(seed, quick)})
        if both:
            fail(e, "compute", f"has the variants {', '.join(both)}, as settings, expected other names")
        return found

    def conclude(results: Results) -> Conclusion:
        seen.append(results)
        return Conclusion([], "", "") if only_measured else e.conclude(results)

    def figure(results: Results) -> Figure:
        if only_measured:
            return Figure()
        with calling(e, "figure", "called with the results of the quick form"):
            found = e.figure(results)
        if not isinstance(found, Figure):
            fail(e, "figure", f"returned {shape_of(found)}, expected a matplotlib.figure.Figure")
        return found

    made.measure, made.conclude, made.figure = measure, conclude, figure
    if type(e).compute is not Experiment.compute:
        made.compute = compute
    return made


def check_repeated(e: Experiment, results: Results, folder: Path) -> None:
    """The quick form runs to its end, with verdicts and figure, and measures the same numbers as before."""
    again: list[Results] = []
    set_generators(2)
    with calling(e, "quick form", "run to its end"):
        run_experiment(_recorder(e, again, only_measured=False), folder, quick=True)
    wrong = first_difference(_numbers(results), _numbers(again[0]))
    if wrong is not None:
        raise CheckFailed(
            f"{type(e).__name__}: measured other numbers with the same seed the second time, expected the same from "
            f"measure and compute: {wrong}"
        )


def _numbers(results: Results) -> dict[str, Any]:
    rows = {v: [asdict(outcome) for outcome in outcomes] for v, outcomes in results.variants.items()}
    for row in (row for found in rows.values() for row in found):
        row.pop("seconds")
    return rows


def check_redrawn(e: Experiment, folder: Path) -> None:
    """The results are saved, loaded and drawn again, with the same verdicts."""
    file = folder / f"{e.name}.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    with calling(e, "conclude", "called with the numbers of the saved results"):
        redraw_experiment(e, folder)
    wrong = first_difference(before, json.loads(file.read_text(encoding="utf-8")))
    if wrong is not None:
        fail(e, "conclude", f"differs for the saved numbers, expected the same verdicts: {wrong}")
