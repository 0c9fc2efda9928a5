"""Runs an experiment: trains each of its models once, measures them, and writes numbers, verdicts and figure."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from qkv._files import write_atomically
from qkv._progress import bar
from qkv._untrusted import first_line, load_json
from qkv.errors import InputError
from qkv_lab import settings
from qkv_lab.experiments.base import Conclusion, Experiment, Outcome, Results, Setting
from qkv_lab.experiments.evidence import ERROR, UNSEEN, Verdict
from qkv_lab.experiments.record import conclusion_fields, described, load, rounded, seconds_in, text_of
from qkv_lab.experiments.registry import experiment
from qkv_lab.loop import RESULT

T = TypeVar("T")
RUNS = "runs"
"""The subfolder of trained models, which all experiments share."""
SECONDS = "seconds.txt"
"""The file in a run's folder with the processor time of its training and first measurement."""
LOCK = ".lock"
"""The file that a process locks while it writes to the folder."""
POINTS = 60
"""The largest number of points of a curve in the JSON file."""


@dataclass(frozen=True)
class Result:
    """The files and the verdicts of a finished experiment."""

    json_path: Path
    figure_path: Path
    verdicts: tuple[Verdict, ...]
    paragraph: str


def run(
    name: str,
    out: str | Path,
    *,
    quick: bool = False,
    seeds: int | None = None,
    jobs: int = 1,
    progress: bool = True,
) -> Result:
    """Train and measure the models of an experiment and write its results; resume an interrupted call.

    Args:
        name: the name of an experiment, see `names`.
        out: the output folder. It gets NAME.json, NAME.png and the models, as ``runs/<hash of the settings>``;
            experiments share runs with equal settings. Until all runs are measured, NAME.json.part has those so far.
        quick: short runs of one seed, to test that everything works; the verdicts say so.
        seeds: the number of seeds; by default the experiment's own.
        jobs: the number of processes that train models in parallel, one thread each.
        progress: show a progress bar if standard error is a terminal.

    Raises:
        InputError: for an unknown experiment, too few seeds, or if the folder cannot be written or is in use.
        qkv_lab.Interrupted: after an interrupt; the same call resumes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run("norm_place", folder, quick=True)
    ...     result.json_path.name, [v.claim for v in result.verdicts]
    ('norm_place.json', ['C086'])
    """
    if jobs < 1:
        raise InputError(f"jobs is {jobs}, expected at least 1 process")
    return run_experiment(experiment(name), Path(out), quick=quick, seeds=seeds, jobs=jobs, progress=progress)


def run_experiment(
    made: Experiment,
    out: Path,
    *,
    quick: bool,
    seeds: int | None = None,
    jobs: int = 1,
    progress: bool = False,
) -> Result:
    """As `run`, but of an experiment that need not be registered."""
    if seeds is not None and seeds < 2:
        raise InputError(f"seeds is {seeds}, expected at least 2: one seed has no interval")
    try:
        with _only_writer(out):
            return _run(made, out, 1 if quick else seeds or made.seeds, quick, jobs, progress)
    except OSError as error:
        raise InputError(f"out: cannot write to {out} ({error.strerror})") from error


def _run(made: Experiment, out: Path, seeds: int, quick: bool, jobs: int, progress: bool) -> Result:
    kept = _PartialResults(out / f"{made.name}.json.part")
    plan: dict[str, dict[int, Setting]] = {}
    for seed in range(seeds):
        for variant, setting in made.settings(seed, quick).items():
            plan.setdefault(variant, {})[seed] = setting
    todo = {key(s): s for rows in plan.values() for s in rows.values() if key(s) not in kept.runs}
    with bar(made.name, "runs", len(todo), show=progress and bool(todo)) as step:
        for k, outcome in _outcomes(made, todo, out / RUNS, jobs):
            kept.add(k, outcome)
            step(1)
    variants = {v: [Outcome(**kept.runs[key(s)]) for s in rows.values()] for v, rows in plan.items()}
    for variant, computed in _computed(made, seeds, kept, quick, jobs, progress).items():
        variants[variant] = [Outcome(**row) for row in computed]
    results = Results(variants, quick)
    found = _mark_quick(made.conclude(results), quick)
    _write(made, out, results, found, seeds, plan, jobs)
    kept.path.unlink(missing_ok=True)
    return _result(out, made.name, found)


@contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Create the folder, and hold it: two processes that train the same runs would disturb each other."""
    from filelock import FileLock, Timeout

    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=0):
            yield
    except Timeout as error:
        raise InputError(
            f"out is {str(out)!r}, where another experiment is running; wait until it ends, or use another folder"
        ) from error


def _write(
    made: Experiment,
    out: Path,
    results: Results,
    found: Conclusion,
    seeds: int,
    plan: Mapping[str, Mapping[int, Setting]],
    jobs: int,
) -> None:
    """Write NAME.json and NAME.png."""
    from qkv_lab.draw import save_figure

    save_figure(made.figure(results), out / f"{made.name}.png")
    runs = {variant: [key(setting) for setting in rows.values()] for variant, rows in plan.items()}
    write_atomically(out / f"{made.name}.json", text_of(described(made, results, found, seeds, plan, runs, jobs)))


def _result(out: Path, name: str, found: Conclusion) -> Result:
    return Result(out / f"{name}.json", out / f"{name}.png", tuple(found.verdicts), found.paragraph)


def key(setting: Setting) -> str:
    """The name of a run's folder: a hash of all settings."""
    text = settings.to_toml(setting.task, setting.training)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def redraw(name: str, out: str | Path) -> Result:
    """Recompute verdicts and figure from the numbers in ``NAME.json``, without training or measuring anything.

    Raises:
        InputError: if ``NAME.json`` is missing or is no result of an experiment.
    """
    return redraw_experiment(experiment(name), Path(out))


