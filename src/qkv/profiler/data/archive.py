"""Read and write profiles on disk: one zip file with a zarr hierarchy, written atomically.

All that a file declares is checked before anything is allocated: it may be a stranger's.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from qkv._files import write_atomically
from qkv._packages import check_tested
from qkv._untrusted import Budget, check_version, parse_json, read_zip, reading
from qkv.errors import InputError

FORMAT = "qkv-profile"
VERSION = 2  # increase it when an older qkv could misread a file that this version writes


PARTS = ("groups", "residual")  # folders of data sets; the header has a list of names under each
AS_STORED: dict[str, Any] = {"mask_and_scale": False, "decode_times": False, "decode_timedelta": False}

META = "zarr.json"
REQUIRED = {"shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"}
NUMBERS = {"bool"} | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
NUMBERS |= {"float16", "float32", "float64"}
STRING = "string"
STRING_BYTES = 64  # a pointer and a short string
SPARE_CHUNKS = 4096
"""Chunks that a file may leave out, besides four for each member: zarr visits them all."""
KEYS = {"name": "default", "configuration": {"separator": "/"}}
ZSTD_MAGIC = 0xFD2FB528


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
    """Read a file that `write_archive` wrote; raises `InputError` for any other file."""
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


def check_hierarchy(members: Mapping[str, bytes], budget: Budget) -> None:
    """Check all groups and arrays of a zarr hierarchy, given its files by name, before any of them is allocated."""
    left = SPARE_CHUNKS + 4 * len(members)
    chunks: dict[str, list[str]] = {}
    for name in members:
        if not name.endswith(META):
            chunks.setdefault(name.rpartition("/c/")[0] or name.removesuffix("/c"), []).append(name)
    for name, data in members.items():
        if name.rpartition("/")[2] != META:
            continue
        found = parse_json(data)
        if not isinstance(found, dict) or found.get("zarr_format") != 3:
            raise ValueError(f"{name} is not the metadata of zarr 3")
        if found.get("node_type") == "array":
            own = chunks.pop(name.removesuffix(f"/{META}"), [])
            left -= _check_array(name, found, {chunk: members[chunk] for chunk in own}, budget)
            if left < 0:
                raise ValueError("it declares too many chunks")
        elif found.get("node_type") != "group" or found.get("consolidated_metadata") is not None:
            raise ValueError(f"{name} is not the metadata of a group or an array")
    if chunks:
        raise ValueError(f"{next(iter(chunks.values()))[0][:80]} belongs to no array")


def _check_array(name: str, found: Mapping[str, Any], stored: Mapping[str, bytes], budget: Budget) -> int:
    """Check an array and its chunks; returns the number of its chunks, those that are not stored included."""
    missing = REQUIRED - set(found)
    if missing:
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    shape, kind = _sizes(name, found["shape"]), found["data_type"]
    names = found.get("dimension_names")
    if names is not None and not (isinstance(names, list) and len(set(map(str, names))) == len(names) == len(shape)):
        raise ValueError(f"{name} has the dimensions {str(names)[:80]!r}, expected {len(shape)} different names")
    grid, keys = found["chunk_grid"], found["chunk_key_encoding"]
    if not isinstance(grid, dict) or grid.get("name") != "regular" or keys != KEYS or found.get("storage_transformers"):
        raise ValueError(f"{name} has chunks in another order than qkv writes them")
    chunk = _sizes(name, grid["configuration"]["chunk_shape"])
    if len(chunk) != len(shape) or 0 in chunk:
        raise ValueError(f"{name} has chunks of shape {chunk} for an array of shape {shape}")
    if kind != STRING and kind not in NUMBERS:
        raise ValueError(f"{name} has the data type {str(kind)[:80]!r}, expected numbers or strings")
    _check_fill_value(name, kind, found["fill_value"])
    counts = [math.ceil(n / m) for n, m in zip(shape, chunk, strict=True)]
    number, items = math.prod(counts), math.prod(chunk)
    item = STRING_BYTES if kind == STRING else np.dtype(kind).itemsize
    budget.take(number * items * item)
    zstd = _compressed(name, found["codecs"], "vlen-utf8" if kind == STRING else "bytes")
    base = name.removesuffix(META)
    for member, data in stored.items():
        at = member.removeprefix(base).removeprefix("c").removeprefix("/")
        index = [int(part) for part in at.split("/")] if at else []
        if (
            "/".join(map(str, index)) != at
            or len(index) != len(counts)
            or any(i >= n for i, n in zip(index, counts, strict=True))
        ):
            raise ValueError(f"{member[:80]} is not a chunk of its array")
        size = frame_size(data) if zstd else len(data)
        if kind == STRING:
            budget.take(size)
            _check_strings(member, data, items, zstd)
        elif size != items * item:
            raise ValueError(f"{member[:80]} has {size} bytes, expected {items * item}")
    return number


def _check_fill_value(name: str, kind: str, value: Any) -> None:
    """Raise ValueError for a number that the data type cannot hold, of which numpy would only warn."""
    if kind.startswith("float") and isinstance(value, int | float | str):
        try:
            with np.errstate(over="raise"):
                np.dtype(kind).type(value)
        except (FloatingPointError, OverflowError, ValueError):
            raise ValueError(f"{name} has the fill value {str(value)[:80]!r}, expected a {kind}") from None


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 32 or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{name} has the shape {str(value)[:80]}, expected a list of whole numbers")
    return tuple(value)


def _compressed(name: str, codecs: Any, first: str) -> bool:
    """Whether the chunks are compressed by Zstandard; raises ValueError for any other codec."""
    names = [codec["name"] for codec in codecs]
    if names not in ([first], [first, "zstd"]):
        raise ValueError(f"{name} has the codecs {str(names)[:80]}, expected {first!r} and 'zstd'")
    return len(names) == 2


def frame_size(data: bytes) -> int:
    """The size that a Zstandard frame declares for its contents (RFC 8878, section 3.1.1.1)."""
    try:
        magic, descriptor = struct.unpack_from("<IB", data)
        kind, single = descriptor >> 6, descriptor >> 5 & 1
        at = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]  # after the window and the number of the dictionary
        size = struct.unpack_from(("<B", "<H", "<I", "<Q")[kind], data, at)[0] + 256 * (kind == 1)
    except struct.error:
        raise ValueError("a chunk is truncated") from None
    if magic != ZSTD_MAGIC or (kind == 0 and not single):
        raise ValueError("a chunk is not compressed by Zstandard, or does not declare its size")
    return int(size)


def _check_strings(member: str, data: bytes, items: int, zstd: bool) -> None:
    """Raise ValueError if a chunk of strings has another number of strings than its array declares."""
    from numcodecs.zstd import decompress  # type: ignore[import-untyped]

    plain = bytes(decompress(data)) if zstd else data
    if len(plain) < 4 or struct.unpack_from("<I", plain)[0] != items:
        raise ValueError(f"{member[:80]} does not have {items} strings")
