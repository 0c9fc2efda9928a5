"""The process in which `qkv check` runs a reader's file; its arguments are those of `main`, and a student."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab.answers.answer import Call

RIGHT, WRONG, UNUSABLE = 90, 91, 92  # with which no answer ends the process itself, as sys.exit() does with 0
LOOPS, REFUSED, DRAWN = "still-running.txt", "refused.txt", "wrong.png"


def main(name: str, file: Path, defines: str, out: Path, seconds: float) -> int:
    """Check an answer. The exit code says whether it is right; files in `out` say why not. Imports do not count."""
    from qkv_lab import check
    from qkv_lab.answers import answer
    from qkv_lab.check.hints import Failed

    with (out / LOOPS).open("w") as running:
        faulthandler.dump_traceback_later(seconds, exit=True, file=running)
        try:
            recorded = answer.Recorded(answer.load(file, defines))
            getattr(check, name).__wrapped__(recorded)
            return RIGHT
        except InputError as error:
            (out / REFUSED).write_text(str(error), encoding="utf-8")
            return UNUSABLE
        except Failed as failed:
            hint = str(failed)
        finally:
            faulthandler.cancel_dump_traceback_later()
    if recorded.last is not None:
        _explain(name, hint, recorded.last, file, out)
    return WRONG


def _explain(name: str, hint: str, call: Call, file: Path, out: Path) -> None:
    """Print the traceback of an exception in the reader's code; draw a wrong result beside the right one."""
    from qkv_lab.answers import answer, picture

    if call.error is not None:
        print(answer.own_frames(call.error, file))
    else:
        picture.draw(f"{name}: {hint}", call.result, answer.expected(name, call), out / DRAWN)


if __name__ == "__main__":
    from qkv_lab.check.hints import numbers_of

    _, name, file, defines, out, seconds, student = sys.argv
    with numbers_of(student):
        sys.exit(main(name, Path(file), defines, Path(out), float(seconds)))
