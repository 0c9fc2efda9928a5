"""The comparison that `qkv profile A --against B` prints and writes: which heads changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.profiler.comparison import Comparison
    from qkv.profiler.profiles import Profile


def saved(name: str) -> Profile | None:
    """The profile in a file that `Profile.save` wrote; None if `name` is not a file: then it names a model."""
    from qkv.profiler.profiles import Profile

    if Path(name).is_file():
        return Profile.load(name)
    if name.endswith(".zip"):
        raise InputError(f"--against: there is no file {name}, expected a saved profile or a model")
    return None


def show(comparison: Comparison, most: int = 10) -> None:
    """Print a summary and the heads that changed most."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for group in comparison.groups:
        names = " → ".join(escape(_name(p)) for p in (comparison.a, comparison.b))
        kind = "" if len(comparison.groups) == 1 else f"{group} · "
        console.print(f"\n[bold]{kind}{names}[/bold]", highlight=False)
        for sentence in comparison.summary(group):
            console.print(sentence, highlight=False, markup=False)
        heads = comparison.heads(group)
        if heads["change"].any():
            console.print(_table(heads.sort_values("change", ascending=False, kind="stable").head(most)))


def write(comparison: Comparison, out: Path) -> list[Path]:
    """Write comparison.csv, with all heads, and a figure for every group: compare.png, compare-cross.png …"""
    import pandas as pd

    from qkv._files import write_atomically
    from qkv.figures.layout import save_figure

    tables = [comparison.heads(group).assign(group=group) for group in comparison.groups]
    files = [out / "comparison.csv"]
    table = pd.concat(tables).set_index("group").reset_index()
    write_atomically(files[0], table.to_csv(index=False).encode())
    for group in comparison.groups:
        name = "compare.png" if group == comparison.a.main else f"compare-{group}.png"
        files.append(out / name)
        save_figure(comparison.plot(group), files[-1])
    return files


def _name(profile: Profile) -> str:
    return f"{profile.attrs.get('model', 'model')} ({profile.attrs.get('dtype', 'unknown')})"


def _table(heads: Any) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most changed heads", title_justify="left")
    table.add_column("head", no_wrap=True)
    table.add_column("moved", justify="right")
    table.add_column("attended to", no_wrap=True)
    table.add_column("now attends to", no_wrap=True)
    for name in ("first token", "entropy, nats"):
        table.add_column(name, justify="right")
    for row in heads.itertuples():
        table.add_row(
            f"{row.layer}.{row.head}", f"{row.change:.1%}", Text(row.goes_to_a),
            Text(row.goes_to_b, style="bold" if row.moved else ""),
            f"{100 * row.sink_difference:+.1f} %", f"{row.entropy_difference:+.2f}",
        )  # fmt: skip
    return table
