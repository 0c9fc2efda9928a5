"""The public interface is the one in `tests/contract/`, `dir` shows it, and pages use no other names."""

from __future__ import annotations

import ast
import difflib
import importlib
import operator
import re
from pathlib import Path

import pytest

import pages
import qkv
from contract import interface

MODULES = [*interface.modules(), *interface.modules("qkv_lab")]


def test_dir_shows_exactly_the_public_names() -> None:
    assert {"qkv.masks", "qkv.kernels", "qkv.models", "qkv.testing", "qkv_lab.check"} <= set(MODULES)
    for name in MODULES:
        module = importlib.import_module(name)
        shown = [x for x in dir(module) if not (x.startswith("__") and x.endswith("__"))]
        assert shown == sorted(module.__all__), name
        assert [x for x in shown if not hasattr(module, x)] == [], name
        assert not hasattr(module, "atend"), name


def test_tables_of_lazy_names_agree() -> None:
    """The imports for type checkers, the table of lazy imports, and `__all__` agree."""
    for package in (qkv, importlib.import_module("qkv_lab")):
        typed = next(x for x in ast.parse(Path(package.__file__).read_text()).body if isinstance(x, ast.If))
        imported = {x.module: {alias.name for alias in x.names} for x in typed.body if isinstance(x, ast.ImportFrom)}
        lazy = {package.__name__: package._MODULES, **package._NAMES}
        assert imported == {name: set(names) for name, names in lazy.items()}
        assert set().union(*imported.values()) == set(package.__all__) - {"InputError"}


def uses(page: str) -> list[str]:
    """Dotted names of qkv that the code of a page imports or uses as attributes of `qkv`."""
    found = []
    for block in pages.python(page):
        lines = ("pass" if line.startswith(("!", "%")) else line for line in block.code.split("\n"))
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                found.append(ast.unparse(node))
    return [name for name in found if name.split(".")[0] in ("qkv", "qkv_lab") and name.replace(".", "").isidentifier()]


def is_private(name: str) -> bool:
    """Whether a dotted name is not in `__all__` of its public module."""
    name = re.sub(r"^qkv\.lab\b", "qkv_lab", re.sub(r"^qkv\.course\b", "qkv_lab.course", name))
    if (words := name.split("."))[:2] == ["qkv", "models"] and set(words) & set(qkv.models.TEACHING):
        name = f"qkv_lab.{name.partition('.')[2]}"
    module, _, rest = name.partition(".")
    while rest:
        here, _, rest = rest.partition(".")
        if here not in importlib.import_module(module).__all__:
            return not (here.startswith("__") and here.endswith("__"))
        module = f"{module}.{here}"
        if module not in MODULES:
            return False  # a class or function, whose attributes are its own
    return False


def test_pages_use_only_public_names() -> None:
    assert is_private("qkv.models.loading.load_model"), "the test cannot tell private names"
    with_code = [page for page in pages.pages() if pages.python(page)]
    assert [(page, name) for page in with_code for name in uses(page) if is_private(name)] == []


def test_functions_named_in_how_it_works_exist() -> None:
    page = (pages.DOCS / "how-it-works.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:src|lab)/([\w/]+)\.py::([\w.]+)`", page))
    assert len(named) > 25
    for path, name in named:
        module = importlib.import_module(path.removesuffix("/__init__").replace("/", "."))
        operator.attrgetter(name)(module)  # raises an error that tells the name


def test_a_public_function_takes_at_most_twelve_arguments() -> None:
    records = r"[\w.]+\.(Call|Statistics|survey|Training|\w+Config)\("  # and settings: their arguments are fields
    for line in (Path(__file__).parents[1] / "contract/names.txt").read_text().splitlines():
        arguments = re.sub(r"\([^()]*\)", "", line.partition("(")[2]).split(", ")
        named = [x for x in arguments if x != "self" and not x.startswith("*")]
        assert len(named) <= 12 or re.match(records, line), line


def test_no_two_public_classes_of_qkv_have_one_name() -> None:
    found: dict[str, type] = {}
    for module in (importlib.import_module(name) for name in interface.modules()):
        for thing in (getattr(module, name) for name in module.__all__):
            assert not isinstance(thing, type) or found.setdefault(thing.__name__, thing) is thing, thing


TO_DO = (
    "What was there before must go on working, or docs/upgrading.md says what to do; CHANGELOG.md has a line for it. "
    "Then run `make contract`."
)


@pytest.mark.parametrize("kind", interface.TEXTS)
def test_the_public_interface_is_the_recorded_one(kind: str) -> None:
    recorded = (interface.FOLDER / f"{kind}.txt").read_text(encoding="utf-8")
    found = interface.text(kind)
    if found != recorded:
        changes = list(difflib.unified_diff(recorded.splitlines(), found.splitlines(), n=0, lineterm=""))[2:]
        pytest.fail(
            "\n".join([f"{kind}.txt in tests/contract differs from the code. {TO_DO}", *changes]), pytrace=False
        )
