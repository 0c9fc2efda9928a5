"""`check_statistic` finds broken statistics, and `measure`, tables, figures and surveys agree with the objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from conftest import close, rand, refused, triple, unchecked
from own_objects import Heavy, Taken
from qkv import InputError
from qkv.masks import Causal, Dense, Mask, Window
from qkv.statistics import BUILT_IN, Local, Mass, Previous, Sink, Statistic, Streaming, WeightTile
from qkv.statistics.sums import field_of
from qkv.testing import CheckFailed, check_statistic

H, KV, D = 6, 3, 8


class Kurtosis(Statistic):
    """Several parts, and a finish."""

    name, definition, parts, highest = "fourth", "Σ a⁴ / (Σ a²)²", 2, 40.0

    def tile(self, tile: WeightTile) -> Tensor:
        w = tile.weights.double()
        return torch.stack([(w**2).sum(-1), (w**4).sum(-1)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total[1] / torch.where(mass > 0, total[0], 1.0).square()


SOUND = (*BUILT_IN.values(), Local(2), Streaming(), Mass("two", Window(2)), Heavy(), Taken(), Kurtosis())


@pytest.mark.parametrize("statistic", SOUND, ids=lambda s: s.name)
def test_check_statistic_accepts_correct_statistics(statistic: Statistic) -> None:
    with unchecked():
        check_statistic(statistic)


# --- broken ones ------------------------------------------------------------------------------------------------------


class Base(Statistic):
    name, definition = "broken", "a broken statistic"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum(-1)


class NoTile(Statistic):
    name, definition = "none", "nothing"


class NoDefinition(Statistic):
    name = "none"

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum(-1)


class WrongName(Base):
    name = "two words"


class WrongOver(Base):
    over: Any = "head"


class NoWords(Base):
    definition = " "


class WrongUnit(Base):
    unit = "%"


class WrongShare(Base):
    share, unit = True, "keys"


class WrongHighest(Base):
    highest = -1.0


class WrongLabel(Base):
    label = "two\nlines"


class WrongShape(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum((-1, -2))


class NotATensor(Base):
    def tile(self, tile: WeightTile) -> Any:
        return 1.0


class ComplexNumbers(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.sum(-1) * 1j


class Raises(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights @ tile.weights


class Writes(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.mul_(2).sum(-1)


class Nan(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * tile.weights.log()).sum(-1)


class Largest(Base):
    """A maximum, merged by addition."""

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.amax(-1)


class DependsOnTile(Base):
    """Compares weights with the mean over the tile."""

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights > tile.weights.mean(-1, keepdim=True)).sum(-1)


class LocalPlaces(Base):
    """Uses columns of the tile instead of positions."""

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights * torch.arange(tile.weights.shape[-1])).sum(-1)


class MixedHeads(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.mean(1, keepdim=True).expand_as(tile.weights).sum(-1)


class NeedsVisible(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return torch.zeros_like(tile.weights[..., 0]) if tile.visible is None else tile.weights.sum(-1)


class InHalf(Base):
    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.half().sum(-1)


class WrongZero(Base):
    """The product of (1 + a), whose neutral element is 1."""

    def tile(self, tile: WeightTile) -> Tensor:
        return (1 + tile.weights).prod(-1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


class Order(Base):
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == 0, b, torch.where(b == 0, a, 2 * a + b))


class Mean(Base):
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a == 0, b, torch.where(b == 0, a, (a + b) / 2))


class MergesInPlace(Base):
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return a.add_(b)


class MergesShape(Base):
    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return (a + b).sum(-1)


class NotFinite(Base):
    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total / mass


class FinishesShape(Base):
    parts = 2

    def tile(self, tile: WeightTile) -> Tensor:
        return torch.stack([tile.weights.sum(-1)] * 2)


class FinishWrites(Base):
    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total + mass.mul_(2)


class NoShare(Base):
    share = True

    def tile(self, tile: WeightTile) -> Tensor:
        return 3 * tile.weights.sum(-1)


class WrongByHead(Base):
    def by_head(self, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return np.nanmean(values, (0, -1))


class ByHeadOfPadding(Base):
    def by_head(self, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return np.asarray(np.nanmean(values, -1))


class Holds(Base):
    def __init__(self) -> None:
        self.function = lambda x: x.sum(-1)

    def tile(self, tile: WeightTile) -> Tensor:
        return self.function(tile.weights)


class Forgets(Base):
    def __init__(self, least: float = 0.2) -> None:
        self.least = least

    def __getstate__(self) -> dict[str, float]:
        return {"least": 0.5}

    def tile(self, tile: WeightTile) -> Tensor:
        return (tile.weights > self.least).sum(-1)


BROKEN: list[tuple[Any, str]] = [
    (Heavy, "check_statistic: got the class Heavy, expected an object"),
    (NoTile(), r"NoTile.tile: required attributes: no method tile\(tile\)"),
    (NoDefinition(), "NoDefinition.tile: required attributes: definition is missing"),
    (WrongName(), "name is 'two words', expected letters"),
    (WrongOver(), "over is 'head', expected 'query' or 'key'"),
    (NoWords(), "NoWords.definition: is ' ', expected one line"),
    (WrongUnit(), "WrongUnit.unit: is '%', expected '1'"),
    (WrongShare(), "WrongShare.share: is True, but the unit is 'keys'"),
    (WrongHighest(), "WrongHighest.highest: is -1.0, expected a positive number"),
    (WrongLabel(), "WrongLabel.label: is"),
    (WrongShape(), r"WrongShape.tile: .* tile returned \(2, 4\) for weights"),
    (NotATensor(), "NotATensor.tile: .* returned float"),
    (ComplexNumbers(), "ComplexNumbers.tile: returned torch.complex128 .* expected real numbers"),
    (Raises(), "Raises.tile: called for weights .*: raised RuntimeError"),
    (Writes(), "Writes.tile: wrote to tile.weights"),
    (Nan(), "Nan.tile: is NaN for"),
    (Largest(), "Largest.tile: depends on how the weights are split into tiles"),
    (DependsOnTile(), "DependsOnTile.tile: depends on how the weights are split"),
    (LocalPlaces(), "LocalPlaces.tile: depends on how the weights are split"),
    (MixedHeads(), "MixedHeads.tile: depends on how the weights are split"),
    (NeedsVisible(), "NeedsVisible.tile: depends on more than the weights"),
    (InHalf(), "InHalf.tile: depends on how the weights are split"),
    (WrongZero(), "WrongZero.merge: with zero = 0 changes a part"),
    (Order(), "Order.merge: depends on the order of two parts"),
    (Mean(), "Mean.merge: depends on which parts come first"),
    (MergesInPlace(), "MergesInPlace.merge: wrote to its arguments"),
    (MergesShape(), "MergesShape.merge: returned"),
    (NotFinite(), "NotFinite.finish: is nan at .*, a query that is uncounted"),
    (FinishesShape(), "FinishesShape.finish: returned"),
    (FinishWrites(), "FinishWrites.finish: wrote to the mass"),
    (NoShare(), "NoShare.share: is True, but the number at .* is 3"),
    (WrongByHead(), r"WrongByHead.by_head: returned shape \(3, 4\)"),
    (ByHeadOfPadding(), "ByHeadOfPadding.by_head: depends on values that do not count"),
    (Holds(), "Holds: pickle raised"),
    (Forgets(), "Forgets: pickle made an object whose number"),
]


@pytest.fixture
def no_checks_of_shapes() -> Iterator[None]:
    with unchecked():
        yield


@pytest.mark.usefixtures("no_checks_of_shapes")
@pytest.mark.parametrize(("statistic", "message"), BROKEN, ids=[type(s).__name__ for s, _ in BROKEN])
def test_check_statistic_rejects_broken_statistics(statistic: Any, message: str) -> None:
    with pytest.raises(CheckFailed, match=message) as raised:
        check_statistic(statistic)
    assert "\n" not in str(raised.value)


# --- the fused sums of measure agree with the objects -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("nq", "nk", "mask"),
    [
        (13, 13, Causal()),
        (11, 17, Window(4) & Causal()),
        (300, 270, None),
        (17, 19, Dense(torch.rand(2, 1, 17, 19, generator=torch.Generator().manual_seed(3)) < 0.4)),
    ],
    ids=["causal", "window", "tiles", "holes"],
)
def test_measure_agrees_with_the_statistic_objects(nq: int, nk: int, mask: Mask | None, dtype: torch.dtype) -> None:
    q, k = rand(2, H, nq, D, dtype=dtype), rand(2, KV, nk, D, seed=1, dtype=dtype)
    counted = torch.ones(2, nq, dtype=torch.bool)
    counted[1, : nq // 3] = False
    mass = {s.name: s.mask for s in (Local(3), Streaming())}
    statistics = (*BUILT_IN.values(), Local(3), Streaming())
    result = qkv.measure(q, k, mask=mask, queries=counted, mass=mass, statistics=statistics)
    for name in BUILT_IN:
        fused, by_object = getattr(result, field_of(name)), result.own[name]
        close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 2e-5, "atol": 2e-4}
        torch.testing.assert_close(fused, by_object, **close, msg=lambda m, name=name: f"{name}: {m}")  # type: ignore[misc]
    for name, inside in result.mass.items():
        torch.testing.assert_close(inside, result.own[name], rtol=1e-5, atol=1e-6)


# --- one registry -----------------------------------------------------------------------------------------------------


def test_tables_figures_and_surveys_use_units_and_definitions_of_the_objects() -> None:
    from qkv.profiler.data import frames
    from qkv.profiler.data.frames import COLUMNS
    from qkv.profiler.data.variables import OF_HEADS, VARIABLES
    from qkv.profiler.surveys.accumulators import QUANTITIES

    for name, s in BUILT_IN.items():
        about = VARIABLES[name]
        assert (about.units, about.label) == (s.unit, s.label)
        assert about.definition.removesuffix(", as a share of the row").removesuffix(", as shares of their rows") == (
            s.definition
        )
    for name in OF_HEADS:
        about = VARIABLES[name]
        assert COLUMNS[name][0] == about.units
        assert about.definition in COLUMNS[name][1]
        column = frames.STATISTICS[name]
        assert (column.label, column.meaning) == (about.label, about.definition)
        assert column.unit == ("%" if about.share else about.units)
        if name in QUANTITIES:
            quantity = QUANTITIES[name]
            assert (quantity.unit, quantity.definition, quantity.label) == (about.units, about.definition, about.label)
            assert (quantity.high, quantity.logarithmic) == (about.highest, about.logarithmic)
    assert {*OF_HEADS} - {*QUANTITIES} == {"spread"}


ADDED = """
from qkv import statistics
from qkv.statistics import Statistic

