"""Writes claims/: the pages of the ledger, from the verdicts in claims.json and the code of the checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[2]))  # research/ is in no distribution

from research.claims.page import pages, published
from research.claims.settled import load


def write(app: Sphinx) -> None:
    load()
    for name, text in pages(published()).items():
        path = Path(app.srcdir) / "claims" / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
