"""Read and write profiles on disk: a zip of a JSON header and a safetensors file, written atomically.

The header, profile.json, has the attributes, and the dimensions, data type and shape of every array. In
arrays.safetensors an array is a tensor of bytes, compressed by zlib: its numbers as unsigned integers, shifted right by
the low bits that are 0 in all of them; first the highest byte of every number, then the next lower one, and so on. The
last bytes of a statistic are close to random, so zlib only counts how frequent bytes are, in short blocks, and looks
for runs. What is the same in neighbouring heads or layers is stored once. The numbers of a head may be in the ascending
order of a statistic that is related to them, since like numbers are then in the same blocks.

A file may be a stranger's: all that it declares is checked before anything is allocated.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from qkv._files import write_atomically
from qkv._untrusted import DIRECTORY, Budget, check_version, parse_json, read_zip, reading
from qkv.errors import InputError

FORMAT = "qkv-profile"
VERSION = 4  # increase it when an older qkv could misread a file that this version writes

PARTS = ("groups", "residual")  # the header has the data sets of each by name
HEADER, ARRAYS = "profile.json", "arrays.safetensors"
NUMBERS = {"bool", "float16", "float32", "float64"}
NUMBERS |= {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
STRING_BYTES = 64  # a pointer and a short string

SIGNIFICANT_BITS = 12
ROUNDED = {"significant_bits": SIGNIFICANT_BITS}  # attributes of a rounded profile
ORDERED_BY = {
    "sink": "entropy", "previous": "self", "effective_keys": "entropy", "received": "self", "local": "self",
    "streaming_mass": "effective_keys", "first_contribution": "sink", "max_logit": "lse", "query_norm": "max_logit",
    "key_norm": "query_norm", "value_norm": "key_norm", "map_mean": "map_max",
}  # fmt: skip
"""Statistics, and those before them in a data set by which the numbers of each head are put in order in a file."""
OF_TOKENS = {"query", "key", "token", "query_bin", "key_bin"}


def rounded(x: xr.Variable) -> np.ndarray:
    """The values of a variable; statistics of queries, keys and pairs of them rounded to 12 significant bits.

    They are rounded to nearest, ties to even, so the relative error is at most 2⁻¹². Arrays of whole numbers, such as
    counts and positions, stay exact, and so do zeros and infinities. A NaN stays NaN, and no finite number becomes
    infinite. A subnormal number has at most the absolute error of the smallest normal one.
    """
    values: np.ndarray = x.values
    spare = np.finfo(values.dtype).nmant + 1 - SIGNIFICANT_BITS if values.dtype.kind == "f" else 0
    if spare <= 0 or not OF_TOKENS & set(x.dims) or ((np.rint(values) == values) | np.isnan(values)).all():
        return values
    codes = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    nearest = codes >> spare
    nearest &= 1
    nearest += codes + ((1 << (spare - 1)) - 1)
    nearest >>= spare
    nearest <<= spare
    found = nearest.view(values.dtype)
    overflow = np.isinf(found) & np.isfinite(values)
    nearest[overflow] = codes[overflow] >> spare << spare
    found[np.isnan(values)] = np.nan
    return found


def write_archive(path: Path, parts: dict[str, dict[str, xr.Dataset]], attrs: dict[str, Any], *, exact: bool) -> None:
    """Write the data sets and attributes of a profile to `path`, rounded unless `exact`."""
    from safetensors.numpy import save

    attrs = attrs if exact else attrs | ROUNDED
    header: dict[str, Any] = {"format": FORMAT, "format_version": VERSION, "profile": attrs}
    tensors = dict[str, np.ndarray]()
    for part in PARTS:
        header[part] = {}
        for name, data in parts[part].items():
            variables = {str(variable): _described(str(variable), data) for variable in data.variables}
            header[part][name] = {"attrs": data.attrs, "variables": variables}
            values = dict[str, np.ndarray]()
            for variable, about in variables.items():
                if about["dtype"] != "string":
                    x = data.variables[variable]
                    values[variable] = x.values if exact else rounded(x)
                    packed = _packed(values, variable, about)
                    tensors[f"{part}/{name}/{variable}"] = np.frombuffer(packed, np.uint8)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(HEADER, json.dumps(header, allow_nan=False), zipfile.ZIP_DEFLATED)
        archive.writestr(ARRAYS, save(tensors), zipfile.ZIP_STORED)
    write_atomically(path, file.getbuffer())


def _described(name: str, data: xr.Dataset) -> dict[str, Any]:
    """What the header says of a variable. It also has the strings; numbers are in a tensor."""
    x = data.variables[name]
    about = {"dims": list(x.dims), "shape": list(x.shape), "coordinate": name in data.coords, "attrs": x.attrs}
    if x.dtype.kind in "OUT":
        return about | {"dtype": "string", "strings": [str(text) for text in x.values.ravel()]}
    if x.dtype.name not in NUMBERS:
        raise InputError(f"groups: {name!r} has the data type {x.dtype}, expected numbers or strings")
    return about | {"dtype": x.dtype.name}


def _order(by: np.ndarray, repeats: list[int]) -> np.ndarray:
    """The places of the numbers stored of each head, in ascending order of the first 16 bits of another array's."""
    codes = by[tuple(slice(None, None, max(repeat, 1)) for repeat in repeats)].view("u4") >> 16
    order = np.argsort(codes.astype("u2").reshape(math.prod(codes.shape[:3]), -1), axis=1, kind="stable")
    order += np.arange(len(order))[:, None] * order.shape[1]
    return order.ravel()


