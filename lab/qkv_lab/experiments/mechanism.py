"""Experiment on the mechanism of a sink: value norms, angles of keys, massive activations (Gu et al. 2025, §3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv_lab import track
from qkv_lab.experiments.base import Results, Setting
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict, number
from qkv_lab.experiments.sinks import (
    ALPHA,
    DATED,
    MAIN_LOOKS,
    SINK,
    Change,
    Sweep,
    argmax_head,
    at_strongest_head,
    decoder_and_task,
    has_sink,
    not_learnt,
    note,
    panel_title,
    rotate_labels,
)
from qkv_lab.task import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = 16
PEAK, MASSIVE = 10.0, 100.0
"""A magnitude above this multiple of the text's median is a peak, or massive (Sun et al. 2024, arXiv:2402.17762)."""
HEAVY = 0.8
"""A row rests on the first key if its weight on it is above this."""
DRAINED = 0.5
"""A value is drained if its norm is below this multiple of the others' mean norm."""
NEARLY_ALL = 0.9
ONE, THREE = "1 layer", "3 layers"


class Mechanism(Sweep):
    """Models of one and three layers. With three, an early layer can write a peak that later keys use."""

    name = "mechanism"
    question = "Which properties of the first token make it a sink: its value, the angle of its key, its residual?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C067", DATED, "Largest magnitude of the hidden states at the first token over the median magnitude "
                  "in the text", MASSIVE, ratio=True),
        Criterion("C068", DATED, "Norm of the first value over the mean of the others, in the head with the strongest "
                  "sink", DRAINED, above=False),
        Criterion("C069", DATED, "Share of queries for which, of all visible keys, the first has the smallest angle, "
                  "in the head with the strongest sink", NEARLY_ALL),
        Criterion("C073", DATED, "Weight on the first token when what earlier layers wrote there is removed in the "
                  f"dimensions whose magnitude is above {PEAK:g} times the median", SINK, above=False),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {ONE: Change(), THREE: Change(model={"layers": 3})}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Measurements in the layer of the strongest head.

        ``nearest``: share of queries, from the third on, whose cosine with the first key is larger than with any other
        visible key. ``resting`` and ``busy``: norm of the attention output divided by the norm of the residual stream,
        on rows with a weight above 0.8 on the first key and on all others (0 if there are none). ``peaks``: the number
        of dimensions of the layer's input that are peaks at the first token because of earlier layers;
        ``without_peaks``: the head's weight on the first token when they have the values of the embedding there.
        """
        model, task = decoder_and_task(model, setting)
        ids = task.held_out(TEXTS)["ids"]
        first = track.weights(model, ids)["first"]
        layer, head = argmax_head(first[..., 1:].mean((0, 3)))
        block = model.blocks[layer]
        with _recorded(model.blocks[0], block) as record:
            model.hidden(ids)
        x, embedded = record["x"], record["embedded"]
        ratio = (record["added"].norm(dim=-1) / x.norm(dim=-1))[:, 1:].numpy()
        heavy = first[:, layer, head, 1:] > HEAVY
        size, written = x.abs(), (x - embedded).abs()
        high = (size[:, 0].mean(0) > PEAK * size.median()) & (written[:, 0].mean(0) > size[:, 0].mean(0) / 2)

        def remove(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed = given[0].clone()
            changed[:, 0, high] = embedded[:, 0, high]
            return (changed, *given[1:])

        handle = block.register_forward_pre_hook(remove)
        try:
            left = track.weights(model, ids)["first"][:, layer, head, 1:]
        finally:
            handle.remove()
        return {
            "layer": layer,
            "nearest": nearest_first(record["q"][:, head], record["k"][:, head]),
            "resting": float(ratio[heavy].mean()) if heavy.any() else 0.0,
            "busy": float(ratio[~heavy].mean()) if (~heavy).any() else 0.0,
            "heavy_rows": float(heavy.mean()),
            "peaks": int(high.sum()),
            "without_peaks": float(left.mean()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per depth, if models of that depth learn the task and have a sink."""
        drain = at_strongest_head(results, "check.value_drain")
        found: dict[str, list[Effect]] = {criterion.claim: [has_sink(results, ONE)] for criterion in self.criteria}
        found["C067"] = [
            Effect(f"the ratio with {ONE}", results.values(ONE, "check.massive"), (ONE,), bound=PEAK, premise=True)
        ]
        for variant in self.variants:
            why = not_learnt(results, variant)
            peaks = results.by_seed(variant, "measured.peaks")
            left = {s: x for s, x in results.by_seed(variant, "measured.without_peaks").items() if peaks[s] > 0}
            few = f"earlier layers write a peak in {len(left)} of {len(peaks)} runs"
            for claim, values, reason in (
                ("C067", results.values(variant, "check.massive"), why),
                ("C068", list(drain.get(variant, {}).values()), why),
                ("C069", results.values(variant, "measured.nearest"), why),
                ("C073", list(left.values()), why or (few if len(left) < max(2, len(peaks) / 2) else "")),
            ):
                found[claim].append(Effect(variant, values, (variant,), unless=reason))
        return found

    def remarks(self, results: Results) -> Mapping[str, str]:
        """Mean cosines, and what attention adds."""
        cosine, others = (at_strongest_head(results, f"check.key_cosine{x}") for x in ("", "_others"))

        def means(values: Mapping[str, Mapping[int, float]]) -> str:
            return ", ".join(f"{v} {number(sum(x.values()) / len(x))}" for v, x in values.items())

        if not cosine:
            return {}
        return {
            "C069": f"Mean cosine of queries with the first key: {means(cosine)}; with the others: {means(others)}.",
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """How drained the sink's value is."""
        drained = verdicts["C068"]
        values = [i.mean for i in drained.intervals if not i.premise and not i.unless]
        what = f"its norm is {' and '.join(map(number, values))} times that of the others ({results.seeds} seeds)"
        return f"A sink's value is drained: {what}" if drained.holds == HOLDS else f"The sink's value: {what}"

    def figure(self, results: Results) -> Figure:
        """Norms of values, cosines of keys, and norms of the attention output."""
        from qkv_lab import draw

        figure, (drain, angle, added) = draw.panels(
            self.conclude(results).title, note(results), columns=3, width=9.4, height=2.7
        )
        draw.by_seed(drain, at_strongest_head(results, "check.value_drain"))
        drain.axhline(1, color=draw.MUTED, linewidth=0.9, linestyle="--")
        panel_title(drain, "Norm of the first value, over others'")
        drain.set(ylabel="ratio", ylim=(0, 1.1))
        pairs: dict[str, dict[int, float]] = {}
        for name, what in (("first", "check.key_cosine"), ("others", "check.key_cosine_others")):
            pairs |= {f"{variant}, {name}": values for variant, values in at_strongest_head(results, what).items()}
        draw.by_seed(angle, dict(sorted(pairs.items())), colour=draw.COLOURS[2], joined=2)
        panel_title(angle, "Cosine of queries with keys")
        angle.set(ylabel="mean cosine")
        pairs = {
            f"{variant}, {name} rows": results.by_seed(variant, f"measured.{name}")
            for variant in results.by_variant(ALPHA)
            for name in ("resting", "busy")
        }
        draw.by_seed(added, pairs, colour=draw.COLOURS[1], joined=2)
        panel_title(added, "What attention adds to the residual")
        added.set(ylabel="ratio of norms", ylim=(0, None))
        for axes in (drain, angle, added):
            rotate_labels(axes)
        return figure


def nearest_first(q: Float[Tensor, "b n d"], k: Float[Tensor, "b n d"]) -> float:
    """The share of causal queries, from the third on, for which the first key has the largest cosine.

    >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-1.0, 0.0]]])
    >>> nearest_first(torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.5], [-1.0, 0.1]]]), keys)
    0.5
    """
    unit = nn.functional.normalize
    cosine = unit(q, dim=-1) @ unit(k, dim=-1).mT
    n = cosine.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    best = cosine.masked_fill(hidden, -torch.inf).argmax(-1)[:, 2:]
    return float((best == 0).double().mean())


@contextmanager
def _recorded(first: nn.Module, block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record, while the model runs inside: the embeddings (input of its `first` block), and of one block its input
    ``x``, its attention output ``added``, and ``q`` and ``k`` (b, heads, n, d)."""
    record: dict[str, Tensor] = {}
    attention: Any = block.attention

    def products(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        q, k = given[:2]
        record.update(q=q.detach(), k=k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1))

    handles = [
        first.register_forward_pre_hook(lambda _, given: record.update(embedded=given[0].detach())),
        block.register_forward_pre_hook(lambda _, given: record.update(x=given[0].detach())),
        attention.composition.register_forward_pre_hook(products),
        attention.register_forward_hook(lambda _, __, out: record.update(added=out.detach())),
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
