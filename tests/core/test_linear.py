"""Linear attention equals its definition in every form and on every kernel; the approximations approximate."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import close, largest_tensor, rand, refused, triple, unchecked
from qkv import InputError, attend, plan
from qkv.biases import ALiBi
from qkv.features import Favor, elu_plus_one, relu
from qkv.linear import LinearState, linear_attend, linformer
from qkv.masks import Causal, Mask, Padding, Window
from qkv.normalizers import Identity, Sigmoid, Softmax
from qkv.scores import Additive, Dot, Features, General

MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu_plus_one, "relu": relu, "favor": Favor(3, 7)}
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "padding": Padding([11, 5]),
    "left padding": Padding([9, 13], "left"),
    "empty item": Padding([0, 7]),
    "causal padding": Causal() & Padding([12, 4]),
    "left padding, causal": Padding([2, 8], "left") & Causal(),
    "one length": Causal() & Padding([7]),
}


@pytest.fixture(params=[3, 4, 128])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks so small that a handful of tokens makes several."""
    defaults = importlib.import_module("qkv.kernels.linear")
    run = defaults.attention
    monkeypatch.setattr(defaults, "attention", lambda *a, **kw: run(*a, **kw, chunk=request.param))
    return request.param


def compared(kernel: str, tensors: tuple[Tensor, ...], **parts: Any) -> list[Tensor]:
    """Output and the gradients of everything."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves, kernel=kernel, **parts)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, leaves, rand(*out.shape, seed=9, dtype=out.dtype))]


def agree(tensors: tuple[Tensor, ...], **parts: Any) -> None:
    for got, want in zip(compared("linear", tensors, **parts), compared("eager", tensors, **parts), strict=True):
        close(got, want, eps=4096)


# --- the kernel equals the definition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("nq", [1, 11, 13, 17])
def test_the_linear_kernel_matches_eager(chunk: int, mask: str, nq: int) -> None:
    for feature_map in MAPS.values():
        for divide in (None, "sum", "keys"):
            agree(triple(nq=nq), mask=MASKS[mask], score=Features(feature_map), normalizer=Identity(divide))


@pytest.mark.parametrize(("h", "hkv"), [(1, 1), (3, 3), (6, 1), (6, 3)])
def test_grouped_heads_share_keys(chunk: int, h: int, hkv: int) -> None:
    for mask in (None, Causal()):
        agree(triple(h=h, hkv=hkv), mask=mask, score=Features(elu_plus_one), normalizer=Identity("sum"))


@pytest.mark.parametrize("score", [Dot(), Dot(scale=-0.7), General(rand(3, 3))])
def test_any_product_score_without_a_normalizer_is_served(chunk: int, score: Dot | General) -> None:
    for divide in (None, "keys"):
        agree(triple(), mask=Causal() & Padding([5, 12]), score=score, normalizer=Identity(divide))


def test_linear_attention_by_hand() -> None:
    q, k = torch.ones(1, 1, 3, 1), torch.tensor([1.0, 2.0, 1.0]).view(1, 1, 3, 1)
    v = torch.tensor([6.0, 0.0, 2.0]).view(1, 1, 3, 1)
    parts: dict[str, Any] = {"mask": Causal(), "score": Features(relu), "kernel": "linear"}
    assert attend(q, k, v, normalizer=Identity("sum"), **parts).flatten().tolist() == [6, 2, 2]  # type: ignore[union-attr]
    assert attend(q, k, v, normalizer=Identity(), **parts).flatten().tolist() == [6, 6, 8]  # type: ignore[union-attr]


def test_fully_masked_queries_give_zeros() -> None:
    q, k, v = triple(nq=17, nk=13)
    for mask in (Causal(), Causal() & Padding([13, 13])):
        out = attend(q, k, v, mask=mask, score=Features(relu), normalizer=Identity("sum"), kernel="linear")
        assert isinstance(out, Tensor)
        assert not out[:, :, :4].any()
        assert out[:, :, 4:].any()
    # relu: no feature in common with any key
    out = attend(q.abs(), -k.abs(), v, score=Features(relu), normalizer=Identity("sum"), kernel="linear")
    assert isinstance(out, Tensor)
    assert not out.any()


@pytest.mark.parametrize("divide", [None, "sum"])
def test_gradcheck(divide: str | None) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(
            q, k, v, mask=Causal() & Padding([4, 6]), score=Features(Favor(3, 5)), normalizer=Identity(divide),
            kernel="linear",
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, triple(h=2, hkv=1, nq=5, nk=7, dv=2, grad=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_nan_in_padding_does_not_spread(causal: bool, side: str) -> None:
    q, k, v = triple()
    lengths = [9, 4]
    mask: Mask = Padding(lengths, side) & Causal() if causal else Padding(lengths, side)
    bad_k, bad_v = k.clone(), v.clone()
    for item, length in enumerate(lengths):
        padded = slice(length, None) if side == "right" else slice(0, 13 - length)
        bad_k[item, :, padded], bad_v[item, :, padded] = math.nan, math.inf
    for feature_map in MAPS.values():
        parts: dict[str, Any] = {"mask": mask, "score": Features(feature_map), "normalizer": Identity("sum")}
        leaves = [q.clone().requires_grad_(), bad_k.requires_grad_(), bad_v.requires_grad_()]
        out = attend(*leaves, kernel="linear", **parts)
        assert isinstance(out, Tensor)
        close(out, attend(q, k, v, kernel="linear", **parts))  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.sum(), leaves)
        assert grads[0].isfinite().all()
        for item, length in enumerate(lengths):
            real = slice(0, length) if side == "right" else slice(13 - length, None)
            assert grads[1][item, :, real].isfinite().all()
            assert grads[2].isfinite().all()


def test_padding_is_not_a_key_of_zeros() -> None:
    """φ(0) ≠ 0: zeroing padded keys before the map would leave them in the normaliser."""
    q, k, v = triple(b=1)
    parts: dict[str, Any] = {"score": Features(elu_plus_one), "normalizer": Identity("sum"), "kernel": "linear"}
    want = attend(q, k[:, :, :7], v[:, :, :7], **parts)
    close(attend(q, k, v, mask=Padding([7]), **parts), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(feature_map: Any, dtype: torch.dtype) -> None:
    tensors = triple(nq=307, nk=311, dtype=dtype)
    parts: dict[str, Any] = {"score": Features(feature_map), "normalizer": Identity("sum"), "mask": Causal()}
    got = compared("linear", tensors, **parts)
    want = compared("linear", tuple(x.float() for x in tensors), **parts)
    assert got[0].dtype == dtype
    assert [x.dtype for x in got[1:]] == [dtype] * 3
    close(got[0], want[0], eps=4)  # features and output are rounded, sums are not
    close(got[3], want[3], eps=16)


def test_the_linear_kernel_is_chosen() -> None:
    q, k, v = triple()
    chosen = plan(q, k, v, score=Features(relu), normalizer=Identity("sum"), mask=Causal())
    assert chosen.kernel == "linear"
    assert "linear" in plan(q, k, v).rejected


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"normalizer": Softmax()}, "not Softmax of them"),
        ({"normalizer": Sigmoid()}, "not Sigmoid of them"),
        ({"score": Additive(torch.ones(3, dtype=torch.float64))}, "score Additive is not a product"),
        ({"bias": ALiBi()}, "a bias depends on query and key"),
        ({"dropout_p": 0.5}, "dropout acts on weights"),
        ({"mask": Window(3)}, "neither causal, nor a selection of keys"),
        ({"mask": ~Causal()}, "neither causal, nor a selection of keys"),
        ({"mask": Causal() & Window(3)}, "neither causal, nor a selection of keys"),
        ({"mask": Causal() | Padding([3, 4])}, "neither causal, nor a selection of keys"),
    ],
)
def test_the_linear_kernel_rejects_unsupported_calls(parts: dict[str, Any], why: str) -> None:
    q, k, v = triple()
    parts = {"score": Features(relu), "normalizer": Identity("sum")} | parts
    with pytest.raises(InputError, match=why):
        attend(q, k, v, kernel="linear", **parts)
    attend(q, k, v, **parts)


# --- forms, states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("nq", [5, 13, 17])
@pytest.mark.parametrize("normalize", [False, True])
def test_all_forms_are_equal(feature_map: Any, nq: int, normalize: bool) -> None:
    q, k, v = triple(nq=nq)
    divide = "sum" if normalize else None
    want = attend(q, k, v, mask=Causal(), score=Features(feature_map), normalizer=Identity(divide), kernel="eager")
    kinds: list[dict[str, Any]] = [{"form": "recurrent"}, *({"chunk": c} for c in (1, 2, 5, 13, 99))]
    states = []
    for kind in kinds:
        out, state = linear_attend(q, k, v, features=feature_map, normalize=normalize, return_state=True, **kind)
        close(out, want, eps=512)  # type: ignore[arg-type]
        states.append(state)
    for state in states:
        close(state.kv, feature_map(k).mT @ v, eps=512)
        close(state.k_sum, feature_map(k).sum(2), eps=512)
    both_ways = linear_attend(q, k, v, features=feature_map, normalize=normalize, causal=False)
    close(both_ways, attend(q, k, v, score=Features(feature_map), normalizer=Identity(divide), kernel="eager"), eps=512)  # type: ignore[arg-type]


def test_gradients_of_the_forms_are_equal() -> None:
    tensors = triple(grad=True)
    grads = []
    for kind in ({"form": "recurrent"}, {"chunk": 4}):
        out = linear_attend(*tensors, **kind)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(out, tensors, rand(*out.shape, seed=4)))  # type: ignore[union-attr]
    for one, other in zip(*grads, strict=True):
        close(one, other, eps=512)


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_splitting_a_sequence_anywhere_changes_nothing(form: Any) -> None:
    q, k, v = triple(nq=13)
    whole, final = linear_attend(q, k, v, return_state=True)
    for cut in range(1, 13):
        first, state = linear_attend(*(x[:, :, :cut] for x in (q, k, v)), return_state=True, form=form, chunk=4)
        second, state = linear_attend(
            *(x[:, :, cut:] for x in (q, k, v)), state=state, return_state=True, form=form, chunk=4
        )
        close(torch.cat([first, second], 2), whole, eps=512)  # type: ignore[list-item,arg-type]
        close(state.kv, final.kv, eps=512)  # type: ignore[union-attr]
        close(state.k_sum, final.k_sum, eps=512)  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
def test_decoding_token_by_token(form: Any, feature_map: Any) -> None:
    q, k, v = triple(nq=13)
    state = LinearState.zero(2, 2, feature_map(k).shape[3], 5, torch.float64)
    for t in range(13):
        q_t, k_t, v_t = (x[:, :, t : t + 1] for x in (q, k, v))
        out, state = linear_attend(q_t, k_t, v_t, features=feature_map, state=state, return_state=True, form=form)
        want = linear_attend(*(x[:, :, : t + 1] for x in (q, k, v)), features=feature_map)
        close(out, want[:, :, -1:], eps=512)  # type: ignore[index,arg-type]


def test_a_state_without_a_causal_mask_adds_keys() -> None:
    q, k, v = triple()
    _, state = linear_attend(q[:, :, :1], k[:, :, :6], v[:, :, :6], causal=False, return_state=True)
    rest = linear_attend(q, k[:, :, 6:], v[:, :, 6:], causal=False, state=state)  # type: ignore[arg-type]
    close(rest, linear_attend(q, k, v, causal=False), eps=512)  # type: ignore[arg-type]


def test_the_state_does_not_grow() -> None:
    sizes = set()
    for n in (7, 700):
        _, state = linear_attend(*triple(nq=n, nk=n), return_state=True)
        sizes.add((state.kv.shape, state.k_sum.shape))  # type: ignore[union-attr]
    assert sizes == {((2, 2, 3, 5), (2, 2, 3))}


@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
def test_the_future_cannot_change_the_past(feature_map: Any) -> None:
    q, k, v = triple(nq=13)
    before = linear_attend(q, k, v, features=feature_map, chunk=5)
    for t in (1, 4, 6, 12):
        late_k, late_v = k.clone(), v.clone()
        late_k[:, :, t:], late_v[:, :, t:] = 5 * rand(13 - t, 3, seed=8), 1e6
        after = linear_attend(q, late_k, late_v, features=feature_map, chunk=5)
        close(after[:, :, :t], before[:, :, :t])  # type: ignore[index]
        assert not torch.allclose(after[:, :, t], before[:, :, t])  # type: ignore[index]


@pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
def test_results_do_not_depend_on_the_rest_of_the_batch(feature_map: Any) -> None:
    q, k, v = triple(b=3)
    k[1] *= 6  # an item with large keys must not cost the rest of the batch precision
    together = linear_attend(q, k, v, features=feature_map)
    for i in range(3):
        alone = linear_attend(*(x[i : i + 1] for x in (q, k, v)), features=feature_map)
        close(alone, together[i : i + 1], eps=512)  # type: ignore[index,arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(causal: bool) -> None:
    """The largest tensor of forward and backward grows with n, and is far below n²."""

    def largest(n: int) -> int:
        tensors = triple(b=1, h=2, hkv=1, nq=n, nk=n, dtype=torch.float32, grad=True)
        mask = Causal() if causal else None

        def run() -> None:
            out = attend(*tensors, mask=mask, score=Features(elu_plus_one), normalizer=Identity("sum"), kernel="linear")
            out.sum().backward()  # type: ignore[union-attr]

        return largest_tensor(run)

    few, many = largest(1024), largest(4096)
    assert many <= 4.1 * few
    assert many < 4096**2 / 8


# --- features ---------------------------------------------------------------------------------------------------------


def test_elu_plus_one() -> None:
    x = torch.linspace(-9, 9, 101, dtype=torch.float64, requires_grad=True)
    close(elu_plus_one(x), torch.nn.functional.elu(x) + 1)
    assert torch.autograd.gradcheck(elu_plus_one, x)
    assert elu_plus_one(torch.tensor([-30.0])) > 0  # elu(−30) + 1 is 0 in float32


@pytest.mark.parametrize(("d", "m"), [(5, 17), (7, 7), (11, 3), (1, 4), (13, None)])
def test_rows_are_orthogonal_within_blocks(d: int, m: int | None) -> None:
    w = Favor(d, m).weight
    assert w.shape == (m or math.floor(d * math.log(d)), d)
    for block in w.split(d):
        gram = block @ block.T
        close(gram, torch.diag(gram.diagonal()), eps=1024)
    assert len({round(x, 6) for x in w.norm(dim=1).tolist()}) == len(w)


def test_rows_are_distributed_as_gaussian() -> None:
    d = 7
    w = torch.cat([Favor(d, 7 * 30, seed).weight for seed in range(20)])
    n = len(w)
    lengths = w.square().sum(1)  # chi-squared: mean d, variance 2d
    assert abs(lengths.mean() - d) < 5 * math.sqrt(2 * d / n)
    assert abs(lengths.var() / (2 * d) - 1) < 0.15
    assert w.mean(0).abs().max() < 5 / math.sqrt(n)
    assert abs(w.pow(4).mean() - 3) < 0.3  # an entry is Gaussian


def test_favor_depends_on_its_seed_only() -> None:
    x = rand(4, 5)
    one = Favor(5, 11, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        same = Favor(5, 11, seed=3)
        assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one(x), same(x))
    other = one.redrawn(4)
    assert (other.head_dim, other.n_features, other.seed) == (5, 11, 4)
    assert not torch.allclose(one(x), other(x))
    assert torch.equal(other(x), Favor(5, 11, seed=4)(x))
    with pytest.raises(FrozenInstanceError):
        one.seed = 4  # type: ignore[misc]


def test_favor_is_unbiased_and_more_features_are_better() -> None:
    d = 5
    q, k = 0.6 * rand(d, seed=1), 0.6 * rand(d, seed=2)  # longer ones have tails too heavy for 400 seeds
    want = torch.exp(q @ k / math.sqrt(d))
    spread = torch.exp((q + k).square().sum() / math.sqrt(d)) - 1  # relative variance of one feature (lemma 2)
    last = math.inf
    for m in (4, 16, 64, 256):
        got = torch.stack([phi(q) @ phi(k) for phi in (Favor(d, m, seed) for seed in range(400))])
        assert abs(got.mean() - want) < 4 * got.std() / math.sqrt(400), f"biased with {m} features"
        error = (got / want - 1).square().mean()
        assert error < 1.1 * spread / m  # orthogonal rows are better still
        assert error < last / 2
        last = float(error)


def test_orthogonal_rows_are_better_than_independent_ones() -> None:
    d = 8
    q, k = rand(d, seed=1), rand(d, seed=2)
    want = torch.exp(q @ k / math.sqrt(d))
    logit = ((q + k) * d**-0.25, -(q @ q + k @ k) / (2 * math.sqrt(d)))
    orthogonal = torch.stack([phi(q) @ phi(k) for phi in (Favor(d, d, seed) for seed in range(2000))])
    independent = torch.exp(rand(2000, d, d, seed=3) @ logit[0] + logit[1]).mean(1)
    assert (orthogonal - want).square().mean() < 0.95 * (independent - want).square().mean()


def test_favor_estimates_softmax_attention() -> None:
    q, k, v = triple(b=1, d=7)
    exact = attend(q, k, v, mask=Causal())
    for m, most in ((64, 0.5), (16_384, 0.05)):
        got = linear_attend(q, k, v, features=Favor(7, m))
        assert (got - exact).abs().mean() < most  # type: ignore[operator]


def test_scaling_of_queries_cancels() -> None:
    q, k, v = triple()
    phi = Favor(3, 11)
    ratio = phi.of_queries(q) / phi(q)
    close(ratio, ratio[..., :1].expand_as(ratio), eps=4096)
    close(phi.of_queries(q).amax(-1), torch.ones(q.shape[:3]))
    plain = linear_attend(q, k, v, features=phi.__call__)  # a bound method has no `of_queries`
    close(linear_attend(q, k, v, features=phi), plain, eps=4096)  # type: ignore[arg-type]


def test_large_vectors_do_not_overflow() -> None:
    phi = Favor(64)
    w = phi.weight.float()
    worst = w[w.norm(dim=1).argmax()] * 64**0.25  # the key with the largest features: w·x − |x|²/2 = |w|²/2
    largest = phi(worst).amax()
    assert largest.isfinite()
    for scale in (0.5, 0.9, 1.1, 2.0):
        assert phi(worst * scale).amax() < largest
    q, k, v = (scale * x for scale, x in zip((30, 3, 1), triple(d=64, dtype=torch.float32), strict=True))
    assert linear_attend(q, k, v, features=phi).isfinite().all()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_favor_computes_in_at_least_float32(dtype: torch.dtype) -> None:
    x = rand(7, 5, dtype=dtype)
    got = Favor(5)(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    close(got, Favor(5)(x.double()))


# --- linformer --------------------------------------------------------------------------------------------------------


def test_linformer_is_its_equation() -> None:
    q, k, v = triple(h=2)
    e, f = rand(13, 7, seed=5), rand(13, 7, seed=6)
    for a, b in ((e, None), (e, f)):
        keys, values = torch.einsum("nr,bhnd->bhrd", a, k), torch.einsum("nr,bhnd->bhrd", a if b is None else b, v)
        want = torch.softmax(q @ keys.mT / math.sqrt(3), -1) @ values
        close(linformer(q, k, v, a, b), want, eps=512)


def test_linformer_of_heads() -> None:
    q, k, v = triple()
    e, f = rand(2, 13, 7, seed=5), rand(13, 7, seed=6)
    got = linformer(q, k, v, e, f)
    for head in range(6):
        one = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        close(got[:, one[0]], linformer(q[:, one[0]], k[:, one[1]], v[:, one[1]], e[head // 3], f))


def test_linformer_with_as_many_mixtures_as_keys_is_exact() -> None:
    q, k, v = triple()
    order = torch.eye(13, dtype=torch.float64)[:, torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    close(linformer(q, k, v, order), attend(q, k, v), eps=512)  # type: ignore[arg-type]


def test_linformer_has_gradients_and_padding() -> None:
    q, k, v = triple()
    e, f = rand(13, 7, seed=5).requires_grad_(), rand(2, 13, 7, seed=6).requires_grad_()
    lengths, bad_k, bad_v = [6, 13], k.clone(), v.clone()
    bad_k[0, :, 6:], bad_v[0, :, 6:] = math.nan, math.nan
    leaves = [q.requires_grad_(), bad_k.requires_grad_(), bad_v.requires_grad_(), e, f]
    out = linformer(q, bad_k, bad_v, e, f, lengths=lengths)
    short = linformer(q[:1], k[:1, :, :6], v[:1, :, :6], e[:6], f[:, :6])
    close(out[:1], short, eps=512)
    close(linformer(q, bad_k, bad_v, e, f, lengths=torch.tensor(lengths)), out)
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()
        assert grad.any()
    small = triple(b=1, h=1, hkv=1, nq=2, nk=5, dv=2, grad=True)
    mix = rand(5, 3, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(linformer, (*small, mix), atol=1e-4)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "argument", "match"),
    [
        (lambda q, k, v: linear_attend(q, k, v, form="fast"), "form", "'fast'"),  # type: ignore[arg-type]
        (lambda q, k, v: linear_attend(q, k, v, form="recurrent", causal=False), "form", "causal"),
        (lambda q, k, v: linear_attend(q, k, v, chunk=0), "chunk", None),
        (lambda q, k, v: linear_attend(q, k, v, features=3), "map", None),  # type: ignore[arg-type]
        (lambda q, k, v: linear_attend(q, k[..., :2], v), "q", None),
        (lambda q, k, v: linear_attend(q, k, v, features=Favor(4)), "x", None),
        (lambda q, k, v: linear_attend(q, k, v, state=LinearState.zero(2, 6, 3, 5)), "state", "k_sum"),
        (
            lambda q, k, v: linear_attend(q, k[:, :, :4], v[:, :, :4], state=LinearState.zero(2, 2, 3, 5)),
            "state",
            "11 queries",
        ),
        (lambda q, k, v: Favor(0), "head_dim", None),
        (lambda q, k, v: Favor(3, 0), "n_features", None),
        (lambda q, k, v: linformer(q, k, v, rand(12, 7)), "e", r"\(12, 7\)"),
        (lambda q, k, v: linformer(q, k, v, rand(6, 13, 7)), "e", r"\(6, 13, 7\)"),
        (lambda q, k, v: linformer(q, k, v, rand(13, 7), rand(7, 13)), "f", None),
        (lambda q, k, v: linformer(q, k, v, 7), "e", "is int"),  # type: ignore[arg-type]
        (lambda q, k, v: linformer(q, k, v, rand(13, 7), rand(13, 5)), "e", "5 values"),
        (lambda q, k, v: linformer(q, k, v, rand(13, 7), lengths=[14, 1]), "lengths", r"1\.\.14"),
        (lambda q, k, v: linformer(q, k, v, rand(13, 7), lengths=[1, 1, 1]), "lengths", "3 numbers"),
    ],
)
def test_linear_attention_rejects_wrong_arguments(
    wrong: Callable[..., object], argument: str, match: str | None
) -> None:
    with unchecked(), refused(argument, match):
        wrong(*triple())


# --- peers ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def performer() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("performer_pytorch")
        return importlib.import_module("performer_pytorch.performer_pytorch")


def test_features_of_performer_pytorch(performer: ModuleType) -> None:
    """Theirs with our projection; they scale the keys of a head by a maximum, which is undone here."""
    q, k, _ = triple(h=2)
    phi = Favor(3, 17)
    w = {"projection_matrix": phi.weight, "eps": 0.0}
    theirs = performer.softmax_kernel(q, is_query=True, **w)
    close(phi.of_queries(q) / phi.of_queries(q).sum(-1, keepdim=True), theirs / theirs.sum(-1, keepdim=True), eps=512)
    top = (k * 3**-0.25 @ phi.weight.T).amax((-1, -2), keepdim=True)
    close(phi(k), performer.softmax_kernel(k, is_query=False, **w) * top.exp(), eps=512)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_performer_pytorch(performer: ModuleType, causal: bool) -> None:
    q, k, v = triple(h=2, nq=13)
    phi = Favor(3, 17)
    w = {"projection_matrix": phi.weight, "eps": 0.0}
    features = performer.softmax_kernel(q, is_query=True, **w), performer.softmax_kernel(k, is_query=False, **w)
    if causal:
        want = performer.causal_linear_attention_noncuda(*features, v, chunk_size=3, eps=0.0)
    else:
        want = performer.linear_attention(*features, v)
    close(linear_attend(q, k, v, features=phi, causal=causal), want, eps=4096)  # type: ignore[arg-type]


def test_projections_of_performer_pytorch(performer: ModuleType) -> None:
    """Theirs are drawn from the same distribution: blocks, lengths, and the error of the estimate."""
    d, m = 5, 15
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = torch.stack([performer.gaussian_orthogonal_random_matrix(m, d) for _ in range(800)]).double()
    ours = torch.stack([Favor(d, m, seed).weight for seed in range(800)])
    q, k = rand(d, seed=1), rand(d, seed=2)
    want = torch.exp(q @ k / math.sqrt(d))
    found = []
    for w in (theirs, ours):
        blocks = w.view(-1, d, d)
        gram = blocks @ blocks.mT
        assert (gram - gram.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() < 1e-4
        shift = (q @ q + k @ k) / (2 * math.sqrt(d))
        found.append((torch.exp(w @ (q + k) * d**-0.25 - shift).mean(1) - want).square().mean().sqrt())
    assert 0.8 < found[0] / found[1] < 1.25


@pytest.mark.parametrize("shared", [False, True])
def test_linformer_of_the_linformer_package(shared: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("linformer")
    heads, d, n, r = 3, 5, 11, 7
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = peer.LinformerSelfAttention(
            heads * d, n, k=r, heads=heads, dim_head=d, one_kv_head=shared, share_kv=False
        ).double()
    x = rand(2, n, heads * d)

    def split(y: Tensor) -> Tensor:
        return y.unflatten(2, (-1, d)).transpose(1, 2)

    q, k, v = split(module.to_q(x)), split(module.to_k(x)), split(module.to_v(x))
    assert k.shape[1] == (1 if shared else heads)
    out = linformer(q, k, v, module.proj_k, module.proj_v)
    close(module.to_out(out.transpose(1, 2).flatten(2)), module(x), eps=512)
