"""A profile on disk: one zip file holding a zarr hierarchy, written whole or not at all."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import xarray as xr

from qkv._files import write_whole
from qkv.errors import InputError
from qkv.profiler.data.variables import as_today

FORMAT = "qkv-profile"
VERSION = 2  # raise when an older qkv could misread what this one writes


PARTS = ("groups", "residual")  # folders of data sets, and the lists of their names in the header


def write_archive(path: Path, parts: dict[str, dict[str, xr.Dataset]], attrs: dict[str, Any]) -> None:
    """Write the data sets and attributes of a profile to `path`.

    The hierarchy is built in memory and zipped in one go: writing zarr straight into a zip rewrites its
    metadata and leaves duplicate members behind.
    """
    import zarr
    from zarr.storage import MemoryStore

    members: dict[str, Any] = {}
    store = MemoryStore(members)
    root = zarr.group(store, zarr_format=3)
    names = {part: list(parts.get(part, {})) for part in PARTS}
    root.attrs.update({"format": FORMAT, "format_version": VERSION, "profile": attrs} | names)
    for part, datasets in parts.items():
        for name, data in datasets.items():
            data.to_zarr(store, group=f"{part}/{name}", mode="w", consolidated=False, zarr_format=3)

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # zarr has compressed the chunks already
        for member, buffer in members.items():
            archive.writestr(member, buffer.to_bytes())
    write_whole(path, file.getvalue())


def read_archive(path: Path) -> tuple[dict[str, dict[str, xr.Dataset]], dict[str, Any]]:
    """Read what `write_archive` wrote; anything else is refused with one sentence."""
    from zarr.storage import ZipStore

    header = _header(path)
    parts: dict[str, dict[str, xr.Dataset]] = {part: {} for part in PARTS}
    try:
        with ZipStore(path, mode="r") as store:
            for part, datasets in parts.items():
                for name in header.get(part, []):
                    with xr.open_zarr(store, group=f"{part}/{name}", consolidated=False, chunks=None) as data:
                        datasets[name] = as_today(data.load())
        return parts, dict(header["profile"])
    except Exception as error:  # zip, zarr and codecs each have their own family of errors
        raise InputError(f"path: {str(path)!r} is a damaged profile ({_reason(error)})") from error


def _header(path: Path) -> dict[str, Any]:
    """The root attributes, once they prove the file to be a profile that this version can read."""
    if not path.exists():
        raise InputError(f"path: no file at {str(path)!r}; expected a profile written by Profile.save")
    if path.is_dir():
        raise InputError(f"path: {str(path)!r} is a folder; expected a profile written by Profile.save")
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read("zarr.json"))["attributes"]
            foreign = header.get("format") != FORMAT
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, EOFError) as error:
        raise InputError(
            f"path: {str(path)!r} is not a profile, or is cut short; expected a file written by Profile.save"
        ) from error
    if foreign:
        raise InputError(f"path: {str(path)!r} is not a profile; expected a file written by Profile.save")
    version = header.get("format_version")
    if not isinstance(version, int) or version > VERSION:
        raise InputError(
            f"path: {str(path)!r} has profile format {version}; this version of qkv reads formats up to "
            f"{VERSION}: update qkv"
        )
    return header


def _reason(error: Exception) -> str:
    """The first line of an error, short enough for one sentence."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
