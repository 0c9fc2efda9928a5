"""Runs an experiment: trains each of its models once, measures them, and writes numbers, verdicts and figure."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from qkv._files import write_atomically
from qkv._progress import bar
from qkv.errors import InputError
from qkv.lab import log, settings
from qkv.lab.experiments.base import UNSEEN, Conclusion, Experiment, Outcome, Results, Setting, Verdict
from qkv.lab.experiments.registry import BUILT_IN, experiment

RUNS = "runs"
"""The subfolder of trained models, which all experiments share."""
POINTS = 200
"""The largest number of points of a curve in the JSON file."""
DIGITS = 5
"""The significant digits of the numbers in the JSON file."""


@dataclass(frozen=True)
class Result:
    """The files and the verdicts of a finished experiment."""

    json_path: Path
    figure_path: Path
    verdicts: tuple[Verdict, ...]
    paragraph: str


def run(name: str, out: str | Path, *, quick: bool = False, jobs: int = 1, progress: bool = True) -> Result:
    """Train and measure the models of an experiment and write its results; resume an interrupted call.

    Args:
        name: the name of an experiment, see `names`.
        out: the output folder. It gets NAME.json, NAME.png and the models, as ``runs/<hash of the settings>``;
            experiments share runs with equal settings. Until all runs are measured, NAME.json.part has those so far.
        quick: short runs of few seeds, to test that everything works; the verdicts say so.
        jobs: the number of processes that train models in parallel, one thread each.
        progress: show a progress bar if standard error is a terminal.

    Raises:
        InputError: for an unknown experiment, or if the folder cannot be written.
        qkv.lab.Interrupted: after an interrupt; the same call resumes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("norm_place", folder, quick=True)
    ...     result.json_path.name, [v.claim for v in result.verdicts]
    ('norm_place.json', ['C086'])
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, expected at least 1 process")
    return run_experiment(experiment(name), Path(out), quick=quick, jobs=jobs, progress=progress)


def run_experiment(made: Experiment, out: Path, *, quick: bool, jobs: int = 1, progress: bool = False) -> Result:
    """As `run`, but of an experiment that need not be registered."""
    from qkv.lab.draw import save_figure

    planned = {variant: list(rows) for variant, rows in made.settings(quick).items()}
    keys = {variant: [key(s) for s in rows] for variant, rows in planned.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        kept = _PartialResults(out / f"{made.name}.json.part", quick)
        todo = {key(s): s for rows in planned.values() for s in rows if key(s) not in kept.runs}
        with bar(made.name, "runs", len(todo), show=progress and bool(todo)) as step:
            for k, outcome in _outcomes(made, todo, out / RUNS, jobs):
                kept.add(k, outcome)
                step(1)
        if kept.computed is None:
            kept.add_computed(_computed(made, quick))
        variants = {v: [Outcome(**kept.runs[k]) for k in rows] for v, rows in keys.items()}
        variants |= {v: [Outcome(**x) for x in rows] for v, rows in (kept.computed or {}).items()}
        results = Results(variants, quick)
        found = _mark_quick(made.conclude(results), quick)
        target, picture = out / f"{made.name}.json", out / f"{made.name}.png"
        save_figure(made.figure(results), picture)
        described = {
            "name": made.name,
            "question": made.question,
            "claims": list(made.claims),
            "quick": quick,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": _versions(),
            "machine": {**_machine(), "jobs": jobs},
            **_conclusion_fields(found),
            "variants": {v: _variant_fields(planned.get(v), keys.get(v), rows) for v, rows in variants.items()},
        }
        write_atomically(target, _json(described))
        kept.path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"out: cannot write to {out} ({error.strerror})") from error
    return Result(target, picture, tuple(found.verdicts), found.paragraph)


