"""User-defined masks, scores, biases and normalizers: exact and trainable on every kernel, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import close, largest_tensor, rand, set_tile, triple, unchecked
from own_objects import (
    HEADS,
    Diagonals,
    Exponential,
    HeavyTail,
    Manhattan,
    Ramp,
    Share,
    Slope,
    SoftplusSquared,
    Square,
    Squeeze,
    Tripled,
)
from qkv import InputError, attend, biases, masks, normalizers, scores
from qkv._contract import learned_tensors

COMPOSITIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "a weight that is not injective": lambda: {"normalizer": Square()},
    "weights divided by their sum": lambda: {"normalizer": Share()},
    "a learned pointwise weight": lambda: {"normalizer": Ramp()},
    "weights that sum to one": lambda: {"normalizer": SoftplusSquared()},
    "a sink": lambda: {"normalizer": SoftplusSquared(sink=nn.Parameter(rand(HEADS, seed=1)))},
    "a learned key": lambda: {"normalizer": HeavyTail(key=nn.Parameter(rand(HEADS, 6, seed=2)))},
    "learned weights that sum to one": lambda: {"normalizer": HeavyTail()},
    "entmax with a sink": lambda: {"normalizer": normalizers.Entmax(1.5, sink=nn.Parameter(rand(HEADS, seed=3)))},
    "a pairwise score": lambda: {"score": Manhattan()},
    "a product score": lambda: {"score": Tripled()},
    "a bias": lambda: {"bias": Squeeze()},
    "an additive bias": lambda: {"bias": Slope()},
    "everything": lambda: {
        "mask": Diagonals(), "score": Manhattan(), "bias": (Squeeze(), Slope(), biases.ALiBi()),
        "normalizer": HeavyTail(sink=0.3, temperature=0.7),
    },
}  # fmt: skip


def results(tensors: tuple[Tensor, ...], asked: dict[str, Any], kernel: str) -> list[Tensor]:
    """Output and gradients of everything that learns."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    learned = [x for part in asked.values() for one in (part if isinstance(part, tuple) else (part,))
               for x in learned_tensors(one).values()]  # fmt: skip
    out = attend(*inputs, kernel=kernel, **asked)
    leaves = [*inputs, *learned]
    grads = torch.autograd.grad((out * rand(*out.shape, seed=9)).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_tiles_agree_with_autograd_on_all_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"mask": masks.Window(9, ahead=2)} | COMPOSITIONS[name]()
    tensors = triple(2, HEADS, 2, 33, 37, 6, 5)
    want = results(tensors, asked, "eager")
    for size in (4, 64):
        set_tile(monkeypatch, size)
        for x, y in zip(results(tensors, asked, "tiled"), want, strict=True):
            close(x, y, eps=512)
    chosen = qkv.plan(*tensors, **asked)
    for x, y in zip(results(tensors, asked, chosen.kernel), want, strict=True):
        close(x, y, eps=512)


@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if name != "everything"])
def test_autograd_on_all_scores_is_finite_differences(name: str) -> None:
    asked = {"mask": masks.Causal()} | COMPOSITIONS[name]()
    tensors = triple(1, HEADS, 2, 4, 5, 6, 3, grad=True)
    learned = list(learned_tensors(list(asked.values())).values())
    assert torch.autograd.gradcheck(
        lambda *_: attend(*tensors, kernel="eager", **asked), [*tensors, *learned], fast_mode=True
    )


def test_softmax_without_shortcuts_equals_softmax() -> None:
    q, k, v = triple(2, HEADS, 2, 33, 37, 6, 5)
    for sink in (None, 0.4):
        asked = {"mask": masks.Causal()}
        ours = attend(q, k, v, normalizer=Exponential(sink=sink, temperature=1.7), **asked)
        close(ours, attend(q, k, v, normalizer=normalizers.Softmax(1.7, sink), **asked), eps=256)


@pytest.mark.slow
def test_one_object_of_each_kind_is_exact_and_trains_in_linear_memory() -> None:
    """A mask, a score, a bias and a normalizer of one's own in one call, long enough for tiles."""
    n = 1100
    asked = {"mask": Diagonals(), "score": Manhattan(), "bias": Squeeze(), "normalizer": HeavyTail(sink=0.0)}
    tensors = tuple(x.float() for x in triple(1, HEADS, 2, n, n, 4, 4))
    found: list[Tensor] = []
    with unchecked():
        assert qkv.plan(*tensors, **asked).kernel == "tiled"
        most = largest_tensor(lambda: found.extend(results(tensors, asked, "auto")))
    assert most < HEADS * n * n / 3  # all scores of all heads would be three times that
    with unchecked():
        want = results(tuple(x.double() for x in tensors), asked, "eager")
    for x, y in zip(found, want, strict=True):
        close(x, y, eps=64 * max(1.0, y.abs().max().item()), dtype=torch.float32)


