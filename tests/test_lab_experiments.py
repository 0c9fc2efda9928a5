"""Experiments: shared runs, resumption, result files, and verdicts from made-up numbers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch import nn

from conftest import refused
from forked import CONTEXT
from lab_tasks import Counting, Tiny
from qkv.errors import InputError
from qkv.lab import Diverged, experiments
from qkv.lab.experiments import data, experiment, masks, mechanism, names, normalizers
from qkv.lab.experiments.base import (
    FAILS,
    HOLDS,
    UNSEEN,
    Conclusion,
    Outcome,
    Results,
    Setting,
    Verdict,
    larger,
)
from qkv.lab.experiments.run import key, run_experiment, table
from qkv.lab.experiments.sinks import TASK, Sweep
from qkv.lab.task import Measured
from qkv.lab.tasks import backcopy

MEASURING = (data, masks, mechanism, normalizers)
"""The modules that measure some held-out texts."""


class Poisoned(Tiny):
    """An experiment whose runs all diverge."""

    name = "poisoned"
    task = Counting(poison=0)

    def conclude(self, results: Results) -> Conclusion:
        assert results.by_variant("measured.x") == {"computed": [0.5]}  # but no trained variant
        return Conclusion([Verdict("C900", UNSEEN, "no run was finished")], "Nothing", "Nothing.")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that this process trains, in order."""
    from qkv.lab import loop

    began: list[Path] = []
    real = loop.train

    def train(task: Any, training: Any, folder: Path, **how: Any) -> Any:
        began.append(folder)
        return real(task, training, folder, **how)

    monkeypatch.setattr(loop, "train", train)
    return began


def test_experiment_trains_equal_settings_once_and_writes_its_results(tmp_path: Path, trained: list[Path]) -> None:
    result = run_experiment(Tiny(), tmp_path, quick=False)
    assert len(trained) == len(set(trained)) == 2  # of three settings
    assert [p.name for p in trained] == [key(s) for s in Tiny().settings(False)["plain"]]
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.json", "tiny.png", "runs"}
    found = json.loads(result.json_path.read_text())
    assert found["verdicts"] == [{"claim": "C900", "holds": "holds", "text": "seven is more"}]
    plain = found["variants"]["plain"]
    assert plain["seeds"] == [0, 1]
    assert plain["settings"]["training"]["steps"] == 2
    assert plain["settings"]["counting"]["model"]["d_model"] == 16
    assert plain["results"][0]["measured"] == {"seven": 7.0}
    assert plain["results"][0]["curves"]["evaluation.loss"]["steps"] == [0, 1, 2]
    assert plain["results"][0]["curves"]["loss"]["steps"] == [1, 2]
    assert found["variants"]["same"]["results"] == plain["results"][:1]
    assert found["variants"]["computed"]["results"] == [{"seed": 0, "measured": {"x": 0.5}}]
    assert {"question", "created", "versions", "machine", "paragraph", "title"} <= found.keys()


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
        run_experiment(Tiny(), tmp_path, quick=False)
    assert (tmp_path / "tiny.json.part").exists()
    assert not (tmp_path / "tiny.json").exists()
    run_experiment(Tiny(), tmp_path, quick=False)
    assert measured == [0, 1, 1]
    assert trained[1:] == [trained[1]] * 2  # the second model was loaded, not trained; the first was skipped
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.json", "tiny.png", "runs"}


def test_quick_form_is_marked_and_shares_runs_with_the_full_form(tmp_path: Path, trained: list[Path]) -> None:
    result = run_experiment(Tiny(), tmp_path, quick=True)
    assert result.verdicts[0].text == "quick form: seven is more"
    assert result.paragraph.startswith("Quick form")
    assert json.loads(result.json_path.read_text())["quick"] is True
    run_experiment(Tiny(), tmp_path, quick=False)
    assert trained[0] == trained[1]  # the same folder: the run is reused
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_diverged_run_is_recorded(tmp_path: Path) -> None:
    found = json.loads(run_experiment(Poisoned(), tmp_path, quick=True).json_path.read_text())
    assert "the loss is nan at step 1" in found["variants"]["plain"]["results"][0]["diverged"]
    assert issubclass(Diverged, InputError)


@pytest.mark.slow
def test_several_processes_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["qkv.lab.experiments.run"], "get_context", lambda _: CONTEXT)  # starts faster
    one = run_experiment(Tiny(), tmp_path / "one", quick=False).json_path
    two = run_experiment(Tiny(), tmp_path / "two", quick=False, jobs=2).json_path
    assert json.loads(one.read_text())["variants"] == json.loads(two.read_text())["variants"]


