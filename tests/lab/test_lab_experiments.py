"""Experiments: shared runs, resumption, result files, and verdicts from made-up numbers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from conftest import refused
from forked import CONTEXT
from lab_tasks import THREE, Counting, Three, Tiny
from qkv.errors import InputError
from qkv_lab import Diverged, experiments
from qkv_lab.experiments import architecture, experiment, masks, mechanism, names, normalizers, texts
from qkv_lab.experiments.base import Conclusion, Outcome, Results, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN, Verdict
from qkv_lab.experiments.page import table
from qkv_lab.experiments.run import key, run_experiment
from qkv_lab.experiments.streaming import TASK, Sweep
from qkv_lab.task import Measured
from qkv_lab.tasks import backcopy

MEASURING = (texts, masks, mechanism, normalizers)
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
    from qkv_lab import loop

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
    assert [p.name for p in trained] == [key(Tiny().settings(seed, False)["plain"]) for seed in (0, 1)]
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.json", "tiny.png", "runs", ".lock"}
    found = json.loads(result.json_path.read_text())
    assert found["verdicts"] == [{"claim": "C900", "holds": "holds", "text": "seven is more"}]
    assert found["level"] == 0.95
    plain = found["variants"]["plain"]
    assert plain["seeds"] == [0, 1]
    assert plain["settings"]["training"]["steps"] == 2
    assert plain["settings"]["counting"]["model"]["d_model"] == 16
    assert plain["results"][0]["measured"] == {"seven": 7.0}
    assert plain["results"][0]["curves"]["evaluation.loss"]["steps"] == [0, 1, 2]
    assert plain["results"][0]["curves"]["loss"]["steps"] == [1, 2]
    assert found["variants"]["same"]["results"] == plain["results"][:1]
    computed = [{"seed": seed, "measured": {"x": 0.5}} for seed in (0, 1)]
    assert [{k: row[k] for k in ("seed", "measured")} for row in found["variants"]["computed"]["results"]] == computed
    assert {"question", "created", "versions", "machine", "paragraph", "title", "command"} <= found.keys()


def test_each_variant_has_the_number_of_seeds_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["qkv_lab.experiments.run"], "_outcome", Three.outcome)
    result = run_experiment(Three(), tmp_path, quick=False)
    found = json.loads(result.json_path.read_text())
    assert {v: x["seeds"] for v, x in found["variants"].items()} == {v: list(range(16)) for v in THREE}
    assert [v.holds for v in result.verdicts] == [HOLDS, HOLDS, UNDECIDED]
    assert (found["level"], found["command"]) == (0.95, "qkv experiment three")
    assert "95 % interval" in result.verdicts[0].text
    assert result.verdicts[0].criterion is not None
    assert found["verdicts"][0]["criterion"]["dated"] == "2026-11-23"
    exact = run_experiment(Three(), tmp_path / "six", quick=False, seeds=6)
    assert [i.n for v in exact.verdicts for i in v.intervals] == [6, 6, 6]
    assert "qkv experiment three --seeds 6" in exact.json_path.read_text()
    with refused("seeds", match="at least 2"):
        run_experiment(Three(), tmp_path, quick=False, seeds=1)


def test_two_experiments_do_not_write_to_one_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(*_: object) -> Outcome:
        with refused("out", match="another experiment is running"):
            run_experiment(Tiny(), tmp_path, quick=True)
        return Three.outcome(*_)

    monkeypatch.setattr(sys.modules["qkv_lab.experiments.run"], "_outcome", outcome)
    run_experiment(Three(), tmp_path, quick=False, seeds=2)


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
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.json", "tiny.png", "runs", ".lock"}


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
    monkeypatch.setattr(sys.modules["qkv_lab.experiments.run"], "get_context", lambda _: CONTEXT)  # starts faster
    one = run_experiment(Tiny(), tmp_path / "one", quick=False).json_path
    two = run_experiment(Tiny(), tmp_path / "two", quick=False, jobs=2).json_path
    kept = [json.loads(path.read_text())["variants"] for path in (one, two)]
    for variants in kept:
        for row in (row for x in variants.values() for row in x["results"]):
            row.pop("seconds", None)  # the processor time differs
    assert kept[0] == kept[1]


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
    monkeypatch.setattr(sys.modules["qkv_lab.experiments.run"], "experiment", lambda name: Tiny())
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
    runs = {s.name: [key(row) for row in s.settings(0, False).values()] for s in sweeps}
    plain = key(experiment("emergence").settings(0, False)["plain"])
    for name, keys in runs.items():
        assert len(set(keys)) == len(keys), name
        assert plain in keys or name == "positions", name
    assert len({k for keys in runs.values() for k in keys}) < 60
    for sweep in sweeps:
        for setting in sweep.settings(0, True).values():
            assert setting.training.steps < 10
            setting.task.build()
    assert experiment("heads").settings(0, False)["4"].task.model.vocab_size == TASK.model.vocab_size


# --- verdicts of made-up numbers --------------------------------------------------------------------------------------


def outcomes(
    alpha: float,
    *,
    accuracy: float = 1.0,
    excess: float = 0.1,
    curves: Mapping[str, Any] | None = None,
    check: Mapping[str, Any] | None = None,
    **measured: Any,
) -> list[Outcome]:
    """Four outcomes of one layer with two heads, of which the second has the stronger sink: about `alpha`."""
    return [
        Outcome(
            seed,
            {"backcopy_accuracy": accuracy, "excess": excess},
            {"sink": [[a / 2, a]], "value_drain": [[0.9, 0.1]], "massive": [4.0], **(check or {})},
            measured,
            curves or {},
        )
        for seed, a in enumerate(alpha + shift for shift in (-0.01, 0.0, 0.01, 0.02))
    ]


def verdicts(name: str, variants: Mapping[str, Sequence[Outcome]]) -> dict[str, str]:
    """The verdicts of an experiment. Its figure is drawn from the same numbers, too."""
    made = experiment(name)
    results = Results(variants)
    assert isinstance(made.figure(results), Figure)
    found = made.conclude(results)
    assert tuple(v.claim for v in found.verdicts) == made.claims
    return {v.claim: v.holds for v in found.verdicts}


def swept(name: str, alphas: Mapping[str, float], failing: Collection[str] = (), **measured: Any) -> dict[str, str]:
    """The verdicts of a sweep on these weights on the first token, by variant; those in `failing` have not learnt."""
    made = experiment(name)
    assert isinstance(made, Sweep)
    return verdicts(
        name, {v: outcomes(alphas[v], accuracy=0.5 if v in failing else 1.0, **measured) for v in made.variants}
    )


def test_norm_place_counts_only_what_learns() -> None:
    both = {"pre": 0.8, "post": 0.1, "post, 3 × the steps": 0.1}
    assert swept("norm_place", both) == {"C086": ONLY}
    assert swept("norm_place", both, failing=["post", "post, 3 × the steps"]) == {"C086": HOLDS}
    assert swept("norm_place", both, failing=list(both)) == {"C086": UNSEEN}
    assert swept("norm_place", dict.fromkeys(both, 0.1)) == {"C086": FAILS}
    assert swept("norm_place", {**both, "post": 0.3, "post, 3 × the steps": 0.8}) == {"C086": UNDECIDED}


def test_weight_decay_compares_the_strong_decays_with_none() -> None:
    alphas = {"0": 0.3, "0.1": 0.9, "0.5": 0.9, "1": 0.5, "2": 0.6, "plain, rate 0.01": 0.8}
    assert swept("weight_decay", alphas) == {"C082": HOLDS}
    assert swept("weight_decay", {**alphas, "2": 0.1}) == {"C082": ONLY}
    assert swept("weight_decay", {**alphas, "2": 0.1}, failing=["2"]) == {"C082": HOLDS}
    assert swept("weight_decay", alphas, failing=["0"]) == {"C082": UNSEEN}


def test_learning_rate_compares_neighbouring_rates_and_counts_failed_runs() -> None:
    calm = {"loss": {"steps": [100, 200, 300], "values": [2.0, 1.9, 2.1]}}
    jump = {"loss": {"steps": [100, 200, 300], "values": [2.0, 1.9, 2.6]}}
    early = {"loss": {"steps": [10, 50, 200], "values": [2.0, 4.0, 2.1]}}

    def found(plain: Mapping[str, Any], biased: Mapping[str, Any], slow: float = 0.3) -> dict[str, str]:
        alphas = {"0.001": 0.1, "0.003": slow, "0.01": 0.6, "0.03": 0.8, architecture.LONGER: 0.4}
        own = {v: outcomes(alphas.get(v, 0.5), curves=calm) for v in alphas}
        own |= {f"{rate:g}": outcomes(alphas.get(f"{rate:g}", 0.5), curves=plain) for rate in architecture.UNSTABLE}
        own |= {f"key bias, {rate:g}": outcomes(0.1, curves=biased) for rate in architecture.UNSTABLE}
        return verdicts("learning_rate", own)

    assert found(jump, calm) == {"C078": HOLDS, "C100": HOLDS}
    assert found(jump, jump)["C100"] == FAILS
    assert found(calm, calm)["C100"] == UNSEEN  # no run fails without it
    assert found(early, calm)["C100"] == UNSEEN
    assert found(calm, calm, slow=0.7)["C078"] == ONLY
    assert architecture.failed(Outcome(0, diverged="NaN"))


def test_data_amount_separates_diversity_from_steps() -> None:
    def found(own: float, long: float, diverse: float, most: float = 0.6, accuracy: float = 1.0) -> dict[str, str]:
        alphas = {"16": 0.1, "64": 0.3, "256": long, "1024": 0.5, "no limit": most}
        alphas |= {"256, half the steps": 0.2, "1024, half the steps": diverse}
        return swept("data_amount", alphas, own_sink=own, own_accuracy=accuracy)

    assert found(0.1, 0.3, 0.5) == {"C080": HOLDS, "C081": HOLDS}
    assert found(0.4, 0.5, 0.3) == {"C080": FAILS, "C081": FAILS}
    assert found(0.1, 0.2, 0.3, most=0.2) == {"C080": UNSEEN, "C081": UNSEEN}
    assert found(0.1, 0.3, 0.5, accuracy=0.5)["C080"] == UNSEEN  # the few sequences were not even learnt


def test_first_token_has_conditions_for_both_kinds_of_training() -> None:
    def found(plain: float, replaced: float, noise: float, other: float = 0.1) -> dict[str, str]:
        measured = {"replaced": replaced, "replaced_least": 0.0, "replaced_most": 0.9}
        measured |= {"random_tokens": noise, "all_random": 0.1}
        alphas = {"plain": plain, "random first": other, "random first, 3 × the steps": other}
        return swept("first_token", alphas, **measured)

    assert found(0.6, 0.5, 0.6, other=0.5) == {"C062": HOLDS, "C065": HOLDS}
    assert found(0.6, 0.1, 0.2) == {"C062": FAILS, "C065": FAILS}
    assert found(0.6, 0.5, 0.6)["C062"] == ONLY
    assert found(0.2, 0.1, 0.6) == {"C062": UNSEEN, "C065": UNSEEN}


def test_prefix_and_window_need_a_sink_on_one_of_the_keys() -> None:
    def prefix(first: float, rest: float) -> str:
        alphas = dict.fromkeys(experiment("prefix").settings(0, True), 0.5)
        return swept("prefix", alphas, prefix_first=first, prefix_rest=rest, by_key=[0.1] * 8)["C083"]

    def window(first: float, oldest: float) -> str:
        alphas = dict.fromkeys(experiment("window").settings(0, True), 0.5)
        return swept("window", alphas, first=first, oldest=oldest, by_key=[0.1] * 8)["C084"]

    assert [prefix(0.1, 0.6), prefix(0.6, 0.1), prefix(0.1, 0.1)] == [HOLDS, FAILS, UNSEEN]
    assert [window(0.6, 0.1), window(0.1, 0.6), window(0.1, 0.1)] == [HOLDS, FAILS, UNSEEN]


def test_normalizers_compare_with_softmax() -> None:
    def found(
        plain: float, other: float, divided: float, peak: float = 50.0, error: float = 0.01, excess: float = 0.2
    ) -> dict[str, str]:
        own = {"first": other, "second": 0.1, "int8_error": error}
        made = experiment("normalizers")
        assert isinstance(made, Sweep)
        rows = {
            v: outcomes(divided, **own) if "/" in v else outcomes(other, excess=excess, **own) for v in made.variants
        }
        rows["softmax"] = outcomes(plain, check={"massive": [peak]}, first=plain, second=0.05, int8_error=0.02)
        return verdicts("normalizers", rows)

    assert set(found(0.6, 0.1, 0.6).values()) == {HOLDS}
    kept = found(0.6, 0.7, 0.6, error=0.03, excess=0.1)
    assert {c for c, holds in kept.items() if holds == HOLDS} == {"C098", "C140"}  # peaks are lower, <s> has the sink
    assert kept["C103"] == kept["C135"]
    assert UNSEEN not in kept.values()
    without = found(0.2, 0.1, 0.1, peak=4.0)
    assert {c for c, holds in without.items() if holds != UNSEEN} == {"C378"}  # it alone is not about sinks


def test_emergence_compares_start_half_way_and_end() -> None:
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
    def found(alpha: float, peaks: int = 2, nearest: float = 0.99, **check: Any) -> dict[str, str]:
        heads = {"value_drain": [[0.9, 0.1]], "key_cosine": [[0.0, 0.5]], "key_cosine_others": [[0.9, 0.1]]}
        measured = {"peaks": peaks, "without_peaks": 0.1, "resting": 0.05, "busy": 0.3, "nearest": nearest}
        alphas = {"1 layer": alpha, "3 layers": alpha}
        return swept("mechanism", alphas, check={**heads, "massive": [2000.0], **check}, **measured)

    assert set(found(0.6).values()) == {HOLDS}
    assert {v for c, v in found(0.2).items() if c != "C067"} == {UNSEEN}
    assert found(0.6, value_drain=[[0.1, 0.9]])["C068"] == FAILS
    assert found(0.6, nearest=0.5)["C069"] == FAILS
    assert found(0.6, peaks=0)["C073"] == UNSEEN
    assert found(0.6, massive=[4.0])["C067"] == UNSEEN


def test_share_of_queries_nearest_to_the_first_key_matches_a_loop() -> None:
    q, k = torch.randn(2, 3, 9, 5, generator=torch.Generator().manual_seed(0))
    cosine = torch.nn.functional.cosine_similarity(q[:, :, None], k[:, None], dim=-1)
    hits = [cosine[b, i, : i + 1].argmax() == 0 for b in range(3) for i in range(2, 9)]
    assert mechanism.nearest_first(q, k) == pytest.approx(np.mean(hits))


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
