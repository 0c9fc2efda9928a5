"""Experiments: shared runs, resumption, result files, the shipped results, and the quick form of each experiment."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch import nn

from conftest import refused
from forked import CONTEXT
from lab_tasks import THREE, Counting, Three, Tiny
from qkv.errors import InputError
from qkv.profiler import corpora
from qkv.profiler.surveys.corpus import of_texts
from qkv_lab import Diverged, experiments, loop
from qkv_lab.experiments import bottleneck, experiment, masks, mechanism, normalizers, scaling, small, streaming, texts
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import HOLDS, UNDECIDED, UNSEEN, Verdict
from qkv_lab.experiments.record import key, table
from qkv_lab.experiments.registry import BUILT_IN
from qkv_lab.experiments.results import Results
from qkv_lab.experiments.run import SHIPPED, run
from qkv_lab.experiments.small import Sweep
from qkv_lab.task import Measured
from qkv_lab.tasks import backcopy, language, relations, sequences
from qkv_lab.tasks.symbols import Symbols

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
RUN = sys.modules["qkv_lab.experiments.run"]
LEFT = {"tiny.json", "tiny.png", "runs", ".lock"}


class Poisoned(Tiny):
    """An experiment whose runs all diverge."""

    name = "poisoned"
    task = Counting(poison=0)

    def conclude(self, results: Results) -> list[Verdict]:
        assert [v for v in results.variants if results.finished(v)] == ["computed"]
        return [Verdict("C900", UNSEEN, "no run was finished")]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that this process trains, in order."""
    began: list[Path] = []
    real = loop.train

    def train(task: Any, training: Any, folder: Path, **how: Any) -> Any:
        began.append(folder)
        return real(task, training, folder, **how)

    monkeypatch.setattr(loop, "train", train)
    return began


