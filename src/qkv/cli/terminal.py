"""What commands print: sentences, tables, the grid of heads, lines to copy, and the menu."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

PIPED = 160  # columns of a table that is not printed to a terminal
NO_MAP = "no map"
LETTERS = {
    "first token": "F", "other sink": "O", "induction": "I", "duplicate token": "D", "previous token": "P",
    "self": "S", "delimiter": "E", "local": "L", "uniform": "U", "mixed": "·", NO_MAP: "░",
}  # fmt: skip
SKETCH = 48  # the largest number of cells in a row of a sketched map
SHADES = " .:+#@"  # of weights, from below a thousandth of the largest one
SHADE_COLOURS = (None, "#54707c", "#2f8299", "#35a0a0", "#e0a03c", "#e05a2b")  # seen on light and on dark terminals
HEADS = 32  # the largest number of heads in a layer whose grid is drawn


_REMARKS: list[str] = []


def remark(text: str) -> None:
    """A sentence for standard error before the first result, so that bad input has one sentence."""
    _REMARKS.append(text)


def forget_remarks() -> None:
    """Drop the remarks of a command that was refused in this process."""
    _REMARKS.clear()


def _print_remarks() -> None:
    while _REMARKS:
        print(f"qkv: {_REMARKS.pop(0)}", file=sys.stderr)


def show(*parts: Any, error: bool = False) -> None:
    """Print sentences and tables to standard output, or to standard error.

    In a terminal they fit its width: sentences wrap, unless they have `no_wrap`, and tables lose columns. In a pipe
    sentences are one line, and no line ends in blanks.
    """
    _print_remarks()
    console = _console(error)
    for part in parts:
        text = isinstance(part, str) or hasattr(part, "plain")
        made = part if text else _narrowed(part, console)
        if console.is_terminal:
            console.print(made, markup=False, soft_wrap=bool(getattr(part, "no_wrap", False)))
            continue
        with console.capture() as lines:
            console.print(made, markup=False, soft_wrap=text)
        console.out(re.sub(r"[ \t]+$", "", lines.get(), flags=re.MULTILINE), end="", highlight=False)


def print_line(label: str, text: str | Path, *, main: bool = False, error: bool = False) -> None:
    """Print a label and a text that is never wrapped, so that paths and commands can be copied.

    It is dim, unless it is the `main` one.
    """
    from rich.text import Text

    _print_remarks()
    label = f"{label:<8} "
    line = Text.assemble((label, "bold"), str(text)) if main else Text(f"{label}{text}", "dim")
    _console(error).print(line, soft_wrap=True)


def print_files(files: Iterable[Path], *, error: bool = False) -> None:
    """Print the names of all files that a command wrote to a folder: the folder once."""
    found = [*files]
    print_line("Files", f"{found[0].parent}/  " + ", ".join(file.name for file in found), error=error)


class Laps:
    """The wall time of the parts of a command, from its start: that of the process, or of a call of `qkv.cli.main`.

    >>> laps = Laps()
    >>> with laps("measuring"):
    ...     pass
    >>> "measuring" in str(laps)
    True
    """

    began: ClassVar[float] = time.perf_counter()

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        total = time.perf_counter() - self.began
        parts = self._parts | {"importing and the rest": total - sum(self._parts.values())}
        return f"{total:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; a column whose name begins with ">" is aligned to the right, and its numbers are never cut."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in columns:
        number = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if number else "left", no_wrap=number)
    return made


def token_table(tokens: pd.DataFrame) -> Table:
    """The tokens that receive most attention, from `Profile.tokens` or `Survey.tokens`."""
    from rich.text import Text

    from qkv.profiler.data.frames import percent
    from qkv.profiler.data.tables import token_names

    columns = "token", ">of all attention", ">× its share of the text", ">count"
    rows, names = table(*columns, title="Most attended tokens"), token_names(tokens["token"])
    for row in tokens.itertuples():
        # A survey names only some tokens.
        name = f"token {row.id}" if not row.token and "id" in tokens else f"“{names[row.token]}”"
        rows.add_row(Text(name), percent(row.share), f"{row.lift:.1f}", f"{row.count:,}")
    return rows


def token_name(token: str) -> Text:
    """A token in quotation marks; a space or a newline is visible."""
    from rich.text import Text

    from qkv.profiler.data.tables import readable

    return Text(f"“{readable(token)}”")


def head_grid(types: pd.DataFrame, without: Iterable[int] = ()) -> list[Text]:
    """The types of all heads as a picture: a column for each layer, a row for each head, and a legend.

    The layers `without` a map are grey.

    Coloured squares, or letters without colour. It is the legend alone if the grid does not fit: more than 32 heads, or
    more layers than columns.
    """
    import pandas as pd
    from rich.text import Text

    from qkv.profiler.data.frames import layers_and_heads

    console = _console()
    empty = [(layer, head, NO_MAP) for layer in without for head in sorted({*types["head"]})]
    if empty:
        types = pd.concat([types, pd.DataFrame(empty, columns=["layer", "head", "type"])], ignore_index=True)
    kinds = types.pivot(index="head", columns="layer", values="type").to_numpy()
    colours = _colours() if console.color_system and not console.no_color else None
    heads, layers = kinds.shape
    wide = 2 if 2 * layers <= console.width - 2 else 1
    lines = []
    if heads <= HEADS and layers <= console.width - 2:
        if colours:
            lines = _blocks([[colours[kind] for kind in row] for row in kinds], wide)
        else:
            lines = [Text("  " + "".join(LETTERS[kind] for kind in row)) for row in kinds]
        lines.append(Text(f"  {layers_and_heads(layers, heads)}: layers from left to right, heads down", "dim"))
    return lines + _wrapped(_legend(types, colours), console.width)


def sketch(weights: np.ndarray) -> list[Text]:
    """A map of weights, queries down and keys across, as coloured squares, or as characters without colour.

    Cells are the largest weights of at most 48 × 48 bins, on a logarithmic scale down to a thousandth of the largest.
    """
    import numpy as np
    from rich.text import Text

    console = _console()
    step = -(-max(weights.shape) // min(SKETCH, console.width - 2))
    cells = np.maximum.reduceat(weights, np.arange(0, weights.shape[0], step), 0)
    cells = np.maximum.reduceat(cells, np.arange(0, weights.shape[1], step), 1)
    with np.errstate(divide="ignore"):
        levels = np.clip(np.ceil((np.log10(cells / (weights.max() or 1)) / 3 + 1) * 5), 0, 5).astype(int)
    if console.color_system and not console.no_color:
        return _blocks([[SHADE_COLOURS[level] for level in row] for row in levels], 1)
    pairs = np.maximum.reduceat(levels, np.arange(0, len(levels), 2), 0)  # a character is twice as high as wide
    return [Text("  " + "".join(SHADES[level] for level in row)) for row in pairs]


def _blocks(colours: Sequence[Sequence[str | None]], wide: int) -> list[Text]:
    """Two rows a line: the upper half of each character has one colour, the lower half another; None is left empty."""
    from rich.text import Text

    lines = []
    for upper, lower in itertools.zip_longest(colours[::2], colours[1::2], fillvalue=[None] * len(colours[0])):
        line = Text("  ")
        for above, below in zip(upper, lower, strict=True):
            mark = "▀" if above else "▄" if below else " "
            line.append(mark * wide, f"{above} on {below}" if above and below else above or below or "")
        lines.append(line)
    return lines


def _legend(types: pd.DataFrame, colours: Mapping[str, str] | None) -> Iterator[Text]:
    """Each type with its number of heads and its strongest head."""
    from rich.text import Text

    from qkv.profiler.data.findings import head_name

    counts = types["type"].value_counts()
    for kind, letter in LETTERS.items():
        if number := int(counts.get(kind, 0)):
            mark = Text("■", colours[kind]) if colours else Text(letter)
            best = (
                ""
                if kind in ("mixed", NO_MAP)
                else f" ({head_name(types.loc[types[types['type'] == kind][kind].idxmax()])})"
            )
            yield Text.assemble(mark, f" {number:,} {kind}", (best, "dim"))


def _wrapped(parts: Iterable[Text], width: int) -> list[Text]:
    """The parts in lines of at most this width; none is broken."""
    from rich.text import Text

    lines = [Text("  ")]
    for part in parts:
        if len(lines[-1]) > 2 and len(lines[-1]) + len(part) + 3 > width:
            lines.append(Text("  "))
        lines[-1] += (Text("   ") if len(lines[-1]) > 2 else Text()) + part
    return lines


def _colours() -> dict[str, str]:
    """The colours of types that are seen on light and on dark terminals."""
    from qkv.plot.layout import KINDS, KINDS_DARK

    return KINDS_DARK | {
        "mixed": KINDS["uniform"],
        "uniform": "#5f676d",
        "self": "#4f9bbf",
        "delimiter": "#8a5433",
        NO_MAP: "#3a3f43",
    }


def _narrowed(rows: Any, console: Console) -> Any:
    """The table without its last columns, if it is wider than the terminal: a number that is cut is a wrong number."""
    from rich.table import Table

    if not isinstance(rows, Table):
        return rows
    left_out: list[str] = []
    while len(rows.columns) > 2 and sum(map(_width, rows.columns)) > console.width:
        left_out.insert(0, str(rows.columns.pop().header).replace("\n", " "))
    if left_out:
        rows.caption, rows.caption_justify = f"not shown at this width: {', '.join(left_out)}", "left"
    return rows


def _width(column: Column) -> int:
    """The characters that a column needs: its longest line if it is not wrapped, else its longest word; and a gap."""
    text = "\n".join(str(cell) for cell in (column.header, *column.cells))
    return 3 + max(map(len, text.split("\n") if column.no_wrap else text.split()), default=0)


def _console(error: bool = False) -> Console:
    import sys

    from rich.console import Console

    terminal = (sys.stderr if error else sys.stdout).isatty()
    return Console(stderr=error, highlight=False, width=None if terminal else PIPED)


MENU: dict[str, dict[str, str]] = {
    "Look at a model": {
        "qkv profile": "measure where every head attends, and write a report",
        "qkv view": "explore the heads of a model, or a saved profile, in your browser",
        "qkv map --layer 1 --head 2": "draw one head, query by key, at any zoom",
        "qkv flow": "trace which tokens the last token's final state comes from",
    },
    "Find out what matters": {
        "qkv ablate": "remove one head after the other: how much the loss rises",
        "qkv sources --passages *.txt …": "tell which passages a model read its answer from",
        "qkv evict": "evict keys from the cache: how much attention and loss it costs",
        "qkv survey minilm notes/": "profile a whole corpus, resumable, on many machines",
    },
    "Learn": {
        "qkv lab sinks": "run a lab or a chapter of the tutorial here; qkv lab lists them",
        "qkv check multi_head my.py": "check your answer to an exercise of a lab",
        "qkv train reversal": "train a small model whose correct attention is known (half a minute)",
        "qkv experiment": "claims about attention, tested on small models",
        "qkv claims C014 C061": "what courses claim about attention: verdicts with evidence",
    },
    "Run": {'qkv generate qkv-mini "class Stack:"': "continue a text"},
}


def show_menu() -> None:
    """Print the menu."""
    from rich.table import Table
    from rich.text import Text

    show(Text.from_markup("[bold]qkv[/bold]: compose, measure and explain attention."))
    width = 2 + max(len(command) for lines in MENU.values() for command in lines)
    for heading, lines in MENU.items():
        rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        rows.add_column(style="cyan", no_wrap=True, min_width=width)
        rows.add_column()
        for command, purpose in lines.items():
            rows.add_row(f"  {command}", purpose)
        show(Text(f"\n{heading}", "bold"), rows)
    start = "Start with [cyan]qkv profile[/cyan]: a small model comes with qkv, so nothing is downloaded."
    show(Text.from_markup(f"\n{start}\n[cyan]qkv COMMAND --help[/cyan] shows the options of a command with examples."))
