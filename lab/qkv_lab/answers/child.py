"""The process in which `qkv check` runs a reader's file; its arguments are those of `main`."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab.answers.answer import Call

RIGHT, WRONG, UNUSABLE = 90, 91, 92  # with which no answer ends the process itself, as sys.exit() does with 0
LOOPS, REFUSED, DRAWN = "still-running.txt", "refused.txt", "wrong.png"


def main(name: str, file: Path, defines: str, out: Path, seconds: float) -> int:
    """Check an answer. The exit code says whether it is right; files in `out` say why not. Imports do not count."""
    from qkv_lab import check
    from qkv_lab.answers import answer

    with (out / LOOPS).open("w") as running:
        faulthandler.dump_traceback_later(seconds, exit=True, file=running)
        try:
            recorded = answer.Recorded(answer.load(file, defines))
            told = _Tee(sys.stdout)
            with contextlib.redirect_stdout(told):
                right = getattr(check, name)(recorded)
        except InputError as error:
            (out / REFUSED).write_text(str(error), encoding="utf-8")
            return UNUSABLE
        finally:
            faulthandler.cancel_dump_traceback_later()
    if right:
        return RIGHT
    if recorded.last is not None:
        cause = told.getvalue().rpartition("✗ ")[2].partition(": ")[2].strip()
        _explain(name, cause, recorded.last, file, out)
    return WRONG


class _Tee(io.StringIO):
    """Text that is also printed at once."""

    def __init__(self, screen: TextIO) -> None:
        super().__init__()
        self.screen = screen

    def write(self, text: str) -> int:
        self.screen.write(text)
        return super().write(text)


def _explain(name: str, cause: str, call: Call, file: Path, out: Path) -> None:
    """Print the traceback of an exception in the reader's code; draw a wrong result beside the right one."""
    from qkv_lab.answers import answer, picture

    if call.error is not None:
        print(answer.own_frames(call.error, file))
    else:
        picture.draw(f"{name}: {cause}", call.result, answer.expected(name, call), out / DRAWN)


if __name__ == "__main__":
    _, name, file, defines, out, seconds = sys.argv
    sys.exit(main(name, Path(file), defines, Path(out), float(seconds)))