def test_experiment_trains_equal_settings_once_writes_its_results_and_draws_them_again(
    tmp_path: Path, trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = run(Tiny(), tmp_path, quick=True)
    assert quick.verdicts[0].text == "quick form: seven is more"
    assert json.loads(quick.json_path.read_text())["quick"] is True
    result = run(Tiny(), tmp_path, quick=False)
    assert [p.name for p in trained] == [key(Tiny().settings(seed, False)["plain"]) for seed in (0, 0, 1)]
    assert len(list((tmp_path / "runs").iterdir())) == 2  # of three settings; the quick form has one of them
    assert {p.name for p in tmp_path.iterdir()} == LEFT
    found = json.loads(result.json_path.read_text())
    assert found["verdicts"] == [{"claim": "C900", "holds": "holds", "text": "seven is more"}]
    assert found["level"] == 0.95
    plain = found["variants"]["plain"]
    assert (plain["seeds"], plain["settings"]["training"]["steps"]) == ([0, 1], 2)
    assert plain["settings"]["counting"]["model"]["d_model"] == 16
    assert plain["results"][0]["measured"] == {"seven": 7.0}
    curves = plain["results"][0]["curves"]
    assert {name: curve["steps"] for name, curve in curves.items()} == {"loss": [1, 2], "evaluation.loss": [0, 1, 2]}
    assert found["variants"]["same"]["results"] == plain["results"][:1]
    assert [(x["seed"], x["measured"]) for x in found["variants"]["computed"]["results"]] == [
        (0, {"x": 0.5}), (1, {"x": 0.5}),
    ]  # fmt: skip

    result.figure_path.unlink()
    monkeypatch.setattr(RUN, "experiment", lambda name: Tiny())
    monkeypatch.setattr(Tiny, "settings", None)  # nothing may be trained
    again = experiments.redraw("tiny", tmp_path)
    assert again.verdicts == result.verdicts
    assert json.loads(again.json_path.read_text()) == found
    assert again.figure_path.exists()


@pytest.mark.usefixtures("undrawn")
def test_each_variant_has_the_number_of_seeds_that_is_asked_for(tmp_path: Path) -> None:
    result = run(Three(), tmp_path, quick=False)
    found = json.loads(result.json_path.read_text())
    assert {v: x["seeds"] for v, x in found["variants"].items()} == {v: list(range(16)) for v in THREE}
    assert [v.holds for v in result.verdicts] == [HOLDS, HOLDS, UNDECIDED]
    assert (found["level"], found["command"]) == (0.95, "qkv experiment three")
    assert found["verdicts"][0]["criterion"]["dated"] == "2026-11-23"
    exact = run(Three(), tmp_path / "six", quick=False, seeds=6)
    assert [i.n for v in exact.verdicts for i in v.intervals] == [6, 6, 6]
    assert "qkv experiment three --seeds 6" in exact.json_path.read_text()


def test_interrupted_experiment_does_not_repeat_finished_runs(
    tmp_path: Path, trained: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, measured = Tiny.measure, []

    def measure(self: Tiny, model: nn.Module, setting: Setting) -> Measured:
        measured.append(setting.training.seed)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(self, model, setting)

    monkeypatch.setattr(Tiny, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(Tiny(), tmp_path, quick=False)
    assert (tmp_path / "tiny.json.part").exists()
    assert not (tmp_path / "tiny.json").exists()
    run(Tiny(), tmp_path, quick=False)
    assert measured == [0, 1, 1]
    assert trained[1:] == [trained[1]] * 2  # the second model was loaded, not trained; the first was skipped
    assert {p.name for p in tmp_path.iterdir()} == LEFT


def test_diverged_run_is_recorded(tmp_path: Path) -> None:
    found = json.loads(run(Poisoned(), tmp_path, quick=True).json_path.read_text())
    assert "nan at step 1" in found["variants"]["plain"]["results"][0]["diverged"]
    assert issubclass(Diverged, InputError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of a fork
def test_several_processes_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, "get_context", lambda _: CONTEXT)  # starts faster
    kept = []
    for jobs in (1, 2):
        path = run(Tiny(), tmp_path / str(jobs), quick=False, jobs=jobs).json_path
        kept.append(json.loads(path.read_text())["variants"])
        for row in (row for x in kept[-1].values() for row in x["results"]):
            row.pop("seconds", None)  # the processor time differs
    assert kept[0] == kept[1]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "heads.json").write_text("{}")
    for argument, match, call in (
        ("experiment", "'learning_rate'", lambda: experiments.run("learning_rat", tmp_path)),
        ("jobs", None, lambda: experiments.run("heads", tmp_path, jobs=0)),
        ("seeds", "at least 2", lambda: run(Three(), tmp_path, quick=False, seeds=1)),
        ("out", "cannot write", lambda: run(Tiny(), tmp_path / "file", quick=True)),
        ("out", "no result", lambda: experiments.redraw("heads", tmp_path / "elsewhere")),
        ("out", "has no question", lambda: table(tmp_path)),
    ):
        with refused(argument, match):
            call()


def test_page_of_experiments_is_up_to_date() -> None:
    assert (DOCS / "README.md").read_text(encoding="utf-8") == table(SHIPPED)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all quick forms, which thus share runs, as full forms do."""
    return tmp_path_factory.mktemp("quick")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", BUILT_IN)
def test_quick_form_measures_finite_numbers_and_has_a_verdict_on_each_claim(
    name: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only place where quick forms run, on few held-out sequences and a small text in place of the library.

    Models are evaluated at the end only. Figures of one panel are all alike: one is made.
    """
    of_tasks = (backcopy, language, relations.Lookups, relations.Hops, sequences.Copy, sequences.Recall, Symbols)
    for place in (*of_tasks, bottleneck, masks, mechanism, normalizers, scaling, streaming, texts):
        for number in ("CHECKED", "EVALUATED", "UNSEEN", "TEXTS", "MIXED", "ROWS"):
            if number in vars(place):
                monkeypatch.setattr(place, number, 8)
    monkeypatch.setattr(small, "QUICK_TRAINING", {**small.QUICK_TRAINING, "steps": 2})
    monkeypatch.setattr(small, "QUICK_TASK", {**small.QUICK_TASK, "symbols": 16})
    monkeypatch.setattr(masks, "TEXT", replace(masks.TEXT))  # it keeps the text that it has read
    generator = np.random.default_rng(0)
    documents = tuple(bytes(generator.integers(32, 127, 500)).decode() for _ in range(40))
    monkeypatch.setattr(corpora, "load", lambda name: of_texts(documents, name))
    monkeypatch.setenv("QKV_CACHE", str(shared / "cache"))
    evaluation = loop._Writer.evaluation
    monkeypatch.setattr(loop._Writer, "evaluation", lambda *given: given[-1] and evaluation(*given))
    made = experiment(name)
    if type(made).lines is Experiment.lines and name != "heads":
        monkeypatch.setattr(type(made), "figure", lambda self, results: Figure((1, 1)))
    for seed, quick in ((3, True), (0, False)):
        for setting, again in zip(*(made.settings(seed, quick).values() for _ in range(2)), strict=True):
            assert key(setting) == key(again)
            assert setting.training.seed == seed
    result = experiments.run(name, shared, quick=True)
    found = json.loads(result.json_path.read_text())
    assert [v.claim for v in result.verdicts] == list(made.claims)
    assert all(v.text.startswith("quick form: ") for v in result.verdicts)
    assert result.figure_path.exists()
    assert result.json_path.stat().st_size < 60_000
    for row in (row for x in found["variants"].values() for row in x["results"]):
        if isinstance(made, Sweep) and "measured" in row:
            numbers = np.concatenate([np.ravel(x) for x in row["measured"].values()])
            assert np.isfinite(numbers).all()
            assert (numbers >= 0).all()
