"""Experiment on normalizers, learned sinks and gates, with which a head can be inactive without attending to a token
(Gu et al. 2025, §6.2; Qiu et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from qkv.lab import heads
from qkv.lab.experiments.base import Conclusion, Results, Setting, Verdict, holds_if, larger, summary
from qkv.lab.experiments.sinks import (
    ALPHA,
    EXCESS,
    SINK,
    Change,
    Sweep,
    argmax_head,
    at_strongest_head,
    decoder_and_task,
    has_sink,
    model_variants,
    note,
    panel_title,
    plot_sinks,
    rotate_labels,
    summaries,
)
from qkv.lab.task import Measured
from qkv.models import DecoderLM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, OFF, LEARNED, KEY, ELEMENT, HEAD, BARE = (
    "softmax", "off by one", "learned sink", "key bias", "gate elementwise", "gate a head", "no <s>",
)  # fmt: skip
UNNORMALISED = ("sigmoid", "elu", "relu")
GATES = (ELEMENT, HEAD)
TEXTS = 16
PEAK = 10.0
"""A layer has a peak if its largest magnitude at the first token is above this multiple of the median. It would be a
massive activation above 100 and 1,000 times the median (Sun et al. 2024, arXiv:2402.17762)."""


class Normalizers(Sweep):
    """Softmax, its alternatives, and learned sinks and gates in addition to it."""

    name = "normalizers"
    question = "Which normalizers, learned sinks and gates remove the sink, and what else changes?"
    claims = ("C089", "C090", "C094", "C098", "C099", "C103", "C105", "C134", "C135", "C140")
    variants: ClassVar[Mapping[str, Change]] = {
        SOFTMAX: Change(),
        BARE: Change(task={"first": "random"}),
        OFF: Change(model={"normalizer": "off_by_one"}),
        LEARNED: Change(model={"sink": True}),
        KEY: Change(model={"key_bias": True}),
        **model_variants(normalizer=UNNORMALISED),
        ELEMENT: Change(model={"gate": "elementwise"}),
        HEAD: Change(model={"gate": "head"}),
    }

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``int8_error``: the largest quantisation error of a layer's output; ``first``, ``second``: weights on keys.

        The weights are means over the queries from the third on, for the head with the largest weight on the first key.
        """
        model, task = decoder_and_task(model, setting)
        ids = task.held_out(TEXTS)["ids"]
        with hidden_states(model) as states:
            w = heads.maps(model, ids)[..., 2:, :2].mean((0, 3))
        layer, head = argmax_head(w[..., 0])
        first, second = w[layer, head]
        return {
            "int8_error": max(int8_error(x) for x in states),
            "first": float(first),
            "second": float(second),
        }

    def conclude(self, results: Results) -> Conclusion:
        """Each claim by the weight on the first token, or the measure that it names, compared with plain softmax."""
        alpha = results.by_variant(ALPHA)
        plain = alpha.get(SOFTMAX, [])
        seen = has_sink(plain)

        def less(variant: str, numbers: Mapping[str, Sequence[float]] = alpha) -> bool:
            return (
                bool(numbers.get(variant)) and bool(numbers.get(SOFTMAX)) and larger(numbers[SOFTMAX], numbers[variant])
            )

        def removed(variant: str) -> bool:
            return bool(alpha.get(variant)) and max(alpha[variant]) <= SINK

        def shown(*variants: str) -> str:
            return summaries({v: alpha[v] for v in (SOFTMAX, *variants) if v in alpha})

        values = "Weight of the strongest head on the first token (rows that are not normalised: divided by their sum)"
        unnormalised = all(removed(v) for v in UNNORMALISED)
        massive = results.by_variant("check.massive")
        peaks = max(massive.get(SOFTMAX, [0.0])) > PEAK
        error = results.by_variant("measured.int8_error")
        eased = less(KEY, error) or less(LEARNED, error)
        rest = {v: values for v, values in massive.items() if v in (SOFTMAX, LEARNED, KEY, *GATES)}
        token = {v: results.values(v, "measured.first") for v in (SOFTMAX, BARE)}
        second = results.values(SOFTMAX, "measured.second")
        at_token = bool(token[SOFTMAX] and second and larger(token[SOFTMAX], second))
        rule = "The claim holds if no run has more than 0.3, and cannot be seen if softmax has no sink."
        verdicts = [
            Verdict("C089", holds_if(unnormalised, seen),
                    f"{values}: {shown(*UNNORMALISED)}. The claim holds if no run without normalisation has more than "
                    f"{SINK}, and cannot be seen if softmax has no sink."),
            Verdict("C090", holds_if(removed("sigmoid"), seen), f"{values}: {shown('sigmoid')}. {rule}"),
            Verdict("C094", holds_if(removed("sigmoid") and removed("elu"), seen),
                    f"{values}: {shown('sigmoid', 'elu')}. "
                    f"{rule} Only models of this size were trained."),
            Verdict("C098", holds_if(less(KEY, massive) or less(LEARNED, massive), peaks), "Largest magnitude at the "
                    f"first token over the median: {summaries(rest, 1)}. The claim holds if a learned sink or key "
                    f"makes it less, by more than the spread over seeds; it cannot be seen if softmax has no peak "
                    f"(> {PEAK:g})."),
            Verdict("C099", holds_if(eased, peaks), "Relative error of what the layers leave, as int8 by the largest "
                    f"magnitude: {summaries({v: error[v] for v in rest if v in error}, 4)}. The claim holds if a "
                    "learned sink or key makes it less, by more than the spread over seeds; it cannot be seen if "
                    f"softmax has no peak (> {PEAK:g}) to spoil the scale."),
            Verdict("C103", holds_if(less(OFF), seen), f"{values}: {shown(OFF)}. The claim holds if it is less with "
                    "the extra column, by more than the spread over seeds, and cannot be seen if softmax has no sink."),
            Verdict("C105", holds_if(all(removed(v) for v in GATES), seen), f"{values}: {shown(*GATES)}; largest "
                    f"magnitude over the median: {summaries({v: massive[v] for v in GATES if v in massive}, 1)}. Only "
                    "that sinks are gone is judged: no run of either gate may have more than 0.3."),
            Verdict("C134", holds_if(less(KEY), seen), f"{values}: {shown(KEY)}. The claim holds if the learned key "
                    "makes it less, by more than the spread over seeds."),
            Verdict("C135", holds_if(less(OFF), seen), f"{values}: {shown(OFF)}. As C103."),
            Verdict("C140", holds_if(at_token, bool(token[SOFTMAX]) and min(token[SOFTMAX]) > SINK), "With a learned "
                    f"token <s> before the text it has {_summary_or_none(token[SOFTMAX])} and the first real token "
                    f"{_summary_or_none(second)}; without <s> the first real token has "
                    f"{_summary_or_none(token[BARE])}. The claim holds if <s> has more, by more than the "
                    f"spread over seeds; it cannot be seen if <s> has no sink (> {SINK})."),
        ]  # fmt: skip
        removing = [v for v in results.variants if v not in (SOFTMAX, BARE) and removed(v)]
        title = (
            f"The sink disappears with {', '.join(removing)}"
            if seen and removing
            else "No variant removes the sink"
            if seen
            else "Plain softmax forms no sink here, so none can be removed"
        )
        loss = results.by_variant(EXCESS)
        drain = at_strongest_head(results, "check.value_drain")
        paragraph = (
            f"{values}: {summaries(alpha)}. Norm of the first value over the others': {summaries(drain)}. Loss over "
            f"the chain's own: {summaries(loss, 3)} nats."
        )
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """Sinks, norms of values, quantisation errors and loss of every variant."""
        from qkv.lab import draw

        figure, (sink, drain, peak, error) = draw.panels(
            self.conclude(results).title, note(results), columns=2, rows=2, width=8.6, height=2.8
        )
        plot_sinks(sink, results.by_variant(ALPHA))
        draw.by_seed(drain, at_strongest_head(results, "check.value_drain"), colour=draw.COLOURS[2])
        drain.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")
        panel_title(drain, "Norm of the first value, over others'")
        drain.set(ylabel="ratio", ylim=(0, None))
        draw.by_seed(peak, results.by_variant("measured.int8_error"), colour=draw.COLOURS[4])
        panel_title(peak, "Error of hidden states as int8 (absmax)")
        peak.set(ylabel="relative error (RMS)", ylim=(0, None))
        draw.by_seed(error, results.by_variant(EXCESS), colour=draw.COLOURS[1])
        panel_title(error, "Loss over that of the chain itself")
        error.set_ylabel("excess loss (nats a token)")
        for axes in (sink, drain, peak, error):
            rotate_labels(axes)
        return figure


def _summary_or_none(values: Sequence[float]) -> str:
    return summary(values) if values else "no run"


def int8_error(x: Float[Tensor, "b n d"]) -> float:
    """The relative error (RMS) of quantising a text's states to int8 with one scale, the largest magnitude in the text.

    >>> import torch
    >>> int8_error(torch.tensor([[[127.0, 1.0]]])), int8_error(torch.tensor([[[254.0, 1.0]]])) > 0
    (0.0, True)
    """
    scale = x.abs().flatten(1).amax(1)[:, None, None] / 127
    off = (x / scale).round() * scale - x
    return float((off.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean())


@contextmanager
def hidden_states(model: DecoderLM) -> Iterator[list[Tensor]]:
    """Record every layer's output while the model runs inside."""
    states: list[Tensor] = []
    handles = [b.register_forward_hook(lambda _, __, x: states.append(x.float())) for b in model.blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
