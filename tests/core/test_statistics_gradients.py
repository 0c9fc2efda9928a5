"""Gradients of statistics: against autograd through dense float64 formulas, and invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import MASKS, close, largest_tensor, rand, refusals, set_sizes, triple
from own_objects import HeavyTail, Manhattan, Ramp, Share, Slope, SoftplusSquared, Square, Squeeze
from qkv import InputError, biases, masks, measure, normalizers
from qkv._contract import learned_tensors
from qkv.masks import Causal, Mask, Padding, Window
from qkv.normalizers import Pointwise, Softmax, SumToOne
from qkv.scores import Additive
from qkv.statistics import Extremes
from qkv.statistics.gradients import DIFFERENTIABLE
from qkv.statistics.measure import Statistics

PARTS = {"near": Window(2), "odd": masks.Strided(2), "early": masks.Prefix(5), "late": ~masks.Window(3)}
DETACHED = ("spread", "visible", "visible_queries")


def formulas(a: Tensor, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Statistics of materialised weights (b, h, nq, nk), by definition."""
    nq, nk = a.shape[2:]
    keys = torch.arange(nk)
    where = torch.arange(nq) + nk - nq
    mass = a.sum(-1)
    share = a / torch.where(mass > 0, mass, 1.0)[..., None]
    log = torch.log(torch.where(share > 0, share, 1.0))
    squares = share.square().sum(-1)
    result = {
        "entropy": -(share * log).sum(-1),
        "effective_keys": torch.where(mass > 0, 1 / torch.where(mass > 0, squares, 1.0), 0.0),
        "distance": (share * (where[:, None] - keys).abs()).sum(-1),
        "sink": a[..., 0],
        "received": a.sum(-2),
    }
    for name, shift in (("self_", 0), ("previous", -1), ("next_", 1)):
        result[name] = (a * (keys == where[:, None] + shift)).sum(-1)
    return result | {f"mass {name}": (a * inside).sum(-1) for name, inside in (parts or {}).items()}


def of(result: Statistics) -> dict[str, Tensor]:
    """The differentiable statistics, by name."""
    named = {name: getattr(result, name) for name in DIFFERENTIABLE}
    return {n: x for n, x in named.items() if x is not None} | {f"mass {n}": x for n, x in result.mass.items()}


def scalar(result: dict[str, Tensor]) -> Tensor:
    """A scalar that depends on every number of every statistic, except an lse of −inf."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, (_, x) in enumerate(sorted(result.items())):
        total = total + (torch.where(x == -torch.inf, 0.0, x).double() * rand(*x.shape, seed=seed)).sum()
    return total


def agree(q: Tensor, k: Tensor, learned: list[Tensor], **arguments: Any) -> None:
    """Compare the gradients of all tensors with autograd through the weights of the eager kernel."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    leaves, sizes = [q, k, *learned], {"batch": len(q), "heads": q.shape[1]}
    weights = qkv.attend(q, k, k, return_weights=True, **arguments)[1]
    want = formulas(weights, {n: part.dense(q.shape[2], k.shape[2], **sizes) for n, part in PARTS.items()})
    normalizer = arguments.get("normalizer") or Softmax()
    if normalizer.has_lse:
        want["lse"] = qkv.attend(q, k, k, kernel="eager", return_lse=True, **arguments)[1]
    if isinstance(normalizer, SumToOne) and (normalizer.sink is not None or normalizer.key is not None):
        want["sink_mass"] = 1 - weights.sum(-1)
    measured = measure(q, k, mass=PARTS, differentiable=True, **arguments)
    if measured.max_logit is not None:  # a score is the log-sum-exp over its key alone
        key = measure(q, k, statistics=[Extremes()], **arguments).argmax
        first = k.shape[2] - q.shape[2]
        alone = masks.Predicate(lambda b, h, q, k: key[b, h, q - first] == k)
        only = arguments | {"mask": alone, "normalizer": Softmax(normalizer.temperature)}
        want["max_logit"] = qkv.attend(q, k, k, kernel="eager", return_lse=True, **only)[1]
    got = of(measured)
    assert sorted(got) == sorted(want)
    for name, x in got.items():
        close(x, want[name], eps=2**12, dtype=torch.float64)
    result, expected = (torch.autograd.grad(scalar(x), leaves, allow_unused=True) for x in (got, want))
    for x, y in zip(result, expected, strict=True):
        assert x is None or x.dtype == torch.float64
        close(torch.zeros(()).double() if x is None else x, torch.zeros(()) if y is None else y, eps=2**14)
    assert expected[0].abs().max() > 0.01