def test_run_rejects_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"experiment is 'learning_rat', expected one of .* mean 'learning_rate'\?"):
        experiments.run("learning_rat", tmp_path)
    with refused("jobs"):
        experiments.run("heads", tmp_path, jobs=0)
    (tmp_path / "file").touch()
    with refused("out", match="cannot write"):
        run_experiment(Tiny(), tmp_path / "file", quick=True)


def test_redraw_uses_the_saved_numbers_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_experiment(Tiny(), tmp_path, quick=False)
    before = json.loads(first.json_path.read_text())
    first.figure_path.unlink()
    monkeypatch.setattr(sys.modules["qkv.lab.experiments.run"], "experiment", lambda name: Tiny())
    monkeypatch.setattr(Tiny, "settings", None)  # nothing may be trained
    again = experiments.redraw("tiny", tmp_path)
    assert again.verdicts == first.verdicts
    assert json.loads(again.json_path.read_text()) == before
    assert again.figure_path.exists()
    with refused("out", match="no result"):
        experiments.redraw("tiny", tmp_path / "elsewhere")


def test_every_experiment_has_name_question_and_claims() -> None:
    every = [experiment(name) for name in names()]
    assert [e.name for e in every] == list(names())
    claims = [claim for e in every for claim in e.claims]
    assert all(re.fullmatch(r"C\d{3}", claim) for claim in claims)
    for e in every:
        assert len(set(e.claims)) == len(e.claims) > 0
        assert e.question.endswith("?")


def test_sweeps_have_distinct_settings_and_share_the_plain_run() -> None:
    sweeps = [e for e in map(experiment, names()) if isinstance(e, Sweep)]
    runs = {s.name: [key(row) for rows in s.settings(False).values() for row in rows] for s in sweeps}
    plain = {key(change) for change in experiment("emergence").settings(False)["plain"]}
    for name, keys in runs.items():
        assert len(set(keys)) == len(keys), name
        assert plain <= set(keys), name
    assert len({k for keys in runs.values() for k in keys}) < 150
    for sweep in sweeps:
        for rows in sweep.settings(True).values():
            assert rows[0].training.steps < 10
            rows[0].task.build()
    assert {s.task.model.vocab_size for s in experiment("heads").settings(False)["4"]} == {TASK.model.vocab_size}


# --- verdicts of made-up numbers --------------------------------------------------------------------------------------


def outcomes(
    *alphas: float,
    accuracy: float = 1.0,
    curves: Mapping[str, Any] | None = None,
    check: Mapping[str, Any] | None = None,
    **measured: Any,
) -> list[Outcome]:
    """Outcomes of one layer with two heads, of which the second has the stronger sink."""
    return [
        Outcome(
            seed,
            {"backcopy_accuracy": accuracy, "excess": 0.1},
            {"sink": [[a / 2, a]], "value_drain": [[0.9, 0.1]], "massive": [4.0], **(check or {})},
            measured,
            curves or {},
        )
        for seed, a in enumerate(alphas)
    ]


def verdicts(name: str, variants: Mapping[str, Sequence[Outcome]]) -> dict[str, str]:
    """The verdicts of an experiment. Its figure is drawn from the same numbers, too."""
    made = experiment(name)
    results = Results(variants)
    assert isinstance(made.figure(results), Figure)
    found = made.conclude(results)
    assert tuple(v.claim for v in found.verdicts) == made.claims
    return {v.claim: v.holds for v in found.verdicts}


def test_larger_needs_a_difference_above_the_range_over_seeds() -> None:
    assert larger([0.8, 0.9], [0.5, 0.6])
    assert not larger([0.8, 0.5], [0.5, 0.6])
    assert not larger([0.5], [0.8])
    assert not larger([0.8], [0.7], least=0.2)


@pytest.mark.parametrize(
    ("pre", "post", "expected"),
    [((0.5, 0.6), (0.4, 0.7), HOLDS), ((0.5, 0.6), (0.2, 0.7), FAILS), ((0.1, 0.2), (0.1, 0.4), UNSEEN)],
)
def test_norm_place_criterion(pre: tuple[float, ...], post: tuple[float, ...], expected: str) -> None:
    assert verdicts("norm_place", {"pre": outcomes(*pre), "post": outcomes(*post)}) == {"C086": expected}


