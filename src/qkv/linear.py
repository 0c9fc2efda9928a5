"""`qkv.linear_attend` and `qkv.linformer`: attention in linear time, with a recurrent state, and of projected keys.

`attend` with ``score=Features(...)`` and ``normalizer=Identity(...)`` is the same linear attention, with masks. This
module adds the two forms that `attend` cannot express: `linear_attend` continues from a state, and `linformer`
projects the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.engine.call import Call
from qkv.engine.modes import transforming
from qkv.errors import InputError, at_least_one, kind_of
from qkv.features import elu_plus_one
from qkv.kernels import opaque, serve
from qkv.kernels.linear import CHUNK, LinearState, attention, gated
from qkv.masks import Padding
from qkv.normalizers import Identity
from qkv.scores import Features

__all__ = ["LinearState", "linear_attend", "linformer"]


@overload
def linear_attend(
    q: Float[Tensor, "b h nq d"], k: Float[Tensor, "b hkv nk d"], v: Float[Tensor, "b hkv nk dv"], *,
    features: Callable[[Tensor], Tensor] = elu_plus_one, causal: bool = True, normalize: bool = True,
    decay: Tensor | None = None, beta: Tensor | None = None,
    state: LinearState | None = None, chunk: int = CHUNK,
    return_state: Literal[False] = False,
) -> Float[Tensor, "b h nq dv"]: ...  # fmt: skip
@overload
def linear_attend(
    q: Float[Tensor, "b h nq d"], k: Float[Tensor, "b hkv nk d"], v: Float[Tensor, "b hkv nk dv"], *,
    features: Callable[[Tensor], Tensor] = elu_plus_one, causal: bool = True, normalize: bool = True,
    decay: Tensor | None = None, beta: Tensor | None = None,
    state: LinearState | None = None, chunk: int = CHUNK,
    return_state: bool = False,
) -> Any: ...  # fmt: skip
def linear_attend(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    *,
    features: Callable[[Tensor], Tensor] = elu_plus_one,
    causal: bool = True,
    normalize: bool = True,
    decay: Float[Tensor, " hkv"] | Float[Tensor, "b hkv nk"] | Float[Tensor, "b hkv nk m"] | None = None,
    beta: Float[Tensor, " hkv"] | Float[Tensor, "b hkv nk"] | None = None,
    state: LinearState | None = None,
    chunk: int = CHUNK,
    return_state: bool = False,
) -> Float[Tensor, "b h nq dv"] | tuple[Float[Tensor, "b h nq dv"], LinearState]:
    """Compute linear attention: Σ (φ(q)·φ(k)) v over the visible keys, divided by Σ φ(q)·φ(k) if `normalize`.

    The output is φ(q_t) · S_t of a state S, here a plain sum. `decay` and `beta` make it the state of RetNet, gated
    linear attention, Mamba-2, DeltaNet, Gated DeltaNet or Kimi Linear: S_t = D_t S_{t−1} + φ(k_t) v_tᵀ with
    D_t = diag(exp decay_t), and by the delta rule S_t = (I − β_t φ(k_t) φ(k_t)ᵀ) D_t S_{t−1} + β_t φ(k_t) v_tᵀ: a
    part β of the value that is stored at the key is replaced by the new value.

    Args:
        q: queries.
        k: keys; ``h`` must be a multiple of ``hkv``.
        v: values.
        features: φ, such as one of `qkv.features`.
        causal: whether a query attends only to its own key and earlier ones; with nq ≠ nk the last query is aligned
            with the last key. Keys in `state` precede all others.
        normalize: whether to divide by the sum of the weights (unless the sum is 0).
        decay: logarithms ≤ 0 of the factors by which the state is multiplied before each key is added, for each key
            head (RetNet), each token (Mamba-2, Gated DeltaNet), or each token and feature (GLA, Kimi Linear); −inf
            forgets everything. Needs `causal`.
        beta: the rate β of the delta rule, for each key head or each token. It needs `causal` and ``normalize=False``,
            and keys with ``β |φ(k)|² ≤ 2``, such as features of length 1: else the state grows.
        state: the state returned by an earlier call, to continue from.
        chunk: tokens per chunk. It changes speed and memory, not the result; 1 is the recurrence of the paper. With
            `decay` or `beta` at most 64, with a decay of each feature at most 16.
        return_state: whether to return the state after the last key as well.

    Returns:
        ``out`` (b, h, nq, dv), or ``(out, state)``.

    Raises:
        InputError: for arguments that do not fit together.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236, eq. 8–12 and 16–20. Decay: RetNet, arXiv:2307.08621; GLA,
    arXiv:2312.06635; Mamba-2, arXiv:2405.21060. Delta rule: DeltaNet, arXiv:2406.06484; with decay Gated DeltaNet,
    arXiv:2412.06464, and for each feature Kimi Linear, arXiv:2510.26692.

    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> whole = linear_attend(q, k, v)
    >>> prompt, state = linear_attend(*(x[:, :, :99] for x in (q, k, v)), return_state=True)
    >>> token = linear_attend(*(x[:, :, 99:] for x in (q, k, v)), state=state)
    >>> torch.allclose(whole, torch.cat([prompt, token], 2), atol=1e-5)
    True

    Gated DeltaNet:

    >>> unit, decay, beta = torch.nn.functional.normalize, -torch.rand(1, 4, 100), torch.rand(1, 4, 100)
    >>> q, k = unit(q, dim=-1), unit(k, dim=-1)
    >>> linear_attend(q, k, v, features=lambda x: x, normalize=False, decay=decay, beta=beta).shape
    torch.Size([1, 4, 100, 16])
    """
    call = Call.of(q, k, v, score=Features(features), normalizer=Identity())
    at_least_one(chunk=chunk)
    decay = _gate("decay", decay, call.k, causal, 4)
    beta = _gate("beta", beta, call.k, causal, 3)
    traced = torch.compiler.is_compiling() or transforming()
    if decay is not None and not traced and not bool((decay.detach() <= 0).all()):
        raise InputError(
            f"decay has the largest entry {float(decay.detach().max()):.3g}, expected logarithms, at most 0: pass the "
            "logarithm of factors between 0 and 1"
        )
    if normalize and (beta is not None or (state is not None and state.rule == "delta")):
        raise InputError(
            "normalize is True with the delta rule, whose weights have signs and no sum to divide by; "
            "pass normalize=False"
        )
    if state is not None:
        want = (k.shape[0], k.shape[1], call.k.shape[3], v.shape[3])
        if state.kv.shape != want or state.k_sum.shape != want[:3]:
            raise InputError(
                f"state has kv {tuple(state.kv.shape)} and k_sum {tuple(state.k_sum.shape)}, "
                f"expected {want} and {want[:3]} for these keys, values and features"
            )
        if causal and q.shape[2] > k.shape[2]:
            raise InputError(
                f"state was passed with {q.shape[2]} queries and {k.shape[2]} new keys, so some queries would precede "
                "the new keys; expected no more queries than new keys"
            )
    if decay is None and beta is None:
        out, after = attention(call.q, call.k, v, state, causal=causal, divided=normalize, chunk=chunk)
    else:
        out, after = gated(call.q, call.k, v, state, decay=decay, beta=beta, divided=normalize, chunk=chunk)
    return (out.to(v.dtype), after) if return_state else out.to(v.dtype)


def _gate(name: str, gate: object, k: Float[Tensor, "b hkv nk m"], causal: bool, most: int) -> Tensor | None:
    """Return the gate of each token, or also of each feature."""
    if gate is None:
        return None
    shapes = [k.shape[1:2], k.shape[:3], k.shape[:4]][: most - 1]
    if not isinstance(gate, Tensor) or not gate.dtype.is_floating_point or gate.shape not in shapes:
        expected = ", ".join(str(tuple(x)) for x in shapes)
        raise InputError(
            f"{name} is {kind_of(gate)}, expected a float tensor of one of the shapes {expected} for features of "
            f"keys {tuple(k.shape)}"
        )
    if gate.device != k.device:
        raise InputError(f"{name} is on {gate.device} and k on {k.device}, expected one device")
    if not causal:
        raise InputError(
            f"{name} was passed with causal=False, but it follows the order of the keys; expected causal=True"
        )
    return gate[None, :, None].expand(k.shape[:3]) if gate.ndim == 1 else gate


@opaque
def linformer(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    e: Float[Tensor, "nk r"] | Float[Tensor, "hkv nk r"],
    f: Float[Tensor, "nk r"] | Float[Tensor, "hkv nk r"] | None = None,
    *,
    lengths: Sequence[int] | Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Return softmax(q (eᵀk)ᵀ / √d) fᵀv: exact attention to r learned mixtures of the keys, O(n r).

    Each mixture contains keys of all positions, so there is no causal form, and `e` fixes the number of keys.

    Args:
        q: queries.
        k: keys; ``h`` must be a multiple of ``hkv``.
        v: values.
        e: projection of the keys, one for all heads or one for each key head.
        f: projection of the values; `e` if None.
        lengths: number of real keys of each batch item; the padding after them is zeroed before the projection.

    Returns:
        ``out`` (b, h, nq, dv).

    Raises:
        InputError: for arguments that do not fit together.

    Source: Wang et al. 2020, arXiv:2006.04768, eq. 7.

    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> linformer(q, k, v, torch.randn(100, 8) / 8**0.5).shape
    torch.Size([1, 4, 100, 16])
    """
    grid = Call.of(q, k, v).grid  # checks them
    f = e if f is None else f
    heads, n_keys = k.shape[1:3]
    for name, x in (("e", e), ("f", f)):
        if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.shape[:-1] not in ((n_keys,), (heads, n_keys)):
            shapes = f"({n_keys}, r) or ({heads}, {n_keys}, r) for k {tuple(k.shape)}"
            raise InputError(f"linformer: {name} is {kind_of(x)}, expected {shapes}")
    if e.shape[-1] != f.shape[-1]:
        raise InputError(f"linformer: e projects to {e.shape[-1]} keys but f to {f.shape[-1]} values, expected equal")
    if lengths is not None:
        padding = Padding(lengths)
        padding.check(grid)
        real = torch.arange(n_keys, device=k.device) < torch.as_tensor(lengths, device=k.device)[:, None]
        k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
    call = Call.of(q, e.to(k).mT @ k, f.to(v).mT @ v)
    return serve(call).out
