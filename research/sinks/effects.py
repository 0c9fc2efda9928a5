"""What is measured on sink heads: rows, norms and angles, peaks of states, what values add, and what removes a sink."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.edits import AtTokens, HideFirst, Values, Zero
from qkv.engine import Call
from qkv.kernels import serve
from qkv.masks import Region
from qkv.profiler.analyses.ablation import given_outputs, next_token_loss, predicts_next_token
from qkv.profiler.editing import edit
from qkv.statistics.measure import measured
from research.sinks.criteria import HEAVY, LIGHT, PEAK, SINK
from research.sinks.subject import Outputs, Recording, Subject, hidden_of


def visible(call: Call) -> Bool[Tensor, "b h n n"]:
    """Which keys each query sees; b and h are 1 where all are the same."""
    n = call.q.shape[2]
    if call.mask is None:
        return torch.ones(1, 1, n, n, dtype=torch.bool, device=call.q.device)
    return call.mask.visible(Region(slice(0, n), slice(0, n)), call.grid)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one layer."""

    first: Float[Tensor, "b h n"]
    """The weight on the first token; 0 where it is masked."""
    entropy: Float[Tensor, "b h n"]
    sees_first: Bool[Tensor, "b h n"]
    visible: Int[Tensor, "b h n"]
    """The number of visible keys."""

    @staticmethod
    def of(call: Call) -> Rows:
        """Measure the rows of a call."""
        found = measured(call, first=0)[2]
        sees = visible(call)
        first, count = sees[..., 0].expand_as(found.sink), sees.sum(-1).expand_as(found.sink)
        return Rows(found.sink.double(), found.entropy.double(), first, count)

    @property
    def alpha(self) -> Float[Tensor, "b h"]:
        """The mean weight on the first token over the queries that see it (Gu et al. 2025, eq. 4)."""
        return self.first.sum(-1) / self.sees_first.sum(-1)

    @property
    def share(self) -> Float[Tensor, "b h"]:
        """The share of the queries after the first, of those that see it, with more than 0.3 on the first token."""
        return (self.first[..., 1:] > SINK).sum(-1) / self.sees_first[..., 1:].sum(-1)

    @property
    def uniformity(self) -> Float[Tensor, "b h"]:
        """The mean of entropy / ln(visible keys), over the queries that see more than one key; 1 for uniform rows."""
        several = self.visible > 1
        ratio = self.entropy / self.visible.clamp(min=2).log()
        return (ratio * several).sum(-1) / several.sum(-1)


