"""`qkv check`: check an answer to an exercise of the labs in a file of your own, or the answers of a class."""

from __future__ import annotations

import csv as csv_files
import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv.cli.shared import folder, read
from qkv.cli.terminal import print_line, show, table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab.answers.grading import Answer
    from qkv_lab.lessons.exercises import Exercise


def check(
    exercise: Annotated[str | None, Positional, arg(metavar="[EXERCISE]", help_behavior_hint="")] = None,
    file: Annotated[Path | None, Positional, arg(metavar="[FILE.py|FOLDER/]", help_behavior_hint="")] = None,
    /,
    *,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-check"),
    seconds: Annotated[float, arg(metavar="S")] = 20.0,
    student: Annotated[str, arg(metavar="NAME", help_behavior_hint="")] = "",
    csv: Annotated[bool, FlagCreatePairsOff] = False,
    json: Annotated[bool, FlagCreatePairsOff] = False,
) -> None:
    """Check an answer to an exercise of the labs, in a Python file of your own, or the answers of a class in a folder.

    Without arguments the command lists the exercises, with the function or class that an answer defines. With an
    exercise alone it prints the lab's code to start from, which contains a mistake. With a file it runs the trials of
    the exercise, explains the first mistake in a sentence, and draws your result beside the expected one in
    DIR/EXERCISE.png. The exit code is 0 for a right answer, 1 for a wrong one, 2 if there is no such exercise or the
    file cannot be used.

    With a folder that has a file or a folder for each student, it checks every script and notebook in it, and prints
    a point for each right answer, and whose code is the same. The exit code is then 0.

    qkv check                             (list the exercises)

    qkv check entropy                     (the code to start from; add > entropy.py to put it in a file)

    qkv check entropy entropy.py          (check the answer in that file)

    qkv check by_hand --student ada       (a work sheet with numbers of her own)

    qkv check class/ --csv > points.csv   (check all answers of a class; qkv check entropy class/ for one exercise)

    Args:
        exercise: Name of an exercise.
        file: Python file with your answer, or a folder of answers. Each answer runs in a process of its own.
        out: Folder for the figure of a wrong answer. It is created if it does not exist.
        seconds: Time limit for each answer. The check then says in which line it was.
        student: Check with the numbers of a student, which the name determines. In a folder each student has their own.
        csv: Print a line for each answer in a folder as CSV instead of a table.
        json: Print them as JSON.
    """
    from qkv_lab.answers.grading import handed_in
    from qkv_lab.lessons.exercises import exercise as exercise_of

    if exercise is not None and file is None and (Path(exercise).is_dir() or "/" in exercise):
        file = Path(exercise)
        exercise = None
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}, expected more than 0")
    if csv and json:
        raise InputError("--csv and --json are both given, expected one of them")
    one = None if exercise is None else exercise_of(exercise)
    if file is not None and (file.is_dir() or one is None):
        if not file.is_dir():
            raise InputError(f"FOLDER is {file}, which is no folder")
        if student:
            raise InputError("--student is for one answer; the names of files or folders are those of the students")
        form: Literal["table", "csv", "json"] = "csv" if csv else "json" if json else "table"
        _grade(handed_in(file, None if one is None else one.name), seconds, form)
        return
    if csv or json:
        raise InputError(f"--{'csv' if csv else 'json'} is for the answers of a class: give a folder")
    if one is None:
        _list()
    elif file is None:
        print(_sheet(student) if one.name == "by_hand" else "", one.start, sep="", end="")
    else:
        read(file, called="FILE.py")  # an error names the file
        if not _check(one, file.resolve(), out, seconds, student):
            raise SystemExit(1)


