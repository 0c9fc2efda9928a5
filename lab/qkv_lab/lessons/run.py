"""Runs the code of a page cell by cell, as a notebook does, and saves its figures."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv._files import write_atomically
from qkv.errors import InputError
from qkv_lab.lessons.catalog import folder
from qkv_lab.lessons.page import Cell, headings


@dataclass
class Output:
    """What a cell gave: its printed text, with the value of its last line, and the files of its figures."""

    text: str
    figures: list[Path] = field(default_factory=list)


class Runner:
    """Executes cells in one namespace, and writes their figures to a folder as PNG files.

    Use it as a context manager: inside, the module ``__main__`` is the page, as in a notebook, and matplotlib draws to
    files in the style of the documentation.

    Args:
        name: name of the page, for tracebacks.
        out: folder of the figures, which must exist.
    """

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.heading, self.number, self.count = name, 0, 0
        self._page = types.ModuleType("__main__")
        self._context = contextlib.ExitStack()

    def __enter__(self) -> Runner:
        import matplotlib as mpl
        import matplotlib.pyplot as plt

        before = sys.modules["__main__"], mpl.get_backend()
        self._context.callback(lambda: sys.modules.__setitem__("__main__", before[0]))
        self._context.callback(lambda: plt.switch_backend(before[1]))
        self._context.enter_context(mpl.rc_context(fname=folder() / "matplotlibrc"))
        self._context.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive", UserWarning)
        sys.modules["__main__"] = self._page
        plt.switch_backend("agg")
        self._others = set(plt.get_fignums())  # figures of whoever runs the page
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def text(self, cell: Cell) -> None:
        """Take note of the headings in a cell of text: figures are named after them."""
        self.heading = ([self.heading, *headings(cell.source)])[-1]

    def code(self, cell: Cell) -> Output:
        """Run a cell of code. If it is tagged ``raises-exception``, the exception belongs to its output."""
        self.number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                value = self._execute(cell.source)
            except ModuleNotFoundError as error:
                raise InputError(
                    f"lab {self.name}: it needs the package {error.name}; install qkv with its extra demo"
                ) from error
            except Exception as error:
                if "raises-exception" not in cell.tags:
                    raise
                value = None
                print(f"{type(error).__name__}: {error}")
            pictures = [*_new_figures(self._others), *_picture_of(value)]
            if value is not None and not _picture_of(value):
                print(value.to_string() if hasattr(value, "to_string") else repr(value))
        return Output(printed.getvalue().rstrip("\n"), [self._save(png) for png in pictures])

    def _execute(self, source: str) -> Any:
        """Run the code; the value of its last line, unless a semicolon follows it or it is a statement."""
        name = f"<{self.name}, cell {self.number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), vars(self._page))
        if last is None:
            return None
        assert isinstance(last, ast.Expr)
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), vars(self._page))
        return None if source.rstrip().endswith(";") else value

    def _save(self, png: bytes) -> Path:
        self.count += 1
        words = re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-") or "figure"
        path = self.out / f"{self.count:02d}-{words}.png"
        write_atomically(path, png)
        return path


def _new_figures(others: set[int]) -> Iterator[bytes]:
    """The PNGs of the figures that pyplot holds beside the others. They are closed."""
    import matplotlib.pyplot as plt

    for number in sorted(set(plt.get_fignums()) - others):
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png")
        plt.close(number)
        yield file.getvalue()


def _picture_of(value: Any) -> list[bytes]:
    """The PNG that a notebook would show for a value, in a list; empty if it shows text."""
    return [value._repr_png_()] if hasattr(value, "_repr_png_") else []
