"""Mutation tests of the ledger's checks: ``python -m research.claims.mutation`` tells which notice a wrong answer.

A check that passes whatever is computed proves nothing. So each place of a check that gives an answer (a call, an array
operation, an error that is caught: `research.claims.sites`) is made to give wrong answers (`research.claims.wrong`), one
place and one wrong answer at a time. The check *notices* it if it raises `Drifted`, or comes to another kind of
verdict. Other errors do not count: code that breaks on a wrong shape has not compared anything. A check *can fail* if
it notices at least one wrong answer. That is necessary, not sufficient: whether a check is about its claim remains for
a reader to see.
"""

from __future__ import annotations

import io
import json
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from qkv._files import write_atomically
from research.claims.claim import CLAIMS, Claim, Drifted, Verdict
from research.claims.settled import Entry, load
from research.claims.sites import Instrumented, Site, instrument, judges
from research.claims.wrong import CHANGES, applicable

PUBLISHED = Path(__file__).parent / "mutation.json"
"""The results for all checks, which come with the package."""
NO_ERROR = "no error"
ORDER = (NO_ERROR, *CHANGES)
RUNS = 60
"""The most runs of a check with wrong answers. All places give one kind of wrong answer, then all the next kind."""

SECONDS = 20.0
"""The most CPU time of such a run. No check takes more than 3 s."""


@dataclass(frozen=True)
class Mutated:
    """What a check noticed."""

    noticed: tuple[Site, ...]
    """Places where at least one wrong answer was noticed."""
    overlooked: tuple[Site, ...]
    """Places where none was: they do not bear on the verdict, or not by the wrong answers that were tried."""

    @property
    def can_fail(self) -> bool:
        return bool(self.noticed)


@dataclass
class _Record:
    """Collects which wrong answers exist at each site, in a run without any."""

    sites: tuple[Site, ...]
    changes: dict[int, list[str]] = field(default_factory=dict)

    def answer(self, index: int, value: Any) -> Any:
        if self.sites[index].kind == "call" or isinstance(value, torch.Tensor | np.ndarray):
            known = self.changes.setdefault(index, [])
            known += [name for name in applicable(value) if name not in known]
        return value

    def silent(self, index: int) -> bool:
        self.changes[index] = [NO_ERROR]
        return False


def mutate(check: Callable[[], Verdict]) -> Mutated:
    """Give wrong answers to a check, one at a time.

    Raises:
        Drifted: if the check fails with right answers.
    """
    code = instrument(check)
    record = _Record(code.sites)
    right = _run(code, record.answer, record.silent)
    tried = ((index, name) for name in ORDER for index, names in sorted(record.changes.items()) if name in names)
    noticed: set[int] = set()
    runs = 0
    for index, name in tried:
        if index not in noticed and runs < RUNS:
            runs += 1
            noticed |= {index} if _notices(code, index, name, right.kind) else set()
    places = [index for index, names in sorted(record.changes.items()) if names]
    sites = [[code.sites[index] for index in places if (index in noticed) == wanted] for wanted in (True, False)]
    return Mutated(tuple(sites[0]), tuple(sites[1]))


def _notices(code: Instrumented, index: int, change: str, kind: str) -> bool:
    def answer(at: int, value: Any) -> Any:
        return CHANGES[change](value) if at == index and change in CHANGES else value

    try:
        with _limited_to(SECONDS):
            return _run(code, answer, lambda at: at == index).kind != kind
    except Drifted:
        return True
    except Exception:  # a wrong answer may break anything that follows
        return False


@contextmanager
def _limited_to(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so much CPU time: a wrong answer may make a loop endless. Main thread, on Unix."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _run(code: Instrumented, answer: Callable[[int, Any], Any], silent: Callable[[int], bool]) -> Verdict:
    """Run a check as every time: the same random numbers, nothing printed."""
    torch.manual_seed(0)
    np.random.seed(0)  # the state that checks of NumPy code share
    random.seed(0)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return code.run(answer, silent)


def computed() -> list[Claim]:
    """The claims whose checks compute a condition, by number."""
    return [c for _, c in sorted(CLAIMS.items()) if not isinstance(c.check, Entry) and judges(c.check)]


def summary(found: dict[str, Mutated]) -> dict[str, Any]:
    """The content of mutation.json: counts, the claims whose checks cannot fail, and the places by claim."""
    by = {id_: {"places": len(x.noticed) + len(x.overlooked), "noticed": len(x.noticed)} for id_, x in found.items()}
    return {
        "computed": len(found),
        "can_fail": sum(x.can_fail for x in found.values()),
        "cannot": [id_ for id_, x in found.items() if not x.can_fail],
        "by": by,
    }


def main(ids: Iterable[str]) -> int:
    torch.set_num_threads(1)
    load()
    ids, among = list(ids), {c.id: c for c in computed()}
    if unknown := [i for i in ids if i not in among]:
        print(f"claim {', '.join(unknown)} is unknown or has no check that computes its verdict", file=sys.stderr)
        return 2
    found = {}
    for id_ in ids or among:
        found[id_] = result = mutate(among[id_].check)
        if ids or not result.can_fail:
            print(f"{id_}: {len(result.noticed)} of {len(result.noticed) + len(result.overlooked)} places", flush=True)
            for word, sites in (("noticed", result.noticed), ("overlooked", result.overlooked)):
                print("".join(f"  {word}: line {site.line}, {site.code}\n" for site in sites), end="")
    if not ids:
        made = summary(found)
        write_atomically(PUBLISHED, json.dumps(made, indent=1) + "\n")
        print(f"{made['can_fail']} of {made['computed']} checks notice a wrong answer; {PUBLISHED}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
