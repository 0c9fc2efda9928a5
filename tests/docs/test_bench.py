"""Rivals in the benchmark of mechanisms compute the same; pages have the numbers of the kept results. No timing."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import make_tables
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.mechanisms.contenders import MECHANISMS, Case
from pages import ROOT

SAME = {"sdpa", "eager", "x-transformers"}
OTHER = {("linear", "sdpa"), ("favor", "sdpa"), ("linformer", "sdpa")}  # these approximate softmax attention


def test_a_page_differs_from_the_kept_results_of_benchmarks() -> None:
    for page, text in make_tables.pages().items():
        assert page.read_text() == text, f"{page.name}: PYTHONPATH=. python docs/make_tables.py"
    for name, goals in tomllib.loads((ROOT / "benchmarks" / "goals.toml").read_text()).items():
        assert goals.keys() <= json.loads((make_tables.RESULTS / f"{name}.json").read_text()).keys()


def case(n: int = 96, *, backward: bool = False, queries: int | None = None) -> Case:
    return Case(n, 4, torch.float32, backward, dim=16, queries=queries)


@pytest.mark.parametrize("name", MECHANISMS)
def test_rivals_compute_the_same_on_the_device_of_the_case(name: str) -> None:
    """Meta tensors stand for those on a card: an operation of one with a CPU tensor raises an error."""
    mechanism = MECHANISMS[name]
    for queries in (None, 1, 7):
        small = case(queries=queries)
        q, k, v = small.tensors()
        ours = mechanism.ours(small, q, k, v)()
        assert ours.shape == q.shape
        for rival, contender in mechanism.rivals.items():
            theirs = contender(small, q, k, v) if rival in SAME and (name, rival) not in OTHER else None
            if theirs is not None:  # x-transformers may not be installed
                torch.testing.assert_close(ours, theirs(), rtol=2e-5, atol=2e-5)
    there = dataclasses.replace(case(), device="meta")
    q, k, v = there.tensors()
    if name != "favor":  # which copies its random features, drawn on the CPU, to the card in each call
        parts = [
            dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for x in mechanism.arguments(there).values()
        ]
        assert all(x.is_meta for x in tree_leaves(parts) if isinstance(x, Tensor))
    for rival, contender in mechanism.rivals.items():
        job = contender(there, q, k, v)
        if job is not None and rival != "plain":
            assert job().is_meta, rival
