"""`qkv.testing`: each broken object fails the check of the law that it breaks, and each correct one passes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import own_objects as own
from conftest import rand
from qkv import biases, features, masks, normalizers, scores
from qkv.biases import AdditiveBias, Bias
from qkv.errors import InputError
from qkv.masks import EMPTY, FULL, PARTIAL, Causal, Mask
from qkv.normalizers import Pointwise, Sigmoid, SumToOne
from qkv.scores import Pairwise, Product
from qkv.statistics import Local, Statistic, WeightTile
from qkv.testing import CheckFailed, check_bias, check_mask, check_normalizer, check_score, check_statistic

H, KV, D, DK, DV, NQ, NK = 4, 2, 8, 5, 6, 15, 18
TINY = [(7, 9)]  # includes the slow kernels: flex and the reference
SMALL = [(NQ, NK)]
TURNED = [(NQ, NK), (NK, NQ)]
TILED = [(NQ, NK), (130, 150)]  # an eager kernel, and one in tiles


def learned(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed, dtype=torch.float32))


def check_of(thing: object) -> Callable[..., None]:
    """The check of this kind of object."""
    for kind, check in (
        (Mask, check_mask), (Bias, check_bias), (scores.Score, check_score), (Statistic, check_statistic),
    ):  # fmt: skip
        if isinstance(thing, kind):
            return check
    return check_normalizer


# --- broken objects ---------------------------------------------------------------------------------------------------


def bad(base: type, **attributes: Any) -> Any:
    """An object of a class `Bad`, which has these attributes and methods."""
    return type("Bad", (base,), attributes)()


def fails(thing: Any, law: str, **options: Any) -> None:
    """The check fails with one line that begins with the class of the object and this method and fault."""
    with pytest.raises(CheckFailed) as raised:
        check_of(thing)(thing, **options)
    message = str(raised.value)
    assert re.match(rf"{type(thing).__name__}\W+{law}", message), message
    assert "\n" not in message
    assert len(message) < 500


class Forgets(Sigmoid):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bias": 2.0}


NORMALIZERS: list[tuple[str, Any]] = [
    ("weight: .*no method", bad(Pointwise)),
    ("weight: returned .*shape", bad(Pointwise, weight=lambda self, s: s.sum(-1, keepdim=True))),
    ("weight: wrote", bad(Pointwise, weight=lambda self, s: s.relu_())),
    ("weight: depends on the tile", bad(Pointwise, weight=lambda self, s: torch.exp(s - s.max().detach()))),
    ("by_head: ", bad(Pointwise, by_head=False, weight=lambda self, s: torch.sigmoid(s) * s.ndim)),
    ("weight: in torch.float32 a weight is inf", bad(Pointwise, weight=lambda self, s: torch.exp(2 * s))),
    ("weight: .*the score.*finite", bad(Pointwise, weight=lambda self, s: s * torch.sigmoid(s).detach())),
    ("zero_at_minus_infinity: .*weight", bad(
        Pointwise, zero_at_minus_infinity=True, weight=lambda self, s: torch.sigmoid(s.clamp(min=-10)))),
    ("has_lse: .*expected False", bad(Pointwise, has_lse=True, weight=lambda self, s: torch.exp(s))),
    ("weight: .*is_identity", bad(Pointwise, is_identity=True, weight=lambda self, s: 2 * s)),
    ("nonnegative: .*is -1", bad(Pointwise, nonnegative=True, weight=lambda self, s: torch.tanh(s))),
    ("log_weight: got", bad(
        Pointwise, weight=lambda self, s: torch.exp(s / 2), log_weight=lambda self, s: s)),
    ("shift: returned", bad(
        Pointwise, weight=lambda self, s: torch.sigmoid(s), shift=lambda self, visible, like: like.new_zeros(2, 5))),
    ("weight: is -.*0 or more", bad(SumToOne, weight=lambda self, s, level: s - level)),
    ("weight: rises", bad(SumToOne, weight=lambda self, s, level: torch.exp(s + level))),
    ("weight: .*at most 0.5", bad(SumToOne, weight=lambda self, s, level: torch.sigmoid(s - level) / 2)),
    ("weight: .*continuous", bad(SumToOne, weight=lambda self, s, level: ((s - level).relu() * 2).ceil() / 1.5)),
    ("has_lse: .*exp", bad(SumToOne, has_lse=True, weight=lambda self, s, level: (s - level).relu() ** 2)),
    ("level_of: .*weights sum to", bad(
        SumToOne, weight=lambda self, s, level: torch.exp(s - level),
        level_of=lambda self, s: s.amax(-1).masked_fill(s.amax(-1) == -torch.inf, 0))),
    ("level_of: .*−inf", bad(
        SumToOne, weight=lambda self, s, level: torch.exp(s - level), level_of=lambda self, s: s.logsumexp(-1))),
    ("pickle: made", Forgets(0.0)),
]  # fmt: skip

SCORES: list[tuple[str, Any]] = [
    ("project: .*no method", bad(Product)),
    ("project: mixes tokens: .* of the key", bad(
        Product, project=lambda self, q, k: (q, k + q.mean((1, 2), keepdim=True)))),
    ("project: mixes tokens: for a part", bad(Product, project=lambda self, q, k: (q, k / k.shape[2]))),
    ("project: .*7 entries and keys of 8", bad(Product, project=lambda self, q, k: (q[..., 1:], k))),
    ("factor: ", bad(Product, project=lambda self, q, k: (q, k), factor=lambda self, d: math.inf)),
    ("rotation_invariant: ", bad(Product, project=lambda self, q, k: (q.relu(), k.relu()), rotation_invariant=True)),
    ("project: .*float16", bad(Product, project=lambda self, q, k: (q * 1e5, k * 1e-5))),  # overflows in it alone
    ("project: .*finite differences", bad(
        Product, project=lambda self, q, k: (q * q.detach().norm(dim=-1, keepdim=True), k))),
    ("scores: depends on the tile", bad(Pairwise, scores=lambda self, q, k: (q @ k.mT).log_softmax(-1))),
]  # fmt: skip


def distance(region: masks.Region) -> Tensor:
    return 0.1 * (region.queries - region.keys).abs().double()


def from_the_corner(self: Bias, region: masks.Region) -> Tensor:
    """Distances from the corner of the tile instead of that of the matrix."""
    rows, columns = region.rows.stop - region.rows.start, region.columns.stop - region.columns.start
    return -0.1 * (torch.arange(rows)[:, None] - torch.arange(columns)).abs().float()


BIASES: list[tuple[str, Any]] = [
    (r"\w+: .*no method apply", bad(Bias)),
    ("tile: .*overrides apply", bad(
        AdditiveBias, tile=lambda self, region: torch.zeros(1, 1, 1, 1), apply=lambda self, s, region: 2 * s)),
    ("apply: wrote", bad(Bias, apply=lambda self, s, region: s.mul_(2))),
    ("apply: .*is nan", bad(Bias, apply=lambda self, s, region: s.sqrt())),
    ("tile: depends on the tile", bad(AdditiveBias, tile=from_the_corner)),
    ("apply: returned torch.float32", bad(Bias, apply=lambda self, s, region: (s / 2).float())),
    ("at: got", bad(  # rows are not positions
        AdditiveBias, tile=lambda self, region: -distance(region),
        at=lambda self, s, b, h, i, j: s - 0.1 * (i - j).abs())),
    ("part: of a tile", bad(  # a part counts from 0, and so loses its place
        Bias, apply=lambda self, s, region: s - distance(region), part=lambda self, region: self)),
    ("position_free: ", bad(Bias, position_free=True, apply=lambda self, s, region: s * (1 + region.queries))),
    ("apply: .*is inf", bad(Bias, apply=lambda self, s, region: (s.half() * 3e4).to(s) / 3e4)),
]  # fmt: skip


class Even(Mask):
    """A correct definition; subclasses have wrong shortcuts."""

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: masks.Grid) -> Tensor:
        return (q - k) % 2 == 0


def of_all(kind: int) -> Callable[..., Tensor]:
    """A `classify` that says the same of every tile."""
    return lambda self, tiles, grid: torch.full((1, 1, len(tiles.q_first), len(tiles.k_first)), kind)


def refuses(self: Mask, grid: masks.Grid) -> None:
    raise InputError("Bad: expected another size")


MASKS: list[tuple[str, Any]] = [
    ("sees: .*no method", bad(Mask)),
    ("sees: of a tile", bad(Mask, sees=lambda self, b, h, q, k, grid: k == k.min())),
    ("sees: .*does not broadcast", bad(  # rows of the matrix instead of positions
        Mask, sees=lambda self, b, h, q, k, grid: torch.ones(q.shape[0], k.shape[-1], dtype=torch.bool))),
    ("classify: says FULL", bad(Even, classify=of_all(FULL))),
    ("classify: says EMPTY", bad(Even, classify=lambda self, tiles, grid: torch.where(  # of single pairs
        (tiles.q_first == tiles.q_last)[:, None] & (tiles.k_first == tiles.k_last), EMPTY, PARTIAL)[None, None])),
    ("classify: .*15 × 18 tiles", bad(
        Even, classify=lambda self, tiles, grid: torch.ones(len(tiles.q_first), len(tiles.k_first)))),
    ("band: .*position 3 and key 0", bad(Even, band=(-8, 8))),
    ("key_mask: says", bad(Even, key_mask=lambda self, grid: grid.columns(0, grid.n_keys)[None] % 2 == 0)),
    ("visible_keys: got", bad(
        Even, visible_keys=lambda self, grid: torch.full((1, 1, grid.n_queries), grid.n_keys // 3))),
    ("visible: of a tile", bad(Even, visible=lambda self, region, grid: Causal().visible(region, grid))),
    ("factors: all", bad(Even, factors=lambda self: (Even(), Causal()))),
    ("alternatives: one", bad(Even, alternatives=lambda self: (Even(), Causal()))),
    ("cacheable: ", bad(Even, cacheable=True)),  # but compared by identity
    ("check: called", bad(Even, check=refuses)),
]  # fmt: skip

TOTAL = {"name": "bad", "definition": "a broken one", "tile": lambda self, tile: tile.weights.sum(-1)}
STATISTICS: list[tuple[str, Any]] = [
    (law, bad(Statistic, **{**TOTAL, **attributes}))
    for law, attributes in [
        ("tile: .*no method", {"tile": Statistic.tile}),
        ("tile: .*definition is missing", {"definition": None}),
        ("tile: .*letters", {"name": "two words"}),
        ("tile: .*'query' or 'key'", {"over": "head"}),
        ("label: ", {"label": "two\nlines"}),
        ("unit: ", {"unit": "%"}),
        ("share: .*unit", {"share": True, "unit": "keys"}),
        ("share: .*logarithmic", {"share": True, "logarithmic": True}),
        ("logarithmic: ", {"logarithmic": 1}),
        ("highest: ", {"highest": -1.0}),
        ("parts: ", {"parts": 0}),
        ("zero: ", {"zero": None}),
        ("tile: .*tile returned", {"tile": lambda self, tile: tile.weights.sum((-1, -2))}),
        ("tile: .*complex", {"tile": lambda self, tile: tile.weights.sum(-1) * 1j}),
        ("tile: wrote", {"tile": lambda self, tile: tile.weights.mul_(2).sum(-1)}),
        ("tile: is nan", {"tile": lambda self, tile: (tile.weights * tile.weights.log()).sum(-1)}),
        ("tile: .*split", {"tile": lambda self, tile: tile.weights.half().sum(-1)}),
        ("tile: .*split", {"tile": lambda self, tile: tile.weights.amax(-1)}),  # merged by addition
        ("tile: .*split", {"tile": lambda self, tile: tile.weights @ torch.arange(tile.weights.shape[-1]).double()}),
        ("tile: .*split", {"tile": lambda self, t: t.weights.mean(1, keepdim=True).expand_as(t.weights).sum(-1)}),
        ("tile: .*more than", {"tile": lambda self, t: t.weights.sum(-1) * (t.visible is not None)}),
        ("merge: .*zero", {  # of a product, the neutral element is 1
            "tile": lambda self, tile: (1 + tile.weights).prod(-1), "merge": lambda self, a, b: a * b}),
        ("merge: .*order", {"merge": lambda self, a, b: torch.where(a * b == 0, a + b, 2 * a + b)}),
        ("merge: .*first", {"merge": lambda self, a, b: torch.where(a * b == 0, a + b, (a + b) / 2)}),
        ("merge: wrote", {"merge": lambda self, a, b: a.add_(b)}),
        ("merge: returned", {"merge": lambda self, a, b: (a + b).sum(-1)}),
        ("finish: is nan", {"finish": lambda self, total, mass: total / mass}),
        ("finish: returned", {"parts": 2, "tile": lambda self, tile: torch.stack([tile.weights.sum(-1)] * 2)}),
        ("finish: wrote", {"finish": lambda self, total, mass: total + mass.mul_(2)}),
        ("share: .*is 3", {"share": True, "tile": lambda self, tile: 3 * tile.weights.sum(-1)}),
        ("by_head: returned", {"by_head": lambda self, values, counted: np.nanmean(values, (0, -1))}),
        ("by_head: depends", {"by_head": lambda self, values, counted: np.asarray(np.nanmean(values, -1))}),
        ("by_head: is not finite", {"by_head": lambda self, values, counted: np.full(values.shape[:3], np.nan)}),
        ("pickle raised", {}),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("law", "thing"), [*NORMALIZERS, *SCORES, *BIASES, *MASKS])
def test_the_law_that_a_broken_object_breaks_is_named(law: str, thing: Any) -> None:
    fails(thing, law, sizes=SMALL)


@pytest.mark.parametrize(("law", "statistic"), STATISTICS)
def test_the_law_that_a_broken_statistic_breaks_is_named(law: str, statistic: Any) -> None:
    fails(statistic, law)


def test_checks_reject_masks_without_a_fitting_size_and_objects_of_other_classes() -> None:
    fails(bad(Even, check=refuses), "check: refuses all")
    for check in (check_mask, check_score, check_bias, check_normalizer, check_statistic):
        for other in (torch.ones(2, 2), scores.Dot):
            with pytest.raises(CheckFailed, match=f"{check.__name__}: got .* expected an object"):
                check(other)


# --- objects that pass ------------------------------------------------------------------------------------------------


class Kernel(Pairwise, nn.Module):
    """A learned width for each head, after a learned projection."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.linear = learned(H, 1, 1), nn.Linear(D, 3, bias=False)
        self.linear.weight = learned(3, D)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(q), self.linear(k)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) * self.width.exp()


