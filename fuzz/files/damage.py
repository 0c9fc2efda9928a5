"""Random damage to a file: to its bytes, or to contents that stay well formed."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load, save

MIB = 2**20
HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 7, 2**31, 2**40, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"), None, True, "",
    "x", "../x", "/dev/zero", "\ud800", "é" * 1000, "2", [], {}, [2**40], [2**40, 2**40], [[[]]], {"x": {}}, [None] * 9,
)  # fmt: skip
DEEP = 100_000
TEXTS = (
    ("brackets", b"[" * DEEP), ("braces", b'{"a":' * DEEP), ("closed brackets", b"[" * DEEP + b"]" * DEEP),
    ("empty lists", b"[" + b"[]," * (3 * MIB) + b"[]]"), ("digits", b"9" * DEEP), ("a long text", b"x" * (8 * MIB)),
    ("surrogate", b'"\\ud800"'), ("not UTF-8", b"\xff\xfe"), ("NUL", b"\0" * 100), ("NaN", b"NaN"),
)  # fmt: skip


def damaged(data: bytes, name: str, random: Random) -> tuple[bytes, str, bool]:
    """A damaged copy of a file, what was done to it, and whether only its bytes were changed, not its meaning."""
    kinds: list[Callable[[bytes, Random], tuple[bytes, str]]] = [_bytes]
    if name.endswith((".json", ".part")):
        kinds += [_json, _json, _text]
    elif name.endswith(".jsonl"):
        kinds += [_lines, _text]
    elif name.endswith(".toml"):
        kinds += [_toml, _text]
    elif name.endswith(".zip"):
        kinds += [_zip, _zip, _zip, _bomb]
    elif name.endswith(".safetensors"):
        kinds += [_safetensors, _safetensors]
    elif name.endswith(".gguf"):
        kinds += [_gguf, _gguf, _gguf]
    kind = random.choice(kinds)
    made, what = kind(data, random)
    return made, what, kind is _bytes


def _gguf(data: bytes, random: Random) -> tuple[bytes, str]:
    """Another number in the header: a count, a length, a type, an offset or an entry of the metadata."""
    end = data.index(b"output_norm.weight") + 60
    form = random.choice(["<I", "<Q", "<f"])
    at = random.randrange(4, end - struct.calcsize(form))
    value = random.choice([0, 1, 2, 7, 255, 2**31, 2**32 - 1] + [2**40, 2**60, 2**63, 2**64 - 1] * (form == "<Q"))
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :], f"{value} at {at} as {form}"


# --- bytes ------------------------------------------------------------------------------------------------------------


def _bytes(data: bytes, random: Random) -> tuple[bytes, str]:
    what = random.choice(["cut", "flip", "flip", "flip", "overwrite", "zero", "insert", "delete", "append", "noise"])
    made = bytearray(data)
    at = random.randrange(len(data) + 1)
    length = min(random.choice([1, 2, 4, 8, 64, 1000]), len(data) - at)
    if what == "cut":
        del made[at:]
    elif what == "flip":
        for _ in range(random.choice([1, 1, 1, 2, 8])):
            made[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif what == "overwrite":
        made[at : at + length] = random.randbytes(length)
    elif what == "zero":
        made[at : at + length] = bytes(length)
    elif what == "insert":
        made[at:at] = random.randbytes(length or 3)
    elif what == "delete":
        del made[at : at + max(length, 1)]
    elif what == "append":
        made += random.randbytes(random.choice([1, 22, 1000]))
    else:
        made = bytearray(random.randbytes(random.choice([0, 1, 8, 22, 100, 5000])))
    return bytes(made), f"{what} at {at}"


# --- JSON and TOML ----------------------------------------------------------------------------------------------------


def _places(found: Any) -> list[tuple[Any, Any]]:
    """All containers with the keys of their entries."""
    places, waiting = [], [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))
            places += [(one, key) for key in keys]
            waiting += [one[key] for key in keys]
    return places


def _changed(found: Any, random: Random) -> str:
    """Change one entry in place."""
    places = _places(found)
    if not places:
        return "nothing"
    where, key = random.choice(places)
    what = random.choice(["value", "value", "value", "delete", "rename", "nest"])
    if what == "delete":
        del where[key]
    elif what == "rename" and isinstance(where, dict):
        where[str(key)[:-1]] = where.pop(key)
    elif what == "nest":
        for _ in range(random.choice([1, 50, 150])):
            where[key] = [where[key]]
    else:
        where[key] = random.choice(HOSTILE)
        return f"{key!r} is {str(where[key])[:40]!r}".encode("ascii", "replace").decode()
    return f"{what} {key!r}"


def _json(data: bytes, random: Random) -> tuple[bytes, str]:
    found = json.loads(data)
    what = _changed(found, random)
    return json.dumps(found).encode(), what


def _lines(data: bytes, random: Random) -> tuple[bytes, str]:
    lines = data.decode().splitlines()
    at = random.randrange(len(lines))
    made, what = _json(lines[at].encode(), random)
    lines[at] = made.decode()
    return "\n".join(lines).encode(), f"line {at}: {what}"


def _toml(data: bytes, random: Random) -> tuple[bytes, str]:
    lines = data.decode().splitlines()
    at = random.randrange(len(lines))
    name = lines[at].partition("=")[0] or "x"
    value = random.choice(
        [*map(str, (-1, 0, 2**40, 2**63, 10**400)), "9" * 5000, "1e400", "nan", "''", "[]", "{}", "true", "2020-13-01",
         "[" * DEEP, "{a=" * 900, "[1, 'x']", "'x'", "a.b", "1979-05-27T07:32:00Z"]
    )  # fmt: skip
    lines[at] = f"{name} = {value}"
    return "\n".join(lines).encode(), f"{name} = {value[:40]}"


def _text(data: bytes, random: Random) -> tuple[bytes, str]:
    at = random.randrange(len(data) + 1)
    what, text = random.choice(TEXTS)
    if random.random() < 0.5:
        return text, f"only {what}"
    return data[:at] + text + data[at:], f"{what} at {at}"


# --- zip --------------------------------------------------------------------------------------------------------------


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def _zip(data: bytes, random: Random) -> tuple[bytes, str]:
    """Damage one member; the checksums are right."""
    members = _members(data)
    name = random.choice(sorted(members))
    member = members[name]
    if name.endswith(".json") and random.random() < 0.8:
        made, what = _json(member, random)
    elif name.endswith(".npy") and random.random() < 0.8:
        made, what = _npy(member, random)
    elif name.endswith(".safetensors") and random.random() < 0.8:
        made, what = random.choice([_safetensors, _stream])(member, random)
    elif random.random() < 0.2:
        del members[name]
        return _zipped(members), f"{name} is missing"
    elif random.random() < 0.2:
        return _zipped(members | {random.choice(["../x", "/tmp/x", "c/0", f"{name}/c/0", "groups/x"]): member}), "new"
    else:
        made, what = _bytes(member, random)
    return _zipped(members | {name: made}), f"{name}: {what}"


def _stream(data: bytes, random: Random) -> tuple[bytes, str]:
    """A tensor of bytes of a profile that is another stream of zlib, or is none."""
    tensors = load(data)
    name = random.choice(sorted(tensors))
    plain = zlib.decompress(tensors[name])
    streams = {"of 256 MiB": _zlib(256), "of 1 MiB": _zlib(1), "cut": bytes(tensors[name])[: random.randrange(20)]}
    streams |= {"longer": zlib.compress(plain + b"x"), "random": zlib.compress(random.randbytes(len(plain)))}
    what = random.choice(sorted(streams))
    return save(tensors | {name: np.frombuffer(streams[what], np.uint8)}), f"{name}: a stream {what}"


@cache
def _zlib(mib: int) -> bytes:
    return zlib.compress(bytes(mib * MIB), 1)


class _Planted:
    """An object whose pickle writes a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("planted", "w")


