"""Gradients of statistics: against autograd through dense float64 formulas, finite differences, and as laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import MASKS, close, largest_tensor, rand, set_tile, triple, unchecked
from own_objects import HeavyTail, Manhattan, Ramp, Share, Slope, SoftplusSquared, Square, Squeeze
from qkv import InputError, biases, masks, measure, normalizers
from qkv.masks import Causal, Mask, Padding, Window
from qkv.normalizers import Pointwise, Softmax, SumToOne
from qkv.scores import Additive
from qkv.statistics.gradients import DIFFERENTIABLE
from qkv.statistics.measure import Statistics

PARTS = {"near": Window(2), "odd": masks.Strided(2), "early": masks.Prefix(5), "late": ~masks.Window(3)}
DETACHED = ("spread", "visible", "visible_queries")


def formulas(a: Tensor, first: int | list[int] = 0, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Statistics of weights (b, h, nq, nk) that are formed, as their definitions have them."""
    nq, nk = a.shape[2:]
    keys = torch.arange(nk)
    where = torch.arange(nq) + nk - nq
    mass = a.sum(-1)
    share = a / torch.where(mass > 0, mass, 1.0)[..., None]
    log = torch.log(torch.where(share > 0, share, 1.0))
    squares = share.square().sum(-1)
    firsts = torch.as_tensor(first).expand(len(a))
    found = {
        "entropy": -(share * log).sum(-1),
        "effective_keys": torch.where(mass > 0, 1 / torch.where(mass > 0, squares, 1.0), 0.0),
        "distance": (share * (where[:, None] - keys).abs()).sum(-1),
        "sink": torch.stack([x[..., f] for x, f in zip(a, firsts.tolist(), strict=True)]),
        "received": a.sum(-2),
    }
    for name, shift in (("self_", 0), ("previous", -1), ("next_", 1)):
        found[name] = (a * (keys == where[:, None] + shift)).sum(-1)
    return found | {f"mass {name}": (a * inside).sum(-1) for name, inside in (parts or {}).items()}


def of(found: Statistics) -> dict[str, Tensor]:
    """The statistics with gradients."""
    named = {name: getattr(found, name) for name in DIFFERENTIABLE}
    return {n: x for n, x in named.items() if x is not None} | {f"mass {n}": x for n, x in found.mass.items()}


def scalar(found: dict[str, Tensor]) -> Tensor:
    """Depends on every number in every statistic; an lse of −inf stands for nothing."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, (_, x) in enumerate(sorted(found.items())):
        total = total + (torch.where(x == -torch.inf, 0.0, x).double() * rand(*x.shape, seed=seed)).sum()
    return total


def agree(
    q: Tensor, k: Tensor, learned: list[Tensor], *, first: int | list[int] = 0, eps: float = 2**14,
    parts: dict[str, Mask] = PARTS, **asked: Any,
) -> None:  # fmt: skip
    """Gradients of everything at once, against autograd through the weights that the eager kernel forms."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    leaves, sizes = [q, k, *learned], {"batch": len(q), "heads": q.shape[1]}
    weights = qkv.attend(q, k, k, return_weights=True, **asked)[1]
    want = formulas(weights, first, {n: part.dense(q.shape[2], k.shape[2], **sizes) for n, part in parts.items()})
    normalizer = asked.get("normalizer") or Softmax()
    if normalizer.has_lse:
        want["lse"] = qkv.attend(q, k, k, kernel="eager", return_lse=True, **asked)[1]
    if isinstance(normalizer, SumToOne) and (normalizer.sink is not None or normalizer.key is not None):
        want["sink_mass"] = 1 - weights.sum(-1)
    given = first if isinstance(first, int) else torch.tensor(first)
    got = of(measure(q, k, first=given, mass=parts, differentiable=True, **asked))
    assert sorted(got) == sorted(want)
    for name, x in got.items():
        close(x, want[name], eps=2**12, dtype=torch.float64)
    found, expected = (torch.autograd.grad(scalar(x), leaves, allow_unused=True) for x in (got, want))
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == torch.float64
            close(x, y, eps=eps)
    assert expected[0].abs().max() > 0.01


