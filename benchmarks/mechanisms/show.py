"""The results of `python -m benchmarks.mechanisms` as a terminal table, as Markdown, and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

COLOURS = {
    "qkv": "#12415f",
    "plain": "#78b9c6",
    "sdpa": "#b8501a",
    "flex": "#7c4a86",
    "eager": "#9aa1a7",
    "x-transformers": "#e3a25b",
}


def table(result: dict[str, Any]) -> Table:
    """Milliseconds of qkv at the longest length, ratios to rivals, and exponents."""
    lengths = _lengths(result)
    longest = lengths[-1]
    title = f"{settings(result)}, at {longest:,} tokens"
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    made.add_column("mechanism")
    for name in ("ms", "time ~ n^", "memory ~ n^", "× sgemm"):
        made.add_column(name, justify="right")
    made.add_column("time of qkv / time of …")
    for name, row in result["mechanisms"].items():
        cell = row["cells"][longest]
        ratios = "  ".join(f"{rival} {_ratio(ratio)}" for rival, ratio in cell["ratios"].items())
        made.add_row(
            name,
            f"{1e3 * cell['seconds']['qkv']:.4g}",
            _number(row["exponent of time"]),
            _number(row["exponent of memory"]),
            _number(_share(row, longest, result)),
            ratios,
        )
    return made


def markdown(result: dict[str, Any]) -> str:
    """Milliseconds of qkv and its ratio to each rival at all lengths, and its share of the FLOP/s of one product."""
    lengths = _lengths(result)
    head = ["mechanism", "against", *(f"{n:,}" for n in lengths), "time ~ n^", "memory ~ n^", "× sgemm"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 2 + "---:|" * (len(head) - 2)]
    for name, row in result["mechanisms"].items():
        ours = [f"{1e3 * row['cells'][n]['seconds']['qkv']:.3g} ms" for n in lengths]
        share = _share(row, lengths[-1], result)
        tail = [_number(x) for x in (row["exponent of time"], row["exponent of memory"], share)]
        lines.append("| " + " | ".join([f"**{name}**: {row['what']}", "", *ours, *tail]) + " |")
        rivals = dict.fromkeys(rival for n in lengths for rival in row["cells"][n]["ratios"])
        for rival in rivals:
            cells = [_ratio(row["cells"][n]["ratios"].get(rival)) for n in lengths]
            lines.append("| " + " | ".join(["", f"/ {rival}", *cells, "", "", ""]) + " |")
    return "\n".join(lines) + "\n"


def goals(result: dict[str, Any]) -> str:
    """A table of the goals and the ratios reached."""
    lines = ["| mechanism | / | tokens | at most | got | |", "|---|---|---:|---:|---:|---|"]
    for name, row in result["mechanisms"].items():
        for goal in row["goals"]:
            reached = (
                "reached" if goal["got"] <= goal["at most"] else f"missed by {goal['got'] / goal['at most'] - 1:.0%}"
            )
            numbers = f"{goal['n']:,} | {goal['at most']:.2f} | {goal['got']:.3f}"
            lines.append(f"| {name} | {goal['rival']} | {numbers} | {reached} |")
    return "\n".join(lines) + "\n"


def figure(result: dict[str, Any], path: Path) -> None:
    """Time against length, one panel for each mechanism; if some have rivals, only for these.

    The time of plain causal softmax, of qkv itself, is drawn beside them and is no rival.
    """
    import matplotlib.pyplot as plt

    from qkv.plot.layout import HAIRLINE, INK, MUTED

    lengths, rows = _lengths(result), result["mechanisms"]
    rows = {
        name: row for name, row in rows.items() if any({*c["ratios"]} - {"plain"} for c in row["cells"].values())
    } or rows
    across = min(4, len(rows))
    down = -(-len(rows) // across)
    fig, axes = plt.subplots(
        down, across, figsize=(2.5 * across, 2.0 * down + 1.0), sharex=True, sharey=True, squeeze=False
    )
    for ax, (name, row) in zip(axes.flat, rows.items(), strict=False):
        for rival, colour in COLOURS.items():
            points = [
                (n, 1e3 * row["cells"][n]["seconds"][rival]) for n in lengths if rival in row["cells"][n]["seconds"]
            ]
            if points:
                own = rival == "qkv"
                style = {"linewidth": 2.0 if own else 1.1, "markersize": 3.4 if own else 2.4, "zorder": 3 if own else 2}
                ax.plot(*zip(*points, strict=True), marker="o", color=colour, label=rival, **style)
        ax.set_title(name, loc="left", fontsize=11, color=INK)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.grid(visible=True, which="major", linewidth=0.6, color=HAIRLINE)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(HAIRLINE)
        ax.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        ax.tick_params(labelsize=8.5, labelcolor=MUTED, color=HAIRLINE)
        ax.minorticks_off()
    for ax in list(axes.flat)[len(rows) :]:
        ax.set_visible(False)
    legends = [ax.get_legend_handles_labels() for ax in axes.flat]
    handles = {label: line for lines, labels in legends for line, label in zip(lines, labels, strict=True)}
    threads = "" if result.get("device") == "cuda" else f", {result['machine']['threads']} threads"
    height = fig.get_size_inches()[1]
    fig.tight_layout(rect=(0, 0, 1, 1 - 0.62 / height))
    fig.legend(
        handles.values(), handles, loc="upper left", bbox_to_anchor=(0.003, 1 - 0.28 / height), ncols=len(handles),
        frameon=False, fontsize=10,
    )  # fmt: skip
    fig.text(
        0.01, 1 - 0.1 / height,
        f"Milliseconds against tokens: {settings(result)}{threads}",
        va="top", fontsize=11, color=INK,
    )  # fmt: skip
    fig.savefig(path, dpi=140)
    plt.close(fig)


def settings(result: dict[str, Any]) -> str:
    """The pass, dtype, heads, queries and card of a result."""
    queries = result.get("queries")
    some = "" if queries is None else f", {queries:,} {'query' if queries == 1 else 'queries'}"
    card = f", {result['machine']['card']}" if result.get("device") == "cuda" else ""
    return f"{result['pass']}, {result['dtype']}, {result['heads']} heads × {result['head_dim']}{some}{card}"


def _lengths(result: dict[str, Any]) -> list[Any]:
    return list(next(iter(result["mechanisms"].values()))["cells"])


def _share(row: dict[str, Any], length: Any, result: dict[str, Any]) -> float | None:
    """FLOP/s of a forward pass as a share of the FLOP/s of one large matrix product in the same run."""
    cell = row["cells"][length]
    if cell["flops"] is None or result["pass"] != "forward" or result["dtype"] != "float32":
        return None
    return float(cell["flops"] / cell["seconds"]["qkv"] / row["sgemm FLOP/s"])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value > 0.1 else f"{value:.4f}"
