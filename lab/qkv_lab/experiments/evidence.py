"""Verdicts with power: an interval for an effect, and the outcome of a claim by comparing the interval with a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from qkv.profiler.data.frames import confidence

Holds = Literal["holds", "does not hold", "holds only when", "undecided", "not seen at this scale"]
HOLDS: Holds = "holds"
FAILS: Holds = "does not hold"
ONLY: Holds = "holds only when"
UNDECIDED: Holds = "undecided"
UNSEEN: Holds = "not seen at this scale"

ERROR = 0.05
"""The probability that an interval misses the mean."""


@dataclass(frozen=True)
class Criterion:
    """What decides a claim. It is written down, with its date, before the runs that decide the claim."""

    claim: str
    """The number of the claim: C078."""
    dated: str
    """The day on which the criterion was written, such as 2026-11-23."""
    effect: str
    """The quantity with one value per seed, in words: what is measured, in which unit, minus what."""
    bound: float
    """The claim holds if the mean over seeds is above this bound."""
    above: bool = True
    """False if the claim holds *below* the bound."""
    ratio: bool = False
    """Whether the effect is a ratio: its mean is the geometric mean."""
    parts: bool = False
    """What several effects are: parts of the claim, of which each must hold, or (by default) conditions of a claim that
    is said to hold under all of them, such as models or sizes."""
    remark: str = ""
    """A sentence to put after those of the verdict. ``{check.sink}`` becomes the mean of this entry in every variant
    that has it, ``{check.sink of plain}`` that in one variant. Without a number there is no sentence."""


@dataclass(frozen=True)
class Effect:
    """One number per seed (or text), under one condition."""

    condition: str
    values: Sequence[float]
    unless: str = ""
    """Why the effect does not count, such as "elu learnt its task in 1 of 10 runs"."""
    bound: float | None = None
    """A bound of its own, in place of the criterion's."""
    above: bool | None = None
    """A direction of its own, in place of the criterion's."""
    premise: bool = False
    """Whether it is what the claim presupposes, such as that there is a sink: without it the claim cannot be seen."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of the mean of an effect."""

    condition: str
    n: int
    """The number of seeds."""
    mean: float
    low: float
    high: float
    bound: float
    above: bool
    unless: str = ""
    premise: bool = False

    @property
    def clears(self) -> bool | None:
        """True if all of the interval is on the claim's side of the bound, False if none of it is, None otherwise."""
        if self.low > self.bound:
            return self.above
        if self.high < self.bound:
            return not self.above
        return None


@dataclass(frozen=True)
class Verdict:
    """The verdict on one claim of the sources."""

    claim: str
    """Its number in the list of claims: C078."""
    holds: Holds
    text: str
    """The numbers and the criterion."""
    intervals: tuple[Interval, ...] = ()
    criterion: Criterion | None = None

    def as_dict(self) -> dict[str, Any]:
        """The entries of a file; the remark of the criterion is in the text."""
        found = asdict(self)
        if found["criterion"]:
            del found["criterion"]["remark"]
        return found


def judge(
    criterion: Criterion, effects: Sequence[Effect], level: float = 1 - ERROR, remark: str = "", unit: str = "seed"
) -> Verdict:
    """The verdict on a claim from its effects.

    Each effect has a confidence interval of its mean. The claim *holds* if every interval lies on its side of the
    bound, and *does not hold* if every interval lies on the other side, or, if the effects are parts of the claim, any.
    If some lie here and some there, it *holds only when*. If an interval that matters contains the bound, the claim is
    *undecided*. It is *not seen at this scale* if a premise fails, or if no effect counts.

    Args:
        criterion: what decides the claim.
        effects: one or more; those that do not count are reported, and have no influence.
        level: the level of each interval.
        remark: sentences to put after the numbers.
        unit: what each value is of, in the singular: a seed, or a text.

    >>> lower = Criterion("C1", "2026-11-23", "Loss with the sink minus loss without", bound=-0.1, above=False)
    >>> judge(lower, [Effect("", [-0.31, -0.28, -0.35])]).holds
    'holds'
    >>> judge(lower, [Effect("", [-0.31, 0.18, -0.05])]).text
    'Loss with the sink minus loss without: -0.06 (95 % interval -0.67 to 0.55, 3 seeds). The claim holds below -0.1.'
    """
    found = [(effect, _interval(criterion, effect, level)) for effect in effects]
    premises = [(e, i) for e, i in found if e.premise]
    counted = [(e, i) for e, i in found if not e.premise and not i.unless]
    states = [i.clears for _, i in counted]
    if any(i.clears is False for _, i in premises) or not counted:
        holds = UNSEEN
    elif any(i.clears is None for _, i in premises):
        holds = UNDECIDED
    elif False in states and (criterion.parts or (True not in states and None not in states)):
        holds = FAILS
    elif False in states and True in states:
        holds = ONLY
    elif None in states:
        holds = UNDECIDED
    else:
        holds = HOLDS
    text = " ".join(filter(None, [_text(criterion, [i for _, i in found], level, unit), remark]))
    return Verdict(criterion.claim, holds, text, tuple(i for _, i in found), criterion)