# --- against formulas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(n for n in DIFFERENTIABLE if n != "lse"), "lse", "mass odd", "mass near"])
@pytest.mark.usefixtures("tile4")
def test_each_statistic_of_a_softmax(name: str) -> None:
    """Nothing of the package in the formula: grouped heads, a window, a sink of each head, a learned bias."""
    q, k, _ = triple(nq=11, nk=13, grad=True)
    sink, added = rand(6, seed=1).requires_grad_(), rand(6, 11, 13, seed=2).requires_grad_()
    leaves = [q, k, sink, added]
    steps = torch.arange(11)[:, None] + 2 - torch.arange(13)
    inside = (steps >= -1) & (steps < 7)
    scores = 0.8 * (q @ k.repeat_interleave(3, 1).transpose(-1, -2)) + added
    scores = (scores / 1.3).masked_fill(~inside, -torch.inf)
    lse = torch.logsumexp(torch.cat([scores, sink[:, None, None].expand(2, 6, 11, 1)], -1), -1)
    weights = torch.exp(scores - lse[..., None])
    parts = {"odd": steps % 2 == 0, "near": (steps >= 0) & (steps < 2)}
    want = formulas(weights, 1, parts) | {"lse": lse, "sink_mass": torch.exp(sink[:, None] - lse)}
    got = of(
        measure(
            q, k, mask=Window(7, ahead=1), bias=biases.Dense(added), score=qkv.scores.Dot(0.8),
            normalizer=Softmax(1.3, sink), mass={"odd": ~masks.Predicate(lambda b, h, q, k: (q - k) % 2 == 1),
            "near": Window(2)}, first=1, differentiable=True,
        )
    )  # fmt: skip
    close(got[name], want[name], eps=256)
    found, expected = (torch.autograd.grad(scalar({name: x[name]}), leaves, allow_unused=True) for x in (got, want))
    for x, y in zip(found, expected, strict=True):
        close(x, torch.zeros_like(x) if y is None else y, eps=1024)
    assert expected[0].abs().max() > 0.01


def own(heads: int = 4) -> tuple[Tensor, Tensor]:
    q, k, _ = triple(h=heads, hkv=2)
    return q, k


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
    "relu": lambda: {"normalizer": normalizers.ReLU(), "mask": Causal()},
    "relu over the sum": lambda: {"normalizer": normalizers.ReLU("sum"), "mask": Causal()},
    "elu over the sum": lambda: {"normalizer": normalizers.EluPlusOne("sum"), "mask": Window(4)},
    "learned sink": lambda: {"normalizer": normalizers.Sparsemax().with_sink(parameter(4)), "mask": Causal()},
    "entmax": lambda: {"normalizer": normalizers.Entmax(1.5, temperature=0.7), "mask": named("documents")},
    "own, of each score": lambda: {"normalizer": Square(), "mask": Causal()},
    "own, over the keys, learned": lambda: {"normalizer": Ramp(), "mask": Causal()},
    "own, over the sum": lambda: {"normalizer": Share(), "mask": Causal()},
    "own, to one, learned bias": lambda: {"normalizer": SoftplusSquared(), "mask": Causal(), "bias": Slope()},
    "own, to one, learned, with a sink": lambda: {"normalizer": HeavyTail(sink=parameter(4)), "mask": Causal()},
}  # fmt: skip


def tensors_in(*things: Any) -> list[Tensor]:
    """Learned tensors among the attributes of objects."""
    found = []
    for thing in things:
        for one in thing if isinstance(thing, tuple) else (thing,):
            values = [*vars(one).values(), *(one.parameters() if isinstance(one, nn.Module) else [])]
            found += [x for x in values if isinstance(x, nn.Parameter)]
    return list({id(x): x for x in found}.values())


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.usefixtures("tile4")
def test_compositions(name: str) -> None:
    """Every object of the package and of a user, with its learned tensors."""
    asked = COMPOSITIONS[name]()
    learned = tensors_in(*(x for key, x in asked.items() if key != "mask"))
    assert learned or "learned" not in name
    agree(*own(), learned, **asked)


