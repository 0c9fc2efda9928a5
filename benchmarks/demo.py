"""The second half of `make demo`: the cost of exact statistics of a long context, compared with plain SDPA.

python -m benchmarks.demo [--tokens 8192] [--out qkv-demo/long]
"""

from __future__ import annotations

from pathlib import Path

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.mechanisms.timing import alone
from qkv.cli import main as qkv_main


def demo(tokens: int = 8192, out: Path = Path("qkv-demo/long")) -> int:
    """Run a 6 × 6 × 64 causal model at TOKENS plainly and profiled, each in a fresh process, and print the results."""
    console = Console()
    runs = {}
    for job, what in (("plain", "torch SDPA, no statistics"), ("profile", "qkv profile: every statistic, exact")):
        with console.status(f"{what} at {tokens:,} tokens …"):
            runs[what] = alone("benchmarks.one_run", job, tokens, 6)
    weights = 6 * 6 * tokens**2 * 4
    title = f"One forward of 6 layers × 6 heads at {tokens:,} tokens"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "seconds", "peak memory"):
        table.add_column(name, justify="right" if name else "left")
    for what, run in runs.items():
        table.add_row(what, f"{run['seconds']:.2f}", f"{run['peak'] / 1e9:.2f} GB")
    table.add_row("[dim]the weights alone, had they been formed[/dim]", "", f"[dim]{weights / 1e9:.2f} GB[/dim]")
    console.print(table)
    return qkv_main(["profile", "random-gpt2", "--tokens", str(tokens), "--out", str(out)])


if __name__ == "__main__":
    raise SystemExit(tyro.cli(demo))
