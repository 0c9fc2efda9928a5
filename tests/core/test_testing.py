"""`qkv.testing`: each broken object fails with a message that names the fault, and each correct one passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import rand, unchecked
from qkv import features, masks
from qkv.biases import Additive, ALiBi, Bias, ByDistance, RelativePosition, SoftCap, T5Bias
from qkv.biases import Dense as DenseBias
from qkv.errors import InputError
from qkv.masks import EMPTY, FULL, PARTIAL, Mask
from qkv.normalizers import EluPlusOne, Entmax, Hard, Identity, Pointwise, ReLU, Sigmoid, Softmax, Sparsemax, SumToOne
from qkv.scores import Additive as AdditiveScore
from qkv.scores import Concat, Cosine, Dot, Features, General, Pairwise, Product
from qkv.testing import CheckFailed, check_bias, check_mask, check_normalizer, check_score

H, KV, D, DK, DV, NQ, NK = 4, 2, 8, 5, 6, 15, 18
TINY = [(7, 9)]  # includes the slow kernels: flex, which is traced, and the reference
SMALL = [(NQ, NK)]
TWO_SHAPES = [(NQ, NK), (NK, NQ)]
BOTH = [(NQ, NK), (130, 150)]  # an eager kernel, and one in tiles


@pytest.fixture(autouse=True)
def _no_checks_of_shapes() -> Iterator[None]:
    """Do not check shapes in signatures, which broken objects violate before the check can report them."""
    with unchecked():
        yield


def learned(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed, dtype=torch.float32))


# --- broken normalizers -----------------------------------------------------------------------------------------------


class NoWeight(Pointwise):
    pass


class WrongSlope(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return scores**2

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return 2 * weights.sqrt()  # of positive scores alone


class Summed(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores) / torch.relu(scores).sum(-1, keepdim=True).clamp(min=1e-6)


class Largest(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores - scores.max().detach())


class MixedHeads(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores) + torch.relu(scores).mean(1, keepdim=True)


class WrongShape(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores).sum(-1, keepdim=True)


class NotATensor(Pointwise):
    def weight(self, scores: Tensor) -> Any:
        return 1.0


class InHalf(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores.half())


class ThroughHalf(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores.half()).to(scores.dtype)


class Overflows(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(2 * scores)  # 1e69 in float32


class Detached(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return scores * torch.sigmoid(scores).detach()


class InPlace(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return scores.relu_()


class Raises(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return scores @ scores


class WrongInPlace(Pointwise):
    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def weight_(self, scores: Tensor) -> Tensor:
        return scores.tanh_()


class WrongLogarithm(Pointwise):
    divide = "sum"

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores / 2)

    def log_weight(self, scores: Tensor) -> Tensor:
        return scores

    def slope_of_log(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores)


class WrongSlopeOfLog(Pointwise):
    divide = "sum"

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores / 2)

    def log_weight(self, scores: Tensor) -> Tensor:
        return scores / 2

    def slope_of_log(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores)


class NotZero(Pointwise):
    zero_at_minus_infinity = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores.clamp(min=-10))


class NotPositive(Pointwise):
    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores)


class NotIdentity(Pointwise):
    is_identity = True

    def weight(self, scores: Tensor) -> Tensor:
        return 2 * scores


class SaysLse(Pointwise):
    has_lse = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores)


class HiddenHeads(Pointwise):
    by_head = False

    def __init__(self) -> None:
        self.scale = learned(H, 1, 1)

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores * self.scale)


class Holds(Pointwise):
    def __init__(self) -> None:
        self.function = lambda x: x.sigmoid()

    def weight(self, scores: Tensor) -> Tensor:
        return self.function(scores)


class Forgets(Pointwise):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": 2.0}

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(self.scale * scores)


class Rises(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores + level)


class Flat(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.sigmoid(scores) + 0 * level


class Negative(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return scores - level


class Bounded(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return 0.5 * torch.sigmoid(scores - level)


class Floored(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores - level) + 0.1


class Jumps(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.ceil(2 * torch.relu(scores - level)) / 1.5


class NotExp(SumToOne):
    has_lse = True

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level) ** 2


class WrongLevel(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores - level)

    def level_of(self, scores: Tensor) -> Tensor:
        top = scores.amax(-1)
        return top.masked_fill(top == -torch.inf, 0)


class WrongSlopeInLevel(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level) ** 2

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return weights.sqrt()  # half of it


class NotOfDifference(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(1.1 * scores - level)

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return 1.1 * weights


class SlopeInLevelDetached(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level.detach()) ** 2


NORMALIZERS: list[tuple[Callable[[], Any], str, str]] = [
    (NoWeight, "weight", "no method weight"),
    (WrongSlope, "slope_from_weights", "at score -79.3, expected -158.6"),
    (Summed, "weight", "depends on the tile"),
    (Largest, "weight", "depends on the tile"),
    (MixedHeads, "weight", "may depend on its own score alone"),
    (WrongShape, "weight", r"expected a tensor of shape \(2, 4, 5, 7\)"),
    (NotATensor, "weight", "returned an object of class float"),
    (InHalf, "weight", "returned torch.float16 .* expected torch.float64"),
    (ThroughHalf, "weight", "by finite differences"),
    (Overflows, "weight", "is inf in torch.float32 at score 79.3"),
    (Detached, "weight", "by finite differences"),
    (InPlace, "weight", "changed its scores in place"),
    (Raises, "weight", "raised RuntimeError"),
    (WrongInPlace, "weight_", "which weight returns"),
    (WrongLogarithm, "log_weight", "the logarithm of weight"),
    (WrongSlopeOfLog, "slope_of_log", "derivative of the logarithm"),
    (NotZero, "zero_at_minus_infinity", "weight at a score of −inf"),
    (NotPositive, "nonnegative", "is True, but the weight at score -79.3 is -1"),
    (NotIdentity, "weight", "because is_identity is True"),
    (SaysLse, "has_lse", "expected False"),
    (HiddenHeads, "weight", "because by_head is False|expected"),
    (Holds, "", "pickle raised"),
    (Forgets, "", "pickle made an object whose output differs"),
    (Rises, "weight", "rises from"),
    (Flat, "weight", "decreases in the level"),
    (
        Negative,
        "weight",
        "is -17.6 at score -79.3 and level -61.7, expected 0 or more|is -141 at score .* expected 0 or more",
    ),
    (Bounded, "weight", "with 1 visible keys sum to 0.5 at the most"),
    (Floored, "weight", "at the least, however high the level"),
    (Jumps, "weight", "continuous in the level|finite differences"),
    (NotExp, "has_lse", "means that the weight is exp"),
    (WrongLevel, "level_of", "at which the weights sum to"),
    (WrongSlopeInLevel, "slope_from_weights", "the derivative of weight"),
    (NotOfDifference, "slope_from_weights", "depends on more than score − level"),
    (SlopeInLevelDetached, "weight", "derivative in the level"),
]


def fails_with(check: Callable[..., None], thing: Any, method: str, sentence: str, **options: Any) -> None:
    """The check fails with a message that names the class, the method and the fault."""
    name = type(thing).__name__
    with pytest.raises(CheckFailed, match=sentence) as raised:
        check(thing, **options)
    message = str(raised.value)
    assert message.startswith(f"{name}.{method}:" if method else f"{name}: "), message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(("make", "method", "sentence"), NORMALIZERS, ids=lambda x: getattr(x, "__name__", None))
def test_check_normalizer_rejects_broken_normalizers(make: Callable[[], Any], method: str, sentence: str) -> None:
    fails_with(check_normalizer, make(), method, sentence, sizes=SMALL)


# --- broken scores ----------------------------------------------------------------------------------------------------


class NoProject(Product):
    pass


class NoScores(Pairwise):
    pass


class MixesTokens(Product):
    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k - k.mean(2, keepdim=True)


class MixesQueriesIntoKeys(Product):
    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k + q.mean((1, 2), keepdim=True)


class Normalised(Product):
    """Divided by the largest entry of all tokens, which only a change of the largest shows."""

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k / k.abs().amax((1, 2, 3), keepdim=True)


class OneTensor(Product):
    def project(self, q: Tensor, k: Tensor) -> Any:
        return q


class SizesDiffer(Product):
    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q[..., 1:], k


class InfiniteFactor(Product):
    def factor(self, head_dim: int) -> float:
        return math.inf


class NotRotated(Product):
    keeps_rotation = True

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(q), torch.relu(k)


class ProductOverflows(Product):
    """Large enough for float32, not for float16."""

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * 1e5, k * 1e-5


class ProductDetached(Product):
    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * q.detach().norm(dim=-1, keepdim=True), k


class SoftmaxOfScores(Pairwise):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).log_softmax(-1)


class PairsOfHeads(Pairwise):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mean(1, keepdim=True).transpose(-1, -2)


class ScoresTransposed(Pairwise):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return k @ q.transpose(-1, -2)


class WrongGradients(Pairwise):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)

    def gradients(self, q: Tensor, k: Tensor, slope: Tensor, learned: list[Tensor]) -> tuple[Tensor | None, ...]:
        difference = q[..., :, None, :] - k[..., None, :, :]
        of = -2 * slope[..., None] * difference
        return of.sum(3), of.sum(2)  # of the keys it is the other sign


class SpreadsNaN(Pairwise):
    """NaN in one key spreads to the projection of all keys."""

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k + 0 * k.sum(2, keepdim=True)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q @ k.transpose(-1, -2))


SCORES: list[tuple[Callable[[], Any], str, str]] = [
    (NoProject, "project", "no method project"),
    (NoScores, "scores", "no method scores"),
    (MixesTokens, "project", "mixes tokens: entry .* of key"),
    (MixesQueriesIntoKeys, "project", "mixes tokens: entry .* when query 7"),
    (Normalised, "project", "mixes tokens"),
    (OneTensor, "project", "expected two tensors"),
    (SizesDiffer, "project", "queries of 7 entries and keys of 8"),
    (InfiniteFactor, "factor", "expected a finite number"),
    (NotRotated, "keeps_rotation", "the same rotation"),
    (ProductOverflows, "project", "float16.*expected"),
    (ProductDetached, "project", "by finite differences"),
    (SoftmaxOfScores, "scores", "depends on the tile"),
    (PairsOfHeads, "scores", "may depend on its own query and key alone"),
    (ScoresTransposed, "scores", r"expected a tensor of shape \(2, 4, 15, 18\)"),
    (WrongGradients, "gradients", "of k: got .* by autograd on scores"),
]


@pytest.mark.parametrize(("make", "method", "sentence"), SCORES, ids=lambda x: getattr(x, "__name__", None))
def test_check_score_rejects_broken_scores(make: Callable[[], Any], method: str, sentence: str) -> None:
    fails_with(check_score, make(), method, sentence, sizes=SMALL)


def test_check_score_finds_nan_that_spreads() -> None:
    """A projection that adds 0 times all tokens is exact for finite numbers, but spreads NaN in padding."""
    fails_with(check_score, SpreadsNaN(), "project", "to nan when key 9 of item 0 becomes nan", sizes=SMALL)


# --- broken biases ----------------------------------------------------------------------------------------------------


class NoApply(Bias):
    pass


class NoTile(Additive):
    pass


class OverridesApply(Additive):
    def tile(self, region: masks.Region) -> Tensor:
        return torch.zeros(1, 1, 1, 1)

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return 2 * scores


class ReadsOthers(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores - scores.logsumexp(-1, keepdim=True)


class ReadsHeads(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores + 0.1 * scores.mean(1, keepdim=True)


class CountsFromTile(Additive):
    """Distances from the corner of the tile instead of that of the matrix."""

    def tile(self, region: masks.Region) -> Tensor:
        rows, columns = region.rows.stop - region.rows.start, region.columns.stop - region.columns.start
        return -0.1 * (torch.arange(rows)[:, None] - torch.arange(columns)).abs().float()


class TileOfIntegers(Additive):
    def tile(self, region: masks.Region) -> Tensor:
        return (region.queries - region.keys).abs()


class TileTooLarge(Additive):
    def tile(self, region: masks.Region) -> Tensor:
        return torch.zeros(3, 3)


class ApplyLosesDtype(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return (scores / 2).float()


class WrongInPlace(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores / 2

    def apply_(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores.mul_(2)


class WrongBiasGradients(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return torch.tanh(scores)

    def gradients(
        self, before: Tensor, region: masks.Region, slope: Tensor, learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return (slope,)


class WrongAt(Additive):
    def tile(self, region: masks.Region) -> Tensor:
        return -0.1 * (region.queries - region.keys).abs().double()

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - 0.1 * (i - j).abs()  # rows are not positions


class WrongByDistance(Additive):
    by_distance = torch.zeros(1, NQ + NK - 1)

    def tile(self, region: masks.Region) -> Tensor:
        return -0.1 * (region.queries - region.keys).abs().double()


class WrongPart(Bias):
    """A part counts from 0, and so loses its place."""

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores - 0.1 * (region.queries - region.keys).abs()

    def part(self, region: masks.Region) -> Bias:
        return self


class NotByScore(Bias):
    by_score = True

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores * (1 + region.queries)


class BiasHolds(Bias):
    def __init__(self) -> None:
        self.function = lambda x: 2 * x

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return self.function(scores)


class BiasOverflows(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return (scores.half() * 3e4).to(scores.dtype) / 3e4


BIASES: list[tuple[Callable[[], Any], str, str]] = [
    (NoApply, "", "no method apply"),
    (NoTile, "tile", "no method tile"),
    (OverridesApply, "tile", "overrides apply"),
    (ReadsOthers, "apply", "depends on the tile"),
    (ReadsHeads, "apply", "a function of itself and its position only"),
    (CountsFromTile, "tile", "depends on the tile"),
    (TileOfIntegers, "tile", "expected floats that broadcast"),
    (TileTooLarge, "tile", "expected a shape that broadcasts"),
    (ApplyLosesDtype, "apply", "returned torch.float32"),
    (WrongInPlace, "apply_", "got .*, expected .*, which apply returns"),
    (WrongBiasGradients, "gradients", "of the scores: got .* by autograd on apply"),
    (WrongAt, "at", "the score that tile gives"),
    (WrongByDistance, "by_distance", "the score that tile gives"),
    (WrongPart, "part", "from the whole"),
    (NotByScore, "by_score", "the same score elsewhere differs"),
    (BiasHolds, "", "pickle raised"),
    (BiasOverflows, "apply", "expected"),
]


@pytest.mark.parametrize(("make", "method", "sentence"), BIASES, ids=lambda x: getattr(x, "__name__", None))
def test_check_bias_rejects_broken_biases(make: Callable[[], Any], method: str, sentence: str) -> None:
    if method or make is BiasHolds:
        fails_with(check_bias, make(), method, sentence, sizes=SMALL)
        return
    with pytest.raises(CheckFailed, match=f"{make.__name__}.*{sentence}"):
        check_bias(make(), sizes=SMALL)


# --- broken masks -----------------------------------------------------------------------------------------------------


class NoSees(Mask):
    pass


class OfIntegers(Mask):
    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return (q - k) % 2


class OfShape(Mask):
    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return torch.ones(2, 2, dtype=torch.bool)


class OfTile(Mask):
    """The first key of every tile."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return k == k.min()