def test_weight_decay_compares_only_runs_that_learn_the_task() -> None:
    def found(alphas: Mapping[str, float], failing: tuple[str, ...] = ()) -> str:
        rows = {v: outcomes(a, a + 0.01, accuracy=0.5 if v in failing else 1) for v, a in alphas.items()}
        return verdicts("weight_decay", rows)["C082"]

    rising = {"0": 0.3, "0.1": 0.4, "0.5": 0.5, "1": 0.6, "2": 0.1}
    assert found(rising) == FAILS
    assert found(rising, failing=("2",)) == HOLDS  # then 1 is the strongest decay that learns
    assert found(rising, failing=tuple(rising)) == UNSEEN


def test_learning_rate_counts_loss_spikes_and_divergence() -> None:
    calm = {"loss": {"steps": [100, 200, 300], "values": [2.0, 1.9, 2.1]}}
    jump = {"loss": {"steps": [100, 200, 300], "values": [2.0, 1.9, 2.6]}}
    early = {"loss": {"steps": [10, 50, 200], "values": [2.0, 4.0, 2.1]}}

    def found(plain: Mapping[str, Any], biased: Mapping[str, Any]) -> str:
        own = {f"{rate:g}": outcomes(0.5, curves=calm) for rate in (3e-4, 1e-3, 3e-3)}
        own |= {f"{rate:g}": outcomes(0.5, curves=plain) for rate in (1e-2, 3e-2)}
        own |= {f"key bias, {rate:g}": outcomes(0.1, curves=biased) for rate in (1e-2, 3e-2)}
        return verdicts("learning_rate", own)["C100"]

    assert found(jump, calm) == HOLDS
    assert found(jump, jump) == FAILS
    assert found(calm, calm) == UNSEEN
    assert found(early, calm) == UNSEEN
    rows = {f"{rate:g}": outcomes(0.5, curves=calm) for rate in (3e-4, 1e-3, 3e-3, 1e-2)}
    rows |= {"0.03": [Outcome(0, diverged="NaN")], "key bias, 0.01": rows["0.01"], "key bias, 0.03": rows["0.01"]}
    assert verdicts("learning_rate", rows) == {"C078": FAILS, "C100": HOLDS}


def test_data_amount_separates_diversity_from_steps() -> None:
    def found(few: float, short: float, long: float, diverse: float, most: float = 0.6) -> dict[str, str]:
        alphas = {"16": few, "64": 0.3, "256": long, "1024": 0.5, "no limit": most}
        alphas |= {"256, half the steps": short, "1024, half the steps": diverse}
        return verdicts("data_amount", {v: outcomes(a, a + 0.02) for v, a in alphas.items()})

    assert found(0.1, 0.2, 0.3, 0.5) == {"C080": HOLDS, "C081": HOLDS}
    assert found(0.4, 0.2, 0.5, 0.3) == {"C080": FAILS, "C081": FAILS}
    assert found(0.1, 0.2, 0.2, 0.2, most=0.2) == {"C080": UNSEEN, "C081": UNSEEN}


def test_first_token_criterion() -> None:
    def found(plain: float, replaced: list[float], noise: float) -> dict[str, str]:
        rows = {
            "plain": outcomes(plain, replaced=replaced, random_tokens=noise, all_random=0.1),
            "random first": outcomes(0.1, replaced=[0.1, 0.1], random_tokens=0.1, all_random=0.1),
        }
        return verdicts("first_token", rows)

    assert found(0.6, [0.5, 0.4], 0.6) == {"C062": HOLDS, "C065": HOLDS}
    assert found(0.6, [0.1, 0.4], 0.2) == {"C062": FAILS, "C065": FAILS}
    assert found(0.2, [0.1, 0.4], 0.6) == {"C062": UNSEEN, "C065": UNSEEN}


def test_prefix_and_window_criteria() -> None:
    def prefix(first: float, rest: float) -> str:
        row = outcomes(0.5, prefix_first=first, prefix_rest=rest, by_key=[0.1] * 8)
        return verdicts("prefix", {"plain": row, "prefix 4": row, "prefix 8": row})["C083"]

    def window(first: float, oldest: float) -> str:
        row = outcomes(0.5, first=first, oldest=oldest, by_key=[0.1] * 8)
        return verdicts("window", {"plain": row, "window 8": row, "window 16": row})["C084"]

    assert [prefix(0.1, 0.6), prefix(0.6, 0.1), prefix(0.1, 0.1)] == [HOLDS, FAILS, UNSEEN]
    assert [window(0.6, 0.1), window(0.1, 0.6), window(0.1, 0.1)] == [HOLDS, FAILS, UNSEEN]


