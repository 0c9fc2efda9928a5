"""``python -m qkv.ledger.trials`` lists the trials; with names, or ``all``, it runs them and writes their results."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time

import torch

import qkv
import qkv.ledger.trials
from qkv._files import write_atomically
from qkv.bench.timing import machine
from qkv.ledger.settle import RESULTS


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(qkv.ledger.trials.__path__) if not m.name.startswith("_"))


def main(arguments: list[str]) -> int:
    known = names()
    chosen = known if arguments == ["all"] else arguments
    if not arguments or set(chosen) - set(known):
        print(f"trials: {', '.join(known)}; or all")
        return 0 if not arguments else 2
    torch.set_num_threads(1)
    for name in chosen:
        start = time.perf_counter()
        found = importlib.import_module(f"qkv.ledger.trials.{name}").run()
        found |= {"made": {**machine(1), "qkv": qkv.__version__, "seconds": round(time.perf_counter() - start, 1)}}
        write_atomically(RESULTS / f"{name}.json", json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found['made']['seconds']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