def redraw(name: str, out: str | Path) -> Result:
    """Recompute verdicts and figure from the numbers in ``NAME.json``, without training or measuring anything.

    Raises:
        InputError: if ``NAME.json`` is missing or is no result of an experiment.
    """
    from qkv.lab.draw import save_figure

    made, out = experiment(name), Path(out)
    target, picture = out / f"{name}.json", out / f"{name}.png"
    described = load(target)
    rows = {v: [Outcome(**row) for row in described["variants"][v]["results"]] for v in described["variants"]}
    results = Results(rows, described["quick"])
    found = _mark_quick(made.conclude(results), results.quick)
    try:
        save_figure(made.figure(results), picture)
        write_atomically(target, _json(described | {"question": made.question} | _conclusion_fields(found)))
    except OSError as error:
        raise InputError(f"out: cannot write to {out} ({error.strerror})") from error
    return Result(target, picture, tuple(found.verdicts), found.paragraph)


def _conclusion_fields(found: Conclusion) -> dict[str, Any]:
    return {"title": found.title, "verdicts": [asdict(v) for v in found.verdicts], "paragraph": found.paragraph}


def key(setting: Setting) -> str:
    """The name of a run's folder: a hash of all settings."""
    text = settings.to_toml(setting.task, setting.training)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table(out: str | Path) -> str:
    """All results in a folder as a Markdown page with questions, verdicts and links to the figures."""
    lines = [
        "# Experiments",
        "",
        "Each was made by `qkv experiment NAME`. Verdicts are computed from the numbers in NAME.json by the criterion "
        "that their text states; they hold for the small models trained here.",
    ]
    for name, found in _results(Path(out)):
        lines += ["", f"## {name}", "", f"*{found['question']}*", "", found["paragraph"], ""]
        lines += [f"- **{v['claim']} {v['holds']}**: {v['text']}" for v in found["verdicts"]]
        lines += ["", f"![{found['title']}]({name}.png)"]
    return "\n".join(lines).replace("<s>", "`<s>`") + "\n"  # a browser would take <s> for strike-through


