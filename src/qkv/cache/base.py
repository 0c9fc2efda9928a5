"""The base of the key-value caches, and the caches that keep all keys."""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.attention import Attention, attend
from qkv.biases import Forget
from qkv.engine import as_biases, as_mask
from qkv.errors import InputError, at_least_one
from qkv.linear import LinearState
from qkv.masks import Mask
from qkv.positions import Rotary

PAST = (0, math.inf)  # the band of `Causal`
_ATTENDING: ContextVar[Cache | None] = ContextVar("qkv cache", default=None)


def attending() -> Cache | None:
    """The cache whose `attend` is running in this thread."""
    return _ATTENDING.get()


@dataclass(eq=False, slots=True)
class Step:
    """New tokens for a cache: the arguments of `Cache.attend`, and `own`, the mask of the composition."""

    attention: Attention
    own: Mask
    q: Tensor
    k: Tensor
    v: Tensor
    rotary: Rotary | None
    positions: Tensor | None
    mask: Mask | None
    log_f: Tensor | None

    def rotated(self, start: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        """q and k rotated by `positions`, or from position `start` on; `length` is for scalings that depend on it."""
        q, k, rotary, positions = self.q, self.k, self.rotary, self.positions
        if rotary is None:
            return q, k
        if q.shape[2] == 1 and q.shape[3] == k.shape[3]:  # one token: the overhead of operations dominates
            both = torch.cat([q, k], 1)
            both = rotary.span(both, start, length) if positions is None else rotary(both, positions, length)
            return both[:, : q.shape[1]], both[:, q.shape[1] :]
        if positions is None:
            return rotary.span(q, start, length), rotary.span(k, start, length)
        return rotary(q, positions, length), rotary(k, positions, length)

    def attend(self, mask: Mask | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """`attend` with the composition, but with another mask and without dropout."""
        parts = self.attention
        return attend(q, k, v, mask=mask, bias=parts.bias, score=parts.score, normalizer=parts.normalizer, **options)


class Cache:
    """Base of all caches. A subclass implements `_check`, `_allocate` (its buffers) and `_attend`.

    Buffers are (batch, key heads, rows, …), allocated at the first call; their first `_stop` rows are in use. Caches
    are for inference: there are no gradients and no dropout.

    >>> import qkv
    >>> from qkv.cache import Sliding
    >>> cache = Sliding(4)
    >>> for q, k, v in torch.randn(10, 3, 1, 2, 1, 8):  # ten tokens, one by one
    ...     out = cache.attend(qkv.Attention(mask=qkv.masks.Causal()), q, k, v)
    >>> cache.seen, cache.length
    (10, 4)
    """

    keeps_gates = False
    """Whether the cache takes the gates of forgetting attention."""

    def __init__(self, most: int) -> None:
        self.seen = 0
        """Number of tokens processed so far."""
        self._most = most
        self._stop = 0
        self._buffers: dict[str, Tensor] = {}
        self._signature: tuple[Any, ...] = ()
        self._in_call = False
        self._checked_call: tuple[Any, ...] = ()  # signature of the last call, which needs no second check

    @property
    def length(self) -> int:
        """Number of keys in the cache, per batch item and key head."""
        return min(self.seen, self._most)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, free places included; constant once they are allocated."""
        return sum(x.nbytes for x in self._buffers.values())

    def attend(
        self,
        attention: Attention,
        q: Float[Tensor, "b h n dq"],
        k: Float[Tensor, "b hkv n dk"],
        v: Float[Tensor, "b hkv n dv"],
        *,
        rotary: Rotary | None = None,
        positions: Int[Tensor, "..."] | None = None,
        mask: Mask | None = None,
        log_f: Float[Tensor, "b h n"] | None = None,
    ) -> Float[Tensor, "b h n dv"]:
        """Add n new tokens to the cache; their queries attend to the keys in it.

        Args:
            attention: the composition; its mask must be causal, such as `Causal` or `Window`.
            q: queries of the new tokens, not yet rotated.
            k: their keys, not yet rotated.
            v: their values.
            rotary: rotary embedding of queries and keys; none if None.
            positions: positions of the new tokens for `rotary`, (n,) or (b, n); ``seen`` … ``seen + n − 1`` if None.
            mask: combined with the composition's mask by ``&``: n queries × all keys in the cache, including the new
                ones. Only for `Full`.
            log_f: logarithms of the forget gates of the new tokens, as of `qkv.biases.Forget`. Only for `Full`.

        Returns:
            ``out`` (b, h, n, dv).

        Raises:
            InputError: for arguments that do not fit together, or that this cache cannot serve exactly.
        """
        if self._in_call:
            raise InputError("cache is in an undefined state after a call that failed, expected a new one")
        self._leave_inference_mode()
        call = (attention, q.shape, k.shape, v.shape, k.dtype, k.device)
        own = as_mask(attention.mask) if isinstance(attention, Attention) else None
        if call != self._checked_call or torch.is_grad_enabled():
            signature = self._checked_signature(attention, q, k, v)
            _check_causal(own)
        assert own is not None
        step = Step(attention, own, q, k, v, rotary, positions, mask, log_f)
        if log_f is not None and not self.keeps_gates:
            raise InputError(
                f"{type(self).__name__}: log_f was passed, but this cache evicts keys, and the gates of evicted tokens "
                "count for earlier keys; expected the cache Full"
            )
        self._check(step)
        if not self._buffers:
            self._allocate(q, k, v)
            self._signature = signature
        self._in_call = True
        token = _ATTENDING.set(self)
        try:
            with torch.no_grad():
                out = self._attend(step)
        finally:
            _ATTENDING.reset(token)
        self._in_call, self._checked_call = False, call
        self.seen += k.shape[2]
        return out

    def key_positions(self, n_keys: int, n: int) -> Int[Tensor, "..."]:
        """Positions in the text of the keys to which n new tokens attend: (n_keys,), or (b, hkv, n_keys).

        Only while `attend` runs.
        """
        device = next(iter(self._buffers.values())).device
        return torch.arange(self.seen + n - n_keys, self.seen + n, device=device)

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Gather batch items, as in beam search: item i becomes the former item ``rows[i]``. Any number of items."""
        if not self._buffers:
            return
        self._leave_inference_mode()
        batch = self._signature[0]
        if rows.ndim != 1 or len(rows) == 0 or int(rows.min()) < 0 or int(rows.max()) >= batch:
            raise InputError(f"rows is {rows.tolist()}, expected batch items from 0 to {batch - 1}")
        with torch.no_grad():
            for name, old in self._buffers.items():
                used = old[:, :, : self._stop].index_select(0, rows.to(old.device))
                new = old if len(rows) == batch else old.new_empty(len(rows), *old.shape[1:])
                new[:, :, : self._stop] = used  # unused rows need no copy
                self._buffers[name] = new
        self._signature = (len(rows), *self._signature[1:])
        self._checked_call = ()

    def _leave_inference_mode(self) -> None:
        """Replace buffers made in inference mode, which cannot be written to outside of it."""
        if not torch.is_inference_mode_enabled() and any(x.is_inference() for x in self._buffers.values()):
            self._buffers = {name: x.clone() for name, x in self._buffers.items()}

    def __repr__(self) -> str:
        sizes = "".join(
            f"{name}={x}, " for name, x in vars(self).items() if type(x) is int and name[0] != "_" and name != "seen"
        )
        return f"{type(self).__name__}({sizes}seen={self.seen}, length={self.length})"

    # --- implemented by each cache ------------------------------------------------------------------------------------

    def _check(self, step: Step) -> None:
        """Raise `InputError` for arguments that this cache does not support, before any state changes."""
        raise TypeError(f"{type(self).__name__} does not implement _check")

    def _allocate(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Allocate `_buffers` for keys and values like these."""
        self._buffers = {"keys": rows_like(k, self._most), "values": rows_like(v, self._most)}

    def _attend(self, step: Step) -> Tensor:
        """Store the new tokens and attend; `seen` does not include them yet."""
        raise TypeError(f"{type(self).__name__} does not implement _attend")

    def _checked_signature(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """Check the tensors, and return the properties that must not change between calls."""
        if not isinstance(attention, Attention):
            raise InputError(f"attention is {attention!r}, expected a qkv.Attention, such as Attention(mask=Causal())")
        qs, ks, vs = q.shape, k.shape, v.shape
        if not (len(qs) == len(ks) == len(vs) == 4 and ks[:3] == vs[:3] and qs[0] == ks[0] and 0 < qs[2] == ks[2]):
            raise InputError(
                f"q, k and v have shapes {tuple(qs)}, {tuple(ks)} and {tuple(vs)}, "
                "expected (b, h, n, d), (b, hkv, n, d) and (b, hkv, n, dv) of n new tokens"
            )
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            name = "k" if k.requires_grad else "v" if v.requires_grad else "q"
            raise InputError(f"{name} requires a gradient, but caches have no gradients; use torch.no_grad()")
        signature = (ks[0], ks[1], qs[1], ks[3], vs[3], k.dtype, k.device)
        if self._signature and signature != self._signature:
            raise InputError(
                "q, k and v do not fit the cache: batch, key heads, query heads, head dimensions, dtype and device "
                f"are {', '.join(map(str, signature))}, expected {', '.join(map(str, self._signature))}"
            )
        return signature


def _check_causal(own: Mask | None) -> None:
    """Raise `InputError` for masks that are known to show future keys."""
    if own is None:
        raise InputError("mask is None, but a cache needs a mask without future keys, such as Causal()")
    if own.band is not None and own.band[0] < 0:
        raise InputError(
            f"mask shows keys up to {-own.band[0]:.0f} after the query, but a cache needs a mask without future keys, "
            "such as Causal()"
        )


def check_distance_mask(cache: str, step: Step) -> None:
    """Raise `InputError` for masks and positions that a cache which evicts keys does not support."""
    if step.own.band is None:
        raise InputError(
            f"{cache}: mask is {step.own!r}, which depends on more than the distance of query and key; "
            "expected a mask such as Causal() or Window(w), or the cache Full"
        )
    if step.mask is not None:
        raise InputError(f"{cache}: mask was passed, but this cache evicts keys; for padding use the cache Full")
    if step.positions is not None and step.positions.ndim != 1:
        raise InputError(
            f"{cache}: positions has shape {tuple(step.positions.shape)}, but this cache needs the same positions in "
            "all batch items; expected (n,), or for padding on the left the cache Full"
        )


def rows_like(x: Tensor, size: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], size, x.shape[3])


class Full(Cache):
    """Keeps the keys and values of up to `capacity` tokens; exactly the attention of the whole sequence.

    Supports any mask without future keys; the last query is aligned with the last key. For texts of different lengths,
    pad on the left, and pass `positions` (b, n) and a `mask` for the padding. With a rotary scaling that depends on the
    length, each key keeps the rotation for the length at which it was added.

    >>> import torch, qkv
    >>> cache, causal = Full(512), qkv.Attention(mask=qkv.masks.Causal())
    >>> q = k = v = torch.randn(1, 4, 10, 16)
    >>> cache.attend(causal, q, k, v).shape, cache
    (torch.Size([1, 4, 10, 16]), Full(capacity=512, seen=10, length=10))
    """

    keeps_gates = True

    def __init__(self, capacity: int) -> None:
        at_least_one("Full", capacity=capacity)
        super().__init__(capacity)
        self.capacity = capacity

    def _check(self, step: Step) -> None:
        if self.seen + (n := step.k.shape[2]) > self.capacity:
            raise InputError(
                f"Full: capacity is {self.capacity}, but {n} tokens were added to {self.seen}; expected a larger "
                "capacity, or a cache that evicts keys: Sliding, Sinks, HeavyHitters"
            )

    def _attend(self, step: Step) -> Tensor:
        keys = self._buffers["keys"]
        start, n = self.seen, step.k.shape[2]
        self._stop = stop = start + n
        q, k = step.rotated(start)
        keys.narrow(2, start, n).copy_(k)
        values = self._values(step)
        if step.log_f is not None:
            if start and "log_f" not in self._buffers:
                raise InputError("Full: log_f was passed, but not with the tokens before, expected it in every call")
            shape = *step.log_f.shape[:2], self.capacity, 1
            gates = self._buffers.setdefault(
                "log_f", step.log_f.new_empty(shape, dtype=torch.promote_types(step.log_f.dtype, torch.float32))
            )
            gates.narrow(2, start, n).copy_(step.log_f[..., None])
            bias = *as_biases(step.attention.bias), Forget(gates.narrow(2, 0, stop)[..., 0])
            step = replace(step, attention=replace(step.attention, bias=bias))
        whole: Mask | None = step.own
        if n == 1 and step.own.band == PAST:  # all keys are visible to a single query
            whole = step.mask
        elif step.mask is not None:
            whole = step.own & step.mask
        return step.attend(whole, q, keys.narrow(2, 0, stop), values)

    def _values(self, step: Step) -> Tensor:
        """Store the values of the new tokens, and return those of all."""
        values = self._buffers["values"]
        values.narrow(2, self.seen, step.v.shape[2]).copy_(step.v)
        return values.narrow(2, 0, self._stop)


class Latent(Full):
    """`Full` for values that are the last entries of the keys, which it stores once: the latents of
    `qkv.nn.LatentAttention` (DeepSeek-AI 2024, arXiv:2405.04434, §2.1).

    A rotary embedding may turn the entries before them.

    >>> cache = Latent(64)
    >>> q, k = torch.randn(1, 4, 10, 24), torch.randn(1, 1, 10, 24)
    >>> import qkv
    >>> causal = qkv.Attention(mask=qkv.masks.Causal())
    >>> cache.attend(causal, q, k, k[..., 8:], rotary=Rotary(8)).shape, cache.nbytes // 256  # numbers for each token
    (torch.Size([1, 4, 10, 16]), 24)
    """

    def _check(self, step: Step) -> None:
        super()._check(step)
        before = step.k.shape[3] - step.v.shape[3]
        if before < 0 or not torch.equal(step.v, step.k[..., before:]):
            raise InputError(
                f"v is not the last {step.v.shape[3]} entries of k, which Latent stores; use the cache Full"
            )
        if step.rotary is not None and step.rotary.dim > before:
            raise InputError(
                f"rotary turns {step.rotary.dim} entries, expected at most the {before} before those that are values"
            )

    def _allocate(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._buffers = {"keys": rows_like(k, self._most)}

    def _values(self, step: Step) -> Tensor:
        return self._buffers["keys"].narrow(2, 0, self._stop)[..., -step.v.shape[3] :]


class Recurrent(Cache):
    """The state of a layer of linear attention after the tokens so far: of constant size, without keys.

    `qkv.nn.RecurrentAttention` fills it; it has no `attend` of its own.

    >>> Recurrent()
    Recurrent(seen=0, length=0)
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.state: LinearState | None = None
        self.tail: Float[Tensor, "b 3 channels"] | None = None
        """The last inputs of the layer's convolution."""

    def update(self, state: LinearState, tail: Tensor | None, n: int) -> None:
        """Set the state after n more tokens."""
        if torch.is_grad_enabled() and state.kv.requires_grad:
            raise InputError("x requires a gradient, but caches have no gradients; use torch.no_grad()")
        self.state, self.tail, self.seen = state, tail, self.seen + n

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        if self.state is not None:
            self.state = replace(self.state, kv=self.state.kv[rows], k_sum=self.state.k_sum[rows])
            self.tail = None if self.tail is None else self.tail[rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        tensors = () if self.state is None else (self.state.kv, self.state.k_sum, self.tail)
        return sum(x.nbytes for x in tensors if x is not None)

    def _check(self, step: Step) -> None:
        raise InputError("cache is a Recurrent, expected one that keeps keys, such as Full: this layer attends to keys")
