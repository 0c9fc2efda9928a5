"""Additive and Luong attention against loops in NumPy, and softmax with a sink for each query."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn

from conftest import MASKS, close, oracle, rand, refused, triple, unchecked
from qkv import attend, biases, measure
from qkv._engine.call import Call, Result
from qkv.kernels import KERNELS, watching
from qkv.masks import Causal, Dense, Padding
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.normalizers import Softmax
from qkv.scores import Dot

B, NQ, NK, DQ, DK, DV, A = 2, 3, 7, 4, 5, 6, 11
SCORES = ("dot", "general", "concat")
KINDS = ("global", "local-m", "local-p")
FAST_FIRST = [True, pytest.param(False, marks=pytest.mark.slow)]


def filled(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """In float64, with parameters so large that weights are far from uniform."""
    module = module.double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(scale * rand(*parameter.shape, seed=40 + seed))
    return module


def luong(score: str, kind: str, half_width: int = 2) -> LuongAttention:
    return filled(LuongAttention(DQ, DQ if score == "dot" else DK, score, kind, half_width), 0.7)  # type: ignore[return-value]


def numbers(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in module.named_parameters()}


def softmax(scores: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(s) for s in scores.values())
    return {j: math.exp(s) / total for j, s in scores.items()}


# --- definitions, as loops --------------------------------------------------------------------------------------------


def additive_loops(p: dict, query: np.ndarray, keys: np.ndarray, values: np.ndarray, shown: np.ndarray) -> tuple:
    """Bahdanau et al. 2015, eq. 5, 6 and app. A.1.2."""
    weights = np.zeros((len(query), query.shape[1], keys.shape[1]))
    out = np.zeros((*weights.shape[:2], values.shape[2]))
    for b, i in np.ndindex(*weights.shape[:2]):
        energy = {}
        for j in range(keys.shape[1]):
            if shown[b, i, j]:
                energy[j] = sum(
                    p["vector"][n] * math.tanh(p["w_q"][n] @ query[b, i] + p["w_k"][n] @ keys[b, j])
                    for n in range(len(p["vector"]))
                )
        for j, weight in softmax(energy).items():
            weights[b, i, j] = weight
            out[b, i] += weight * values[b, j]
    return out, weights


def luong_loops(
    module: LuongAttention, query: np.ndarray, keys: np.ndarray, lengths: list[int], step: int = 0,
    shown: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Luong et al. 2015, eq. 5 and 7–10."""
    p, width = numbers(module), module.half_width
    weights = np.zeros((len(query), query.shape[1], keys.shape[1]))
    out = np.zeros(query.shape)
    for b, i in np.ndindex(*weights.shape[:2]):
        h, centre = query[b, i], math.inf
        if module.kind == "local-m":
            centre = step + i
        elif module.kind == "local-p":
            bent = p["position_vector"] @ np.tanh(p["position_weight"] @ h)
            centre = lengths[b] / (1 + math.exp(-bent))
        energy = {}
        for j in range(lengths[b]):
            if module.kind != "global" and abs(j - centre) > width:
                continue
            if shown is not None and not shown[b, i, j]:
                continue
            if module.score == "dot":
                energy[j] = h @ keys[b, j]
            elif module.score == "general":
                energy[j] = h @ p["weight"] @ keys[b, j]
            else:
                energy[j] = p["vector"] @ np.tanh(p["weight"] @ np.concatenate([h, keys[b, j]]))
        context = np.zeros(keys.shape[2])
        for j, weight in softmax(energy).items():
            if module.kind == "local-p":
                weight *= math.exp(-((j - centre) ** 2) / (2 * (width / 2) ** 2))  # noqa: PLW2901
            weights[b, i, j] = weight
            context += weight * keys[b, j]
        out[b, i] = np.tanh(p["combine.weight"] @ np.concatenate([context, h]))
    return out, weights


# --- additive ---------------------------------------------------------------------------------------------------------


def additive_inputs() -> tuple[AdditiveAttention, Tensor, Tensor, Tensor]:
    module = filled(AdditiveAttention(DQ, DK, A))
    return module, rand(B, NQ, DQ, seed=1), rand(B, NK, DK, seed=2), rand(B, NK, DV, seed=3)  # type: ignore[return-value]


