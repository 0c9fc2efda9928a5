"""All that is imported is declared, a missing extra is one sentence, and untested versions are reported."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkv
import qkv_lab
import qkv_vllm
from conftest import Command
from imported import statements
from qkv import _packages, cli

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
YOURS = {"datasets", "kvpress", "triton"}
"""Packages that qkv works with if a user has them, and never asks for by an extra."""


def module(requirement: str) -> str:
    """The module that a requirement installs."""
    return re.split(r"[\[<>=;~! ]", requirement)[0].lower().replace("-", "_")


def imported(file: Path) -> Iterator[str]:
    """The packages that a file imports, in functions too, but not for types alone."""
    for node in statements(file):
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        yield from (name.partition(".")[0] for name in names)


@pytest.mark.slow
def test_every_imported_package_is_a_dependency_or_in_an_extra() -> None:
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used, by_lab = ({x for file in (ROOT / room).rglob("*.py") for x in imported(file)} for room in ("src/qkv", "lab"))
    base = set(map(module, PROJECT["dependencies"])) | {"qkv", "qkv_lab"} | sys.stdlib_module_names
    base |= {"PIL"}  # matplotlib requires it
    brought = {"pydantic": "fastapi", "starlette": "fastapi", "traitlets": "anywidget"}
    assert set(brought.values()) <= set(_packages.EXTRAS)
    assert {"torch", "transformers", "uvicorn", *YOURS} <= used
    assert not used - base - set(_packages.EXTRAS) - set(brought) - YOURS
    assert (
        not by_lab - base - set(map(module, lab["dependencies"])) - {"datasets", "transformers", "fastapi", "pydantic"}
    )
    assert f"qkv=={qkv.__version__}" in lab["dependencies"]
    assert qkv_lab.__version__ == qkv.__version__
    served = tomllib.loads((ROOT / "serving" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    by_plugin = {x for file in (ROOT / "serving").rglob("*.py") for x in imported(file)}
    assert not by_plugin - base - {"qkv_vllm", "vllm"}
    assert served["dependencies"] == [f"qkv=={qkv.__version__}"]
    assert qkv_vllm.__version__ == qkv.__version__


def test_extras_install_what_sentences_name_have_smoke_tests_and_upper_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, extra in _packages.EXTRAS.items():
        assert name in map(module, extras[extra]), f"{extra} does not install {name}"
    tree = ast.parse((ROOT / "tests" / "install" / "smoke.py").read_text(encoding="utf-8"))
    (smoke,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    assert {"base", *extras} - {"dev", "zoo"} <= {x.id for x in ast.walk(smoke) if isinstance(x, ast.Name)}
    every = [*PROJECT["dependencies"], *(x for extra in extras.values() for x in extra)]
    assert {",<" in x for x in every if module(x) == "transformers"} == {True}, "its internals are used"


def test_a_command_that_lacks_a_package_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """An import that no extra could mend is not hidden."""

    def lacking(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setitem(cli.COMMANDS, "flow", lambda: lacking("polars.io"))
    said = command.refuses("flow")
    assert "polars" in said
    assert "'qkv[frames]'" in said
    monkeypatch.setitem(cli.COMMANDS, "flow", lambda: lacking("qkv.no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        command("flow")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions that seem to be installed, beside a qkv that is tested with transformers 3.0.8 to 3.1."""
    found: dict[str, str] = {}
    monkeypatch.setattr(_packages, "version", found.__getitem__)
    monkeypatch.setattr(
        _packages, "requires", lambda name: ["numpy>=2", "transformers<3.2,>=3.0.8", "torch>=2; extra == 'x'"]
    )
    _packages.check_tested.cache_clear()
    yield found
    _packages.check_tested.cache_clear()


@pytest.mark.parametrize(("version", "tested"), [
    ("3.0.8", True), ("3.1.6", True), ("3.1.6+local", True),
    ("3.0.7", False), ("3.2.0", False), ("3.2.0rc1", False), ("4.0", False),
])  # fmt: skip
def test_a_version_outside_the_tested_range_warns_once(installed: dict[str, str], version: str, tested: bool) -> None:
    installed["transformers"] = version
    outside = pytest.warns(UserWarning, match=rf"transformers {re.escape(version)} .*'transformers<3.2,>=3.0.8'")
    with contextlib.nullcontext() if tested else outside:
        _packages.check_tested("transformers")
    _packages.check_tested("transformers")  # another warning would be an error
