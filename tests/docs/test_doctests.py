"""The examples in docstrings run in a separate process, those of the core with the shapes of every call checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qkv

SOURCE, ROOT = Path(qkv.__file__).parent, Path(__file__).parents[2]
HEAVY = ("huggingface", "profiler", "plot", "report", "server", "figures", "page", "cli", "tracking", "testing")
RUN = """
import doctest, importlib, sys
import jaxtyping
from beartype import BeartypeConf, beartype

from torch.nn.attention import flex_attention

flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # tests/core runs it with torch.compile, which takes long
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand for a float
if sys.argv[1] == "checked":
    jaxtyping.install_import_hook(["qkv", "qkv_lab.course", "qkv_lab.models"], "__main__.checked")
    import qkv, torch
    try:
        qkv.Partial(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)).merge(0)
    except jaxtyping.TypeCheckError:
        pass
    else:
        sys.exit("a wrong shape was not found")
failed = tried = 0
for name in sys.argv[2:]:
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])
    failed, tried = failed + result.failed, tried + result.attempted
print(failed, tried, file=sys.stderr)
"""


def modules(folder: Path, *, heavy: bool | None = None) -> list[str]:
    """The modules below a package's folder, or of those the heavy ones, or the others."""
    files = (p.relative_to(folder.parent).with_suffix("") for p in sorted(folder.rglob("*.py")))
    names = [".".join(p.parts).removesuffix(".__init__") for p in files if "__main__" not in p.parts]
    return [name for name in names if heavy is None or ((*name.split("."), "")[1] in HEAVY) == heavy]


OTHERS = [*modules(ROOT / "lab" / "qkv_lab"), *modules(ROOT / "research")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "names", "least"),
    [
        pytest.param("checked", modules(SOURCE, heavy=False), 200, id="core"),
        pytest.param("plain", [*modules(SOURCE, heavy=True), *OTHERS], 90, id="profiler, viewer and lab"),
    ],
)
def test_an_example_in_a_docstring_fails(shapes: str, names: list[str], least: int) -> None:
    """At least `least` examples run, so that a docstring that is no longer found does not pass unnoticed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, shapes, *names],
        capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    failed, tried = map(int, done.stderr.split())
    assert failed == 0, done.stdout
    assert tried >= least
