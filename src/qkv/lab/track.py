"""What the attention of a language model does, in numbers small enough to keep at every evaluation of a training."""

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
from qkv.normalizers import Pointwise

THRESHOLD = 0.3
"""ε of Gu et al.: a head that puts more than this on the first key has a sink there."""


def attention(model: DecoderLM, ids: Int[Tensor, "b n"]) -> dict[str, Any]:
    """Sinks, entropy, drained values and massive activations of every head and layer on some texts.

    All are means over texts. Queries are those from the second on, which have a choice; where the model has a window,
    sinks are of those that see the first key.

    Rows of sigmoid, ELU + 1 and ReLU do not sum to 1, so that a threshold on their weights says nothing. For them the
    weights are divided by the sum of their row first, and `sink_raw` has the mean of those as they are. What a learned
    sink or off-by-one takes is left out of a row on purpose: there weights stay as they are.

    Args:
        model: in any mode; it is run once, in evaluation mode and without gradients.
        ids: texts, at least two tokens each; moved to the model's device.

    Returns:
        Lists (layer, head) unless stated otherwise:

        - ``sink``: mean weight on the first key.
        - ``sink_share``: share of queries with more than 0.3 on the first key.
        - ``sink_score``: one number, the share of heads with α₁ > 0.3, where α₁ is the mean weight on the first key
          over all queries, the first included (Gu et al. 2025, arXiv:2410.10781, eq. 4).
        - ``sink_raw``, ``sink_mass``: where there are such: see above, and mean weight on a learned or constant sink
          logit, or a learned key.
        - ``entropy``, ``entropy_ratio``: of a row, in nats, and over the ln of the number of visible keys: 1 is
          uniform.
        - ``value_drain``: norm of the first value over the mean norm of the others; below 1 it is drained (Guo et al.
          2024, arXiv:2410.13835). Query heads that share values have the same number.
        - ``key_cosine``, ``key_cosine_others``: mean cosine of the queries, as they are compared, with the first key,
          and with those from the second to the query's own.
        - ``hidden_norm`` (layer): norm of what a layer leaves at the first token, over the mean norm at the others.
        - ``massive`` (layer): the greatest magnitude at the first token over the median magnitude in the text; massive
          from 1,000 on, if it exceeds 100 as well (Sun et al. 2024, arXiv:2402.17762, §2).

    Raises:
        InputError: for another kind of model, or texts of less than two tokens.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2, normalizer="off_by_one"))
    >>> found = attention(model, torch.arange(9)[None])
    >>> [round(found[name][0][0], 1) for name in ("sink", "sink_mass", "entropy_ratio")]
    [0.2, 0.2, 1.0]
    """
    with _watched(model) as seen:
        of = weights(model, ids)
    first = of["first"]
    return {
        "sink": _by_head(first[..., 1:]),
        "sink_share": _by_head(first[..., 1:] > THRESHOLD),
        "sink_score": float((first.mean((0, 3)) > THRESHOLD).mean()),
        **{name: _by_head(of[name][..., 1:]) for name in ("sink_raw", "sink_mass") if name in of},
        "entropy": _by_head(of["entropy"][..., 1:]),
        "entropy_ratio": _by_head(of["entropy"][..., 1:] / np.log(np.maximum(of["visible"][..., 1:], 2))),
        "value_drain": [[x[0] / float(np.mean(x[1:])) for x in layer] for layer in seen.pop("value_norms")],
        **seen,
    }


def weights(model: DecoderLM, ids: Int[Tensor, "b n"]) -> dict[str, np.ndarray]:
    """Where every query puts its weight: arrays (text, layer, head, query).

    ``first`` and ``previous`` are the weights on these keys, rows divided by their sums where the normalizer leaves
    them unnormalised; then ``sink_raw`` is the weight on the first key as it is. ``first`` and ``sink_raw`` end with
    the last query that sees the first key. ``sink_mass`` is there with a sink logit or key, ``entropy`` (nats) and
    ``visible`` (keys) always.
    """
    if not isinstance(model, DecoderLM):
        raise InputError(f"model is {type(model).__name__}, expected a DecoderLM")
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}, expected (texts, length) of at least 2 tokens")
    n = ids.shape[1]
    # A local window of the whole text: its weight is the sum of the row.
    data = qkv.profile(model, ids, progress=False, map_tokens=0, map_bins=0, probe=False, local_window=n).data
    sees = slice(min(n, model.config.window or n))
    first, previous = data["sink"].values[..., sees], data["previous"].values
    found = {"entropy": data["entropy"].values, "visible": data["visible"].values}
    if "sink_mass" in data:
        found["sink_mass"] = data["sink_mass"].values
    block: Any = model.blocks[0]
    if isinstance(block.attention.composition.attention.normalizer, Pointwise):
        total = data["local"].values
        total = np.where(total > 0, total, 1)  # a row of zeros stays one
        return {**found, "first": first / total[..., sees], "sink_raw": first, "previous": previous / total}
    return {**found, "first": first, "previous": previous}


def value_norms(model: DecoderLM, ids: Int[Tensor, "b n"]) -> list[list[list[float]]]:
    """Mean norm over texts of the value at every position, lists (layer, head, position)."""
    with _watched(model) as seen, torch.no_grad():
        model.hidden(ids.to(model.embedding.weight.device))
    return seen["value_norms"]


def _by_head(values: np.ndarray) -> Any:
    """Means over texts and queries; 0 where no query counts, as in a window of one token."""
    counted = values.shape[0] * values.shape[3]
    return (values.sum((0, 3), dtype=np.float64) / max(counted, 1)).tolist()


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """What passes through the layers of a model while it runs inside: a list of numbers by name, filled as it goes."""
    names = ("value_norms", "key_cosine", "key_cosine_others", "hidden_norm", "massive")
    seen: dict[str, list[Any]] = {name: [] for name in names}

    def compared(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        q, k, v = given
        norms = v.float().norm(dim=-1).mean(0)
        seen["value_norms"].append(norms.repeat_interleave(q.shape[1] // v.shape[1], 0).tolist())
        first, others = _cosines(q.float(), k.float())
        seen["key_cosine"].append(first.tolist())
        seen["key_cosine_others"].append(others.tolist())

    def left(_: nn.Module, __: Any, hidden: Tensor) -> None:
        norms = hidden.float().norm(dim=-1).mean(0)
        seen["hidden_norm"].append(float(norms[0] / norms[1:].mean()))
        size = hidden.float().abs()
        seen["massive"].append(float((size[:, 0].amax(1) / size.flatten(1).median(1).values).mean()))

    handles: list[Any] = []
    try:
        blocks: Any = getattr(model, "blocks", ())  # `weights` says what is wrong with another model
        for block in blocks:
            handles.append(block.attention.composition.register_forward_pre_hook(compared))
            handles.append(block.register_forward_hook(left))
        yield seen
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
    others = k[:, :, 1:].cumsum(2)  # cosines add up: one product with the sum of the keys
    counts = torch.arange(1, k.shape[2], device=k.device)
    return (q * k[:, :, :1]).sum(-1).mean((0, 2)), ((q * others).sum(-1) / counts).mean((0, 2))
