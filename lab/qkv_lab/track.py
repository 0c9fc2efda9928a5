"""Statistics of a language model's attention that are small enough to log at every evaluation of a training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import qkv
from qkv.errors import InputError
from qkv.models import DecoderLM
from qkv.profiler.data.tables import raw_weights
from qkv.statistics.measure import sums_to_one

THRESHOLD = 0.3
"""ε of Gu et al. 2025: a head with more than this mean weight on the first key has a sink."""


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
          ``key_cosine_others``: the same with the keys from the second up to the query's own.
        - ``hidden_norm`` (layer): norm of a layer's output at the first token, divided by the mean norm at the others.
        - ``massive`` (layer): largest magnitude of a layer's output at the first token, divided by the median magnitude
          in the text. An activation is massive above 100 and 1,000 times the median (Sun et al. 2024,
          arXiv:2402.17762, §2).

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
    with _recorded(model) as record:
        found = weights(model, ids)
    first = found["first"]
    statistics: dict[str, Any] = {
        "sink": _by_head(first[..., 1:]),
        "sink_share": _by_head(first[..., 1:] > THRESHOLD),
        "sink_score": float((first.mean((0, 3)) > THRESHOLD).mean()),
        **{name: _by_head(found[name][..., 1:]) for name in ("sink_raw", "sink_mass") if name in found},
        "entropy": _by_head(found["entropy"][..., 1:]),
        "entropy_ratio": _by_head(found["entropy"][..., 1:] / np.log(np.maximum(found["visible"][..., 1:], 2))),
        "value_drain": [[x[0] / float(np.mean(x[1:])) for x in layer] for layer in record.pop("value_norms")],
        **record,
    }
    return statistics, found


def weights(model: DecoderLM, ids: Int[Tensor, "b n"]) -> dict[str, np.ndarray]:
    """Weights on the first and the previous key, and entropies, of every query: arrays (text, layer, head, query).

    ``first`` and ``previous`` are the weights on these keys. Unnormalised rows are divided by their sums, and
    ``sink_raw`` then has the undivided weight on the first key. ``first`` and ``sink_raw`` end with the last query to
    which the first key is visible. ``sink_mass`` exists for models with a sink logit or a learned key; ``entropy``
    (nats) and ``visible`` (number of visible keys) always exist.
    """
    if not isinstance(model, DecoderLM):
        raise InputError(f"model is {type(model).__name__}, expected a DecoderLM")
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}, expected (texts, length) of at least 2 tokens")
    n = ids.shape[1]
    data = qkv.profile(model, ids, progress=False, map_tokens=0, map_bins=0, probe=False).data
    in_window = slice(min(n, model.config.window or n))  # queries to which the first key is visible
    first, previous = data["sink"].values[..., in_window], data["previous"].values
    found = {"entropy": data["entropy"].values, "visible": data["visible"].values}
    if "sink_mass" in data:
        found["sink_mass"] = data["sink_mass"].values
    block: Any = model.blocks[0]
    if not sums_to_one(block.attention.composition.attention.normalizer):
        found["sink_raw"] = raw_weights(data, "sink")[..., in_window]
    return {**found, "first": first, "previous": previous}


def value_norms(model: DecoderLM, ids: Int[Tensor, "b n"]) -> list[list[list[float]]]:
    """The mean norm over texts of the value at every position, as lists (layer, head, position)."""
    with _recorded(model) as record, torch.no_grad():
        model.hidden(ids.to(model.embedding.weight.device))
    return record["value_norms"]


def _by_head(values: np.ndarray) -> Any:
    """Means over texts and queries, (layer, head); 0 if there are no queries, as with a window of one token."""
    counted = values.shape[0] * values.shape[3]
    return (values.sum((0, 3), dtype=np.float64) / max(counted, 1)).tolist()


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """Record norms, cosines and magnitudes of every layer while the model runs inside: one list by layer per name."""
    names = ("value_norms", "key_cosine", "key_cosine_others", "hidden_norm", "massive")
    record: dict[str, list[Any]] = {name: [] for name in names}

    def before_attention(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        q, k, v = given
        norms = v.float().norm(dim=-1).mean(0)
        record["value_norms"].append(norms.repeat_interleave(q.shape[1] // v.shape[1], 0).tolist())
        first, others = _cosines(q.float(), k.float())
        record["key_cosine"].append(first.tolist())
        record["key_cosine_others"].append(others.tolist())

    def after_block(_: nn.Module, __: Any, hidden: Tensor) -> None:
        norms = hidden.float().norm(dim=-1).mean(0)
        record["hidden_norm"].append(float(norms[0] / norms[1:].mean()))
        size = hidden.float().abs()
        record["massive"].append(float((size[:, 0].amax(1) / size.flatten(1).median(1).values).mean()))

    handles: list[Any] = []
    try:
        blocks: Any = getattr(model, "blocks", ())  # for another model `weights` raises the error
        for block in blocks:
            handles.append(block.attention.composition.register_forward_pre_hook(before_attention))
            handles.append(block.register_forward_hook(after_block))
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _cosines(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b hkv n d"]
) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """Mean cosine of queries from the second on with the first key, and with the keys from the second to their own."""
    unit = nn.functional.normalize
    q = unit(q, dim=-1)[:, :, 1:]
    k = unit(k, dim=-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    others = k[:, :, 1:].cumsum(2)  # the sum of cosines is one product with the sum of unit keys
    counts = torch.arange(1, k.shape[2], device=k.device)
    return (q * k[:, :, :1]).sum(-1).mean((0, 2)), ((q * others).sum(-1) / counts).mean((0, 2))