def _packed(arrays: dict[str, np.ndarray], name: str, about: dict[str, Any]) -> bytes:
    """The compressed bytes of an array, the last of `arrays`; adds to its description what `_unpacked` needs."""
    arrays[name] = values = np.asarray(arrays[name], arrays[name].dtype.newbyteorder("="), order="C")
    codes, about["repeats"] = values.view(f"u{values.itemsize}"), []
    for axis, size in enumerate(values.shape):
        along = np.moveaxis(codes, axis, 0)
        steps = [at for at in range(1, size) if (along[at] != along[at - 1]).any()] if axis < values.ndim - 1 else [1]
        about["repeats"].append(repeat := int(np.gcd.reduce([size, *steps])))
        codes = codes[(slice(None),) * axis + (slice(None, None, max(repeat, 1)),)]
    by = arrays.get(ORDERED_BY.get(name, ""))
    if by is not None and by.shape == values.shape and by.dtype == values.dtype == np.float32 and by.size:
        about["ordered_by"] = ORDERED_BY[name]
        codes = codes.ravel()[_order(by, about["repeats"])]
    used = int(np.bitwise_or.reduce(codes, axis=None))
    about["shift"] = shift = max((used & -used).bit_length() - 1, 0)
    about["bytes"] = size = max(-(-(used >> shift).bit_length() // 8), 1)
    compressor = zlib.compressobj(memLevel=5, strategy=zlib.Z_RLE)  # blocks of 2,048 bytes
    places = [shift + 8 * at for at in reversed(range(size))]
    return b"".join([*(compressor.compress((codes >> at).astype(np.uint8).data) for at in places), compressor.flush()])


def read_archive(path: Path) -> tuple[dict[str, dict[str, xr.Dataset]], dict[str, Any]]:
    """Read a file that `write_archive` wrote; raises `InputError` for any other file."""
    if not path.exists():
        raise InputError(f"path: no file at {str(path)!r}; expected a profile written by Profile.save")
    if path.is_dir():
        raise InputError(f"path: {str(path)!r} is a folder; expected a profile written by Profile.save")
    parts: dict[str, dict[str, xr.Dataset]] = {}
    with reading(path, "a profile written by Profile.save"):
        members, budget = read_zip(path, HEADER)
        header = parse_json(members[HEADER])
        if header.get("format") != FORMAT:
            raise ValueError(f"its format is {str(header.get('format'))[:80]!r}, expected {FORMAT!r}")
        check_version(header, VERSION)
        if set(members) != {HEADER, ARRAYS}:
            raise ValueError(f"its members are {str(sorted(members))[:80]}, expected {HEADER} and {ARRAYS}")
        tensors = _tensors(members.pop(ARRAYS), budget)
        for part in PARTS:
            parts[part] = {n: _read_dataset(x, tensors, f"{part}/{n}", budget) for n, x in header[part].items()}
        if tensors:
            raise ValueError(f"the tensor {next(iter(tensors))[:80]!r} belongs to no array")
        return parts, dict(header["profile"])


def _tensors(data: bytes, budget: Budget) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, which are all lists of bytes."""
    from safetensors.numpy import load

    if int.from_bytes(data[:8], "little") > DIRECTORY:
        raise ValueError("the list of its tensors is too long")
    budget.take(len(data))
    tensors: dict[str, np.ndarray] = load(data)
    if any(x.dtype != np.uint8 or x.ndim != 1 for x in tensors.values()):
        raise ValueError("one of its tensors is not a list of bytes")
    return tensors


def _read_dataset(about: dict[str, Any], tensors: dict[str, np.ndarray], name: str, budget: Budget) -> xr.Dataset:
    """The data set that the header describes, whose numbers are taken out of the tensors."""
    variables, coords = dict[str, xr.Variable](), dict[str, xr.Variable]()
    for variable, entry in about["variables"].items():
        dims, shape = entry["dims"], entry["shape"]
        if len(set(dims)) != len(dims) or len(shape) != len(dims) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{variable[:80]!r} has the dimensions {str(dims)[:80]} and the shape {str(shape)[:80]}")
        if entry["dtype"] == "string":
            texts = [text for text in entry["strings"] if isinstance(text, str)]
            budget.take(STRING_BYTES * len(texts))
            values = np.array([*texts, None], object)[:-1].reshape(shape)
        else:
            values = _unpacked(tensors.pop(f"{name}/{variable}"), entry, variables, budget)
        (coords if entry["coordinate"] else variables)[variable] = xr.Variable(dims, values, dict(entry["attrs"]))
    return xr.Dataset(variables, coords, dict(about["attrs"]))


def _unpacked(packed: np.ndarray, about: dict[str, Any], before: dict[str, xr.Variable], budget: Budget) -> np.ndarray:
    """The array in the bytes that `_packed` wrote; ValueError if its description or its size is another."""
    shape, repeats, shift, size = (about[name] for name in ("shape", "repeats", "shift", "bytes"))
    if about["dtype"] not in NUMBERS or len(repeats) != len(shape):
        raise ValueError(f"an array has the data type {str(about['dtype'])[:80]!r}, or not a repeat for each dimension")
    dtype = np.dtype(about["dtype"])
    stored = [n // max(repeat, 1) for n, repeat in zip(shape, repeats, strict=True)]
    items = math.prod(stored)
    if (
        not all(type(n) is int and n >= 0 for n in (*repeats, shift, size))
        or [n * repeat for n, repeat in zip(stored, repeats, strict=True)] != shape
        or not 1 <= size <= dtype.itemsize or shift >= 8 * dtype.itemsize
    ):  # fmt: skip
        raise ValueError(f"an array has repeats {str(repeats)[:80]}, shift {shift!r:.80} or bytes {size!r:.80}")
    budget.take(max(math.prod(shape), 1) * dtype.itemsize + items * (dtype.itemsize + size))
    inflater = zlib.decompressobj()
    plain = inflater.decompress(packed.data, items * size + 1)
    if len(plain) != items * size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"an array has not the {items * size} bytes that it declares")
    codes = np.zeros(stored, f"u{dtype.itemsize}")
    for part in np.frombuffer(plain, np.uint8).reshape(size, *stored):
        codes <<= 8 if dtype.itemsize > 1 else 0
        codes |= part
    codes <<= shift
    if "ordered_by" in about:
        by = before.get(str(about["ordered_by"]))
        if by is None or by.shape != tuple(shape) or not by.dtype == dtype == np.float32:
            raise ValueError(
                f"an array is ordered_by {str(about['ordered_by'])[:80]!r}, no array of its shape before it"
            )
        budget.take(items * 16)
        ordered, codes = codes, np.empty_like(codes)
        codes.reshape(-1)[_order(by.values, repeats)] = ordered.ravel()
    for axis, repeat in enumerate(repeats):
        codes = codes.repeat(repeat, axis) if repeat > 1 else codes
    return codes.astype(dtype) if dtype.kind == "b" else codes.view(dtype)
