"""The linear kernel: linear attention, whose weights are products of features, from a running state.

Σ_j (φ(q)·φ(k_j)) v_j = φ(q) · Σ_j φ(k_j) v_jᵀ: O(n) in time and memory (Katharopoulos et al. 2020, arXiv:2006.16236,
eq. 6). The causal form is chunked: the state is computed once per chunk, and within its own chunk a query uses masked
quadratic attention (Hua et al. 2022, arXiv:2202.10447, §3.2). All chunks are computed together in a few large products.
With decay or the delta rule, `gated`, the state goes from chunk to chunk instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.engine.call import Call, at_least_float32
from qkv.engine.tiles import spans
from qkv.engine.transforms import Need, unmet
from qkv.errors import InputError
from qkv.masks.convert import parts
from qkv.normalizers import Pointwise
from qkv.results import Result

CHUNK = 128
GATED_CHUNK, CHANNEL_CHUNK = 64, 16  # at most so many tokens with decay or delta rule; with a decay of each channel
SEGMENT = 2**21  # elements in the largest temporary of a segment of the sequence
GATED_SEGMENT = 2**20
EVERYTHING, PAST = (-math.inf, math.inf), (0, math.inf)  # the bands of no mask and of `Causal`


@dataclass(frozen=True, eq=False)
class LinearState:
    """State of linear attention after any number of keys and values, in float32 or better.

    >>> LinearState.zero(1, 2, n_features=8, value_dim=16).kv.shape
    torch.Size([1, 2, 8, 16])
    """

    kv: Float[Tensor, "b hkv m dv"]
    """Σ φ(k) vᵀ."""
    k_sum: Float[Tensor, "b hkv m"]
    """Σ φ(k); zeros after the delta rule, which divides by nothing."""
    rule: Literal["sum", "decay", "delta"] = "sum"
    """How it came to be: a plain sum, one that decays, or the delta rule."""

    @staticmethod
    def zero(
        batch: int, key_heads: int, n_features: int, value_dim: int,
        dtype: torch.dtype = torch.float32, device: torch.device | None = None,
    ) -> LinearState:  # fmt: skip
        """Return the state before the first key."""
        kv = torch.zeros(batch, key_heads, n_features, value_dim, dtype=dtype, device=device)
        return LinearState(kv, kv[..., 0].clone())

    def merge(self, other: LinearState, /) -> LinearState:
        """Return the state after the keys of both, which must be plain sums."""
        if {self.rule, other.rule} != {"sum"}:
            raise InputError(
                f"LinearState: merge of states of the rules {self.rule!r} and {other.rule!r}, expected two sums; "
                "with decay or beta the order of the keys counts; continue from one of them with state="
            )
        return LinearState(self.kv + other.kv, self.k_sum + other.k_sum)

    def plus(self, k: Float[Tensor, "b hkv n m"], v: Float[Tensor, "b hkv n dv"]) -> LinearState:
        """Return the state after more keys, given as features."""
        return LinearState(self.kv + k.mT @ v, self.k_sum + k.sum(2), self.rule)


OFFERS: tuple[Need, ...] = ("weights that are no softmax", "gradients", "tensors in closures")


def unsupported_reason(call: Call) -> str | None:
    """Return why this kernel cannot serve the call, or None if it can."""
    if not (isinstance(call.normalizer, Pointwise) and call.normalizer.is_identity) or call.shift is not None:
        return f"its weights are the scores themselves, not {type(call.user.normalizer).__name__} of them"
    if (why := unmet(call, OFFERS)) is not None:
        return why
    band, _, others = parts(call.mask, call.grid)
    selects = band in (EVERYTHING, PAST) and not others
    return None if selects else "the mask is neither causal, nor a selection of keys, nor both"


def causal(call: Call) -> bool:
    """Return whether a call that this kernel can serve is causal."""
    return parts(call.mask, call.grid)[0] == PAST


def forward(call: Call) -> Result:
    """Compute attention in time and memory linear in the sequence, differentiable in q, k and v."""
    band, keys, _ = parts(call.mask, call.grid)
    k, v = call.k, call.v
    if keys is not None:
        masked = ~keys[:, None, :, None]
        k, v = k.masked_fill(masked, 0), v.masked_fill(masked, 0)
    q = call.q if call.scale == 1 else call.q.to(at_least_float32(call.q.dtype)) * call.scale
    out, _ = attention(q, k, v, causal=band == PAST, divided=call.normalizer.divide == "sum")
    if call.divisor is not None:
        out = out / call.divisor[..., None]
    return Result(out.to(call.v.dtype), None)


def attention(
    q: Float[Tensor, "b h nq m"],
    k: Float[Tensor, "b hkv nk m"],
    v: Float[Tensor, "b hkv nk dv"],
    state: LinearState | None = None,
    *,
    causal: bool,
    divided: bool,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "b h nq dv"], LinearState]:
    """Compute linear attention of features, `divided` by the sum of the weights or not, and the state after all keys.

    Masked keys are zeros. With nq ≠ nk the last query is aligned with the last key; keys in `state` precede all others.
    """
    dtype = at_least_float32(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    (b, hkv, n_keys, m), dv, n_queries = k.shape, v.shape[3], q.shape[2]
    if state is None:
        state = LinearState.zero(b, hkv, m, dv, dtype, q.device)
    q = q.unflatten(1, (hkv, -1))  # (b, hkv, group, nq, m)
    if not causal:
        state = state.plus(k, v)
        out = (q.flatten(2, 3) @ state.kv).view(*q.shape[:4], dv)
        total = (q @ state.k_sum[:, :, None, :, None])[..., 0] if divided else None
        out = _divided(out, total)
    else:
        # Keys before the first query go into the state; queries before the first key are fully masked. The rest is
        # square.
        ahead = n_keys - n_queries
        if ahead > 0:
            state = state.plus(k[:, :, :ahead], v[:, :, :ahead])
            k, v = k[:, :, ahead:], v[:, :, ahead:]
        q, chunk = q[:, :, :, max(0, -ahead) :], min(chunk, k.shape[2])
        widest = max(q.shape[2] * chunk, q.shape[2] * m, m * dv // chunk)
        outs, size = [], chunk * max(1, SEGMENT // (b * hkv * widest * chunk))
        for part in spans(k.shape[2], size):  # allocating for all tokens costs more than the arithmetic
            out, state = _square(q[:, :, :, part], k[:, :, part], v[:, :, part], state, chunk, divided)
            outs.append(out)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 3)
    if out.shape[3] < n_queries:
        out = torch.nn.functional.pad(out, (0, 0, n_queries - out.shape[3], 0))
    return out.flatten(1, 2), state


def _divided(out: Float[Tensor, "*n dv"], total: Float[Tensor, "*n"] | None) -> Float[Tensor, "*n dv"]:
    if total is None:
        return out
    return out / torch.where(total.abs() < torch.finfo(total.dtype).tiny, 1.0, total)[..., None]


def _square(
    q: Float[Tensor, "b hkv g n m"],
    k: Float[Tensor, "b hkv n m"],
    v: Float[Tensor, "b hkv n dv"],
    state: LinearState,
    chunk: int,
    divided: bool,
) -> tuple[Float[Tensor, "b hkv g n dv"], LinearState]:
    """Compute causal attention with query i at key i: the output, and the final state."""
    group, n = q.shape[2:4]
    if n % chunk:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -n % chunk)) for x in (q, k, v))
    k, v = k.unflatten(2, (-1, chunk)), v.unflatten(2, (-1, chunk))  # (b, hkv, chunks, chunk, …)
    q = q.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)  # (b, hkv, chunks, group · chunk, m)

    kv, before = _sums(k.mT @ v, state.kv)
    weights = (q @ k.mT).unflatten(3, (group, chunk)).tril_().flatten(3, 4)
    inside = weights @ v
    out = torch.baddbmm(inside.flatten(0, 2), q.flatten(0, 2), before.flatten(0, 2)).view(inside.shape)
    k_sum, before = _sums(k.sum(3), state.k_sum)
    total = weights.sum(4) + (q @ before[..., None])[..., 0] if divided else None

    def unfold(x: Tensor) -> Tensor:
        return x.unflatten(3, (group, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :n]

    return _divided(unfold(out), None if total is None else unfold(total)), LinearState(kv, k_sum, state.rule)


def _sums(x: Float[Tensor, "b hkv c *n"], start: Float[Tensor, "b hkv *n"]) -> tuple[Tensor, Tensor]:
    """Return `start` plus the sum of all chunks; and for each chunk, `start` plus the sum of the earlier chunks."""
    sums = torch.cat([start[:, :, None], x], 2).cumsum(2)
    return sums[:, :, -1], sums[:, :, :-1]


def gated(
    q: Float[Tensor, "b h nq m"],
    k: Float[Tensor, "b hkv nk m"],
    v: Float[Tensor, "b hkv nk dv"],
    state: LinearState | None = None,
    *,
    decay: Float[Tensor, "b hkv nk"] | Float[Tensor, "b hkv nk m"] | None,
    beta: Float[Tensor, "b hkv nk"] | None,
    divided: bool,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "b h nq dv"], LinearState]:
    """Compute causal linear attention whose state decays or is written by the delta rule, and the state after all keys.

    The state after token t is S_t = (I − β_t k_t k_tᵀ) diag(exp decay_t) S_{t−1} + β_t k_t v_tᵀ, without β the sum
    diag(exp decay_t) S_{t−1} + k_t v_tᵀ. In a chunk the delta rule adds keys with *corrected* values, which solve a
    triangular system (the WY form: Yang et al. 2024, arXiv:2406.06484; with decay arXiv:2412.06464).
    """
    dtype = at_least_float32(q.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    (b, hkv, n, m), dv, n_queries = k.shape, v.shape[3], q.shape[2]
    if state is None:
        state = LinearState.zero(b, hkv, m, dv, dtype, q.device)
    q = q[:, :, max(0, n_queries - n) :]  # queries before the first key see nothing
    q = torch.nn.functional.pad(q, (0, 0, n - q.shape[2], 0)).unflatten(1, (hkv, -1))
    decay = k.new_zeros(1, 1, 1).expand(b, hkv, n) if decay is None else decay.to(dtype)
    beta = None if beta is None else beta.to(dtype)
    chunk = min(chunk, n, GATED_CHUNK if decay.ndim == 3 else CHANNEL_CHUNK)
    s = (state.kv if beta is not None else torch.cat([state.kv, state.k_sum[..., None]], 3)).to(dtype)
    if beta is None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], 3)  # the sum of the weights
    widest = max(q.shape[2], 2) * chunk * (m if decay.ndim == 4 else 1) + m + dv
    outs = []
    for part in spans(n, chunk * max(1, GATED_SEGMENT // (b * hkv * widest * chunk))):
        gates = decay[:, :, part], None if beta is None else beta[:, :, part]
        out, s = _steps(q[:, :, :, part], k[:, :, part], v[:, :, part], s, *gates, chunk)
        outs.append(out)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, 3)
    out = torch.nn.functional.pad(out, (0, 0, max(0, n_queries - n), 0))[:, :, :, -n_queries:].flatten(1, 2)
    if beta is not None:
        return out, LinearState(s, torch.zeros_like(s[..., 0]), "delta")
    after = LinearState(s[..., :-1], s[..., -1], "delta" if state.rule == "delta" else "decay")
    return _divided(out[..., :-1], out[..., -1] if divided else None), after


def _steps(
    q: Float[Tensor, "b hkv g n m"],
    k: Float[Tensor, "b hkv n m"],
    v: Float[Tensor, "b hkv n dv"],
    state: Float[Tensor, "b hkv m dv"],
    decay: Float[Tensor, "b hkv n"] | Float[Tensor, "b hkv n m"],
    beta: Float[Tensor, "b hkv n"] | None,
    chunk: int,
) -> tuple[Float[Tensor, "b hkv g n dv"], Float[Tensor, "b hkv m dv"]]:
    """Compute the output of a segment of the sequence, and the state after it, chunk by chunk."""
    group, n = q.shape[2:4]
    pad, channels = -n % chunk, decay.ndim == 4
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    state = state.flatten(0, 1)
    decay = torch.nn.functional.pad(decay, (0, 0, 0, pad) if channels else (0, pad)).unflatten(2, (-1, chunk))
    k, v = k.unflatten(2, (-1, chunk)), v.unflatten(2, (-1, chunk))  # (b, hkv, chunks, chunk, …)
    q = q.unflatten(3, (-1, chunk)).transpose(2, 3)  # (b, hkv, chunks, group, chunk, m)

    # What is left at token i of what was written at token j ≤ i: summed anew for each j, since a difference of two sums
    # loses digits, and is NaN after a gate of 0. Then since the start of the chunk, and until its end.
    rows = torch.arange(chunk, device=k.device)
    later = rows[:, None] > rows
    later, past = (x[:, :, None] if channels else x for x in (later, rows[:, None] >= rows))
    left = torch.where(later, decay.unsqueeze(4), 0).cumsum(3).exp().where(past, 0)
    since = decay.cumsum(3).exp()
    until = left[:, :, :, -1]
    if not channels:
        since, until = since[..., None], until[..., None]

    readers = q if beta is None else torch.cat([q, k.unsqueeze(3)], 3)  # the delta rule reads what is stored at the key
    if channels:
        weights = (readers.transpose(3, 4) @ (left * k.unsqueeze(3)).mT).transpose(3, 4)
    else:
        weights = (readers.flatten(3, 4) @ k.mT).view(*readers.shape[:5], chunk) * left.unsqueeze(3)
    before = readers * since.unsqueeze(3)
    written = k * until
    kept = since[:, :, :, -1:].mT
    if beta is not None:
        b = torch.nn.functional.pad(beta, (0, pad)).unflatten(2, (-1, chunk))[..., None]
        right = torch.cat([v, before[:, :, :, -1]], 4) * b
        stored = weights[:, :, :, -1].tril(-1) * b
        solved = torch.linalg.solve_triangular(stored, right, upper=False, unitriangular=True)
        v, old = solved.split([v.shape[4], k.shape[4]], 4)
        weights, before = weights[:, :, :, :-1], before[:, :, :, :-1]
    starts, values = [], []
    for i in range(k.shape[2]):
        value, gate = v[:, :, i].flatten(0, 1), kept[:, :, i].flatten(0, 1)
        if beta is not None:
            value = torch.baddbmm(value, old[:, :, i].flatten(0, 1), state, alpha=-1)
        starts.append(state)
        values.append(value)
        state = torch.baddbmm(state * gate, written[:, :, i].flatten(0, 1).mT, value)
    value, start, state = (x.unflatten(0, k.shape[:2]) for x in (torch.stack(values, 1), torch.stack(starts, 1), state))
    out = weights.flatten(3, 4) @ value + before.flatten(3, 4) @ start
    return out.unflatten(3, (group, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :n], state