def _npy(data: bytes, random: Random) -> tuple[bytes, str]:
    """An array with another header, or of objects."""
    x = np.lib.format.read_array(io.BytesIO(data))
    what = random.choice(["shape", "dtype", "object", "reshape", "nested"])
    header = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False, "shape": x.shape}
    file = io.BytesIO()
    if what == "object":
        header |= {"descr": "|O", "shape": ()}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue() + pickle.dumps(_Planted()), what
    if what == "nested":
        text = b"(" * 9000
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text, what
    if what == "reshape":
        np.lib.format.write_array(file, x.reshape(-1)[: random.randrange(x.size + 1)])
        return file.getvalue(), what
    if what == "dtype":
        with np.errstate(invalid="ignore"):
            np.lib.format.write_array(file, x.astype(random.choice(["<f8", "<i8", "<i4", "|b1", "<U4", "<c16"])))
        return file.getvalue(), what
    header["shape"] = random.choice([(2**40,), (2**62, 4), (0,), (-1,), (2**40, 0), (1,) * 40])
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + x.tobytes(), f"shape {header['shape']}"


@cache
def _zeros(mib: int) -> bytes:
    """Deflated zeros: a block of 1 MiB, repeated."""
    made = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = made.compress(bytes(MIB)) + made.flush(zlib.Z_FULL_FLUSH)
    return block * mib + made.flush()


