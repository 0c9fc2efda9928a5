"""Statistics of one's own in profiles, files, figures, reports and surveys, which need no class once they are made."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qkv
from conftest import unchecked
from own_objects import Heavy, Taken
from qkv.errors import InputError
from qkv.figures import survey as survey_plots
from qkv.profiler import Profile, Survey, survey
from qkv.profiler.data.variables import custom_variables
from qkv.profiler.surveys.quantities import QUANTITIES
from qkv.report.payload import payload
from qkv.statistics import Entropy, Mass, Statistic, WeightTile
from survey_process import own_survey

TEXTS = ["for name in names:\n    print(name)\n", "import os"]


class Ahead(Statistic):
    """It may be negative, and says nothing between two texts."""

    name, label, unit, one_text = "ahead", "Looks ahead", "tokens", True
    definition = "mean of key position − query position, by weight"

    def tile(self, tile: WeightTile) -> Tensor:
        return -(tile.weights * tile.distances).sum(-1)


class Sure(Statistic):
    """NaN where it says nothing."""

    name, definition, from_second = "sure", "largest weight / mass, of queries that see more than one key", True

    def tile(self, tile: WeightTile) -> Tensor:
        return tile.weights.amax(-1)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return torch.where(total < 0.999, total, torch.nan)


@pytest.fixture(scope="module")
def made() -> Profile:
    return qkv.profile("qkv-mini", TEXTS, statistics=[Heavy(), Taken(), Ahead(), Sure()], progress=False)


def test_a_profile_has_them_as_variables_and_columns(made: Profile) -> None:
    data = made.data
    weights = data["weights"].values
    heavy = np.where(np.isnan(weights[..., 0]), np.nan, (weights >= 0.1).sum(-1))
    np.testing.assert_array_equal(data["heavy"], heavy)
    np.testing.assert_allclose(data["taken"], np.where(np.isnan(data["received"]), np.nan, np.nanmax(
        np.nan_to_num(weights), 3)), rtol=1e-5, atol=1e-6)  # fmt: skip
    assert data["heavy"].attrs["units"] == "keys"
    assert data["heavy"].attrs["definition"] == Heavy.definition
    table = made.heads()
    mean = np.nanmean(np.nanmean(heavy, -1), 0).ravel()
    np.testing.assert_allclose(table["heavy"], mean, rtol=1e-6)
    np.testing.assert_allclose(table["taken"], np.nanmax(data["taken"], -1).mean(0).ravel(), rtol=1e-6)
    np.testing.assert_allclose(table["ahead"], -table["distance"], rtol=1e-4)
    assert table.attrs["units"]["heavy"] == "keys"
    assert Heavy.definition in table.attrs["definitions"]["heavy"]
    assert list(made.compare(made).heads().filter(like="heavy")) == ["heavy_a", "heavy_b", "heavy_difference"]


def test_the_built_in_numbers_stay(made: Profile) -> None:
    alone = qkv.profile("qkv-mini", TEXTS, progress=False).data
    for name, x in alone.items():
        np.testing.assert_array_equal(x, made.data[name], err_msg=str(name))
    assert set(made.data) - set(alone) == {
        name + ending for name in ("heavy", "taken", "ahead", "sure") for ending in ("", "_by_head")
    }


READ = """
import sys
import qkv
profile = qkv.Profile.load(sys.argv[1])
table = profile.heads()
assert {"heavy", "taken", "ahead", "sure"} <= set(table)
assert table.attrs["units"]["ahead"] == "tokens"
profile.plot.heads("heavy")
profile.report(sys.argv[2])
print(table["heavy"].sum())
"""


def test_files_keep_them_without_the_class(made: Profile, tmp_path: Path) -> None:
    path = made.save(tmp_path / "p.qkv.zip")
    done = subprocess.run(
        [sys.executable, "-c", READ, path, tmp_path / "r.html"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(made.heads()["heavy"].sum())
    assert custom_variables(Profile.load(path).data) == custom_variables(made.data)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(made.export(tmp_path / "heads.parquet"))
    assert table.schema.field("heavy").metadata[b"units"] == b"keys"
    assert Heavy.definition.encode() in table.schema.field("heavy").metadata[b"definition"]


def test_reports_and_figures_show_them(made: Profile) -> None:
    page, _ = payload(made)
    said = page["statistics"]
    assert said["heavy"] == {"label": "Heavy keys", "unit": "keys", "meaning": Heavy.definition, "table": True}
    assert said["taken"]["unit"] == "%"
    assert said["sure"]["unit"] == "ratio"
    one = page["groups"][0]["texts"][1]["heads"]
    np.testing.assert_allclose(one["heavy"], made.data["heavy_by_head"].values[1].ravel(), rtol=1e-5)
    for name in ("heavy", "taken", "ahead"):
        figure = made.plot.heads(name)
        assert figure.axes[0].get_title(loc="left").startswith(said[name]["label"])
    image = made.plot.heads("ahead").axes[0].images[0]
    assert image.norm.vmin == pytest.approx(made.heads()["ahead"].min())
    with pytest.raises(InputError, match=r"statistic: got 'mine'; expected one of .*heavy"):
        made.plot.heads("mine")
    assert "heavy" not in payload(qkv.profile("qkv-mini", "import os", progress=False))[0]["statistics"]


class Reads(nn.Module):
    """One layer of cross-attention between texts, or of attention within one, with padding."""

    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.cross, self.x = cross, torch.randn(2, 1, 9, 8, generator=torch.Generator().manual_seed(3))

    def forward(self, keys: Tensor) -> Tensor:
        q = self.x[:, :, :5] if self.cross else self.x
        return qkv.attend(q, self.x, self.x)


def test_those_of_one_text_say_nothing_between_two() -> None:
    asked: dict[str, Any] = {"statistics": [Heavy(), Ahead()], "progress": False, "probe": False}
    for cross in (False, True):
        data = qkv.profile(Reads(cross=cross), {"keys": torch.zeros(1)}, **asked).data
        assert bool(np.isnan(data["ahead"]).all()) is bool(np.isnan(data["ahead_by_head"]).all()) is cross
        assert np.isfinite(data["heavy"]).all()


def test_padding_does_not_count() -> None:
    asked: dict[str, Any] = {"statistics": [Heavy(), Taken()], "progress": False, "probe": False}
    ids = torch.arange(2, 12)[None]
    alone = qkv.profile("random-gpt2", ids, **asked)
    padded = {
        "input_ids": torch.cat([nn.functional.pad(ids, (0, 4)), torch.arange(3, 17)[None]]),
        "attention_mask": torch.tensor([[1] * 10 + [0] * 4, [1] * 14]),
    }
    both = qkv.profile("random-gpt2", padded, **asked)
    for name in ("heavy", "taken", "heavy_by_head", "taken_by_head"):
        first = both.data[name].isel(text=0).values
        first = first if name.endswith("by_head") else first[..., :10]
        np.testing.assert_allclose(first, alone.data[name].isel(text=0), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ([Entropy()], "the name 'entropy' is taken"),
        ([Mass("sink_share", qkv.masks.Window(2))], "the name 'sink_share' is taken"),
        ([Mass("layer", qkv.masks.Window(2))], "the name 'layer' is taken"),
        ([Heavy(), Mass("heavy_by_head", qkv.masks.Window(2))], "the name 'heavy_by_head' is taken"),
        ([Heavy(), Heavy()], "a name of its own for each"),
        ([Heavy], "statistics holds the class Heavy"),
    ],
)
def test_what_profiles_and_surveys_refuse(statistics: list[Any], message: str, tmp_path: Path) -> None:
    with unchecked(), pytest.raises(InputError, match=message):
        qkv.profile("qkv-mini", "import os", statistics=statistics, progress=False)
    if "sink_share" not in message:  # a survey has no such column
        with unchecked(), pytest.raises(InputError, match=message):
            survey("qkv-mini", ["import os"], out=tmp_path, statistics=statistics)


class WrongByHead(Heavy):
    def by_head(self, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
        return values


def test_by_head_of_another_shape_is_refused() -> None:
    with unchecked(), pytest.raises(InputError, match=r"WrongByHead: by_head returned .* expected"):
        qkv.profile("qkv-mini", "import os", statistics=[WrongByHead()], progress=False)


# --- surveys ----------------------------------------------------------------------------------------------------------


def test_a_survey_keeps_means_and_histograms(made: Profile, tmp_path: Path) -> None:
    found = survey("qkv-mini", TEXTS, out=tmp_path, shards=2, statistics=[Sure(), Heavy()])
    table, data = found.heads(), made.data
    for name in ("heavy", "sure"):
        values = data[name].values.copy()
        if name == "sure":
            values[..., 0] = np.nan  # the first query of a causal text
        np.testing.assert_allclose(
            table[name], np.nanmean(np.moveaxis(values, 0, 2).reshape(4 * 6, -1), 1), rtol=1e-4, err_msg=name
        )
        assert (table[f"{name}_max"] <= np.nanmax(values) + 1e-6).all()
    assert list(found.quantities) == [*QUANTITIES, "heavy", "sure"]
    loaded = Survey.load(tmp_path / "survey.qkv.zip")
    assert loaded.quantities == found.quantities
    assert loaded.heads().equals(table)
    for draw in (survey_plots.texts, survey_plots.distribution):
        assert "heavy keys" in draw(loaded, "heavy").axes[0].get_xlabel() + draw(loaded, "heavy").axes[0].get_ylabel()
    titles = [axes.get_title(loc="left") for axes in survey_plots.heads(loaded).axes]
    assert "Heavy keys, keys" in titles


def test_what_surveys_refuse(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'taken' is a number for each key; expected one for each query"):
        own_survey(tmp_path / "keys", statistics=[Taken()])
    with pytest.raises(InputError, match=r"'ahead' is -\d.*histograms of a survey begin at 0"):
        own_survey(tmp_path / "negative", statistics=[Ahead()])
    found = own_survey(tmp_path / "own", statistics=[Heavy()])
    with pytest.raises(InputError, match=r"other settings: definition\.quantities\.heavy was present and is missing"):
        own_survey(tmp_path / "own")
    plain = own_survey(tmp_path / "plain", shards=5)
    for a, b in ((found, plain), (plain, found)):
        with pytest.raises(InputError, match=r"cannot be merged: quantities\.heavy is (present|missing)"):
            a.merge(b)
    two, three = (own_survey(tmp_path / f"{n}", statistics=[Mass("near", qkv.masks.Window(n), "near")]) for n in (2, 3))
    with pytest.raises(InputError, match=r"cannot be merged: quantities.near.own.parameters.mask is Window"):
        two.merge(three)


def _as_before(path: Path) -> Path:
    """The file as the first surveys were: other words, "share" for a unit, another order of quantities."""
    old = path.with_name("old.qkv.zip")
    names = [
        "entropy", "entropy_ratio", "sink", "self", "previous", "next", "local", "distance", "effective_keys",
        "sink_mass",
    ]  # fmt: skip
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(old, "w") as made:
        head = json.loads(archive.read("survey.json"))
        said = head["definition"]["quantities"]
        order = [list(said).index(name) for name in names]
        head["definition"]["quantities"] = {
            name: said[name] | {"unit": "share" if said[name]["unit"] == "1" else said[name]["unit"], "definition": "…"}
            for name in names
        }
        made.writestr("survey.json", json.dumps(head))
        for member in archive.namelist():
            if member == "survey.json":
                continue
            with archive.open(member) as file:
                x = np.lib.format.read_array(file, allow_pickle=False)
            part, what = member.removesuffix(".npy").split("/")[-2:]
            if part != "tokens" and what.split(".")[0] in (
                "count",
                "sum",
                "squares",
                "histogram",
                "minimum",
                "maximum",
            ):
                x = x[order]
            if what == "sketch_lengths":
                lengths = x.reshape(len(names), -1)
                ends = np.cumsum(x).reshape(lengths.shape)
                heads = lengths.shape[1]
                cuts = [(ends[q, h] - lengths[q, h], ends[q, h]) for q in order for h in range(heads)]
                x = lengths[order].ravel()
            if what == "sketch_bytes":
                whole = x
                continue
            with made.open(member, "w") as file:
                np.lib.format.write_array(file, x)
            if what == "sketch_lengths":
                with made.open(member.replace("lengths", "bytes"), "w") as file:
                    np.lib.format.write_array(file, np.concatenate([whole[a:b] for a, b in cuts]))
    return old


def test_surveys_of_before_load_and_merge(tmp_path: Path) -> None:
    now = own_survey(tmp_path)
    before = Survey.load(_as_before(tmp_path / "survey.qkv.zip"))
    assert before.definition == now.definition
    assert before.heads().equals(now.heads())
    parts = [tmp_path / "shards" / f"000{i}.qkv.zip" for i in range(3)]
    old = Survey.load(_as_before(parts[0]))
    merged = old.merge(Survey.load(parts[1])).merge(Survey.load(parts[2]))
    assert merged.heads().equals(now.heads())
    settings = tmp_path / "survey.json"
    said = json.loads(settings.read_text())
    said["definition"]["quantities"]["sink"] |= {"unit": "share", "definition": "weight on the first token"}
    settings.write_text(json.dumps(said))
    assert own_survey(tmp_path).heads().equals(now.heads()), "a survey goes on in a folder of before"