class OfRows(Mask):
    """Uses row indices instead of positions, which a list of pairs does not have."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return torch.ones(len(q), len(k), dtype=torch.bool)


class Even(Mask):
    """A correct definition; subclasses add wrong shortcuts."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return (q - k) % 2 == 0


class AllFull(Even):
    def classify(self, tiles: masks.Tiles, grid: masks.Grid) -> Tensor:
        return torch.full((1, 1, len(tiles.q_first), len(tiles.k_first)), FULL)


class AllEmpty(Even):
    def classify(self, tiles: masks.Tiles, grid: masks.Grid) -> Tensor:
        return torch.zeros(1, 1, len(tiles.q_first), len(tiles.k_first), dtype=torch.int8)


class ClassesOfShape(Even):
    def classify(self, tiles: masks.Tiles, grid: masks.Grid) -> Tensor:
        return torch.ones(len(tiles.q_first), len(tiles.k_first))


class WrongBand(Even):
    band = (-8, 8)


class WrongKeys(Even):
    def key_mask(self, grid: masks.Grid) -> Tensor:
        return grid.columns(0, grid.n_keys)[None] % 2 == 0


class WrongCount(Even):
    def visible_keys(self, grid: masks.Grid) -> Tensor:
        return torch.full((1, 1, grid.n_queries), grid.n_keys // 3)


class WrongVisible(Even):
    def visible(self, region: masks.Region, grid: masks.Grid) -> Tensor:
        q, k = grid.rows(region.rows.start, region.rows.stop), grid.columns(0, region.columns.stop)
        return ((q[:, None] - k) % 2 == 0)[None, None, :, : region.columns.stop - region.columns.start]


class WrongFactors(Even):
    def factors(self) -> tuple[Mask, ...]:
        return Even(), masks.Causal()


class WrongAlternatives(Even):
    def alternatives(self) -> tuple[Mask, ...]:
        return Even(), masks.Causal()


class NotItsValue(Even):
    by_value = True  # but compared by identity


class MaskHolds(Mask):
    def __init__(self) -> None:
        self.function = lambda q, k: q >= k

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return self.function(q, k)


class RefusesAll(Even):
    def check(self, grid: masks.Grid) -> None:
        raise InputError("RefusesAll: expected another size")


MASKS: list[tuple[Callable[[], Any], str, str]] = [
    (NoSees, "sees", "no method sees"),
    (OfIntegers, "sees", "expected a boolean tensor"),
    (OfShape, "sees", "expected a shape that broadcasts"),
    (OfTile, "sees", "of a tile of columns"),
    (OfRows, "sees", "a list of|expected"),
    (AllFull, "classify", "says FULL of query positions"),
    (AllEmpty, "classify", "says EMPTY of query positions"),
    (ClassesOfShape, "classify", r"returned \(15, 18\) for 15 × 18 tiles"),
    (WrongBand, "band", r"\(-8, 8\) says that query position 3 sees key 0, but sees says False"),
    (WrongKeys, "key_mask", "but sees says"),
    (WrongCount, "visible_keys", "the number of keys where sees is True"),
    (WrongVisible, "visible", "of a tile of columns"),
    (WrongFactors, "factors", "all of them say that query position"),
    (WrongAlternatives, "alternatives", "one of them says that query position"),
    (NotItsValue, "by_value", "a copy of the mask is not equal"),
    (MaskHolds, "", "pickle raised"),
    (RefusesAll, "check", "expected another size"),
]


@pytest.mark.parametrize(("make", "method", "sentence"), MASKS, ids=lambda x: getattr(x, "__name__", None))
def test_check_mask_rejects_broken_masks(make: Callable[[], Any], method: str, sentence: str) -> None:
    fails_with(check_mask, make(), method, sentence, sizes=SMALL)


def test_check_mask_reports_masks_that_reject_every_default_size() -> None:
    fails_with(check_mask, RefusesAll(), "check", "refuses all sizes of the check")


def test_checks_reject_objects_of_other_classes() -> None:
    for check, thing in (
        (check_mask, torch.ones(2, 2, dtype=torch.bool)),
        (check_score, Dot),
        (check_bias, torch.ones(2, 2)),
        (check_normalizer, torch.softmax),
    ):
        with pytest.raises(CheckFailed, match=f"{check.__name__}: got .* expected an object of a class that inherits"):
            check(thing)


# --- all objects of this package pass ---------------------------------------------------------------------------------


def odd(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + 2 * k + h + b) % 3 > 0


def random_mask(*shape: int) -> Tensor:
    return rand(*shape, seed=5) > 0.3


Case = tuple[Callable[[], Any], dict[str, Any]]
BOTH_SHAPES: dict[str, Any] = {"sizes": TWO_SHAPES}
TILED_SIZES: dict[str, Any] = {"sizes": BOTH}
SMALL_SIZES: dict[str, Any] = {"sizes": SMALL}
TINY_SIZES: dict[str, Any] = {"sizes": TINY}

GOOD_MASKS: dict[str, Case] = {
    "causal": (masks.Causal, {}),
    "window": (lambda: masks.Window(3, ahead=2), BOTH_SHAPES),
    "prefix language model": (lambda: masks.Prefix(5) | masks.Causal(), SMALL_SIZES),
    "outside the window": (lambda: ~masks.Window(2, ahead=2), SMALL_SIZES),
    "padding": (lambda: masks.Padding([4, 6]), SMALL_SIZES),
    "left padding, causal": (lambda: masks.Padding([4, 6], "left") & masks.Causal(), BOTH_SHAPES),
    "strided": (lambda: (masks.Strided(3) | masks.Window(3)) & masks.Causal(), SMALL_SIZES),
    "dilated": (lambda: masks.Dilated(3, step=2), SMALL_SIZES),
    "global": (lambda: masks.Global([3, 0]) & masks.Causal(), BOTH_SHAPES),
    "random keys": (lambda: masks.RandomKeys(3, seed=1), TILED_SIZES),
    "blockwise": (lambda: masks.Blockwise(masks.Causal(), 3), SMALL_SIZES),
    "longformer": (lambda: masks.longformer(4, [0, -1]), SMALL_SIZES),
    "bigbird": (lambda: masks.bigbird(2, random=1), TINY_SIZES),
    "documents": (
        lambda: masks.Document([[0, 0, 0, 1, 1, -1, 1, 2, 2] * 2, [0, 1, 1, 1, 1, 2, 2, -1, -1] * 2]),
        SMALL_SIZES,
    ),
    "dense": (lambda: masks.Dense(random_mask(H, NQ, NK)), SMALL_SIZES),
    "dense columns": (lambda: masks.Dense(random_mask(1, NK)), SMALL_SIZES),
    "predicate": (lambda: masks.Predicate(odd), SMALL_SIZES),
    "shifted": (lambda: masks.Shifted(masks.Causal(), 1), BOTH_SHAPES),
    "nothing": (lambda: ~masks.Prefix(NK), SMALL_SIZES),
}
GOOD_BIASES: dict[str, Case] = {
    "soft cap": (lambda: SoftCap(1.5), SMALL_SIZES),
    "dense": (lambda: DenseBias(learned(H, NQ, NK)), SMALL_SIZES),
    "dense of items": (lambda: DenseBias(learned(2, 1, 1, NK)), SMALL_SIZES),
    "dense that hides": (lambda: DenseBias(torch.where(random_mask(NQ, NK), 0.3, -torch.inf)), SMALL_SIZES),
    "by distance": (lambda: ByDistance(learned(H, NQ + NK - 1)), SMALL_SIZES),
    "alibi": (ALiBi, TINY_SIZES),
    "alibi, learned": (lambda: ALiBi(learned(H)), TILED_SIZES),
    "t5": (lambda: T5Bias(learned(8, H), max_distance=20), SMALL_SIZES),
    "relative": (lambda: RelativePosition(learned(5, D), learned(H, 5, DV)), SMALL_SIZES),
    "relative keys": (lambda: RelativePosition(learned(H, 5, D)), SMALL_SIZES),
}
GOOD_SCORES: dict[str, Case] = {
    "dot": (Dot, {}),
    "dot, negative": (lambda: Dot(-0.5), SMALL_SIZES),
    "general": (lambda: General(learned(H, D, DK), 0.3), {"dim_k": DK, **SMALL_SIZES}),
    "cosine": (lambda: Cosine(learned(H)), TINY_SIZES),
    "additive": (
        lambda: AdditiveScore(learned(H, 3), learned(H, 3, D), learned(KV, 3, DK), learned(3)),
        {"dim_k": DK, **TILED_SIZES},
    ),
    "additive of projected": (lambda: AdditiveScore(learned(D)), SMALL_SIZES),
    "concat": (lambda: Concat(learned(3, D + DK), learned(3), D), {"dim_k": DK, **SMALL_SIZES}),
    "features": (lambda: Features(features.elu_plus_one), SMALL_SIZES),
}
GOOD_NORMALIZERS: dict[str, Case] = {
    "softmax": (Softmax, {}),
    "sink": (lambda: Softmax(1.3, sink=learned(H)), TINY_SIZES),
    "sinks of queries": (lambda: Softmax(sink=learned(2, H, NQ)), SMALL_SIZES),
    "off by one": (lambda: Softmax(sink=0.0), SMALL_SIZES),
    "key": (lambda: Softmax(0.7, key=learned(H, D)), SMALL_SIZES),
    "sigmoid": (Sigmoid, SMALL_SIZES),
    "sigmoid, learned": (lambda: Sigmoid(learned(H)), SMALL_SIZES),
    "elu + 1": (EluPlusOne, SMALL_SIZES),
    "elu + 1 by sum": (lambda: EluPlusOne("sum"), SMALL_SIZES),
    "relu": (ReLU, TILED_SIZES),
    "relu by sum": (lambda: ReLU("sum"), SMALL_SIZES),
    "identity": (Identity, SMALL_SIZES),
    "identity by sum": (lambda: Identity("sum"), SMALL_SIZES),
    "entmax": (lambda: Entmax(1.5, temperature=0.6, sink=learned(H)), SMALL_SIZES),
    "entmax 1.3": (lambda: Entmax(1.3), TINY_SIZES),
    "sparsemax": (lambda: Sparsemax(0.6), SMALL_SIZES),
    "hard": (Hard, SMALL_SIZES),
    "hard, drawn": (lambda: Hard(sample=True), TILED_SIZES),
}


@pytest.mark.parametrize("name", GOOD_MASKS)
def test_built_in_masks_pass(name: str) -> None:
    make, options = GOOD_MASKS[name]
    assert check_mask(make(), **options) is None


@pytest.mark.parametrize("name", GOOD_BIASES)
def test_built_in_biases_pass(name: str) -> None:
    make, options = GOOD_BIASES[name]
    assert check_bias(make(), **options) is None


@pytest.mark.parametrize("name", GOOD_SCORES)
def test_built_in_scores_pass(name: str) -> None:
    make, options = GOOD_SCORES[name]
    assert check_score(make(), **options) is None


@pytest.mark.parametrize("name", GOOD_NORMALIZERS)
def test_built_in_normalizers_pass(name: str) -> None:
    make, options = GOOD_NORMALIZERS[name]
    assert check_normalizer(make(), **options) is None


# --- user-defined objects pass ----------------------------------------------------------------------------------------


class SquaredReLU(Pointwise):
    """Defines every shortcut."""

    divide = "keys"
    by_head = False
    zero_at_minus_infinity = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores) ** 2

    def weight_(self, scores: Tensor) -> Tensor:
        return scores.relu_().square_()

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return 2 * weights.sqrt()


