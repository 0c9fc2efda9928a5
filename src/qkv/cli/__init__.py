"""The command line: `qkv COMMAND`, with one module for each command; other packages add theirs as entry points.

It may import all of qkv, inside of the commands, so that `--help` is quick. Read `__init__.py`, then `profile.py`.
"""

from __future__ import annotations

import atexit
import contextvars
import gc
import inspect
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

import tyro

import qkv
from qkv._packages import explain, lab_is_missing
from qkv.cli import ablate, evict, flow, generate, maps, profile, sources, survey, view
from qkv.cli.shared import discard_output
from qkv.cli.terminal import Laps, forget_remarks, show_menu
from qkv.errors import InputError, nearest
from qkv.native import described

COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "survey": survey.survey,
    "evict": evict.evict,
    "ablate": ablate.ablate,
    "flow": flow.flow,
    "map": maps.head_map,
    "view": view.view,
    "generate": generate.generate,
    "sources": sources.sources,
}

OF_LAB = ("train", "experiment", "claims", "lab", "check")
"""Commands of the distribution qkv-lab, which registers them in the entry point group `qkv.commands`."""

SUBCOMMANDS: dict[str, Callable[..., None]] = {"survey merge": survey.merge}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qkv`. For bad input it prints one sentence to standard error and returns exit code 2."""
    if arguments is None:  # the process ends with the command
        gc.set_threshold(100_000, 50, 50)  # importing libraries and drawing make many objects and little garbage
        atexit.register(_freeze)
    else:
        Laps.began = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    forget_remarks()
    if arguments == ["--version"]:
        print(f"qkv {qkv.__version__}\n{described()}")
        return 0
    if arguments in ([], ["-h"], ["--help"]):
        show_menu()
        return 0
    try:
        if (words := " ".join(arguments[:2])) in SUBCOMMANDS:  # a model in a folder called merge is ./merge
            _call(SUBCOMMANDS[words], f"qkv {words}", arguments[2:])
        else:
            _call(_command(arguments[0]), f"qkv {arguments[0]}", arguments[1:])
    except InputError as error:
        print(f"qkv: {_printable(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        missing = explain(f"qkv {arguments[0]}", error)
        if missing is None:
            raise
        print(f"qkv: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"qkv: {str(error) or 'interrupted; no incomplete file was left behind'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of standard output, such as `head`, has closed it
        discard_output()
        return 141  # the exit code of a program that the signal SIGPIPE ended
    except OSError as error:  # a disk is full, a drive is lost, a file may not be read
        if error.strerror is None:
            raise
        print(f"qkv: cannot read or write {error.filename or 'a file'} ({error.strerror})", file=sys.stderr)
        return 2
    return 0


def _printable(text: str) -> str:
    """The text with control characters as escapes: a name in a stranger's file must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def commands() -> dict[str, Callable[..., None]]:
    """All commands by name, with those that other packages register."""
    return {**COMMANDS, **{entry.name: entry.load() for entry in entry_points(group="qkv.commands")}}


def _command(name: str) -> Callable[..., None]:
    """The function of a command: one of this package, or one that another package registers in `qkv.commands`."""
    if name in COMMANDS:
        return COMMANDS[name]
    registered = {entry.name: entry for entry in entry_points(group="qkv.commands")}
    if name in registered:
        loaded: Callable[..., None] = registered[name].load()
        return loaded
    if name in OF_LAB:
        raise InputError(lab_is_missing(f"qkv {name}"))
    known = [*COMMANDS, *registered]
    raise InputError(f"command is {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")


def _call(command: Callable[..., None], name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command by its signature, and run it.

    A command of the signature `(*arguments: str)` parses them itself: the flags of `qkv train` depend on the task.
    """
    if [p.kind for p in inspect.signature(command).parameters.values()] == [inspect.Parameter.VAR_POSITIONAL]:
        command(*arguments)
        return
    _join_lines(command)
    context = contextvars.copy_context()  # the limit of --max-size ends with the command
    context.run(tyro.cli, command, prog=name, args=arguments)


def _freeze() -> None:
    """Keep Python from searching all libraries for garbage at exit, which takes almost a second.

    Triton's bindings report what is not collected as leaks, so it is left alone.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _join_lines(command: Callable[..., None]) -> None:
    """Put each argument's description in a docstring on one line, because tyro would keep its line breaks."""
    text, head, arguments = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    command.__doc__ = text + head + re.sub(r"\n {5,}", " ", arguments)
