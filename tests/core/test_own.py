"""User-defined masks, scores, biases and normalizers: shortcuts that no longer hold, learned tensors, clear errors.

That they are exact and trainable on every kernel is in test_oracle.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import close, largest_tensor, rand, set_tile, triple
from own_objects import HEADS, Diagonals, HeavyTail, Manhattan, Ramp, Slope, Squeeze
from qkv import attend, biases, masks, normalizers, scores
from qkv._contract import learned_tensors
from qkv.engine import Call
from qkv.statistics.maps import HeadMap, rectangle
from qkv.statistics.measure import row_state


def results(tensors: tuple[Tensor, ...], asked: dict[str, Any], kernel: str) -> list[Tensor]:
    """Output and gradients of everything that learns."""
    inputs = [x.detach().requires_grad_() for x in tensors]
    leaves = [*inputs, *learned_tensors(list(asked.values())).values()]
    out = attend(*inputs, kernel=kernel, **asked)
    grads = torch.autograd.grad((out * rand(*out.shape, seed=9)).sum(), leaves, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


@pytest.mark.slow
def test_one_object_of_each_kind_trains_in_linear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask, a score, a bias and a normalizer of one's own in one call, long enough for tiles."""
    set_tile(monkeypatch, 64)
    n = 300
    asked = {"mask": Diagonals(), "score": Manhattan(), "bias": Squeeze(), "normalizer": HeavyTail(sink=0.0)}
    tensors = tuple(x.float() for x in triple(1, HEADS, 2, n, n, 4, 4))
    assert qkv.plan(*tensors, **asked).kernel == "tiled"
    most = largest_tensor(lambda: results(tensors, asked, "auto"))
    assert most < HEADS * n * n / 3  # all scores of all heads would be three times that


def test_maps_of_one_head_equal_those_of_all_heads() -> None:
    q, k, v = triple(1, HEADS, 2, 40, 40, 6, 5)
    asked = {
        "mask": Diagonals(), "score": Manhattan(), "bias": (Squeeze(), Slope(), biases.ALiBi()),
        "normalizer": HeavyTail(sink=0.3, temperature=0.7),
    }  # fmt: skip
    weights = attend(q, k, v, return_weights=True, **asked)[1].detach()
    call = Call.of(q, k, v, asked["mask"], asked["bias"], asked["score"], asked["normalizer"])
    rows = row_state(call)
    for head in range(HEADS):
        close(HeadMap(call, rows, head=head).pooled().maximum, weights[0, head], eps=512)
    close(rectangle(call, rows, slice(7, 20), slice(3, 9)), weights[0, :, 7:20, 3:9], eps=512)


# --- an object that gives less than its base class needs --------------------------------------------------------------


def own(*bases: type, **methods: Any) -> Any:
    """The class `Own` with these bases and methods."""
    return type("Own", bases, methods)


INCOMPLETE: list[tuple[str, type, str]] = [  # the argument, and what the error names
    ("normalizer", own(normalizers.Normalizer), "SumToOne"),
    ("normalizer", own(normalizers.Pointwise), r"weight\(scores\)"),
    ("normalizer", own(normalizers.SumToOne), r"weight\(scores, level\)"),
    ("normalizer", own(normalizers.SumToOne, weight=lambda self, s, level: torch.sigmoid(s - level) / 2), "0.5"),
    ("normalizer", own(normalizers.SumToOne, weight=lambda self, s, level: torch.sigmoid(s - level) + 1), "level"),
    ("normalizer", own(normalizers.Pointwise, weight=lambda self, s: s[..., :1]), r"\(heads, 1, 1\)"),
    ("score", own(scores.Product), r"project\(q, k\)"),
    ("score", own(scores.Pairwise), r"scores\(q, k\)"),
    ("score", own(scores.Score), "Pairwise"),
    ("bias", own(biases.Bias), r"apply\(scores, region\)"),
    ("bias", own(biases.AdditiveBias), r"tile\(region\)"),
    ("bias", own(biases.AdditiveBias, tile=lambda self, r: torch.zeros(1), apply=lambda self, s, r: s), "apply.*tile"),
    ("mask", own(masks.Mask), r"sees\(b, h, q, k, grid\)"),
    ("mask", own(masks.Mask, sees=lambda self, b, h, q, k, grid: (q - k) % 2), "int64"),
]


@pytest.mark.parametrize(("argument", "made", "named"), INCOMPLETE)
def test_the_error_of_an_incomplete_object_names_the_missing_method(argument: str, made: type, named: str) -> None:
    tensors = triple(2, HEADS, 2, 5, 1 if named == "0.5" else 7, 6, 5)
    for kernel in ("auto", "tiled", "eager"):
        with pytest.raises(qkv.InputError, match=f"Own.*{named}"):
            attend(*tensors, kernel=kernel, **{argument: made()})


# --- subclasses -------------------------------------------------------------------------------------------------------


def relu(self: object, scores: Tensor, level: Tensor) -> Tensor:
    return torch.relu(scores - level)


def half(self: object, scores: Tensor) -> Tensor:
    return torch.exp(scores) / 2


