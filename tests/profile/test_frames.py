"""Export of tables to other programs: the same numbers, with units and definitions, in atomic writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import qkv
from conftest import refused
from qkv import Profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return qkv.profile("qkv-mini", "for name in names:\n    print(name)\n", progress=False)


def test_every_column_has_a_unit_and_a_definition(profile: Profile) -> None:
    for table in (profile.heads(), profile.sinks(), profile.types()):
        assert set(table.attrs["units"]) == set(table.attrs["definitions"]) == set(table.columns)
        assert all(table.attrs["units"].values())
        assert all(table.attrs["definitions"].values())


def test_exported_tables_have_a_row_for_every_head(profile: Profile, tmp_path: Path) -> None:
    heads = profile.heads()
    read = pd.read_csv(profile.export(tmp_path / "heads.csv"))
    np.testing.assert_allclose(read["entropy"], heads["entropy"], rtol=1e-6)
    np.testing.assert_allclose(read["alpha_first"], profile.sinks()["alpha_first"], rtol=1e-6)
    np.testing.assert_allclose(read["induction score"], profile.types()["induction"], rtol=1e-6)
    assert not read.columns.duplicated().any()
    parquet = pytest.importorskip("pyarrow.parquet").read_table(profile.export(tmp_path / "heads.parquet"))
    about = parquet.schema.field("distance").metadata
    assert about[b"units"] == b"tokens"
    assert b"distance" in about[b"definition"]
    np.testing.assert_allclose(parquet["entropy"].to_numpy(), heads["entropy"], rtol=1e-6)
    pytest.importorskip("polars")
    frame = profile.heads(frame="polars")
    assert frame.columns == list(heads.columns)
    np.testing.assert_allclose(frame["sink"].to_numpy(), heads["sink"], rtol=1e-6)


def test_zarr_folder_opens_with_xarray(profile: Profile, tmp_path: Path) -> None:
    path = profile.export(tmp_path / "profile.zarr")
    with xr.open_zarr(path, group="groups/self", consolidated=False, chunks=None) as data:
        xr.testing.assert_equal(data["entropy"].load(), profile.data["entropy"])
        assert data["entropy"].attrs["units"] == "nats"
    with xr.open_zarr(path, group="residual/blocks", consolidated=False, chunks=None) as data:
        assert data.sizes["depth"] == profile.data.sizes["layer"] + 1
    assert profile.export(path) == path, "over an older one"
    assert [p.name for p in tmp_path.iterdir()] == ["profile.zarr"]


def test_failed_export_keeps_the_old_file(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "heads.csv"
    target.write_text("old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(OSError, match="No space"):
        profile.export(target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["heads.csv"]


def test_export_does_not_replace_other_folders(profile: Profile, tmp_path: Path) -> None:
    for name, match in (("heads.csv", "is a folder"), ("other.zarr", "not a zarr")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "letters.txt").write_text("dear")
        with refused("path", match):
            profile.export(tmp_path / name)
        assert (tmp_path / name / "letters.txt").read_text() == "dear"


def test_export_rejects_unknown_formats_and_missing_libraries(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("path", match="suffix"):
        profile.export(tmp_path / "heads.xlsx")
    with refused("path", match="does not exist"):
        profile.export(tmp_path / "no" / "heads.csv")
    with refused("frame", match="'arrow'"):
        profile.heads(frame="arrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("frame", match="not installed"):
        profile.heads(frame="polars")


def test_page_of_quantities_is_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("make_quantities", docs / "make_quantities.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (docs / "quantities.md").read_text(), "run docs/make_quantities.py"
