"""Experiment on the division of scores by √d: models trained with other scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.models import DecoderConfig
from qkv_lab.experiments.base import Experiment, Results, Setting, paired
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect, Verdict
from qkv_lab.experiments.random_scores import ROOT, SCALES, UNSCALED, WHOLE
from qkv_lab.experiments.sinks import DATED
from qkv_lab.tasks.backcopy import Backcopy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL, UNIT = "small initial weights", "unit-variance q, k"  # as GPT-2 is initialised; as the argument for √d assumes
STARTS = (SMALL, UNIT)
TRAINED = (64, 512)  # head sizes
LEAST = 0.02  # nats; smaller differences of losses do not count as an effect
SHARP = 0.1  # attention counts as collapsed to one key if entropy / ln(visible keys) is below this
LOSS, ACCURACY = "evaluation.excess", "evaluation.backcopy_accuracy"
RATIO = "Entropy of the weights divided by that of uniform weights, after training at d = 512 without a scale"
RISE = "Loss (nats) without a scale minus that with 1/√d, at d = 512"


class Scaling(Experiment):
    """Bigram-Backcopy at two head dimensions, three scales and two kinds of initial weights."""

    name = "scaling"
    question = "Does a model without the factor 1/√d train worse?"
    criteria = (
        Criterion("C018", DATED, RATIO, SHARP, above=False),
        Criterion("C236", DATED, f"{RATIO}, and the rise of the loss", SHARP, above=False, parts=True),
        Criterion("C251", DATED, f"{RATIO}, and the rise of the loss", SHARP, above=False, parts=True),
        Criterion("C254", DATED, "With 1/d at d = 512: share of triggers that are copied, and loss (nats) minus that "
                  "with 1/√d", 0.9, above=False, parts=True),
        Criterion("C322", DATED, RISE, LEAST),
        Criterion("C337", DATED, f"{RISE}, minus the same difference at d = 64", LEAST),
        Criterion("C381", DATED, "Share of triggers that are copied with 1/√d minus that without a scale, at d = 512",
                  0.1),
    )  # fmt: skip
    looks = (10, 20)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """Every scale at both head dimensions, from GPT-2's small initial weights and with q and k of unit variance."""
        dims = TRAINED[:1] if quick else TRAINED
        return {
            variant(scale, d, kind): _setting(scale, d, kind, seed, quick)
            for kind in STARTS
            for d in dims
            for scale in SCALES
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By loss, accuracy and entropy, for each kind of initial weights."""
        d = _dims(results)[-1]
        least = _dims(results)[0]
        sharp = [Effect(kind, _entropies(results, d, kind), (variant(UNSCALED, d, kind),)) for kind in STARTS]
        rises = [_minus(results, LOSS, (UNSCALED, d), (ROOT, d), kind) for kind in STARTS]
        both = [*sharp, *(replace(x, condition=f"loss, {x.condition}", bound=LEAST, above=True) for x in rises)]
        flat = [
            Effect(f"copied, {kind}", results.values(variant(WHOLE, d, kind), ACCURACY), (variant(WHOLE, d, kind),))
            for kind in STARTS
        ]
        slower = (_minus(results, LOSS, (WHOLE, d), (ROOT, d), kind) for kind in STARTS)
        flat += [replace(x, condition=f"loss, {x.condition}", bound=LEAST, above=True) for x in slower]
        grows = []
        for kind, rise in zip(STARTS, rises, strict=True):
            small = _by_seed(results, LOSS, (UNSCALED, least), (ROOT, least), kind)
            large = _by_seed(results, LOSS, (UNSCALED, d), (ROOT, d), kind)
            both_dims = (*rise.variants, *(variant(scale, least, kind) for scale in (UNSCALED, ROOT)))
            grows.append(replace(rise, values=paired(large, small), variants=both_dims))
        copied = [_minus(results, ACCURACY, (ROOT, d), (UNSCALED, d), kind) for kind in STARTS]
        return {
            "C018": sharp, "C236": both, "C251": both, "C254": flat, "C322": rises, "C337": grows, "C381": copied,
        }  # fmt: skip

    def remarks(self, results: Results) -> Mapping[str, str]:
        """Mean losses at both head dimensions, and how many runs diverged."""
        losses = []
        for d in _dims(results)[::-1]:
            of = [
                f"{kind}: " + ", ".join(f"{s} {_mean(results.values(variant(s, d, kind), LOSS))}" for s in SCALES)
                for kind in STARTS
            ]
            losses.append(f"at d = {d}: {'; '.join(of)}")
        runs = [outcome for outcomes in results.variants.values() for outcome in outcomes]
        failed = sum(outcome.diverged is not None for outcome in runs)
        text = f"Mean excess losses {'. And '.join(losses)}. Of {len(runs)} runs {failed or 'none'} diverged."
        return dict.fromkeys(("C236", "C251", "C254", "C322", "C337"), text)

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Whether the loss is higher without the scale."""
        worse, d = [i.condition for i in verdicts["C322"].intervals if i.clears], _dims(results)[-1]
        says = {
            HOLDS: f"At d = {d} a model without 1/√d trains worse",
            ONLY: f"At d = {d} a model without 1/√d trains worse only with {' and '.join(worse)}",
            FAILS: f"At d = {d} a model without 1/√d trains as well",
        }
        start = says.get(verdicts["C322"].holds, "Whether a model without 1/√d trains worse is undecided")
        return f"{start} ({results.seeds} seeds)"

    def figure(self, results: Results) -> Figure:
        """The loss of trained models by scale and head dimension."""
        from qkv_lab import draw

        note = (
            "Bigram-Backcopy, 1 layer × 1 head; loss over that of the generating chain. Dots: seeds, joined by thin "
            f"lines; bars: mean and interval. {results.note}"
        )
        figure, panels = draw.panels(self.conclude(results).title, note, columns=2, width=8.8, height=2.9)
        dims = _dims(results)
        most = 0.0
        for axes, kind in zip(panels, STARTS, strict=True):
            by_name = {
                f"{scale}\nd = {d}": results.by_seed(variant(scale, d, kind), LOSS)
                for d in dims
                for scale in SCALES
                if results.finished(variant(scale, d, kind))
            }
            draw.by_seed(axes, by_name)
            most = max(most, *(max(values.values()) for values in by_name.values()))
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(kind, loc="left", size=9)
            axes.set_ylabel("excess loss (nats a token)")
        for axes in panels:
            axes.set_ylim(0, 1.1 * most)
        return figure


def variant(scale: str, d: int, kind: str) -> str:
    """The name of a variant."""
    return f"{scale}, d = {d}, {kind}"


def _dims(results: Results) -> list[int]:
    return [d for d in TRAINED if variant(ROOT, d, SMALL) in results.variants]


def _by_seed(results: Results, name: str, a: tuple[str, int], b: tuple[str, int], kind: str) -> dict[int, float]:
    one, other = (results.by_seed(variant(scale, d, kind), name) for scale, d in (a, b))
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def _minus(results: Results, name: str, a: tuple[str, int], b: tuple[str, int], kind: str) -> Effect:
    """The effect of one scale and head dimension minus another."""
    values = list(_by_seed(results, name, a, b, kind).values())
    return Effect(kind, values, tuple(variant(scale, d, kind) for scale, d in (a, b)))


def _entropies(results: Results, d: int, kind: str) -> list[float]:
    return [float(np.mean(o.check["entropy_ratio"])) for o in results.finished(variant(UNSCALED, d, kind))]


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}" if values else "none"


def _setting(scale: str, d: int, kind: str, seed: int, quick: bool) -> Setting:
    config = DecoderConfig(
        layers=1, heads=1, d_model=64, head_dim=d, qk_norm=kind == UNIT,
        score_scale=None if scale == ROOT else SCALES[scale](d),
    )  # fmt: skip
    some: dict[str, Any] = {"steps": 20, "warmup": 5} if quick else {"steps": 600, "warmup": 50, "evaluate_every": 200}
    return Setting(Backcopy(length=32, model=config), replace(Backcopy.training(), seed=seed, batch=16, **some))
