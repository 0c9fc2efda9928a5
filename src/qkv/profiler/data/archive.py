"""Read and write profiles on disk: one zip file with a zarr hierarchy, written atomically."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import xarray as xr

from qkv._files import write_atomically
from qkv._packages import check_tested
from qkv._untrusted import check_version, parse_json, read_zip, reading
from qkv.errors import InputError
from qkv.profiler.data.variables import META, check_hierarchy

FORMAT = "qkv-profile"
VERSION = 2  # increase it when an older qkv could misread a file that this version writes


PARTS = ("groups", "residual")  # folders of data sets; the header has a list of names under each
AS_STORED: dict[str, Any] = {"mask_and_scale": False, "decode_times": False, "decode_timedelta": False}


def write_archive(path: Path, parts: dict[str, dict[str, xr.Dataset]], attrs: dict[str, Any]) -> None:
    """Write the data sets and attributes of a profile to `path`.

    The hierarchy is built in memory and zipped in one go: writing zarr straight into a zip rewrites its
    metadata and leaves duplicate members behind.
    """
    check_tested("zarr")
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
    """Read a file that `write_archive` wrote; raises `InputError` for any other file.

    The whole file is read into memory and checked first (`qkv.profiler.data.variables`): it may be a stranger's.
    """
    check_tested("zarr")
    from zarr.core.buffer import default_buffer_prototype
    from zarr.storage import MemoryStore

    if not path.exists():
        raise InputError(f"path: no file at {str(path)!r}; expected a profile written by Profile.save")
    if path.is_dir():
        raise InputError(f"path: {str(path)!r} is a folder; expected a profile written by Profile.save")
    parts: dict[str, dict[str, xr.Dataset]] = {part: {} for part in PARTS}
    with reading(path, "a profile written by Profile.save"):
        members, budget = read_zip(path, META)
        header = parse_json(members[META])["attributes"]
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {str(header.get('format'))[:80]!r}, expected {FORMAT!r}")
        check_version(header, VERSION)
        names = [name for part in PARTS for name in header.get(part, [])]
        if not all(isinstance(name, str) and "/" not in name for name in names) or len(names) > len(members):
            raise ValueError("its groups have no names")
        check_hierarchy(members, budget)
        buffer = default_buffer_prototype().buffer
        store = MemoryStore({name: buffer.from_bytes(data) for name, data in members.items()}, read_only=True)
        for part, datasets in parts.items():
            for name in header.get(part, []):
                with xr.open_zarr(store, group=f"{part}/{name}", consolidated=False, chunks=None, **AS_STORED) as data:
                    datasets[name] = data.load()
                for variable in datasets[name].variables.values():
                    variable.attrs.pop("_FillValue", None)  # of zarr: NaN
                arrays = {member.split("/")[2] for member in members if member.startswith(f"{part}/{name}/")}
                if len(arrays - {META}) != len(datasets[name].variables):
                    raise ValueError(f"some of the arrays of {name!r} cannot be read")
        return parts, dict(header["profile"])