def test_statistics_equal_those_of_the_weights() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    for name in ("a learned pointwise weight", "a sink", "a learned key", "everything"):
        asked = {"mask": masks.Causal()} | COMPOSITIONS[name]()
        _, weights = attend(q, k, v, return_weights=True, **asked)
        found = qkv.measure(q, k, **asked)
        close(found.received, weights.detach().sum(-2), eps=512)
        mass = weights.detach().sum(-1, keepdim=True)
        shares = weights.detach() / torch.where(mass == 0, 1.0, mass)
        close(found.entropy, -torch.xlogy(shares, shares).sum(-1), eps=4096)
        if "sink" in name:
            assert found.sink_mass is not None
            close(found.sink_mass, 1 - mass[..., 0], eps=512)


def test_maps_of_one_head_equal_those_of_all_heads() -> None:
    from qkv._engine.call import Call
    from qkv.statistics.maps import pooled, rectangle
    from qkv.statistics.measure import row_state

    q, k, v = triple(1, HEADS, 2, 40, 40, 6, 5)
    asked = COMPOSITIONS["everything"]()
    _, weights = attend(q, k, v, return_weights=True, **asked)
    call = Call.of(q, k, v, asked["mask"], asked["bias"], asked["score"], asked["normalizer"])
    rows = row_state(call)
    for head in range(HEADS):
        close(pooled(call, rows, head=head).maximum, weights[0, head].detach(), eps=512)
    close(rectangle(call, rows, slice(7, 20), slice(3, 9)), weights[0, :, 7:20, 3:9].detach(), eps=512)


# --- an object that gives less than its base class needs --------------------------------------------------------------


class Nothing(normalizers.Normalizer): ...


class NoWeight(normalizers.Pointwise): ...


class NoLevel(normalizers.SumToOne): ...


class NoProject(scores.Product): ...


class NoScores(scores.Pairwise): ...


class BareScore(scores.Score): ...


class NoApply(biases.Bias): ...


class NoTile(biases.Additive): ...


class Both(biases.Additive):
    def tile(self, region: masks.Region) -> Tensor:
        return torch.zeros(1, 1, 1, 1)

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores / 2


class NoSees(masks.Mask): ...


