"""The examples in docstrings: those of the core in a separate process, which checks the shapes of calls."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qkv
from qkv.profiler.capture import probes
from qkv.testing import laws

SOURCE, ROOT = Path(qkv.__file__).parent, Path(__file__).parents[2]
HEAVY = ("huggingface", "profiler", "plot", "report", "server", "figures", "page", "cli", "tracking", "testing")
"""Rooms of the package that are not its core."""
EXAMPLE = re.compile(r"^ *>>> (?!.*# doctest: \+SKIP)", re.MULTILINE)
RUN = """
import doctest, functools, importlib, sys
import jaxtyping
from beartype import BeartypeConf, beartype

from torch.nn.attention import flex_attention

flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # tests/core runs it with torch.compile, which takes long
typed = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand for a float


def checked(function):  # most functions of a module are never called: their checks are made at the first call
    if isinstance(function, type):
        return typed(function)
    made = functools.cache(lambda: typed(function))
    return functools.wraps(function)(lambda *args, **kwargs: made()(*args, **kwargs))


public = ("attention", "biases", "cache", "choice", "edits", "features", "linear", "models", "nn", "normalizers",
          "partial", "positions", "scores", "statistics")
jaxtyping.install_import_hook([f"qkv.{name}" for name in public], "__main__.checked")
import qkv, torch
try:
    qkv.Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)).with_sink(0)
except jaxtyping.TypeCheckError:
    pass
else:
    sys.exit("a wrong shape was not found")
failed = tried = 0
for name in sys.argv[1:]:
    result = doctest.testmod(importlib.import_module(name))
    failed, tried = failed + result.failed, tried + result.attempted
print(failed, tried, file=sys.stderr)
"""


def modules(folder: Path) -> list[str]:
    """The modules below a package's folder with examples that run."""
    files = [p for p in sorted(folder.rglob("*.py")) if EXAMPLE.search(p.read_text(encoding="utf-8"))]
    return [".".join(p.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__") for p in files]


OF_QKV = modules(SOURCE)
CORE = [name for name in OF_QKV if "." in name and name.split(".")[1] not in HEAVY]
OTHERS = [*(n for n in OF_QKV if n not in CORE), *modules(ROOT / "lab" / "qkv_lab"), *modules(ROOT / "research")]


@pytest.mark.slow
def test_an_example_of_the_core_fails_or_has_other_shapes() -> None:
    """At least 200 examples run, so that docstrings that are no longer found do not pass unnoticed."""
    assert len(OTHERS) >= 80
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, *CORE],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    failed, tried = map(int, done.stderr.split())
    assert failed == 0, done.stdout
    assert tried >= 200


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_an_example_outside_of_the_core_fails(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name != "qkv.plot.layout":  # which reads the files that it draws
        request.getfixturevalue("undrawn")
    monkeypatch.setattr(laws, "kernels_for", lambda size: ["auto", "eager", "tiled"])  # tests/core/test_testing: all
    monkeypatch.setattr(probes, "TOKENS", 16)
    monkeypatch.chdir(ROOT)
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0  # what doctest printed says which
    assert result.attempted > 0