@pytest.mark.parametrize("with_values", [False, True], ids=["keys", "values"])
@pytest.mark.parametrize("mask", [None, Padding([7, 4]), Dense(rand(B, 1, NQ, NK, seed=4) > -0.3)])
def test_additive(with_values: bool, mask: object) -> None:
    module, query, keys, values = additive_inputs()
    shown = np.ones((B, NQ, NK), bool)
    if mask is not None:
        shown = mask.dense(NQ, NK, batch=B)[:, 0].expand(B, NQ, NK).numpy()
    values = values if with_values else keys
    want, weights = additive_loops(numbers(module), query.numpy(), keys.numpy(), values.numpy(), shown)
    got = module(query, keys, values if with_values else None, mask=mask, return_weights=True)
    close(got[0], want)
    close(got[1], weights)
    close(module(query, keys, values if with_values else None, mask=mask), want)
    close(module(query, keys, values, mask=mask, projected=module.project(keys)), want)


def test_additive_by_hand() -> None:
    """W = U = v = 1: scores tanh(0 + 0) = 0 and tanh(0 + artanh(1/2)) = 1/2."""
    module = AdditiveAttention(1, 1, 1).double()
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    keys = torch.tensor([[[0.0], [math.atanh(0.5)]]], dtype=torch.float64)
    _, weights = module(torch.zeros(1, 1, 1, dtype=torch.float64), keys, return_weights=True)
    close(weights[0, 0, 1] / weights[0, 0, 0], torch.tensor(math.exp(0.5), dtype=torch.float64))


@pytest.mark.parametrize("fast", FAST_FIRST)
def test_gradients_of_additive(fast: bool) -> None:
    module = filled(AdditiveAttention(2, 3, 4))
    differentiable(module, rand(2, 2, 2), rand(2, 5, 3), rand(2, 5, 1), mask=Padding([5, 4]), fast=fast)


def differentiable(module: nn.Module, *inputs: Tensor, fast: bool, **options: object) -> None:
    """gradcheck in the query, the keys, values where given, and every parameter: along directions, or each entry."""
    names = [name for name, _ in module.named_parameters()]

    def run(*tensors: Tensor) -> Tensor:
        given, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), given, options)

    leaves = (*inputs, *(x.detach() for x in module.parameters()))
    assert torch.autograd.gradcheck(run, tuple(x.clone().requires_grad_() for x in leaves), fast_mode=fast)


# --- Luong ------------------------------------------------------------------------------------------------------------


def luong_inputs(score: str, kind: str, half_width: int = 2) -> tuple[LuongAttention, Tensor, Tensor]:
    return luong(score, kind, half_width), rand(B, NQ, DQ, seed=1), rand(B, NK, DQ if score == "dot" else DK, seed=2)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half_width", [1, 2, 10])
@pytest.mark.parametrize("lengths", [None, [7, 4], [1, 2]])
def test_luong(score: str, kind: str, half_width: int, lengths: list[int] | None) -> None:
    module, query, keys = luong_inputs(score, kind, half_width)
    options = {"lengths": None if lengths is None else torch.tensor(lengths)}
    for step in (0, 3, 20) if kind == "local-m" else (3,):
        want, weights = luong_loops(module, query.numpy(), keys.numpy(), lengths or [NK, NK], step)
        got = module(query, keys, step=step, return_weights=True, **options)
        close(got[0], want)
        close(got[1], weights)
        close(module(query, keys, step=step, **options), want)
        close(module(query, keys, step=step, projected=module.project(keys), **options), want)
        if kind == "local-m" and step == 20 and half_width < 10:
            assert not weights.any()  # the source has ended long before
        if kind == "local-p" and half_width == 1 and lengths is None:
            assert 0 < weights.sum(-1).max() <= 1
            assert weights.sum(-1).min() < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_luong_with_a_mask(kind: str) -> None:
    module, query, keys = luong_inputs("general", kind)
    mask = rand(B, 1, NQ, NK, seed=8) > 0.5
    mask[0, 0, 1] = False  # this query sees nothing
    want, weights = luong_loops(module, query.numpy(), keys.numpy(), [7, 5], shown=mask[:, 0].numpy())
    query, keys = query.requires_grad_(), keys.requires_grad_()
    out, got = module(query, keys, mask=mask, lengths=torch.tensor([7, 5]), return_weights=True)
    close(out, want)
    close(got, weights)
    module(query, keys, mask=mask, lengths=torch.tensor([7, 5])).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (query, keys, *module.parameters()))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", FAST_FIRST)
