"""Read and write profiles on disk: one zip file with a zarr hierarchy, written atomically."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import xarray as xr

from qkv._files import write_atomically
from qkv._packages import check_version
from qkv.errors import InputError
from qkv.profiler.data.variables import with_current_names

FORMAT = "qkv-profile"
VERSION = 2  # increase it when an older qkv could misread a file that this version writes


PARTS = ("groups", "residual")  # folders of data sets; the header has a list of names under each


def write_archive(path: Path, parts: dict[str, dict[str, xr.Dataset]], attrs: dict[str, Any]) -> None:
    """Write the data sets and attributes of a profile to `path`.

    The hierarchy is built in memory and zipped in one go: writing zarr straight into a zip rewrites its
    metadata and leaves duplicate members behind.
    """
    check_version("zarr")
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
    write_atomically(path, file.getvalue())


def read_archive(path: Path) -> tuple[dict[str, dict[str, xr.Dataset]], dict[str, Any]]:
    """Read a file that `write_archive` wrote; raises `InputError` for any other file."""
    check_version("zarr")
    from zarr.storage import ZipStore

    header = _header(path)
    parts: dict[str, dict[str, xr.Dataset]] = {part: {} for part in PARTS}
    try:
        with ZipStore(path, mode="r") as store:
            for part, datasets in parts.items():
                for name in header.get(part, []):
                    with xr.open_zarr(store, group=f"{part}/{name}", consolidated=False, chunks=None) as data:
                        datasets[name] = with_current_names(data.load())
        return parts, dict(header["profile"])
    except InputError:
        raise
    except Exception as error:  # zip, zarr and codecs each have their own family of errors
        raise InputError(f"path: {str(path)!r} is a damaged profile ({_reason(error)})") from error


def _header(path: Path) -> dict[str, Any]:
    """The root attributes of the file; raises `InputError` if this version of qkv cannot read it."""
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
            f"path: {str(path)!r} is not a profile, or is truncated; expected a file written by Profile.save"
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
    """The first line of the error's message, at most 160 characters."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160]
