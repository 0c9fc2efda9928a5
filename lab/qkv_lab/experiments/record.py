"""The results of experiments: the JSON file of each, how it is written and read, and the page of all in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from qkv._untrusted import check_version, load_json
from qkv.errors import InputError, refusing
from qkv.runs.run import versions
from qkv_lab import log, settings
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import ERROR, ONLY, Interval, Verdict
from qkv_lab.experiments.registry import BUILT_IN
from qkv_lab.experiments.results import Outcome, Results

VERSION = 1
"""The version of the JSON file; increase it when an older qkv could misread a file that this version writes."""
ENTRIES = {"question": str, "verdicts": list, "quick": bool, "variants": dict}
"""The entries that every reader needs."""
DIGITS = 5
"""The significant digits of the numbers in the JSON file."""


def described(made: Experiment, results: Results, seeds: int, jobs: int) -> dict[str, Any]:
    """The contents of NAME.json, but for its verdicts."""
    return {
        "format_version": VERSION,
        "name": made.name,
        "question": made.question,
        "claims": list(made.claims),
        "quick": results.quick,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": _versions(),
        "machine": {**_machine(), "jobs": jobs},
        "command": command(made, results.quick, seeds),
        "level": results.level,
        "verdicts": [],
        "variants": _variants(made, results),
    }


def command(made: Experiment, quick: bool, seeds: int) -> str:
    """The command that makes the same results."""
    return f"qkv experiment {made.name}{' --quick' if quick else '' if seeds == made.seeds else f' --seeds {seeds}'}"


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """The entries of a verdict that are not empty, with rounded numbers."""
    return dict(rounded({name: x for name, x in verdict.as_dict().items() if x not in ((), None)}))


def _variants(made: Experiment, results: Results) -> dict[str, Any]:
    """The entry of each variant: all settings of its first run, the folders of its runs, and the outcome of each."""
    found: dict[str, Any] = {}
    for variant, outcomes in results.variants.items():
        found[variant] = {"seeds": [o.seed for o in outcomes]}
        runs = [s for o in outcomes for v, s in made.settings(o.seed, results.quick).items() if v == variant]
        if runs:
            found[variant]["settings"] = tomllib.loads(settings.to_toml(runs[0].task, runs[0].training))
            found[variant]["runs"] = [key(run) for run in runs]
        rows = ({name: x for name, x in asdict(o).items() if x not in ({}, None)} for o in outcomes)
        found[variant]["results"] = list(rows)
    return found


def key(*of: Setting) -> str:
    """The name of a run's folder: a hash of all settings."""
    text = "".join(settings.to_toml(one.task, one.training) for one in of)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(file: Path) -> dict[str, Any]:
    """The contents of a result file; `InputError` if it is missing or is no result of an experiment."""
    with refusing(f"out: no result of an experiment in {file} ({{}})"):
        found = load_json(file)
        check_version(found, VERSION)
        missing = ENTRIES.keys() - set(found)
        if missing:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        wrong = [name for name, kind in ENTRIES.items() if type(found[name]) is not kind]
        wrong += ["level"] * (not isinstance(found.get("level", 0.95), float))
        wrong += [f"verdict {v!r}"[:80] for v in found["verdicts"] if not isinstance(v.get("claim"), str)]
        for variant, rows in found["variants"].items():
            wrong += [f"the results of {variant[:80]!r}"] * (not all("seed" in row for row in rows["results"]))
            for row in rows["results"]:
                Outcome(**row)
        if wrong:
            raise ValueError(f"{wrong[0]} is not what an experiment writes")
        return dict(found)


def results_in(found: Mapping[str, Any]) -> Results:
    """The results in the contents of a result file."""
    rows = {variant: [Outcome(**row) for row in x["results"]] for variant, x in found["variants"].items()}
    return Results(rows, found["quick"], found.get("level", 1 - ERROR))


def seconds_in(found: Mapping[str, Any]) -> float:
    """The processor time of all runs in a result, in seconds."""
    return float(sum(row.get("seconds") or 0.0 for x in found["variants"].values() for row in x["results"]))


def rounded(value: Any) -> Any:
    """The value with all floats rounded to `DIGITS` significant digits."""
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text_of(value: Any) -> str:
    """The text of a JSON file, with NaN and infinity as null."""
    return _lines(log.finite(value)) + "\n"


def _lines(value: Any, indent: int = 0) -> str:
    """JSON with one line per entry, except short values and lists of numbers, so that people can read and diff it."""
    flat = json.dumps(value, allow_nan=False)
    if len(flat) + indent <= 110 or not isinstance(value, dict | list):
        return flat
    if isinstance(value, list) and not any(isinstance(x, dict) for x in value):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _lines(x, indent + 1) for x in value) + "\n" + " " * indent + "]"
    rows = (f"{pad}{json.dumps(k)}: {_lines(x, indent + 1)}" for k, x in value.items())
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"


def _versions() -> dict[str, str]:
    """The versions of packages, and the commit if qkv runs from a checkout."""
    source = Path(__file__).parents[3]
    if not (source / ".git").exists():
        return versions()
    found = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return versions() | ({"commit": found.stdout.strip()} if found.stdout else {})


def _machine() -> dict[str, Any]:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "threads": torch.get_num_threads(), "cores": os.cpu_count()}


# --- the page of all results ------------------------------------------------------------------------------------------


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
        lines += [f"- **{v['claim']} {_outcome_text(v)}**: {v['text']}" for v in found["verdicts"]]
        lines += ["", f"![{found['question']}]({name}.png)", "", _origin(found)]
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
