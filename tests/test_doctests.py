"""The examples in docstrings run. In a process of its own: examples are what users see, without checks of shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qkv
from conftest import CORE

SOURCE = Path(qkv.__file__).parent
FILES = sorted(
    p.relative_to(SOURCE)
    for p in SOURCE.rglob("*.py")
    if p.relative_to(SOURCE).parts[0].split(".")[0] in (*CORE, "lab")
)
MODULES = ["qkv", *(".".join(("qkv", *p.with_suffix("").parts)).removesuffix(".__init__") for p in FILES)]
EXAMPLES = 150  # at least: a docstring that stops being found would pass in silence
RUN = """
import doctest, importlib, sys
failed = tried = 0
for name in sys.argv[1:]:
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])
    failed, tried = failed + result.failed, tried + result.attempted
print(failed, tried, file=sys.stderr)
"""


def test_examples_of_the_core() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, *MODULES], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    failed, tried = map(int, done.stderr.split())
    assert failed == 0, done.stdout
    assert tried >= EXAMPLES


@pytest.mark.parametrize("name", ["attend", "plan", "measure", "merge", "Attention"])
def test_public_functions_have_a_docstring(name: str) -> None:
    assert (getattr(qkv, name).__doc__ or "").strip()
