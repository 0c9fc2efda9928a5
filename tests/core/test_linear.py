"""Linear attention equals its definition in every form and on every kernel; the approximations approximate."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import close, covering, largest_tensor, rand, refusals, set_tile, triple
from qkv import InputError, attend
from qkv.biases import ALiBi
from qkv.features import Favor, elu_plus_one, relu
from qkv.linear import LinearState, linear_attend, linformer
from qkv.masks import Causal, Mask, Padding, Window
from qkv.normalizers import Identity, Softmax
from qkv.scores import Additive, Dot, Features, General

MAPS: dict[str, Any] = {"elu": elu_plus_one, "relu": relu, "favor": Favor(3, 7)}
EACH_MAP = pytest.mark.parametrize("feature_map", MAPS.values(), ids=MAPS)
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "left padding": Padding([9, 13], "left"),
    "empty item": Padding([0, 7]),
    "causal padding": Causal() & Padding([12, 4]),
    "left padding, causal": Padding([2, 8], "left") & Causal(),
    "one length": Causal() & Padding([7]),
}


def called(kernel: str, q: Tensor, k: Tensor, v: Tensor, **parts: Any) -> Tensor:
    """The output; by default of elu + 1, divided by the sum."""
    out = attend(q, k, v, kernel=kernel, **{"score": Features(elu_plus_one), "normalizer": Identity("sum")} | parts)
    assert isinstance(out, Tensor)
    return out


def compared(kernel: str, tensors: tuple[Tensor, ...], **parts: Any) -> list[Tensor]:
    """Output and the gradients of everything."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = called(kernel, *leaves, **parts)
    return [out, *torch.autograd.grad(out, leaves, rand(*out.shape, seed=9, dtype=out.dtype))]


def agree(tensors: tuple[Tensor, ...], **parts: Any) -> None:
    for got, want in zip(compared("linear", tensors, **parts), compared("eager", tensors, **parts), strict=True):
        close(got, want, eps=4096)


def run(*tensors: Tensor, **options: Any) -> Tensor:
    out = linear_attend(*tensors, **options)
    assert isinstance(out, Tensor)
    return out


def with_state(*tensors: Tensor, **options: Any) -> tuple[Tensor, LinearState]:
    out = linear_attend(*tensors, return_state=True, **options)
    assert isinstance(out, tuple)
    return out


# --- the kernel equals the definition ---------------------------------------------------------------------------------


CELLS = covering(MASKS, [1, 11, 17], MAPS, ["sum", "keys", None], [3, 4, 128])


@pytest.mark.parametrize(("mask", "nq", "kind", "divide", "chunk"), CELLS)
def test_the_linear_kernel_matches_eager(
    mask: str, nq: int, kind: str, divide: str | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, chunk)
    agree(triple(nq=nq), mask=MASKS[mask], score=Features(MAPS[kind]), normalizer=Identity(divide))


@pytest.mark.parametrize(("score", "divide"), [(Dot(), "keys"), (Dot(scale=-0.7), None), (General(rand(3, 3)), "keys")])
@pytest.mark.usefixtures("tile")
def test_any_product_score_without_a_normalizer_is_served(score: Any, divide: str | None) -> None:
    agree(triple(), mask=Causal() & Padding([5, 12]), score=score, normalizer=Identity(divide))


def test_queries_without_a_feature_in_common_with_any_key_give_zeros() -> None:
    q, k, v = triple()
    assert not called("linear", q.abs(), -k.abs(), v, score=Features(relu)).any()


@EACH_MAP
@pytest.mark.parametrize(("side", "mask"), [("left", Causal()), ("right", None), ("right", Causal())])
def test_nan_in_padding_does_not_spread(feature_map: Any, side: Any, mask: Mask | None) -> None:
    q, k, v = triple()
    padding: Mask = Padding([9, 4], side)
    parts: dict[str, Any] = {"mask": padding if mask is None else padding & mask, "score": Features(feature_map)}
    real = padding.dense(11, 13, batch=2)[:, :, 0, :, None]  # (b, 1, nk, 1)
    leaves = [x.requires_grad_() for x in (q.clone(), torch.where(real, k, math.nan), torch.where(real, v, math.inf))]
    out = called("linear", *leaves, **parts)
    close(out, called("linear", q, k, v, **parts))
    of_q, of_k, of_v = torch.autograd.grad(out.sum(), leaves)
    assert of_q.isfinite().all()
    assert of_k[real.expand_as(k)].isfinite().all()
    assert of_v.isfinite().all()


