"""``python -m ledger`` runs all checks and writes docs/claims; ``python -m ledger C014 …`` prints single verdicts."""

from __future__ import annotations

import sys

import torch

from ledger.claim import CLAIMS
from ledger.page import PAGES, pages
from ledger.settled import load
from qkv._files import write_atomically


def main(ids: list[str]) -> int:
    torch.set_num_threads(1)
    load()
    if unknown := [i for i in ids if i not in CLAIMS]:
        print(f"no claim {', '.join(unknown)}; there are {min(CLAIMS)} to {max(CLAIMS)}", file=sys.stderr)
        return 2
    found = {i: CLAIMS[i].check() for i in ids or sorted(CLAIMS)}
    if ids:
        for i, verdict in found.items():
            print(f"{i} ({CLAIMS[i].source}, {CLAIMS[i].section}): {CLAIMS[i].text}\n  {verdict.kind}: {verdict.text}")
        return 0
    PAGES.mkdir(exist_ok=True)
    for name, text in pages(found).items():
        write_atomically(PAGES / name, text)
    print(f"{len(found)} claims in {PAGES}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
