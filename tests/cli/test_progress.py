"""Progress bars and spinners: visible in a terminal, silent elsewhere."""

from __future__ import annotations

import sys

import pytest

from qkv._progress import bar, say, spinner
from qkv.cli.shared import Stopwatch, print_line


class Terminal:
    """Standard error as a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error in the test itself, because pytest resets it after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    return made


def test_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("training", "steps", 3) as step, spinner("loading"):
        step(1, note="loss 2.0")
        step.say("evaluation")
        say("remark")
    assert capsys.readouterr() == ("", "")


def test_bar_shows_count_total_and_note(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 1000, done=10) as step:
        step(5, note="loss [2.0]")
        step.say("step 15 [evaluated]")
    assert "15 of 1,000 steps" in terminal.text
    assert "loss [2.0]" in terminal.text
    assert "step 15 [evaluated]" in terminal.text


def test_total_can_be_set_later_and_numbers_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with bar("profiling", "layers") as step:
        step(1, of=4)
    assert "1 of 4 layers" in terminal.text
    terminal.text = ""
    with bar("timing") as step:
        step(0, note="causal, 512 tokens")
    assert "causal, 512 tokens" in terminal.text
    assert " of " not in terminal.text


def test_hidden_bar_prints_nothing_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 3, show=False) as step:
        step(1)
        step.say("evaluation")
    assert terminal.text == ""


def test_spinner_does_not_read_names_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with spinner("loading ./[bold]"):
        pass
    say("skipped [3] files")
    assert "loading ./[bold]" in terminal.text
    assert "skipped [3] files" in terminal.text


def test_stopwatch_adds_up_the_laps_of_a_part() -> None:
    watch = Stopwatch()
    for part in ("loading", "measuring", "loading"):
        watch.lap(part)
    assert list(watch.seconds) == ["loading", "measuring"]
    assert str(watch).startswith("0.0 s: loading 0.0, measuring 0.0")


def test_printed_paths_are_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_line("Data", "a/long/path/[to]/a/file.qkv.zip")
    assert capsys.readouterr().out == "Data     a/long/path/[to]/a/file.qkv.zip\n"