class Halved(normalizers.SumToOne):
    """Of one key it is 0.5 at the most."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.sigmoid(scores - level) / 2


class Rising(normalizers.SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.sigmoid(scores - level) + 1


class Flat(normalizers.Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return scores[..., :1]


class Numbers(masks.Mask):
    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return (q - k) % 2


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"normalizer": Nothing()}, ("Nothing", "Pointwise", "SumToOne")),
        ({"normalizer": NoWeight()}, ("NoWeight", "weight(scores)")),
        ({"normalizer": NoLevel()}, ("NoLevel", "weight(scores, level)")),
        ({"normalizer": Halved()}, ("Halved", "0.5")),
        ({"normalizer": Rising()}, ("Rising", "level")),
        ({"normalizer": Flat()}, ("Flat", "weight", "(heads, 1, 1)")),
        ({"score": NoProject()}, ("NoProject", "project(q, k)")),
        ({"score": NoScores()}, ("NoScores", "scores(q, k)")),
        ({"score": BareScore()}, ("BareScore", "Product", "Pairwise")),
        ({"bias": NoApply()}, ("NoApply", "apply(scores, region)")),
        ({"bias": NoTile()}, ("NoTile", "tile(region)")),
        ({"bias": Both()}, ("Both", "apply", "tile")),
        ({"mask": NoSees()}, ("NoSees", "sees(b, h, q, k, grid)")),
        ({"mask": Numbers()}, ("Numbers", "int64", "boolean")),
    ],
    ids=lambda x: type(next(iter(x.values()))).__name__ if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("kernel", ["auto", "tiled", "eager"])
def test_the_error_of_an_incomplete_object_names_the_missing_method(
    asked: dict[str, Any], names: tuple[str, ...], kernel: str
) -> None:
    q, k, v = triple(2, HEADS, 2, 5, 1 if "Halved" in names else 7, 6, 5)
    with pytest.raises(InputError) as error, unchecked():
        attend(q, k, v, kernel=kernel, **asked)
    for name in names:
        assert name in str(error.value)


def test_plan_gives_the_kernel_of_an_object_and_the_reasons_against_the_others() -> None:
    tensors = triple(2, HEADS, 2, 140, 150, 6, 5)
    found = qkv.plan(*tensors, normalizer=SoftplusSquared())
    assert found.kernel == "tiled"
    assert "SoftplusSquared" in found.rejected["flash"]
    assert "SoftplusSquared" in found.rejected["reference"]
    assert "Manhattan" in qkv.plan(*tensors, score=Manhattan()).rejected["flash"]
    assert "Squeeze" in qkv.plan(*tensors, bias=Squeeze()).rejected["flash"]
    with torch.no_grad():
        assert qkv.plan(*tensors, bias=Slope()).kernel == "flash"


# --- subclasses -------------------------------------------------------------------------------------------------------


class NotSoftmax(normalizers.Softmax):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level)


class Rectified:
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level)


class MixedIn(Rectified, normalizers.Softmax):
    """A definition that is inherited, not in the class itself."""


class NotSigmoid(normalizers.Sigmoid):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores) ** 2


class NotCausal(masks.Causal):
    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return q <= k


class NotDense(biases.Dense):
    def tile(self, region: masks.Region) -> Tensor:
        return -region.of(self.tensor)


class NotSoftCap(biases.SoftCap):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores / self.cap


def test_an_overriding_subclass_loses_inherited_shortcuts() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    tensor = nn.Parameter(rand(140, 150, seed=4))
    for asked, same in (
        ({"normalizer": NotSoftmax()}, {"normalizer": normalizers.Sparsemax()}),
        ({"normalizer": MixedIn()}, {"normalizer": normalizers.Sparsemax()}),
        ({"mask": NotCausal()}, {"mask": masks.Predicate(lambda b, h, q, k: q <= k)}),
        ({"bias": NotSoftCap(2.0)}, {"score": scores.Dot(6**-0.5 / 2)}),
        ({"bias": NotDense(tensor)}, {"bias": biases.Dense(-tensor)}),
    ):
        want = results((q, k, v), same, "eager")[:4]
        for kernel in ("auto", "tiled", "eager"):
            for x, y in zip(results((q, k, v), asked, kernel), want, strict=False):
                close(x, y, eps=512)
    shifted = normalizers.Sigmoid(0.0)
    assert not torch.equal(attend(q, k, v, normalizer=NotSigmoid(0.0)), attend(q, k, v, normalizer=shifted))
    for x, y in zip(
        results((q, k, v), {"normalizer": NotSigmoid(0.0)}, "tiled"),
        results((q, k, v), {"normalizer": NotSigmoid(0.0)}, "eager"), strict=True,
    ):  # fmt: skip
        close(x, y, eps=512)


# --- learned tensors --------------------------------------------------------------------------------------------------


def test_a_learned_tensor_in_a_closure_selects_the_eager_kernel() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    hidden = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    class Closure(normalizers.Pointwise):
        def weight(self, scores: Tensor) -> Tensor:
            return torch.sigmoid(scores * hidden)

    found = qkv.plan(q, k, v, normalizer=Closure())
    assert found.kernel == "eager"
    assert "not among its attributes" in found.rejected["tiled"]
    (got,) = torch.autograd.grad(attend(q, k, v, normalizer=Closure()).sum(), hidden)
    step = 1e-6
    with torch.no_grad():
        hidden += step
        more = attend(q, k, v, normalizer=Closure()).sum()
        hidden -= 2 * step
        less = attend(q, k, v, normalizer=Closure()).sum()
    assert got.item() == pytest.approx((more - less).item() / (2 * step), rel=1e-5)


def test_a_learned_tensor_computed_from_another_gets_its_gradient() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    raw = nn.Parameter(rand(HEADS, 1, 1, seed=4))
    found = []
    for kernel in ("eager", "tiled"):
        normalizer = Ramp()
        normalizer.steepness = raw.exp()  # type: ignore[assignment]
        found.append(torch.autograd.grad(attend(q, k, v, normalizer=normalizer, kernel=kernel).square().sum(), raw)[0])
    close(found[1], found[0], eps=512)


def test_modules_train_the_parameters_of_an_object() -> None:
    attention = qkv.Attention(mask=masks.Causal(), normalizer=HeavyTail(), bias=Slope(), score=Manhattan())
    layer = qkv.nn.MultiHeadAttention(16, HEADS, attention=attention).double()
    layer(rand(2, 150, 16)).square().sum().backward()
    named = {name: x.grad for name, x in layer.named_parameters() if "composition" in name}
    assert len(named) == 3
    assert all(grad is not None and grad.abs().max() > 0 for grad in named.values())


class Constant(biases.Bias):
    """It forgets the score, in another dtype."""

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return torch.ones_like(scores, dtype=torch.float64) * 0.5


class DoubleSlope(biases.Bias):
    """A float64 parameter in a float32 call."""

    def __init__(self) -> None:
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores * self.slope * (region.queries - region.keys).abs().double().exp().reciprocal()


@pytest.mark.parametrize("bias", [Constant, DoubleSlope])
def test_constant_biases_and_biases_of_another_dtype_have_gradients(bias: type[biases.Bias]) -> None:
    tensors = tuple(x.float() for x in triple(2, HEADS, 2, 33, 37, 6, 5))
    made = bias()
    for x, y in zip(
        results(tensors, {"bias": made}, "tiled"), results(tensors, {"bias": made}, "eager"), strict=True
    ):  # fmt: skip
        close(x, y, eps=512, dtype=torch.float32)
