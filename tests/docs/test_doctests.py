"""The examples in docstrings run, in a separate process without shape checks, as for users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qkv
from conftest import CORE

SOURCE, ROOT = Path(qkv.__file__).parent, Path(__file__).parents[2]
HEAVY = ("huggingface", "profiler", "plot", "report", "server")


def modules(folder: Path, packages: tuple[str, ...] | None = None) -> list[str]:
    """The modules below a package's folder, or those in some of its packages and files."""
    files = (p.relative_to(folder.parent).with_suffix("") for p in sorted(folder.rglob("*.py")))
    names = [".".join(p.parts).removesuffix(".__init__") for p in files if "__main__" not in p.parts]
    return [name for name in names if packages is None or (*name.split("."), "")[1] in packages]


RUN = """
import doctest, importlib, sys
failed = tried = 0
for name in sys.argv[1:]:
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])
    failed, tried = failed + result.failed, tried + result.attempted
print(failed, tried, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("names", "least"),
    [
        pytest.param(["qkv", *modules(SOURCE, (*CORE, "testing"))], 200, id="core", marks=pytest.mark.slow),
        pytest.param(
            [*modules(ROOT / "lab" / "qkv_lab"), *modules(ROOT / "research")], 30, id="lab", marks=pytest.mark.slow
        ),
        pytest.param(modules(SOURCE, HEAVY), 60, id="profiler and viewer", marks=pytest.mark.slow),
    ],
)
def test_examples_in_docstrings(names: list[str], least: int) -> None:
    """At least `least` examples run, so that a docstring that is no longer found does not pass unnoticed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    failed, tried = map(int, done.stderr.split())
    assert failed == 0, done.stdout
    assert tried >= least


@pytest.mark.parametrize("name", ["attend", "plan", "measure", "merge", "Attention"])
def test_public_functions_have_a_docstring(name: str) -> None:
    assert (getattr(qkv, name).__doc__ or "").strip()
