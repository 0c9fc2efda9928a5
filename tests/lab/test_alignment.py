"""Additive and Luong attention against the equations of their papers, and softmax with a sink for each query."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import papers
from conftest import MASKS, close, enlarged, oracle, rand, refusals, triple
from qkv import attend
from qkv.masks import Dense, Padding
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.normalizers import Softmax

B, NQ, NK, DQ, DK, DV, A = 2, 3, 7, 4, 5, 6, 11
SCORES = ("dot", "general", "concat")
KINDS = ("global", "local-m", "local-p")


def additive_inputs() -> tuple[AdditiveAttention, Tensor, Tensor, Tensor]:
    module = enlarged(AdditiveAttention(DQ, DK, A), 1.0)
    return module, rand(B, NQ, DQ, seed=1), rand(B, NK, DK, seed=2), rand(B, NK, DV, seed=3)


def luong_inputs(score: str, kind: str, half_width: int = 2) -> tuple[LuongAttention, Tensor, Tensor]:
    d_key = DQ if score == "dot" else DK
    module = enlarged(LuongAttention(DQ, d_key, score, kind, half_width), 0.7)  # type: ignore[arg-type]
    return module, rand(B, NQ, DQ, seed=1), rand(B, NK, d_key, seed=2)


def luong_loops(
    module: LuongAttention, query: Tensor, keys: Tensor, lengths: list[int], step: int = 0, shown: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """h~ and weights of every query, each computed alone and without padding."""
    weights, out = np.zeros((B, NQ, NK)), np.zeros(query.shape)
    for b, i in np.ndindex(B, NQ):
        n = lengths[b]
        out[b, i], weights[b, i, :n] = papers.luong(
            papers.parameters(module), module.score, module.kind, module.half_width, query[b, i].numpy(),
            keys[b, :n].numpy(), step + i, None if shown is None else shown[b, 0, i, :n].numpy(),
        )  # fmt: skip
    return out, weights


def gradients(module: nn.Module, *inputs: Tensor, **options: object) -> None:
    """gradcheck in the query, the keys, values where given, and every parameter, along random directions."""
    names = [name for name, _ in module.named_parameters()]

    def run(*tensors: Tensor) -> Tensor:
        given, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), given, options)

    leaves = (*inputs, *(x.detach() for x in module.parameters()))
    assert torch.autograd.gradcheck(run, tuple(x.clone().requires_grad_() for x in leaves), fast_mode=True)


def test_gradients_of_additive() -> None:
    module, query, keys, values = additive_inputs()
    gradients(module, query, keys, values, mask=Padding([5, 4]))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_luong(score: str, kind: str) -> None:
    """And a decoder's steps give the same vectors and gradients, also for a query without visible keys."""
    module, query, keys = luong_inputs(score, kind)
    lengths, mask = torch.tensor([7, 4]), torch.ones(NQ, NK, dtype=torch.bool)
    gradients(module, query, keys, step=1, lengths=lengths)
    mask[1] = False
    leaves = (query.requires_grad_(), keys.requires_grad_(), *module.parameters())
    whole = module(query, keys, mask=mask, lengths=lengths, step=2)
    rows = [
        module(query[:, i : i + 1], keys, mask=Dense(mask[i : i + 1]), lengths=lengths, step=2 + i) for i in range(NQ)
    ]
    close(torch.cat(rows, 1), whole)
    upstream = rand(*whole.shape, seed=9)
    want = torch.autograd.grad(whole, leaves, upstream)
    for one, other in zip(torch.autograd.grad(torch.cat(rows, 1), leaves, upstream), want, strict=True):
        close(one, other, eps=256)


def test_a_centre_exactly_on_a_key() -> None:
    """Where ln(1 − g) = −∞, weights and gradients stay finite and exact."""
    module, query, keys = luong_inputs("concat", "local-p", 10)  # so wide that no key comes or goes with p
    nn.init.zeros_(module.position_vector)  # p = S / 2
    want, weights = luong_loops(module, query, keys, [6, 2])
    assert weights[0, :, 3].min() > 0
    out, got = module(query, keys, lengths=torch.tensor([6, 2]), return_weights=True)
    close(out, want)
    close(got, weights)
    gradients(module, query, keys, lengths=torch.tensor([6, 2]))


# --- a sink for each query --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "name", "far"), [
    ("tiled", "padding", 1e4), ("tiled", "nothing", 0.0), ("tiled", "causal", -math.inf),
    ("eager", "nothing", -math.inf), ("eager", "padding", -1e4),
    ("reference", "causal", 1e4), ("reference", "nothing", -math.inf),
    ("flex", "causal", 0.0), ("flex", "padding", -1e4), ("flex", "nothing", -math.inf),
])  # fmt: skip
@pytest.mark.usefixtures("tile4", "untraced")  # checked shapes cannot be traced
def test_a_sink_for_each_query(kernel: str, name: str, far: float) -> None:
    q, k, v = triple()
    options = {"mask": MASKS[name](11, 13, 2, 6), "normalizer": Softmax(0.8, sink=far + rand(2, 6, 11, seed=3))}
    want = oracle(q, k, v, **options)
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **options)
    close(out, want[0])
    close(lse, want[1])


# --- errors -------------------------------------------------------------------------------------------------


Q, K = rand(2, 3, 4), rand(2, 7, 4)
WRONG: list[tuple[str, Callable[[], object], str | None]] = [
    ("d_query", lambda: AdditiveAttention(0, 5, 3), None),
    ("score", lambda: LuongAttention(4, 5), "equal"),
    ("score", lambda: LuongAttention(4, 4, "add"), "'add'"),  # type: ignore[arg-type]
    ("kind", lambda: LuongAttention(4, 4, "dot", "local"), None),  # type: ignore[arg-type]
    ("half_width", lambda: LuongAttention(4, 4, kind="local-m", half_width=0), None),
    ("query", lambda: AdditiveAttention(4, 5, 3)(rand(2, 3, 5), rand(2, 7, 5)), "5"),
    ("keys", lambda: AdditiveAttention(4, 5, 3)(Q, K), None),
    ("query", lambda: LuongAttention(4, 4)(rand(2, 4), K), r"\(2, 4\)"),
    ("step", lambda: LuongAttention(4, 4)(Q, K, step=-1), None),
    ("lengths", lambda: LuongAttention(4, 4)(Q, K, lengths=torch.tensor([8, 1])), None),
    ("sink", lambda: Softmax(sink=rand(2, 6)), "per query head"),
    ("sink", lambda: attend(*triple(), normalizer=Softmax(sink=rand(2, 6, 13))), "11"),
]

test_alignment_modules_reject_wrong_shapes_and_sizes = refusals(WRONG)
