"""What heads do: known alignments of tasks, and sinks and norms of the first token along training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import qkv
from qkv.errors import InputError
from qkv.models.decoder import DecoderLM
from qkv.models.generation import Sampler, generate
from qkv.nn import Composition
from qkv.profiler.data.sinks import relative_norm
from qkv.profiler.data.tables import SINK_THRESHOLD, over_texts, raw_weights
from qkv.statistics.measure import sums_to_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "FIRST_SYMBOL",
    "SEPARATOR",
    "continued",
    "drawn",
    "loss_after",
    "maps",
    "share_of_strongest",
    "without_heads",
]
__dir__ = __all__.copy

THRESHOLD = SINK_THRESHOLD
"""A head with more than this mean weight on the first key has a sink."""


def attention(model: DecoderLM, ids: Int[Tensor, "b n"]) -> dict[str, Any]:
    """Sinks, entropy, value norms and massive activations of every head and layer on some texts.

    All are means over texts, and over the queries from the second on, because the first query has only one visible key.
    If the model has a window, the sink measures use the queries to which the first key is visible.

    Weights are shares of the row, as in `qkv.profile`. Rows of sigmoid, ELU + 1 and ReLU attention do not sum to 1, so
    a threshold on their weights has no meaning: they are divided by their sums, and ``sink_raw`` has the mean of the
    undivided weights. In rows with a learned sink or softmax off by one the sink counts as a key, so they sum to 1.

    Args:
        model: the model, in any mode; it runs once, in evaluation mode and without gradients.
        ids: texts of at least two tokens; they are moved to the model's device.

    Returns:
        Lists (layer, head) unless stated otherwise:

        - ``sink``: mean weight on the first key.
        - ``sink_share``: share of queries with more than 0.3 on the first key.
        - ``sink_score``: one number, the share of heads with α₁ > 0.3, where α₁ is the mean weight on the first key
          over all queries, the first included (Gu et al. 2025, arXiv:2410.10781, eq. 4).
        - ``sink_raw``: only for unnormalised rows, see above. ``sink_mass``: only for models with a sink logit or a
          learned key: the mean weight on it.
        - ``entropy``: mean entropy of a row, in nats. ``entropy_ratio``: the same divided by ln(visible keys); 1 is
          uniform.
        - ``value_drain``: norm of the first value divided by the mean norm of the others; below 1 the value is drained
          (Guo et al. 2024, arXiv:2410.13835). Query heads that share a value head have the same number.
        - ``key_cosine``: mean cosine of the queries with the first key, after positional rotation and norms.
          ``key_cosine_others``: the same with all other keys.
        - ``hidden_norm`` (layer): norm of a layer's output at the first token, divided by the mean norm at the others.
        - ``massive`` (layer): largest magnitude of a layer's output at the first token, divided by the median magnitude
          in the text. An activation is massive above 100 and 1,000 times the median (Sun et al. 2024,
          arXiv:2402.17762, §2).

        All of them are the numbers of `qkv.profile`, which defines them: `Profile.sinks` and `Profile.residual`.

    Raises:
        InputError: if the model is not a `DecoderLM`, or the texts have fewer than two tokens.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2, normalizer="off_by_one"))
    >>> found = attention(model, torch.arange(9)[None])
    >>> [round(found[name][0][0], 1) for name in ("sink", "sink_mass", "entropy_ratio")]
    [0.2, 0.2, 1.0]
    """
    return attention_and_weights(model, ids)[0]


def attention_and_weights(model: DecoderLM, ids: Int[Tensor, "b n"]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The results of `attention` and of `weights`, with one run of the model."""
    profile = _profile(model, ids)
    found, data, residual = _weights(model, profile), profile.data, profile.residual["blocks"]
    first = found["first"]
    statistics: dict[str, Any] = {
        "sink": _track_by_head(first[..., 1:]),
        "sink_share": _track_by_head(first[..., 1:] > THRESHOLD),
        "sink_score": float((first.mean((0, 3)) > THRESHOLD).mean()),
        **{name: _track_by_head(found[name][..., 1:]) for name in ("sink_raw", "sink_mass") if name in found},
        "entropy": _track_by_head(found["entropy"][..., 1:]),
        "entropy_ratio": _track_by_head(found["entropy"][..., 1:] / np.log(np.maximum(found["visible"][..., 1:], 2))),
        "value_drain": over_texts(relative_norm(data["value_norm"].values)[..., 0]).tolist(),
        "key_cosine": over_texts(data["cosine_first"].values).tolist(),
        "key_cosine_others": over_texts(data["cosine_others"].values).tolist(),
        "hidden_norm": over_texts(relative_norm(residual["norm"].values)[:, 1:, 0]).tolist(),
        "massive": residual["first_ratio"].values[:, 1:].mean(0).tolist(),
    }
    return statistics, found


