"""The documentation site builds offline without warnings, its links work, and it covers every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import pages
from qkv import biases, masks, normalizers, scores
from qkv._contract import Definition

pytest.importorskip("myst_nb", reason="the site needs the docs extra")
sys.path.insert(0, str(pages.DOCS / "_ext"))

import error_index
import public_names

MACHINERY = {"EMPTY", "FULL", "PARTIAL", "And", "Or", "Not", "Grid", "Region", "Shifted", "Tiles"} | {
    "Mask", "Bias", "Score", "Normalizer", "Scaling", "Cache", "from_flex", "from_multihead", "from_sdpa", "mask_mod",
    "to_flex", "to_multihead", "to_sdpa",
}  # fmt: skip
"""Base classes, and functions that compute or convert masks; only the reference has pages for them."""


class Page(HTMLParser):
    """The links of a page, its link targets, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon", "modulepreload"):
            self.loads.append(found["href"])


@pytest.mark.slow
def test_the_site_builds_with_a_page_for_every_public_name_and_without_dead_links(tmp_path: Path) -> None:
    """As `make docs` builds it, without theme, search and the outputs of cells, which `test_pages.py` runs."""
    site = tmp_path / "html"
    command = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees"), str(pages.DOCS)]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command, str(site)],
        # no search index, and no menu of all pages on each
        env={**os.environ, "QKV_DOCS_EXECUTE": "off", "QKV_DOCS_SEARCH": "off", "QKV_DOCS_THEME": "basic"},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _has_no_dead_links_and_no_files_from_other_hosts(site)
    _has_a_page_for_every_public_name(site)


def _has_no_dead_links_and_no_files_from_other_hosts(site: Path) -> None:
    parsed = cache(Page)
    dead, foreign = [], []
    for path in sorted(site.rglob("*.html")):
        here = path.relative_to(site)
        page = parsed(path)
        foreign += [f"{here}: {url}" for url in page.loads if urlsplit(url).netloc]
        for url in (*page.links, *page.loads):
            parts = urlsplit(url)
            if parts.scheme in ("http", "https", "mailto", "data") or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = parts.fragment and target.suffix == ".html"
            if not target.is_file() or (named and unquote(parts.fragment) not in parsed(target).names):
                dead.append(f"{here}: {url}")
    assert not dead, "\n".join(dead[:40])
    assert not foreign, "\n".join(foreign[:40])


def _has_a_page_for_every_public_name(site: Path) -> None:
    for module in public_names.MODULES:
        for name, thing in public_names.public(module).items():
            text = (site / "reference" / f"{module}.{name}.html").read_text(encoding="utf-8")
            said = (thing.__doc__ or "").strip()
            assert said, f"{module}.{name} has no docstring"
            word = re.findall(r"[A-Za-z]{4,}", said)[0]
            assert word in text, f"the page of {module}.{name} does not show its docstring"


def test_public_names_have_an_example() -> None:
    """Except for exceptions, objects that users do not create, and functions that need processes or a hub."""
    not_created = {"Trained", "Explorer", "Call", "Result"}
    without = {"Diverged", "Interrupted", "from_hugging_face", "register", "positions", "unshard"} | not_created
    for module in public_names.MODULES:
        for name, thing in public_names.public(module).items():
            if callable(thing) and name not in without:
                assert ">>>" in (thing.__doc__ or ""), f"{module}.{name} has no example"


def test_pages_of_mechanisms_name_the_base_class() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((pages.DOCS / "mechanisms").glob("*.md"))]
    for module in (masks, scores, biases, normalizers):
        classes = {name: x for name in module.__all__ if isinstance(x := getattr(module, name), type)}
        bases = {x for x in classes.values() if issubclass(x, Definition) and "definitions" in vars(x)}
        for name, x in classes.items():
            if not issubclass(x, Definition) or x in bases or name in MACHINERY:
                continue
            base = next(kind for kind in x.__mro__ if kind in bases)
            says = f"Base class: `{base.__module__.split('.')[1]}.{base.__name__}`"
            assert any(says in text and re.search(rf"\b{name}\b", text) for text in texts), f"{name}: {says}"


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
