"""A full disk, a read-only folder, a folder that disappears, SIGTERM, and a clock that jumps.

Disks are small file systems in memory (tmpfs), which only root can mount; without that right these faults are skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torture.kills import Reference, differences
from torture.work import Running, Work, fingerprints

SMALL = 300
"""Kilobytes of the disk that becomes full: enough for the first files, and too little for all."""
CLOCK = """
import time
_time, _began = time.time, time.monotonic()
def jumping():
    past = time.monotonic() - _began
    return _time() + (-86_400 if 0.5 < past < 1.5 else 604_800 if past >= 1.5 else 0)
time.time = jumping
"""
"""A module that Python imports at its start: the clock goes back by a day, and then forward by a week."""


class Skipped(Exception):  # noqa: N818  (not an error)
    """A fault that cannot be made on this machine."""


def full_disk(work: Work, undisturbed: Reference) -> list[str]:
    """Results go to a disk that is too small for them."""
    with _folder() as folder, _mounted(folder / "out", f"size={SMALL}k"):
        running = work.start(folder)
        problems = _one_sentence(work, running)
        return problems + [f"{name} is left over" for name in _temporary(folder)]


def read_only(work: Work, undisturbed: Reference) -> list[str]:
    """The folder for the results cannot be written."""
    with _folder() as folder, _mounted(folder / "out", "ro"):
        return _one_sentence(work, work.start(folder))


def lost_folder(work: Work, undisturbed: Reference) -> list[str]:
    """The folder for the results disappears while the command runs, as a network drive may."""
    with _folder() as folder:
        running = work.start(folder)
        end = time.monotonic() + undisturbed.seconds
        while not (folder / "out").is_dir() and time.monotonic() < end and running.process.poll() is None:
            time.sleep(0.01)
        if not (folder / "out").is_dir():
            running.wait()
            return []  # it is made with the results, so it was never there to disappear
        (folder / "out").rename(folder / "gone")
        (folder / "out").write_text("not a folder", encoding="utf-8")
        return _one_sentence(work, running)


def terminated(work: Work, undisturbed: Reference) -> list[str]:
    """SIGTERM in the middle, as from a scheduler; the repeated command has to end with the same results."""
    with _folder() as folder:
        running = work.start(folder)
        time.sleep(undisturbed.seconds * 0.7)
        running.signal(signal.SIGTERM)
        running.wait()
        problems = ["a traceback"] if "Traceback" in running.said and work.processes == 1 else []
        again = work.start(folder)
        if again.wait() != 0:
            return [*problems, f"the repeated command fails: {again.said[-300:]}"]
        return problems + differences(fingerprints(folder), undisturbed)


def clock_jumps(work: Work, undisturbed: Reference) -> list[str]:
    """The clock goes back by a day while the command runs, and then forward by a week."""
    with _folder() as folder:
        (folder / "clock").mkdir()
        (folder / "clock" / "sitecustomize.py").write_text(CLOCK, encoding="utf-8")
        paths = [str(folder / "clock"), *filter(None, [os.environ.get("PYTHONPATH")])]
        running = work.start(folder, {"PYTHONPATH": os.pathsep.join(paths)})
        if running.wait() != 0:
            return [f"it fails: {running.said[-300:]}"]
        return differences(fingerprints(folder), undisturbed)


FAULTS: dict[str, Callable[[Work, Reference], list[str]]] = {
    "full disk": full_disk,
    "read-only folder": read_only,
    "lost folder": lost_folder,
    "SIGTERM": terminated,
    "clock jumps": clock_jumps,
}


def _one_sentence(work: Work, running: Running) -> list[str]:
    """Problems unless the command ends with exit code 2, one sentence and no traceback."""
    code = running.wait()
    problems = [] if code == 2 else [f"exit code {code}, expected 2"]
    if "Traceback" in running.said:
        problems.append(f"a traceback: {running.said.strip().splitlines()[-1][:200]}")
    return problems


def _temporary(folder: Path) -> list[str]:
    return [path.name for path in (folder / "out").rglob("*") if path.name.endswith(".tmp")]


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="qkv-torture-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _mounted(at: Path, options: str) -> Iterator[None]:
    """A file system in memory, mounted at a new folder."""
    at.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=False, capture_output=True)
    if made.returncode:
        raise Skipped("only root can mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False, capture_output=True)
