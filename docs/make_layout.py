"""Draws docs/figures/layout.png: the packages of qkv in layers, from their imports.

PYTHONPATH=. .venv/bin/python docs/make_layout.py, which `make figures` runs, too.

A package stands one layer above the highest package that it imports. The number is its lines of Python.
"""

from __future__ import annotations

import functools
from pathlib import Path

import matplotlib.pyplot as plt

from tests.imported import statements

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "qkv"
SMALL = 250  # packages with fewer lines are left out
COLOURS = ["#e8f0f8", "#fdf1df"]


def package(module: str) -> str:
    """The top-level package or module of qkv that a dotted name belongs to."""
    return module.split(".")[1] if "." in module else ""


def imports() -> dict[str, set[str]]:
    """The packages that each package imports."""
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        here = file.relative_to(SOURCE).with_suffix("").parts[0]
        if here == "__init__":
            continue
        used = found.setdefault(here, set())
        for node in statements(file):
            module = getattr(node, "module", None) or ""
            if module.startswith("qkv."):
                used.add(package(module))
            elif module == "qkv":
                used |= {alias.name for alias in node.names}
    return {name: used & set(found) - {name} for name, used in found.items()}


def lines(name: str) -> int:
    """Lines of Python in a package."""
    file = SOURCE / f"{name}.py"
    files = [file] if file.exists() else (SOURCE / name).rglob("*.py")
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def layers() -> list[list[str]]:
    """Packages by layer, the lowest first; packages that import one another share a layer."""
    graph = imports()

    @functools.cache
    def below(name: str) -> frozenset[str]:
        """All that a package imports, directly or not."""
        seen: set[str] = set()
        left = [name]
        while left:
            for other in graph[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return frozenset(seen)

    def level(name: str) -> int:
        lower = [other for other in below(name) if name not in below(other)]
        return 1 + max(map(level, lower), default=-1)

    level = functools.cache(level)
    shown = [name for name in graph if lines(name) >= SMALL]
    rows: dict[int, list[str]] = {}
    for name in sorted(shown):
        rows.setdefault(level(name), []).append(name)
    return [rows[key] for key in sorted(rows)]


def main() -> None:
    rows = layers()
    figure, ax = plt.subplots(figsize=(8, 0.4 * len(rows) + 0.3), layout="constrained")
    for y, names in enumerate(rows):
        width = 1 / max(len(names), 3)
        for x, name in enumerate(names):
            left = (1 - width * len(names)) / 2 + x * width
            ax.add_patch(plt.Rectangle((left + 0.006, y + 0.1), width - 0.012, 0.8, color=COLOURS[y % 2]))
            ax.text(left + width / 2, y + 0.5, f"{name}  {lines(name):,}", ha="center", va="center", fontsize=9)
    ax.set(xlim=(0, 1), ylim=(0, len(rows)))
    ax.set_axis_off()
    title = "Packages of qkv and their lines of Python: each imports from its own layer and those below"
    ax.set_title(title, fontsize=10, loc="left")
    figure.savefig(DOCS / "figures" / "layout.png", dpi=130)


if __name__ == "__main__":
    main()