def test_normalizers_criteria() -> None:
    def found(plain: float, other: float, peak: float = 4.0, error: float = 0.01) -> dict[str, str]:
        made = experiment("normalizers")
        assert isinstance(made, Sweep)
        own = {"first": other, "second": 0.1, "int8_error": error}
        rows = {v: outcomes(other, **own) for v in made.variants}
        rows["softmax"] = outcomes(plain, check={"massive": [peak]}, first=plain, second=0.05, int8_error=0.02)
        return verdicts("normalizers", rows)

    all_gone = found(0.6, 0.1, peak=50)
    assert set(all_gone.values()) == {HOLDS}
    kept = found(0.6, 0.7, peak=50, error=0.03)
    assert {c for c, holds in kept.items() if holds == HOLDS} == {"C098", "C140"}  # peaks are lower, <s> has the sink
    assert UNSEEN not in kept.values()
    none = found(0.2, 0.1)
    assert set(none.values()) == {UNSEEN}


def test_emergence_criteria() -> None:
    def found(*alpha: float) -> dict[str, str]:
        steps = [0, 100, 200]
        head = {"steps": steps, "values": [[[0.01, a]] for a in alpha]}
        number = {"steps": steps, "values": [0.1, 0.2, 0.3]}
        curves = dict.fromkeys(experiment("emergence").curves, head) | {
            name: number for name in experiment("emergence").curves if name.startswith("evaluation")
        }
        return verdicts("emergence", {"plain": outcomes(alpha[-1], curves=curves)})

    assert found(0.06, 0.4, 0.8) == {"C061": HOLDS, "C063": HOLDS, "C064": HOLDS, "C079": HOLDS}
    assert found(0.4, 0.9, 0.8) == {"C061": HOLDS, "C063": HOLDS, "C064": FAILS, "C079": FAILS}
    assert found(0.06, 0.1, 0.2) == {"C061": FAILS, "C063": FAILS, "C064": UNSEEN, "C079": UNSEEN}


def test_mechanism_uses_the_strongest_head() -> None:
    def found(alpha: float, **check: Any) -> dict[str, str]:
        heads = {"value_drain": [[0.9, 0.1]], "key_cosine": [[0.0, 0.5]], "key_cosine_others": [[0.9, 0.1]]}
        measured = {"peaks": 2, "without_peaks": 0.1, "resting": 0.05, "busy": 0.3, "heavy_rows": 0.5}
        rows = outcomes(alpha, check={**heads, "massive": [20.0], **check}, **measured)
        return verdicts("mechanism", {"1 layer": rows, "3 layers": rows})

    assert set(found(0.6).values()) == {HOLDS}
    assert set(found(0.2).values()) == {UNSEEN}
    assert found(0.6, value_drain=[[0.1, 0.9]])["C068"] == FAILS
    assert found(0.6, massive=[4.0])["C067"] == UNSEEN


# --- real ones --------------------------------------------------------------------------------------------------------


def test_quick_forms_run_and_share_runs(tmp_path: Path, trained: list[Path]) -> None:
    for name in ("emergence", "norm_place"):
        result = experiments.run(name, tmp_path, quick=True)
        assert result.figure_path.stat().st_size > 10_000
        found = json.loads(result.json_path.read_text())
        assert all(v["text"].startswith("quick form: ") for v in found["verdicts"])
        assert result.json_path.stat().st_size < 20_000
    assert len({p.name for p in trained}) == 2  # plain and post-norm, of three
    page = table(tmp_path)
    assert page.count("## ") == 2
    assert "![" in page
    assert "**C086 " in page
    (tmp_path / "heads.json").write_text("{}")
    with refused("out", match="has no paragraph"):
        table(tmp_path)


@pytest.mark.slow
def test_quick_forms_measure_finite_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, held_out in ((backcopy, ("EVALUATED", "CHECKED")), *((m, ("TEXTS",)) for m in MEASURING)):
        for name in held_out:
            monkeypatch.setattr(module, name, 4)  # texts: enough for numbers that are finite
    for name in ("mechanism", "first_token", "prefix", "window", "normalizers"):  # they share runs
        result = experiments.run(name, tmp_path, quick=True)
        found = json.loads(result.json_path.read_text())
        for variant in found["variants"].values():
            numbers = np.concatenate([np.ravel(x) for x in variant["results"][0]["measured"].values()])
            assert np.isfinite(numbers).all(), name
            assert (numbers >= 0).all(), name
