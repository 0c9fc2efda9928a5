"""What all caches share: checks, buffers, and the gathering of batch items."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv._engine.call import as_mask
from qkv.attention import Attention, attend
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.positions import Rotary

PAST = (0, math.inf)  # the band of `Causal`


class Cache:
    """Base of all caches. A subclass says what it refuses (`_check`), what it holds (`_allocate`), and attends.

    Buffers are (batch, key heads, rows, …), allocated when the first tokens come; of their rows, the first `_stop` are
    in use. No gradient passes, and dropout never acts: caches are for inference.

    >>> import qkv
    >>> from qkv.cache import Sliding
    >>> cache = Sliding(4)
    >>> for q, k, v in torch.randn(10, 3, 1, 2, 1, 8):  # ten tokens, one by one
    ...     out = cache.attend(qkv.Attention(mask=qkv.masks.Causal()), q, k, v)
    >>> cache.seen, cache.length
    (10, 4)
    """

    def __init__(self, most: int) -> None:
        self.seen = 0
        """Tokens that have come so far."""
        self._most = most
        self._stop = 0
        self._buffers: dict[str, Tensor] = {}
        self._signature: tuple[Any, ...] = ()
        self._in_call = False
        self._checked_call: tuple[Any, ...] = ()  # what need not be checked again: decoding repeats itself

    @property
    def length(self) -> int:
        """Keys held now, of each batch item and key head."""
        return min(self.seen, self._most)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held now; does not grow once they are allocated."""
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
    ) -> Float[Tensor, "b h n dv"]:
        """The n new tokens join the cache, and their queries attend to the keys it holds.

        Args:
            attention: the composition; its mask must hide the future, as `Causal` does.
            q: queries of the new tokens, not yet rotated.
            k: their keys, not yet rotated.
            v: their values.
            rotary: turns queries and keys; none if None.
            positions: of the new tokens, (n,) or (b, n), for `rotary`; ``seen`` … ``seen + n − 1`` if None.
            mask: and-ed to the composition's: n queries × all keys held, the new ones included. Only `Full` takes one.

        Returns:
            ``out`` (b, h, n, dv).

        Raises:
            InputError: for arguments that do not fit together, or that this cache cannot serve exactly.
        """
        if self._in_call:
            raise InputError("the cache is of a call that did not finish, expected a new one")
        self._leave_inference_mode()
        call = (attention, q.shape, k.shape, v.shape, k.dtype, k.device)
        own = as_mask(attention.mask) if isinstance(attention, Attention) else None
        if call != self._checked_call or torch.is_grad_enabled():
            kind = self._checked_signature(attention, q, k, v)
            _check_causal(own)
        assert own is not None
        self._check(attention, own, k.shape[2], rotary, positions, mask)
        if not self._buffers:
            self._allocate(k, v)
            self._signature = kind
        self._in_call = True
        if torch.is_grad_enabled():
            with torch.no_grad():
                out = self._attend(attention, own, q, k, v, rotary, positions, mask)
        else:
            out = self._attend(attention, own, q, k, v, rotary, positions, mask)
        self._in_call, self._checked_call = False, call
        self.seen += k.shape[2]
        return out

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Gather batch items, as beam search does: item i is now what item ``rows[i]`` was. Any number of them."""
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
                new[:, :, : self._stop] = used  # rows that are not in use need no copy
                self._buffers[name] = new
        self._signature = (len(rows), *self._signature[1:])
        self._checked_call = ()

    def _leave_inference_mode(self) -> None:
        """Make buffers of inference mode, which nothing outside of it may write to, ordinary ones."""
        if not torch.is_inference_mode_enabled() and any(x.is_inference() for x in self._buffers.values()):
            self._buffers = {name: x.clone() for name, x in self._buffers.items()}

    def __repr__(self) -> str:
        sizes = "".join(f"{name}={x}, " for name, x in vars(self).items() if name[0] != "_" and name != "seen")
        return f"{type(self).__name__}({sizes}seen={self.seen}, length={self.length})"

    # --- of each cache ------------------------------------------------------------------------------------------------

    def _check(
        self, attention: Attention, own: Mask, n: int, rotary: Rotary | None, positions: Tensor | None,
        mask: Mask | None,
    ) -> None:  # fmt: skip
        """Raise `InputError` for what this cache cannot serve; nothing has changed yet."""
        raise TypeError(f"{type(self).__name__} does not say what it refuses")

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        """Fill `_buffers` with room for keys and values like these."""
        self._buffers = {"keys": _rows(k, self._most), "values": _rows(v, self._most)}

    def _attend(
        self, attention: Attention, own: Mask, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None,
        positions: Tensor | None, mask: Mask | None,
    ) -> Tensor:  # fmt: skip
        """Take the tokens in and attend; `own` is the mask of the composition, `seen` still without them."""
        raise TypeError(f"{type(self).__name__} does not say how it attends")

    def _checked_signature(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        """What may not change from call to call, or `InputError`."""
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
            raise InputError(f"{name} requires a gradient, which no cache passes on; expected torch.no_grad()")
        kind = (ks[0], ks[1], qs[1], ks[3], vs[3], k.dtype, k.device)
        if self._signature and kind != self._signature:
            raise InputError(
                f"batch, key heads, query heads, head sizes, dtype and device are {_joined(kind)}, "
                f"but the tokens in the cache came with {_joined(self._signature)}"
            )
        return kind


class RecentKeysCache(Cache):
    """Base of the caches that hold recent keys side by side, in order: a linear buffer with room to spare.

    New rows go to its end; when that is reached, the rows still needed move to the front. As every token reads the
    whole window anyway, room for an eighth of it makes the move (eight rows a token) cheap.
    """

    def __init__(self, most: int, window: int) -> None:
        super().__init__(most)
        self.window = window

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        size = self._most + max(16, self.window // 8)
        self._buffers = {"keys": _rows(k, size), "values": _rows(v, size)}

    def _append(self, k: Tensor, v: Tensor, keep: int, front: int) -> tuple[Tensor, Tensor]:
        """Write new rows behind the newest; returns keys and values of the `keep` rows before them, and them.

        If rows must move, they move to row `front`. Views of the buffers, unless the chunk is longer than these.
        """
        keys, values = self._buffers["keys"], self._buffers["values"]
        n = k.shape[2]
        if self._stop + n > keys.shape[2]:
            old = slice(self._stop - keep, self._stop)
            if front + keep + n > keys.shape[2]:
                whole = [torch.cat([x[:, :, old], new], 2) for x, new in ((keys, k), (values, v))]
                self._stop = front + self.window
                for x, all_ in zip((keys, values), whole, strict=True):
                    x[:, :, front : self._stop] = all_[:, :, -self.window :]
                return whole[0], whole[1]
            for x in (keys, values):
                x[:, :, front : front + keep] = x[:, :, old].clone()  # the two may overlap
            self._stop = front + keep
        start, self._stop = self._stop, self._stop + n
        keys[:, :, start : self._stop] = k
        values[:, :, start : self._stop] = v
        first = start - keep
        return keys[:, :, first : self._stop], values[:, :, first : self._stop]


def _check_causal(own: Mask | None) -> None:
    """Raise `InputError` for masks that show keys which have not come yet, as far as that can be told."""
    if own is None:
        raise InputError("mask is None with a cache; a cache needs a mask that hides the future, such as Causal()")
    if own.band is not None and own.band[0] < 0:
        raise InputError(
            f"mask shows keys {-own.band[0]:.0f} ahead of the query, which have not come yet; "
            "a cache needs a mask that hides the future, such as Causal()"
        )


def at_least_one(cache: str, **sizes: int) -> None:
    """Raise `InputError` if a size is not a number of keys."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{cache}: {name} is {size!r}, expected a whole number of keys, at least 1")


