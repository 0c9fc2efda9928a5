"""Makes notebooks of the pages with code cells: adds the header for MyST-NB, and writes each as .ipynb with a link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from qkv_lab.lessons.notebook import notebook

HEAD = """---
language_info:
  name: python
  pygments_lexer: ipython3
file_format: mystnb
kernelspec:
  display_name: Python 3
  name: python3
---

"""


def link(app: Sphinx, name: str, source: list[str]) -> None:
    """Write the notebook, and add its link under the title."""
    text = source[0]
    if "```{code-cell}" not in text:
        return
    target = Path(app.outdir) / "_notebooks" / f"{name}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(notebook(text), encoding="utf-8")
    before, mark, after = text.partition("# ")
    title, _, rest = after.partition("\n")
    up = "../" * name.count("/")
    line = f'<p class="notebook"><a href="{up}_notebooks/{name}.ipynb" download>Download as a Jupyter notebook</a></p>'
    source[0] = f"{HEAD}{before}{mark}{title}\n\n{line}\n{rest}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
