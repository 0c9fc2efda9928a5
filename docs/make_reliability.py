"""Writes docs/reliability.md from benchmarks/results/torture.json, for `make torture`."""

from __future__ import annotations

import json
from pathlib import Path

from torture.faults import FAULTS
from torture.work import WORK

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "torture.json"
START = """# Reliability

Made by `make torture`; do not edit. It kills the commands that write results with `kill -9` at random moments, and
takes disks, folders and clocks away from them.

After a kill no file under its final name may be half written, and the repeated command has to end with the same
results as one that was never disturbed: byte for byte, except for measured times. `train`, `experiment` and `survey`
continue where they were; `profile` and `map` start again.
"""
END = """
- **Full disk**: the results go to a disk that is too small. The command has to end with one sentence and exit code 2,
  and no temporary file may be left. What cannot be continued is removed.
- **Read-only folder**: the same, before anything is computed.
- **Lost folder**: the folder of the results is replaced by a file while the command runs, as when a network drive is
  lost.
- **SIGTERM**: as from a scheduler, after 70 % of the time. The repeated command has to end with the same results.
- **Clock jumps**: back by a day and forward by a week, while the command runs. The results have to be the same.
"""


def page() -> str:
    """The page, in Markdown."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    cases: dict[str, list[str] | str] = found["cases"]
    lines = [START, f"| command | kills | {' | '.join(FAULTS)} |", f"|---|---|{'---|' * len(FAULTS)}"]
    for work in WORK:
        kills = [x for name, x in cases.items() if name.startswith(f"{work.name}: kill ")]
        if kills:
            cells = [f"{sum(not x for x in kills)} of {len(kills)} right"]
            cells += [_cell(cases[f"{work.name}: {fault}"]) for fault in FAULTS]
            lines.append(f"| {work.name} | {' | '.join(cells)} |")
    lines += [f"\nRun {found['run']} with qkv {found['qkv']} on {found['machine']}.", END]
    return "\n".join(lines)


def _cell(problems: list[str] | str) -> str:
    text = problems if isinstance(problems, str) else "; ".join(problems) or "right"
    return text.replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    (DOCS / "reliability.md").write_text(page(), encoding="utf-8")
