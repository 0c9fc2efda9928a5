"""The tables of the documentation that come from kept results in benchmarks/results, for `make figures`.

    PYTHONPATH=. .venv/bin/python docs/make_tables.py

A test compares them with the pages, so a page cannot say what a newer run has changed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import make_plan
import model_speed

from benchmarks.mechanisms import run, show
from benchmarks.timing import MAIN_PROCESSOR

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BOUNDS = {  # of the benchmarks with goals that are missed, what they are bound by
    "decode": "the elementwise operations on the weights of each head: grouped heads share keys, but not weights.",
    "llm": "at 73 tokens as `profile_short`. An ablated head changes all later layers and the output matrix, "
    "which are computed for each head: that is about half of a forward.",
    "map": "the compiled library has made the forward faster; bins of a picture need not be powers of two, so they are "
    "still filled from tiles of torch operations.",
    "own": "a normalizer of one's own is a formula of torch operations, and its level is found by search.",
    "native": "calls of 64 tokens in bfloat16; by what was not measured. All rows are open on processors with AMX, "
    "whose tiles the library uses: none was at hand.",
    "profile_cost": "the time and memory of eager attention differ between machines.",
    "profile_short": "the fixed cost of observing (hooks, geometry, data sets).",
}


def pages() -> dict[Path, str]:
    """The text of every page with such a table."""
    found = {DOCS / "benchmarks.md": benchmarks()}
    for name, tables in {
        "scale.md": {"measured": survey(), "plan": make_plan.table()},
        "view.md": {"viewer": viewer(), "load": load()},
        "gpu.md": {"card": card()},
    }.items():
        found[DOCS / name] = filled((DOCS / name).read_text(), "make_tables.py", tables)
    return found


def filled(text: str, maker: str, tables: Mapping[str, Sequence[str]]) -> str:
    """A page with each table at the comment that has its name and that of the file that makes it."""
    for name, lines in tables.items():
        begin = f"<!-- {name}: docs/{maker} -->\n"
        before, rest = text.split(begin)
        text = before + begin + "\n".join(["", *lines, "", ""]) + rest[rest.index("<!-- end -->") :]
    return text


def benchmarks() -> str:
    """docs/benchmarks.md."""
    results = _results(RESULTS)
    folders = sorted(p for p in RESULTS.iterdir() if p.is_dir() and p.name != "mechanisms")
    others = {folder.name: _results(folder) for folder in folders}
    goals = tomllib.loads((RESULTS.parent / "goals.toml").read_text())
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` and `make figures`; do not edit. Ratios are medians over alternating repeats in one",
        "process; memory is the largest resident size of a fresh process. benchmarks/goals.toml has the goals; a goal",
        "that is missed says by how much.",
        "",
        "| benchmark | measured | value | goal |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        for what, value in result.items():
            if isinstance(value, float):
                lines.append(f"| {name} | {what} | {value:.3g} | {_verdict(goals.get(name, {}).get(what), value)} |")
            elif what.startswith("time"):
                lines += [f"| {name} | {what}: {n.replace('|', 'or')} | {v:.3f} | |" for n, v in value.items()]
    missed = [name for name in BOUNDS if any(f"| {name} |" in line and "missed" in line for line in lines)]
    lines += ["", "What bounds the goals that are missed:", "", *(f"- `{name}`: {BOUNDS[name]}" for name in missed)]
    lines += ["", *_profile_table(results), "", *model_speed.table(results["decoder"])]
    lines += ["![Milliseconds per token over 100,000 tokens](figures/stream.png)", "", *_mechanisms()]
    lines += _machines(results)
    for kind, found in others.items():
        lines += ["", f"## Other processors: {kind}", "", *_beside(found, results, goals, kind), "", *_machines(found)]
    return "\n".join(lines) + "\n"


def _results(folder: Path) -> dict[str, Any]:
    return {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.stem != "torture"}


def _beside(found: Mapping[str, Any], results: Mapping[str, Any], goals: Mapping[str, Any], kind: str) -> list[str]:
    """Numbers of another kind of processor beside those of the main one."""
    lines = [f"| benchmark | measured | {kind} | {MAIN_PROCESSOR} | goal, on {kind} |", "|---|---|---|---|---|"]
    for name, result in found.items():
        for what, value in result.items():
            if isinstance(value, float):
                main = results.get(name, {}).get(what)
                verdict = _verdict(goals.get(name, {}).get(what), value)
                lines.append(f"| {name} | {what} | {value:.3g} | {'' if main is None else f'{main:.3g}'} | {verdict} |")
    return lines


def _verdict(goal: str | None, value: float) -> str:
    """Whether a value meets a goal, such as "≤ 1.3"."""
    if goal is None:
        return ""
    sign, number = goal.split()
    bound = float(number)
    if value >= bound if sign == "≥" else value <= bound:
        return f"{goal}: met"
    percent = 100 * abs(value - bound) / bound
    return f"{goal}: **missed** by {percent:.{0 if percent >= 1 else 1}f} %"


def survey() -> list[str]:
    """The table of docs/scale.md with measurements."""
    survey, processes = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("survey", "survey_processes"))
    (ratio,) = (value for name, value in survey.items() if name.startswith("throughput"))
    (gain,) = (value for name, value in processes.items() if name.startswith("time"))
    rate = survey["tokens a second"]
    return [
        "| measured here | value |",
        "|---|---|",
        f"| throughput, survey / plain batched inference (MiniLM, {survey['texts']:,} texts of "
        f"{survey['tokens in a text']} tokens, 2 threads) | {ratio:.3f} |",
        f"| tokens per second, plain | {rate['plain']:,.0f} |",
        f"| tokens per second, survey | {rate['survey']:,.0f} |",
        f"| time, one process of one thread / two of one thread | {gain:.2f} |",
    ]


def viewer() -> list[str]:
    """The table of docs/view.md with the times of the viewer."""
    tiles, page = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("viewer", "viewer_page"))
    (interactive,) = (value for name, value in page.items() if name.startswith("overview: seconds"))
    (frames,) = (value for name, value in page.items() if name.startswith("frames a second"))
    (weight,) = (value for name, value in page.items() if name.startswith("heaviest page"))
    rows = ["| 2 threads, medians | measured | goal |", "|---|---:|---:|"]
    rows += [f"| overview of 32 × 32 heads, from the server's answer to interactive | {interactive:.2f} s | ≤ 1 s |"]
    rows += [f"| pan and zoom at {page['tokens of the map']:,} tokens, cached tiles | {frames:.0f} frames/s | ≥ 30 |"]
    for length, found in tiles["milliseconds"].items():
        zooms = found["cold tiles by zoom: median"]
        deep = [ms for zoom, ms in zooms.items() if int(zoom) >= 2]
        goal = "≤ 150 ms" if length.startswith("16,384") else ""
        rows += [f"| a cold tile of 256 × 256, {length}, all zooms | {found['cold tiles']:.0f} ms | {goal} |"]
        rows += [f"| … zoom 2 and deeper | {min(deep):.0f} to {max(deep):.0f} ms | |"]
        rows += [f"| … zoom 0: the whole map in one pass | {zooms['0'] / 1000:.1f} s | |"]
        rows += [f"| a row, a column, {length} | {found['asked']['row']:.1f}, {found['asked']['column']:.1f} ms | |"]
    rows += [f"| the heaviest page without data, uncompressed | {weight:.0f} kB | ≤ 300 kB |"]
    return rows


def load() -> list[str]:
    """The table of docs/view.md with the server under load."""
    found = json.loads((RESULTS / "server_load.json").read_text())
    columns = ("median", "95th percentile", "most")
    rows = [f"| a cheap request, milliseconds | {' | '.join(columns)} |", "|---|---:|---:|---:|"]
    for name, times in found["milliseconds of a cheap request"].items():
        rows += [f"| {name} | {' | '.join(f'{times[column]:.1f}' for column in columns)} |"]
    return rows


def card() -> list[str]:
    """The tables of docs/gpu.md with times on cards."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("gpu*.json")):
        found = json.loads(path.read_text())
        machine = found["machine"]
        lines += [""] * bool(lines) + [
            f"| {machine['card']}, torch {machine['torch']}, bfloat16, causal | tokens | ms | beside | ratio |",
            "|---|---:|---:|---|---:|",
        ]
        for length, row in found["measure"].items():
            tokens, times = f"{int(length.split()[0]):,}", row["milliseconds"]
            for name, label in (
                ("statistics", "output and statistics"),
                ("with map and masses", "with map and masses"),
            ):
                beside = f"SDPA, {times['SDPA']:.1f} ms"
                lines.append(f"| {label} | {tokens} | {times[name]:.1f} | {beside} | {row['to SDPA'][name]:.1f} |")
        for length, row in found["profile"].items():
            tokens, times = f"{int(length.split()[0]):,}", row["milliseconds"]
            memory = row["peak bytes"]["profile"] / row["peak bytes"]["forward"]
            beside, ratio = f"its forward, {times['forward']:.0f} ms; memory × {memory:.2f}", row["to the forward"]
            lines.append(f"| profile of a Llama | {tokens} | {times['profile']:,.0f} | {beside} | {ratio:.1f} |")
    return lines


