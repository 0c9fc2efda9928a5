"""docs/how-it-works.md stays true: every function that it names exists, and is called in the order that it says."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pages
from conftest import unchecked

PAGE = (pages.DOCS / "how-it-works.md").read_text(encoding="utf-8")
FUNCTION = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
STEP = re.compile(r"^\d+\. " + FUNCTION.pattern, re.MULTILINE)
SOURCE = str(pages.ROOT / "src")


@functools.cache
def defined(path: str) -> set[str]:
    """The functions, classes and methods of a file, by qualified name."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")

    collect(ast.parse((pages.ROOT / path).read_text(encoding="utf-8")).body, "")
    return names


def calls(code: str, namespace: dict[str, Any]) -> list[str]:
    """Run code; the functions of the package that it calls, each once, in the order of their first call."""
    called: dict[str, None] = {}

    def record(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            path = Path(frame.f_code.co_filename).relative_to(pages.ROOT)
            called.setdefault(f"{path.as_posix()}::{frame.f_code.co_qualname}")

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        exec(compile(code, "docs/how-it-works.md", "exec", dont_inherit=True), namespace)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed knows functions only
    return list(called)


def test_every_function_named_on_the_page_exists() -> None:
    named = FUNCTION.findall(PAGE)
    assert len(named) > 60
    for path, name in named:
        assert (pages.ROOT / path).is_file(), f"docs/how-it-works.md names {path}, which does not exist"
        assert name in defined(path), f"docs/how-it-works.md names {path}::{name}, which does not exist"


def test_steps_of_the_page_are_called_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xarray", reason="the last section profiles a model")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    sections = 0
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE):
        code = "\n".join(match["body"] for match in pages.FENCE.finditer(section))
        steps = [f"{path}::{name}" for path, name in STEP.findall(section)]
        title, sections = section.split("\n")[0], sections + bool(steps)
        with unchecked():
            called = calls(code, namespace)
        missing = [step for step in steps if step not in called]
        assert not missing, f"{title}: the code of the section does not call {', '.join(missing)}"
        assert steps == [name for name in called if name in steps], f"{title}: the steps are called in another order"
    assert sections == 5
