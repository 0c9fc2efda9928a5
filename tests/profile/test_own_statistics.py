"""User-defined statistics in profiles, files, figures, reports and surveys, which load without the class."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_models as hf
import qkv
from conftest import refused
from own_objects import Heavy, Taken
from qkv import Profile
from qkv.errors import InputError
from qkv.plot import survey as survey_plots
from qkv.profiler import Survey, survey
from qkv.profiler.data.variables import custom_variables
from qkv.profiler.surveys.accumulators import QUANTITIES
from qkv.report.payload import payload
from qkv.statistics import BUILT_IN, Mass, Statistic, WeightTile
from survey_process import own_survey

QUIET: dict[str, Any] = {"progress": False, "probe": False}
TEXTS = ["for name in names:\n    print(name)\n", "import os"]


class Ahead(Statistic):
    """A statistic that may be negative and is undefined between two texts."""

    name, label, unit, one_text = "ahead", "Looks ahead", "tokens", True
    definition = "mean of key position − query position, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return -(tile.weights * tile.distances).sum(-1)


class Sure(Statistic):
    """A statistic that is NaN for some queries."""

    name, definition, from_second = "sure", "largest weight / mass, of queries with more than one visible key", True

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.amax(-1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return torch.where(total < 0.999, total, torch.nan)


@pytest.fixture(scope="module")
def made() -> Profile:
    return qkv.profile("qkv-mini", TEXTS, statistics=[Heavy(), Taken(), Ahead(), Sure()], **QUIET)


def test_a_profile_holds_user_statistics_as_variables_and_columns(made: Profile) -> None:
    data = made.data
    weights = data["weights"].values
    heavy = np.where(np.isnan(weights[..., 0]), np.nan, (weights >= 0.1).sum(-1))
    np.testing.assert_array_equal(data["heavy"], heavy)
    taken = np.where(np.isnan(data["received"]), np.nan, np.nan_to_num(weights).max(3))
    np.testing.assert_allclose(data["taken"], taken, rtol=1e-5, atol=1e-6)
    assert data["heavy"].attrs["units"] == "keys"
    assert data["heavy"].attrs["definition"] == Heavy.definition
    table = made.heads()
    np.testing.assert_allclose(table["heavy"], np.nanmean(np.nanmean(heavy, -1), 0).ravel(), rtol=1e-6)
    np.testing.assert_allclose(table["taken"], np.nanmax(data["taken"], -1).mean(0).ravel(), rtol=1e-6)
    np.testing.assert_allclose(table["ahead"], -table["distance"], rtol=1e-4)
    assert table.attrs["units"]["heavy"] == "keys"
    assert Heavy.definition in table.attrs["definitions"]["heavy"]
    assert list(made.compare(made).heads().filter(like="heavy")) == ["heavy_a", "heavy_b", "heavy_difference"]
    alone = qkv.profile("qkv-mini", TEXTS, **QUIET).data
    for name, x in alone.items():
        np.testing.assert_allclose(x, data[name], rtol=1e-4, atol=2e-3, err_msg=str(name))  # rounding
    added = {name + ending for name in ("heavy", "taken", "ahead", "sure") for ending in ("", "_by_head")}
    assert set(data) - set(alone) == added


def test_files_with_user_statistics_load_without_the_class(made: Profile, tmp_path: Path) -> None:
    path = made.save(tmp_path / "p.qkv.zip")
    with zipfile.ZipFile(path) as archive:
        for module in (b"own_objects", __name__.encode()):
            assert not any(module in archive.read(name) for name in archive.namelist()), "the file names the class"
    loaded = Profile.load(path)
    assert custom_variables(loaded.data) == custom_variables(made.data)
    assert loaded.heads().equals(made.rounded().heads())
    assert loaded.heads().attrs["units"]["ahead"] == "tokens"


def test_reports_and_figures_show_user_statistics(made: Profile) -> None:
    page, _ = payload(made)
    described = page["statistics"]
    assert described["heavy"] == {"label": "Heavy keys", "unit": "keys", "meaning": Heavy.definition, "table": True}
    assert (described["taken"]["unit"], described["sure"]["unit"]) == ("%", "ratio")
    one = page["groups"][0]["texts"][1]["heads"]
    np.testing.assert_allclose(one["heavy"], made.data["heavy_by_head"].values[1].ravel(), rtol=1e-5)
    for name in ("heavy", "taken", "ahead"):
        axes = made.plot.heads(name).axes[0]
        assert axes.get_title(loc="left").startswith(described[name]["label"])
    assert axes.images[0].norm.vmin == pytest.approx(made.heads()["ahead"].min())
    with refused("statistic"):
        made.plot.heads("mine")


def test_statistics_of_one_text_are_nan_in_cross_attention() -> None:
    groups = qkv.profile(hf.build("bart"), hf.inputs("bart"), statistics=[Heavy(), Ahead()], **QUIET).groups
    for name, data in groups.items():
        for variable in ("ahead", "ahead_by_head"):
            assert bool(np.isnan(data[variable]).all()) is (name == "cross")
        assert np.isfinite(data["heavy"]).all()


class WrongByHead(Heavy):
    def by_head(self, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return values


def test_padding_does_not_change_user_statistics() -> None:
    model, batch, n = hf.build("gpt2"), hf.inputs("gpt2", "right"), hf.LENGTH - hf.PADDED
    settings = QUIET | {"statistics": [Heavy(), Taken()]}
    both = qkv.profile(model, batch, **settings).data.isel(text=1)
    alone = qkv.profile(model, batch["input_ids"][1, :n], **settings).data.isel(text=0)
    for name in ("heavy", "taken", "heavy_by_head", "taken_by_head"):
        got = both[name] if name.endswith("by_head") else both[name][..., :n]
        np.testing.assert_allclose(got, alone[name], rtol=1e-5, err_msg=name)
    with refused("by_head"):
        qkv.profile(model, batch, statistics=[WrongByHead()], **QUIET)


NEAR = qkv.masks.Window(2)
REFUSALS: list[tuple[str, list[Any]]] = [
    ("'entropy' is taken", [BUILT_IN["entropy"]]),
    ("'sink_share' is taken", [Mass("sink_share", NEAR)]),
    ("'layer' is taken", [Mass("layer", NEAR)]),
    ("'heavy_by_head'", [Heavy(), Mass("heavy_by_head", NEAR)]),
    ("heavy, heavy", [Heavy(), Heavy()]),
    ("class Heavy", [Heavy]),
]


@pytest.mark.parametrize(("match", "statistics"), REFUSALS)
def test_profiles_and_surveys_reject_names_in_use(match: str, statistics: list[Any], tmp_path: Path) -> None:
    with refused("statistics", match):
        qkv.profile(hf.build("gpt2"), hf.inputs("gpt2"), statistics=statistics, **QUIET)
    if "sink_share" not in match:  # a survey has no such column
        with refused("statistics", match):
            own_survey(tmp_path, statistics=statistics)


def test_a_survey_stores_means_and_histograms(made: Profile, tmp_path: Path) -> None:
    result = survey("qkv-mini", TEXTS, out=tmp_path, shards=2, statistics=[Sure(), Heavy()])
    table, data = result.heads(), made.data
    for name in ("heavy", "sure"):
        values = data[name].values.copy()
        if name == "sure":
            values[..., 0] = np.nan  # the first query of a causal text
        np.testing.assert_allclose(
            table[name], np.nanmean(np.moveaxis(values, 0, 2).reshape(len(table), -1), 1), rtol=1e-4, err_msg=name
        )
        assert (table[f"{name}_max"] <= np.nanmax(values) + 1e-6).all()
    assert list(result.quantities) == [*QUANTITIES, "heavy", "sure"]
    loaded = Survey.load(tmp_path / "survey.qkv.zip")
    assert loaded.quantities == result.quantities
    assert loaded.heads().equals(table)
    assert "Heavy keys, keys" in [axes.get_title(loc="left") for axes in survey_plots.heads(loaded).axes]


def test_surveys_reject_unsuitable_statistics_and_different_settings(tmp_path: Path) -> None:
    def run(name: str, *statistics: Any) -> Survey:
        return own_survey(tmp_path / name, ["import os"], shards=1, statistics=statistics)

    with refused("statistics", match="each key"):
        run("keys", Taken())
    with refused("statistics", match="begin at 0"):
        run("negative", Ahead())
    result = run("own", Heavy())
    with pytest.raises(InputError, match=r"other settings: definition\.quantities\.heavy was present and is missing"):
        run("own")
    plain = run("plain")
    for a, b in ((result, plain), (plain, result)):
        with pytest.raises(InputError, match=r"cannot be merged: quantities\.heavy is (present|missing)"):
            a.merge(b)
    two, three = (run(f"{n}", Mass("near", qkv.masks.Window(n), "near")) for n in (2, 3))
    with pytest.raises(InputError, match=r"cannot be merged: quantities.near.own.parameters.mask is Window"):
        two.merge(three)