def weights(model: DecoderLM, ids: Int[Tensor, "b n"]) -> dict[str, np.ndarray]:
    """Weights on the first and the previous key, and entropies, of every query: arrays (text, layer, head, query).

    ``first`` and ``previous`` are the weights on these keys. Unnormalised rows are divided by their sums, and
    ``sink_raw`` then has the undivided weight on the first key. ``first`` and ``sink_raw`` end with the last query to
    which the first key is visible. ``sink_mass`` exists for models with a sink logit or a learned key; ``entropy``
    (nats) and ``visible`` (number of visible keys) always exist. ``value_norm`` (text, layer, head, key) has the norms
    of the values.
    """
    return _weights(model, _profile(model, ids))


def _profile(model: DecoderLM, ids: Int[Tensor, "b n"]) -> qkv.Profile:
    if not isinstance(model, DecoderLM):
        raise InputError(f"model is {type(model).__name__}, expected a DecoderLM")
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}, expected (texts, length) of at least 2 tokens")
    return qkv.profile(model, ids, progress=False, map_tokens=0, map_bins=0, probe=False)


def _weights(model: DecoderLM, profile: qkv.Profile) -> dict[str, np.ndarray]:
    data = profile.data
    n = data.sizes["query"]
    in_window = slice(min(n, *(window or n for window in model.config.windows)))  # to whose queries key 0 is visible
    names = ("previous", "entropy", "visible", "value_norm", *(["sink_mass"] if "sink_mass" in data else []))
    found = {"first": data["sink"].values[..., in_window], **{name: data[name].values for name in names}}
    compositions = [x for x in model.modules() if isinstance(x, Composition)]
    if not all(sums_to_one(x.attention.normalizer) for x in compositions):
        found["sink_raw"] = raw_weights(data, "sink")[..., in_window]
    return found


def _track_by_head(values: np.ndarray) -> Any:
    """Means over texts and queries, (layer, head); 0 if there are no queries, as with a window of one token."""
    counted = values.shape[0] * values.shape[3]
    return (values.sum((0, 3), dtype=np.float64) / max(counted, 1)).tolist()


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
    return np.asarray((weights[..., queries, :].argmax(-1) == _heads_by_head(keys)).mean((0, -1)))


def mean_weight(weights: Float[np.ndarray, "b layer head n n"], pairs: Pairs) -> Float[np.ndarray, "layer head"]:
    """The mean weight of the queries on the given keys, over pairs and sequences, for each head.

    The keys are those of `share_of_strongest`.
    """
    queries, keys = pairs
    rows = weights[..., queries, :]
    found = np.take_along_axis(rows, np.broadcast_to(_heads_by_head(keys), rows.shape[:-1])[..., None], -1)
    return np.asarray(found.mean((0, -2, -1)))


def _heads_by_head(keys: Int[np.ndarray, "*b m"]) -> Int[np.ndarray, "*b layer head m"]:
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


def marked(name: str, weights: Float[np.ndarray, "b layer head n n"], pairs: Pairs) -> dict[str, Any]:
    """By layer and head `share_of_strongest` (as `name`) and `mean_weight`, and the best head by these two."""
    share, weight = share_of_strongest(weights, pairs), mean_weight(weights, pairs)
    layer, head = best(share, weight)
    found = {name: share.tolist(), "weight": weight.tolist()}
    return {**found, "best_layer": layer, "best_head": head, "best": float(share[layer, head])}


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


def show_scores(axes: Axes, scores: Mapping[str, Any]) -> None:
    """Plot scores (layer, head) from 0 to 1 as a table: a row for every head, a column for each label."""
    from qkv_lab import draw

    table = np.stack([np.ravel(found) for found in scores.values()], 1)
    names = head_names(np.asarray(next(iter(scores.values()))))
    image = draw.heatmap(axes, table, rows=names, columns=[""] * len(scores), vmax=1)
    axes.set_aspect("auto")
    axes.set_xticks(range(len(scores)), list(scores))
    draw.write_cells(axes, image, "{:.2f}".format)
    axes.set_ylabel("layer and head, counted from 0")


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
    from qkv_lab import draw

    names = names or ["SEP" if token == SEPARATOR else str(token) for token in ids.tolist()]
    image = draw.heatmap(axes, weights, rows=names, columns=names, vmax=1)
    side = min(90.0, 1.6e4 / len(names) ** 2)
    queries, keys = pairs
    axes.scatter(keys, queries, s=side, marker="s", facecolors="none", edgecolors=draw.COLOURS[1], linewidths=1.4)
    axes.set_xlabel("key: token attended to")
    axes.set_ylabel("query: token before the predicted one")
    axes.tick_params(labelsize=7)
    axes.tick_params(axis="x", labelrotation=90)
    draw.scale(image, axes, "attention weight", shrink=0.8)