def _mechanisms() -> list[str]:
    """Tables of `python -m benchmarks.mechanisms`: the goals, and all measurements."""
    found = {path.stem: run.load(path) for path in sorted((RESULTS / "mechanisms").glob("*.json"))}
    lines = [
        "## Every mechanism",
        "",
        "Measured by `python -m benchmarks.mechanisms`: milliseconds of qkv, and the ratio to the time of an",
        "alternative in the same run.",
        "`plain` is qkv's causal softmax; `sdpa` is torch's fused attention, with a mask or bias tensor if needed;",
        "`flex` is FlexAttention compiled for CPU (the block mask is made before; forward only, from 4,096 tokens on);",
        "`eager` forms the weights. An alternative is left out if its scores would take more than 3 GiB. Exponents of",
        "time are fitted from 2,048 tokens on; exponents of memory are fitted to the growth of a fresh process over",
        "the last three lengths. The last column is the FLOP/s at the longest length, relative to one large float32",
        "product in the same run, which is an upper limit.",
        "",
        "![Milliseconds by length](figures/bench.png)",
        "",
    ]
    for result in found.values():
        shape = show.settings(result)
        lines += [f"### {shape[0].upper()}{shape[1:]}", ""]
        if any(row["goals"] for row in result["mechanisms"].values()):
            lines += ["Goals:", "", show.goals(result)]
        lines += ["All:", "", show.markdown(result)]
    return lines


def _profile_table(results: dict[str, Any]) -> list[str]:
    """Seconds and peak memory of a profile and its alternatives."""
    cost = results["profile_cost"]
    rows = ["| 6 layers × 6 heads × 64, 8,192 tokens | seconds | peak memory |", "|---|---|---|"]
    for job, what in (("plain", "torch SDPA"), ("profile", "qkv profile"), ("eager", "`output_attentions=True`")):
        seconds = sorted(cost["seconds"][job])
        rows.append(f"| {what} | {seconds[len(seconds) // 2]:.2f} | {cost['peak'][job] / 1e9:.2f} GB |")
    return rows


def _machines(results: dict[str, Any]) -> list[str]:
    """One line for each machine, with the benchmarks that ran on it."""
    names: dict[str, list[str]] = {}
    for name, result in results.items():
        names.setdefault(", ".join(f"{k} {v}" for k, v in result["machine"].items()), []).append(name)
    return [f"- {', '.join(of)}: {machine}" for machine, of in names.items()]


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
