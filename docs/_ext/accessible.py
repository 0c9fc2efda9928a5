"""Completes the HTML of the theme for keyboards and screen readers: what axe-core finds in furo's pages."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

REPLACEMENTS = (
    (r'(<p class="caption" role="heading")>', r'\1 aria-level="2">'),
    (r'<aside class="sidebar-drawer"', r'\g<0> aria-label="All pages"'),
    (r'<aside class="toc-drawer', r'<aside aria-label="On this page" class="toc-drawer'),
    # What may be wider than the window is scrolled with the keyboard, too.
    (r"<pre>", '<pre tabindex="0">'),
    (r'<div class="(?:math|table-wrapper)\b[^"]*"', r'\g<0> tabindex="0"'),
    (r"<th\b[^>]*>(?:<p></p>)?</th>", "<td></td>"),
    # The parameters of a long signature are a list of definitions without terms.
    (r'<dl>\s*((?:<dd><em class="sig-param">.*?</dd>\s*)+)</dl>', r'<span class="sig-params">\1</span>'),
    (r'<dd>(<em class="sig-param">.*?)</dd>', r"<span>\1</span>"),
)


def accessible(page: str) -> str:
    """A page with levels of headings, names of landmarks, focus where it scrolls, and no empty header of a table."""
    for pattern, replacement in REPLACEMENTS:
        page = re.sub(pattern, replacement, page)
    return page


def wrap(app: Sphinx) -> None:
    templates = getattr(app.builder, "templates", None)
    if templates is not None:
        render = templates.render
        templates.render = lambda *arguments: accessible(render(*arguments))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", wrap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
