"""Caches that evict keys by their worth. A policy is one class with one method, `worth`: base class and known policies.

Before a new token attends, the old key of least worth is evicted (of equal ones the oldest). Several tokens passed at
once, such as a prompt, attend to everything before them, and keys are evicted afterwards.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import NoneType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._above import above
from qkv._contract import require
from qkv._registry import Registry
from qkv.attention import Attention
from qkv.cache.base import PAST, Cache, Step, check_distance_mask
from qkv.engine import as_biases, as_mask, at_least_float32
from qkv.errors import InputError, at_least_one, kind_of, nearest
from qkv.kernels import serving
from qkv.masks import Causal, Mask, Prefix, Window
from qkv.normalizers import Softmax, SumToOne
from qkv.positions import DynamicNTK, Rotary, rotate
from qkv.scores import Dot

FIRST = 4
"""How many keys at the start "sinks" and "expected" keep."""
FUTURE = 512  # positions of the queries that "expected" expects


class Held(NamedTuple):
    """What a layer holds when it has to evict keys; query heads stand in groups that share a key head.

    A field is None unless the policy's `needs` names it. The tensors belong to the cache: a policy only reads them.
    """

    keys: Float[Tensor, "b hkv m d"]
    """As the cache holds them: rotated, if positions are rotary."""
    values: Float[Tensor, "b hkv m dv"]
    positions: Int[Tensor, "b hkv m"]
    """In the text."""
    recent: Bool[Tensor, "b hkv m"]
    """True at the last keys, which stay whatever their worth."""
    seen: int
    """The number of queries so far."""
    received: Float[Tensor, "b hkv m"] | None
    """The weights on each key, summed over all queries so far and over the query heads of a group."""
    rows: Float[Tensor, "b hkv m group w"] | None
    """Weights of the last w queries on each key, in any order; 0 for a key that came later."""
    query_mean: Float[Tensor, "b hkv group d"] | None
    """Mean of the queries so far (the first four left out), scaled so that scores are q·k, and rotated to the mean of
    the next 512 positions."""
    query_covariance: Float[Tensor, "b hkv group d d"] | None

    @property
    def queries(self) -> Int[Tensor, "b hkv m"]:
        """How many queries could attend to each key so far, its own token's included."""
        return self.seen - self.positions


