"""Progress bars and spinners: visible in a terminal, silent elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from qkv._progress import bar, say, spinner


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error in the test itself, because pytest resets it after the fixtures."""
    for name, value in {"TERM": "xterm", "COLUMNS": "160"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    return made


def test_nothing_is_printed_without_a_terminal_or_by_a_hidden_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bar("training", "steps", 3) as step, spinner("loading"):
        step(1, note="loss 2.0")
        step.say("evaluation")
        say("remark")
    assert capsys.readouterr() == ("", "")
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 3, show=False) as step:
        step(1)
        step.say("evaluation")
    assert terminal.getvalue() == ""


def test_bars_and_spinners_show_counts_notes_and_names_that_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 1000, done=10) as step:
        step(5, note="loss [2.0]")
        step.say("step 15 [evaluated]")
    with bar("profiling", "layers") as step:
        step(1, of=4)
    with spinner("loading ./[bold]"):
        say("skipped [3] files")
    for text in (
        "15 of 1,000 steps", "loss [2.0]", "step 15 [evaluated]", "1 of 4 layers", "loading ./[bold]",
        "skipped [3] files",
    ):  # fmt: skip
        assert text in terminal.getvalue()
    terminal = terminal_of(monkeypatch)
    with bar("timing") as step:
        step(0, note="causal, 512 tokens")
    assert "causal, 512 tokens" in terminal.getvalue()
    assert " of " not in terminal.getvalue()
