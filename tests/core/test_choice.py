"""`choose_keys`: one key per query, and the log-probability of the choice."""

from __future__ import annotations

import pytest
import torch

import qkv
from conftest import close, rand, refused, triple
from qkv import attend, biases, choose_keys, masks
from qkv.kernels import KERNELS, Call
from qkv.normalizers import Hard
from qkv.scores import Additive, Cosine, General

CASES = {
    "plain": {},
    "causal": {"mask": masks.Causal()},
    "biased": {"mask": masks.Causal(), "bias": (biases.ALiBi(), biases.SoftCap(0.8))},
    "relative": {"bias": biases.RelativePosition(rand(5, 3))},
    "t5": {"bias": biases.T5Bias(rand(8, 6), max_distance=20)},
    "dense": {"bias": biases.TensorBias(rand(6, 11, 13))},
    "general": {"score": General(rand(6, 3, 3), 0.4)},
    "cosine": {"score": Cosine(3.0), "mask": masks.Window(4)},
    "additive": {"score": Additive(rand(6, 7), rand(7, 3), rand(7, 3))},
}


@pytest.mark.parametrize(("name", "sample"), [*((name, True) for name in CASES), ("biased", False), ("dense", False)])
@pytest.mark.usefixtures("tile4")
def test_log_probabilities_are_those_of_the_weights(name: str, sample: bool) -> None:
    q, k, v = triple(grad=True)
    choice = choose_keys(q, k, **CASES[name], temperature=0.7, sample=sample, seed=3)
    softmax = qkv.normalizers.Softmax(0.7)
    _, weights = attend(q, k, v, **CASES[name], normalizer=softmax, return_weights=True)
    assert choice.index.shape == q.shape[:3]
    assert (choice.index >= 0).all()
    picked = weights.gather(3, choice.index[..., None])[..., 0]
    close(choice.log_prob, picked.log().detach())
    slope = rand(*q.shape[:3], seed=9)
    got = torch.autograd.grad((choice.log_prob * slope).sum(), (q, k))
    want = torch.autograd.grad((picked.log() * slope).sum(), (q, k))
    for x, y in zip(got, want, strict=True):
        close(x, y)


@pytest.mark.parametrize("sample", [True, False])
def test_take_returns_the_values_of_hard_attention(sample: bool) -> None:
    q, k, v = triple()
    choice = choose_keys(q, k, mask=masks.Causal(), sample=sample, seed=5)
    for kernel in ("tiled", "eager"):
        call = Call.of(q, k, v, masks.Causal(), normalizer=Hard(sample=sample), seed=5)
        close(choice.take(v), KERNELS[kernel].forward(call).out)


def test_without_sampling_the_best_key_is_chosen() -> None:
    q, k, v = triple()
    weights = attend(q, k, v, mask=masks.Window(5), return_weights=True)[1]
    assert torch.equal(choose_keys(q, k, mask=masks.Window(5), sample=False).index, weights.argmax(-1))


def test_reinforce_estimates_the_gradient_of_the_expected_reward() -> None:
    """And draws follow the weights."""
    q, k, v = triple(b=1, h=1, hkv=1, nq=1, nk=3, grad=True)
    reward = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = attend(q, k, v, return_weights=True)[1][0, 0, 0]
    (want,) = torch.autograd.grad((weights * reward).sum(), q, retain_graph=True)
    n = 20_000  # the same query as many times
    choice = choose_keys(q.expand(1, 1, n, -1), k, seed=3)
    share = torch.bincount(choice.index.flatten(), minlength=3) / n
    assert ((share - weights).abs() < 4 * (weights * (1 - weights) / n).sqrt()).all()
    (got,) = torch.autograd.grad((reward[choice.index] * choice.log_prob).mean(), q)
    assert (got - want).abs().max() < 0.03
    assert want.abs().max() > 0.1


def test_fully_masked_queries_choose_no_key() -> None:
    q, k, v = triple(nq=13, nk=7, grad=True)  # six queries before the first key
    choice = choose_keys(q, k, mask=masks.Causal(), seed=1)
    assert (choice.index[:, :, :6] == -1).all()
    assert (choice.log_prob[:, :, :6] == 0).all()
    assert (choice.take(v)[:, :, :6] == 0).all()
    for grad in torch.autograd.grad(choice.log_prob.sum(), (q, k)):
        assert grad.isfinite().all()


def test_choose_keys_rejects_relative_values_and_zero_temperature() -> None:
    q, k, _ = triple()
    with refused("bias"):
        choose_keys(q, k, bias=biases.RelativePosition(rand(5, 3), rand(5, 3)))
    with refused("temperature"):
        choose_keys(q, k, temperature=0)
