"""Shared parts of the tasks on random symbols: held-out sequences, greedy generation, attention scores of heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import qkv
from qkv.errors import InputError
from qkv.models.decoder import DecoderLM
from qkv.models.generation import generate
from qkv.models.sampling import Sampler

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "FIRST_SYMBOL",
    "PAD",
    "SEPARATOR",
    "bars",
    "best",
    "check_enough",
    "continued",
    "drawn",
    "head_names",
    "held_out",
    "loss_after",
    "maps",
    "mean_weight",
    "share_of_strongest",
    "show_map",
    "symbols",
    "without_heads",
]


def __dir__() -> list[str]:
    return __all__


PAD, SEPARATOR, FIRST_SYMBOL = 0, 1, 2
"""The special tokens, and the number of the first symbol."""
Pairs = tuple[Int[np.ndarray, " m"], Int[np.ndarray, "*b m"]]
"""Queries (m), and one key for each of them, (m) or (b, m)."""
HELD_OUT = 10
"""One in this many sequences is held out."""
ENOUGH = 1000
"""The smallest number of different sequences of a task; the chance that none is held out is then 0.9¹⁰⁰⁰."""


def held_out(sequences: Int[np.ndarray, "n length"]) -> Bool[np.ndarray, " n"]:
    """True for the sequences that are held out: a tenth of them, by a hash of their tokens."""
    state = np.zeros(len(sequences), np.uint64)
    for tokens in sequences.T.astype(np.uint64):
        # 2⁶⁴ / golden ratio spreads low bits upwards, and the shift high bits back down
        state = (state ^ (tokens + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(32)
    return np.asarray(state % np.uint64(HELD_OUT) == 0)


def drawn(draw: Callable[[int], Int[np.ndarray, "n length"]], size: int, *, unseen: bool) -> Int[Tensor, "size length"]:
    """Sequences from `draw(n)`, filtered: only held-out ones if `unseen`, else only training ones."""
    found: list[np.ndarray] = []
    while sum(map(len, found)) < size:
        rows = draw(size)
        found.append(rows[held_out(rows) == unseen])
    return torch.from_numpy(np.concatenate(found)[:size].astype(np.int64))


def symbols(
    generator: np.random.Generator, size: int, length: int, kinds: int, *, unseen: bool
) -> Int[Tensor, "size length"]:
    """Random sequences of independent symbols out of `kinds` different ones.

    >>> symbols(np.random.default_rng(0), 2, 4, 14, unseen=False).shape
    torch.Size([2, 4])
    """
    return drawn(lambda n: generator.integers(FIRST_SYMBOL, FIRST_SYMBOL + kinds, (n, length)), size, unseen=unseen)


def check_enough(sequences: int, settings: str) -> None:
    """Raise `InputError` if the settings make too few different sequences to hold some out."""
    if sequences < ENOUGH:
        raise InputError(f"{settings}: this makes {sequences} different sequences, expected at least {ENOUGH:,}")


def loss_after(model: DecoderLM, ids: Int[Tensor, "b n"], start: int) -> Float[Tensor, ""]:
    """The mean cross-entropy in nats of the tokens from position `start` on, given the true tokens before them."""
    targets = ids[:, 1:].clone()
    targets[:, : start - 1] = -100
    return model.loss(ids[:, :-1], targets)


def continued(model: DecoderLM, prompt: Int[Tensor, "b n"], new: int) -> Int[Tensor, "b new"]:
    """Greedy generation: the `new` tokens with which the model continues each prompt.

    A model whose prefix is longer than the prompt computes the whole sequence at each step, because earlier tokens
    attend to the new ones.
    """
    prompt = prompt.to(next(model.parameters()).device)
    if model.config.prefix > prompt.shape[1]:
        ids = prompt
        for _ in range(new):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        return ids[:, prompt.shape[1] :].cpu()
    rows = generate(model, model.start(len(prompt)), prompt, max_new_tokens=new, sampling=Sampler(temperature=0))
    return torch.tensor(rows)


def maps(model: nn.Module, ids: Int[Tensor, "b n"]) -> Float[np.ndarray, "b layer head n n"]:
    """The exact attention weights of every head, (text, layer, head, query, key), from the profiler."""
    ids = ids.to(next(model.parameters()).device)
    found = qkv.profile(model, ids, map_tokens=ids.shape[1], probe=False, progress=False)
    return np.asarray(found.data["weights"].values)


def share_of_strongest(weights: Float[np.ndarray, "b layer head n n"], pairs: Pairs) -> Float[np.ndarray, "layer head"]:
    """The share of (sequence, query) pairs whose strongest key is the given one, for each head.

    The keys are the same for all sequences (m), or each sequence has its own (b, m). Of equally strong keys the first
    counts.

    >>> weights = np.eye(3)[None, None, None, [0, 2, 1]].repeat(2, 0)  # two sequences, one layer, one head
    >>> share_of_strongest(weights, (np.array([1, 2]), np.array([[2, 1], [2, 0]]))).tolist()
    [[0.75]]
    """
    queries, keys = pairs
    return np.asarray((weights[..., queries, :].argmax(-1) == _by_head(keys)).mean((0, -1)))


def mean_weight(weights: Float[np.ndarray, "b layer head n n"], pairs: Pairs) -> Float[np.ndarray, "layer head"]:
    """The mean weight of the queries on the given keys, over pairs and sequences, for each head.

    The keys are those of `share_of_strongest`.
    """
    queries, keys = pairs
    rows = weights[..., queries, :]
    found = np.take_along_axis(rows, np.broadcast_to(_by_head(keys), rows.shape[:-1])[..., None], -1)
    return np.asarray(found.mean((0, -2, -1)))


def _by_head(keys: Int[np.ndarray, "*b m"]) -> Int[np.ndarray, "*b layer head m"]:
    """Keys that broadcast to (b, layer, head, m)."""
    return keys[:, None, None] if keys.ndim == 2 else keys


def best(
    scores: Float[np.ndarray, "layer head"], weights: Float[np.ndarray, "layer head"] | None = None
) -> tuple[int, int]:
    """The layer and head with the highest score; ties go to the larger weight, then to the first head.

    >>> best(np.array([[0.1, 0.9], [0.9, 0.3]]), np.array([[0.1, 0.5], [0.6, 0.3]]))
    (1, 0)
    """
    ties = np.zeros_like(scores) if weights is None else weights
    layer, head = max(np.ndindex(*scores.shape), key=lambda at: (scores[at], ties[at]))
    return layer, head


def without_heads(model: DecoderLM, cut: Iterable[tuple[int, int]]) -> DecoderLM:
    """A copy of the model with some heads (layer, head) ablated: their columns of the output projection are zero."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer, head in cut:
            attention: Any = copied.blocks[layer].attention
            width = attention.v_head_dim
            attention.out_proj.weight[:, head * width : (head + 1) * width] = 0
    return copied


