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
from benchmarks.mechanisms.timing import allocated, alternating, median_ratio
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


def test_goals_and_exponents() -> None:
    goals = [{"rival": "sdpa", "at most": 1.0, "n": 4096, "got": got} for got in (0.98, 1.25)]
    text = show.goals({"mechanisms": {"causal": {"goals": goals}}})
    assert "| 4,096 | 1.00 | 0.980 | reached |" in text
    assert "| 4,096 | 1.00 | 1.250 | missed by 25% |" in text
    assert run.slope({n: 3.0 * n**1.5 for n in (256, 1024, 4096)}) == pytest.approx(1.5)
    assert run.slope({1024: 1.0}) is run.slope({}) is None


@pytest.mark.parametrize(("once", "repeats"), [(60.0, 3), (-1.0, 1)], ids=["rounds", "very slow jobs"])
def test_rounds_alternate_and_ratios_are_within_a_round(once: float, repeats: int) -> None:
    turns: list[str] = []
    times = alternating({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, 3, once=once)
    assert [set(turns[i : i + 2]) for i in range(0, len(turns), 2)] == [{"a", "b"}] * (1 + repeats)  # one warms up
    assert [len(x) for x in times.values()] == [repeats] * 2
    assert median_ratio({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]}, "a", "b") == 2.0


@pytest.mark.slow
def test_memory_of_a_mechanism_is_linear() -> None:
    result = run.bench(["sigmoid"], [64], heads=2, seconds=0, threads=1, memory=[8192])
    grown = result["mechanisms"]["sigmoid"]["memory"]
    assert grown[8192] < 2 * 8192 * 8192 * 4 / 10  # a tenth of all its scores


def test_command_writes_results_table_and_figure(tmp_path: Path) -> None:
    options = ["sink", "--lengths", "48", "--queries", "1", "--heads", "2", "--seconds", "0", "--threads", "1"]
    assert main([*options, "--out", str(tmp_path), "--name", "mine"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"mine.json", "mine.md", "mine.png"}


def test_times_wait_for_the_card_and_memory_is_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    run._repeat(lambda: events.append("job"), 2, "cuda")  # type: ignore[arg-type, return-value]
    run._repeat(lambda: events.append("job"), 1, "cpu")  # type: ignore[arg-type, return-value]
    assert events == ["job", "job", "wait", "job"]
    events.clear()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    assert allocated(lambda: events.append("job")) == 4000
    assert events == ["wait", "reset", "job", "wait"]


@pytest.mark.parametrize(("options", "message"), [
    (["nothing"], "mechanism is 'nothing'"),
    (["--lengths", "0"], "are counts"),
    (["--threads", "0"], "are counts"),
    (["--queries", "100", "--lengths", "64"], "queries is 100"),
    (["statistics", "--backward"], "which has no backward"),
    (["--device", "cuda"], "device is 'cuda', but"),
])  # fmt: skip
def test_command_rejects_bad_arguments(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a card")
    assert main([*options, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