@pytest.mark.parametrize("heads", [(3, 3), (5, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "nq", "nk"),
    [("none", 13, 7), ("causal", 13, 7), ("sink and window", 11, 13), ("left padding, causal", 11, 13),
     ("dense of items", 11, 13), ("dense of heads", 13, 13), ("dilated ahead", 11, 13), ("longformer", 13, 13)],
)  # fmt: skip
def test_masks(name: str, nq: int, nk: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 8 if nq == nk else 4)
    q, k, _ = triple(h=heads[0], hkv=heads[1], nq=nq, nk=nk)
    agree(q, k, [], mask=MASKS[name](nq, nk, 2, heads[0]), first=[1, 3])


@pytest.mark.parametrize("normalizer", [None, normalizers.Sparsemax()], ids=str)
def test_tiles_as_they_are(normalizer: SumToOne | None) -> None:
    q, k, _ = triple(b=1, h=2, hkv=1, nq=300, nk=300, d=8)
    agree(q, k, [], mask=Causal(), normalizer=normalizer, eps=2**18)


@pytest.mark.parametrize("normalizer", [Softmax(sink=0.3), normalizers.Sigmoid(0.0), HeavyTail()], ids=str)
@pytest.mark.usefixtures("tile4")
def test_finite_differences(normalizer: Pointwise | SumToOne) -> None:
    q, k, _ = triple(b=1, h=4, hkv=2, nq=5, nk=6, grad=True)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        found = of(measure(q, k, mask=Causal(), normalizer=normalizer, mass={"near": Window(2)}, differentiable=True))
        return tuple(found.values())

    assert torch.autograd.gradcheck(run, (q, k), fast_mode=True)


# --- rows and keys that play no part ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "normalizer", [None, Softmax(sink=0.5), normalizers.Sigmoid(), normalizers.Sparsemax()], ids=str
)
@pytest.mark.usefixtures("tile4")
def test_empty_rows_and_nan_behind_masks(normalizer: Any) -> None:
    """Gradients are those without what is masked, 0 there, and never NaN."""
    q, k, _ = triple(nq=9, nk=9)
    mask = Padding([9, 6]) & masks.Dense((torch.arange(9) != 4)[:, None])
    grads = []
    for hidden in (0.0, torch.nan):
        leaves = q.clone(), k.clone()
        leaves[0][:, :, 4], leaves[1][1, :, 6:] = hidden, hidden
        leaves = tuple(x.requires_grad_() for x in leaves)
        found = measure(*leaves, mask=mask, normalizer=normalizer, mass=PARTS, differentiable=True)
        grads.append(torch.autograd.grad(scalar(of(found)), leaves))
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
def test_queries_that_do_not_count(normalizer: Any) -> None:
    """As if they were not there, whatever they and their keys hold."""
    q, k, _ = triple(b=1, nq=12, nk=12)
    leaves = q.clone(), k.clone()
    for x in leaves:
        x[:, :, 9:] = torch.nan
    leaves = tuple(x.requires_grad_() for x in leaves)
    asked = {"mask": Causal(), "normalizer": normalizer, "mass": PARTS, "differentiable": True}
    counted = (torch.arange(12) < 9)[None]
    found = of(measure(*leaves, queries=counted, **asked))
    short = tuple(x[:, :, :9].detach().requires_grad_() for x in (q, k))
    alone = of(measure(*short, **asked))
    got = torch.autograd.grad(scalar({n: x[..., :9] for n, x in found.items()}), leaves)
    want = torch.autograd.grad(scalar(alone), short)
    for x, y in zip(got, want, strict=True):
        close(x[:, :, :9], y)
        assert (x[:, :, 9:] == 0).all()


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("normalizer", [Softmax(sink=1e4), Softmax(), normalizers.Sigmoid(-60.0)], ids=str)
def test_weights_that_floats_hardly_hold(normalizer: Any, size: float) -> None:
    q, k, _ = triple(dtype=torch.float32)
    q = (q * size).requires_grad_()
    asked = {"normalizer": normalizer, "mask": Causal(), "mass": PARTS, "bias": biases.ALiBi(torch.full((6,), 50.0))}
    (grad,) = torch.autograd.grad(scalar(of(measure(q, k, differentiable=True, **asked))), q)
    assert grad.isfinite().all()


def test_infinite_gradients_of_what_nobody_sees_go_nowhere() -> None:
    """The slopes of a logarithm of 0: of a key without queries, of a query without keys."""
    q, k, _ = triple(b=1, nq=6, nk=6, grad=True)
    mask, hidden = masks.Dense((torch.arange(6) != 2)[None]), torch.zeros(6, 6).double()
    hidden[3] = -torch.inf
    found = measure(q, k, mask=mask, bias=biases.Dense(hidden), mass={"all": masks.Prefix(6)}, differentiable=True)
    given = torch.log(found.received).sum() + torch.log(found.mass["all"]).sum() + torch.log(found.entropy).sum()
    grads = torch.autograd.grad(given, (q, k))
    assert all(x.isfinite().all() for x in grads)
    assert grads[0].abs().max() > 0.01


def test_what_a_bias_hides_from_a_row_of_little_mass() -> None:
    q, k, _ = triple(b=1, h=2, hkv=2, dtype=torch.float32, grad=True)
    hidden = torch.zeros(11, 13).masked_fill(torch.arange(13) % 3 == 0, -torch.inf)
    found = measure(q, k, bias=biases.Dense(hidden), normalizer=Softmax(sink=60.0), differentiable=True)
    (grad,) = torch.autograd.grad(found.entropy.sum(), q)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    weights = torch.softmax(wide[0] @ wide[1].transpose(-1, -2) / 3**0.5 + hidden, -1)  # a sink does not change shares
    close(grad, torch.autograd.grad(formulas(weights)["entropy"].sum(), wide[0])[0], eps=256)


# --- dtypes, memory, threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, _ = triple(b=1, nq=70, nk=70, d=8, dtype=dtype)
    names, grads = ("entropy", "received", "sink", "effective_keys"), []
    for wide in (torch.float64, dtype):
        leaves = [x.to(wide).requires_grad_() for x in (q, k)]
        found = of(measure(*leaves, mask=Causal(), differentiable=True))
        assert found["entropy"].dtype == (torch.float64 if wide == torch.float64 else torch.float32)
        grads.append(torch.autograd.grad(scalar({n: found[n] for n in names}), leaves))
    for want, got in zip(*grads, strict=True):
        assert got.dtype == dtype
        close(got, want, eps=512 if dtype == torch.float32 else 2)


