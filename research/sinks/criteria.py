"""The criteria of the claims about sinks, written down before the first model was measured; means of ratios.

One was made stricter later, as its date says: C067 asked for 100 times the median, and now for what `qkv profile` and
Sun et al. 2024 (arXiv:2402.17762, §2) call massive.

Definitions that all criteria share:

- α of a head: its mean weight on the first token over the queries that see it (Gu et al. 2025, arXiv:2410.10781,
  eq. 4).
- The *sink heads* are the heads with α > 0.3, the *strongest head* is that with the largest α. They are chosen on texts
  of their own, and measured on others, so that the choice does not bias the measurement.
- Each effect has one value per text: the mean over the sink heads, a geometric mean where the effect is a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from qkv.profiler.capture.residual import TIMES_MEDIAN
from qkv_lab.experiments.evidence import Criterion

TINY = 1e-9
"""A number below it counts as this much, so that every ratio has a logarithm."""


def ratio(above: float, below: float) -> float:
    """One number divided by another.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.25, 1.0)
    """
    return max(float(above), TINY) / max(float(below), TINY)


def geometric(ratios: Sequence[float]) -> float:
    """The geometric mean.

    >>> geometric([0.5, 2.0])
    1.0
    """
    return geometric_mean([max(x, TINY) for x in ratios])


DATED = "2026-11-23"

SINK = 0.3
"""ε of Gu et al. 2025: a head with a larger α has a sink."""
OFTEN, NEARLY_ALL = 0.5, 0.9
UNIFORM = 0.95
"""Rows are near uniform if their entropy is more than this share of the largest possible."""
PEAK = 10.0
"""A dimension of the first token's state is a peak if a block has moved it by more than this multiple of the median."""
DRAINED = 0.5
HEAVY, LIGHT = 0.7, 0.3
"""Rows with more than the one and less than the other weight on the first token."""
LITTLE, BARELY = 0.1, 0.05
"""Relative to the norm of the residual: of what a head adds, and of the movement after a change of one token."""
TIMES = 1.5
"""The least ratio of the movement without the sink to that with it."""

CRITERIA = {
    criterion.claim: criterion
    for criterion in (
        Criterion("C061", DATED, "Weight on the first token of the strongest head", SINK),
        Criterion(
            "C062",
            DATED,
            "Share of other first tokens to which the sink heads give more than 0.3 of their weight",
            NEARLY_ALL,
        ),
        Criterion(
            "C063",
            DATED,
            "Share of the queries after the first that give the first token more than 0.3, in the strongest head",
            OFTEN,
        ),
        Criterion(
            "C064",
            DATED,
            "The same architecture with random weights: the entropy of its rows as a share of that of uniform rows, "
            "and the largest weight on the first token of any head",
            UNIFORM,
            parts=True,
        ),
        Criterion("C065", DATED, "Weight of the sink heads on the first token before random tokens", SINK),
        Criterion(
            "C067",
            "2026-11-25",
            "Largest magnitude at the first token after any block, divided by the median magnitude of the text, alone, "
            "and divided by the largest magnitude at the other tokens",
            TIMES_MEDIAN,
            ratio=True,
            parts=True,
        ),
        Criterion(
            "C068",
            DATED,
            "Norm of the first value divided by the mean norm of the others, in the sink heads",
            DRAINED,
            above=False,
            ratio=True,
        ),
        Criterion(
            "C069",
            DATED,
            "Share of the queries after the first whose cosine with the first key is the largest of all visible keys, "
            "in the sink heads",
            NEARLY_ALL,
        ),
        Criterion(
            "C070",
            DATED,
            "Norm of the first key divided by the mean norm of the others, in the sink heads; below 1 the angle alone "
            "makes the dot product large",
            1.0,
            above=False,
            ratio=True,
        ),
        Criterion(
            "C073",
            DATED,
            "Weight of later sink heads on the first token whose peaks are replaced by the mean of other tokens",
            SINK,
            above=False,
        ),
        Criterion(
            "C074",
            DATED,
            "Movement of the other tokens after a change of one token, without the sink divided by with it",
            TIMES,
            ratio=True,
        ),
        Criterion(
            "C075",
            DATED,
            "Norm of what a head adds on rows with more than 0.7 on the first token, divided by that on rows of the "
            "same head with less than 0.3",
            DRAINED,
            above=False,
            ratio=True,
        ),
        Criterion(
            "C076",
            DATED,
            "Norm of what a head adds on rows with more than 0.7 on the first token, relative to the residual, and "
            "divided by the same on rows of the same head with less than 0.3",
            LITTLE,
            above=False,
            ratio=True,
            parts=True,
        ),
        Criterion(
            "C077",
            DATED,
            "Movement of the other tokens after a change of one token, relative to their norm, and the same without "
            "the sink divided by with it",
            BARELY,
            above=False,
            ratio=True,
            parts=True,
        ),
    )
}
"""The criterion of each claim, by its number."""
