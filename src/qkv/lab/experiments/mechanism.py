"""Experiment on the mechanism of a sink: value norms, angles of keys, massive activations (Gu et al. 2025, §3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn

from qkv.lab import track
from qkv.lab.experiments.base import Conclusion, Results, Setting, Verdict, holds_if, larger
from qkv.lab.experiments.sinks import (
    ALPHA,
    SINK,
    Change,
    Sweep,
    argmax_head,
    at_strongest_head,
    decoder_and_task,
    has_sink,
    note,
    panel_title,
    rotate_labels,
    summaries,
)
from qkv.lab.task import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = 16
PEAK = 10.0
"""A magnitude above this multiple of the text's median is a peak."""
HEAVY = 0.8
"""A row rests on the first key if its weight on it is above this."""
DRAINED = 0.5
"""A value is drained if its norm is below this multiple of the others' mean norm."""


class Mechanism(Sweep):
    """Models of one and three layers. With three, an early layer can write a peak that later keys use."""

    name = "mechanism"
    question = "Which properties of the first token make it a sink: its value, the angle of its key, its residual?"
    claims = ("C067", "C068", "C069", "C073")
    variants: ClassVar[Mapping[str, Change]] = {"1 layer": Change(), "3 layers": Change(model={"layers": 3})}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Measurements in the layer of the strongest head.

        ``resting`` and ``busy``: norm of the attention output divided by the norm of the residual stream, on rows with
        a weight above 0.8 on the first key and on all others (0 if there are none). ``peaks``: the number of dimensions
        of the layer's input that are peaks at the first token; ``without_peaks``: the head's weight on the first token
        when these dimensions are set to 0 there.
        """
        model, task = decoder_and_task(model, setting)
        ids = task.held_out(TEXTS)["ids"]
        first = track.weights(model, ids)["first"]
        layer, head = argmax_head(first[..., 1:].mean((0, 3)))
        block = model.blocks[layer]
        with _recorded(block) as record:
            model.hidden(ids)
        x, added = record["x"], record["added"]
        ratio = (added.norm(dim=-1) / x.norm(dim=-1))[:, 1:].numpy()
        heavy = first[:, layer, head, 1:] > HEAVY
        size = x.abs()
        high = size[:, 0].mean(0) > PEAK * size.median()

        def zero_peaks(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed = given[0].clone()
            changed[:, 0, high] = 0
            return (changed, *given[1:])

        handle = block.register_forward_pre_hook(zero_peaks)
        try:
            left = track.weights(model, ids)["first"][:, layer, head, 1:]
        finally:
            handle.remove()
        return {
            "resting": float(ratio[heavy].mean()) if heavy.any() else 0.0,
            "busy": float(ratio[~heavy].mean()) if (~heavy).any() else 0.0,
            "heavy_rows": float(heavy.mean()),
            "peaks": int(high.sum()),
            "without_peaks": float(left.mean()),
        }

    def conclude(self, results: Results) -> Conclusion:
        """A claim holds if it holds at every depth that has a sink."""
        alpha = results.by_variant(ALPHA)
        resting = [v for v, values in alpha.items() if has_sink(values)]
        seen = bool(resting)

        def all_of(criterion: Any) -> bool:
            return seen and all(criterion(v) for v in resting)

        drain, near = at_strongest_head(results, "check.value_drain"), at_strongest_head(results, "check.key_cosine")
        others = at_strongest_head(results, "check.key_cosine_others")
        massive, peaks = results.by_variant("check.massive"), results.by_variant("measured.peaks")
        zeroed, heavy = results.by_variant("measured.without_peaks"), results.by_variant("measured.heavy_rows")
        added, busy = results.by_variant("measured.resting"), results.by_variant("measured.busy")
        high = [v for v in resting if min(massive[v]) > PEAK]
        from_peak = [v for v in resting if min(peaks[v]) > 0]
        verdicts = [
            Verdict("C067", holds_if(bool(high), bool(high)), "Largest magnitude at the first token over the median of "
                    f"the text: {summaries(massive, 1)}. It holds where every run has more than {PEAK:g} (massive is "
                    "1,000, and more than 100), and cannot be seen if there is no such peak."),
            Verdict("C068", holds_if(all_of(lambda v: max(drain[v]) < DRAINED), seen), "Norm of the first value over "
                    f"the mean of the others: {summaries(drain)}. It holds if it is below {DRAINED} in every run that "
                    "has a sink."),
            Verdict("C069", holds_if(all_of(lambda v: larger(near[v], others[v])), seen), "Mean cosine of queries with "
                    f"the first key: {summaries(near)}; with the others: {summaries(others)}. It holds if the first is "
                    "larger by more than the spread over seeds."),
            Verdict("C073", holds_if(all(max(zeroed[v]) <= SINK for v in from_peak), bool(from_peak)),
                    f"Dimensions of the head's input that are peaks at the first token: {summaries(peaks, 0)}; weight "
                    f"on it when they are 0 there: {summaries(zeroed)} (with them {summaries(alpha)}). It holds if no "
                    f"sink (> {SINK}) is left, and cannot be seen without peaks."),
        ]  # fmt: skip
        drained = verdicts[1].holds == "holds"
        adds = (
            f"What attention adds has, of the residual's norm, {summaries(added)} on rows with more than {HEAVY} on "
            f"the first token ({summaries(heavy)} of all rows) and {summaries(busy)} on the others."
        )
        title = (
            "No sink forms, so its mechanism cannot be measured"
            if not seen
            else f"A sink's value is drained to {np.mean([np.mean(drain[v]) for v in resting]):.2f} of the others', "
            f"and attention then adds {np.mean([np.mean(added[v]) for v in resting]):.2f} of the residual's norm"
            if drained
            else "The value of the sink is not drained in every run"
        )
        return Conclusion(verdicts, title, f"{' '.join(v.text for v in verdicts)} {adds}")

    def figure(self, results: Results) -> Figure:
        """Norms of values, cosines of keys, and norms of the attention output."""
        from qkv.lab import draw

        figure, (drain, angle, added) = draw.panels(
            self.conclude(results).title, note(results), columns=3, width=9.4, height=2.7
        )
        draw.by_seed(drain, at_strongest_head(results, "check.value_drain"))
        drain.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")
        panel_title(drain, "Norm of the first value, over others'")
        drain.set(ylabel="ratio", ylim=(0, 1.1))
        pairs: dict[str, list[float]] = {}
        for name, what in (("first", "check.key_cosine"), ("others", "check.key_cosine_others")):
            pairs |= {f"{variant}, {name}": values for variant, values in at_strongest_head(results, what).items()}
        draw.by_seed(angle, dict(sorted(pairs.items())), colour=draw.COLOURS[2])
        panel_title(angle, "Cosine of queries with keys")
        angle.set(ylabel="mean cosine")
        pairs = {}
        for name in ("resting", "busy"):
            pairs |= {f"{v}, {name} rows": values for v, values in results.by_variant(f"measured.{name}").items()}
        draw.by_seed(added, dict(sorted(pairs.items())), colour=draw.COLOURS[1])
        panel_title(added, "What attention adds to the residual")
        added.set(ylabel="ratio of norms", ylim=(0, None))
        for axes in (drain, angle, added):
            rotate_labels(axes)
        return figure


@contextmanager
def _recorded(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record a layer's input ``x`` and its attention output ``added`` while the model runs inside."""
    record: dict[str, Tensor] = {}
    handles = [
        block.register_forward_pre_hook(lambda _, given: record.update(x=given[0].detach())),
        block.attention.register_forward_hook(lambda _, __, out: record.update(added=out.detach())),  # type: ignore[union-attr]
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
