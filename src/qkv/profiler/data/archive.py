"""Read and write profiles on disk: one zip file with a zarr hierarchy, written atomically.

A file may be a stranger's, so zarr only writes it. It is read here, and only as qkv writes it: all that it declares is
checked before anything is allocated.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
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
META = "zarr.json"
NUMBERS = {"bool", "float16", "float32", "float64"}
NUMBERS |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
STRING = "string"
STRING_BYTES = 64  # a pointer and a short string
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
    if not path.exists():
        raise InputError(f"path: no file at {str(path)!r}; expected a profile written by Profile.save")
    if path.is_dir():
        raise InputError(f"path: {str(path)!r} is a folder; expected a profile written by Profile.save")
    parts: dict[str, dict[str, xr.Dataset]] = {}
    with reading(path, "a profile written by Profile.save"):
        members, budget = read_zip(path, META)
        header = parse_json(members.pop(META))["attributes"]
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {str(header.get('format'))[:80]!r}, expected {FORMAT!r}")
        check_version(header, VERSION)
        for part in PARTS:
            members.pop(f"{part}/{META}", None)
            names = header.get(part, [])
            parts[part] = {name: _read_dataset(members, f"{part}/{name}/", budget) for name in names}
        if members:
            raise ValueError(f"{next(iter(members))[:80]} belongs to no array")
        return parts, dict(header["profile"])


def _read_dataset(members: dict[str, bytes], base: str, budget: Budget) -> xr.Dataset:
    """Take the data set in a folder out of the files of a zarr hierarchy."""
    attrs, variables = _metadata(members, base, "group")["attributes"], {}
    for member in [one for one in members if one.startswith(base)]:
        name, _, file = member.removeprefix(base).partition("/")
        if file == META:
            variables[name] = _read_array(members, f"{base}{name}/", budget)
    return xr.decode_cf(xr.Dataset(variables, attrs=attrs), mask_and_scale=False, decode_times=False)


def _metadata(members: dict[str, bytes], base: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_json(members.pop(base + META))
    if (found["zarr_format"], found["node_type"]) != (3, kind) or found.get("consolidated_metadata") is not None:
        raise ValueError(f"{base}{META} is not the metadata of this {kind}")
    return found


def _read_array(members: dict[str, bytes], base: str, budget: Budget) -> xr.Variable:
    """Take an array and its chunks out of the files of a zarr hierarchy, as far as qkv writes such arrays."""
    from numcodecs.vlen import VLenUTF8  # type: ignore[import-untyped]
    from numcodecs.zstd import decompress  # type: ignore[import-untyped]

    found = _metadata(members, base, "array")
    grid, kind, codecs = found["chunk_grid"], found["data_type"], [codec["name"] for codec in found["codecs"]]
    shape, chunk = _sizes(base, found["shape"]), _sizes(base, grid["configuration"]["chunk_shape"])
    first = "vlen-utf8" if kind == STRING else "bytes"
    little = found["codecs"][0].get("configuration", {}).get("endian", "little") == "little"
    if (
        (kind != STRING and kind not in NUMBERS) or codecs not in ([first], [first, "zstd"]) or not little
        or len(chunk) != len(shape) or 0 in chunk or grid["name"] != "regular"
        or found["chunk_key_encoding"] != KEYS or found.get("storage_transformers")
    ):  # fmt: skip
        raise ValueError(f"{base}{META} has a data type, codecs or chunks that qkv does not write")
    dtype = np.dtype(object if kind == STRING else kind)
    items, item = math.prod(chunk), STRING_BYTES if kind == STRING else dtype.itemsize
    budget.take((math.prod(shape) + items) * item)
    with np.errstate(over="raise"):
        values = np.full(shape, found["fill_value"], dtype)
    for member in [one for one in members if one.startswith(base)]:
        data, at = members.pop(member), member.removeprefix(base).removeprefix("c").removeprefix("/")
        index = [int(part) for part in at.split("/")] if at else []
        start = [i * m for i, m in zip(index, chunk, strict=True)]
        if "/".join(map(str, index)) != at or not all(0 <= i < n for i, n in zip(start, shape, strict=True)):
            raise ValueError(f"{member[:80]} is not a chunk of its array")
        size = frame_size(data) if "zstd" in codecs else len(data)
        if kind == STRING:
            budget.take(size)
        elif size != items * item:
            raise ValueError(f"{member[:80]} has {size} bytes, expected {items * item}")
        plain = bytes(decompress(data)) if "zstd" in codecs else data
        if kind == STRING and (len(plain) < 4 or struct.unpack_from("<I", plain)[0] != items):
            raise ValueError(f"{member[:80]} does not have {items} strings")
        decoded = VLenUTF8().decode(plain) if kind == STRING else np.frombuffer(plain, dtype.newbyteorder("<"))
        whole, place = decoded.reshape(chunk), tuple(slice(i, i + m) for i, m in zip(start, chunk, strict=True))
        values[place] = whole[tuple(slice(0, n - i) for i, n in zip(start, shape, strict=True))]
    attrs = {name: x for name, x in found.get("attributes", {}).items() if name != "_FillValue"}  # of zarr: NaN
    return xr.Variable(found["dimension_names"] or (), values, attrs)


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 32 or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{name} has the shape {str(value)[:80]}, expected a list of whole numbers")
    return tuple(value)


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
