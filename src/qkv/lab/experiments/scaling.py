"""Experiment on the division of scores by √d: softmax of random scores, and models trained with other scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.lab.experiments.base import (
    FAILS,
    HOLDS,
    Conclusion,
    Experiment,
    Results,
    Setting,
    Verdict,
    holds_if,
    larger,
    summary,
)
from qkv.lab.task import Measured
from qkv.lab.tasks.backcopy import Backcopy
from qkv.models import DecoderConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
SMALL, UNIT = "small initial weights", "unit-variance q, k"  # as GPT-2 is initialised; as the argument for √d assumes
TRAINED = (64, 512)  # head sizes
RANDOM = "random scores"
LEAST = 0.02  # nats; smaller differences of losses are ignored
SHARP = 0.1  # attention counts as collapsed to one key if entropy / ln(visible keys) is below this


class Scaling(Experiment):
    """Softmax of random scores at head dimension d, and Bigram-Backcopy at two head dimensions and three scales."""

    name = "scaling"
    question = "Does softmax saturate without the factor 1/√d, and does a model without it train worse?"
    claims = (
        "C014", "C015", "C016", "C017", "C018", "C019", "C022", "C023", "C157", "C172", "C184", "C185", "C186", "C236",
        "C250", "C251", "C252", "C253", "C254", "C321", "C322", "C337", "C381",
    )  # fmt: skip
    curves = ("check.entropy_ratio",)

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """Every scale at both head dimensions, from GPT-2's small initial weights and with q and k of unit variance."""
        dims = TRAINED[:1] if quick else TRAINED
        return {
            variant(scale, d, kind): [_setting(scale, d, kind, seed, quick) for seed in range(1 if quick else 3)]
            for kind in (SMALL, UNIT)
            for d in dims
            for scale in SCALES
        }

    def compute(self, quick: bool) -> Mapping[str, Sequence[Measured]]:
        """Statistics of random scores, see `random_scores`."""
        return {RANDOM: [random_scores(seed, ROWS) for seed in range(1 if quick else 3)]}

    def conclude(self, results: Results) -> Conclusion:
        """Claims about scores by statistics of random scores; claims about training by excess loss and entropy."""
        verdicts = [*_score_verdicts(results), *_training_verdicts(results)]
        verdicts.sort(key=lambda v: v.claim)
        d = max(_dims(results))
        rises = {kind: _loss_rise(results, d, kind) for kind in (SMALL, UNIT)}
        harmed = [kind for kind, (worse, _) in rises.items() if worse]
        if len(harmed) == 2:
            end = "a model without 1/√d trains worse"
        elif harmed:
            end = f"training is worse only with {harmed[0]}"
        else:
            end = "a model without 1/√d trains as well here"
        title = f"Unscaled scores saturate softmax as d grows; {end}"
        paragraph = " ".join(f"{v.claim} {v.holds}: {v.text}" for v in verdicts)
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """Top weight and Jacobian over d; the loss of trained models by scale and head dimension."""
        from qkv.lab import draw

        note = (
            f"Above: q, k with independent N(0, 1) entries, {KEYS} keys. Below: Bigram-Backcopy, 1 layer × 1 head; "
            "dots are "
            f"seeds, bars their mean; loss over that of the generating chain. {results.note}"
        )
        figure, panels = draw.panels(self.conclude(results).title, note, columns=2, rows=2, width=8.8, height=2.7)
        found = [o.measured for o in results.finished(RANDOM)]
        for axes, entry, label in zip(
            panels, ("top", "jacobian"), ("mean top weight", "mean norm of the Jacobian"), strict=False
        ):
            draw.curves(axes, DIMS, {s: [m["scales"][s][entry] for m in found] for s in SCALES}, markers=True)
            axes.set_xscale("log", base=2)
            axes.set_xticks(DIMS, [str(d) for d in DIMS])
            axes.set(xlabel="d (numbers in a query)", ylabel=label, ylim=(0, None))
        panels[0].axhline(1 / KEYS, color=draw.MUTED, linewidth=0.8, linestyle=":")
        panels[0].legend(fontsize=8, frameon=False)
        dims = _dims(results)
        most = 0.0
        for axes, kind in zip(panels[2:], (SMALL, UNIT), strict=True):
            by_name = {
                f"{scale}\nd = {d}": results.values(variant(scale, d, kind), "evaluation.excess")
                for d in dims
                for scale in SCALES
                if results.finished(variant(scale, d, kind))
            }
            draw.by_seed(axes, by_name)
            most = max(most, *(max(values) for values in by_name.values()))
            axes.tick_params(axis="x", labelsize=7)
            axes.set_title(kind, loc="left", size=9)
            axes.set_ylabel("excess loss (nats a token)")
        for axes in panels[2:]:
            axes.set_ylim(0, 1.1 * most)
        return figure


def variant(scale: str, d: int, kind: str) -> str:
    """The name of a variant."""
    return f"{scale}, d = {d}, {kind}"


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


