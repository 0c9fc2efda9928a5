"""Laws of attention: properties that hold for any inputs, for every normalizer and every kernel that supports it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import close, rand, set_tile, triple
from qkv import attend, masks
from qkv.biases import ALiBi, SoftCap
from qkv.masks import Causal, Padding, Window
from qkv.normalizers import EluPlusOne, Entmax, Hard, Identity, Normalizer, ReLU, Sigmoid, Softmax, Sparsemax
from qkv.scores import Additive, Cosine, Dot, Features, General, Score

pytestmark = pytest.mark.usefixtures("tile4")

H, D, DV = 6, 3, 5

NORMALIZERS: dict[str, Normalizer] = {
    "softmax": Softmax(),
    "warm softmax": Softmax(2.5),
    "softmax with a sink": Softmax(sink=rand(H, seed=20)),
    "sigmoid": Sigmoid(),
    "sigmoid of a bias": Sigmoid(rand(H, seed=21)),
    "elu + 1": EluPlusOne(),
    "elu + 1 by its sum": EluPlusOne("sum"),
    "relu": ReLU(),
    "relu by its sum": ReLU("sum"),
    "identity": Identity(),
    "identity by keys": Identity("keys"),
    "entmax": Entmax(1.5),
    "entmax of 1.25": Entmax(1.25),
    "warm sparsemax": Sparsemax(1.5),
    "hard": Hard(),
}
SCORES: dict[str, Callable[[], Score]] = {
    "dot": Dot,
    "scaled dot": lambda: Dot(0.7),
    "general": lambda: General(rand(D, D, seed=30)),
    "general by head": lambda: General(rand(H, D, D, seed=31)),
    "cosine": lambda: Cosine(4.0),
    "cosine by head": lambda: Cosine(3 + rand(H, seed=32)),
    "additive": lambda: Additive(rand(4, seed=33), rand(4, D, seed=34), rand(4, D, seed=35), rand(4, seed=36)),
    "additive by head": lambda: Additive(rand(H, 4, seed=33), rand(H, 4, D, seed=34), rand(4, D, seed=35)),
    "features": lambda: Features(torch.exp),
}
SUMS_TO_ONE = ["softmax", "warm softmax", "elu + 1 by its sum", "entmax", "entmax of 1.25", "warm sparsemax", "hard"]
FLASH = ["softmax", "warm softmax", "softmax with a sink"]
SERVED = [
    (name, kernel)
    for name in NORMALIZERS
    for kernel in (["flash"] if name in FLASH else []) + ["tiled", "eager"]
]  # fmt: skip
each = pytest.mark.parametrize(("name", "kernel"), SERVED)


def weights_of(q: Tensor, k: Tensor, **asked: Any) -> Tensor:
    """Weights (b, h, nq, nk) of any kernel: its output for unit vectors as values."""
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return attend(q, k, unit, **asked)


def gradients(run: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().clone().requires_grad_() for x in leaves)
    out = run(*leaves)
    return (out.detach(), *torch.autograd.grad((out * rand(*out.shape, seed=9)).sum(), leaves))


# --- sums of weights --------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("mask", [None, Causal(), Window(3), Padding([9, 4])])
def test_sums_of_weights(name: str, kernel: str, mask: masks.Mask | None) -> None:
    q, k, _ = triple()
    weights = weights_of(q, k, mask=mask, normalizer=NORMALIZERS[name], kernel=kernel)
    total = weights.sum(-1)
    if name in SUMS_TO_ONE:
        close(total, torch.ones_like(total))
    if name == "softmax with a sink":
        lse = attend(q, k, k, mask=mask, normalizer=NORMALIZERS[name], return_lse=True)[1]
        close(total, 1 - torch.exp(NORMALIZERS[name].sink[None, :, None] - lse))
        assert (total < 1).all()
    if name == "relu by its sum":  # or 0, where no score is above 0
        close(total, (total > 0.5).double())
    if not name.startswith("identity"):
        assert (weights >= 0).all()
    if name.startswith("sigmoid"):
        assert (weights < 1).all()
    if mask is not None:
        seen = mask.dense(11, 13, batch=2, heads=H)
        assert (weights.masked_select(~seen.expand_as(weights)) == 0).all()


@each
def test_fully_masked_queries_have_zero_weights(name: str, kernel: str) -> None:
    q, k, v = triple()
    out, *grads = gradients(
        lambda q, k, v: attend(q, k, v, mask=Padding([0, 13]), normalizer=NORMALIZERS[name], kernel=kernel), q, k, v
    )
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    assert all((x[0] == 0).all() and x.isfinite().all() for x in grads)


# --- masked keys ------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_masked_values_never_leak(name: str, kernel: str, bad: float, where: str) -> None:
    q, k, v = triple()
    mask = Padding([13, 8])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, normalizer=NORMALIZERS[name], kernel=kernel)

    want = gradients(run, q, k, v)
    hit = {"k": k.clone(), "v": v.clone()}
    hit[where][1, :, 8:] = bad
    got = gradients(run, q, hit["k"] if where == "k" else k, hit["v"] if where == "v" else v)
    for x, y in zip(got, want, strict=True):
        close(x, y)
    assert (got[2][1, :, 8:] == 0).all()
    assert (got[3][1, :, 8:] == 0).all()


@each
@pytest.mark.parametrize("bad", [math.nan, 1e4])
@pytest.mark.parametrize("mask", [Causal(), Window(4), Causal() & Padding([13, 11])])
def test_the_future_cannot_change_the_past(name: str, kernel: str, bad: float, mask: masks.Mask) -> None:
    """A NaN in a future key neither; one in a future value does, where both meet in one product: 0 · NaN."""
    if kernel == "flash" and math.isnan(bad):
        pytest.skip("it may add −inf to hide a score, and NaN − ∞ is NaN")
    q, k, v = triple()
    want = attend(q, k, v, mask=mask, normalizer=NORMALIZERS[name], kernel=kernel)
    for key in (5, 12):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, key:], other_v[:, :, key:] = bad, 1e4
        past = key - 2  # rows: the first query is aligned with key 2
        got = attend(q, other_k, other_v, mask=mask, normalizer=NORMALIZERS[name], kernel=kernel)
        if name.startswith("entmax"):  # its search ends when all rows are there: one more step may move a last bit
            close(got[:, :, :past], want[:, :, :past])
        else:
            assert torch.equal(got[:, :, :past], want[:, :, :past])


# --- symmetries -------------------------------------------------------------------------------------------------------


@each
def test_order_of_keys_does_not_matter_without_a_mask(name: str, kernel: str) -> None:
    q, k, v = triple()
    normalizer = NORMALIZERS[name]
    want = attend(q, k, v, normalizer=normalizer, kernel=kernel)
    keys, queries = torch.randperm(13, generator=torch.Generator().manual_seed(3)), torch.arange(10, -1, -1)
    close(attend(q, k[:, :, keys], v[:, :, keys], normalizer=normalizer, kernel=kernel), want)
    close(attend(q[:, :, queries], k, v, normalizer=normalizer, kernel=kernel), want[:, :, queries])


@each
@pytest.mark.parametrize("score", SCORES)
def test_grouped_heads_are_repeated_heads(name: str, kernel: str, score: str) -> None:
    if kernel == "flash" and score.startswith("additive"):
        pytest.skip("flash multiplies queries and keys")
    q, k, v = triple()
    mask, made = Causal(), SCORES[score]()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, score=made, normalizer=NORMALIZERS[name], kernel=kernel)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))

    for x, y in zip(gradients(run, q, k, v), gradients(repeated, q, k, v), strict=True):
        close(x, y, eps=512)


@each
def test_values_shifted_by_a_constant(name: str, kernel: str) -> None:
    """Where weights sum to one, the output shifts alike."""
    q, k, v = triple()
    normalizer = NORMALIZERS[name]
    out, moved = (attend(q, k, x, normalizer=normalizer, kernel=kernel) for x in (v, v + 3))
    total = weights_of(q, k, normalizer=normalizer, kernel=kernel).sum(-1, keepdim=True)
    close(moved, out + 3 * total, eps=256)
    if name in SUMS_TO_ONE:
        close(moved, out + 3, eps=256)


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
def test_a_duplicated_key_counts_twice(kernel: str) -> None:
    """A weight w becomes two of w / (1 + w); where every key is there twice, each has half and nothing changes."""
    q, k, v = triple(hkv=H)
    weights = weights_of(q, k, kernel=kernel)
    again = weights_of(q, torch.cat([k, k[:, :, 4:5]], 2), kernel=kernel)
    w = weights[..., 4]
    close(again[..., 4], w / (1 + w))
    close(again[..., 13], w / (1 + w))
    close(again[..., :4], weights[..., :4] / (1 + w[..., None]))
    twice = weights_of(q, torch.cat([k, k], 2), kernel=kernel)
    close(twice, torch.cat([weights, weights], -1) / 2)
    close(attend(q, torch.cat([k, k], 2), torch.cat([v, v], 2), kernel=kernel), attend(q, k, v, kernel=kernel))


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
@pytest.mark.parametrize("name", ["elu + 1 by its sum", "relu by its sum", "relu", "identity by keys"])
def test_duplicating_all_keys_changes_nothing_for_normalized_weights(name: str, kernel: str) -> None:
    q, k, v = triple()
    want = attend(q, k, v, normalizer=NORMALIZERS[name], kernel=kernel)
    got = attend(q, torch.cat([k, k], 2), torch.cat([v, v], 2), normalizer=NORMALIZERS[name], kernel=kernel)
    close(got, want)


@pytest.mark.parametrize("score", ["dot", "scaled dot", "cosine"])
def test_scores_of_a_text_with_itself_are_symmetric(score: str) -> None:
    x = rand(2, 3, 11, 5)
    for kernel in ("tiled", "eager"):
        scores = weights_of(x, x, score=SCORES[score](), normalizer=Identity(), kernel=kernel)
        close(scores, scores.mT)
        weights = weights_of(x, x, score=SCORES[score](), kernel=kernel)
        assert (weights - weights.mT).abs().max() > 0.01  # rows are normalised, columns are not


@each
@pytest.mark.parametrize(("nq", "nk"), [(1, 9), (7, 1), (1, 1)])
def test_one_query_and_one_key(name: str, kernel: str, nq: int, nk: int) -> None:
    q, k, v = triple(nq=nq, nk=nk)
    normalizer = NORMALIZERS[name]
    out, *grads = gradients(lambda q, k, v: attend(q, k, v, normalizer=normalizer, kernel=kernel), q, k, v)
    assert all(x.isfinite().all() for x in grads)
    if nk == 1 and name in SUMS_TO_ONE:
        close(out, v.repeat_interleave(3, 1).expand(-1, -1, nq, -1))
    if nq == 1:  # the last row of a longer call
        longer = torch.cat([rand(2, H, 3, D, seed=4), q], 2)
        close(out, attend(longer, k, v, normalizer=normalizer, kernel=kernel)[:, :, -1:])


# --- sinks and the constant key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
def test_a_constant_added_to_all_keys_changes_nothing(kernel: str) -> None:
    """One vector added to every key shifts the scores of a query by a constant: only softmax does not change."""
    q, k, v = triple()
    bias = 2 * rand(2, 1, D, seed=7)
    want = attend(q, k, v, mask=Causal(), kernel=kernel)
    close(attend(q, k + bias, v, mask=Causal(), kernel=kernel), want, eps=256)
    if kernel != "flash":
        plain, moved = (attend(q, x, v, normalizer=Sigmoid(), kernel=kernel) for x in (k, k + bias))
        assert (plain - moved).abs().max() > 0.01


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
@pytest.mark.parametrize("score", ["dot", "general", "cosine"])
def test_a_learned_key_of_value_zero_is_a_key_bias_that_acts(kernel: str, score: str) -> None:
    """`Softmax(key=…)` is one more key, whose value is 0."""
    q, k, v = triple(hkv=H)
    key = rand(H, D, seed=7)
    made = SCORES[score]()

    def ours(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        return attend(q, k, v, score=made, normalizer=Softmax(1.5, key=key), kernel=kernel)

    def longer(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        more = torch.cat([key[None, :, None].expand(2, -1, -1, -1), k], 2)
        return attend(q, more, torch.cat([torch.zeros_like(v[:, :, :1]), v], 2), score=made, normalizer=Softmax(1.5))

    got, want = gradients(ours, q, k, v, key), gradients(longer, q, k, v, key)
    for x, y in zip(got, want, strict=True):
        close(x, y, eps=256)
    assert (got[0] - attend(q, k, v, score=made, normalizer=Softmax(1.5))).abs().max() > 0.01


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
@pytest.mark.parametrize("score", ["additive", "general by head", "cosine by head"])
def test_a_learned_key_where_key_heads_are_shared(kernel: str, score: str) -> None:
    """It belongs to a query head, and is compared as that head compares."""
    q, k, v = triple()
    key, made = rand(H, D, seed=7), SCORES[score]()
    got = attend(q, k, v, score=made, normalizer=Softmax(key=key), kernel=kernel)
    more = torch.cat([key[None, :, None].expand(2, -1, -1, -1), k.repeat_interleave(3, 1)], 2)
    wide = v.repeat_interleave(3, 1)
    close(got, attend(q, more, torch.cat([torch.zeros_like(wide[:, :, :1]), wide], 2), score=made), eps=256)


def test_a_learned_key_where_each_key_head_projects_its_own() -> None:
    q, k, v = triple()
    made = Additive(rand(4, seed=33), rand(4, D, seed=34), rand(2, 4, D, seed=35))
    out = attend(q, k, v, score=made, normalizer=Softmax(key=rand(H, D, seed=7)))
    wide = Additive(rand(4, seed=33), rand(4, D, seed=34), rand(2, 4, D, seed=35).repeat_interleave(3, 0))
    heads = [x.repeat_interleave(3, 1) for x in (k, v)]
    close(out, attend(q, *heads, score=wide, normalizer=Softmax(key=rand(H, D, seed=7))))


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sink", [1e4, 1e30])
def test_a_sink_far_above_all_scores_takes_everything(kernel: str, dtype: torch.dtype, sink: float) -> None:
    q, k, v = triple(dtype=dtype)
    logit = torch.full((H,), sink, dtype=torch.float32)
    out, *grads = gradients(
        lambda q, k, v, s: attend(q, k, v, normalizer=Softmax(sink=s), mask=Causal(), kernel=kernel).double(),
        q, k, v, logit,
    )  # fmt: skip
    assert (out == 0).all()
    assert all((x == 0).all() for x in grads)


# --- temperature, caps, hard choices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash", "tiled", "eager"])
def test_cold_softmax_is_a_hard_choice(kernel: str) -> None:
    q, k, v = triple()
    hard = attend(q, k, v, mask=Causal(), normalizer=Hard(), kernel="eager")
    gaps = [
        (attend(q, k, v, mask=Causal(), normalizer=Softmax(t), kernel=kernel) - hard).abs().max().item()
        for t in (1.0, 0.1, 0.01, 1e-4)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.5
    assert gaps[-1] < 1e-9


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_cold_entmax_is_a_hard_choice(alpha: float) -> None:
    q, k, v = triple()
    for kernel in ("tiled", "eager"):
        cold = attend(q, k, v, normalizer=Entmax(alpha, 1e-4), kernel=kernel)
        assert torch.equal(cold, attend(q, k, v, normalizer=Hard(), kernel=kernel))


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), low=st.floats(0.1, 3), ratio=st.floats(1.01, 5), nk=st.integers(2, 20))
def test_entropy_rises_with_temperature(seed: int, low: float, ratio: float, nk: int) -> None:
    """Its derivative in T is the variance of the scores under the weights, over T³."""
    q, k = rand(1, 2, 4, 3, seed=seed), rand(1, 2, nk, 3, seed=seed + 1)
    cool, warm = (torch.special.entr(weights_of(q, k, normalizer=Softmax(t))).sum(-1) for t in (low, low * ratio))
    assert (warm > cool - 1e-12).all()
    assert (warm <= math.log(nk) + 1e-12).all()


@settings(max_examples=30)
@given(cap=st.floats(0.01, 100), size=st.floats(0.01, 1e6), seed=st.integers(0, 100))
def test_a_soft_cap_bounds_scores_and_keeps_their_order(cap: float, size: float, seed: int) -> None:
    q, k = rand(1, 2, 4, 3, seed=seed) * size, rand(1, 2, 9, 3, seed=seed + 1)
    for kernel in ("tiled", "eager"):
        plain = weights_of(q, k, normalizer=Identity(), kernel=kernel)
        capped = weights_of(q, k, bias=SoftCap(cap), normalizer=Identity(), kernel=kernel)
        assert (capped.abs() <= cap * (1 + 1e-12)).all()
        assert (capped.abs() <= plain.abs() + 1e-12 * size).all()
        assert (capped.gather(-1, plain.argsort(-1)).diff() >= 0).all()


def test_smoothing_with_a_gaussian_is_softmax_for_keys_of_one_norm() -> None:
    """Nadaraya-Watson with exp(−|q − k|² / 2σ²): |q|² and |k|² cancel, and q · k / σ² is left."""
    q, k, v = triple(hkv=H)
    k = 1.7 * k / k.norm(dim=-1, keepdim=True)
    sigma = 0.8
    kernel_of = torch.exp(-(q[:, :, :, None] - k[:, :, None]).square().sum(-1) / (2 * sigma**2))
    smooth = (kernel_of[..., None] * v[:, :, None]).sum(3) / kernel_of.sum(3, keepdim=True)
    for kernel in ("flash", "tiled", "eager"):
        close(attend(q, k, v, score=Dot(1 / sigma**2), kernel=kernel), smooth, eps=256)
    unequal = k * torch.linspace(0.5, 2, 13, dtype=k.dtype)[:, None]
    far = torch.exp(-(q[:, :, :, None] - unequal[:, :, None]).square().sum(-1) / (2 * sigma**2))
    smooth = (far[..., None] * v[:, :, None]).sum(3) / far.sum(3, keepdim=True)
    assert (attend(q, unequal, v, score=Dot(1 / sigma**2)) - smooth).abs().max() > 0.1


# --- draws ------------------------------------------------------------------------------------------------------------


def test_draw_frequencies_match_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 256)
    draws, nk = 4000, 9
    q, k = rand(1, 2, 1, D, seed=1).expand(-1, -1, draws, -1), rand(1, 2, nk, D, seed=2)
    chance = weights_of(q[:, :, :1], k, normalizer=Softmax(0.7))[0, :, 0]
    for kernel in ("tiled", "eager"):
        drawn = weights_of(q, k, normalizer=Hard(sample=True, temperature=0.7), dropout_seed=11, kernel=kernel)
        assert ((drawn == 0) | (drawn == 1)).all()
        counts = drawn[0].sum(1)
        assert (counts.sum(-1) == draws).all()
        chi = ((counts - draws * chance).square() / (draws * chance)).sum(-1)
        assert (chi < nk - 1 + 5 * math.sqrt(2 * (nk - 1))).all()  # five standard deviations above its mean


@pytest.mark.parametrize("mask", [None, Causal(), Padding([9, 4])])
def test_draws_depend_on_the_seed_and_not_on_the_kernel(mask: masks.Mask | None) -> None:
    q, k, _ = triple()
    asked: dict[str, Any] = {"mask": mask, "normalizer": Hard(sample=True)}
    a, b = (weights_of(q, k, dropout_seed=5, kernel=kernel, **asked) for kernel in ("tiled", "eager"))
    assert torch.equal(a, b)
    assert not torch.equal(a, weights_of(q, k, dropout_seed=6, kernel="tiled", **asked))
    torch.manual_seed(1)
    first = weights_of(q, k, **asked)
    assert not torch.equal(first, weights_of(q, k, **asked))
    torch.manual_seed(1)
    assert torch.equal(first, weights_of(q, k, **asked))


@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "hard"])
def test_the_same_seed_drops_the_same_pairs_on_every_kernel(name: str) -> None:
    q, k, v = triple()
    asked: dict[str, Any] = {"mask": Causal(), "normalizer": NORMALIZERS[name], "dropout_p": 0.3}

    def run(kernel: str, seed: int) -> tuple[Tensor, ...]:
        return gradients(lambda q, k, v: attend(q, k, v, kernel=kernel, dropout_seed=seed, **asked), q, k, v)

    for x, y in zip(run("tiled", 5), run("eager", 5), strict=True):
        close(x, y, eps=256)
    assert (run("tiled", 5)[0] - run("tiled", 6)[0]).abs().max() > 1e-3
    weights = weights_of(q, k, kernel="tiled", dropout_seed=5, **asked)
    plain = weights_of(q, k, mask=Causal(), normalizer=NORMALIZERS[name])
    close(weights, torch.where(weights == 0, 0, plain / 0.7))


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
def test_dropout_keeps_its_rate_and_the_mean(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 64)
    q, k, v = triple(b=1, h=2, hkv=1, nq=60, nk=100)
    p, seeds = 0.25, 200
    many = [7919 * s for s in range(seeds)]  # far apart: see `test_neighbouring_seeds_drop_other_pairs`
    kept = torch.stack([weights_of(q, k, dropout_p=p, dropout_seed=s, kernel=kernel) != 0 for s in many[:20]]).double()
    n = kept.numel()
    assert abs(kept.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dim in (2, 3, 4):  # heads, queries and keys: none is favoured
        other = [i for i in range(5) if i != dim]
        share = kept.mean(other)
        assert (share - (1 - p)).abs().max() < 5 * math.sqrt(p * (1 - p) / (n / len(share)))
    small = [x[:, :, :8] for x in (q, k, v)]
    outs = torch.stack([attend(*small, dropout_p=p, dropout_seed=s, kernel=kernel) for s in many])
    error = outs.std(0) / math.sqrt(seeds)
    assert ((outs.mean(0) - attend(*small)).abs() < 5 * error).all()


@pytest.mark.parametrize("step", [1, 3])
def test_adjacent_seeds_drop_different_pairs(step: int) -> None:
    """Of two seeds, about p² of all pairs are dropped by both, however the queries are shifted."""
    q, k, _ = triple(nq=13)
    a, b = (weights_of(q, k, dropout_p=0.5, dropout_seed=s, kernel="eager") == 0 for s in (5, 5 + step))
    for shift in range(6):
        both = (a[:, :, shift:] & b[:, :, : 13 - shift]).double()
        assert abs(both.mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / both.numel())


def test_dropout_takes_its_seed_from_torch_and_only_when_it_drops() -> None:
    q, k, v = triple()
    for asked in ({}, {"dropout_p": 0.0}, {"normalizer": Hard()}, {"dropout_p": 0.5, "dropout_seed": 3}):
        before = torch.get_rng_state()
        attend(q, k, v, **asked)
        assert torch.equal(torch.get_rng_state(), before)
    for kernel in ("tiled", "eager"):
        torch.manual_seed(4)
        first = attend(q, k, v, dropout_p=0.5, kernel=kernel)
        assert not torch.equal(first, attend(q, k, v, dropout_p=0.5, kernel=kernel))
        torch.manual_seed(4)
        assert torch.equal(first, attend(q, k, v, dropout_p=0.5, kernel=kernel))


# --- biases that cancel -----------------------------------------------------------------------------------------------


def test_a_constant_shift_of_a_row_matters_only_with_a_sink() -> None:
    """ALiBi written as slope · key position, as some models do, is the same under softmax, and is not under a sink."""
    from qkv.biases import Dense, alibi_slopes

    q, k, v = triple(nq=13)
    by_key = Dense(alibi_slopes(H)[:, None, None].double() * torch.arange(13))
    for normalizer, alike in ((Softmax(), True), (Softmax(sink=0.0), False), (Sigmoid(), False)):
        asked: dict[str, Any] = {"mask": Causal(), "normalizer": normalizer}
        gap = (attend(q, k, v, bias=by_key, **asked) - attend(q, k, v, bias=ALiBi(), **asked)).abs().max()
        assert (gap < 1e-12) == alike