@EACH_MAP
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(feature_map: Any, dtype: torch.dtype) -> None:
    tensors = triple(nq=307, nk=311, dtype=dtype)
    got, want = (
        compared("linear", tuple(x.to(wide) for x in tensors), score=Features(feature_map), mask=Causal())
        for wide in (dtype, torch.float32)
    )
    assert {x.dtype for x in got} == {dtype}
    close(got[0], want[0], eps=4)  # features and output are rounded, sums are not
    close(got[3], want[3], eps=16)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"normalizer": Softmax()}, "not Softmax"),
        ({"score": Additive(torch.ones(3, dtype=torch.float64))}, "not a product"),
        ({"bias": ALiBi()}, "no biases"),
        ({"dropout_p": 0.5}, "dropout"),
        ({"mask": Window(3)}, "neither causal"),
        ({"mask": ~Causal()}, "neither causal"),
        ({"mask": Causal() & Window(3)}, "neither causal"),
        ({"mask": Causal() | Padding([3, 4])}, "neither causal"),
    ],
)
def test_the_linear_kernel_rejects_unsupported_calls(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        called("linear", *triple(), **parts)
    called("auto", *triple(), **parts)


# --- forms, states ----------------------------------------------------------------------------------------------------


@EACH_MAP
@pytest.mark.parametrize(("nq", "divide"), [(5, None), (13, "sum"), (17, "sum"), (17, None)])
def test_all_forms_are_equal(feature_map: Any, nq: int, divide: str | None) -> None:
    q, k, v = triple(nq=nq)
    parts = {"score": Features(feature_map), "normalizer": Identity(divide)}
    options: dict[str, Any] = {"features": feature_map, "normalize": divide == "sum"}
    want = called("eager", q, k, v, mask=Causal(), **parts)
    for chunk in (1, 2, 5, 13, 99):
        out, state = with_state(q, k, v, **options, chunk=chunk)
        close(out, want, eps=512)
        close(state.kv, feature_map(k).mT @ v, eps=512)
        close(state.k_sum, feature_map(k).sum(2), eps=512)
    close(run(q, k, v, **options, causal=False), called("eager", q, k, v, **parts), eps=512)


@EACH_MAP
def test_splitting_a_sequence_anywhere_changes_nothing(feature_map: Any) -> None:
    """Once anywhere, and everywhere: token by token."""
    tensors = triple(nq=13)
    whole, final = with_state(*tensors, features=feature_map)
    for cuts in [*((0, cut, 13) for cut in range(1, 13)), range(14)]:
        state, outs = LinearState.zero(2, 2, feature_map(tensors[1]).shape[3], 5, torch.float64), []
        for part in (slice(*ends) for ends in pairwise(cuts)):
            here = (x[:, :, part] for x in tensors)
            out, state = with_state(*here, features=feature_map, state=state, chunk=4)
            outs.append(out)
        close(torch.cat(outs, 2), whole, eps=512)
        close(state.kv, final.kv, eps=512)
        close(state.k_sum, final.k_sum, eps=512)


# --- decay and the delta rule -----------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def gates(kind: str, b: int = 2, hkv: int = 2, n: int = 13, m: int = 3) -> tuple[Tensor | None, Tensor | None]:
    """Decay and beta. A gate of 0 clears the state within the text."""
    decay: Tensor | None = None
    if "head" in kind:
        decay = -rand(hkv, seed=1).abs()
    elif "token" in kind or "channel" in kind:
        decay = -3 * rand(*((b, hkv, n, m) if "channel" in kind else (b, hkv, n)), seed=2).abs()
        decay[:, :, n // 2] = -math.inf
    return decay, rand(b, hkv, n, seed=3).sigmoid() if "delta" in kind else None


KINDS = ["head", "token", "channel", "delta", "token delta", "channel delta"]


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition, token by token; divided by the sum of the weights without beta. One head for each key."""
    state, total, outs = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3]).to(k), torch.zeros_like(k[:, :, 0]), []
    for t in range(k.shape[2]):
        if decay is not None:
            left = decay[:, None].expand(k.shape[1], 1) if decay.ndim == 1 else decay[:, :, t].view(*k.shape[:2], -1)
            state, total = state * left.exp()[..., None], total * left.exp()
        key, value = k[:, :, t], v[:, :, t]
        if beta is not None:
            value = beta[:, :, t, None] * (value - (key[:, :, None] @ state)[:, :, 0])
        state, total = state + key[..., None] * value[:, :, None], total + key
        out = (q[:, :, t, None] @ state)[:, :, 0]
        outs.append(out if beta is not None else out / (q[:, :, t] * total).sum(-1, keepdim=True))
    return torch.stack(outs, 2), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 5, 99])
def test_a_chunked_gated_state_is_the_recurrence(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, state and all gradients, with three query heads for each key head, over segments of one chunk."""
    monkeypatch.setattr("qkv.kernels.linear.GATED_SEGMENT", 1)
    q, k, v = triple(nq=13, grad=True)
    decay, beta = gates(kind)
    leaves = [q, k, v, *(x.requires_grad_() for x in (decay, beta) if x is not None)]
    phi = elu_plus_one if beta is None else unit
    got, state = with_state(q, k, v, features=phi, normalize=beta is None, decay=decay, beta=beta, chunk=chunk)
    heads = [recurrence(phi(q[:, group::3]), phi(k), v, decay, beta) for group in range(3)]
    want = torch.stack([out for out, _ in heads], 2).flatten(1, 2)
    close(got, want, eps=512)
    close(state.kv, heads[0][1], eps=512)
    upstream = rand(*want.shape, seed=5)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        close(a, b, eps=4096)


@pytest.mark.parametrize("kind", KINDS)
def test_the_unrolled_weights_of_a_gated_state_are_dense(kind: str) -> None:
    """out = W v, where W comes from one triangular system over the whole text; values that are a unit matrix read W."""
    q, k, v = triple(hkv=2, h=2, nq=13)
    decay, beta = gates(kind)
    q, k = unit(q), unit(k)
    log = (
        torch.zeros(2, 2, 13, 1)
        if decay is None
        else decay.view(-1, 2, 1 if decay.ndim == 1 else 13, decay.shape[3] if decay.ndim == 4 else 1)
    )
    left = torch.zeros(2, 2, 13, 13, 3).double()
    for i in range(13):
        for j in range(i + 1):
            left[:, :, i, j] = (log.expand(2, 2, 13, -1)[:, :, j + 1 : i + 1].sum(2)).exp()
    weights = torch.einsum("bhim,bhjm,bhijm->bhij", q, k, left)
    if beta is not None:
        among = torch.einsum("bhim,bhjm,bhijm->bhij", k, k, left).tril(-1) * beta[..., None]
        weights = weights @ torch.linalg.inv(torch.eye(13).double() + among) * beta[:, :, None]
    options: dict[str, Any] = {"features": lambda x: x, "normalize": False, "decay": decay, "beta": beta}
    close(run(q, k, v, **options), weights @ v, eps=4096)
    close(run(q, k, torch.eye(13).double().expand(2, 2, 13, 13), **options), weights, eps=4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_state_continues_anywhere(kind: str) -> None:
    q, k, v = triple(nq=13)
    decay, beta = gates(kind)
    options: dict[str, Any] = {"features": unit, "normalize": False}
    want, final = with_state(q, k, v, decay=decay, beta=beta, **options)
    close(run(q[:, :, 9:], k, v, decay=decay, beta=beta, **options), want[:, :, 9:], eps=512)  # queries of the end
    early = run(torch.cat([q[:, :, :4], q], 2), k, v, decay=decay, beta=beta, **options)
    close(early, torch.nn.functional.pad(want, (0, 0, 4, 0)), eps=512)
    state, outs = LinearState.zero(2, 2, 3, 5), []  # in float32
    for part in (slice(0, 6), slice(6, 7), slice(7, 13)):
        cut = [x if x is None or x.ndim == 1 else x[:, :, part] for x in (decay, beta)]
        here = (x[:, :, part] for x in (q, k, v))
        out, state = with_state(*here, state=state, decay=cut[0], beta=cut[1], **options)
        outs.append(out)
    close(torch.cat(outs, 2), want, eps=512)
    close(state.kv, final.kv, eps=512)
    with pytest.raises(InputError, match="merge"):
        state.merge(final)


def test_gated_delta_rule_of_transformers() -> None:
    """The layers of Qwen3-Next, Qwen3.5, OLMo Hybrid: torch_chunk_gated_delta_rule and the recurrent form."""
    peer = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = triple(h=2, nq=150, nk=150, d=8, dv=4, dtype=torch.float32)
    decay, beta = (
        -rand(2, 2, 150, seed=2, dtype=torch.float32).abs(),
        rand(2, 2, 150, seed=3, dtype=torch.float32).sigmoid(),
    )
    got, state = with_state(
        unit(q) * 8**-0.5, unit(k), v, features=lambda x: x, normalize=False, decay=decay, beta=beta
    )
    given = [x.transpose(1, 2) for x in (q, k, v, decay, beta)]
    for form in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        want, final = form(*given, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        close(got, want.transpose(1, 2), eps=64)
        close(state.kv, final, eps=64)


def test_a_gated_state_under_vmap() -> None:
    q, k, v = triple()
    decay, beta = gates("channel delta")
    options: dict[str, Any] = {"features": unit, "normalize": False}

    def alone(*x: Any) -> Tensor:
        q, k, v, decay, beta = (one[None] for one in x)
        return run(q, k, v, decay=decay, beta=beta, **options)[0]

    close(torch.vmap(alone)(q, k, v, decay, beta), run(q, k, v, decay=decay, beta=beta, **options), eps=512)


def test_a_constant_decay_without_division_is_retention() -> None:
    """(q kᵀ ∘ D) v with D_ij = γ^(i − j): RetNet's parallel form."""
    q, k, v = triple(h=2, nq=13)
    gamma = torch.tensor([0.9, 0.5]).double()
    age = (torch.arange(13)[:, None] - torch.arange(13)).double()
    want = ((q @ k.mT) * (gamma[:, None, None] ** age).tril()) @ v
    close(run(q, k, v, features=lambda x: x, normalize=False, decay=gamma.log()), want, eps=512)


def test_keys_of_length_1_and_beta_1_store_the_last_value_exactly() -> None:
    """What the delta rule is for: a second value of a key replaces the first, a sum would give both."""
    k = torch.eye(4).double()[[0, 1, 2, 0]][None, None]
    v = rand(1, 1, 4, 5)
    options: dict[str, Any] = {"features": lambda x: x, "normalize": False}
    close(run(k, k, v, beta=torch.ones(1).double(), **options)[0, 0, 3], v[0, 0, 3])
    close(run(k, k, v, **options)[0, 0, 3], v[0, 0, 0] + v[0, 0, 3])


@pytest.mark.parametrize("kind", ["token", "token delta", "channel delta"])
def test_memory_of_a_gated_state_is_linear(kind: str) -> None:
    def largest(n: int) -> int:
        q, k, v = triple(b=1, h=1, hkv=1, nq=n, nk=n, dtype=torch.float32, grad=True)
        decay, beta = (None if x is None else x.float() for x in gates(kind, 1, 1, n))
        return largest_tensor(
            lambda: run(q, k, v, features=unit, normalize=False, decay=decay, beta=beta).sum().backward()
        )

    assert (many := largest(4096)) <= 4.1 * largest(1024)
    assert many <= 4096**2 / 32


def test_a_state_without_a_causal_mask_adds_keys() -> None:
    q, k, v = triple()
    _, state = with_state(q[:, :, :1], k[:, :, :6], v[:, :, :6], causal=False)
    rest = run(q, k[:, :, 6:], v[:, :, 6:], causal=False, state=state)
    close(rest, run(q, k, v, causal=False), eps=512)


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_memory_is_linear(mask: Mask | None) -> None:
    """The largest tensor of forward and backward grows with n, and is far below n²."""

    def largest(n: int) -> int:
        tensors = triple(b=1, h=2, hkv=1, nq=n, nk=n, dtype=torch.float32, grad=True)
        return largest_tensor(lambda: called("linear", *tensors, mask=mask).sum().backward())

    few, many = largest(1024), largest(4096)
    assert many <= 4.1 * few
    assert many < 4096**2 / 8


# --- features ---------------------------------------------------------------------------------------------------------


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


def test_large_vectors_do_not_overflow() -> None:
    phi = Favor(64)
    w = phi.weight.float()
    worst = w[w.norm(dim=1).argmax()] * 64**0.25  # the key with the largest features: w·x − |x|²/2 = |w|²/2
    largest = phi(worst).amax()
    assert largest.isfinite()
    for scale in (0.5, 0.9, 1.1, 2.0):
        assert phi(worst * scale).amax() < largest
    q, k, v = (scale * x for scale, x in zip((30, 3, 1), triple(d=64, dtype=torch.float32), strict=True))
    assert run(q, k, v, features=phi).isfinite().all()


# --- linformer --------------------------------------------------------------------------------------------------------


def test_linformer_is_its_equation() -> None:
    q, k, v = triple(h=2)
    e, f = rand(13, 7, seed=5), rand(13, 7, seed=6)
    for a, b in ((e, None), (e, f)):
        keys, values = torch.einsum("nr,bhnd->bhrd", a, k), torch.einsum("nr,bhnd->bhrd", a if b is None else b, v)
        want = torch.softmax(q @ keys.mT / math.sqrt(3), -1) @ values
        close(linformer(q, k, v, a, b), want, eps=512)
    q, e = rand(2, 6, 11, 3), rand(2, 13, 7, seed=7)
    got = linformer(q, k, v, e, f)
    for head in range(6):
        one, of = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        close(got[:, one], linformer(q[:, one], k[:, of], v[:, of], e[head // 3], f))


def test_linformer_has_gradients_and_padding() -> None:
    q, k, v = triple()
    e, f = rand(13, 7, seed=5), rand(2, 13, 7, seed=6)
    short = linformer(q[:1], k[:1, :, :6], v[:1, :, :6], e[:6], f[:, :6])
    k[0, :, 6:], v[0, :, 6:] = math.nan, math.nan
    leaves = [x.requires_grad_() for x in (q, k, v, e, f)]
    out = linformer(*leaves, lengths=[6, 13])
    close(out[:1], short, eps=512)
    close(linformer(*leaves, lengths=torch.tensor([6, 13])), out)
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()
        assert grad.any()
    small = triple(b=1, h=1, hkv=1, nq=2, nk=5, dv=2, grad=True)
    mix = rand(5, 3, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(linformer, (*small, mix), atol=1e-4)


# --- errors -----------------------------------------------------------------------------------------------------------


Q, K, V = triple()
REFUSALS: list[tuple[Any, ...]] = [
    ("chunk", lambda: run(Q, K, V, chunk=0)),
    ("map", lambda: run(Q, K, V, features=3)),
    ("q", lambda: run(Q, K[..., :2], V)),
    ("x", lambda: run(Q, K, V, features=Favor(4))),
    ("state", lambda: run(Q, K, V, state=LinearState.zero(2, 6, 3, 5))),
    ("state", lambda: run(Q, K[:, :, :4], V[:, :, :4], state=LinearState.zero(2, 2, 3, 5))),
    ("decay", lambda: run(Q, K, V, decay=0.9)),
    ("decay", lambda: run(Q, K, V, decay=torch.tensor([0.9, 0.5])), "logarithm"),
    ("decay", lambda: run(Q, K, V, decay=torch.full((2,), math.nan))),
    ("decay", lambda: run(Q, K, V, decay=-torch.ones(6)), "(2,)"),
    ("decay", lambda: run(Q, K, V, decay=-torch.ones(2), causal=False), "causal=True"),
    ("beta", lambda: run(Q, K, V, beta=torch.ones(2, 2, 13, 3), normalize=False)),
    ("normalize", lambda: run(Q, K, V, beta=torch.ones(2))),
    ("head_dim", lambda: Favor(0)),
    ("n_features", lambda: Favor(3, 0)),
    ("e", lambda: linformer(Q, K, V, rand(12, 7))),
    ("e", lambda: linformer(Q, K, V, rand(6, 13, 7))),
    ("e", lambda: linformer(Q, K, V, 7)),  # type: ignore[arg-type]
    ("e", lambda: linformer(Q, K, V, rand(13, 7), rand(13, 5))),
    ("f", lambda: linformer(Q, K, V, rand(13, 7), rand(7, 13))),
    ("lengths", lambda: linformer(Q, K, V, rand(13, 7), lengths=[14, 1])),
    ("lengths", lambda: linformer(Q, K, V, rand(13, 7), lengths=[1, 1, 1])),
]

test_linear_attention_rejects_wrong_arguments = refusals(REFUSALS)
