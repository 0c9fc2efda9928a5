"""Each room of the repository stays within the lines and files that budget.toml allows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((ROOT / "budget.toml").read_text(encoding="utf-8"))
WHAT_TO_DO = (
    "Delete something: a second answer to a question, a wrapper that is used once, a test of what is gone. If nothing "
    "can go, raise the number in budget.toml in the same commit and give the reason in its message."
)


def sources(room: str) -> list[Path]:
    return [path for path in (ROOT / room).rglob("*.py") if "build" not in path.relative_to(ROOT).parts]


@pytest.mark.parametrize("room", BUDGET["lines"])
def test_a_room_has_no_more_lines_than_its_budget(room: str) -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in sources(room))
    allowed = BUDGET["lines"][room]
    assert 0 < lines <= allowed, f"{room} has {lines:,} lines of Python, allowed are {allowed:,}. {WHAT_TO_DO}"


@pytest.mark.parametrize("room", BUDGET["files"])
def test_a_room_has_no_more_files_than_its_budget(room: str) -> None:
    files, allowed = len(sources(room)), BUDGET["files"][room]
    assert 0 < files <= allowed, f"{room} has {files} files of Python, allowed are {allowed}. {WHAT_TO_DO}"


def test_file_names_do_not_repeat_inside_a_package() -> None:
    """A package and a module beside it, or in it, must not have one name: tabs in an editor could not be told apart."""
    for room in ("src/qkv", "lab/qkv_lab"):
        for folder in {path.parent for path in sources(room)}:
            packages = [path.name for path in folder.iterdir() if (path / "__init__.py").exists()]
            names = [path.stem for path in folder.glob("*.py")] + packages
            assert len(names) == len(set(names)), f"{folder.relative_to(ROOT)} has a module and a package of one name"
