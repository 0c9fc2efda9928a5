"""The figure of a study: what its verdicts rest on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from qkv_lab import draw
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, UNDECIDED, UNSEEN
from research.sinks import panels
from research.sinks.criteria import SINK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from research.sinks.studies import Study

WORDS = {
    HOLDS: "hold",
    ONLY: "hold only in part",
    FAILS: "do not hold",
    UNDECIDED: "are undecided",
    UNSEEN: "cannot be seen",
}


def figure(study: Study) -> Figure:
    """Eight panels at the first length of a study, with a dot or a line for every text or head."""
    n, found = next(iter(study.lengths.items()))
    counts = Counter(verdict.holds for verdict in study.verdicts[n])
    title = ", ".join(f"{counts[holds]} {word}" for holds, word in WORDS.items() if counts[holds])
    texts = found["texts"]
    drawn, axes = draw.panels(
        f"Claims on attention sinks in {study.attrs['model']}: {title}",
        f"{n} tokens; {len(texts)} texts, each a dot. Sink heads: {len(found['heads'])} of "
        f"{sum(map(len, found['alpha']))}, chosen on other texts by a mean weight above {SINK} on the first token.",
        rows=2,
        columns=4,
        width=13.5,
        height=2.8,
    )
    panels.alpha_of_heads(axes[0], found)
    draws = (panels.weights, panels.norms, panels.magnitudes, panels.peaks, panels.moved, panels.cost, panels.added)
    for panel, of in zip(axes[1:], draws, strict=True):
        of(panel, texts)
    return drawn
