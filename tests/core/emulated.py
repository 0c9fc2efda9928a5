"""The native library compiled for aarch64, run by an emulator in place of the one for this processor.

A plugin of pytest: `make aarch64` runs the tests of the native engine with it. It needs aarch64-linux-gnu-gcc and
qemu-aarch64 (Debian's gcc-aarch64-linux-gnu and qemu-user).
"""

from __future__ import annotations

import ctypes
import gc
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import hatch_build
from qkv.native import library

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SOURCES = Path(__file__).with_suffix(".c"), Path(library.__file__).with_name("library.c")
FOLDER, EMULATED = pytest.StashKey[tempfile.TemporaryDirectory[str]](), pytest.StashKey["Emulated"]()


class Emulated:
    """Has the functions of the library. A call sends the memory that its arguments lead to, and gets it back."""

    def __init__(self, folder: str) -> None:
        program = f"{folder}/emulated"
        subprocess.run([COMPILER, *hatch_build.FLAGS, "-static", *SOURCES, "-o", program, "-lm"], check=True)
        self.process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.calls = 0

    def qkv_level(self) -> int:
        return 0

    def qkv_attend(self, arguments: ctypes.Structure) -> int:
        return self._call(0, arguments)

    def qkv_decode(self, arguments: ctypes.Structure) -> int:
        return self._call(1, arguments)

    def qkv_gradients(self, arguments: ctypes.Structure) -> int:
        return self._call(2, arguments)

    def qkv_pool(self, arguments: ctypes.Structure) -> int:
        return self._call(3, arguments)

    def qkv_eigenvalues(self, arguments: ctypes.Structure) -> int:
        return self._call(4, arguments)

    def qkv_nodes(self, arguments: ctypes.Structure) -> int:
        return self._call(5, arguments)

    def _call(self, function: int, arguments: ctypes.Structure) -> int:
        sent, received = self.process.stdin, self.process.stdout
        assert sent is not None
        assert received is not None
        memory = _memory()
        root = ctypes.addressof(arguments)
        blocks, slots = {root: ctypes.sizeof(arguments)}, list[int]()
        tensors = set[int]()
        todo = list(_pointers(arguments))
        while todo:
            slot = todo.pop()
            address = ctypes.c_void_p.from_address(slot).value
            if address is None:
                continue
            start, owner = next((s, x) for s, x in memory.items() if s <= address < s + _size(x))
            slots.append(slot)
            if start not in blocks:
                blocks[start] = _size(owner)
                if isinstance(owner, Tensor):
                    tensors.add(start)
                else:
                    todo.extend(_pointers(owner))
        message = [struct.pack("2q", function, len(blocks))]
        for start, size in blocks.items():
            message += [struct.pack("2q", start, size), ctypes.string_at(start, size)]
        sent.write(b"".join([*message, struct.pack(f"{len(slots) + 2}q", len(slots), *slots, root)]))
        sent.flush()
        (status,) = struct.unpack("q", received.read(8))
        for start, size in blocks.items():
            data = received.read(size)
            if start in tensors:
                ctypes.memmove(start, data, size)
        self.calls += 1
        return int(status)


def _memory() -> dict[int, object]:
    """All tensors and all arrays of ctypes of this process, by the address of their memory."""
    found: dict[int, object] = {}
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and x.device.type == "cpu" and not x.is_sparse:
            found[x.untyped_storage().data_ptr()] = x
        elif issubclass(type(x), ctypes.Array):
            found[ctypes.addressof(x)] = x
    return found


def _size(x: object) -> int:
    return x.untyped_storage().nbytes() if isinstance(x, Tensor) else ctypes.sizeof(x)  # type: ignore[arg-type]


def _pointers(x: object) -> Iterator[int]:
    """Addresses of the pointers inside a structure or an array."""
    start = ctypes.addressof(x)  # type: ignore[arg-type]
    if isinstance(x, ctypes.Structure):
        for name, kind, *_ in x._fields_:
            at = start + getattr(type(x), name).offset
            if issubclass(kind, ctypes.Structure):
                yield from _pointers(getattr(x, name))
            elif kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer):
                yield at
    elif isinstance(x, ctypes.Array) and issubclass(x._type_, ctypes.Structure):
        for one in x:
            yield from _pointers(one)


def pytest_configure(config: pytest.Config) -> None:
    if missing := [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]:
        raise pytest.UsageError(f"{', '.join(missing)} not found; install gcc-aarch64-linux-gnu and qemu-user")
    folder = config.stash[FOLDER] = tempfile.TemporaryDirectory()
    emulated = config.stash[EMULATED] = Emulated(folder.name)
    library.compiled = lambda: emulated  # type: ignore[assignment]


def pytest_unconfigure(config: pytest.Config) -> None:
    emulated = config.stash[EMULATED]
    emulated.process.communicate()  # it ends with its input
    config.stash[FOLDER].cleanup()
    print(f"{emulated.calls} calls were emulated")
    if not emulated.calls:
        pytest.exit("no test called the library", returncode=1)
