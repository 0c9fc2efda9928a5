"""From measurements at one length to the verdict on each claim.

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

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from qkv.profiler.capture.residual import MASSIVE, TIMES_MEDIAN
from qkv_lab.experiments.evidence import Effect, Verdict, judge, number
from research.sinks.criteria import CRITERIA, SINK, TIMES, TINY, geometric, ratio
from research.sinks.measure import Found

NO_SINK = f"no head gives the first token more than {SINK} on the texts that choose"


def conclude(found: Found, *, causal: bool) -> list[Verdict]:
    """The verdict on each claim of `CRITERIA`, in their order, at the length of these measurements."""
    decided = {claim: decide(found, causal) for claim, decide in DECIDE.items()}
    verdicts = []
    for claim, criterion in CRITERIA.items():
        effects, remark = decided[claim]
        verdicts.append(judge(criterion, effects, remark=remark, unit="text"))
    return verdicts


Decided = tuple[list[Effect], str]


def _strongest(found: Found, causal: bool) -> Decided:
    layer, head = found["strongest"]
    share = mean(text["share_of_heads"] for text in found["texts"])
    return [Effect("", _each(found, "strongest"))], (
        f"The strongest head is {layer}.{head}; {100 * share:.0f} % of the heads have more than {SINK}."
    )


def _whatever_first(found: Found, causal: bool) -> Decided:
    if not found["heads"]:
        return _no_sink()
    random = [mean(x > SINK for x in text["other_first"]) for text in found["texts"]]
    weight = number(mean(mean(text["other_first"]) for text in found["texts"]))
    effects, remark = [Effect("random tokens", random)], f"The mean weight is {weight} with random tokens"
    if all("own_first" in text for text in found["texts"]):
        own = _each(found, "own_first")
        effects.append(Effect("the text's own first token", [float(x > SINK) for x in own]))
        remark += f" and {number(mean(own))} with the text's own first token in place of the special one"
    else:
        effects.append(Effect("the text's own first token", [], unless="the texts begin with no special token"))
    return effects, f"{remark}; it is {number(mean(map(mean, _each(found, 'sink'))))} as trained."


def _often(found: Found, causal: bool) -> Decided:
    return [Effect("", _each(found, "often"))], ""


def _untrained(found: Found, causal: bool) -> Decided:
    if not found["heads"]:
        return _no_sink()
    texts = [text["untrained"] for text in found["texts"]]
    return [
        Effect("entropy", [text["uniformity"] for text in texts]),
        Effect("largest weight", [text["largest"] for text in texts], bound=SINK, above=False),
    ], ""


def _random_tokens(found: Found, causal: bool) -> Decided:
    return ([Effect("", _each(found, "random"))], "") if found["heads"] else _no_sink()


def _massive(found: Found, causal: bool) -> Decided:
    at = [text["magnitudes"][found["depth"]] for text in found["texts"]]
    return [
        Effect("over the median", [ratio(one["first"], one["median"]) for one in at]),
        Effect("magnitude", [one["first"] for one in at], bound=MASSIVE),
        Effect("over the other tokens", [ratio(one["first"], one["others"]) for one in at], bound=1.0),
    ], (
        f"Measured after block {found['depth'] - 1}, where the first is largest on other texts. Sun et al. 2024 call "
        f"an activation massive if it is above {MASSIVE:g} and about {TIMES_MEDIAN:,.0f} times the median or more."
    )


def _first_key(name: str, average: Callable[[Sequence[float]], float]) -> Callable[[Found, bool], Decided]:
    def decide(found: Found, causal: bool) -> Decided:
        if not found["heads"]:
            return _no_sink()
        return [Effect("", [average([head[name] for head in text["first_key"]]) for text in found["texts"]])], ""

    return decide


def _angle(found: Found, causal: bool) -> Decided:
    effects, _ = _first_key("nearest", mean)(found, causal)
    if not found["heads"]:
        return effects, ""
    first, rest = (
        number(mean(mean(head[name] for head in text["first_key"]) for text in found["texts"]))
        for name in ("angle", "angle_others")
    )
    return effects, f"The mean angle to the first key is {first}°, to the other keys {rest}°."


def _peaks(found: Found, causal: bool) -> Decided:
    if not found["heads"]:
        return _no_sink()
    remark = ""
    if all("all_peaks" in text for text in found["texts"]):
        kept, left = number(mean(map(mean, _each(found, "sink")))), number(mean(_each(found, "all_peaks")))
        remark = f"With all peaks replaced, those of the embedding too, all sink heads have {left} instead of {kept}."
    if not all("peaks" in text for text in found["texts"]):
        return [Effect("", [], unless="no block writes a peak at the first token before a sink head")], remark
    texts = _each(found, "peaks")
    kept, zero = (number(mean(text[name] for text in texts)) for name in ("kept", "zero"))
    control = "the weight without as many random dimensions"
    return [
        Effect(control, [text["control"] for text in texts], bound=SINK, above=True, premise=True),
        Effect("", [text["mean"] for text in texts]),
    ], (
        f"This concerns {texts[0]['heads']} of {len(found['heads'])} sink heads, which come after a block with peaks; "
        f"with the peaks it is {kept}, with zeros in their place {zero}. {remark}"
    )


def _moved(found: Found, causal: bool) -> Decided:
    if not found["heads"]:
        return _no_sink()
    return [Effect("", [ratio(text["moved"]["without"], text["moved"]["with"]) for text in found["texts"]])], _counted(
        causal
    )


def _barely(found: Found, causal: bool) -> Decided:
    if not found["heads"]:
        return _no_sink()
    (times,), remark = _moved(found, causal)
    return [
        Effect("with the sink", [max(text["moved"]["with"], TINY) for text in found["texts"]]),
        Effect("without over with", times.values, bound=TIMES, above=True),
    ], remark


def _output(found: Found, causal: bool) -> Decided:
    quotient, unless = _heavy_and_light(found, lambda one: ratio(one["heavy"], one["light"]))
    return [Effect("", quotient, unless=unless)], ""


def _residual(found: Found, causal: bool) -> Decided:
    heavy, unless = _heavy_and_light(found, lambda one: one["heavy"])
    quotient, _ = _heavy_and_light(found, lambda one: ratio(one["heavy"], one["light"]))
    return [
        Effect("over the residual", heavy, unless=unless),
        Effect("over that on other rows", quotient, unless=unless, bound=1.0),
    ], ""


def _no_sink() -> Decided:
    return [Effect("", [], unless=NO_SINK)], ""


def _each(found: Found, name: str) -> list[Any]:
    return [text[name] for text in found["texts"]]


def _heavy_and_light(found: Found, of: Callable[[Found], float]) -> tuple[Sequence[float], str]:
    """The geometric mean over heads of a number, for each text that has heads with both kinds of rows."""
    if not found["adds"]:
        return [], "no projection was found that adds the outputs of the heads to the residual stream as they are"
    values = [geometric([of(one) for one in text["added"]]) for text in found["texts"] if text["added"]]
    few = len(values) < math.ceil(len(found["texts"]) / 2)
    return values, "in fewer than half of the texts a head has 8 rows of each kind" if few else ""


def _counted(causal: bool) -> str:
    return (
        "Counted are the later tokens." if causal else "Counted are all other tokens, because the model is not causal."
    )


DECIDE: dict[str, Callable[[Found, bool], Decided]] = {
    "C061": _strongest,
    "C062": _whatever_first,
    "C063": _often,
    "C064": _untrained,
    "C065": _random_tokens,
    "C067": _massive,
    "C068": _first_key("value_norm", geometric),
    "C069": _angle,
    "C070": _first_key("key_norm", geometric),
    "C073": _peaks,
    "C074": _moved,
    "C075": _output,
    "C076": _residual,
    "C077": _barely,
}