def _interval(criterion: Criterion, effect: Effect, level: float) -> Interval:
    values = list(effect.values)
    if not values:
        mean, low, high = math.nan, -math.inf, math.inf
    elif criterion.ratio and not effect.premise:
        mean, low, high = (math.exp(x) for x in confidence([math.log(x) for x in values], level))
    else:
        mean, low, high = confidence(values, level)
    bound = criterion.bound if effect.bound is None else effect.bound
    above = criterion.above if effect.above is None else effect.above
    reason = effect.unless or ("" if values else "no run was finished")
    return Interval(effect.condition, len(values), mean, low, high, bound, above, reason, effect.premise)


def number(value: float) -> str:
    """A number for a sentence: two decimals, or two significant digits if it is smaller than 0.1.

    >>> number(0.84214), number(12.3456), number(-0.00123), number(0.0)
    ('0.84', '12.35', '-0.0012', '0')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "none"
    if value == 0:
        return "0"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def shown(interval: Interval) -> str:
    """The mean and the ends of an interval as text: ``"0.84 (0.83 to 0.85)"``."""
    if interval.n == 0:
        return "no number"
    if not math.isfinite(interval.low):
        return number(interval.mean)
    return f"{number(interval.mean)} ({number(interval.low)} to {number(interval.high)})"


def _text(criterion: Criterion, found: Sequence[Interval], level: float, unit: str) -> str:
    """The sentences of a verdict: effect, intervals, criterion, and what does not count."""
    parts = []
    premises = [i for i in found if i.premise]
    counted = [i for i in found if not i.premise and not i.unless]
    if counted:
        sizes = sorted({i.n for i in counted})
        seeds = f"{sizes[0]}–{sizes[-1]} {unit}s" if len(sizes) > 1 else f"{sizes[0]} {unit}{'s' * (sizes[0] != 1)}"
        how = f"{100 * level:.3g} % interval"
        if len(counted) == 1 and not counted[0].condition:
            one = counted[0]
            inside = f"{how} {number(one.low)} to {number(one.high)}, {seeds}" if one.n > 1 else seeds
            parts.append(f"{criterion.effect}: {number(one.mean)} ({inside}).")
        else:
            each = ", ".join(
                f"{i.condition} {shown(i)}{own_bound(i, criterion.bound, criterion.above)}" for i in counted
            )
            parts.append(f"{criterion.effect} (mean, {how}, {seeds}): {each}.")
    else:
        parts.append(f"{criterion.effect}.")
    parts.append(f"The claim holds {side(criterion.above)} {criterion.bound:g}.")
    parts += [
        f"It presupposes {i.condition} {side(i.above)} {i.bound:g}, which is {shown(i)}." for i in premises if i.n
    ]
    if left := [f"{i.condition} ({i.unless})" if i.condition else i.unless for i in found if i.unless]:
        parts.append(f"Not counted: {', '.join(left)}.")
    return " ".join(parts)


def side(above: bool) -> str:
    """The side of a bound in words."""
    return "above" if above else "below"


def own_bound(one: Interval, bound: float, above: bool) -> str:
    """The bound of an interval in words if it is not that of the criterion."""
    if (one.bound, one.above) == (bound, above):
        return ""
    return f" [must be {side(one.above)} {one.bound:g}]"