def _list() -> None:
    """Print the exercises, with what an answer defines."""
    from rich.text import Text

    from qkv_lab.lessons.exercises import exercises

    rows = table("exercise", "define", "lab")
    rows.columns[0].style = "cyan"
    rows.columns[0].no_wrap = rows.columns[2].no_wrap = True
    for one in exercises().values():
        rows.add_row(one.name, Text(one.signature), one.lab)
    show(rows)
    show("usage: qkv check EXERCISE           (the code to start from)")
    show("       qkv check EXERCISE FILE.py   (check the answer in a file)")
    show("       qkv check FOLDER/            (check the answers of a class)")


def _sheet(student: str) -> str:
    """The work sheet of attention by hand, as comments above the code to start from."""
    from qkv_lab.check.worksheet import sheet

    return "".join(f"# {line}".rstrip() + "\n" for line in sheet(student).splitlines()) + "\n"


def _check(one: Exercise, file: Path, out: Path, seconds: float, student: str) -> bool:
    """Print what the check of an answer says, and keep the figure of a wrong one."""
    from qkv._files import write_atomically
    from qkv._progress import spinner
    from qkv_lab.answers.grading import judge

    with spinner(f"checking {file.name}"):
        verdict = judge(one, file, seconds, student)
    if verdict.figure is not None:
        with folder(out):
            write_atomically(out / f"{one.name}.png", verdict.figure)
    print(verdict.printed, end="")
    if verdict.outcome == "unusable":
        raise InputError(verdict.reason)
    if verdict.reason and f"✗ {verdict.reason}" not in verdict.printed:
        print(f"✗ {verdict.reason}")
    if verdict.figure is not None:
        print_line("Figure", out / f"{one.name}.png", main=True)
    if verdict.outcome == "right":
        print_line("Right", f"{one.signature} passes every trial of {one.name}", main=True)
    return verdict.outcome == "right"


def _grade(handed_in: list[Answer], seconds: float, form: Literal["table", "csv", "json"]) -> None:
    """Check the answers of a class, and print the points of each student."""
    from qkv._progress import bar
    from qkv_lab.answers.grading import grade

    with bar("checking", "answers", len(handed_in)) as step:
        answers = grade(handed_in, seconds, step)
    if form == "table":
        _show_points(answers)
        return
    rows = [
        {
            "student": x.student, "exercise": x.exercise, "points": int(x.verdict.outcome == "right"),
            "verdict": x.verdict.outcome, "reason": x.verdict.reason, "same_code": "; ".join(x.same_code),
            "file": str(x.file),
        }
        for x in answers
        if x.verdict is not None
    ]  # fmt: skip
    if form == "json":
        print(json_text.dumps(rows, indent=1, ensure_ascii=False))
        return
    writer = csv_files.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _as_text(value) for key, value in row.items()} for row in rows)


def _as_text(value: object) -> object:
    """A cell that a spreadsheet does not take for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _short(reason: str) -> str:
    """A reason without the middle of its traceback."""
    lines = reason.splitlines()
    return ": ".join(dict.fromkeys((lines[0], lines[-1])))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _show_points(answers: list[Answer]) -> None:
    """Print a row for each student, and whose code is the same."""
    from rich.text import Text

    names = dict.fromkeys(x.exercise for x in answers if x.exercise)
    rows = table("student", f">points of {len(names)}", "not right", "same code as")
    for student in dict.fromkeys(x.student for x in answers):
        own = [x for x in answers if x.student == student and x.verdict is not None]
        right = {x.exercise for x in own if x.verdict is not None and x.verdict.outcome == "right"}
        bad = [x for x in own if x.exercise not in right and x.verdict is not None]
        missing = (
            ["not handed in: " + ", ".join(m)]
            if (m := [x for x in names if x not in {one.exercise for one in own}])
            else []
        )
        told = [f"{x.exercise or x.file.name}: {_short(x.verdict.reason)}" for x in bad if x.verdict]
        same = [f"{_some(x.same_code)} ({x.exercise})" for x in own if x.same_code]
        rows.add_row(Text(student), str(len(right)), Text("\n".join([*told, *missing])), Text("\n".join(same)))
    show(rows)
