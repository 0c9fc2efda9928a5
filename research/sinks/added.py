"""What single heads add to the residual stream, relative to its norm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._engine.call import Call
from qkv.kernels import serve
from research.sinks.criteria import HEAVY, LIGHT
from research.sinks.rows import Rows
from research.sinks.subject import Recording, Subject

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
