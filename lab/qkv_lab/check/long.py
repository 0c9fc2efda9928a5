"""Checks of exercises about longer texts: positions, shared keys, caches, and linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float64, Int
from torch import Tensor
from torch.nn import functional as F

import qkv
from qkv import masks
from qkv_lab.check.hints import Wrong, draw, exercise, expect, trial


@exercise
def rotary(answer: Callable[..., Float64[Tensor, "b n d"]]) -> None:
    """Exercise of the lab on longer texts: rotary positions.

    Args:
        answer: ``answer(x, positions, base=10000.0)`` for float64 x (b, n, d) with d even, and whole positions (n,).
            Rotates the pair (x₂ᵢ, x₂ᵢ₊₁) at position p by the angle p · base^(−2i/d). Returns (b, n, d).
    """
    for name, at, base in (
        ("positions 0, 1, 2, …", torch.arange(5), 10000.0),
        ("positions of a later piece", torch.arange(90, 95), 10000.0),
        ("another base", torch.tensor([7, 0, 3, 3, 12]), 500.0),
    ):
        x, d = draw(2, 5, 6).double(), 6
        pairs = torch.view_as_complex(x.reshape(2, 5, d // 2, 2))
        halves = torch.complex(x[..., : d // 2], x[..., d // 2 :])
        turn = _turn(at, base ** (-torch.arange(0, d, 2).double() / d))
        steps = torch.arange(5)
        mistakes = {
            "the rotation goes backwards: (a, b) becomes (a cos − b sin, a sin + b cos)": pairs * turn.conj(),
            "pairs are neighbours, (0, 1), (2, 3), …; this pairs each number with the one half the width away": None,
            "the exponent is −i/d, expected −2i/d, for the pair i": pairs
            * _turn(at, base ** (-torch.arange(d // 2).double() / d)),
            "all pairs rotate by the same angle": pairs * _turn(at, torch.ones(d // 2).double()),
            "the places 0, 1, 2, … are used instead of the positions": pairs
            * _turn(steps, base ** (-torch.arange(0, d, 2).double() / d)),
        }
        wrong = {hint: _real(z) for hint, z in mistakes.items() if z is not None}
        turned = halves * turn
        wrong[next(hint for hint, z in mistakes.items() if z is None)] = torch.cat([turned.real, turned.imag], -1)
        with trial(name):
            got = answer(x.clone(), at) if base == 10000.0 else answer(x.clone(), at, base)
            expect(got, _real(pairs * turn), "the answer", wrong, 1e-9)


def _turn(at: Int[Tensor, " n"], speeds: Float64[Tensor, " pairs"]) -> Tensor:
    """The complex numbers of absolute value 1 whose product with a pair rotates it."""
    angles = at.double()[:, None] * speeds
    return torch.complex(angles.cos(), angles.sin())


def _real(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


@exercise
def grouped_queries(answer: Callable[..., Float64[Tensor, "b h n d"]]) -> None:
    """Exercise of the lab on longer texts: causal attention whose query heads share keys and values.

    Args:
        answer: ``answer(q, k, v)`` for float64 q (b, h, n, d) and k, v (b, g, n, d), where g divides h. Query head i
            uses key head i // (h / g). Returns (b, h, n, d).
    """
    for name, (h, g) in {
        "4 heads, 2 of keys": (4, 2),
        "6 heads, 2 of keys": (6, 2),
        "one head of keys": (3, 1),
    }.items():
        q, k, v = (draw(2, heads, 5, 4, seed=i).double() for i, heads in enumerate((h, g, g)))
        right = qkv.attend(q, k, v, mask=masks.Causal())
        tiled = k.repeat(1, h // g, 1, 1), v.repeat(1, h // g, 1, 1)
        mistakes = {
            "heads take turns: head i uses key head i % g. Neighbours share: use repeat_interleave, not repeat": (
                qkv.attend(q, *tiled, mask=masks.Causal())
            ),
            "later keys are visible: the attention is causal": qkv.attend(q, k, v),
            "the scores are not divided by √d": qkv.attend(2 * q, k, v, mask=masks.Causal()),
        }
        with trial(name):
            expect(answer(q.clone(), k.clone(), v.clone()), right, "the answer", mistakes, 1e-9)


@exercise
def kv_cache(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """Exercise of the lab on longer texts: attention of one new token, with a cache of keys and values.

    Args:
        answer: ``answer(q, k, v, keys, values)`` for float64 q, k, v (b, h, 1, d) of the new token, and keys and values
            (b, h, t, d) of the t tokens before it; t is 0 at first. Returns the output (b, h, 1, d), and the keys and
            values (b, h, t + 1, d) for the next token.
    """
    q, k, v = (draw(2, 3, 5, 4, seed=i).double() for i in range(3))
    right = qkv.attend(q, k, v, mask=masks.Causal())
    keys = values = q[:, :, :0]
    for t in range(5):
        one = slice(t, t + 1)
        with trial(f"token {t + 1}, {t} in the cache"):
            got = answer(q[:, :, one], k[:, :, one], v[:, :, one], keys, values)
            if not (isinstance(got, tuple) and len(got) == 3 and all(isinstance(x, Tensor) for x in got)):
                raise Wrong("it returns something else than three tensors: the output, keys, values")
            out, keys, values = got
            before = qkv.attend(q[:, :, one], k[:, :, :t], v[:, :, :t]) if t else torch.zeros_like(v[:, :, one])
            mistakes = {
                "the new token does not attend to itself: add its key and value to the cache first": before,
                "it attends to itself alone: the cache is not used": v[:, :, one] if t else v[:, :, one] * torch.nan,
                "the scores are not divided by √d": (qkv.attend(2 * q[:, :, one], k[:, :, : t + 1], v[:, :, : t + 1])),
            }
            expect(out, right[:, :, one], "the output", mistakes, 1e-9)
            for what, found, whole in (("keys", keys, k), ("values", values, v)):
                expect(found, whole[:, :, : t + 1], f"the returned {what}", tolerance=1e-9)


@exercise
def linear_state(answer: Callable[..., Float64[Tensor, "b n d"]]) -> None:
    """Exercise of the lab on longer texts: causal linear attention with φ(x) = elu(x) + 1.

    Args:
        answer: ``answer(q, k, v)`` for float64 q, k, v (b, n, d). Returns (b, n, d): for query i, the values up to i,
            weighted by φ(qᵢ) · φ(kⱼ) and divided by the sum of these weights. 200,000 tokens must fit in memory.
    """
    for name, (b, n, d) in {"5 tokens": (2, 5, 4), "one token": (1, 1, 3), "60 tokens": (1, 60, 4)}.items():
        q, k, v = (draw(b, n, d, seed=i).double() for i in range(3))
        phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
        a = (phi_q @ phi_k.mT).tril()
        every = phi_q @ phi_k.mT
        plain = (q.relu() @ k.relu().mT).tril()
        mistakes = {
            "the weights are not divided by their sum": a @ v,
            "later tokens are included: the sums must grow with the query": every @ v / every.sum(-1, keepdim=True),
            "this is softmax attention; the weights are φ(q) · φ(k)": (
                qkv.attend(q[:, None], k[:, None], v[:, None], mask=masks.Causal())[:, 0]
            ),
            "φ is relu, expected elu + 1": plain @ v / plain.sum(-1, keepdim=True),
        }
        with trial(name):
            got = answer(q.clone(), k.clone(), v.clone())
            expect(got, a @ v / a.sum(-1, keepdim=True), "the answer", mistakes, 1e-9)

    with trial("200,000 tokens in memory"):
        x = draw(1, 200_000, 2).double()
        try:
            out = answer(x, x, x)
        except (MemoryError, RuntimeError) as error:
            raise Wrong(
                "it forms a table of n × n numbers (320 GB): keep the sums of φ(k) vᵀ and of φ(k) instead "
                f"({str(error).splitlines()[0]})"
            ) from None
        phi = F.elu(x) + 1
        last = (phi[:, -1:] @ phi.mT) / (phi[:, -1:] @ phi.sum(1)[..., None])
        expect(out[:, -1:], last @ x, "the last output", tolerance=1e-7)