def check_distance_mask(cache: str, own: Mask, positions: Tensor | None, mask: Mask | None) -> None:
    """Raise `InputError` for what a cache that lets keys go cannot serve."""
    if own.band is None:
        raise InputError(
            f"{cache}: mask is {own!r}, which depends on more than the distance of query and key; "
            "expected a mask such as Causal() or Window(w), or the cache Full"
        )
    if mask is not None:
        raise InputError(f"{cache}: an extra mask came, but keys are let go here; for padding use the cache Full")
    if positions is not None and positions.ndim != 1:
        raise InputError(
            f"{cache}: positions has shape {tuple(positions.shape)}, but keys stand alike in all batch items here; "
            "expected (n,), or for padding on the left the cache Full"
        )


def attend_with(attention: Attention, mask: Mask | None, q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Any:
    """`attend` with the composition but for its mask, and without dropout."""
    return attend(
        q, k, v, mask=mask, bias=attention.bias, score=attention.score, normalizer=attention.normalizer, **asked
    )


def rotated(
    rotary: Rotary | None, q: Tensor, k: Tensor, start: int, positions: Tensor | None = None, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """q and k rotated by `positions`, or from position `start` on; as of a sequence of `length` if given."""
    if rotary is None:
        return q, k
    if q.shape[2] == 1 and q.shape[3] == k.shape[3]:  # one token is so little that starting operations is what costs
        both = torch.cat([q, k], 1)
        both = rotary.span(both, start, length) if positions is None else rotary(both, positions, length)
        return both[:, : q.shape[1]], both[:, q.shape[1] :]
    if positions is None:
        return rotary.span(q, start, length), rotary.span(k, start, length)
    return rotary(q, positions, length), rotary(k, positions, length)


def _rows(x: Tensor, size: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], size, x.shape[3])


def _joined(kind: tuple[Any, ...]) -> str:
    return ", ".join(map(str, kind))
