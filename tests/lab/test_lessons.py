"""The labs and chapters run in a terminal and as notebooks, and `qkv check` judges a reader's file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from conftest import Command, refused
from forked import Forked
from qkv_lab import check
from qkv_lab.answers import answer, child
from qkv_lab.answers.grading import Verdict, handed_in
from qkv_lab.lessons.catalog import lesson
from qkv_lab.lessons.exercises import Exercise, exercise, exercises
from qkv_lab.lessons.page import Cell
from qkv_lab.lessons.run import Runner


def test_every_check_has_an_exercise_and_a_solution(capsys: pytest.CaptureFixture[str]) -> None:
    """The code to start from is complete: its only fault is the mistake of the lab."""
    assert sorted([*exercises(), "numbers"]) == check.__all__
    for name, one in exercises().items():
        space: dict[str, object] = {}
        exec(one.start, space)
        assert not getattr(check, name)(space[one.defines])
        assert "NameError" not in capsys.readouterr().out, name
    assert exercise("key_bias").start.startswith("import math\nimport torch\n\n\ndef with_key(")
    assert exercise("sink_token").signature == "SinkToken(d_model)"
    for argument, look in (("exercise", lambda: exercise("entropi")), ("lab", lambda: lesson("sink"))):
        with refused(argument, match="did you mean"):
            look()


def test_cells_run_as_in_a_notebook(tmp_path: Path) -> None:
    """The value of the last line is shown, figures are files, expected exceptions are output; nothing leaks out."""
    main = sys.modules["__main__"]
    with Runner("made", tmp_path) as runner:
        runner.text(Cell("text", "# Title\n\n## The $\\sqrt d$ rule"))
        assert runner.code(Cell("code", "x = 2\nprint('two')\nx + 1")).text == "two\n3"
        assert runner.code(Cell("code", "x + 1;")).text == ""
        drawn = runner.code(Cell("code", "import matplotlib.pyplot as plt\nplt.plot([1, 2]);\nplt.show()"))
        assert drawn.figures == [tmp_path / "01-the-d-rule.png"]
        assert drawn.figures[0].read_bytes().startswith(b"\x89PNG")
        assert runner.code(Cell("code", "1 / 0", ("raises-exception",))).text == "ZeroDivisionError: division by zero"
        with pytest.raises(NameError):
            runner.code(Cell("code", "missing"))
        with refused("lab"):
            runner.code(Cell("code", "import no_such_package"))
    assert sys.modules["__main__"] is main


def test_a_chapter_runs_in_the_terminal(tmp_path: Path, command: Command) -> None:
    with torch.random.fork_rng():
        said = command.succeeds("lab", "03-by-hand", "--out", tmp_path)
    assert "[-0.553 -0.805]" in said
    assert "def attention" not in said, "the solution of the exercise is not hidden"
    assert [path.suffix for path in (tmp_path / "03-by-hand").iterdir()] == [".png"]


def test_notebooks_are_valid_and_fold_solutions(tmp_path: Path, command: Command) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks run with the docs extra")
    command.succeeds("lab", "sinks", "--notebook", "--out", tmp_path)
    made = nbformat.read(tmp_path / "sinks.ipynb", 4)
    nbformat.validate(made)
    folded = [cell for cell in made.cells if cell.metadata.get("jupyter") == {"source_hidden": True}]
    assert len(folded) == 3
    assert all("assert check." in cell.source for cell in folded)
    command.succeeds("lab", "sinks", "--notebook", "--no-solutions", "--out", tmp_path)
    unsolved = nbformat.read(tmp_path / "sinks.ipynb", 4)
    nbformat.validate(unsolved)
    assert len(unsolved.cells) == len(made.cells)
    graded = {x.metadata.nbgrader.grade_id: x.source for x in unsolved.cells if "nbgrader" in x.metadata}
    assert [name for name in graded if "answer" not in name] == ["sink_rate", "key_bias", "off_by_one"]
    assert graded["key_bias"] == "assert check.key_bias(with_key)"
    found = handed_in(tmp_path)
    assert [x.exercise for x in found] == ["sink_rate", "key_bias", "off_by_one"]
    assert found[1].code == exercise("key_bias").start.rstrip()
    command.refuses("lab", "sinks", "--no-solutions")


Judge = Callable[[str], int]
ANSWERS = {
    "right": "def entropy(w):\n    return -__import__('torch').special.xlogy(w, w).sum(-1)\n",
    "mistake": "def entropy(w):\n    return (w * w.log()).sum(-1)\n",
    "raises": "def helper(w):\n    return w.no_such_method()\n\n\ndef entropy(w):\n    return helper(w)\n",
    "syntax": "def entropy(w:\n    return 1\n",
    "loading": "import math\nx = math.log(0)\n",
    "exits": "raise SystemExit(0)\n",
    "missing": "def entropyy(w):\n    return w\n",
    "number": "entropy = 3\n",
}


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Checks one of ANSWERS in this process, as the child process does; gives the exit code."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, answer.MODULE, sys)

    def judge(name: str) -> int:
        file = tmp_path / f"{name}.py"
        file.write_text(ANSWERS[name], encoding="utf-8")
        return child.main("entropy", file, "entropy", tmp_path, 60)

    return judge


def test_wrong_answers_are_explained_and_drawn(
    judged: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an exception, the lines of the file alone are shown."""
    assert judged("right") == child.RIGHT
    assert judged("raises") == child.WRONG
    assert not (tmp_path / child.DRAWN).exists()
    said = capsys.readouterr().out
    assert re.findall(r"line (\d+), in (\w+)", said) == [("6", "entropy"), ("2", "helper")]
    assert "AttributeError" in said
    assert judged("mistake") == child.WRONG
    assert "✗ nats: it is negative" in capsys.readouterr().out
    assert (tmp_path / child.DRAWN).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "told"), [
    ("syntax", r"not valid Python(.|\n)*line 1"), ("loading", r"line 2, in <module>(.|\n)*ValueError"),
    ("exits", "SystemExit"), ("missing", "did you mean 'entropyy'"), ("number", "entropy is int"),
])  # fmt: skip
def test_unusable_files_are_refused(judged: Judge, tmp_path: Path, name: str, told: str) -> None:
    assert judged(name) == child.UNUSABLE
    assert re.search(told, (tmp_path / child.REFUSED).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_check_runs_in_a_process_with_a_time_limit(
    judged: Judge, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes seconds to start: it is forked from this one."""

    def run(words: list[str], stdout: BinaryIO, **_: Any) -> SimpleNamespace:
        *_, name, given, defines, out, seconds, _student = words
        arguments = name, Path(given), defines, Path(out), float(seconds)
        process = Forked(lambda: sys.exit(child.main(*arguments)), folder=Path(out))
        code = process.wait()
        stdout.write(process.out.encode())
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr("qkv_lab.answers.grading.subprocess.run", run)
    file = tmp_path / "answer.py"
    words = ("check", "entropy", file, "--out", tmp_path / "out", "--seconds")
    file.write_text("def entropy(w):\n    while True:\n        pass\n")
    with pytest.raises(SystemExit) as ended:
        command(*words, 0.3)
    assert ended.value.code == 1
    assert re.search(r"answer\.py was in line [23], in entropy", capsys.readouterr().out)
    file.write_text("import sys\ndef entropy(w):\n    sys.exit(0)\n")
    with pytest.raises(SystemExit) as ended:
        command(*words, 60)
    assert ended.value.code == 1  # an answer that ends the process is not right
    file.write_text(ANSWERS["syntax"])
    assert command(*words, 60).err.startswith("qkv: answer.py is not valid Python")
    file.write_text(ANSWERS["right"])
    assert "✓ " in command.succeeds(*words, 60)
    command.refuses("check", "entropy", tmp_path / "nothing.py")
    command.refuses("check", "entropy", file.rename(tmp_path / "answer.txt"))
    file.write_text(ANSWERS["right"])
    command.refuses("check", "entropy", file, "--seconds", 0)


def test_answers_of_a_class_are_found_judged_and_compared(
    judged: Judge, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts and notebooks of students are found without running them; each is judged alone; copies are told."""
    seen: list[list[Path]] = []

    def judge(one: Exercise, file: Path, seconds: float, student: str) -> Verdict:
        seen.append(list(file.parent.iterdir()))
        return Verdict("right") if "xlogy" in file.read_text() else Verdict("wrong", reason="=off\nby one")

    monkeypatch.setattr("qkv_lab.answers.grading.judge", judge)
    room = tmp_path / "class"
    (room / "bob").mkdir(parents=True)
    copied = ANSWERS["right"].replace("(w", "(weights: object").replace("(weights: object, w)", "(weights, weights)")
    (room / "ada.py").write_text(f"{ANSWERS['right']}\n\ndef attention(x, w_q, w_k, w_v, w_o, mask): ...\n")
    (room / "bob" / "entropy.py").write_text(f"# my own\n{copied}\n\ndef attention(x): ...\n")
    (room / "dan.py").write_text(ANSWERS["syntax"])
    (room / "eve.ipynb").write_text("[]")
    solved = f"{exercise('entropy').solution}\nassert check.entropy(entropy)"
    cells = "%time\n1 / 0", "1 / 0", "x = (", f"{ANSWERS['right']}check.entropy(entropy)", solved, "def lookup(q): ..."
    cells = (*cells, "import math\nroot = math.sqrt(2)\ndef softmax(s): return s / root\ncheck.stable_softmax(softmax)")
    book = {"cells": [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]}
    (room / "fay.ipynb").write_text(json.dumps(book))
    told = command.succeeds("check", f"{room}/", "--json")
    found = {(row["student"], row["exercise"]): row for row in json.loads(told)}
    right = {("ada", "entropy"), ("bob", "entropy"), ("fay", "entropy")}
    # `attention` of ada has the arguments of the lab on reversal, and a file entropy.py is about entropy alone
    refused_ones = {("dan", ""), ("eve", ""), ("fay", ""), ("fay", "stable_softmax")}
    assert found.keys() == {*right, ("ada", "einsum_attention"), *refused_ones}
    assert {key for key, row in found.items() if row["points"]} == {*right, ("ada", "einsum_attention")}
    assert found["bob", "entropy"]["same_code"] == "ada; fay"
    assert "code cell 3" in found["fay", ""]["reason"]
    assert "uses root of a cell" in found["fay", "stable_softmax"]["reason"]
    assert {len(files) for files in seen} == {1}, "a student can import the files of another"
    (room / "ada.py").write_text(exercise("entropy").start)
    table = command.succeeds("check", "entropy", room, "--csv")
    assert "ada,entropy,0,wrong,\"'=off\nby one\",the lab's start," in table
    assert "fay" in command.succeeds("check", room)
    command.refuses("check", room, "--csv", "--json")
    command.refuses("check", room, "--student", "ada")
    command.refuses("check", "entropy", "--csv")
    command.refuses("check", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    command.refuses("check", tmp_path / "empty")