class Softplus(Pointwise, nn.Module):
    """Learned, in a module, a number for each head."""

    divide = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = learned(H, 1, 1)

    def weight(self, scores: Tensor) -> Tensor:
        return nn.functional.softplus(scores * self.sharpness.exp())


class Gaussian(Pointwise):
    """Defines its logarithm."""

    divide = "sum"

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(-((scores / 10) ** 2))

    def log_weight(self, scores: Tensor) -> Tensor:
        return -((scores / 10) ** 2)

    def slope_of_log(self, scores: Tensor) -> Tensor:
        return -scores / 50


class SoftplusSquared(SumToOne):
    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return nn.functional.softplus(scores - level) ** 2


class Student(SumToOne):
    """Heavy tails, with a learned number for each head and a learned sink."""

    def __init__(self) -> None:
        super().__init__(sink=learned(H, seed=1))
        self.tail = learned(H, 1, 1)

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return (1 + nn.functional.softplus(level - scores)) ** -(2 + self.tail.sigmoid())


class Threshold(SumToOne):
    """Sparsemax, with all shortcuts but the level."""

    by_head = False
    zero_at_minus_infinity = True

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.relu(scores - level)

    def weight_(self, scores: Tensor, level: Tensor) -> Tensor:
        return scores.sub_(level).relu_()

    def slope_from_weights(self, weights: Tensor) -> Tensor:
        return (weights > 0).to(weights)


