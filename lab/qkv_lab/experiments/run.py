"""Runs an experiment: trains each of its models once, measures them, and writes numbers, verdicts and figure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from qkv._files import write_atomically
from qkv._progress import bar
from qkv._untrusted import load_json
from qkv.errors import InputError, refusing
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import UNSEEN, Verdict
from qkv_lab.experiments.record import described, key, load, results_in, rounded, seconds_in, text_of, verdict_fields
from qkv_lab.experiments.registry import experiment
from qkv_lab.experiments.results import Outcome, Results
from qkv_lab.loop import RESULT

RUNS = "runs"
"""The subfolder of trained models, which all experiments share."""
SECONDS = "seconds.txt"
"""The file in a run's folder with the processor time of its training and first measurement."""
LOCK = ".lock"
"""The file that a process locks while it writes to the folder."""
POINTS = 60
"""The largest number of points of a curve in the JSON file."""
Outcomes = dict[str, Outcome]
"""The outcome of each variant with one seed."""


@dataclass(frozen=True)
class Result:
    """The files and the verdicts of a finished experiment."""

    json_path: Path
    figure_path: Path
    verdicts: tuple[Verdict, ...]


def run(
    name: str | Experiment,
    out: str | Path,
    *,
    quick: bool = False,
    seeds: int | None = None,
    jobs: int = 1,
    progress: bool = True,
) -> Result:
    """Train and measure the models of an experiment and write its results; resume an interrupted call.

    Args:
        name: the name of an experiment, see `names`; or an experiment that need not be registered.
        out: the output folder. It gets NAME.json, NAME.png and the models, as ``runs/<hash of the settings>``;
            experiments share runs with equal settings. Until all seeds are measured, NAME.json.part has those so far.
        quick: short runs of one seed, to test that everything works; the verdicts say so.
        seeds: the number of seeds; by default the experiment's own.
        jobs: the number of processes that measure seeds in parallel, one thread each.
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
    if seeds is not None and seeds < 2:
        raise InputError(f"seeds is {seeds}, expected at least 2: one seed has no interval")
    made = experiment(name) if isinstance(name, str) else name
    out = Path(out)
    with refusing(f"out: cannot write to {out} ({{}})", OSError), _only_writer(out):
        part = out / f"{made.name}.json.part"
        by_seed = _measured(made, 1 if quick else seeds or made.seeds, quick, part, out / RUNS, jobs, progress)
        variants: dict[str, list[Outcome]] = {}
        for outcomes in by_seed:
            for variant, outcome in outcomes.items():
                variants.setdefault(variant, []).append(outcome)
        results = Results(variants, quick)
        found = _write(made, out, results, described(made, results, len(by_seed), jobs))
        part.unlink(missing_ok=True)
        return found


def redraw(name: str | Experiment, out: str | Path) -> Result:
    """Recompute verdicts and figure from the numbers in ``NAME.json``, without training or measuring anything.

    Raises:
        InputError: if ``NAME.json`` is missing or is no result of an experiment.
    """
    made = experiment(name) if isinstance(name, str) else name
    kept = load(Path(out) / f"{made.name}.json")
    with refusing(f"out: cannot write to {out} ({{}})", OSError):
        return _write(made, Path(out), results_in(kept), kept)


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


def _write(made: Experiment, out: Path, results: Results, record: Mapping[str, Any]) -> Result:
    """Conclude, and write NAME.json and NAME.png.

    The verdicts of a quick form become `UNSEEN`: its runs are too short, and one seed has no range.
    """
    from qkv_lab.draw import save_figure

    verdicts = tuple(made.conclude(results))
    if results.quick:
        verdicts = tuple(replace(v, holds=UNSEEN, text=f"quick form: {v.text}") for v in verdicts)
    target, picture = out / f"{made.name}.json", out / f"{made.name}.png"
    save_figure(made.figure(results), picture)
    found = {"question": made.question, "verdicts": [verdict_fields(v) for v in verdicts]}
    write_atomically(target, text_of({**record, **found}))
    return Result(target, picture, verdicts)


def read_part(path: Path) -> dict[str, Outcomes]:
    """The seeds that an interrupted call has measured, by a name that changes with the settings of their runs."""
    if not path.exists():
        return {}
    with refusing(f"out: cannot read {path} ({{}}); delete it to measure its runs again"):
        seeds = load_json(path)["seeds"].items()
        return {name: {variant: Outcome(**row) for variant, row in rows.items()} for name, rows in seeds}


def _measured(
    made: Experiment, seeds: int, quick: bool, part: Path, runs: Path, jobs: int, progress: bool
) -> list[Outcomes]:
    """The outcomes of every seed, of which those so far are written to disk after each."""
    kept = read_part(part)
    names = [f"{key(*made.settings(seed, quick).values())} {'quick ' * quick}{seed}" for seed in range(seeds)]
    todo = {name: seed for seed, name in enumerate(names) if name not in kept}
    with bar(made.name, "seeds", len(todo), show=progress and bool(todo)) as step:
        for name, outcomes in _in_order(made, todo, quick, runs, jobs):
            kept[name] = outcomes
            rows = {name: {variant: asdict(x) for variant, x in found.items()} for name, found in kept.items()}
            write_atomically(part, text_of({"seeds": rows}))
            step(1)
    return [kept[name] for name in names]


def _in_order(
    made: Experiment, todo: Mapping[str, int], quick: bool, runs: Path, jobs: int
) -> Iterator[tuple[str, Outcomes]]:
    """Yield each seed's name and outcomes when it is finished, from one or several processes."""
    if jobs == 1 or len(todo) < 2:
        for name, seed in todo.items():
            yield name, _of_seed(made, seed, quick, runs)
        return
    pool = ProcessPoolExecutor(min(jobs, len(todo)), mp_context=get_context("spawn"), initializer=_use_one_thread)
    try:
        futures: dict[Future[Outcomes], str] = {
            pool.submit(_of_seed, made, seed, quick, runs): name for name, seed in todo.items()
        }
        for done in as_completed(futures):
            yield futures[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _use_one_thread() -> None:
    """Worker processes use one thread each."""
    torch.set_num_threads(1)


def _of_seed(made: Experiment, seed: int, quick: bool, runs: Path) -> Outcomes:
    """Train and measure the models of a seed, equal settings once, and compute the other variants."""
    trained: dict[str, Outcome] = {}
    found: dict[str, Outcome] = {}
    for variant, setting in made.settings(seed, quick).items():
        k = key(setting)
        if k not in trained:
            trained[k] = _outcome(made, setting, runs / k)
        found[variant] = trained[k]
    start = time.process_time()
    computed = made.compute(seed, quick)
    seconds = round((time.process_time() - start) / max(1, len(computed)), 1)
    return found | {v: Outcome(seed, measured=rounded(m), seconds=seconds) for v, m in computed.items()}


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


SHIPPED = Path(__file__).parent / "results"
"""The folder of the results that come with the package."""


def cost(name: str) -> float:
    """The processor time in seconds of all runs in the results that come with the package; 0 if there are none."""
    try:
        found = load(SHIPPED / f"{name}.json")
    except InputError:
        return 0.0
    return seconds_in(found)
