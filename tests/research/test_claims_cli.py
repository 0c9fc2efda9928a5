"""`qkv claims` reads verdicts, and `python -m research.claims` computes them: drift, results of one's own, models."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qkv
import research.sinks
from conftest import Command
from qkv.models import DecoderConfig, DecoderLM
from research.claims import CLAIMS, Claim, Verdict, experiment, holds
from research.claims import page as page_module
from research.claims.__main__ import main
from research.claims.results import result
from research.claims.settled import load
from research.sinks import Study

OTHERS = ["toy models (`mechanism`)", "qkv-mini", "qkv-mini", "MiniLM", "MiniLM", "SmolLM2", "SmolLM2"]
load()


class Run:
    """Runs `python -m research.claims` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        """What it prints; it must end with this exit code."""
        self._capsys.readouterr()
        try:
            found: Any = main([str(word) for word in words])
        except SystemExit as done:
            found = done.code
        out, err = self._capsys.readouterr()
        assert (found or 0) == code, (out, err)
        return err if code == 2 else out

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def two_is_two() -> Verdict:
    return holds(1 + 1 == 2, "It is 2.")


def two_is_three() -> Verdict:
    return holds(1 + 1 == 3, "It is 3.")


def window_of_the_lab() -> Verdict:
    return experiment("C084", "window")


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces all claims by some with these checks, numbered from C001."""

    def only(*checks: Callable[[], Verdict]) -> None:
        for id_ in list(CLAIMS):
            monkeypatch.delitem(CLAIMS, id_)
        for i, one in enumerate(checks, 1):
            monkeypatch.setitem(CLAIMS, f"C{i:03}", Claim(f"C{i:03}", "chapter", "1", "One and one.", one))

    return only


def test_verdicts_are_shown_with_the_experiment_behind_them_by_both_commands(run: Run, command: Command) -> None:
    said = run("c014", "C084")
    assert re.search(r"^C014 .*chapter, 4\.2\n", said)
    window, drain = run.json("C084", "C068")
    assert (window["claim"], window["source"], window["verdict"]) == ("C084", "chapter", CLAIMS["C084"].check().kind)
    assert window["evidence"][0]["command"] == "qkv experiment window"
    assert window["evidence"][0]["runs"] == sum(len(v["results"]) for v in result("window")["variants"].values())
    assert [one["model"] for one in drain["models"]] == OTHERS
    assert json.loads(command.succeeds("claims", "c084", "--json")) == [window]
    for printed in (said, command.succeeds("claims", "C084", "C068")):
        assert "qkv experiment window" in printed
    assert "386" in command.succeeds("claims")


def test_a_drifted_check_is_named_and_gives_exit_code_1(ledger: Callable[..., None], tmp_path: Path, run: Run) -> None:
    ledger(two_is_two, two_is_three)
    said = run(code=1)
    assert "C002 drifted: the check no longer finds that: It is 3." in said
    assert re.search("2 checks in [0-9]+ s, 1 drifted", said)
    run("C001")
    run("C002", "--json", code=1)
    run("--out", tmp_path / "pages", code=1)
    assert not (tmp_path / "pages").exists()


def test_pages_are_written(
    ledger: Callable[..., None], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "PUBLISHED", tmp_path / "claims.json")
    ledger(two_is_two, window_of_the_lab)
    assert re.search("2 checks in [0-9]+ s, 0 drifted", run("--out", tmp_path / "pages"))
    page = (tmp_path / "pages" / "chapter.md").read_text(encoding="utf-8")
    assert "> One and one.\n\nIt is 2.\n" in page
    assert json.loads(page_module.PUBLISHED.read_text())[0]["verdict"] == "holds"
    assert "| **all** |" in (tmp_path / "pages" / "index.md").read_text(encoding="utf-8")


def test_a_model_is_judged_beside_others(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(research.sinks, "study", functools.cache(research.sinks.study))
    qkv.models.save(DecoderLM(DecoderConfig(context=64, d_model=16, layers=1, heads=2)), str(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("one two three. " * 80)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt"]
    found = run.json("C061", "C067", *options, "--out", tmp_path / "out")
    assert [(one["claim"], one["tokens"]) for one in found["verdicts"]] == [("C061", 64), ("C067", 64)]
    assert found["verdicts"][0]["holds"] == "does not hold"
    assert [one["model"] for one in found["others"]["C067"]] == OTHERS
    assert Study.load(tmp_path / "out" / "sinks.json").verdicts[64][0].holds == "does not hold"
    assert (tmp_path / "out" / "sinks.png").stat().st_size > 5000
    said = run("C061", *options, "--out", tmp_path / "again")
    assert "MiniLM" in said
    assert "C067" not in said
    (tmp_path / "text.txt").write_text("one two three. ")
    assert run(*options, "--out", tmp_path / "other", code=2).startswith("claims: --text")
    assert not (tmp_path / "other").exists()