class Steep(Sigmoid):
    """Overrides the definition of a built-in class, which disables the inherited shortcuts."""

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(3 * scores)


class Manhattan(Pairwise):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


class Kernel(Pairwise, nn.Module):
    """A learned width for each head, after a learned projection."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.linear = learned(H, 1, 1), nn.Linear(D, 3, bias=False)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(q), self.linear(k)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) * self.width.exp()


class Squared(Pairwise):
    """With `gradients`."""

    keeps_rotation = True
    by_head = False

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 4

    def gradients(self, q: Tensor, k: Tensor, slope: Tensor, learned: list[Tensor]) -> tuple[Tensor | None, ...]:
        of = -slope[..., None] * (q[..., :, None, :] - k[..., None, :, :]) / 2
        return of.sum(3), -of.sum(2)


class Projected(Product, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_queries, self.of_keys = nn.Linear(D, 3), nn.Linear(D, 3)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.of_queries(q), self.of_keys(k)


class Doubled(Product):
    def factor(self, head_dim: int) -> float:
        return 2 / math.sqrt(head_dim)


class Clipped(Additive, nn.Module):
    """A learned number for each head and clipped distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = learned(H, 7)

    def tile(self, region: masks.Region) -> Tensor:
        return self.table[:, (region.queries - region.keys).clamp(-3, 3) + 3][None]


