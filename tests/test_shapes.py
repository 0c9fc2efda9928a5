"""Shapes and types in the signatures of the core hold: one case of each test runs with every call checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [
    "attend",
    "laws",
    "linear",
    "masks",
    "partial",
    "measure",
    "maps",
    "statistics",
    "cache",
    "nn",
    "decoder",
    "captioner",
    "alignment",
]
SLOW = "learn or memory or random or gradcheck or differences or command or overfit or compositions"


@pytest.mark.slow
def test_signatures_tell_the_shapes_of_what_passes() -> None:
    files = [str(TESTS / f"test_{name}.py") for name in FILES]
    command = [sys.executable, "-m", "pytest", "--one-case", "-m", "not slow", "-k", f"not ({SLOW})", *files]
    done = subprocess.run(
        command, env={**os.environ, "QKV_CHECK_SHAPES": "1"}, cwd=TESTS.parent,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_wrong_shape_is_found() -> None:
    code = "import conftest, torch, qkv; qkv.Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)).merge(0)"
    checking = {**os.environ, "QKV_CHECK_SHAPES": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=checking, capture_output=True, text=True, check=False, timeout=120
    )
    assert "TypeCheckError" in done.stderr, done.stderr