def _results(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results in a folder by name: of built-in experiments in their order, then of all others."""
    for name in BUILT_IN:
        if (folder / f"{name}.json").exists():
            yield name, load(folder / f"{name}.json")
    for file in sorted(folder.glob("*.json")):
        if file.stem not in BUILT_IN:
            with suppress(InputError):  # a JSON file of something else
                yield file.stem, load(file)


def load(file: Path) -> dict[str, Any]:
    """The contents of a result file; `InputError` if it is missing or is no result of an experiment."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        missing = {"question", "paragraph", "title", "verdicts", "quick", "variants"} - set(found)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"out: no result of an experiment in {file} ({error})") from error
    if missing:
        raise InputError(f"out: no result of an experiment in {file}: it has no {', '.join(sorted(missing))}")
    return dict(found)


class _PartialResults:
    """The outcomes so far, written to disk after every run, so that an interrupted experiment can resume."""

    def __init__(self, path: Path, quick: bool) -> None:
        self.path, self.quick = path, quick
        self.runs: dict[str, dict[str, Any]] = {}
        self.computed: dict[str, list[dict[str, Any]]] | None = None
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            self.runs = found["runs"]  # keys are hashes of the settings, so quick and full runs cannot be confused
            if found["quick"] == quick:
                self.computed = found["computed"]

    def add(self, k: str, outcome: Outcome) -> None:
        self.runs[k] = asdict(outcome)
        self._save()

    def add_computed(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        self.computed = rows
        self._save()

    def _save(self) -> None:
        write_atomically(self.path, _json({"quick": self.quick, "runs": self.runs, "computed": self.computed}))


def _outcomes(made: Experiment, todo: Mapping[str, Setting], runs: Path, jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Yield each run's key and outcome when it is finished."""
    if jobs == 1 or len(todo) < 2:
        for k, setting in todo.items():
            yield k, _outcome(made, setting, runs / k)
        return
    pool = ProcessPoolExecutor(min(jobs, len(todo)), mp_context=get_context("spawn"), initializer=_use_one_thread)
    try:
        futures: dict[Future[Outcome], str] = {
            pool.submit(_outcome, made, setting, runs / k): k for k, setting in todo.items()
        }
        for done in as_completed(futures):
            yield futures[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    """Worker processes use one thread each."""
    torch.set_num_threads(1)


def _outcome(made: Experiment, setting: Setting, folder: Path) -> Outcome:
    """Train one model and measure it."""
    from qkv.lab.loop import Diverged, train

    seed = setting.training.seed
    try:
        trained = train(setting.task, setting.training, folder, progress=False, figures=False)
    except Diverged as error:
        return Outcome(seed, diverged=str(error))
    with torch.no_grad():
        measured = made.measure(trained.model.eval(), setting)
    curves = {name: _curve(trained.metrics, name) for name in made.curves}
    return Outcome(seed, _rounded(trained.evaluation), _rounded(trained.check), _rounded(measured), _rounded(curves))


def _computed(made: Experiment, quick: bool) -> dict[str, list[dict[str, Any]]]:
    rows = {
        v: [Outcome(seed, measured=_rounded(m)) for seed, m in enumerate(r)] for v, r in made.compute(quick).items()
    }
    return {v: [asdict(outcome) for outcome in r] for v, r in rows.items()}


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[Any]]:
    """A metric over steps, by its dotted name, thinned to at most `POINTS` points; the last step is always included."""
    steps, values = [], []
    for line in metrics:
        value: Any = line
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            steps.append(line["step"])
            values.append(value)
    every = -(-len(steps) // POINTS) or 1
    return {"steps": steps[::-1][::every][::-1], "values": values[::-1][::every][::-1]}


def _rounded(value: Any) -> Any:
    """The value with all floats rounded to `DIGITS` significant digits."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _mark_quick(found: Conclusion, quick: bool) -> Conclusion:
    """The verdicts of a quick form become `UNSEEN`: its runs are too short, and one seed has no range."""
    if not quick:
        return found
    verdicts = [replace(v, holds=UNSEEN, text=f"quick form: {v.text}") for v in found.verdicts]
    return Conclusion(verdicts, found.title, f"Quick form, too short to judge by: {found.paragraph}")


def _variant_fields(
    planned: list[Setting] | None, keys: list[str] | None, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """The entry of a variant in the JSON file: all settings of its first run, and the outcome of each run."""
    rows = [{name: x for name, x in asdict(outcome).items() if x not in ({}, None)} for outcome in outcomes]
    if not planned:
        return {"seeds": [o.seed for o in outcomes], "results": rows}
    first = settings.parse_toml(settings.to_toml(planned[0].task, planned[0].training))
    return {"settings": first, "seeds": [o.seed for o in outcomes], "runs": keys, "results": rows}


def _json(value: Any) -> str:
    """The text of a JSON file, with NaN and infinity as null."""
    return _lines(log.finite(value)) + "\n"


def _lines(value: Any, indent: int = 0) -> str:
    """JSON with one line per entry, except short values and lists of numbers, so that people can read and diff it."""
    flat = json.dumps(value, allow_nan=False)
    if len(flat) + indent <= 110 or not isinstance(value, dict | list):
        return flat
    if isinstance(value, list) and not any(isinstance(x, dict) for x in value):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _lines(x, indent + 1) for x in value) + "\n" + " " * indent + "]"
    rows = (f"{pad}{json.dumps(k)}: {_lines(x, indent + 1)}" for k, x in value.items())
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"


def _versions() -> dict[str, str]:
    from qkv import __version__

    return {"qkv": __version__, "torch": torch.__version__}


def _machine() -> dict[str, Any]:
    from qkv.bench.timing import machine

    found = machine(torch.get_num_threads())
    return {"cpu": found["cpu"], "threads": int(found["threads"]), "cores": os.cpu_count(), "python": found["python"]}
