"""`qkv lab`: the labs and the tutorial in a terminal, and as notebooks."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv.cli.shared import folder
from qkv.cli.terminal import print_line, show, table
from qkv.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from qkv_lab.lessons.catalog import Lesson
    from qkv_lab.lessons.page import Cell
    from qkv_lab.lessons.run import Runner


def lab(
    names: Annotated[tuple[str, ...], Positional, arg(metavar="[NAME …]", help_behavior_hint="")] = (),
    /,
    *,
    notebook: Annotated[bool, FlagCreatePairsOff] = False,
    no_code: Annotated[bool, FlagCreatePairsOff] = False,
    no_solutions: Annotated[bool, FlagCreatePairsOff] = False,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-lab"),
) -> None:
    """Work through a lab, a chapter of the tutorial or a page of background, offline.

    Without a name the command lists them. With a name it runs the page: it prints the text, the code with its results
    (solutions stay hidden) and the hints of the exercises, and saves the figures as PNG files in DIR/NAME. To write the
    code yourself, take the notebook, or check a file of your own with qkv check.

    qkv lab                       (list all pages)

    qkv lab sinks                 (run a lab in the terminal; less than a minute)

    qkv lab sinks --notebook      (write qkv-lab/sinks.ipynb, for Jupyter)

    qkv lab by-hand               (three tokens whose numbers you change, in the browser)

    qkv check                     (the exercises, for answers in a file of your own)

    Args:
        names: Names of labs or chapters. Without a name the command lists them.
        notebook: Write Jupyter notebooks instead of running the code here.
        no_code: Print the text and the results alone.
        no_solutions: Write notebooks in which a test stands in the place of each solution, for a class, also with
            nbgrader. The notebook with solutions is the key.
        out: Folder for figures and notebooks. It is created if it does not exist.
    """
    from qkv_lab.lessons.catalog import lesson

    if no_solutions and not notebook:
        raise InputError("--no-solutions is for notebooks: give --notebook, too")
    if not names:
        _list()
        return
    chosen = [lesson(name) for name in dict.fromkeys(names)]  # raises for an unknown name before the first one runs
    if notebook and (pages := [one.name for one in chosen if one.part == "_static"]):
        raise InputError(f"--notebook is given, but {pages[0]} is a page for the browser")
    for one in chosen:
        if one.part == "_static":
            _open(one, out)
        elif notebook:
            _write_notebook(one, out, solutions=not no_solutions)
        else:
            _run(one, out / one.name, no_code)


def _list() -> None:
    """Print the names of all labs and chapters, what they are about, and how long they take."""
    from qkv_lab.lessons.catalog import LESSONS, PARTS

    for part, heading in PARTS.items():
        rows = table("name", "about", ">minutes", title=heading)
        rows.columns[0].style, rows.columns[0].no_wrap, rows.columns[0].min_width = "cyan", True, 14
        for one in LESSONS:
            if one.part == part:
                rows.add_row(one.name, one.about, str(one.minutes))
        show(rows)
    show("Minutes are those of a reader who writes the answers. Everything runs offline, on one core.")
    show("usage: qkv lab NAME … [--notebook] [--out DIR], and qkv check for the exercises")


def _write_notebook(one: Lesson, out: Path, *, solutions: bool) -> None:
    from qkv._files import write_atomically
    from qkv_lab.lessons.notebook import notebook

    path = out / f"{one.name}.ipynb"
    with folder(out):
        write_atomically(path, notebook(one.text(), solutions=solutions))
    print_line("Notebook", f"{path}   (jupyter lab {path})", main=True)


def _open(one: Lesson, out: Path) -> None:
    """Write an interactive page as one file, and open it in the browser."""
    import webbrowser

    from qkv._files import write_atomically
    from qkv_lab.lessons import catalog

    style, script = ((catalog.folder() / one.part / f"{one.name}.{x}").read_text("utf-8") for x in ("css", "js"))
    path = out / f"{one.name}.html"
    with folder(out):
        head = f"<!doctype html><meta charset='utf-8'><title>Attention by hand</title><style>{style}</style>"
        body = f"<body style='font-family: sans-serif'><h1>Attention by hand</h1><div id='{one.name}'></div>"
        write_atomically(path, f"{head}{body}<script>{script}</script>")
    print_line("Page", path, main=True)
    webbrowser.open(path.resolve().as_uri())


def _run(one: Lesson, out: Path, no_code: bool) -> None:
    """Print the page with its results; the figures go to the folder `out`."""
    from rich.console import Console

    from qkv_lab.lessons import page
    from qkv_lab.lessons.page import cells
    from qkv_lab.lessons.run import Runner

    console = Console(highlight=False)
    parts = cells(one.text())
    codes = sum(cell.kind == "code" for cell in parts)
    saved: list[Path] = []
    began = time.perf_counter()
    with folder(out), Runner(one.name, out) as runner:
        for cell in parts:
            if cell.kind == "text":
                runner.text(cell)
                page.show(console, cell.source)
            else:
                saved += _code(console, runner, cell, codes, no_code)
    print_line("Lab", f"{one.name} in {time.perf_counter() - began:.0f} s", main=True)
    for path in saved:
        print_line("Figure", path)
    print_line("Code", f"qkv lab {one.name} --notebook")


def _code(console: Console, runner: Runner, cell: Cell, codes: int, no_code: bool) -> list[Path]:
    """Run a cell, print its code and its result, and return its figures."""
    from rich.syntax import Syntax

    from qkv._progress import spinner
    from qkv_lab.lessons.exercises import checked, exercise

    with spinner(f"cell {runner.number + 1} of {codes}: {runner.heading}"):
        output = runner.code(cell)
    found = checked(cell)
    if found is not None:
        one = exercise(found[0])
        console.print(f"Exercise {one.name}: define {one.signature}", style="bold cyan", markup=False)
    if found is not None or not (no_code or "hide-cell" in cell.tags):
        source = textwrap.indent(cell.source if found is None else one.code, "  ")
        code = Syntax(source, "python", theme="ansi_dark", background_color="default").highlight(source)
        console.print(code, soft_wrap=True)
    if found is not None:
        console.print("This code contains a mistake, which the check explains:", style="dim")
    if output.text and "hide-cell" not in cell.tags:
        _print_result(console, output.text, wrap=found is not None)
    if found is not None:
        told = f"Check your own: qkv check {found[0]} FILE.py. The page goes on with its own solution.\n"
        console.print(told, style="dim", markup=False)
    for path in output.figures:
        console.print(f"  figure  {path}\n", style="dim", markup=False, soft_wrap=True)
    return output.figures


def _print_result(console: Console, text: str, *, wrap: bool) -> None:
    """Print the output of a cell, indented. Tables are not wrapped, so that their columns stay whole."""
    from rich.padding import Padding
    from rich.text import Text

    if wrap:
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    else:
        console.print(Text(textwrap.indent(text, "  ")), soft_wrap=True)
    console.print()
