"""Check the built site, for `make docs`: its links work, and it has a page for every public name."""

from __future__ import annotations

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import public_names


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


def check_links(site: Path) -> None:
    """No link of a page is dead, and no page loads a file from another host."""
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


def check_reference(site: Path) -> None:
    """Every public name has a page that shows its docstring, or of what it is another name."""
    for module in public_names.MODULES:
        for name, thing in public_names.public(module).items():
            text = (site / "reference" / f"{module}.{name}.html").read_text(encoding="utf-8")
            said = (thing.__doc__ or "").strip()
            assert said, f"{module}.{name} has no docstring"
            word = re.findall(r"[A-Za-z]{4,}", said)[0]
            is_alias = getattr(thing, "__name__", name) != name and "alias of" in text
            assert word in text or is_alias, f"the page of {module}.{name} does not show its docstring"


if __name__ == "__main__":
    check_links(Path(sys.argv[1]))
    check_reference(Path(sys.argv[1]))