def _score_verdicts(results: Results) -> list[Verdict]:
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
    return [
        Verdict("C014", holds_if(off < 0.05), is_d),
        Verdict(
            "C015",
            holds_if(abs(slope - 0.5) < 0.02),
            f"The slope of ln deviation by ln d is {slope:.3f}; it holds within 0.02 of 0.5.",
        ),
        Verdict(
            "C016",
            holds_if(bool((np.diff(top) > 0).all())),
            f"The mean top weight of {KEYS} grows from {top[0]:.2f} at d = {DIMS[0]} to {top[-1]:.2f} at d = "
            f"{DIMS[-1]}; it holds if it grows with every d.",
        ),
        Verdict(
            "C017",
            holds_if(near_zero < 0.05 * start),
            f"Rows with a top weight above {SATURATED} have a Jacobian of norm {near_zero:.4f}; it holds below 5 % of "
            f"{start:.3f}, that of scaled scores. It is of such rows alone: {fell}.",
        ),
        Verdict("C019", holds_if(one < 0.05), back.capitalize()),
        Verdict(
            "C022",
            holds_if(cooled["0.5"] < cooled["1.0"] < cooled["2.0"]),
            f"Entropy of 16 weights at temperatures 0.5, 1 and 2 is {cooled['0.5']:.2f}, {cooled['1.0']:.2f} and "
            f"{cooled['2.0']:.2f} nats; it holds if it rises.",
        ),
        Verdict(
            "C023",
            holds_if(crossing < 0),
            f"The greatest entry off the diagonal of the Jacobian, −pᵢpⱼ, is {crossing:.1e}; it holds if it is "
            "negative.",
        ),
        Verdict(
            "C157",
            holds_if(half and hidden == 0),
            f"Half precision {'takes' if half else 'refuses'} −1e9 as a score, and a row of nothing but −1e9 has "
            f"weights of {hidden:.2f}; it holds if it can be written and gives such a row no weight.",
        ),
        Verdict("C172", holds_if(norm[at] < 0.05 * start), f"{fell[0].upper()}{fell[1:]}; it holds below 5 %."),
        Verdict("C184", holds_if(off < 0.05 and one < 0.05), f"{is_d} Then {back}"),
        Verdict(
            "C185",
            holds_if(inside >= 0.99),
            f"{inside:.1%} of scores lie within ±30 at d = 512, where their deviation is {math.sqrt(512):.1f}; it "
            "holds at 99 % or more.",
        ),
        Verdict(
            "C186",
            holds_if(min(tops512.values()) >= 0.85),
            f"At d = 512 the mean top weight of {sizes} keys is {listed512}; it holds at 0.85 or more.",
        ),
        Verdict(
            "C250",
            holds_if(bool(best[at] >= mean("slope", ROOT)[at])),
            f"The slope of the greatest weight by its own score, p(1 − p), falls from {mean('slope', ROOT)[at]:.3f} "
            f"scaled to {best[at]:.3f} unscaled at d = 64; it holds if it does not fall.",
        ),
        Verdict("C252", holds_if(one < 0.05), back.capitalize()),
        Verdict(
            "C253",
            holds_if(bool(np.abs(whole * dims - 1).max() < 0.05) and flat < 1.5 * even),
            f"Scores / d have variance 1/d within {np.abs(whole * dims - 1).max():.1%}, and a mean top weight of "
            f"{flat:.3f} at d = 64, where even weights are {even:.3f}; it holds within 5 % and 1.5 times.",
        ),
        Verdict(
            "C321",
            holds_if(min(tops64.values()) >= 0.95),
            f"At d = 64 the mean top weight of {sizes} keys is {listed64}; it holds at 0.95 or more.",
        ),
    ]