def redraw_experiment(made: Experiment, out: Path) -> Result:
    """As `redraw`, but of an experiment that need not be registered."""
    from qkv_lab.draw import save_figure

    target, picture = out / f"{made.name}.json", out / f"{made.name}.png"
    kept = load(target)
    rows = {v: [Outcome(**row) for row in kept["variants"][v]["results"]] for v in kept["variants"]}
    results = Results(rows, kept["quick"], kept.get("level", 1 - ERROR))
    found = _mark_quick(made.conclude(results), results.quick)
    try:
        save_figure(made.figure(results), picture)
        write_atomically(target, text_of(kept | {"question": made.question} | conclusion_fields(found)))
    except OSError as error:
        raise InputError(f"out: cannot write to {out} ({error.strerror})") from error
    return _result(out, made.name, found)


class _PartialResults:
    """The outcomes so far, written to disk after every run, so that an interrupted experiment can resume.

    Trained runs are kept by the hash of their settings, and computed ones by seed, for the quick and the full form.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = {}
        self.computed: dict[str, dict[str, dict[str, Any]]] = {}
        if path.exists():
            try:
                found = load_json(path)
                self.runs, self.computed = dict(found["runs"]), dict(found["computed"] or {})
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"out: cannot read {path} ({first_line(error)}); delete it to measure its runs again"
                ) from error

    def add(self, k: str, outcome: Outcome) -> None:
        self.runs[k] = asdict(outcome)
        self._save()

    def add_computed(self, k: str, rows: dict[str, dict[str, Any]]) -> None:
        self.computed[k] = rows
        self._save()

    def _save(self) -> None:
        write_atomically(self.path, text_of({"runs": self.runs, "computed": self.computed}))


def _in_order(work: Callable[..., T], given: Mapping[str, tuple[Any, ...]], jobs: int) -> Iterator[tuple[str, T]]:
    """Yield each key and the result of ``work(*arguments)`` when it is finished, from one or several processes."""
    if jobs == 1 or len(given) < 2:
        for k, arguments in given.items():
            yield k, work(*arguments)
        return
    pool = ProcessPoolExecutor(min(jobs, len(given)), mp_context=get_context("spawn"), initializer=_use_one_thread)
    try:
        futures: dict[Future[T], str] = {pool.submit(work, *arguments): k for k, arguments in given.items()}
        for done in as_completed(futures):
            yield futures[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _outcomes(made: Experiment, todo: Mapping[str, Setting], runs: Path, jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Yield each run's key and outcome when it is finished."""
    return _in_order(_outcome, {k: (made, setting, runs / k) for k, setting in todo.items()}, jobs)


def _use_one_thread() -> None:
    """Worker processes use one thread each."""
    torch.set_num_threads(1)


def _outcome(made: Experiment, setting: Setting, folder: Path) -> Outcome:
    """Train one model and measure it."""
    from qkv_lab.loop import Diverged, train

    seed, finished, start = setting.training.seed, (folder / RESULT).exists(), time.process_time()
    spent = folder / SECONDS
    try:
        trained = train(setting.task, setting.training, folder, progress=False, figures=False)
    except Diverged as error:
        return Outcome(seed, diverged=str(error))
    with torch.no_grad():
        measured = made.measure(trained.model.eval(), setting)
    curves = {name: _curve(trained.metrics, name) for name in made.curves}
    if not finished:
        write_atomically(spent, f"{time.process_time() - start:.1f}\n")
    return Outcome(
        seed, rounded(trained.evaluation), rounded(trained.check), rounded(measured), rounded(curves),
        seconds=float(spent.read_text(encoding="utf-8")) if spent.exists() else None,
    )  # fmt: skip


def _computed(
    made: Experiment, seeds: int, kept: _PartialResults, quick: bool, jobs: int, progress: bool
) -> dict[str, list[dict[str, Any]]]:
    """The results of `Experiment.compute` of each variant, seed by seed."""
    if type(made).compute is Experiment.compute:
        return {}
    names = {f"{'quick ' * quick}{seed}": seed for seed in range(seeds)}
    wanted = {name: (made, seed, quick) for name, seed in names.items() if name not in kept.computed}
    with bar(f"{made.name}, computed", "seeds", len(wanted), show=progress and bool(wanted)) as step:
        for k, rows in _in_order(_compute_one, wanted, jobs):
            kept.add_computed(k, rows)
            step(1)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for variant, row in kept.computed[name].items():
            found.setdefault(variant, []).append(row)
    return found


def _compute_one(made: Experiment, seed: int, quick: bool) -> dict[str, dict[str, Any]]:
    start = time.process_time()
    rows = made.compute(seed, quick)
    seconds = round((time.process_time() - start) / max(1, len(rows)), 1)
    return {v: asdict(Outcome(seed, measured=rounded(m), seconds=seconds)) for v, m in rows.items()}


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


def _mark_quick(found: Conclusion, quick: bool) -> Conclusion:
    """The verdicts of a quick form become `UNSEEN`: its runs are too short, and one seed has no range."""
    if not quick:
        return found
    verdicts = [replace(v, holds=UNSEEN, text=f"quick form: {v.text}") for v in found.verdicts]
    return Conclusion(verdicts, found.title, f"Quick form, too short to judge by: {found.paragraph}")


SHIPPED = Path(__file__).parent / "results"
"""The folder of the results that come with the package."""


def cost(name: str) -> float:
    """The processor time in seconds of all runs in the results that come with the package; 0 if there are none."""
    try:
        found = load(SHIPPED / f"{name}.json")
    except InputError:
        return 0.0
    return seconds_in(found)
