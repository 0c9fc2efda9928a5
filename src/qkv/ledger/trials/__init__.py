"""Trials: small trainings of seconds to minutes, for claims that no experiment of the lab covers.

Each is a module with a function ``run(quick=False) -> dict`` that returns plain numbers by variant and seed. With
``quick`` it takes a few steps, to test that it works; the numbers are then meaningless. `python -m qkv.ledger.trials
NAME …` runs trials and writes their results, which the checks of the ledger read.
"""