def _training_verdicts(results: Results) -> list[Verdict]:
    dims = _dims(results)
    d, least_d = dims[-1], dims[0]
    rise = {kind: _loss_rise(results, d, kind) for kind in (SMALL, UNIT)}
    small = {kind: _loss_rise(results, least_d, kind) for kind in (SMALL, UNIT)}
    sharp = {kind: _entropies(results, UNSCALED, d, kind) for kind in (SMALL, UNIT)}
    soft = {kind: _entropies(results, ROOT, d, kind) for kind in (SMALL, UNIT)}
    losses = "; ".join(
        f"{kind}: " + ", ".join(f"{s} {_loss(results, s, d, kind)}" for s in SCALES) for kind in (SMALL, UNIT)
    )
    spreads = "; ".join(
        f"{kind}: {summary(sharp[kind])} unscaled, {summary(soft[kind])} with 1/√d" for kind in (SMALL, UNIT)
    )
    excess = f"Excess losses (nats) at d = {d}: {losses}."
    both = "It holds if, from both starts,"
    collapsed = all(sharp[k] and max(sharp[k]) < SHARP for k in (SMALL, UNIT))
    worse = [kind for kind in (SMALL, UNIT) if rise[kind][0]]
    which = f"The unscaled loss is higher with {' and '.join(worse)}." if worse else "The unscaled loss is not higher."
    grows = [k for k in worse if rise[k][1] > small[k][1] + LEAST]
    flat = [
        kind
        for kind in (SMALL, UNIT)
        if larger(_values(results, WHOLE, d, kind), _values(results, ROOT, d, kind), LEAST)
        and min(_values(results, WHOLE, d, kind, "backcopy_accuracy")) < 0.9
    ]
    accuracy = {kind: _values(results, UNSCALED, d, kind, "backcopy_accuracy") for kind in (SMALL, UNIT)}
    able = {kind: _values(results, ROOT, d, kind, "backcopy_accuracy") for kind in (SMALL, UNIT)}
    fails = [k for k, values in accuracy.items() if not values or min(values) < 0.5 or _diverged(results, d, k)]
    stuck = [k for k in fails if able[k] and min(able[k]) >= 0.5]
    copied = "; ".join(f"{kind} {summary(v)}" for kind, v in accuracy.items() if v)
    root_copied = "; ".join(f"{kind} {summary(v)}" for kind, v in able.items() if v)
    flat_copied = "; ".join(
        f"{kind} {summary(_values(results, WHOLE, d, kind, 'backcopy_accuracy'))}" for kind in (SMALL, UNIT)
    )
    entropy = f"Entropy divided by that of uniform weights, after training at d = {d}: {spreads}."
    return [
        Verdict("C018", holds_if(collapsed), f"{entropy} {both} it is below {SHARP} unscaled for every seed."),
        Verdict(
            "C236",
            holds_if(collapsed and len(worse) == 2),
            f"{entropy} {excess} {both} the unscaled entropy is below {SHARP} and the unscaled loss is higher.",
        ),
        Verdict(
            "C251",
            holds_if(collapsed and len(worse) == 2),
            f"{entropy} {excess} {which} {both} the unscaled entropy is below {SHARP} and the unscaled model has a "
            "higher loss or diverges.",
        ),
        Verdict(
            "C254",
            holds_if(len(flat) == 2),
            f"With 1/d triggers are copied at a rate of: {flat_copied}. {excess} {both} this rate is below "
            f"0.9 in some run and the loss is higher than with 1/√d by more than {LEAST} nats and the spread over "
            "seeds.",
        ),
        Verdict(
            "C322",
            holds_if(len(worse) == 2),
            f"{excess} {which} {both} the unscaled loss is higher by more than {LEAST} nats and the spread over seeds, "
            "or the unscaled model diverges.",
        ),
        Verdict(
            "C337",
            holds_if(len(grows) == 2),
            f"{excess} {which} At d = {least_d} the difference of means is {small[SMALL][1]:.3f} and "
            f"{small[UNIT][1]:.3f}, at d = {d} {rise[SMALL][1]:.3f} and {rise[UNIT][1]:.3f}. {both} the "
            f"unscaled loss is higher, and the difference exceeds that at the smaller d by more than {LEAST} nats.",
        ),
        Verdict(
            "C381",
            HOLDS if stuck else FAILS,
            f"At d = {d} triggers are copied at a rate of, unscaled: {copied}; with 1/√d: {root_copied}. It holds if, "
            "from one of the starts, every run with 1/√d copies half or more, and some run without diverges or copies "
            "fewer.",
        ),
    ]


def _dims(results: Results) -> list[int]:
    return [d for d in TRAINED if variant(ROOT, d, SMALL) in results.variants]


def _values(results: Results, scale: str, d: int, kind: str, entry: str = "excess") -> list[float]:
    return results.values(variant(scale, d, kind), f"evaluation.{entry}")


def _loss(results: Results, scale: str, d: int, kind: str) -> str:
    values = _values(results, scale, d, kind)
    return summary(values, 3) if values else "diverged"


def _entropies(results: Results, scale: str, d: int, kind: str) -> list[float]:
    return [float(np.mean(o.check["entropy_ratio"])) for o in results.finished(variant(scale, d, kind))]


def _diverged(results: Results, d: int, kind: str) -> bool:
    return any(o.diverged is not None for o in results.variants[variant(UNSCALED, d, kind)])


def _loss_rise(results: Results, d: int, kind: str) -> tuple[bool, float]:
    """Whether the unscaled model has a higher loss than the one with 1/√d, and the difference of their mean losses."""
    unscaled, scaled = (_values(results, s, d, kind) for s in (UNSCALED, ROOT))
    if _diverged(results, d, kind):
        return True, math.inf
    return larger(unscaled, scaled, LEAST), float(np.mean(unscaled) - np.mean(scaled))


def _setting(scale: str, d: int, kind: str, seed: int, quick: bool) -> Setting:
    config = DecoderConfig(
        layers=1, heads=1, d_model=64, head_dim=d, qk_norm=kind == UNIT,
        score_scale=None if scale == ROOT else SCALES[scale](d),
    )  # fmt: skip
    some: dict[str, Any] = {"steps": 20, "warmup": 5} if quick else {"steps": 600, "warmup": 50, "evaluate_every": 200}
    return Setting(Backcopy(length=32, model=config), replace(Backcopy.training(), seed=seed, batch=16, **some))