def test_autocast_and_fewer_dimensions() -> None:
    q, k = rand(9, 4, dtype=torch.float32).requires_grad_(), rand(9, 4, seed=1, dtype=torch.float32)
    measure(q, k, differentiable=True).entropy.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == (9, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(q, k, differentiable=True).entropy
    (grad,) = torch.autograd.grad(found.sum(), q)
    assert grad.dtype == torch.float32
    close(grad, q.grad, eps=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("normalizer", [None, normalizers.Sparsemax()], ids=str)
def test_linear_memory(normalizer: Any) -> None:
    q, k, _ = triple(b=1, h=2, hkv=1, nq=2048, nk=2048, d=4, dtype=torch.float32, grad=True)

    def run() -> None:
        found = measure(q, k, mask=Window(300), normalizer=normalizer, mass={"near": Window(64)}, differentiable=True)
        (found.entropy.sum() + found.received.square().sum() + found.mass["near"].sum()).backward()

    assert largest_tensor(run) < 2048**2 // 4


@pytest.mark.usefixtures("tile4")
def test_threads_share_the_work() -> None:
    q, k, _ = triple(grad=True)
    grads = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found = measure(q, k, mask=Causal(), mass=PARTS, differentiable=True)
            grads.append(torch.autograd.grad(scalar(of(found)), (q, k)))
    finally:
        torch.set_num_threads(1)
    for x, y in zip(*grads, strict=True):
        close(x, y)


# --- what is asked and what is refused --------------------------------------------------------------------------------


def test_the_numbers_are_those_without_gradients() -> None:
    q, k, _ = triple()
    asked = {"mask": Causal(), "mass": PARTS, "normalizer": Softmax(sink=0.0)}
    plain, without = measure(q, k, **asked), measure(q, k, differentiable=True, **asked)
    found = measure(q.requires_grad_(), k, differentiable=True, **asked)
    with torch.no_grad():
        inside = measure(q, k, differentiable=True, **asked)
    for name, x in of(plain).items():
        assert not x.requires_grad
        for other in (without, inside, found):
            assert torch.equal(of(other)[name], x)
        assert of(found)[name].requires_grad
        assert not of(inside)[name].requires_grad
    for name in DETACHED:
        assert torch.equal(getattr(found, name), getattr(plain, name))
        assert not getattr(found, name).requires_grad
    assert list(found.mass) == list(PARTS)


def test_only_what_wants_a_gradient_gets_one() -> None:
    q, k, v = triple(grad=True)
    sink = nn.Parameter(rand(6))
    measure(q.detach(), k.detach(), v, normalizer=Softmax(sink=sink), differentiable=True).sink_mass.sum().backward()
    assert sink.grad is not None
    assert q.grad is None
    assert v.grad is None


def test_second_derivatives_are_refused() -> None:
    q, k, _ = triple(grad=True)
    (grad,) = torch.autograd.grad(measure(q, k, differentiable=True).entropy.sum(), q, create_graph=True)
    with pytest.raises(InputError, match="second derivatives were asked for of statistics"):
        grad.sum().backward()


class Closed(Pointwise):
    """Uses a tensor that is none of its attributes."""

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) * HIDDEN_SCALE


HIDDEN_SCALE = torch.ones((), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prefix_keys": 3}, "differentiable=True with prefix_keys"),
        ({"bins": 3}, "differentiable=True with bins"),
        ({"statistics": [object()]}, "differentiable=True with statistics"),
        ({"group": object()}, "differentiable=True with group"),
        ({"normalizer": normalizers.Hard()}, "Hard chooses one key"),
        ({"normalizer": Closed()}, "Closed uses a tensor that requires a gradient"),
        ({"queries": torch.ones(3, 3)}, "queries is torch.float32 of shape"),
        ({"mass": {"a": 3}}, "mass"),
        ({"first": 99}, "first is 99"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x[:20],
)
def test_what_is_refused(asked: dict[str, Any], message: str) -> None:
    q, k, _ = triple(grad=True)
    with unchecked(), pytest.raises(InputError, match=message):
        measure(q, k, differentiable=True, **asked)


def test_arrays_and_transforms_are_refused() -> None:
    x = np.ones((5, 4))
    with pytest.raises(InputError, match="NumPy arrays, which carry no gradients"):
        measure(x, x, differentiable=True)
    q, k, _ = triple()
    with pytest.raises(InputError, match=r"torch\.func transforms"):
        torch.func.grad(lambda q: measure(q, k, differentiable=True).entropy.sum())(q)
