"""kill -9 at random moments: afterwards no file is half written, and a repeated command ends with the same results."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from torture.work import GROW, Work, fingerprints


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a command."""

    seconds: float
    files: dict[str, str]
    """`fingerprints` of its results."""


def reference(work: Work) -> Reference:
    """Run a command without disturbing it."""
    with tempfile.TemporaryDirectory(prefix="qkv-torture-") as name:
        folder, began = Path(name), time.monotonic()
        running = work.start(folder)
        if running.wait() != 0:
            raise RuntimeError(f"{work.name} fails even if it is left alone: {running.said[-500:]}")
        return Reference(time.monotonic() - began, fingerprints(folder))


def kill(work: Work, undisturbed: Reference, seed: int) -> list[str]:
    """Kill a command at a random moment, look at what it left, and repeat it; returns the problems."""
    after = random.Random(f"{work.name} {seed}").uniform(0, undisturbed.seconds)
    folder = Path(tempfile.mkdtemp(prefix="qkv-torture-"))
    try:
        running = work.start(folder)
        try:
            running.process.wait(after)
        except subprocess.TimeoutExpired:
            running.signal(signal.SIGKILL)
            running.process.wait()
        problems = half_written(fingerprints(folder), undisturbed) if (folder / "out").exists() else []
        again = work.start(folder)
        code = again.wait()
        if code != 0:
            problems.append(f"the repeated command ended with {code}: {again.said[-300:]}")
        else:
            problems += differences(fingerprints(folder), undisturbed)
        return problems
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def half_written(files: dict[str, str], undisturbed: Reference) -> list[str]:
    """Files under a final name whose contents are not those of the undisturbed run."""
    return [
        f"{name} is half written"
        for name, found in files.items()
        if name in undisturbed.files and found != undisturbed.files[name] and not name.endswith(GROW)
    ]


def differences(files: dict[str, str], undisturbed: Reference) -> list[str]:
    """How the results of a repeated command differ from those of the undisturbed one, temporary files included."""
    wanted = undisturbed.files
    return [
        *(f"{name} differs" for name in wanted if name in files and files[name] != wanted[name]),
        *(f"{name} is missing" for name in wanted if name not in files),
        *(f"{name} is left over" for name in files if name not in wanted),
    ]
