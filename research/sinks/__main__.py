"""Study the bundled models again: ``python -m research.sinks [NAME …]`` writes results/NAME.json into this package."""

from __future__ import annotations

import sys

from research.sinks.run import NAMES, RESULTS, study

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        study(name, file=RESULTS / f"{name}.part.jsonl").save(RESULTS / f"{name}.json")
        print(RESULTS / f"{name}.json")
