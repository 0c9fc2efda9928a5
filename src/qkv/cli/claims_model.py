"""`qkv claims --model`: the claims about attention sinks, judged on one trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qkv.cli.files import folder, read
from qkv.errors import renamed

if TYPE_CHECKING:
    from qkv.sinks import Study


def run_model(model: str, text: Path | None, out: Path) -> None:
    """Study a model, print its verdicts, and write sinks.json and sinks.png.

    Args:
        model: a name or folder, as for `qkv.load`.
        text: a UTF-8 file, from which 16 windows of up to 512 tokens are cut; the default texts if None.
        out: folder for the results. It is created if it does not exist.
    """
    from qkv.figures.save import save_figure
    from qkv.sinks import study

    passage = None if text is None else read(text, "--text")
    with folder(out), renamed(texts="--text", model="--model"):
        found = study(model, passage)
        _show(found)
        files = [out / "sinks.json", out / "sinks.png"]
        found.save(files[0])
        save_figure(found.figure(), files[1])
        print("\n".join(map(str, files)))


def _show(study: Study) -> None:
    """Print a table of verdicts for each length."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for tokens, verdicts in study.verdicts.items():
        title = Text(f"{study.attrs['model']}, {tokens} tokens")
        table = Table(
            "claim", "verdict", "because", title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for verdict in verdicts:
            table.add_row(Text(verdict.claim, no_wrap=True), Text(verdict.holds), Text(verdict.text))
        console.print(table)