class Leaky(Bias):
    """A function of score and place, with a number for each head."""

    def __init__(self) -> None:
        self.slope = learned(H, 1, 1)

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return torch.where(region.queries >= region.keys, scores, self.slope * scores)


class Hides(Bias):
    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores.masked_fill((region.queries + region.keys) % 3 == 0, -torch.inf)


class Halved(Bias):
    """With every shortcut."""

    by_score = True
    by_head = False

    def apply(self, scores: Tensor, region: masks.Region) -> Tensor:
        return scores / 2

    def gradients(
        self, before: Tensor, region: masks.Region, slope: Tensor, learned: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return (slope / 2,)

    def part(self, region: masks.Region) -> Bias:
        return self

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score / 2


@dataclass(frozen=True)
class Every(Mask):
    """Compared by value; the first queries have no visible keys."""

    step: int

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return ((q - k) % self.step == 0) & (q >= 4)


class OfHeads(Mask):
    """Other distances for each head and batch item."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return (q - k >= 0) & (q - k <= h + b)


class Backward(Mask):
    """With every shortcut."""

    band = (1, math.inf)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return k < q

    def classify(self, tiles: masks.Tiles, grid: masks.Grid) -> Tensor:
        full = tiles.k_last < tiles.q_first[:, None]
        empty = tiles.k_first >= tiles.q_last[:, None]
        return torch.where(full, FULL, torch.where(empty, EMPTY, PARTIAL))[None, None]


USER_DEFINED: dict[type, Callable[..., None]] = {
    **dict.fromkeys((SquaredReLU, Softplus, Gaussian, SoftplusSquared, Student, Threshold, Steep), check_normalizer),
    **dict.fromkeys((Manhattan, Kernel, Squared, Projected, Doubled), check_score),
    **dict.fromkeys((Clipped, Leaky, Hides, Halved), check_bias),
    **dict.fromkeys((OfHeads, Backward), check_mask),
}


IN_TILES = (Softplus, Threshold, Kernel, Clipped, OfHeads)  # with sizes of several tiles, too


@pytest.mark.parametrize("kind", USER_DEFINED, ids=lambda kind: kind.__name__)
def test_user_defined_objects_pass(kind: type) -> None:
    torch.manual_seed(0)
    assert USER_DEFINED[kind](kind(), sizes=BOTH if kind in IN_TILES else SMALL) is None


def test_a_user_defined_mask_by_value_passes() -> None:
    assert Every(3).by_value
    check_mask(Every(3), sizes=SMALL)


def test_checks_change_neither_the_object_nor_the_random_state() -> None:
    torch.manual_seed(0)
    score = Kernel()
    before = {name: x.clone() for name, x in score.named_parameters()}
    state = torch.random.get_rng_state()
    check_score(score, sizes=SMALL)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, x in score.named_parameters():
        assert torch.equal(x, before[name])
        assert x.grad is None
