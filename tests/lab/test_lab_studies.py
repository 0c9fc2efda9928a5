"""The experiments streaming, overmixing, scaling and bottleneck."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import refused
from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loss import token_loss
from qkv_lab.experiments import bottleneck, mechanism, scaling, streaming
from qkv_lab.experiments.base import Conclusion, Outcome, Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNSEEN
from qkv_lab.experiments.run import run
from qkv_lab.tasks import backcopy
from qkv_lab.tasks.backcopy import Backcopy
from qkv_lab.tasks.translation import Translation


def model(seed: int = 0, **changes: object) -> DecoderLM:
    """A small model with large weights, so that its attention is not uniform."""
    torch.manual_seed(seed)
    made = DecoderLM(DecoderConfig(vocab_size=17, d_model=24, layers=3, heads=2, context=64, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for p in made.blocks.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return made.eval()


def texts(n: int, batch: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randint(17, (batch, n), generator=torch.Generator().manual_seed(seed))


def perplexity(lm: DecoderLM, ids: torch.Tensor, cache: Callable[[], Cache], chunk: int = 64) -> np.ndarray:
    """By position, from the loss that the experiment `streaming` measures."""
    return token_loss(lm, ids, cache, chunk=chunk).mean(0).exp().numpy()


def by_claim(conclusion: Conclusion) -> dict[str, str]:
    return {v.claim: v.holds for v in conclusion.verdicts}


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_loss_with_a_full_cache_is_the_models_loss(tied: bool, chunk: int) -> None:
    lm, ids = model(positions="rotary", tied=tied), texts(23)
    found = perplexity(lm, ids, lambda: Full(23), chunk=chunk)
    assert found.shape == (22,)
    with torch.no_grad():
        assert np.log(found).mean() == pytest.approx(float(lm.loss(ids)), abs=1e-5)
        first = lm.loss(ids[:, :2])  # also for a single position
    assert np.log(found)[0] == pytest.approx(float(first), abs=1e-5)


def test_sliding_cache_agrees_with_a_window_mask() -> None:
    lm, ids = model(positions="rotary"), texts(29)
    narrow = model(positions="rotary", window=5)
    narrow.load_state_dict(lm.state_dict())
    found = perplexity(lm, ids, lambda: Sliding(5), chunk=11)
    expected = perplexity(narrow, ids, lambda: Full(29))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    every = perplexity(lm, ids, lambda: Full(29))
    assert np.abs(found[:5] / every[:5] - 1).max() < 1e-5
    assert np.abs(found / every - 1).max() > 1e-3


def test_sinks_cache_agrees_with_a_full_one_until_it_evicts_for_any_chunk() -> None:
    lm, ids = model(positions="alibi"), texts(29)
    whole, parts = (perplexity(lm, ids, lambda: Sinks(2, 6), chunk=c) for c in (28, 3))
    every = perplexity(lm, ids, lambda: Full(29))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    np.testing.assert_allclose(whole[:8], every[:8], rtol=1e-5)


def test_perplexity_rejects_bad_input() -> None:
    with refused("ids"):
        perplexity(model(), texts(1), lambda: Full(4))
    with refused("chunk"):
        perplexity(model(), texts(4), lambda: Full(4), chunk=0)


def streamed(**rises: float) -> Results:
    def outcome(seed: int, up: float) -> Outcome:
        nats = {streaming.ALL: 2.0, streaming.WINDOW: 2.0 + up + 0.001 * seed, streaming.SINKS: 2.0}
        buckets = streaming.LENGTH // streaming.BUCKET
        measured = {"nats": {k: [x] * buckets for k, x in nats.items()}, "inside": nats, "beyond": nats}
        return Outcome(seed, {"backcopy_accuracy": 1.0}, measured=measured)

    names = {"plain": streaming.PLAIN, "sink": streaming.LEARNED, "key": streaming.KEY}
    return Results({names[k]: [outcome(s, up) for s in range(3)] for k, up in rises.items()})


@pytest.mark.parametrize(
    ("plain", "sink", "key", "expected"),
    [(0.05, 0.0, 0.0, HOLDS), (0.05, 0.05, 0.0, ONLY), (0.05, 0.05, 0.06, FAILS), (0.0, 0.0, 0.0, UNSEEN)],
)
def test_streaming_criterion(plain: float, sink: float, key: float, expected: str) -> None:
    results = streamed(plain=plain, sink=sink, key=key)
    found = streaming.Streaming().conclude(results)
    assert by_claim(found) == {"C101": expected}
    assert streaming.rise(results, streaming.PLAIN, streaming.SINKS) == {0: 0.0, 1: 0.0, 2: 0.0}


# --- over-mixing ------------------------------------------------------------------------------------------------------


def test_unchanged_and_earlier_tokens_do_not_move() -> None:
    lm, ids = model(), texts(19)
    assert (mechanism.movement(lm, ids, ids) == 0).all()
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 17
    for mask_first in (False, True):
        moved = mechanism.movement(lm, ids, changed, mask_first=mask_first)
        assert moved.shape == (4, 19)
        assert (moved[:, :6] == 0).all()  # the future cannot change the past
        assert (moved[0, 7:] == 0).all()  # embeddings do not depend on other tokens
        assert (moved[1:, 6:] > 1e-4).all()
    with refused("changed"):
        mechanism.movement(lm, ids, changed[:, 1:])


def test_masked_first_token_moves_nothing() -> None:
    lm, ids = model(), texts(19)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 17
    assert (mechanism.movement(lm, ids, changed, mask_first=True)[:, 1:] == 0).all()
    assert (mechanism.movement(lm, ids, changed)[1:, 1:] > 1e-4).all()  # the hooks were removed


def test_residual_stream_and_attention_output_are_the_models() -> None:
    lm, ids = model(), texts(11)
    with torch.no_grad():
        torch.testing.assert_close(lm.norm(mechanism.residual_stream(lm, ids)[-1]), lm.hidden(ids))
        before = mechanism.residual_stream(lm, ids)[0]
        added = lm.blocks[0].attention(lm.blocks[0].attention_norm(before))  # type: ignore[operator,union-attr]
    expected = (added.norm(dim=-1) / before.norm(dim=-1)).numpy()
    np.testing.assert_allclose(mechanism.output_ratio(lm, ids)[0], expected, rtol=1e-5)


def test_changed_texts_differ_in_one_ordinary_byte() -> None:
    task = Backcopy()
    ids, changed = mechanism.changed_texts(task)
    assert len(ids) == mechanism.MIXED
    differs = ids != changed
    assert differs[:, mechanism.CHANGED].all()
    assert int(differs.sum()) == len(ids)
    assert not task.is_trigger(changed[:, mechanism.CHANGED]).any()
    assert int(changed.max()) <= task.symbols


def mixed(kept: float, hidden: float, *, sink: float = 0.9, heavy: float | None = 0.05) -> Results:
    def outcome(seed: int) -> Outcome:
        far = {"sink kept": kept, "sink hidden": hidden * (1 + 0.01 * seed), "untrained": 0.01}
        moved = {case: [[x] * 64] * 4 for case, x in far.items()}
        measured = {"far": far, "moved": moved, "sink": sink, "added_heavy": heavy, "added_light": 0.2}
        return Outcome(seed, {"backcopy_accuracy": 1.0}, measured=measured)

    return Results({"trained": [outcome(seed) for seed in range(3)]})


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (mixed(0.01, 0.05), {"C074": HOLDS, "C076": HOLDS, "C077": HOLDS}),
        (mixed(0.2, 0.5, heavy=0.3), {"C074": HOLDS, "C076": FAILS, "C077": FAILS}),
        (mixed(0.01, 0.011), {"C074": FAILS, "C076": HOLDS, "C077": FAILS}),
        (mixed(0.01, 0.05, sink=0.1), {"C074": UNSEEN, "C076": UNSEEN, "C077": UNSEEN}),
        (mixed(0.01, 0.05, heavy=None), {"C074": HOLDS, "C076": UNSEEN, "C077": HOLDS}),  # no resting rows
    ],
)
def test_overmixing_criterion(results: Results, expected: dict[str, str]) -> None:
    assert by_claim(mechanism.Overmixing().conclude(results)) == expected


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_jacobian_norm_agrees_with_autograd() -> None:
    scores = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    for row, found in zip(scores, scaling.jacobian_norm(scores), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), row)
        torch.testing.assert_close(found, jacobian.norm())


@functools.cache
def scored() -> Results:
    """Real random scores of two seeds."""
    rows = [Outcome(s, measured=scaling.random_scores(s, 2000)) for s in range(2)]
    return Results({scaling.RANDOM: rows})


def excesses(**unit: float) -> Results:
    """Made-up training results; `unit` is the excess loss of the unscaled models."""
    variants: dict[str, list[Outcome]] = {}
    for kind in (scaling.SMALL, scaling.UNIT):
        for d in scaling.TRAINED:
            for scale in scaling.SCALES:
                bad = scale == scaling.UNSCALED and kind in (
                    scaling.UNIT,
                    *((scaling.SMALL,) if "small" in unit else ()),
                )
                loss = unit["unit"] * d / scaling.TRAINED[-1] if bad else 0.01
                rows = [
                    Outcome(
                        s,
                        evaluation={"excess": loss, "backcopy_accuracy": 1.0 if loss < 0.5 else 0.2},
                        check={"entropy_ratio": [[0.05 if bad else 0.5]]},
                    )
                    for s in range(3)
                ]
                variants[scaling.variant(scale, d, kind)] = rows
    return Results(variants)


def test_verdicts_on_random_scores() -> None:
    """The verdicts that depend on random scores alone, as in the list of claims."""
    found = by_claim(scaling.RandomScores().conclude(scored()))
    true = ("C014", "C015", "C016", "C017", "C019", "C022", "C023", "C184", "C186", "C252", "C253")
    assert {c for c in true if found[c] != HOLDS} == set()
    assert {c for c in ("C157", "C172", "C185", "C250", "C321") if found[c] != FAILS} == set()
    assert set(found) == set(scaling.RandomScores.claims)


@pytest.mark.parametrize(
    ("results", "held"),
    [
        (excesses(unit=0.01), set()),
        (excesses(unit=1.0), set()),
        (excesses(unit=1.0, small=1.0), {"C018", "C236", "C251", "C322", "C337", "C381"}),
    ],
)
def test_scaling_criterion(results: Results, held: set[str]) -> None:
    found = by_claim(scaling.Scaling().conclude(results))
    assert {c for c, outcome in found.items() if outcome == HOLDS} == held
    assert (found["C322"], found["C381"]) != (ONLY, HOLDS)


# --- the bottleneck ---------------------------------------------------------------------------------------------------


def translated(rnn: tuple[float, float], attention: tuple[float, float], accuracy: float = 0.9) -> Results:
    groups = len(Translation(max_words=bottleneck.LONGEST).groups)

    def rows(ends: tuple[float, float], check: dict[str, float]) -> list[Outcome]:
        line = np.linspace(*ends, groups)
        return [
            Outcome(
                seed,
                evaluation={
                    "exact_match_by_length": (line + 0.01 * seed).tolist(),
                    "bleu_by_length": (100 * line).tolist(),
                },
                check=check,
            )
            for seed in range(2)
        ]

    seen = {"best_accuracy": accuracy, "best_aer": 1 - accuracy}
    return Results({"rnn": rows(rnn, {}), "bahdanau": rows(attention, seen)})


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (translated((0.95, 0.2), (0.97, 0.9)), {"C001": HOLDS, "C325": HOLDS, "C326": HOLDS, "C370": HOLDS}),
        (translated((0.95, 0.94), (0.97, 0.96)), {"C001": FAILS, "C325": HOLDS, "C326": HOLDS, "C370": UNSEEN}),
        (translated((0.3, 0.1), (0.9, 0.6), 0.3), {"C001": FAILS, "C325": FAILS, "C326": FAILS, "C370": FAILS}),
    ],
)
def test_bottleneck_criterion(results: Results, expected: dict[str, str]) -> None:
    assert by_claim(bottleneck.Bottleneck().conclude(results)) == expected


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "results"),
    [
        (streaming.Streaming(), streamed(plain=0.05, sink=0.0, key=0.0)),
        (mechanism.Overmixing(), mixed(0.01, 0.05)),
        (scaling.Scaling(), excesses(unit=1.0)),
        (scaling.RandomScores(), scored()),
        (bottleneck.Bottleneck(), translated((0.95, 0.2), (0.97, 0.9))),
    ],
)
def test_conclusion_covers_all_claims_and_figure_has_labels(made: object, results: Results) -> None:
    found = made.conclude(results)  # type: ignore[attr-defined]
    assert [v.claim for v in found.verdicts] == list(made.claims)  # type: ignore[attr-defined]
    figure = made.figure(results)  # type: ignore[attr-defined]
    assert all(axes.get_xlabel() or axes.get_xticklabels() or axes.get_ylabel() for axes in figure.axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", [streaming.Streaming(), mechanism.Overmixing(), scaling.Scaling(), bottleneck.Bottleneck()]
)
def test_quick_form_gives_all_verdicts(made: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, held_out in ((backcopy, ("EVALUATED", "CHECKED")), (streaming, ("TEXTS",)), (mechanism, ("TEXTS",))):
        for name in held_out:
            monkeypatch.setattr(module, name, 8)  # texts: enough to run everything
    result = run(made, tmp_path, quick=True)  # type: ignore[arg-type]
    assert [v.claim for v in result.verdicts] == list(made.claims)  # type: ignore[attr-defined]
    assert result.figure_path.exists()
