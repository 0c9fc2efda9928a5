"""Check what the zarr arrays of a file declare, before zarr allocates or decompresses anything."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from qkv._untrusted import Budget, parse_json

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


def check_hierarchy(members: Mapping[str, bytes], budget: Budget) -> None:
    """Check all groups and arrays of a zarr hierarchy.

    Args:
        members: the files of the hierarchy by name.
        budget: the memory that the arrays may take.

    Raises:
        ValueError: for metadata that qkv does not write, arrays that are too large, and chunks that would not have the
            declared size.
    """
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
    """The size that a Zstandard frame declares for its contents (RFC 8878, section 3.1.1.1).

    Raises:
        ValueError: if it is no such frame, or does not declare a size.
    """
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