@cache
def _many_members() -> bytes:
    return _zipped({f"{n}": b"" for n in range(70_000)})


def _bomb(data: bytes, random: Random) -> tuple[bytes, str]:
    """A member that inflates to 512 MiB, with a true or a false size, once or nine times; or very many members."""
    what = random.choice(["true size", "false size", "many members", "nine times"])
    if what == "many members":
        return _many_members(), what
    members = _members(data)
    name = random.choice(sorted(members))
    size = len(members.pop(name)) if what == "false size" else 512 * MIB
    members.pop(name, None)
    return with_bomb(members, name, size, 512, 9 if what == "nine times" else 1), f"{name}: {what}"


def with_bomb(members: dict[str, bytes], name: str, size: int, mib: int, copies: int = 1) -> bytes:
    """A zip file with one more member, of zeros.

    Args:
        members: the other members.
        name: the name of the member.
        size: the size that it declares.
        mib: the MiB to which it inflates.
        copies: how often the list of members has it.
    """
    body, packed = _zipped(members), _zeros(mib)
    count, length, start = struct.unpack_from("<HLL", body, body.rindex(b"PK\5\6") + 10)
    about = struct.pack("<HHHHHLLLHH", 20, 0, 8, 0, 33, 0, len(packed), size, len(name), 0)
    local = b"PK\3\4" + about + name.encode()
    central = b"PK\1\2\x14\0" + about + struct.pack("<HHHLL", 0, 0, 0, 0, start) + name.encode()
    directory = body[start : start + length] + central * copies
    at, count = start + len(local) + len(packed), count + copies
    tail = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, count, count, len(directory), at, 0)
    return body[:start] + local + packed + directory + tail


# --- safetensors ------------------------------------------------------------------------------------------------------


def _safetensors(data: bytes, random: Random) -> tuple[bytes, str]:
    """Change the header, or its declared length."""
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    if random.random() < 0.15:
        length = random.choice([0, 1, 2**32, 2**62, 2**64 - 1, len(data)])
        return length.to_bytes(8, "little") + data[8:], f"a header of {length} bytes"
    if random.random() < 0.15:
        text = random.choice([b"[" * DEEP, b'{"a":' * DEEP, b"{}", b"null", b'{"a":1}'])
        return len(text).to_bytes(8, "little") + text + rest, f"the header {text[:8]!r}"
    if random.random() < 0.3:
        name = random.choice(sorted(x for x in header if x != "__metadata__"))
        header[name]["dtype"] = random.choice(["I32", "F16", "F64", "BOOL", "F8_E4M3", "F4", "C64", "U64", "X"])
        what = f"{name} is {header[name]['dtype']}"
        if header[name]["dtype"] == "I32":
            header = {n: x | {"dtype": "I32"} if n != "__metadata__" else x for n, x in header.items()}
    else:
        what = _changed(header, random)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest, what


def other_place(folder: Path, name: str, random: Random) -> str | None:
    """Replace a file by something that is no file, sometimes; returns what."""
    target = folder / name
    what = random.choice([None] * 37 + ["missing", "a folder", "a link to /dev/zero"])
    if what is not None:
        target.unlink()
    if what == "a folder":
        target.mkdir()
    elif what == "a link to /dev/zero":
        target.symlink_to("/dev/zero")
    return what
