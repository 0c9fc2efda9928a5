"""The claims about sinks as an experiment whose seeds are texts: criteria, and the effects that decide them.

The criteria were written down before the first model was measured. One was made stricter later, as its date says: C067
asked for 100 times the median, and now for what `qkv profile` and Sun et al. 2024 (arXiv:2402.17762, §2) call massive.

Definitions that all criteria share:

- α of a head: its mean weight on the first token over the queries that see it (Gu et al. 2025, arXiv:2410.10781,
  eq. 4).
- The *sink heads* are the heads with α > 0.3, the *strongest head* is that with the largest α. They are chosen on texts
  of their own, and measured on others, so that the choice does not bias the measurement.
- Each effect has one value per text: the mean over the sink heads, a geometric mean where the effect is a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, mean
from typing import Any

from qkv.profiler.capture.residual import MASSIVE, TIMES_MEDIAN
from qkv_lab.experiments.base import Experiment
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Outcome, Results

Found = Mapping[str, Any]
TINY = 1e-9
"""A number below it counts as this much, so that every ratio has a logarithm."""
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
MODEL = "model"
"""The variant: the model that is studied."""


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


class Sinks(Experiment):
    """The claims about sinks on one model, whose texts have one length.

    Args:
        found: what `research.sinks.measure.measure` returns.
        model: the name of the model.
    """

    name, question = "sinks", "Which claims about attention sinks hold on this model?"
    criteria = (
        Criterion("C061", DATED, "Weight on the first token of the strongest head", SINK,
                  remark=f"Share of all heads with more than {SINK}: {{measured.share_of_heads of {MODEL}}}."),
        Criterion("C062", DATED, "Share of other first tokens to which the sink heads give more than 0.3 of their "
                  "weight", NEARLY_ALL),
        Criterion("C063", DATED, "Share of the queries after the first that give the first token more than 0.3, in the "
                  "strongest head", OFTEN),
        Criterion("C064", DATED, "The same architecture with random weights: the entropy of its rows as a share of "
                  "that of uniform rows, and the largest weight on the first token of any head", UNIFORM, parts=True),
        Criterion("C065", DATED, "Weight of the sink heads on the first token before random tokens", SINK),
        Criterion("C067", "2026-11-25", "Largest magnitude at the first token after any block, divided by the median "
                  "magnitude of the text, alone, and divided by the largest magnitude at the other tokens",
                  TIMES_MEDIAN, ratio=True, parts=True,
                  remark=f"Sun et al. 2024 call an activation massive if it is above {MASSIVE:g} and about "
                         f"{TIMES_MEDIAN:,.0f} times the median or more."),
        Criterion("C068", DATED, "Norm of the first value divided by the mean norm of the others, in the sink heads",
                  DRAINED, above=False, ratio=True),
        Criterion("C069", DATED, "Share of the queries after the first whose cosine with the first key is the largest "
                  "of all visible keys, in the sink heads", NEARLY_ALL),
        Criterion("C070", DATED, "Norm of the first key divided by the mean norm of the others, in the sink heads; "
                  "below 1 the angle alone makes the dot product large", 1.0, above=False, ratio=True),
        Criterion("C073", DATED, "Weight of later sink heads on the first token whose peaks are replaced by the mean "
                  "of other tokens", SINK, above=False,
                  remark=f"With the peaks it is {{measured.peaks.kept of {MODEL}}}, with zeros in their place "
                         f"{{measured.peaks.zero of {MODEL}}}. With all peaks replaced, those of the embedding too, "
                         f"all sink heads have {{measured.all_peaks of {MODEL}}}."),
        Criterion("C074", DATED, "Movement of the other tokens after a change of one token, without the sink divided "
                  "by with it", TIMES, ratio=True),
        Criterion("C075", DATED, "Norm of what a head adds on rows with more than 0.7 on the first token, divided by "
                  "that on rows of the same head with less than 0.3", DRAINED, above=False, ratio=True),
        Criterion("C076", DATED, "Norm of what a head adds on rows with more than 0.7 on the first token, relative to "
                  "the residual, and divided by the same on rows of the same head with less than 0.3", LITTLE,
                  above=False, ratio=True, parts=True),
        Criterion("C077", DATED, "Movement of the other tokens after a change of one token, relative to their norm, "
                  "and the same without the sink divided by with it", BARELY, above=False, ratio=True, parts=True),
    )  # fmt: skip

    def __init__(self, found: Found, model: str = "the model") -> None:
        self.found = found
        heads, all_heads = len(found["heads"]), sum(map(len, found["alpha"]))
        self.question = (  # type: ignore[misc]
            f"Which claims about attention sinks hold on {model}, where {heads} of {all_heads} heads have a sink at "
            f"{found['tokens']} tokens?"
        )

    @property
    def results(self) -> Results:
        """The measurements of the judged texts."""
        rows = [Outcome(at, measured=text) for at, text in enumerate(self.found["texts"])]
        return Results({MODEL: rows}, unit="text")

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Those of sink heads do not count if there are none."""
        texts = [outcome.measured for outcome in results.variants[MODEL]]
        no_sink = Effect("", [], unless=f"no head gives the first token more than {SINK} on the texts that choose")
        of_sinks = {} if not self.found["heads"] else self._of_sink_heads(texts)
        found = {criterion.claim: of_sinks.get(criterion.claim, [no_sink]) for criterion in self.criteria}
        at = [text["magnitudes"][self.found["depth"]] for text in texts]
        heavy, quotient = ([], []) if not self.found["adds"] else _heavy(texts)
        why = "no projection was found that adds the outputs of the heads to the residual stream as they are"
        if self.found["adds"]:
            few = len(heavy) < math.ceil(len(texts) / 2)
            why = "in fewer than half of the texts a head has 8 rows of each kind" if few else ""
        return found | {
            "C061": [Effect("", [text["strongest"] for text in texts])],
            "C063": [Effect("", [text["often"] for text in texts])],
            "C067": [
                Effect("over the median", [ratio(one["first"], one["median"]) for one in at]),
                Effect("magnitude", [one["first"] for one in at], bound=MASSIVE),
                Effect("over the other tokens", [ratio(one["first"], one["others"]) for one in at], bound=1.0),
            ],
            "C075": [Effect("", quotient, unless=why)],
            "C076": [
                Effect("over the residual", heavy, unless=why),
                Effect("over that on other rows", quotient, unless=why, bound=1.0),
            ],
        }

    def _of_sink_heads(self, texts: Sequence[Found]) -> dict[str, list[Effect]]:
        """The effects of claims that are about the sink heads."""
        random = [mean(x > SINK for x in text["other_first"]) for text in texts]
        own = [float(text["own_first"] > SINK) for text in texts if "own_first" in text]
        untrained = [text["untrained"] for text in texts]
        peaks = [text["peaks"] for text in texts if "peaks" in text]
        moved = [text["moved"] for text in texts]
        times = [ratio(one["without"], one["with"]) for one in moved]

        def first_key(name: str, average: Callable[[Sequence[float]], float]) -> list[Effect]:
            return [Effect("", [average([head[name] for head in text["first_key"]]) for text in texts])]

        return {
            "C062": [
                Effect("random tokens", random),
                Effect("the text's own first token", own, "" if own else "the texts begin with no special token"),
            ],
            "C064": [
                Effect("entropy", [one["uniformity"] for one in untrained]),
                Effect("largest weight", [one["largest"] for one in untrained], bound=SINK, above=False),
            ],
            "C065": [Effect("", [text["random"] for text in texts])],
            "C068": first_key("value_norm", geometric),
            "C069": first_key("nearest", mean),
            "C070": first_key("key_norm", geometric),
            "C073": [
                Effect("the weight without as many random dimensions", [one["control"] for one in peaks], bound=SINK,
                       above=True, premise=True),
                Effect("", [one["mean"] for one in peaks]),
            ] if peaks else [Effect("", [], unless="no block writes a peak at the first token before a sink head")],
            "C074": [Effect("", times)],
            "C077": [
                Effect("with the sink", [max(one["with"], TINY) for one in moved]),
                Effect("without over with", times, bound=TIMES, above=True),
            ],
        }  # fmt: skip

    def lines(self, results: Results) -> Lines:
        """The magnitudes of the hidden states by depth."""
        depths = [outcome.measured["magnitudes"] for outcome in results.variants[MODEL]]
        found = {
            name: [[one[part] / one["median"] for one in text] for text in depths]
            for name, part in {"first token": "first", "other tokens": "others"}.items()
        }
        return Lines(range(len(depths[0])), found, "depth (0: embeddings)", "largest over median magnitude")


def _heavy(texts: Sequence[Found]) -> tuple[list[float], list[float]]:
    """The geometric means over heads of what they add on heavy rows, and of that over light rows, of each text that has
    heads with both kinds."""
    added = [text["added"] for text in texts if text["added"]]
    heavy = [geometric([one["heavy"] for one in heads]) for heads in added]
    return heavy, [geometric([ratio(one["heavy"], one["light"]) for one in heads]) for heads in added]
