"""``python -m qkv.ledger`` runs all checks and writes docs/claims; with numbers of claims it prints their verdicts."""

from __future__ import annotations

import sys

import torch

from qkv._files import write_atomically
from qkv.ledger.claim import CLAIMS
from qkv.ledger.page import PAGES, pages
from qkv.ledger.settled import load


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
