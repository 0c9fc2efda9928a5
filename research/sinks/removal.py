"""The first key removed from some heads, or its value set to zero, and what this changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv._engine.call import Call
from qkv.edits import Edit, Head
from qkv.kernels import serve, serving
from qkv.masks import Dense
from qkv.profiler.editing import edit, next_token_loss, predicts_next_token
from research.sinks.rows import visible
from research.sinks.subject import Subject

HeadNumber = tuple[int, int]
"""Layer and head."""
CASES = {"masked": (True, False), "value zero": (False, True), "both": (True, True)}
"""Ways to remove the sink: whether the first key is masked, and whether its value is set to zero."""


class _Removal(Edit):
    """Computes a head without the first key for all later queries, with zero as the first value, or both.

    Several heads of a layer share one object, because all heads of the call are computed at once.
    """

    def __init__(self, masked: bool, zero_value: bool) -> None:
        self.masked, self.zero_value = masked, zero_value
        self._last: tuple[Call, Tensor] | None = None

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        if self._last is None or self._last[0] is not head.call:
            with serving(None):
                self._last = head.call, serve(self._changed(head.call)).out
        return self._last[1][:, head.number]

    def _changed(self, call: Call) -> Call:
        given = call.given
        v, mask = given.v, given.mask
        if self.zero_value:
            v = v.clone()
            v[:, :, 0] = 0
        if self.masked:
            without_first = visible(call).clone()
            without_first[:, :, 1:, 0] = False
            mask = Dense(without_first)
        return Call.of(given.q, given.k, v, mask, given.biases, given.score, given.normalizer)


def removed(
    subject: Subject, heads: Sequence[HeadNumber], *, masked: bool, zero_value: bool
) -> AbstractContextManager[None]:
    """Inside, these heads compute without the sink.

    Args:
        subject: the model.
        heads: which, as (layer, head).
        masked: the first key has no weight for any query but its own, so that the rest of the row is renormalised.
        zero_value: the first value is zero, while all weights stay as they are.
    """
    by_layer = {layer: _Removal(masked, zero_value) for layer, _ in heads}
    return edit(subject.model, {(layer, head): by_layer[layer] for layer, head in heads})


def movement(subject: Subject, ids: Int[Tensor, "b n"], position: int) -> float:
    """How far a change of one token moves the other tokens at the last depth: the mean of ‖x′ − x‖ / ‖x‖.

    Counted are the tokens after the changed one if the model is causal, else all others.

    Args:
        subject: the model.
        ids: a text, followed by the same text with other tokens at one position.
        position: that position.
    """
    x = subject.states(ids)[-1].double()
    moved = (x[1:] - x[:1]).norm(dim=-1) / x[:1].norm(dim=-1)
    counted = torch.ones(x.shape[1], dtype=torch.bool)
    counted[: position + 1 if subject.causal else 0] = False
    counted[position] = False
    return float(moved[:, counted].mean())


def cost(subject: Subject, ids: Int[Tensor, "1 n"], heads: Sequence[HeadNumber]) -> dict[str, float]:
    """What the removal of the sink from these heads costs, by its kind.

    The loss on the next token in nats, with the entry ``"kept"`` for the whole model, if the model predicts it;
    otherwise the mean of ‖x′ − x‖ / ‖x‖ over the tokens at the last depth.
    """
    ids = ids.to(next(subject.model.parameters()).device)
    predicts = subject.causal and predicts_next_token(subject.model)
    before = subject.states(ids)[-1].double()
    found = {"kept": next_token_loss(subject.model, ids)} if predicts else {}
    for name, (masked, zero_value) in CASES.items():
        with removed(subject, heads, masked=masked, zero_value=zero_value):
            if predicts:
                found[name] = next_token_loss(subject.model, ids)
            else:
                after = subject.states(ids)[-1].double()
                found[name] = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
    return found