class Heavy(Statistic):
    name, label, unit, highest, definition = "heavy", "Heavy keys", "keys", 50.0, "keys with a tenth of the weight"
    def tile(self, tile):
        return (tile.weights >= 0.1).sum(-1)

statistics.BUILT_IN["heavy"] = Heavy()
import tempfile
import qkv
from qkv.profiler.data.frames import STATISTICS
from qkv.profiler.surveys.survey import survey
from qkv.report.payload import payload

profile = qkv.profile("qkv-mini", "for name in names:", progress=False)
want = qkv.profile("qkv-mini", "for name in names:", progress=False).data["heavy"].mean(("text", "query")).values
assert abs(profile.heads()["heavy"].to_numpy() - want.ravel()).max() < 1e-6
assert profile.heads().attrs["units"]["heavy"] == "keys"
page, _ = payload(profile)
assert page["statistics"]["heavy"]["label"] == STATISTICS["heavy"].label == "Heavy keys"
assert len(page["groups"][0]["texts"][0]["heads"]["heavy"]) == want.size
with tempfile.TemporaryDirectory() as folder:
    result = survey("qkv-mini", ["for name in names:"], out=folder, shards=1).heads()
assert abs(result["heavy"].to_numpy() - want.ravel()).max() < 1e-6
profile.plot.heads("heavy")
print("everywhere")
"""


def test_a_statistic_added_to_built_in_appears_everywhere() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=False)
    assert done.stdout == "everywhere\n", done.stderr


def test_a_mass_may_have_any_name() -> None:
    """Tiles cache distances and the insides of bands: names of masks must not collide with other cache keys."""
    q, k, _ = triple(nq=600, nk=600)
    near = qkv.measure(q, k, mass={"near": Window(9)})
    for name in ("steps", "distance", "distances"):
        result = qkv.measure(q, k, mass={name: Window(9)})
        assert torch.equal(result.mass[name], near.mass["near"])
        assert torch.equal(result.distance, near.distance)


def test_a_tile_holds_the_first_key_of_its_text() -> None:
    q, k, _ = triple()
    result = qkv.measure(q, k, first=torch.tensor([3, 0]), statistics=[Sink()])
    close(result.own["sink"], result.sink)


def test_statistics_reject_masks_that_do_not_fit() -> None:
    q, k, _ = triple()
    larger = torch.ones(40, 40, dtype=torch.bool)
    with pytest.raises(InputError, match="40"):
        qkv.measure(q, k, statistics=[Mass("large", Dense(larger))])
    with unchecked(), refused("mask"):
        Mass("tensor", larger)  # type: ignore[arg-type]
    with unchecked(), refused("statistics", match="one Sink object"):
        qkv.measure(q, k, statistics=Sink())  # type: ignore[arg-type]


def test_the_label_follows_the_name_of_the_class() -> None:
    class Mine(Previous):
        name = "mine"

    class Again(Mine): ...

    assert (Mine.label, Again.label, Previous.label) == ("mine", "mine", "Previous token")
