"""The command line: `qkv COMMAND`, with one module for each command."""

from __future__ import annotations

import atexit
import gc
import inspect
import re
import sys
from collections.abc import Callable, Sequence

import tyro

import qkv
from qkv._packages import explain
from qkv.cli import (
    ablate,
    bench,
    check,
    claims,
    evict,
    experiment,
    flow,
    generate,
    lab,
    maps,
    profile,
    survey,
    train,
    view,
)
from qkv.cli.files import discard_output
from qkv.cli.menu import show_menu
from qkv.errors import InputError, nearest

COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "survey": survey.survey,
    "evict": evict.evict,
    "ablate": ablate.ablate,
    "flow": flow.flow,
    "map": maps.head_map,
    "view": view.view,
    "generate": generate.generate,
    "bench": bench.bench,
    "train": train.train,
    "experiment": experiment.experiment,
    "claims": claims.claims,
    "lab": lab.lab,
    "check": check.check,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qkv`. For bad input it prints one sentence to standard error and returns exit code 2."""
    if arguments is None:  # the process ends with the command
        atexit.register(_freeze)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"qkv {qkv.__version__}")
        return 0
    if arguments in ([], ["-h"], ["--help"]):
        show_menu()
        return 0
    try:
        if arguments[:1] == ["train"]:  # its flags depend on the task, which is its first argument
            train.train(*arguments[1:])
        else:
            command = _command(arguments[0])
            _join_lines(command)
            tyro.cli(command, prog=f"qkv {arguments[0]}", args=arguments[1:])
    except InputError as error:
        print(f"qkv: {error}", file=sys.stderr)
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
    return 0


def _command(name: str) -> Callable[..., None]:
    if name not in COMMANDS:
        raise InputError(f"command is {name!r}, expected one of {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
    return COMMANDS[name]


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
