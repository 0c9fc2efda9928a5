"""Run cases in child processes: a hang, a crash or a blow-up of memory ends the child, not the fuzzer."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from random import Random
from typing import Any

from fuzz.files.damage import damaged, other_place
from fuzz.files.formats import FORMATS, Format
from qkv import InputError
from qkv.errors import LONGEST

SECONDS = 2.0
"""Processor time that opening a file may take."""
ENDLESS = 20
"""Seconds of processor time after which a child is killed."""
HANG = 300.0
"""Seconds after which a child is killed that uses no processor time; long, because the machine may be busy."""
MEMORY = 200 * 10**6
"""Bytes that opening a file may take beside the modules that are loaded."""
OWN_WARNINGS = ("path: ",)
"""How warnings of qkv itself begin; warnings of libraries must not reach the user."""
OF_TOKENIZERS = "Ignored unknown kwarg option"
"""What the library tokenizers prints for an option that it does not know."""


@dataclass(frozen=True)
class Case:
    """One damaged file, which depends only on the seed and the number."""

    seed: int
    number: int
    format: str
    file: str
    what: str
    bytes_only: bool
    """Whether only bytes were changed, so that a format with checksums has to load equal or not at all."""


@dataclass(frozen=True)
class Report:
    """What happened to a case."""

    case: Case
    outcome: str
    """"refused", "loaded", or what went wrong."""
    detail: str = ""
    seconds: float = 0.0
    grown: int = 0

    @property
    def failed(self) -> bool:
        return self.outcome not in ("refused", "loaded")

    def __str__(self) -> str:
        c = self.case
        return f"{c.format}, {c.file}, {c.what}: {self.outcome} {self.detail}"


def prepare(seed: int, number: int, valid: Path, folder: Path) -> Case:
    """Write the files of a case into an empty folder."""
    random = Random(f"{seed} {number}")
    name = random.choice(sorted(FORMATS))
    file = random.choice(FORMATS[name].files)
    top = file.partition("/")[0]
    (shutil.copytree if "/" in file else shutil.copy)(valid / top, folder / top)
    if name == "tokens":
        for one in FORMATS[name].files:
            shutil.copy(valid / one, folder / one)
    what, bytes_only = other_place(folder, file, random), True
    if what is None:
        data = (valid / file).read_bytes()
        made, what, bytes_only = damaged(data, file, random)
        (folder / file).write_bytes(made)
    return Case(seed, number, name, file, what, bytes_only)


def run(seed: int, numbers: Sequence[int], valid: Path) -> Iterator[Report]:
    """Run cases in child processes; a child that hangs or crashes is replaced for the cases that are left."""
    left = list(numbers)
    while left:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _child(seed, left, valid, write)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as pipe:
            for report in _reports(seed, list(left), valid, pipe, child):
                left.pop(0)
                yield report


def _reports(seed: int, numbers: Sequence[int], valid: Path, pipe: FileIO, child: int) -> Iterator[Report]:
    """The reports of one child, up to the case in which it ends."""
    for number in numbers:
        ready, _, _ = select.select([pipe], [], [], HANG)
        told = pipe.readline() if ready else b""
        if told:
            report = json.loads(told)
            yield Report(Case(**report.pop("case")), **report)
            continue
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with tempfile.TemporaryDirectory() as folder:
            case = prepare(seed, number, valid, Path(folder))
        yield Report(case, "crashes" if ready else "hangs", f"status {status}")
        return
    os.waitpid(child, 0)


def _child(seed: int, numbers: Sequence[int], valid: Path, write: int) -> None:
    """Run cases, report each as a line, and end this process."""
    try:
        faulthandler.disable()  # a crash is reported as the case that caused it
        with tempfile.TemporaryFile() as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            space = _memory("VmSize") + 2**30
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            for number in numbers:
                printed.truncate(0)
                os.lseek(printed.fileno(), 0, os.SEEK_SET)  # standard output and error share this position
                used = int(time.process_time()) + ENDLESS
                resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))
                report = _one(seed, number, valid, printed.fileno())
                os.write(write, json.dumps(asdict(report)).encode() + b"\n")
    finally:
        os._exit(0)


def _one(seed: int, number: int, valid: Path, printed: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="qkv-fuzz-") as place:
        inside, outside = Path(place) / "in", Path(place) / "out"
        inside.mkdir()
        outside.mkdir()
        case = prepare(seed, number, valid, inside)
        before = _listing(Path(place))
        os.chdir(outside)
        report = _opened(FORMATS[case.format], case, inside, valid, printed)
        os.chdir("/")
        written = _listing(Path(place)) ^ before
        return Report(case, "files were written", str(written)[:300]) if written else report


def _listing(place: Path) -> set[tuple[str, int]]:
    """All files with the times of their last change; links are not followed."""
    return {(str(p.relative_to(place)), p.lstat().st_mtime_ns) for p in place.rglob("*") if not p.is_dir()}


def _opened(form: Format, case: Case, folder: Path, valid: Path, printed: int) -> Report:
    Path("/proc/self/clear_refs").write_text("5")  # resets the largest size so far
    base, began = _memory("VmHWM"), time.process_time()
    found, outcome, detail = None, "loaded", ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = form.open(folder)
        except InputError as error:
            outcome, detail = "refused", str(error)
        except BaseException:
            outcome, detail = "escaped", traceback.format_exc()[-900:]
    seconds, grown = time.process_time() - began, _memory("VmHWM") - base
    foreign = [str(w.message) for w in warned if not str(w.message).startswith(OWN_WARNINGS)]
    text = os.pread(printed, 2000, 0).decode(errors="replace")
    if outcome == "refused" and ("\n" in detail.strip() or len(detail) > LONGEST):
        outcome = "not one sentence"
    elif outcome != "escaped" and foreign:
        outcome, detail = "warned", foreign[0]
    elif outcome != "escaped" and text.strip() and not text.startswith(OF_TOKENIZERS):
        outcome, detail = "printed", text
    elif outcome != "escaped" and seconds > SECONDS:
        outcome, detail = "slow", f"{seconds:.1f} s"
    elif outcome != "escaped" and grown > MEMORY:
        outcome, detail = "too much memory", f"{grown / 1e6:.0f} MB"
    elif outcome == "loaded" and case.bytes_only and _differs(form, found, valid):
        outcome = "loaded with other contents"
    return Report(case, outcome, detail[:1500], seconds, grown)


def _differs(form: Format, found: Any, valid: Path) -> bool:
    """Whether a file of a format with checksums has other contents than the valid file."""
    return form.content is not None and repr(form.content(found)) != repr(form.content(form.open(valid)))


def _memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) * 1024