class Evicting(Cache):
    """Base of eviction policies: keeps the last `recent` keys, and of the older ones those of the greatest `worth`.

    A policy defines `worth`, and names in `needs` what it reads beside keys, values and positions: "received", "rows"
    or "queries". Each key head evicts on its own. Keys keep the rotation of their original positions; memory is
    constant.

    Args:
        keys: keys held, at most: the budget.
        recent: of these, the last ones, which are never evicted; half of the keys if None, unless the policy's
            `most_recent` is less.

    Raises:
        InputError: for sizes that are not whole numbers with 1 ≤ recent < keys, and for a class without `worth`.

    >>> import torch, qkv
    >>> class MeanAttention(Evicting):
    ...     def worth(self, held):
    ...         return held.received / held.queries
    >>> cache, causal = MeanAttention(6, recent=2), qkv.Attention(mask=qkv.masks.Causal())
    >>> for q, k, v in torch.randn(20, 3, 1, 2, 1, 8):
    ...     out = cache.attend(causal, q, k, v)
    >>> cache
    MeanAttention(keys=6, recent=2, seen=20, length=6)
    """

    name: ClassVar[str]
    meaning = "half last keys, half the older of most worth"
    """What it keeps, for legends."""
    needs: ClassVar[Sequence[str]] = ("received",)
    most_recent: ClassVar[int | None] = None
    """The largest number of last keys that are kept for their age, if `recent` is not given."""
    rotary: Rotary | None = None
    """What has rotated the queries, if they come rotated and the policy needs them as they were before."""
    layer_keys: Sequence[int] | None = None
    """The number of keys of each layer, if `for_layers` shall not divide them."""
    evicted: Int[Tensor, "b hkv 1"] | None = None
    """Positions of the keys that the last token evicted, if it came alone."""

    def __init__(self, keys: int, recent: int | None = None) -> None:
        require(self, Evicting, "worth", "held", "the worth of each key (b, hkv, m)")
        name = type(self).__name__
        at_least_one(name, keys=keys)
        if recent is None:
            recent = keys - keys // 2 if self.most_recent is None else max(1, min(self.most_recent, keys // 2))
        at_least_one(name, recent=recent)
        if recent >= keys:
            raise InputError(f"{name}: recent is {recent} of {keys} keys, expected fewer, so that a key can be evicted")
        super().__init__(keys)
        self.keys, self.recent = keys, recent

    def worth(self, held: Held) -> Float[Tensor, "b hkv m"]:
        """The worth of each key that the layer holds; the least is evicted."""
        raise NotImplementedError

    @classmethod
    def of_budget(cls, keys: int) -> Self:
        """An empty cache that holds this many keys, divided as the policy is usually compared."""
        return cls(keys)

    def budgets(self, layers: int) -> list[int]:
        """The number of keys in each of `layers` layers that hold `keys` in the mean."""
        return [self.keys] * layers

    def for_layers(self, layers: int) -> list[Self]:
        """Empty caches of this policy, one for each layer."""
        if self.layer_keys is None:
            return [self.fresh(keys) for keys in self.budgets(layers)]
        if len(self.layer_keys) != layers:
            raise InputError(f"keys has {len(self.layer_keys)} numbers, expected {layers}, one for each layer")
        return [self.resized(keys) for keys in self.layer_keys]

    def resized(self, keys: int) -> Self:
        """An empty cache of this policy with another budget, divided as in `of_budget`."""
        made = self.fresh(keys)
        made.recent = type(self).of_budget(keys).recent
        return made

    def fresh(self, keys: int | None = None) -> Self:
        """An empty cache of this policy, of another size if `keys` is given."""
        made = copy.copy(self)
        made.keys = self.keys if keys is None else keys
        Cache.__init__(made, made.keys)
        return made

    def mask(self) -> Mask | None:
        """The keys that each query can attend to, token by token, if that depends on nothing but positions."""
        return None

    def hold(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add n new tokens as `attend` does with several, but without the output of their queries."""
        signature = self._checked_signature(attention, q, k, v)
        step = Step(attention, as_mask(attention.mask) or Causal(), q, k, v, None, None, None, None)
        self._check(step)
        if not self._buffers:
            self._allocate(q, k, v)
            self._signature = signature
        self._store(step, q, self._joined(k, v, q.shape[1]))
        self.seen += k.shape[2]

    def read(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of several new tokens as `attend` returns it, without adding them."""
        self._checked_signature(attention, q, k, v)
        step = Step(attention, as_mask(attention.mask) or Causal(), q, k, v, None, None, None, None)
        whole = self._joined(k, v, q.shape[1])
        out: Tensor = step.attend(step.own, q, whole["keys"], whole["values"])
        return out

    @property
    def _window(self) -> int:
        """How many of the last queries have their weights kept, for `rows`."""
        return self.recent

    def _check(self, step: Step) -> None:
        name, attention = type(self).__name__, step.attention
        check_distance_mask(name, step)
        if step.own.band != PAST:
            raise InputError(f"{name}: mask is {step.own!r}, but keys in this cache are unordered; expected Causal()")
        for bias in as_biases(attention.bias):
            if not bias.position_free:
                raise InputError(
                    f"{name}: bias is {type(bias).__name__}, which depends on positions, but keys in this cache "
                    "are unordered; expected no bias, or one that depends on the score alone, such as SoftCap"
                )
        if isinstance(attention.normalizer, SumToOne) and attention.normalizer.sample:
            raise InputError(
                f"{name}: normalizer is {type(attention.normalizer).__name__}(sample=True), whose weights are "
                "random; expected a deterministic normalizer"
            )

    def _allocate(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super()._allocate(q, k, v)
        for name, x in self._new(q.shape[1], k, v).items():
            if name not in self._buffers:
                self._buffers[name] = x.new_zeros(*k.shape[:2], self._most, *x.shape[3:])
        if "queries" in self.needs:
            rows, d = q.shape[1] * (1 + q.shape[3]), q.shape[3]
            self._buffers["moments"] = q.new_zeros(len(q), rows, 1, d, dtype=at_least_float32(q.dtype))

    def key_positions(self, n_keys: int, n: int) -> Int[Tensor, "b hkv n_keys"]:
        """Each key head holds keys of its own."""
        positions = self._buffers["positions"][:, :, : self._stop]
        if n == 1:  # its position is in the buffer already
            return positions.clone()
        new = torch.arange(self.seen, self.seen + n, device=positions.device)
        return torch.cat([positions, new.expand(*positions.shape[:2], n)], 2)

    def _attend(self, step: Step) -> Tensor:
        q, k = step.rotated(self.seen)
        if k.shape[2] == 1:
            return self._step(step, q, k)
        self.evicted = None
        whole = self._joined(k, step.v, q.shape[1])
        out: Tensor = step.attend(step.own, q, whole["keys"], whole["values"])
        self._store(step, q, whole)
        return out

    def _step(self, step: Step, q: Tensor, k: Tensor) -> Tensor:
        """Decode one token; the order of keys does not matter for a single query."""
        new, self.evicted = self._new(q.shape[1], k, step.v), None
        if self._stop < self._most:
            for name, x in new.items():
                self._buffers[name][:, :, self._stop : self._stop + 1] = x
            self._stop += 1
        else:
            worth = self._worth(self._buffers, self.seen, self.seen + 1 - self.recent)  # the new token is a recent one
            positions, least = self._buffers["positions"], worth == worth.amin(-1, keepdim=True)
            slot = positions.masked_fill(~least, self.seen).argmin(-1, keepdim=True)  # of equal ones the oldest
            self.evicted = positions.gather(2, slot)
            for name, x in new.items():
                self._buffers[name].scatter_(2, _along(slot, x), x)
        held = {name: self._buffers[name][:, :, : self._stop] for name in new}
        weigh = "received" in held or "rows" in held
        out = step.attend(None, q, held["keys"], held["values"], return_weights=weigh)
        if weigh:
            out, weights = out
            self._add(held, weights, 1)
        self._add_queries(step)
        return out

    def _add(self, held: dict[str, Tensor], weights: Tensor, n: int) -> None:
        """Add the weights (b, h, few, m) of the last of n new queries; of a single one also to the sums."""
        heads, few = held["keys"].shape[1], weights.shape[2]
        if "received" in held and n == 1:
            held["received"] += _of_key_heads(weights[:, :, 0].to(held["received"]), heads)
        if "rows" in held:
            rows, at = held["rows"].unflatten(3, (-1, self._window)), (self.seen + n - 1) % self._window
            last: Any = slice(at, at + 1)  # of one query, without a search for indices
            if few > 1:
                last = torch.arange(self.seen + n - few, self.seen + n, device=weights.device) % self._window
            rows[..., last] = weights.to(rows).unflatten(1, (heads, -1)).permute(0, 1, 4, 2, 3)

    def _joined(self, k: Tensor, v: Tensor, query_heads: int) -> dict[str, Tensor]:
        """The buffers in use, followed by new tokens."""
        new = self._new(query_heads, k, v)
        return {name: torch.cat([self._buffers[name][:, :, : self._stop], x], 2) for name, x in new.items()}

    def _store(self, step: Step, q: Tensor, whole: dict[str, Tensor]) -> None:
        """Keep the keys of most worth, after new tokens have attended to `whole`, in which they are the last."""
        n, heads = q.shape[2], step.k.shape[1]
        with serving(None):  # these are no calls of the model
            if "received" in whole:
                whole["received"] += _of_key_heads(step.attention.measure(q, whole["keys"]).received, heads)
            if "rows" in whole:
                last, kv = q[:, :, -self._window :], (whole["keys"], whole["values"])
                self._add(whole, step.attend(step.own, last, *kv, return_weights=True)[1], n)
        self._add_queries(step)
        if whole["keys"].shape[2] > self._most:
            by_age, seen = whole["positions"].argsort(-1), self.seen + n
            worth = self._worth(whole, seen, seen - self.recent).gather(-1, by_age)
            slots = by_age.gather(2, worth.argsort(stable=True, dim=-1)[..., -self.keys :])
            whole = {name: x.gather(2, _along(slots, x)) for name, x in whole.items()}
        self._stop = whole["keys"].shape[2]
        for name, x in whole.items():
            self._buffers[name][:, :, : self._stop] = x

    def _worth(self, buffers: dict[str, Tensor], seen: int, recent: int) -> Float[Tensor, "b hkv m"]:
        """`worth`, checked, and ∞ from position `recent` on; of sums it gets a copy, so that it cannot change them."""
        received, rows = buffers.get("received"), buffers.get("rows")
        mean, covariance = self._future_queries(seen) if "queries" in self.needs else (None, None)
        worth = self.worth(Held(
            buffers["keys"], buffers["values"], buffers["positions"], buffers["positions"] >= recent, seen,
            None if received is None else received.clone(),
            None if rows is None else rows.unflatten(3, (-1, self._window)), mean, covariance,
        ))  # fmt: skip
        if type(self).__module__ == __name__:  # on a GPU the check would wait for the device
            return worth.masked_fill(buffers["positions"] >= recent, torch.inf)
        name, shape = type(self).__name__, tuple(buffers["positions"].shape)
        if not isinstance(worth, Tensor) or tuple(worth.shape) != shape or worth.is_complex():
            raise InputError(f"{name}: worth returned {kind_of(worth)}, expected real numbers {shape}")
        worth = worth if worth.is_floating_point() else worth.double()
        if bool(worth.isnan().any()):
            if received is not None and bool(received.isnan().any()):
                raise InputError(f"{name}: q or k has NaN, so attention received by a key is NaN; expected numbers")
            raise InputError(f"{name}: worth returned NaN, expected real numbers {shape}")
        return worth.masked_fill(buffers["positions"] >= recent, torch.inf)

    def _new(self, query_heads: int, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Buffer entries of new tokens."""
        shape, dtype = k.shape[:3], at_least_float32(k.dtype)
        positions = torch.arange(self.seen, self.seen + shape[2], device=k.device).expand(shape)
        new = {"keys": k, "values": v, "positions": positions}
        if "received" in self.needs:
            new["received"] = k.new_zeros(shape, dtype=dtype)
        if "rows" in self.needs:
            new["rows"] = k.new_zeros(*shape, query_heads // shape[1] * self._window, dtype=dtype)
        return new

    def _add_queries(self, step: Step) -> None:
        """Add the scaled queries before their rotation, and their outer products, to sums; the first are left out."""
        if "queries" not in self.needs:
            return
        moments, attention = self._buffers["moments"], step.attention
        q, rotary = step.q.to(moments.dtype), self.rotary
        if step.rotary is not None:
            self.rotary = step.rotary
        elif rotary is not None:
            back = -torch.arange(self.seen, self.seen + q.shape[2], device=q.device)
            q = rotary(q, back) / (rotary.scaling.magnitude**2 if rotary.scaling else 1)
        q = q[:, :, max(0, FIRST - self.seen) :] * (attention.score or Dot()).factor(q.shape[3])
        q = q / (attention.normalizer or Softmax()).temperature
        moments += torch.cat([q.sum(2, keepdim=True), q.mT @ q], 2).flatten(1, 2)[:, :, None]

    def _future_queries(self, seen: int) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the queries, rotated to the mean of the next positions."""
        heads, d = self._signature[1], self._buffers["moments"].shape[3]
        sums = self._buffers["moments"].view(len(self._buffers["moments"]), heads, -1, 1 + d, d)
        sums = sums / max(1, seen - FIRST)
        mean, covariance = sums[..., 0, :], sums[..., 1:, :] - sums[..., 0, :, None] * sums[..., :1, :]
        if self.rotary is None:
            return mean, covariance
        rotation = _mean_rotation(self.rotary, seen, d).to(mean)
        return mean @ rotation.mT, rotation @ covariance @ rotation.mT


def _along(slots: Tensor, x: Tensor) -> Tensor:
    """Slots (b, hkv, n) as an index of a buffer like x."""
    return slots if x.ndim == 3 else slots[..., None].expand(-1, -1, -1, x.shape[3])


def _of_key_heads(received: Tensor, key_heads: int) -> Tensor:
    """Sum over the query heads of each key head: (b, h, keys) to (b, hkv, keys)."""
    return received.unflatten(1, (key_heads, -1)).sum(2)


@functools.lru_cache(maxsize=8)  # the layers of a model ask for the same one
def _mean_rotation(rotary: Rotary, start: int, dim: int) -> Tensor:
    """The mean of the matrices that rotate vectors of size `dim` to positions start … start + 511, float64."""
    cos, sin = rotary.tables(torch.arange(start, start + FUTURE), dtype=torch.float64)
    every = torch.eye(dim, dtype=torch.float64)[None, None]  # row i becomes column i of the matrix
    return rotate(every, cos.mean(0), sin.mean(0), interleaved=rotary.interleaved)[0, 0].mT


class LastKeys(Evicting):
    """The last keys, and the `first` keys of the text. worth = position, ∞ for the first.

    Without first keys it is a sliding window (Beltagy et al. 2020, arXiv:2004.05150), with a few it is StreamingLLM
    (Xiao et al. 2024, arXiv:2309.17453), but at positions in the text: `Sinks` moves them to cache slots.

    >>> LastKeys(64, first=4)
    LastKeys(keys=64, recent=1, first=4, seen=0, length=0)
    """

    name, needs, most_recent = "window", (), 1

    def __init__(self, keys: int, recent: int | None = None, first: int = 0) -> None:
        super().__init__(keys, recent)
        self.first = first
        self.meaning = f"the first {first} and the last keys" if first else "the last keys"

    def worth(self, held: Held) -> Tensor:
        return held.positions.float().masked_fill(held.positions < self.first, torch.inf)

    def mask(self) -> Mask:
        return Prefix(self.first) | Window(self.keys - self.first) if self.first else Window(self.keys)


class HeavyHitters(Evicting):
    """H2O: keeps the last `recent` keys, and of the older ones the `heavy` keys that received most attention.

    worth = Σ A[q, k] over all queries so far, and over the query heads that share a key head, exact. (Zhang et al.
    2023, arXiv:2306.14048, alg. 1.)

    >>> HeavyHitters(32, 32)
    HeavyHitters(heavy=32, recent=32, seen=0, length=0)
    """

    name, meaning = "heavy", "half last keys, half most attended"

    def __init__(self, heavy: int, recent: int) -> None:
        at_least_one("HeavyHitters", heavy=heavy, recent=recent)
        super().__init__(heavy + recent, recent)

    @property
    def heavy(self) -> int:
        """Keys that are kept for their attention."""
        return self.keys - self.recent

    @classmethod
    def of_budget(cls, keys: int) -> Self:
        return cls(keys // 2, keys - keys // 2)

    def worth(self, held: Held) -> Tensor:
        assert held.received is not None
        return held.received

    def __repr__(self) -> str:
        return f"HeavyHitters(heavy={self.heavy}, recent={self.recent}, seen={self.seen}, length={self.length})"


class KNorm(Evicting):
    """Devoto et al. 2024 (arXiv:2406.11430), §3: keys of small norm receive most attention. worth = −‖k‖₂.

    >>> KNorm(64).recent
    1
    """

    name, meaning, needs, most_recent = "knorm", "keys of the smallest norm", (), 1

    def worth(self, held: Held) -> Tensor:
        return -held.keys.norm(dim=-1)


class KeyDiff(Evicting):
    """Park et al. 2025 (arXiv:2504.15364), alg. 1: keys that differ most from the mean direction of the held keys.

    worth = −cos(k, Σ_j k_j / ‖k_j‖)

    >>> KeyDiff(64).recent
    1
    """

    name, meaning, needs, most_recent = "keydiff", "keys least like the mean of the keys", (), 1

    def worth(self, held: Held) -> Tensor:
        anchor = torch.nn.functional.normalize(held.keys, dim=-1).mean(2, keepdim=True)
        return -torch.cosine_similarity(held.keys, anchor, dim=-1)


class TOVA(Evicting):
    """Oren et al. 2024 (arXiv:2401.06104), §3.2: the key that the last query attended to least, in the mean of heads.

    worth = mean over all heads of a layer of A[last query, k], so all heads hold the same keys.

    >>> TOVA(64).recent
    1
    """

    name, meaning, needs, most_recent = "tova", "keys that the last query attended to most", ("rows",), 1

    @property
    def _window(self) -> int:
        return 1

    def worth(self, held: Held) -> Tensor:
        assert held.rows is not None
        return held.rows.mean((1, 3, 4))[:, None].expand_as(held.positions)


class SnapKV(Evicting):
    """Li et al. 2024 (arXiv:2404.14469), §4: keys that the last w queries attended to, smoothed over neighbours.

    worth = mean over 5 neighbouring held keys of Σ over the last w = max(1, min(32, ⌊B/2⌋)) queries of A[q, k], summed
    over the heads of a group; the last w keys stay, and do not count as neighbours. The paper chooses once, at the end
    of the prompt; here also at every later step.

    >>> SnapKV(256).recent
    32
    """

    name, meaning = "snapkv", "keys that the last queries attended to most, and these"
    needs, most_recent = ("rows",), 32
    neighbours = 5

    def worth(self, held: Held) -> Tensor:
        assert held.rows is not None
        order = held.positions.argsort(-1)
        votes = held.rows.sum((3, 4)).masked_fill(held.recent, 0)
        smooth = torch.nn.functional.avg_pool1d(votes.gather(-1, order), self.neighbours, 1, self.neighbours // 2)
        return torch.empty_like(smooth).scatter_(-1, order, smooth)


class PyramidKV(SnapKV):
    """Cai et al. 2024 (arXiv:2406.02069), §4: the scores of `SnapKV`, and most keys in the first layers.

    Beside the last w = max(1, min(8, ⌊B/2⌋)) keys, layer ℓ of L holds round(a − ℓ (a − z) / (L − 1)) older ones: from
    a = 2 (B − w) − z in the first layer to z = (B − w) / 20 in the last, so that B is the mean over layers.

    >>> PyramidKV(128).budgets(5)
    [242, 185, 128, 71, 14]
    """

    name, meaning, most_recent = "pyramid", "as snapkv, most of them in the first layers", 8
    steepness = 20

    def budgets(self, layers: int) -> list[int]:
        older = self.keys - self.recent
        last = older / self.steepness
        step = (2 * older - 2 * last) / max(1, layers - 1)
        return [self.recent + max(1, round(2 * older - last - layer * step)) for layer in range(layers)]


class ExpectedAttention(Evicting):
    """Devoto et al. 2025 (arXiv:2510.00636), §3: keys that future queries are expected to attend to.

    Queries are taken as Gaussian: μ and Σ are mean and covariance of those so far before rotation, rotated to the mean
    of the next 512 positions. worth = ‖v‖ · mean over the heads of a group of softmax_k(μ·k/√d + kᵀΣk/2d). The first
    four keys stay, and take no part. As in NVIDIA's kvpress (the authors'), the output projection is left out and ε is
    0.

    >>> ExpectedAttention(64).recent
    1
    """

    name, meaning = "expected", "keys that later queries should attend to most"
    needs, most_recent = ("queries",), 1

    def worth(self, held: Held) -> Tensor:
        assert held.query_mean is not None
        assert held.query_covariance is not None
        keys, first = held.keys.to(held.query_mean)[:, :, None], held.positions < FIRST
        scores = (keys @ held.query_mean[..., None])[..., 0] + ((keys @ held.query_covariance) * keys).sum(-1) / 2
        expected = scores.masked_fill(first[:, :, None], -torch.inf).softmax(-1).mean(2)
        return (expected * held.values.norm(dim=-1)).masked_fill(first, torch.inf)

    def _check(self, step: Step) -> None:
        super()._check(step)
        parts, rotary = step.attention, step.rotary or self.rotary
        usual = type(parts.score) in (NoneType, Dot) and type(parts.normalizer) in (NoneType, Softmax)
        if not usual or as_biases(parts.bias) or (rotary and isinstance(rotary.scaling, DynamicNTK)):
            raise InputError(
                "attention is not one that ExpectedAttention can expect: softmax of products without biases, in which "
                "the rotation does not depend on the length (DynamicNTK)"
            )
        if step.positions is not None:
            raise InputError("ExpectedAttention: positions is given, expected None: it counts from the first token")


BUILT_IN = {"full": "base.Full", "sliding": "recent.Sliding", "sinks": "recent.Sinks"} | {
    policy.name: f"evicting.{policy.__name__}"
    for policy in (LastKeys, HeavyHitters, SnapKV, PyramidKV, TOVA, KeyDiff, KNorm, ExpectedAttention)
}


def _problem(cls: Any) -> str | None:
    """Why a class that an installed package registers cannot be used as a policy."""
    if not issubclass(cls, Evicting):
        return "is not a subclass of qkv.cache.Evicting"
    return None if isinstance(getattr(cls, "name", None), str) else "has no class attribute name"


POLICIES = Registry("policy", "qkv.cache", BUILT_IN, "qkv.policies", _problem)
"""Commands find policies of other packages here, in the group of entry points ``qkv.policies``."""


def policies_of(chosen: Sequence[str | type[Evicting]], keys: int, first: int = FIRST) -> dict[str, Evicting]:
    """Empty caches of this budget by name, for names and subclasses of `Evicting`; "sinks" keeps the `first` keys."""
    known = [name for name in POLICIES.names() if name not in ("full", "sliding")]
    found: dict[str, Evicting] = {}
    if not chosen:
        raise InputError(f"policies is empty, expected some of {', '.join(known)}")
    at_least_one(keys=keys)
    if "sinks" in chosen and not (type(first) is int and 0 <= first < keys):
        raise InputError(f"first is {first!r}, expected a whole number below {keys}, the number of keys")
    for policy in chosen:
        of_class = isinstance(policy, type) and issubclass(policy, Evicting)
        if isinstance(policy, str) and policy.startswith("kvpress:"):
            made: Any = above("press", policy)
        elif not of_class and policy not in known:
            hint = nearest(policy, known) if isinstance(policy, str) else ", and subclasses of qkv.cache.Evicting"
            raise InputError(f"policies has {policy!r}, expected some of {', '.join(known)}{hint}")
        else:
            made = POLICIES.load(policy) if isinstance(policy, str) else policy
        name = policy if isinstance(policy, str) else getattr(policy, "name", policy.__name__)
        if name in POLICIES.built_in and not made.__module__.startswith("qkv.cache."):
            raise InputError(f"policies has a class with the name {name!r}, which is a built-in policy")
        if name in found:
            raise InputError(f"policies has {name!r} twice, expected each policy once")
        found[name] = LastKeys(keys, first=first) if name == "sinks" else made.of_budget(keys)
    return found
