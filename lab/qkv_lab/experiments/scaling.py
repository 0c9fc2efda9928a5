"""Experiments: the scale 1/√d, and scores of random vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.models import DecoderConfig
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.results import Lines, Results
from qkv_lab.experiments.small import DATED, setting
from qkv_lab.task import Measured
from qkv_lab.tasks.backcopy import Backcopy

SMALL, UNIT = "small initial weights", "unit-variance q, k"  # as GPT-2 is initialised; as the argument for √d assumes
STARTS = (SMALL, UNIT)
TRAINED = (64, 512)  # head sizes
LEAST = 0.02  # nats; smaller differences of losses do not count as an effect
SHARP = 0.1  # attention counts as collapsed to one key if entropy / ln(visible keys) is below this
LOSS, ACCURACY = "evaluation.excess", "evaluation.backcopy_accuracy"
RATIO = "Entropy of the weights divided by that of uniform weights, after training at d = 512 without a scale"
RISE = "Loss (nats) without a scale minus that with 1/√d, at d = 512"
MEANS = "Mean excess losses: {evaluation.excess}."


class Scaling(Experiment):
    """Bigram-Backcopy at two head dimensions, three scales and two kinds of initial weights."""

    name = "scaling"
    question = "Does a model without the factor 1/√d train worse?"
    seeds = 20
    criteria = (
        Criterion("C018", DATED, RATIO, SHARP, above=False),
        Criterion("C236", DATED, f"{RATIO}, and the rise of the loss", SHARP, above=False, parts=True, remark=MEANS),
        Criterion("C251", DATED, f"{RATIO}, and the rise of the loss", SHARP, above=False, parts=True, remark=MEANS),
        Criterion("C254", DATED, "With 1/d at d = 512: share of triggers that are copied, and loss (nats) minus that "
                  "with 1/√d", 0.9, above=False, parts=True, remark=MEANS),
        Criterion("C322", DATED, RISE, LEAST, remark=MEANS),
        Criterion("C337", DATED, f"{RISE}, minus the same difference at d = 64", LEAST, remark=MEANS),
        Criterion("C381", DATED, "Share of triggers that are copied with 1/√d minus that without a scale, at d = 512",
                  0.1),
    )  # fmt: skip

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
        dims = [d for d in TRAINED if variant(ROOT, d, SMALL) in results.variants]
        least, d = dims[0], dims[-1]

        def gap(name: str, a: str, b: str, d: int = d) -> dict[str, pd.Series]:
            """The values with one scale minus those with another, by seed, for each kind of initial weights."""
            both = {kind: [results.by_seed(variant(scale, d, kind), name) for scale in (a, b)] for kind in STARTS}
            return {kind: (one - other).dropna() for kind, (one, other) in both.items()}

        def by_kind(values: Mapping[str, Any], what: str = "", bound: float | None = None) -> list[Effect]:
            above = None if bound is None else True
            return [Effect(f"{what}{kind}", list(x), bound=bound, above=above) for kind, x in values.items()]

        unscaled = {kind: results.rows(variant(UNSCALED, d, kind), "check.entropy_ratio") for kind in STARTS}
        sharp = by_kind({kind: x.mean((1, 2)) for kind, x in unscaled.items()})
        rise, before = gap(LOSS, UNSCALED, ROOT), gap(LOSS, UNSCALED, ROOT, least)
        both = [*sharp, *by_kind(rise, "loss, ", LEAST)]
        copied = {kind: results.values(variant(WHOLE, d, kind), ACCURACY) for kind in STARTS}
        return {
            "C018": sharp,
            "C236": both,
            "C251": both,
            "C254": [*by_kind(copied, "copied, "), *by_kind(gap(LOSS, WHOLE, ROOT), "loss, ", LEAST)],
            "C322": by_kind(rise),
            "C337": by_kind({kind: (rise[kind] - before[kind]).dropna() for kind in STARTS}),
            "C381": by_kind(gap(ACCURACY, ROOT, UNSCALED)),
        }


def variant(scale: str, d: int, kind: str) -> str:
    """The name of a variant."""
    return f"{scale}, d = {d}, {kind}"


def _setting(scale: str, d: int, kind: str, seed: int, quick: bool) -> Setting:
    config = DecoderConfig(
        layers=1, heads=1, d_model=64, head_dim=d, qk_norm=kind == UNIT,
        score_scale=None if scale == ROOT else SCALES[scale](d),
    )  # fmt: skip
    return setting(Backcopy(length=32, model=config), seed, quick, steps=600, warmup=50, batch=16)


DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
KEYS, ROWS = 10, 2000  # keys and rows of random scores; the sources use 10 keys
SIZES = (4, 10, 64, 512)  # numbers of keys
SATURATED = 0.99  # a row is saturated if its top weight is above this
SCALES: dict[str, Callable[[int], float]] = {
    "unscaled": lambda d: 1.0,
    "1/√d": lambda d: d**-0.5,
    "1/d": lambda d: 1 / d,
}
UNSCALED, ROOT, WHOLE = SCALES
RANDOM = "random scores"


class RandomScores(Experiment):
    """Softmax of scores q · k at head dimension d, where q and k have independent N(0, 1) entries."""

    name = "random_scores"
    question = "Does softmax saturate without the factor 1/√d?"
    claims = (
        "C014", "C015", "C016", "C017", "C019", "C022", "C023", "C157", "C172", "C184", "C185", "C186", "C250", "C252",
        "C253", "C321",
    )  # fmt: skip

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {RANDOM: random_scores(seed, ROWS)}

    def conclude(self, results: Results) -> list[Verdict]:
        """By the means over seeds, of 2,000 rows each."""
        return sorted(verdicts_of(results), key=lambda v: v.claim)

    def lines(self, results: Results) -> Lines:
        tops = {scale: results.rows(RANDOM, f"measured.scales.{scale}.top") for scale in SCALES}
        return Lines(DIMS, tops, "d (numbers in a query)", f"mean top weight of {KEYS} keys", log=True)


def jacobian_norm(scores: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
    """The Frobenius norm of softmax's Jacobian, diag(p) − p pᵀ, for each row.

    >>> jacobian_norm(torch.zeros(1, 2)).tolist()
    [0.5]
    """
    p = scores.softmax(-1)
    squares = (p**2).sum(-1)
    return (squares - 2 * (p**3).sum(-1) + squares**2).clamp(min=0).sqrt()


def random_scores(seed: int, rows: int) -> Measured:
    """Softmax statistics of scores q · k, where q and k have independent N(0, 1) entries.

    ``scales`` has, for each scale and by d: the ``variance`` of scores, the mean ``top`` weight, the mean ``entropy``
    (nats), the mean norm of the ``jacobian``, the mean ``slope`` of the top weight by its own score, p (1 − p), and the
    mean norm of the Jacobian of ``saturated`` rows (0 if there are none). ``tops`` and ``saturated`` are, by d and
    number of keys and without a scale, the mean top weight and the share of saturated rows.
    """
    generator = torch.Generator().manual_seed(seed)
    scales: dict[str, dict[str, list[float]]] = {s: {} for s in SCALES}
    for d in DIMS:
        q = torch.randn(rows, 1, d, generator=generator)
        raw = (q * torch.randn(rows, KEYS, d, generator=generator)).sum(-1)
        for name, scale in SCALES.items():
            for entry, value in _softmax_statistics(raw * scale(d)).items():
                scales[name].setdefault(entry, []).append(value)
    tops: dict[str, dict[str, float]] = {}
    beyond: dict[str, dict[str, float]] = {}
    inside = 0.0
    for n in SIZES:
        for d in (64, 512):
            raw = torch.randn(rows, n, generator=generator) * d**0.5  # scores of one query with |q|² = d
            top = raw.softmax(-1).amax(-1)
            tops.setdefault(str(d), {})[str(n)] = float(top.mean())
            beyond.setdefault(str(d), {})[str(n)] = float((top > SATURATED).float().mean())
            inside = float((raw.abs() <= 30).float().mean())
    warm = torch.randn(rows, 16, generator=generator)
    p = warm.double().softmax(-1)
    off = -(p[:, :, None] * p[:, None]) + torch.diag_embed(torch.full_like(p, -torch.inf))
    return {
        "scales": scales,
        "tops": tops,
        "saturated": beyond,
        "within_30": inside,
        "entropy_at": {str(t): float(_entropy((warm / t).softmax(-1)).mean()) for t in (0.5, 1.0, 2.0)},
        "greatest_off_diagonal": float(off.amax()),
        "half_takes_1e9": _fits_float16(-1e9),
        "hidden_row": float(torch.full((KEYS,), -1e9).softmax(-1).amax()),
    }


def _softmax_statistics(scores: Tensor) -> dict[str, float]:
    p = scores.softmax(-1)
    top, norm = p.amax(-1), jacobian_norm(scores.double())
    full = top > SATURATED
    return {
        "variance": float(scores.var()),
        "top": float(top.mean()),
        "entropy": float(_entropy(p).mean()),
        "jacobian": float(norm.mean()),
        "slope": float((top * (1 - top)).mean()),
        "saturated": float(norm[full].mean()) if full.any() else 0.0,
    }


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _fits_float16(value: float) -> bool:
    """True if float16 scores can be filled with a number."""
    try:
        torch.zeros(1, dtype=torch.float16).masked_fill(torch.tensor([True]), value)
    except RuntimeError:
        return False
    return True


def verdicts_of(results: Results) -> list[Verdict]:
    found = [o.measured for o in results.finished(RANDOM)]
    at = DIMS.index(64)

    def mean(entry: str, scale: str = UNSCALED) -> np.ndarray:
        return np.mean([m["scales"][scale][entry] for m in found], 0)

    def over(entry: str, key: str | None = None) -> dict[str, float]:
        parts = [m[entry] if key is None else m[entry][key] for m in found]
        return {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}

    dims = np.array(DIMS, float)
    variance, scaled, whole = mean("variance"), mean("variance", ROOT), mean("variance", WHOLE)
    slope = float(np.polyfit(np.log(dims), np.log(variance) / 2, 1)[0])
    off = float(np.abs(variance / dims - 1).max())
    one = float(np.abs(scaled - 1).max())
    top, norm, best = mean("top"), mean("jacobian"), mean("slope")
    start = float(mean("jacobian", ROOT)[at])
    near_zero = float(mean("saturated")[at])
    cooled = over("entropy_at")
    crossing = max(m["greatest_off_diagonal"] for m in found)
    inside = float(np.mean([m["within_30"] for m in found]))
    tops64, tops512 = over("tops", "64"), over("tops", "512")
    listed64, listed512 = (", ".join(f"{x:.2f}" for x in t.values()) for t in (tops64, tops512))
    sizes = ", ".join(map(str, SIZES))
    half = all(m["half_takes_1e9"] for m in found)
    hidden = float(np.mean([m["hidden_row"] for m in found]))
    even = 1 / KEYS
    flat = float(mean("top", WHOLE)[at])
    back = f"the variance of scores / √d is 1 within {one:.1%} at d = {DIMS[0]} … {DIMS[-1]}; it holds within 5 %."
    is_d = f"The variance of q·k is d within {off:.1%} at d = {DIMS[0]} … {DIMS[-1]}; it holds within 5 %."
    fell = f"the mean norm of the Jacobian is {norm[at]:.3f} unscaled at d = 64 and {start:.3f} with 1/√d ({KEYS} keys)"
    rows: list[tuple[str, bool, str]] = [
        ("C014", off < 0.05, is_d),
        ("C015", abs(slope - 0.5) < 0.02,
         f"The slope of ln deviation by ln d is {slope:.3f}; it holds within 0.02 of 0.5."),
        ("C016", bool((np.diff(top) > 0).all()),
         f"The mean top weight of {KEYS} grows from {top[0]:.2f} at d = {DIMS[0]} to {top[-1]:.2f} at d = "
         f"{DIMS[-1]}; it holds if it grows with every d."),
        ("C017", near_zero < 0.05 * start,
         f"Rows with a top weight above {SATURATED} have a Jacobian of norm {near_zero:.4f}; it holds below 5 % of "
         f"{start:.3f}, that of scaled scores. It is of such rows alone: {fell}."),
        ("C019", one < 0.05, back.capitalize()),
        ("C022", cooled["0.5"] < cooled["1.0"] < cooled["2.0"],
         f"Entropy of 16 weights at temperatures 0.5, 1 and 2 is {cooled['0.5']:.2f}, {cooled['1.0']:.2f} and "
         f"{cooled['2.0']:.2f} nats; it holds if it rises."),
        ("C023", crossing < 0,
         f"The greatest entry off the diagonal of the Jacobian, −pᵢpⱼ, is {crossing:.1e}; it holds if it is "
         "negative."),
        ("C157", half and hidden == 0,
         f"Half precision {'takes' if half else 'refuses'} −1e9 as a score, and a row of nothing but −1e9 has "
         f"weights of {hidden:.2f}; it holds if it can be written and gives such a row no weight."),
        ("C172", norm[at] < 0.05 * start, f"{fell[0].upper()}{fell[1:]}; it holds below 5 %."),
        ("C184", off < 0.05 and one < 0.05, f"{is_d} Then {back}"),
        ("C185", inside >= 0.99,
         f"{inside:.1%} of scores lie within ±30 at d = 512, where their deviation is {math.sqrt(512):.1f}; it "
         "holds at 99 % or more."),
        ("C186", min(tops512.values()) >= 0.85,
         f"At d = 512 the mean top weight of {sizes} keys is {listed512}; it holds at 0.85 or more."),
        ("C250", bool(best[at] >= mean("slope", ROOT)[at]),
         f"The slope of the greatest weight by its own score, p(1 − p), falls from {mean('slope', ROOT)[at]:.3f} "
         f"scaled to {best[at]:.3f} unscaled at d = 64; it holds if it does not fall."),
        ("C252", one < 0.05, back.capitalize()),
        ("C253", bool(np.abs(whole * dims - 1).max() < 0.05) and flat < 1.5 * even,
         f"Scores / d have variance 1/d within {np.abs(whole * dims - 1).max():.1%}, and a mean top weight of "
         f"{flat:.3f} at d = 64, where even weights are {even:.3f}; it holds within 5 % and 1.5 times."),
        ("C321", min(tops64.values()) >= 0.95,
         f"At d = 64 the mean top weight of {sizes} keys is {listed64}; it holds at 0.95 or more."),
    ]  # fmt: skip
    return [Verdict(claim, HOLDS if holds else FAILS, text) for claim, holds, text in rows]