# --- against formulas -------------------------------------------------------------------------------------------------


def parameter(*shape: int, seed: int = 9) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed))


def named(mask: str) -> Mask | None:
    return MASKS[mask](11, 13, 2, 4)


COMPOSITIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"bias": (biases.ALiBi(0.5 ** torch.arange(4.0)), biases.SoftCap(2.0))},
    "learned t5": lambda: {"bias": biases.T5Bias(parameter(8, 4), max_distance=9), "mask": named("padding")},
    "own learned bias": lambda: {"bias": Squeeze(), "mask": Causal()},
    "learned bias and sinks": lambda: {"bias": Slope(), "normalizer": Softmax(0.7, sink=parameter(2, 4, 11))},
    "own learned score": lambda: {"score": Manhattan(), "mask": Causal()},
    "learned additive score": lambda: {"score": Additive(parameter(4, 5), parameter(5, 3), parameter(5, 3))},
    "learned general score": lambda: {"score": qkv.scores.General(parameter(3, 3)), "mask": Causal()},
    "learned key": lambda: {"normalizer": Softmax(1.2, key=parameter(4, 3)), "mask": Causal()},
    "learned sigmoid": lambda: {"normalizer": normalizers.Sigmoid(parameter(4)), "mask": Causal()},
    "sigmoid of visible keys": lambda: {"normalizer": normalizers.Sigmoid(), "mask": named("random bigbird")},
    "relu over the sum": lambda: {"normalizer": normalizers.ReLU("sum"), "mask": Causal()},
    "elu over the sum": lambda: {"normalizer": normalizers.EluPlusOne("sum"), "mask": Window(4)},
    "learned sink": lambda: {"normalizer": normalizers.Sparsemax().with_sink(parameter(4)), "mask": Causal()},
    "entmax": lambda: {"normalizer": normalizers.Entmax(1.5, temperature=0.7), "mask": named("documents")},
    "softpick": lambda: {"normalizer": normalizers.Softpick(0.7), "mask": named("documents")},
    "own, of each score": lambda: {"normalizer": Square(), "mask": Causal()},
    "own, over the keys, learned": lambda: {"normalizer": Ramp(), "mask": Causal()},
    "own, over the sum": lambda: {"normalizer": Share(), "mask": Causal()},
    "own, to one, learned bias": lambda: {"normalizer": SoftplusSquared(), "mask": Causal(), "bias": Slope()},
    "own, to one, learned, with a sink": lambda: {"normalizer": HeavyTail(sink=parameter(4)), "mask": Causal()},
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.usefixtures("tile4")
def test_gradients_match_autograd_for_every_composition(name: str) -> None:
    """Built-in and user-defined objects, with their learned tensors."""
    arguments = COMPOSITIONS[name]()
    learned = [*learned_tensors({key: x for key, x in arguments.items() if key != "mask"}).values()]
    assert learned or "learned" not in name
    agree(*triple(h=4)[:2], learned, **arguments)