def test_gradients_of_luong(score: str, kind: str, fast: bool) -> None:
    module = filled(LuongAttention(3, 3 if score == "dot" else 2, score, kind, 2), 0.7)
    keys = rand(2, 5, module.d_key, seed=2)
    differentiable(module, rand(2, 2, 3, seed=1), keys, step=1, lengths=torch.tensor([5, 3]), fast=fast)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_query_at_a_time_equals_all_at_once(score: str, kind: str) -> None:
    """A decoder's steps give the same vectors and gradients, also for a query without visible keys."""
    module, query, keys = luong_inputs(score, kind)
    mask, lengths = torch.ones(NQ, NK, dtype=torch.bool), torch.tensor([7, 4])
    mask[1] = False
    leaves = (query.requires_grad_(), keys.requires_grad_(), *module.parameters())
    whole = module(query, keys, mask=mask, lengths=lengths, step=2)
    rows = [module(query[:, i : i + 1], keys, mask=mask[i : i + 1], lengths=lengths, step=2 + i) for i in range(NQ)]
    close(torch.cat(rows, 1), whole)
    upstream = rand(*whole.shape, seed=9)
    want = torch.autograd.grad(whole, leaves, upstream)
    for one, other in zip(torch.autograd.grad(torch.cat(rows, 1), leaves, upstream), want, strict=True):
        close(one, other, eps=256)


@pytest.mark.parametrize("score", SCORES)
def test_a_centre_exactly_on_a_key(score: str) -> None:
    """Where ln(1 − g) = −∞, weights and gradients stay finite and exact."""
    module, query, keys = luong_inputs(score, "local-p", 10)  # so wide that no key comes or goes with p
    nn.init.zeros_(module.position_vector)  # p = S / 2
    lengths = torch.tensor([6, 2])
    want, weights = luong_loops(module, query.numpy(), keys.numpy(), [6, 2])
    assert weights[0, :, 3].min() > 0
    out, got = module(query, keys, lengths=lengths, return_weights=True)
    close(out, want)
    close(got, weights)
    nearby = []
    for move in (1e-6, -1e-6):
        with torch.no_grad():
            module.position_vector.fill_(move)
        nearby.append(module(query, keys, lengths=lengths).sum())
    nn.init.zeros_(module.position_vector)
    module(query, keys, lengths=lengths).sum().backward()
    slope = (nearby[0] - nearby[1]) / 2e-6
    torch.testing.assert_close(module.position_vector.grad.sum(), slope.detach(), rtol=1e-5, atol=1e-8)
    assert slope.abs() > 1e-4


