"""`qkv check`: check an answer to an exercise of the labs, in a file of your own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from qkv.cli.shared import folder, read
from qkv.cli.terminal import print_line, show, table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab.lessons.exercises import Exercise


def check(
    exercise: Annotated[str | None, Positional, arg(metavar="[EXERCISE]", help_behavior_hint="")] = None,
    file: Annotated[Path | None, Positional, arg(metavar="[FILE.py]", help_behavior_hint="")] = None,
    /,
    *,
    out: Annotated[Path, arg(metavar="DIR")] = Path("qkv-check"),
    seconds: Annotated[float, arg(metavar="S")] = 20.0,
) -> None:
    """Check an answer to an exercise of the labs, in a Python file of your own.

    Without arguments the command lists the exercises, with the function or class that an answer defines. With an
    exercise alone it prints the lab's code to start from, which contains a mistake. With a file it runs the trials of
    the exercise, explains the first mistake in a sentence, and draws your result beside the expected one in
    DIR/EXERCISE.png. The exit code is 0 for a right answer, 1 for a wrong one, 2 if there is no such exercise or the
    file cannot be used.

    qkv check                             (list the exercises)

    qkv check entropy                     (the code to start from; add > entropy.py to put it in a file)

    qkv check entropy entropy.py          (check the answer in that file)

    Args:
        exercise: Name of an exercise.
        file: Python file with your answer. It runs in a process of its own.
        out: Folder for the figure of a wrong answer. It is created if it does not exist.
        seconds: Time limit for your code. The check then says in which line it was.
    """
    from qkv_lab.lessons.exercises import exercise as exercise_of

    if exercise is None:
        _list()
        return
    one = exercise_of(exercise)
    if file is None:
        print(one.start, end="")
        return
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds:g}, expected more than 0")
    read(file, called="FILE.py")  # an error names the file
    if not _check(one, file.resolve(), out, seconds):
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


def _check(one: Exercise, file: Path, out: Path, seconds: float) -> bool:
    """Run the checks in a process of its own, print what it says, and keep the figure of a wrong answer."""
    from qkv._progress import spinner
    from qkv_lab.answers import child

    with folder(out), tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary)
        command = [sys.executable, "-Pum", child.__name__, one.name, file, one.defines, results, str(seconds)]
        with spinner(f"checking {file.name}"):
            done = subprocess.run(
                list(map(str, command)), env=os.environ | {"PYTHONUTF8": "1"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", check=False,
            )  # fmt: skip
        print(done.stdout, end="")
        if done.returncode == child.UNUSABLE and (results / child.REFUSED).exists():
            raise InputError((results / child.REFUSED).read_text(encoding="utf-8"))
        if line := _line_of(results / child.LOOPS, file):
            print(f"✗ no answer after {seconds:g} s: {line}; is there a loop that does not end?")
            return False
        if done.returncode not in (child.RIGHT, child.WRONG):
            print(f"✗ your code ended the process ({_end(done.returncode)})")
            return False
        if (results / child.DRAWN).exists():
            figure = out / f"{one.name}.png"
            figure.write_bytes((results / child.DRAWN).read_bytes())
            print_line("Figure", figure, main=True)
    if done.returncode == child.RIGHT:
        print_line("Right", f"{one.signature} passes every trial of {one.name}", main=True)
    return done.returncode == child.RIGHT


def _end(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _line_of(dumped: Path, file: Path) -> str:
    """The line of the reader's file that ran when the time was over; empty if the time was not over."""
    told = dumped.read_text(encoding="utf-8") if dumped.exists() else ""
    found = re.search(rf'File "{re.escape(str(file))}", line (\d+) in (\S+)', told)
    if found:
        return f"{file.name} was in line {found[1]}, in {found[2]}"
    return "it was outside of your file" if told else ""