# --- masked rows and keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "normalizer", [None, Softmax(sink=0.5), normalizers.Sigmoid(), normalizers.Sparsemax()], ids=str
)
@pytest.mark.usefixtures("tile4")
def test_nan_in_masked_rows_and_keys_does_not_reach_gradients(normalizer: Any) -> None:
    """Gradients of masked entries are 0, and the others do not depend on them."""
    q, k, _ = triple(nq=9, nk=9)
    mask = Padding([9, 6]) & masks.Dense((torch.arange(9) != 4)[:, None])
    grads = []
    for hidden in (0.0, torch.nan):
        leaves = q.clone(), k.clone()
        leaves[0][:, :, 4], leaves[1][1, :, 6:] = hidden, hidden
        leaves = tuple(x.requires_grad_() for x in leaves)
        result = measure(*leaves, mask=mask, normalizer=normalizer, mass=PARTS, differentiable=True)
        grads.append(torch.autograd.grad(scalar(of(result)), leaves))
    for clean, x in zip(*grads, strict=True):
        assert x.isfinite().all()
        close(x, clean)
    assert (grads[1][0][:, :, 4] == 0).all()
    assert (grads[1][1][1, :, 6:] == 0).all()
    assert grads[1][1][1, :, :6].abs().max() > 0.01


@pytest.mark.parametrize(
    "normalizer", [None, Softmax(key=rand(6, 3)), normalizers.Sigmoid(), normalizers.Entmax(1.5)], ids=str
)
@pytest.mark.usefixtures("tile4")
def test_uncounted_queries_do_not_affect_gradients(normalizer: Any) -> None:
    """Gradients equal those of the shorter text, even if the padding holds NaN."""
    q, k, _ = triple(b=1, nq=12, nk=12)
    leaves = tuple(torch.where(torch.arange(12)[:, None] < 9, x, torch.nan).requires_grad_() for x in (q, k))
    arguments = {"mask": Causal(), "normalizer": normalizer, "mass": PARTS, "differentiable": True}
    counted = (torch.arange(12) < 9)[None]
    result = of(measure(*leaves, queries=counted, **arguments))
    short = tuple(x[:, :, :9].detach().requires_grad_() for x in (q, k))
    alone = of(measure(*short, **arguments))
    got = torch.autograd.grad(scalar({n: x[..., :9] for n, x in result.items()}), leaves)
    want = torch.autograd.grad(scalar(alone), short)
    for x, y in zip(got, want, strict=True):
        close(x[:, :, :9], y)
        assert (x[:, :, 9:] == 0).all()


@pytest.mark.parametrize(
    ("normalizer", "size"),
    [(Softmax(sink=1e4), 1e3), (Softmax(), 1e-3), (Softmax(), 1e3), (normalizers.Sigmoid(-60.0), 1e3)],
)
def test_gradients_are_finite_when_weights_underflow(normalizer: Any, size: float) -> None:
    q, k, _ = triple(dtype=torch.float32)
    q = (q * size).requires_grad_()
    bias = biases.ALiBi(torch.full((6,), 50.0))
    result = measure(q, k, mask=Causal(), bias=bias, normalizer=normalizer, mass=PARTS, differentiable=True)
    assert torch.autograd.grad(scalar(of(result)), q)[0].isfinite().all()


def test_infinite_gradients_at_masked_rows_and_keys_are_dropped() -> None:
    """The derivative of log 0: at a key without visible queries, and at a query without visible keys."""
    q, k, _ = triple(b=1, nq=6, nk=6, grad=True)
    mask, hidden = masks.Dense((torch.arange(6) != 2)[None]), torch.zeros(6, 6).double()
    hidden[3] = -torch.inf
    result = measure(
        q, k, mask=mask, bias=biases.TensorBias(hidden), mass={"all": masks.Prefix(6)}, differentiable=True
    )
    loss = torch.log(result.received).sum() + torch.log(result.mass["all"]).sum() + torch.log(result.entropy).sum()
    grads = torch.autograd.grad(loss, (q, k))
    assert all(x.isfinite().all() for x in grads)
    assert grads[0].abs().max() > 0.01


def test_gradients_with_a_bias_of_minus_infinity_and_little_mass() -> None:
    q, k, _ = triple(b=1, h=2, hkv=2, dtype=torch.float32, grad=True)
    hidden = torch.zeros(11, 13).masked_fill(torch.arange(13) % 3 == 0, -torch.inf)
    result = measure(q, k, bias=biases.TensorBias(hidden), normalizer=Softmax(sink=60.0), differentiable=True)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    weights = torch.softmax(wide[0] @ wide[1].mT / 3**0.5 + hidden, -1)  # a sink does not change shares
    want = torch.autograd.grad(formulas(weights)["entropy"].sum(), wide[0])[0]
    close(torch.autograd.grad(result.entropy.sum(), q)[0], want, eps=256)