def test_observers_see_one_call_with_the_final_weights() -> None:
    module, query, keys = luong_inputs("concat", "local-p", 1)
    seen: list[tuple[Call, Result]] = []
    with watching(lambda call, result: seen.append((call, result))):
        out = module(query, keys, lengths=torch.tensor([7, 4]))
    assert len(seen) == 1
    call, result = seen[0]
    want, weights = luong_loops(module, query.numpy(), keys.numpy(), [7, 4])
    close(out, want)
    close(KERNELS["eager"].forward(call).weights[:, 0], weights)
    close(result.out[:, 0], weights @ keys.numpy())
    given = call.given
    found = measure(
        given.q, given.k, mask=given.mask, bias=given.biases, score=given.score, normalizer=given.normalizer
    )
    close(found.sink_mass[:, 0], 1 - weights.sum(-1))
    close(found.received[:, 0], weights.sum(1))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_keys_change_nothing_and_batch_items_are_independent(score: str, kind: str) -> None:
    module, query, keys = luong_inputs(score, kind)
    lengths = torch.tensor([7, 4])
    want = module(query, keys, lengths=lengths)
    other = keys.clone()
    other[1, 4:] = 1e3
    close(module(query, other, lengths=lengths), want, eps=1)
    close(module(query[1:], keys[1:, :4]), want[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    for module, query, keys in (
        additive_inputs()[:3],
        luong_inputs("concat", "local-p"),
        luong_inputs("dot", "global"),
    ):
        want = module(query, keys)
        with unchecked():
            out = module.to(dtype)(query.to(dtype), keys.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)


# --- a sink for each query --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager", "reference", "flex"])
@pytest.mark.parametrize("name", ["none", "causal", "padding", "nothing"])
@pytest.mark.parametrize("far", [0.0, 1e4, -1e4, -math.inf])
@pytest.mark.usefixtures("tile4")
def test_a_sink_for_each_query(kernel: str, name: str, far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # checked shapes cannot be traced
    q, k, v = triple()
    options = {"mask": MASKS[name](11, 13, 2, 6), "normalizer": Softmax(0.8, sink=far + rand(2, 6, 11, seed=3))}
    want = oracle(q, k, v, **options)
    out, lse = attend(q, k, v, kernel=kernel, return_lse=True, **options)
    close(out, want[0])
    close(lse, want[1])


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
def test_gradients_of_a_sink_for_each_query(kernel: str) -> None:
    tensors = [*triple(h=2, hkv=1, nq=3, nk=4, d=2, dv=2), rand(2, 2, 3, seed=5)]

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, mask=Causal(), normalizer=Softmax(0.7, sink=sink), kernel=kernel, return_lse=True)  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, tuple(x.requires_grad_() for x in tensors))


def test_equal_sinks_for_all_queries_equal_a_sink_for_each_head() -> None:
    q, k, v = triple()
    heads = rand(6, seed=3)
    whole = Softmax(sink=heads[None, :, None].expand(2, 6, 11))
    for kernel in ("flash", "tiled", "eager"):
        close(
            attend(q, k, v, normalizer=whole, kernel=kernel),
            attend(q, k, v, normalizer=Softmax(sink=heads), kernel=kernel),
            eps=1,
        )


def test_the_sink_is_the_missing_mass_by_hand() -> None:
    """Two equal scores, g = ¼ and ½: Z = 2, Z′ = ¾, so the weights are ⅛ and ¼ and the sink has ln(2 − ¾)."""
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 2, 1)
    sink = torch.full((1, 1, 1), math.log(1.25))
    gaussian = biases.Dense(torch.tensor([[math.log(0.25), math.log(0.5)]]))
    _, weights = attend(q, k, k, score=Dot(1.0), bias=gaussian, normalizer=Softmax(sink=sink), return_weights=True)
    close(weights, torch.tensor([[[[0.125, 0.25]]]]))


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG = [
    (lambda: AdditiveAttention(0, 5, 3), "d_query", None),
    (lambda: AdditiveAttention(4, 5, -1), "d_hidden", None),
    (lambda: LuongAttention(4, 5), "score", "equal"),
    (lambda: LuongAttention(4, 4, "add"), "score", "'add'"),
    (lambda: LuongAttention(4, 4, "dot", "local"), "kind", None),
    (lambda: LuongAttention(4, 4, kind="local-m", half_width=0), "half_width", None),
    (lambda: AdditiveAttention(4, 5, 3)(rand(2, 3, 5), rand(2, 7, 5)), "query", r"\(2, 3, 5\)"),
    (lambda: AdditiveAttention(4, 5, 3)(rand(2, 3, 4), rand(2, 7, 4)), "keys", None),
    (lambda: LuongAttention(4, 4)(rand(2, 4), rand(2, 7, 4)), "query", r"\(2, 4\)"),
    (lambda: luong("dot", "local-m")(rand(2, 3, 4), rand(2, 7, 4), step=-1), "step", None),
    (lambda: luong("dot", "global")(rand(2, 3, 4), rand(2, 7, 4), lengths=torch.tensor([8, 1])), "lengths", None),
    (lambda: Softmax(sink=rand(2, 6)), "sink", "per query head"),
    (lambda: attend(*triple(), normalizer=Softmax(sink=rand(2, 6, 13))), "sink", "11"),
]


@pytest.mark.parametrize(("make", "argument", "match"), WRONG)
def test_alignment_modules_reject_wrong_shapes_and_sizes(make, argument: str, match: str | None) -> None:
    with unchecked(), refused(argument, match):
        make()


def test_number_of_parameters() -> None:
    def count(module: nn.Module) -> int:
        return sum(x.numel() for x in module.parameters())

    assert count(AdditiveAttention(4, 5, 11)) == 11 * (4 + 5) + 11
    scores = {"dot": 0, "general": 4 * 5, "concat": 4 * (4 + 5) + 4}
    for score, own in scores.items():
        d_key = 4 if score == "dot" else 5
        for kind in KINDS:
            places = 4 * 4 + 4 if kind == "local-p" else 0
            assert count(LuongAttention(4, d_key, score, kind)) == own + places + 4 * (4 + d_key)
