"""Policies that evict keys one by one, by the worth of the keys that a layer holds; each is one class.

At budget B the query at position t ≥ B attends to its own key and to B − 1 older ones: before it attends, the old key
of least worth is evicted (of equal ones the oldest). What a layer holds at t depends on its queries and keys up to t
alone, so `online_expiry` finds it for a whole text, and one forward under the mask that follows is the run with such a
cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.cache import Evicting
from qkv.cache.base import PAST
from qkv.engine import Call, at_least_float32
from qkv.errors import InputError
from qkv.masks import Mask, Predicate
from qkv.normalizers import Softmax


class Held(NamedTuple):
    """What a layer holds before it evicts a key; query heads stand in groups that share a key head."""

    keys: Float[Tensor, "b hkv m d"]
    positions: Int[Tensor, "b hkv m"]
    rows: Float[Tensor, "b hkv group w m"]
    """Weights of the last w queries, in any order; 0 for a key that came later."""
    received: Float[Tensor, "b hkv m"]
    """The weights on each key, summed over all queries so far and over the query heads of a group."""
    seen: int
    """The number of queries so far."""


class Online:
    """A policy; `window` is how many of the last queries it looks at, and `recent` the last keys that it never evicts.

    These count the key of the query itself.
    """

    name = meaning = ""

    def window(self, budget: int) -> int:
        return 1

    def recent(self, budget: int) -> int:
        return 1

    def worth(self, held: Held) -> Float[Tensor, "b hkv m"]:
        raise NotImplementedError


class KNorm(Online):
    """Devoto et al. 2024 (arXiv:2406.11430), §3: keys of small norm receive most attention. worth = −‖k‖₂."""

    name, meaning = "knorm", "keys of the smallest norm"

    def worth(self, held: Held) -> Tensor:
        return -held.keys.norm(dim=-1)


class KeyDiff(Online):
    """Park et al. 2025 (arXiv:2504.15364), alg. 1: keys that differ most from the mean direction of the held keys.

    worth = −cos(k, Σ_j k_j / ‖k_j‖)
    """

    name, meaning = "keydiff", "keys least like the mean of the keys"

    def worth(self, held: Held) -> Tensor:
        anchor = torch.nn.functional.normalize(held.keys, dim=-1).mean(2, keepdim=True)
        return -torch.cosine_similarity(held.keys, anchor, dim=-1)


class TOVA(Online):
    """Oren et al. 2024 (arXiv:2401.06104), §3.2: the key that the last query attended to least, in the mean of heads.

    worth = mean over all heads of a layer of A[last query, k], so all heads hold the same keys.
    """

    name, meaning = "tova", "keys that the last query attended to most"

    def worth(self, held: Held) -> Tensor:
        return held.rows.mean((1, 2, 3))[:, None].expand_as(held.received)


class SnapKV(Online):
    """Li et al. 2024 (arXiv:2404.14469), §4: keys that the last w queries attended to, smoothed over neighbours.

    worth = mean over 5 neighbouring held keys of Σ over the last w = max(1, min(32, ⌊B/2⌋)) queries of A[q, k], summed
    over the heads of a group; the last w keys stay. The paper chooses once, at the end of the prompt; here at every
    step.
    """

    name, meaning = "snapkv", "keys that the last queries attended to most, and these"
    neighbours = 5

    def window(self, budget: int) -> int:
        return max(1, min(32, budget // 2))

    recent = window

    def worth(self, held: Held) -> Tensor:
        order = held.positions.argsort(-1)
        votes = held.rows.sum((2, 3)).gather(-1, order)
        smooth = torch.nn.functional.avg_pool1d(votes, self.neighbours, 1, self.neighbours // 2)
        return torch.empty_like(smooth).scatter_(-1, order, smooth)


class OfCache(Online):
    """The policy of an `Evicting` cache."""

    def __init__(self, cache: Evicting) -> None:
        self.cache = cache

    def recent(self, budget: int) -> int:
        return self.cache.recent

    def worth(self, held: Held) -> Tensor:
        return self.cache.checked_worth(held.received, held.seen - held.positions)


ONLINE = (SnapKV(), TOVA(), KeyDiff(), KNorm())


@torch.no_grad()
def online_expiry(call: Call, policy: Online, budget: int) -> Int[Tensor, "b hkv nk"]:
    """The first query that cannot attend to each key; the number of queries for keys that stay.

    Raises:
        InputError: for attention other than causal softmax of products without biases.
    """
    if (
        call.mask is None
        or call.mask.band != PAST
        or call.pairwise
        or call.biases
        or type(call.normalizer) is not Softmax
    ):
        raise InputError(
            f"policies has {policy.name!r}, which needs causal softmax attention of products, without biases"
        )
    dtype = at_least_float32(call.q.dtype)
    q, k = call.q.to(dtype) * (call.factor / call.normalizer.temperature), call.k.to(dtype)
    b, heads, n, d = k.shape
    group, ends = q.shape[1] // heads, torch.full((b, heads, n), n, device=k.device)
    if n <= budget:
        return ends
    q = q.unflatten(1, (heads, group))
    sink = None if call.sink is None else call.sink.to(dtype).expand(b, -1, n).unflatten(1, (heads, group))

    def weights(rows: slice, keys: Tensor) -> Tensor:
        scores = q[:, :, :, rows] @ keys[:, :, None].mT
        if keys.shape[2] == rows.stop:  # the first queries, which read one another
            scores = scores.masked_fill(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        total = total if sink is None else torch.logaddexp(total, sink[:, :, :, rows, None])
        return (scores - total).exp()

    w, recent = policy.window(budget), policy.recent(budget)
    positions, keys = torch.arange(budget, device=k.device).expand(b, heads, -1).clone(), k[:, :, :budget].clone()
    first = weights(slice(0, budget), keys)
    rows, received = first[..., -w:, :].clone(), first.sum((2, 3))
    for t in range(budget, n):
        worth = policy.worth(Held(keys, positions, rows, received, t)).masked_fill(positions > t - recent, torch.inf)
        least = worth == worth.amin(-1, keepdim=True)
        slot = positions.masked_fill(~least, n).argmin(-1, keepdim=True)
        ends.scatter_(2, positions.gather(2, slot), t)
        positions.scatter_(2, slot, t)
        keys.scatter_(2, slot[..., None].expand(-1, -1, -1, d), k[:, :, t : t + 1])
        received.scatter_(2, slot, 0)
        rows.scatter_(4, slot[:, :, None, None].expand(-1, -1, group, w, -1), 0)
        row = weights(slice(t, t + 1), keys)
        rows[..., (t - budget) % w, :] = row[..., 0, :]
        received += row.sum((2, 3))
    return ends


def held_keys(call: Call, policy: Online, budget: int) -> Mask:
    """The keys that each query can attend to, as a mask to combine with the causal one."""
    ends = online_expiry(call, policy, budget).repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    return Predicate(lambda b, h, q, k: q < ends[b, h, k])
