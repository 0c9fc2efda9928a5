"""Peaks: dimensions in which the first token's hidden state is large, and a context that replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from research.sinks.criteria import PEAK
from research.sinks.subject import Subject, hidden_of

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