PLAIN = own(normalizers.Pointwise, weight=half)()
TABLE = nn.Parameter(rand(140, 150, seed=4))
OVERRIDING: list[tuple[str, Any, dict[str, Any]]] = [  # an argument, and a call that is the same
    ("normalizer", own(normalizers.Softmax, weight=relu)(), {"normalizer": normalizers.Sparsemax()}),
    ("normalizer", own(own(weight=relu), normalizers.Softmax)(), {"normalizer": normalizers.Sparsemax()}),  # mixed in
    ("normalizer", own(normalizers.Sigmoid, weight=half)(0.0), {"normalizer": PLAIN}),
    (
        "mask", own(masks.Causal, sees=lambda self, b, h, q, k, grid: q <= k)(),
        {"mask": masks.Predicate(lambda b, h, q, k: q <= k)},
    ),
    ("bias", own(biases.SoftCap, apply=lambda self, s, region: s / self.cap)(2.0), {"score": scores.Dot(6**-0.5 / 2)}),
    (
        "bias", own(biases.TensorBias, tile=lambda self, region: -region.of(self.tensor))(TABLE),
        {"bias": biases.TensorBias(-TABLE)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "made", "same"), OVERRIDING, ids=range(len(OVERRIDING)))
def test_an_overriding_subclass_loses_inherited_shortcuts(argument: str, made: Any, same: dict[str, Any]) -> None:
    tensors = triple(2, HEADS, 2, 140, 150, 6, 5)
    want = results(tensors, same, "eager")[:4]
    for kernel in ("auto", "tiled", "eager"):
        for x, y in zip(results(tensors, {argument: made}, kernel), want, strict=False):
            close(x, y, eps=512)


# --- learned tensors --------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["eager", "tiled"])
def test_scores_that_an_own_object_keeps_stay_as_they_are(kernel: str, heads: int) -> None:
    kept = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    class Kept(biases.Bias):
        def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
            return kept[region.rows, region.columns].expand_as(scores)

    class KeptScores(scores.Pairwise):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return kept.expand(*q.shape[:2], -1, -1)

    q, k, v = triple(1, heads, 1, 16, 16, 8, 8)
    before, causal = kept.clone(), masks.Causal()
    want = kept.masked_fill(~torch.ones(16, 16).tril().bool(), -torch.inf).softmax(-1) @ v
    own: list[dict[str, Any]] = [{"bias": Kept()}, {"score": KeptScores()}]
    for parts in own:
        close(attend(q, k, v, mask=causal, kernel=kernel, **parts), want.expand(-1, heads, -1, -1))
        qkv.measure(q, k, mask=causal, **parts)
        assert torch.equal(kept, before)


def test_a_learned_factor_of_scores_has_gradients_in_rows_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faded(biases.Bias):
        def __init__(self, rate: Tensor) -> None:
            self.rate = rate

        def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
            return scores * torch.exp(-self.rate * (region.queries - region.keys).abs())  # keeps the scores

    q, k, v = (x.requires_grad_() for x in triple(1, 2, 1, 20, 20, 6, 5))
    rate, slopes = torch.tensor([0.1, 0.3], dtype=torch.float64).view(2, 1, 1).requires_grad_(), []
    set_tile(monkeypatch, 8)
    for kernel in ("eager", "tiled"):
        out = attend(q, k, v, mask=masks.Causal(), bias=Faded(rate), normalizer=normalizers.Entmax(), kernel=kernel)
        slopes.append(torch.autograd.grad(out.square().sum(), (rate, q, k), retain_graph=True))
    for x, y in zip(*slopes, strict=True):
        close(x, y)


def test_a_learned_tensor_in_a_closure_selects_the_eager_kernel() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    hidden = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    class Closure(normalizers.Pointwise):
        def weight(self, scores: Tensor) -> Tensor:
            return torch.sigmoid(scores * hidden)

    class Logarithm(Closure):
        divide = "sum"

        def log_weight(self, scores: Tensor) -> Tensor:
            return nn.functional.logsigmoid(scores * hidden)

    for normalizer in (Closure(), Logarithm()):
        found = qkv.plan(q, k, v, normalizer=normalizer)
        assert found.kernel == "eager"
        assert f"{type(normalizer).__name__} uses a tensor" in found.rejected["tiled"]
    (got,) = torch.autograd.grad(attend(q, k, v, normalizer=Closure()).sum(), hidden)
    weights = torch.sigmoid(hidden * (q @ k.repeat_interleave(2, 1).mT / 6**0.5))
    (want,) = torch.autograd.grad((weights @ v.repeat_interleave(2, 1)).sum(), hidden)
    close(got, want, eps=2**14)


def test_a_learned_tensor_computed_from_another_gets_its_gradient() -> None:
    q, k, v = triple(2, HEADS, 2, 140, 150, 6, 5)
    raw = nn.Parameter(rand(HEADS, 1, 1, seed=4))
    found = []
    for kernel in ("eager", "tiled"):
        normalizer = Ramp()
        normalizer.steepness = raw.exp()
        found.append(torch.autograd.grad(attend(q, k, v, normalizer=normalizer, kernel=kernel).square().sum(), raw)[0])
    close(found[1], found[0], eps=512)


class DoubleSlope(biases.Bias):
    """A float64 parameter in a float32 call."""

    def __init__(self) -> None:
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores * self.slope * (region.queries - region.keys).abs().double().exp().reciprocal()


CONSTANT = own(biases.Bias, apply=lambda self, s, region: torch.full_like(s, 0.5, dtype=torch.float64))


@pytest.mark.parametrize("bias", [CONSTANT(), DoubleSlope()], ids=["forgets the score", "another dtype"])
def test_constant_biases_and_biases_of_another_dtype_have_gradients(bias: biases.Bias) -> None:
    tensors = tuple(x.float() for x in triple(2, HEADS, 2, 33, 37, 6, 5))
    for x, y in zip(*(results(tensors, {"bias": bias}, kernel) for kernel in ("tiled", "eager")), strict=True):
        close(x, y, eps=512, dtype=torch.float32)
