"""The page of all results in a folder, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkv.errors import InputError
from qkv_lab.experiments.evidence import ONLY, Interval
from qkv_lab.experiments.record import load, seconds_in
from qkv_lab.experiments.registry import BUILT_IN


def table(out: str | Path) -> str:
    """All results in a folder as a Markdown page with questions, verdicts, costs and links to the figures."""
    lines = [
        "# Experiments",
        "",
        "Each verdict compares a confidence interval of a mean over seeds (Student's t) with a bound that was written",
        "down before the runs. Runs with the same seed share initial weights and data. Variants that did not learn",
        "their task are not counted. Verdicts hold for the small models trained here.",
    ]
    for name, found in _results(Path(out)):
        lines += ["", f"## {name}", "", f"*{found['question']}*", ""]
        lines += [] if all(v["text"] in found["paragraph"] for v in found["verdicts"]) else [found["paragraph"], ""]
        lines += [f"- **{v['claim']} {_outcome_text(v)}**: {v['text']}" for v in found["verdicts"]]
        lines += ["", f"![{found['title']}]({name}.png)", "", _origin(found)]
    return "\n".join(lines).replace("<s>", "`<s>`") + "\n"  # a browser would take <s> for strike-through


def _outcome_text(verdict: Mapping[str, Any]) -> str:
    """The outcome of a verdict, with the conditions under which the claim holds."""
    if verdict["holds"] != ONLY:
        return str(verdict["holds"])
    intervals = (Interval(**i) for i in verdict["intervals"])
    under = [i.condition for i in intervals if i.clears and not i.unless and not i.premise]
    return f"{ONLY}: {', '.join(under)}"


def _origin(found: Mapping[str, Any]) -> str:
    """How a result was made: command, seeds, cost, machine, commit and dates."""
    seeds = sorted({len(x["results"]) for x in found["variants"].values()})
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    dated = {v["criterion"]["dated"] for v in found["verdicts"] if "criterion" in v}
    parts = [
        f"`{found.get('command', 'qkv experiment ' + found['name'])}`",
        f"{number} seeds",
        f"{seconds_in(found) / 60:.0f} minutes of processor time" if seconds_in(found) else "",
        f"{found['machine']['cpu']}" if "machine" in found else "",
        f"criteria of {', '.join(sorted(dated))}" if dated else "",
        f"run {found['created'][:10]}" if "created" in found else "",
        f"commit {found['versions']['commit'][:9]}" if found.get("versions", {}).get("commit") else "",
    ]
    return f"Made by {', '.join(filter(None, parts))}."


def _results(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results in a folder by name: of built-in experiments in their order, then of all others."""
    for name in BUILT_IN:
        if (folder / f"{name}.json").exists():
            yield name, load(folder / f"{name}.json")
    for file in sorted(folder.glob("*.json")):
        if file.stem not in BUILT_IN:
            with suppress(InputError):  # a JSON file of something else
                yield file.stem, load(file)