def head_names(scores: Float[np.ndarray, "layer head"]) -> list[str]:
    """The names of all heads for figures, layer by layer; both numbers count from 0.

    >>> head_names(np.zeros((2, 2)))
    ['L0H0', 'L0H1', 'L1H0', 'L1H1']
    """
    layers, heads = np.shape(scores)
    return [f"L{layer}H{head}" for layer in range(layers) for head in range(heads)]


def bars(axes: Axes, scores: Float[np.ndarray, "layer head"], bar: float) -> None:
    """Plot a score from 0 to 1 for every head, coloured by layer, with a line at the threshold `bar`."""
    from qkv_lab.draw import COLOURS

    layers, each = scores.shape
    axes.bar(head_names(scores), scores.ravel(), color=[COLOURS[2 * (i % 2)] for i in np.repeat(range(layers), each)])
    axes.axhline(bar, color=COLOURS[1], linewidth=1.3, linestyle="--")
    axes.annotate(f"{bar:.0%}", (layers * each - 0.45, bar), color=COLOURS[1], size=8, va="bottom", ha="right")
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("layer and head, counted from 0")


def show_map(
    axes: Axes,
    weights: Float[np.ndarray, "n n"],
    ids: Int[Tensor, " n"],
    pairs: Pairs,
    names: Sequence[str] | None = None,
) -> None:
    """Plot one head's attention map of one sequence; squares mark the key that each query should attend to.

    Tokens are labelled with `names`, or else with their numbers.
    """
    from qkv_lab.draw import COLOURS, heatmap

    names = names or ["SEP" if token == SEPARATOR else str(token) for token in ids.tolist()]
    image = heatmap(axes, weights, rows=names, columns=names, vmax=1)
    side = min(90.0, 1.6e4 / len(names) ** 2)
    queries, keys = pairs
    axes.scatter(keys, queries, s=side, marker="s", facecolors="none", edgecolors=COLOURS[1], linewidths=1.4)
    axes.set_xlabel("key: token attended to")
    axes.set_ylabel("query: token before the predicted one")
    axes.tick_params(labelsize=7)
    axes.tick_params(axis="x", labelrotation=90)
    scale = axes.figure.colorbar(image, ax=axes, shrink=0.8)
    scale.set_label("attention weight", size=9)
    scale.ax.tick_params(labelsize=8)
