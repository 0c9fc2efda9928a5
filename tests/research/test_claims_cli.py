"""`qkv claims` reads verdicts, and `python -m research.claims` computes them: drift, results of one's own, models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qkv
from conftest import refused
from qkv import cli
from qkv.models import DecoderConfig, DecoderLM
from research.claims import CLAIMS, Claim, Drifted, Verdict, experiment, holds
from research.claims import page as page_module
from research.claims import results as results_module
from research.claims.__main__ import main
from research.claims.results import MissingResult, benchmark, result, results_in
from research.claims.run import check
from research.claims.settled import load

ROOT = Path(__file__).parents[2]
load()


def code_of(*arguments: str) -> int | str | None:
    """The exit code, whoever says it."""
    try:
        return main(arguments)
    except SystemExit as done:
        return done.code


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


def own_result(folder: Path, holds: str = "undecided") -> None:
    """The result of the experiment `window` as a run of one's own writes it, with another verdict on C084."""
    found = result("window")
    interval = {"condition": "", "n": 5, "mean": 0.2, "low": -0.1, "high": 0.5, "bound": 0.1, "above": True}
    found["verdicts"] = [{"claim": "C084", "holds": holds, "text": "0.2 (-0.1 to 0.5).", "intervals": [interval]}]
    found |= {"level": 0.95, "command": "qkv experiment window --seeds 5"}
    (folder / "window.json").write_text(json.dumps(found), encoding="utf-8")


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_verdicts_are_printed_with_the_experiment_behind_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["c014", "C084"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^C014 .*chapter, 4\.2\n", said)
    assert "holds" in said
    assert "qkv experiment window" in said


def test_unknown_claim_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("C014", "C84") == 2
    assert capsys.readouterr().err == "claims: claim is 'C84', expected C001 to C386; did you mean 'C084'?\n"
    with refused("claim", "C900"):
        check(["C900"])


def test_options_that_exclude_each_other_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--text", "x.txt"], "--text is for --model"),
        (["--model", "minilm", "--results", str(tmp_path)], "--results is for experiments"),
        (["C014", "--out", str(tmp_path)], "--out writes the pages of all claims"),
        (["C014", "--model", "minilm"], "claim is 'C014', expected one that is judged on models: C061"),
        (["--results", str(tmp_path)], f"--results is '{tmp_path}', expected a folder that `qkv experiment"),
    ):
        assert code_of(*arguments) == 2
        assert capsys.readouterr().err.startswith(f"claims: {said}")


def test_json_has_numbers_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["C084", "C068", "--json"]) == 0
    window, drain = json.loads(capsys.readouterr().out)
    assert (window["claim"], window["source"], window["verdict"]) == ("C084", "chapter", CLAIMS["C084"].check().kind)
    assert window["evidence"][0]["command"] == "qkv experiment window"
    assert window["evidence"][0]["runs"] == sum(len(v["results"]) for v in result("window")["variants"].values())
    assert [one["model"] for one in drain["models"]] == ["toy models (`mechanism`)"] + 2 * ["qkv-mini"] + 2 * ["MiniLM"]


# --- drift ------------------------------------------------------------------------------------------------------------


