"""The benchmark of mechanisms: rivals compute the same; results are saved, loaded, printed and drawn. No timing."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.mechanisms import run, show
from benchmarks.mechanisms.__main__ import main
from benchmarks.mechanisms.contenders import MECHANISMS, Case, _alibi_score
from qkv.biases import alibi_slopes

SAME = {"sdpa", "eager", "x-transformers"}
OTHER = {("linear", "sdpa"), ("favor", "sdpa"), ("linformer", "sdpa")}  # these approximate softmax attention


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of the machine is measured with small matrices: large ones take a second."""
    monkeypatch.setattr(run, "_sgemm", functools.partial(run._sgemm, 128))


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


def test_flex_computes_the_same_score() -> None:
    """The rival compiles, which is slow; its score function is checked uncompiled."""
    h, i, j = torch.arange(8)[:, None, None], torch.arange(5)[:, None], torch.arange(5)
    got = _alibi_score(torch.zeros(()), torch.tensor(0), h, i, j)
    torch.testing.assert_close(got, -alibi_slopes(8)[:, None, None] * (i - j))


def test_results_are_saved_loaded_printed_and_drawn(tmp_path: Path) -> None:
    cells: list[str] = []
    result = run.bench(["causal", "linformer"], [64, 96], heads=2, seconds=0, threads=1, on_cell=cells.append)
    assert cells == [f"{name}, {n} tokens" for name in ("causal", "linformer") for n in (64, 96)]
    run.save(result, tmp_path / "result.json")
    loaded = run.load(tmp_path / "result.json")
    assert loaded["mechanisms"]["causal"]["cells"] == result["mechanisms"]["causal"]["cells"]
    text, cell = show.markdown(loaded), loaded["mechanisms"]["causal"]["cells"][96]
    assert set(cell["seconds"]) >= {"qkv", "sdpa", "eager"}
    assert f"{cell['ratios']['sdpa']:.3f}" in text
    assert f"{1e3 * cell['seconds']['qkv']:.3g} ms" in text
    assert cell["flops"] == 2 * 2 * 64 * 2 * (64 * 64 * 0.5 + 64 * 32 + 32 * 32 * 0.5)
    show.figure(loaded, tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 10_000


@pytest.mark.slow
def test_memory_of_a_mechanism_is_linear() -> None:
    result = run.bench(["sigmoid"], [64], heads=2, seconds=0, threads=1, memory=[4096])
    grown = result["mechanisms"]["sigmoid"]["memory"]
    assert grown[4096] < 2 * 4096 * 4096 * 4 / 10  # a tenth of all its scores


def test_command_writes_results_table_and_figure(tmp_path: Path) -> None:
    options = ["sink", "--lengths", "48", "--queries", "1", "--heads", "2", "--seconds", "0", "--threads", "1"]
    assert main([*options, "--out", str(tmp_path), "--name", "mine"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"mine.json", "mine.md", "mine.png"}
