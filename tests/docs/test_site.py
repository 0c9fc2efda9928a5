"""The documentation covers every public name, and what it names exists. `make docs` checks the links of the site."""

from __future__ import annotations

import re
import sys

import pytest

import pages
from qkv import biases, masks, normalizers, scores
from qkv._contract import Definition

pytest.importorskip("myst_nb", reason="the site needs the docs extra")
sys.path.insert(0, str(pages.DOCS / "_ext"))

import error_index
import mechanism_pages
import public_names

MACHINERY = {"EMPTY", "FULL", "PARTIAL", "And", "Or", "Not", "Grid", "Region", "Shifted", "Tiles", "Mask", "Bias"} | {
    "AdditiveBias", "Score", "Pairwise", "Product", "Normalizer", "Pointwise", "SumToOne", "Scaling", "Cache",
    "from_flex", "from_multihead", "from_sdpa", "mask_mod", "to_flex", "to_multihead", "to_sdpa",
}  # fmt: skip
"""Base classes, and functions that compute or convert masks; only the reference has pages for them."""


def test_public_names_have_a_docstring_and_an_example() -> None:
    """Without: exceptions, exercises, courses, objects that users do not create, and what needs processes or a hub."""
    not_created = {"Trained", "Explorer", "Call", "Result", "Held", "Readers"}
    without = {"Diverged", "Interrupted", "register", "positions", "unshard"} | not_created
    for module in public_names.MODULES:
        for name, thing in public_names.public(module).items():
            assert (thing.__doc__ or "").strip(), f"{module}.{name} has no docstring"
            if callable(thing) and name not in without and module not in ("qkv_lab.check", "qkv_lab.course"):
                assert ">>>" in (thing.__doc__ or ""), f"{module}.{name} has no example"


def test_pages_of_mechanisms_name_the_base_class() -> None:
    paths = sorted(set((pages.DOCS / "mechanisms").glob("*.md")) - {pages.DOCS / "mechanisms" / "index.md"})
    found = [path.read_text(encoding="utf-8") for path in paths]
    texts = [text + mechanism_pages.base(mechanism_pages.described(text)) for text in found]
    for module in (masks, scores, biases, normalizers):
        classes = {name: x for name in module.__all__ if isinstance(x := getattr(module, name), type)}
        bases = {x for x in classes.values() if issubclass(x, Definition) and "definitions" in vars(x)}
        for name, x in classes.items():
            if not issubclass(x, Definition) or x in bases or name in MACHINERY:
                continue
            base = next(kind for kind in x.__mro__ if kind in bases)
            says = f"**Base class:** `{base.__module__.split('.')[1]}.{base.__name__}`"
            assert any(says in text and re.search(rf"\b{name}\b", text) for text in texts), f"{name}: {says}"


@pytest.mark.slow
def test_every_page_of_a_mechanism_has_a_picture_in_the_gallery() -> None:
    folder = pages.DOCS / "mechanisms"
    names = {path.stem for path in folder.glob("*.md")} - {"index"}
    for name in names:
        assert mechanism_pages.drawn((folder / f"{name}.md").read_text(encoding="utf-8")).axes, name
    index = mechanism_pages.gallery((folder / "index.md").read_text(encoding="utf-8"))
    assert set(re.findall(r":link: ([\w-]+)", index)) == names


def test_every_mechanism_has_a_page() -> None:
    """Every public mask, bias, score, normalizer, position, feature map and cache is in the code of one."""
    folder = pages.DOCS / "mechanisms"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.md") if path.name != "index.md")
    for module in ("masks", "biases", "scores", "normalizers", "positions", "features", "cache"):
        for name in public_names.public(f"qkv.{module}").keys() - MACHINERY:
            assert re.search(rf"\b{name}\b", text), f"no page of docs/mechanisms mentions qkv.{module}.{name}"


def test_files_named_in_the_documentation_exist() -> None:
    for page in pages.pages():
        text = (pages.ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w./-]+\.\w+)`", text):
            assert (pages.ROOT / name).exists(), f"{page} names {name}, which does not exist"


@pytest.mark.slow
def test_error_messages_of_the_errors_page_exist() -> None:
    raised = [" ".join(text.split()) for texts in error_index.errors().values() for text in texts]
    rows = re.findall(r"^\| `(.+?)` \|", (pages.DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        parts = ".*".join(re.escape(part) for part in row.split("…"))
        assert any(re.match(parts, text) for text in raised), f"no error message begins with {row!r}"