class Kurtosis(Statistic):
    """Several parts, and a finish."""

    name, definition, parts, highest = "fourth", "Σ a⁴ / (Σ a²)²", 2, 40.0

    def tile(self, tile: WeightTile) -> Tensor:
        w = tile.weights.double()
        return torch.stack([(w**2).sum(-1), (w**4).sum(-1)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total[1] / torch.where(mass > 0, total[0], 1.0).square()


ADDITIVE = learned(H, 3), learned(H, 3, D), learned(KV, 3, DK), learned(3)
SOUND: list[tuple[Any, dict[str, Any]]] = [
    (masks.Window(3, ahead=2), {"sizes": TURNED}),
    (masks.Padding([4, 6], "left") & masks.Causal(), {"sizes": TURNED}),
    (masks.RandomKeys(3, seed=1), {"sizes": SMALL}),
    (masks.TopKeys(rand(2, 1, NQ, 5), 2, among=masks.Causal(), block=4, n_keys=NK), {"sizes": SMALL}),
    (masks.Document([[0, 0, 0, 1, 1, -1, 1, 2, 2] * 2, [0, 1, 1, 1, 1, 2, 2, -1, -1] * 2]), {"sizes": SMALL}),
    (~masks.Prefix(NK), {"sizes": SMALL}),
    (biases.TensorBias(learned(H, NQ, NK)), {"sizes": SMALL}),
    (biases.ALiBi(learned(H)), {"sizes": TILED}),
    (scores.Additive(*ADDITIVE), {"sizes": SMALL, "dim_k": DK}),
    (scores.Features(features.elu_plus_one), {"sizes": SMALL}),
    (normalizers.Softmax(1.3, sink=learned(H)), {"sizes": TINY}),
    (normalizers.Softmax(0.7, key=learned(H, D)), {"sizes": SMALL}),
    (normalizers.Entmax(1.5, temperature=0.6, sink=learned(H)), {"sizes": SMALL}),
    (normalizers.Softpick(0.8), {"sizes": SMALL}),
    (normalizers.Hard(sample=True), {"sizes": SMALL}),
    *((make(), {"sizes": SMALL}) for make in (own.HeavyTail, own.Ramp, own.Manhattan, own.Squeeze, own.Diagonals)),
    (Kernel(), {"sizes": TILED}),
    *((statistic, {"heads": 1}) for statistic in (Local(2), Kurtosis(), own.Heavy(), own.Taken())),
]


@pytest.mark.parametrize(("thing", "options"), SOUND, ids=[type(thing).__name__ for thing, _ in SOUND])
@pytest.mark.usefixtures("untraced")
def test_correct_objects_pass(thing: Any, options: dict[str, Any]) -> None:
    check_of(thing)(thing, **options)


def test_checks_change_neither_the_object_nor_the_random_state() -> None:
    score = Kernel()
    before = {name: x.clone() for name, x in score.named_parameters()}
    state = torch.random.get_rng_state()
    check_score(score, sizes=SMALL)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, x in score.named_parameters():
        assert torch.equal(x, before[name])
        assert x.grad is None
