"""The commands that are tortured, and the fingerprints of their results."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TEXT = "def double(x):\n    return 2 * x\n\n\nfor name in names:\n    print(name, double(len(name)))\n" * 6
MEASURED = {"seconds", "created", "date", "tokens_per_second", "peak_memory_bytes", "versions"}
"""Entries of JSON files that differ between two runs: times and memory."""
GROW = (".jsonl", ".json.part")
"""The ends of the names of files that grow, or are written again, while a command runs."""
REPORT = b"</html>"
"""The end of a report, in which times stand among the data: only its end is compared."""


@dataclass(frozen=True)
class Work:
    """A command that writes its results to the folder ``out``."""

    name: str
    arguments: tuple[str, ...]
    resumes: bool = True
    """Whether a repeated command continues the interrupted one, instead of starting again."""

    def start(self, folder: Path, environment: Mapping[str, str] | None = None) -> Running:
        """Start the command in a folder, in a process group of its own."""
        (folder / "texts").mkdir(exist_ok=True)
        for n in range(8):
            (folder / "texts" / f"{n}.txt").write_text(TEXT[n:], encoding="utf-8")
        module = [sys.executable, "-m", "qkv.cli"]
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        said = (folder / "said.txt").open("w+", encoding="utf-8")
        process = subprocess.Popen(
            [*module, *self.arguments], cwd=folder, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return Running(process, said)


@dataclass
class Running:
    """A command that was started."""

    process: subprocess.Popen[bytes]
    output: IO[str] = field(repr=False)

    def wait(self, seconds: float = 600) -> int:
        """The exit code of the command; TimeoutExpired if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise

    def signal(self, number: int) -> None:
        """Send a signal to the command and to all processes that it started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    @property
    def said(self) -> str:
        """What the command printed so far."""
        self.output.flush()
        return Path(self.output.name).read_text(encoding="utf-8", errors="replace")


WORK = (
    Work("train", ("train", "reversal", "--steps", "60", "--save-every", "10", "--evaluate-every", "20",
                   "--log-every", "5", "--out", "out")),
    Work("experiment", ("experiment", "norm_place", "--quick", "--out", "out")),
    Work("survey", ("survey", "qkv-mini", "texts", "--shards", "4", "--out", "out")),
    Work("survey, ray", ("survey", "qkv-mini", "texts", "--shards", "4", "--engine", "ray", "--out", "out")),
    Work("profile", ("profile", "qkv-mini", TEXT, "--no-probe", "--out", "out"), resumes=False),
    Work("map", ("map", "qkv-mini", "--tokens", "400", "--layer", "1", "--data", "--out", "out/map.png"),
         resumes=False),
)  # fmt: skip


def fingerprints(folder: Path) -> dict[str, str]:
    """A hash of the contents of every file in ``out``, without measured times, by its path."""
    out = folder / "out"
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> str:
    data = path.read_bytes()
    if path.name == "seconds.txt":
        return "seconds"
    if path.suffix == ".html":
        return "whole" if data.rstrip().endswith(REPORT) else "cut off"
    if path.suffix == ".zip" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = [f"{name} {_hash(_lasting(name, archive.read(name)))}" for name in sorted(archive.namelist())]
        return _hash("\n".join(parts).encode())
    return _hash(_lasting(path.name, data))


def _lasting(name: str, data: bytes) -> bytes:
    """The text of a JSON file without measured times; other data as it is."""
    if not name.endswith((".json", ".jsonl")):
        return data
    try:
        lines = [json.loads(line) for line in data.splitlines()] if name.endswith(".jsonl") else [json.loads(data)]
    except ValueError:
        return data
    return json.dumps([_cleaned(line) for line in lines], sort_keys=True).encode()


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(inner) for key, inner in value.items() if key not in MEASURED}
    return [_cleaned(inner) for inner in value] if isinstance(value, list) else value


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]