# --- dtypes, memory ---------------------------------------------------------------------------------------------------


def test_autocast_and_fewer_dimensions() -> None:
    q, k = rand(9, 4, dtype=torch.float32).requires_grad_(), rand(9, 4, seed=1, dtype=torch.float32)
    measure(q, k, differentiable=True).entropy.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == (9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = measure(q, k, differentiable=True).entropy
    (grad,) = torch.autograd.grad(result.sum(), q)
    assert grad.dtype == torch.float32
    close(grad, q.grad, eps=2, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", [None, normalizers.Sparsemax()], ids=str)
def test_linear_memory(monkeypatch: pytest.MonkeyPatch, normalizer: Any) -> None:
    set_sizes(monkeypatch, panel=2**17)
    q, k, _ = triple(b=1, h=2, hkv=1, nq=1024, nk=1024, d=4, dtype=torch.float32, grad=True)

    def run() -> None:
        result = measure(q, k, mask=Window(300), normalizer=normalizer, mass={"near": Window(64)}, differentiable=True)
        (result.entropy.sum() + result.received.square().sum() + result.mass["near"].sum()).backward()

    assert largest_tensor(run) < 1024**2 // 4


# --- differentiable fields and rejected arguments ---------------------------------------------------------------------


def test_differentiable_does_not_change_the_numbers() -> None:
    q, k, _ = triple()
    arguments = {"mask": Causal(), "mass": PARTS, "normalizer": Softmax(sink=0.0)}
    plain, without = measure(q, k, **arguments), measure(q, k, differentiable=True, **arguments)
    result = measure(q.requires_grad_(), k, differentiable=True, **arguments)
    with torch.no_grad():
        inside = measure(q, k, differentiable=True, **arguments)
    for name, x in of(plain).items():
        assert not x.requires_grad
        for other in (without, inside, result):
            assert torch.equal(of(other)[name], x)
        assert of(result)[name].requires_grad
        assert not of(inside)[name].requires_grad
    for name in DETACHED:
        assert torch.equal(getattr(result, name), getattr(plain, name))
        assert not getattr(result, name).requires_grad
    assert list(result.mass) == list(PARTS)


def test_only_tensors_that_require_gradients_get_them() -> None:
    q, k, _ = triple()
    sink = nn.Parameter(rand(6))
    measure(q, k, normalizer=Softmax(sink=sink), differentiable=True).sink_mass.sum().backward()
    assert sink.grad is not None
    assert q.grad is None


def test_second_derivatives_are_refused() -> None:
    q, k, _ = triple(grad=True)
    (grad,) = torch.autograd.grad(measure(q, k, differentiable=True).entropy.sum(), q, create_graph=True)
    with pytest.raises(InputError, match="not second derivatives"):
        grad.sum().backward()


class Closed(Pointwise):
    """Uses a tensor that is not one of its attributes."""

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) * HIDDEN_SCALE


HIDDEN_SCALE = torch.ones((), dtype=torch.float64, requires_grad=True)


X, (Q, K, _) = np.ones((5, 4)), triple(grad=True)
REFUSALS: list[tuple[str, str, Callable[[], object]]] = [
    ("differentiable", "with bins", lambda: measure(Q, K, differentiable=True, bins=3)),
    ("differentiable", "with statistics", lambda: measure(Q, K, differentiable=True, statistics=[object()])),
    ("differentiable", "Hard", lambda: measure(Q, K, differentiable=True, normalizer=normalizers.Hard())),
    ("differentiable", "Closed", lambda: measure(Q, K, differentiable=True, normalizer=Closed())),
    ("differentiable", "NumPy", lambda: measure(X, X, differentiable=True)),
    (
        "differentiable",
        "torch.func",
        lambda: torch.func.grad(lambda q: measure(q, K, differentiable=True).lse.sum())(Q),
    ),
]

test_differentiable_rejects_unsupported_arguments_arrays_and_transforms = refusals(REFUSALS)
