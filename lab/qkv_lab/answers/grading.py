"""The verdict on an answer, in a process of its own; and what a class handed in, in a folder."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qkv._progress import Step
from qkv.errors import InputError
from qkv_lab.answers import child
from qkv_lab.lessons.exercises import Exercise, definitions, exercise, exercises, needed_by

START_UP = 60.0  # seconds that a process may take beside the time limit, to import torch and to draw
MOST_PRINTED = 20_000  # characters of what an answer prints


@dataclass(frozen=True)
class Verdict:
    """What a check says of an answer.

    Attributes:
        outcome: right, wrong, or unusable: a file that cannot be loaded, or does not define the function.
        printed: what the check and the answer printed.
        reason: why it is not right, with the hint of the first trial that failed; empty if it is right.
        figure: PNG of the wrong result beside the right one.
    """

    outcome: Literal["right", "wrong", "unusable"]
    printed: str = ""
    reason: str = ""
    figure: bytes | None = None


@dataclass(frozen=True)
class Answer:
    """An answer that somebody handed in.

    Attributes:
        student: first part of the path below the folder of the class, without an ending.
        exercise: name of the exercise; empty if the file, or a cell of it, could not be read.
        file: the script or notebook.
        code: the code that is checked: all of a script; of a notebook the function with what it needs.
        verdict: of the check.
        same_code: whose code is the same but for names, comments, annotations and layout.
    """

    student: str
    exercise: str
    file: Path
    code: str
    verdict: Verdict | None = None
    same_code: tuple[str, ...] = ()


def judge(one: Exercise, file: Path, seconds: float, student: str) -> Verdict:
    """Run the trials of an exercise on the answer in a file, in a process that ends after a time limit.

    The trials have the numbers of the student; of "" those of the lab.
    """
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary)
        command = [sys.executable, "-Pum", child.__name__, one.name, file, one.defines, results, seconds, student]
        environment = os.environ | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
        with (results / "printed.txt").open("w+b") as out:
            try:
                code = subprocess.run(
                    list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, check=False, timeout=seconds + START_UP,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return Verdict("wrong", reason=f"no answer after {seconds:g} s, and the process did not end")
            out.seek(0)
            printed = out.read(MOST_PRINTED).decode("utf-8", "replace")
        if code == child.RIGHT:
            return Verdict("right", printed)
        if code == child.UNUSABLE and (results / child.REFUSED).exists():
            return Verdict("unusable", printed, (results / child.REFUSED).read_text(encoding="utf-8"))
        if line := _line_of(results / child.LOOPS, file):
            return Verdict(
                "wrong", printed, f"no answer after {seconds:g} s: {line}; is there a loop that does not end?"
            )
        if code != child.WRONG:
            return Verdict("wrong", printed, f"your code ended the process ({_end(code)})")
        drawn = results / child.DRAWN
        failed = [line for line in printed.splitlines() if line.startswith("✗ ")]
        reason = failed[-1].removeprefix("✗ ") if failed else "a trial failed"
        return Verdict("wrong", printed, reason, drawn.read_bytes() if drawn.exists() else None)


def _end(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _line_of(dumped: Path, file: Path) -> str:
    """The line of the reader's file that ran when the time was over; empty if the time was not over."""
    told = dumped.read_text(encoding="utf-8") if dumped.exists() else ""
    found = re.search(rf'File "{re.escape(str(file))}", line (\d+) in (\S+)', told)
    if found:
        return f"{file.name} was in line {found[1]}, in {found[2]}"
    return "it was outside of your file" if told else ""


def grade(answers: list[Answer], seconds: float, step: Step) -> list[Answer]:
    """The answers with their verdicts, each from a process of its own, as many at once as there are cores."""

    def one(answer: Answer) -> Answer:
        if answer.verdict is None:
            answer = replace(answer, verdict=_judge_alone(answer, seconds))
        step(1, note=f"{answer.student} {answer.exercise}")
        return answer

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return _with_same_code(list(pool.map(one, answers)))


def _judge_alone(answer: Answer, seconds: float) -> Verdict:
    """The verdict on a copy of the code, in a folder where no other student's files can be imported."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary).resolve() / f"{answer.file.stem}.py"
        file.write_text(answer.code, encoding="utf-8")
        return judge(exercise(answer.exercise), file, seconds, answer.student)


def handed_in(folder: Path, only: str | None = None) -> list[Answer]:
    """All answers in a folder, of scripts and notebooks, by student and file.

    Nothing is run. A script whose name is that of an exercise, such as entropy.py, answers it; another answers the
    exercises whose functions it defines. A notebook answers those whose check it calls, or else whose functions it
    defines; cells that the lab's notebooks have as solutions do not count.

    Args:
        folder: has a file or a folder for each student, whose name is the student's.
        only: name of the exercise of which answers are wanted; None for all.

    Raises:
        InputError: if there is no script and no notebook.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".ipynb") and path.is_file()]
    shown = [x for x in paths if not any(part.startswith((".", "_")) for part in x.relative_to(folder).parts)]
    if not shown:
        raise InputError(f"{folder} has no .py or .ipynb file, expected a file or a folder for each student")
    found = [answer for path in shown for answer in _of_file(path, _student(path, folder))]
    return [x for x in found if only in (None, x.exercise) or not x.exercise]