def test_a_drifted_check_is_named_and_gives_exit_code_1(
    ledger: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger(two_is_two, two_is_three)
    assert code_of() == 1
    said = capsys.readouterr().out
    assert "C002 drifted: the check no longer finds that: It is 3." in said
    assert "2 checks in 0 s, 1 drifted" in said
    assert code_of("C001") == 0
    assert code_of("C002", "--json") == 1
    assert code_of("--out", str(tmp_path / "pages")) == 1
    assert not (tmp_path / "pages").exists()


def test_pages_are_written(
    ledger: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "PUBLISHED", tmp_path / "claims.json")
    ledger(two_is_two, window_of_the_lab)
    assert code_of("--out", str(tmp_path / "pages")) == 0
    assert "2 checks in 0 s, 0 drifted" in capsys.readouterr().out
    page = (tmp_path / "pages" / "chapter.md").read_text(encoding="utf-8")
    assert "> One and one.\n\nIt is 2.\n" in page
    assert "Command: `qkv experiment window`." in page
    assert json.loads(page_module.PUBLISHED.read_text())[0]["verdict"] == "holds"
    assert "| **all** |" in (tmp_path / "pages" / "index.md").read_text(encoding="utf-8")


def test_progress_counts_checks_and_errors_of_other_kinds_are_raised(ledger: Callable[..., None]) -> None:
    def broken() -> Verdict:
        raise RuntimeError("a mistake in the check")

    ledger(two_is_two, two_is_three)
    told: list[Any] = []
    found = check(progress=lambda done, /, **changed: told.append((done, changed["note"])))
    assert told == [(1, "C001"), (1, "C002")]
    assert found["C001"].verdict == Verdict("holds", "It is 2.")
    assert isinstance(found["C002"].error, Drifted)
    ledger(broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        check()


# --- results of one's own ---------------------------------------------------------------------------------------------


def test_results_of_a_folder_are_judged_beside_those_of_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_result(tmp_path)
    assert main(["--results", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["claim"], one["verdict"], one["shipped"]) == ("C084", "undecided", CLAIMS["C084"].check().kind)
    (evidence,) = one["evidence"]
    assert (evidence["level"], evidence["command"]) == (0.95, "qkv experiment window --seeds 5")
    assert evidence["intervals"][0]["n"] == 5
    assert main(["C084", "--results", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "95 % intervals 0.20 (-0.10 to 0.50), n = 5" in said
    assert "1 of 1 verdicts not as with the results of qkv: C084" in said


def test_a_missing_result_names_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_result(tmp_path)
    assert code_of("C086", "--results", str(tmp_path)) == 1
    assert f"qkv experiment norm_place --out {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    with results_in(tmp_path), pytest.raises(MissingResult, match="verdicts on C084, expected one on C061"):
        experiment("C061", "window")
    with results_in(tmp_path), pytest.raises(MissingResult, match=r"has no streaming\.json"):
        result("streaming")
    assert result("streaming")["name"] == "streaming"  # the package's again
    with pytest.raises(MissingResult, match="`qkv experiment nothing` makes them"):
        result("nothing")
    monkeypatch.setattr(results_module, "BENCHMARKS", tmp_path)
    with pytest.raises(MissingResult, match="make bench"):
        benchmark("decoder.json")


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    own_result(tmp_path)
    (tmp_path / "emergence.json").write_text("{}")
    with results_in(tmp_path), refused("results", "emergence.json"):
        result("emergence")


# --- the reader -------------------------------------------------------------------------------------------------------


def test_the_reader_shows_the_verdicts_that_the_checks_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "c084", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert main(["C084", "--json"]) == 0
    (computed,) = json.loads(capsys.readouterr().out)
    assert said == computed
    assert cli.main(["claims", "C084", "C068"]) == 0
    printed = capsys.readouterr().out
    assert "qkv experiment window" in printed
    assert "MiniLM" in printed
    assert cli.main(["claims"]) == 0
    assert "386" in capsys.readouterr().out


def test_the_reader_chooses_by_source_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "--source", "lesson", "--verdict", "false", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(one["source"], one["verdict"]) for one in found} == {("lesson", "false")}
    published = page_module.published()
    assert {one["claim"] for one in found} == {
        id_ for id_, verdict in published.items() if verdict.kind == "false" and CLAIMS[id_].source == "lesson"
    }


def test_the_reader_names_the_nearest_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "C84"]) == 2
    assert capsys.readouterr().err == "qkv: claim is 'C84', expected C001 to C386; did you mean 'C084'?\n"


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_judged_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qkv.models.save(DecoderLM(DecoderConfig(context=64, d_model=16, layers=1, heads=2)), str(tmp_path / "model"))
    (tmp_path / "text.txt").write_text("one two three. " * 80)
    options = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    assert main(["C061", "C067", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["claim"], one["tokens"]) for one in found["verdicts"]] == [("C061", 64), ("C067", 64)]
    assert found["verdicts"][0]["holds"] == "does not hold"
    assert [one["model"] for one in found["others"]["C067"]] == ["toy models (`mechanism`)"] + 2 * ["qkv-mini"] + 2 * [
        "MiniLM"
    ]
    assert main(["C061", *options]) == 0
    said = capsys.readouterr().out
    assert "MiniLM" in said
    assert "C067" not in said