class FirstKey(NamedTuple):
    """The first key and value of one head in one text."""

    value_norm: float
    """Norm of the first value divided by the mean norm of the others."""
    key_norm: float
    """The same for keys."""
    nearest: float
    """The share of the queries after the first whose cosine with the first key is the largest of all visible keys."""
    angle: float
    """The mean angle between the first key and the queries after the first, in degrees."""
    angle_others: float
    """The mean angle between these queries and the other keys that they see."""

    @staticmethod
    def of(call: Call, head: int) -> FirstKey:
        """Measure one head in the first text of the batch, after positional rotation."""
        group = call.q.shape[1] // call.k.shape[1]
        q, k, v = (x[0, i].double() for x, i in ((call.q, head), (call.k, head // group), (call.v, head // group)))
        n = len(q)
        whole = visible(call)[0]
        sees = whole[head if len(whole) > 1 else 0]
        later = torch.arange(1, n, device=q.device)
        later = later[sees[later, 0]]
        sees = sees[later]
        unit_q, unit_k = (torch.nn.functional.normalize(x, dim=-1) for x in (q[later], k))
        cosine = (unit_q @ unit_k.T).clamp(-1, 1)
        largest = cosine.masked_fill(~sees, -torch.inf).amax(1)
        angle = cosine.arccos().rad2deg()
        others = sees.clone()
        others[:, 0] = False
        return FirstKey(
            value_norm=float(v[0].norm() / v[1:].norm(dim=-1).mean()),
            key_norm=float(k[0].norm() / k[1:].norm(dim=-1).mean()),
            nearest=float((cosine[:, 0] >= largest).double().mean()),
            angle=float(angle[:, 0].mean()),
            angle_others=float(angle[others].mean()),
        )


class Magnitudes(NamedTuple):
    """The magnitudes of the hidden states of one text at one depth."""

    first: float
    """The largest magnitude at the first token."""
    others: float
    """The largest magnitude at any other token."""
    median: float
    """The median over all tokens and dimensions."""

    @staticmethod
    def of(states: Float[Tensor, "n d"]) -> Magnitudes:
        """Measure hidden states."""
        size = states.abs()  # without rounding
        return Magnitudes(float(size[0].max()), float(size[1:].max()), float(size.median()))


By = Literal["mean", "zero"]
Dimensions = Mapping[int, Sequence[int]]
"""The dimensions at the input of each block, by the number of the block."""


def peaks(states: Sequence[Float[Tensor, "b n d"]], *, written: bool) -> dict[int, list[int]]:
    """The peaks at the first token that most texts of the batch have, by block, at its input.

    A dimension is a peak if it is more than 10 times the median magnitude of its text and depth.

    Args:
        states: the residual stream by depth.
        written: only peaks that blocks write: those that are as far from the embedding, too. Then the first block has
            none, and a dimension that is as large in the embedding is none.

    >>> embeddings = torch.ones(1, 3, 4)
    >>> embeddings[0, 0, 3] = 20.0
    >>> states = embeddings.clone()
    >>> states[0, 0, 2] = 50.0
    >>> peaks([embeddings, states, states], written=True), peaks([embeddings, states, states], written=False)
    ({1: [2]}, {0: [3], 1: [2, 3]})
    """
    found = {}
    for depth, state in enumerate(states[:-1]):
        x, embedded = state.double(), states[0].double()
        least = PEAK * x.abs().flatten(1).median(1).values[:, None]
        is_peak = x[:, 0].abs() > least
        if written:
            is_peak &= (x - embedded)[:, 0].abs() > least
        if dimensions := (is_peak.double().mean(0) > 0.5).nonzero()[:, 0].tolist():
            found[depth] = dimensions
    return found


def others(dimensions: Dimensions, width: int, generator: torch.Generator) -> dict[int, list[int]]:
    """As many random dimensions at each depth that are not among these."""
    found = {}
    for depth, these in dimensions.items():
        free = [i for i in range(width) if i not in set(these)]
        found[depth] = [free[i] for i in torch.randperm(len(free), generator=generator)[: len(these)].tolist()]
    return found


@contextmanager
def replaced(subject: Subject, dimensions: Dimensions, by: By) -> Iterator[None]:
    """Inside, these dimensions of the first token are replaced at the inputs of the blocks.

    Args:
        subject: the model.
        dimensions: which, by block.
        by: their mean over the other tokens of the text, or zero.
    """

    def hook(these: Sequence[int]) -> Any:
        def replace(
            _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            x = hidden_of(args, named).clone()
            x[:, 0, these] = x[:, 1:, these].mean(1) if by == "mean" else 0
            return ((x, *args[1:]), named) if args else (args, {**named, "hidden_states": x})

        return replace

    with ExitStack() as stack:
        for depth, these in dimensions.items():
            block = subject.blocks[depth]
            stack.callback(block.register_forward_pre_hook(hook(these), with_kwargs=True).remove)
        yield


LEAST = 8
"""Rows of each kind that a head must have in a text."""
CLOSE = 1e-3
"""The largest difference, relative to the largest number, by which two computations of the same vectors differ."""


def output_weights(subject: Subject, ids: Int[Tensor, "b n"]) -> list[Float[Tensor, "h dv d"]] | None:
    """The part of the output projection that belongs to each head, by layer.

    The projection is the module of a block whose input are the outputs of the heads side by side, and whose output is
    added to the input of the block: both are checked on the given tokens. None if a block has no such module, as where
    the output is gated or scaled, or added together with that of the feed-forward layer.
    """
    runs: list[list[tuple[nn.Module, Tensor, Tensor]]] = [[] for _ in subject.blocks]

    def hook(into: list[tuple[nn.Module, Tensor, Tensor]]) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                into.append((module, args[0], output))

        return keep

    with ExitStack() as stack:
        for block, into in zip(subject.blocks, runs, strict=True):
            for module in block.modules():
                stack.callback(module.register_forward_hook(hook(into)).remove)
        recording = subject.record(ids)
    found = []
    for run, observed, x in zip(runs, recording.calls, recording.states, strict=False):
        side_by_side = outputs(observed.call).transpose(1, 2).flatten(2)
        pairs = [(module, out) for module, given, out in run if _equal(given, side_by_side)]
        sums = [given for _, given, _ in run]
        projection = next((m for m, out in pairs if any(_equal(given, x + out) for given in sums)), None)
        if projection is None:
            return None
        heads, width = observed.call.q.shape[1], observed.call.v.shape[3]
        found.append(_matrix(projection, heads * width, x).unflatten(0, (heads, width)))
    return found


def outputs(call: Call) -> Float[Tensor, "b h n dv"]:
    """The outputs of the heads before the output projection."""
    return serve(call).out


@dataclass(frozen=True)
class Added:
    """Norms of what one head adds in one text, relative to the residual, as means over two kinds of rows."""

    layer: int
    head: int
    heavy: float
    """Over the rows with more than 0.7 on the first token."""
    light: float
    """Over the rows with less than 0.3."""


def added(recording: Recording, rows: Sequence[Rows], weights: Sequence[Float[Tensor, "h dv d"]]) -> list[Added]:
    """The heads that have at least 8 rows of each kind in the first text of a recording."""
    found = []
    for layer, (observed, row, weight) in enumerate(zip(recording.calls, rows, weights, strict=True)):
        per_head = outputs(observed.call)[0].double() @ weight.double()
        relative = per_head.norm(dim=-1) / recording.states[layer][0].double().norm(dim=-1)
        for head in range(len(relative)):
            later = row.sees_first[0, head].clone()
            later[0] = False
            heavy, light = later & (row.first[0, head] > HEAVY), later & (row.first[0, head] < LIGHT)
            if min(int(heavy.sum()), int(light.sum())) >= LEAST:
                of = relative[head]
                found.append(Added(layer, head, float(of[heavy].mean()), float(of[light].mean())))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max())


@torch.no_grad()
def _matrix(projection: nn.Module, width: int, like: Tensor) -> Float[Tensor, "width d"]:
    """The matrix of a linear module, from its outputs for unit vectors."""
    basis = torch.eye(width, dtype=like.dtype, device=like.device)
    return projection(basis[None])[0] - projection(torch.zeros_like(basis[:1])[None])[0]


HeadNumber = tuple[int, int]
"""Layer and head."""
CASES = {"masked": (True, False), "value zero": (False, True), "both": (True, True)}
"""Ways to remove the sink: whether the first key is masked, and whether its value is set to zero."""


@contextmanager
def removed(
    subject: Subject, heads: Sequence[HeadNumber], outputs: Outputs | None = None, *, masked: bool, zero_value: bool
) -> Iterator[None]:
    """Inside, these heads compute without the sink.

    Args:
        subject: the model.
        heads: which, as (layer, head).
        outputs: of the blocks with the sink, for the ids that follow: blocks before these heads do not run again.
        masked: the first key has no weight for any query but its own, so that the rest of the row is renormalised.
        zero_value: the first value is zero, while all weights stay as they are.
    """
    with ExitStack() as stack:
        earlier = subject.blocks[: min(layer for layer, _ in heads)] if outputs else ()
        stack.enter_context(given_outputs({block: (outputs or {})[block] for block in earlier}))
        for one, wanted in {HideFirst(): masked, Values(AtTokens([0], Zero())): zero_value}.items():
            if wanted:
                stack.enter_context(edit(subject.model, {(subject.modules[n], head): one for n, head in heads}))
        yield


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
    with subject.keeping() as outputs:
        found = {"kept": next_token_loss(subject.model, ids)} if predicts else {}
        before = None if predicts else subject.states(ids)[-1].double()
    for name, (masked, zero_value) in CASES.items():
        with removed(subject, heads, outputs, masked=masked, zero_value=zero_value):
            if before is None:
                found[name] = next_token_loss(subject.model, ids)
            else:
                after = subject.states(ids)[-1].double()
                found[name] = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())
    return found