def _student(path: Path, folder: Path) -> str:
    first, *below = path.relative_to(folder).parts
    return first if below else path.stem


def _of_file(path: Path, student: str) -> Iterator[Answer]:
    """The answers in a script or notebook; one without an exercise for each part that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        cells = _cells(text) if path.suffix == ".ipynb" else [text]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        expected = "notebook" if path.suffix == ".ipynb" else "text in UTF-8"
        yield Answer(student, "", path, "", Verdict("unusable", reason=f"{path.name} is no {expected} ({error})"))
        return
    bound: dict[str, str] = {}
    chosen: dict[str, str] = {}  # the code of each exercise
    for number, cell in enumerate(cells, 1):
        try:
            bound |= definitions(cell)
            calls = re.findall(r"^check\.(\w+)\((\w+)\)", cell, re.MULTILINE) if path.suffix == ".ipynb" else []
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            where = f"code cell {number}: " if path.suffix == ".ipynb" else ""
            reason = f"{path.name} is not valid Python ({where}{str(error).replace('<unknown>, ', '')})"
            yield Answer(student, "", path, "", Verdict("unusable", reason=reason))
            continue
        chosen |= {name: needed_by(defined, bound) for name, defined in calls if name in exercises()}
    if path.suffix == ".py" and path.stem in exercises():
        chosen = {path.stem: text}
    elif not chosen:
        chosen = {one.name: needed_by(one.defines, bound) for one in _defined(bound)}
    for name, code in chosen.items():
        if path.suffix == ".py":
            yield Answer(student, name, path, text)
        elif lost := sorted(_globals(code) & {x for cell in cells for x in _computed(cell)} - bound.keys()):
            reason = f"{path.name}: it uses {', '.join(lost)} of a cell that is not run; define it in the function"
            yield Answer(student, name, path, code, Verdict("unusable", reason=reason))
        else:
            yield Answer(student, name, path, code)


def _globals(code: str) -> set[str]:
    """The names that some code reads and does not set."""
    nodes = list(ast.walk(ast.parse(code)))
    own = {x.arg for x in nodes if isinstance(x, ast.arg)}
    own |= {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return {x.id for x in nodes if isinstance(x, ast.Name)} - own


def _computed(cell: str) -> set[str]:
    """The names that a cell sets outside of functions; none if it is not valid Python."""
    try:
        body = ast.parse(cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    outside = [x for x in body if not isinstance(x, ast.FunctionDef | ast.ClassDef)]
    nodes = (node for x in outside for node in ast.walk(x))
    return {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def _defined(bound: dict[str, str]) -> Iterator[Exercise]:
    """The exercises whose functions are defined; of two whose functions have one name, that with as many arguments."""
    for defines in dict.fromkeys(one.defines for one in exercises().values()):
        if bound.get(defines, "").startswith(("def ", "class ")):
            arguments = _count_arguments(bound[defines])
            same = [one for one in exercises().values() if one.defines == defines]
            yield min(same, key=lambda one: abs(_count_arguments(f"def {one.signature}: ...") - arguments))


def _count_arguments(code: str) -> int:
    return next((len(node.args.args) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)), 0)


def _cells(notebook: str) -> list[str]:
    """The code cells of a notebook, without magics and without the lab's solutions."""
    sources = ["".join(x["source"]) for x in json.loads(notebook)["cells"] if x["cell_type"] == "code"]
    return [re.sub(r"^[ \t]*[%!].*$", "", x, flags=re.MULTILINE) for x in sources if "assert check." not in x]


def _with_same_code(answers: list[Answer]) -> list[Answer]:
    """The answers with the other students, and the texts of the lab, whose code is the same."""
    owners: dict[tuple[str, str], dict[str, None]] = {}
    keys = [_fingerprint(answer.exercise, answer.code) if answer.exercise else None for answer in answers]
    for answer, key in zip(answers, keys, strict=True):
        if key is not None:
            owners.setdefault((answer.exercise, key), {})[answer.student] = None
    for name in dict.fromkeys(answer.exercise for answer in answers if answer.exercise):
        for owner, code in (("the lab's start", exercise(name).start), ("the lab's solution", exercise(name).solution)):
            owners.setdefault((name, _fingerprint(name, code) or owner), {})[owner] = None
    return [
        replace(answer, same_code=tuple(x for x in owners[answer.exercise, key] if x != answer.student))
        if key is not None
        else answer
        for answer, key in zip(answers, keys, strict=True)
    ]


def _fingerprint(name: str, code: str) -> str | None:
    """An answer's function and what it needs, without names, comments, docstrings, annotations and imports.

    >>> a = _fingerprint("entropy", "def entropy(w):\\n    'Text.'\\n    return w.sum()  # comment")
    >>> a == _fingerprint("entropy", "def entropy(x: object) -> None:\\n    return (x.sum())")
    True
    """
    try:
        tree = ast.parse(needed_by(exercise(name).defines, definitions(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        field = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ClassDef: "name"}.get(type(node))
        if field is not None:
            setattr(node, field, names.setdefault(getattr(node, field), f"name{len(names)}"))
    return ast.dump(tree) if tree.body else None
