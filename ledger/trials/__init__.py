"""Trials: small trainings of seconds to minutes, for claims that no experiment of the lab speaks on.

Each is a file here with a function ``run(quick=False) -> dict`` of plain numbers by variant and seed (``quick`` does a
few steps, to see that it works, and its numbers mean nothing). `python -m ledger.trials NAME …` runs them and writes
ledger/results/NAME.json; the checks of the ledger judge what is there.
"""
