"""Gradients of statistics of a call by the compiled library, in one pass over the scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from qkv._engine.call import Call
from qkv.masks import Mask
from qkv.native import binding, ranges_of
from qkv.native.kernel import gradients_of

NEAR = {"self_": 0, "previous": -1, "next_": 1}
ROWS = {"entropy": "entropy", "effective_keys": "effective", "distance": "distance"}


def statistics_gradients(
    call: Call, values: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, lse: Tensor, mass: Tensor,
    masks: Mapping[str, Mask], firsts: Sequence[int], queries: Tensor | None, wanted: Collection[str],
) -> dict[str, Tensor] | None:  # fmt: skip
    """Gradients of q, k, the sink and the biases in `wanted`, or None if the library cannot compute them.

    Args:
        call: the attention call, without tensors that require gradients.
        values: the statistics, by name.
        grads: their gradients, by name; 0 for queries that do not count and rows without visible keys.
        lse: the log-sum-exp of each row, with the sink.
        mass: the sum of the weights of each row.
        masks: the masks of the statistics `mass …`, by name.
        firsts: the first key of the text of each batch item.
        queries: the queries that count.
        wanted: the names of the tensors whose gradients are needed.
    """
    if binding.unsupported_reason(call) is not None or not binding.is_finite(call):
        return None
    parts, grad_masses, masses = list[Tensor](), list[Tensor](), list[Tensor]()
    position = call.grid.rows(0, call.grid.n_queries)
    keys = {name: (position + offset)[None] for name, offset in NEAR.items()}
    keys["sink"] = torch.tensor(firsts, device=binding.CPU)[:, None].expand(-1, call.grid.n_queries)
    for name, grad in grads.items():
        if name in keys:
            found: Tensor | None = torch.stack((keys[name], keys[name] + 1))[None]
        elif name.startswith("mass "):
            found = ranges_of(masks[name.removeprefix("mass ")], call.grid)
        else:
            continue
        if found is None:
            return None
        for i, part in enumerate(found):
            parts.append(part)
            grad_masses.append(grad)
            masses.append(values[name] if i == 0 else torch.zeros_like(values[name]))  # the sum of all ranges
    rows = {ROWS[name]: (grads[name], values[name]) for name in ROWS if name in grads}
    more = {f"grad_{name}": grad for name, (grad, _) in rows.items()} | {name: x for name, (_, x) in rows.items()}
    grad_lse, at_sink = grads.get("lse"), None
    if "sink_mass" in grads:
        at_sink = grads["sink_mass"] * values["sink_mass"]
        grad_lse = -at_sink if grad_lse is None else grad_lse - at_sink
    counted = None if queries is None else queries.contiguous()
    arguments: dict[str, object] = {"counted": counted}
    if parts:
        batches = max(x.shape[1] for x in parts)
        ranges = torch.stack([x.expand(-1, batches, -1) for x in parts]).int().contiguous()
        arguments |= {"ranges": ranges, "n_ranges": len(ranges)}
        arguments["range_batch"] = 0 if batches == 1 else call.grid.n_queries
        more |= {"grad_masses": torch.stack(grad_masses), "masses": torch.stack(masses)}
    back = gradients_of(
        call, lse, arguments=arguments, wanted=wanted, grad_lse=grad_lse, grad_received=grads.get("received"),
        mass=mass if rows and call.sink is not None else None, **more,
    )  # fmt: skip
    if at_sink is not None and call.sink is not None:
        back["sink"] += at_sink.sum_to_size(call.sink.shape)
    return back
