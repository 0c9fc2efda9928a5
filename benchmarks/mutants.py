"""Mutation testing: how many small faults in the source do the tests find?

    python -m benchmarks.mutants --out mutants.json

Every mutant is a copy of src with one change: a comparison, an operator, a number or a boolean is another, or a `not`
is gone. The tests of the changed room run on it and stop at the first failure: the mutant is killed. Docstrings,
annotations, error messages and assertions are left alone. Two thirds of the mutants are of the core, one third of the
profiler and the viewer. A mutant is drawn by a hash of its line, so that a change elsewhere does not draw others.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path

from rich.progress import Progress

ROOT = Path(__file__).parent.parent
ROOMS = {  # of a folder of tests, what it tests
    "core": (
        "masks", "biases", "normalizers", "engine", "kernels", "statistics", "cache", "partial.py", "scores.py",
        "positions.py", "linear.py", "choice.py", "ring.py", "attention.py", "features.py", "nn",
    ),
    "profile": ("profiler", "edits.py", "huggingface", "tracking"),
    "view": ("figures", "plot", "page", "report", "server"),
}  # fmt: skip
BROAD = {"oracle", "laws", "measure", "profile", "report"}
"""Words in the names of files that test much."""
SHARES = {"core": 24, "profile": 8, "view": 4}  # of 36 mutants
COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    start: int
    stop: int
    """Characters of the file that are replaced."""
    old: str
    new: str
    room: str


def mutants(file: Path, room: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    source = file.read_text()
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text.encode()))
    data = source.encode()

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """The bytes of the operator between two operands, without brackets and spaces."""
        start = starts[(left.end_lineno or 1) - 1] + (left.end_col_offset or 0)
        stop = starts[right.lineno - 1] + right.col_offset
        text = data[start:stop].decode()
        inner = text.strip(" ()\n\\")
        start += len(text[: text.index(inner)].encode()) if inner else 0
        return start, start + len(inner.encode())

    def mutant(node: ast.expr, start: int, stop: int, new: str) -> Mutant:
        return Mutant(str(file.relative_to(ROOT)), node.lineno, start, stop, data[start:stop].decode(), new, room)

    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts = [node] if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert) else []
        parts += [x for x in (getattr(node, "annotation", None), getattr(node, "returns", None)) if x is not None]
        for part in parts:
            skipped.update(id(x) for x in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr):
            continue
        at = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
            yield mutant(node, *between(node.left, node.comparators[0]), COMPARE[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield mutant(node, *between(node.left, node.right), OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield mutant(node, *between(*node.values), "or" if isinstance(node.op, ast.And) else "and")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield mutant(node, at, at + 3, "")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield mutant(node, at, at + 1, "+")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield mutant(node, at, end, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 1000:
            yield mutant(node, at, end, str(node.value + 1))


def chosen(number: int, seed: int) -> list[Mutant]:
    """That many mutants, each room's share drawn from all of it."""

    def place(mutant: Mutant, nth: int, line: str) -> bytes:
        return sha256(f"{seed} {mutant.file} {line} {mutant.old} {mutant.new} {nth}".encode()).digest()

    found = []
    for room, packages in ROOMS.items():
        drawn: dict[bytes, Mutant] = {}
        for package in packages:
            path = ROOT / "src/qkv" / package
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                lines, seen = file.read_text().splitlines(), Counter[tuple[str, str, str]]()
                for mutant in mutants(file, room):
                    same = (lines[mutant.line - 1].strip(), mutant.old, mutant.new)
                    drawn[place(mutant, seen[same], same[0])] = mutant
                    seen[same] += 1
        found += [drawn[key] for key in sorted(drawn)[: round(number * SHARES[room] / sum(SHARES.values()))]]
    return found


def files(mutant: Mutant) -> list[str]:
    """The tests of the mutant's room, and of others those named as its file or package; those named so first."""
    words, own = set(Path(mutant.file).with_suffix("").parts), ROOT / "tests" / mutant.room

    def named(path: Path) -> set[str]:
        name = path.stem.removeprefix("test_")
        return {name, *name.split("_")}

    def rank(path: Path) -> tuple[bool, bool, str]:
        return not words & named(path), not BROAD & named(path), path.name

    tests = (ROOT / "tests").glob("*/test_*.py")
    return [str(path) for path in sorted((x for x in tests if x.parent == own or words & named(x)), key=rank)]


def test(mutant: Mutant, limit: float, options: list[str]) -> dict[str, object]:
    """Whether the tests kill a mutant, the first that failed, and the seconds it took."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / mutant.file
        data = file.read_bytes()
        file.write_bytes(data[: mutant.start] + mutant.new.encode() + data[mutant.stop :])
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options, *files(mutant)]
        paths = f"{folder}/src:{ROOT / 'lab'}:{ROOT}:{ROOT / 'tests'}"
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit
            )
            lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            by, killed = (lines[0][:160] if lines else ""), done.returncode != 0
        except subprocess.TimeoutExpired:
            by, killed = f"no end after {limit:.0f} s", True
    return {**asdict(mutant), "killed": killed, "by": by, "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=36, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", type=Path, help="results of an earlier run: test what survived in it again")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at the same time")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which a mutant counts as killed")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--options", default="", help="more options for pytest")
    asked = parser.parse_args()
    every = chosen(asked.number, asked.seed)
    if asked.survivors:
        before = json.loads(asked.survivors.read_text())
        alive = [Mutant(**{field.name: x[field.name] for field in fields(Mutant)}) for x in before if not x["killed"]]
        every = [mutant for mutant in every if mutant in alive]
    found: list[dict[str, object]] = []
    with Progress() as progress, ThreadPoolExecutor(asked.jobs) as pool:
        bar = progress.add_task("mutants", total=len(every))
        jobs = [pool.submit(test, mutant, asked.limit, asked.options.split()) for mutant in every]
        for done in as_completed(jobs):
            found.append(done.result())
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            progress.advance(bar)
    killed = sum(bool(x["killed"]) for x in found)
    print(f"{killed} of {len(found)} mutants killed ({killed / max(1, len(found)):.0%})")
    for x in found:
        if not x["killed"]:
            print(f"  survived: {x['file']}:{x['line']}  {x['old']!r} → {x['new']!r}")


if __name__ == "__main__":
    main()
