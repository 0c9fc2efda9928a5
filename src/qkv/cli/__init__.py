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
from qkv.cli import ablate, bench, evict, experiment, flow, generate, maps, profile, survey, train, view
from qkv.cli.files import discard_output
from qkv.errors import InputError

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
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qkv`. For bad input it prints one sentence to standard error and returns exit code 2."""
    if arguments is None:  # the process ends with the command
        atexit.register(gc.freeze)  # else Python would search all libraries for garbage at exit, for almost a second
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"qkv {qkv.__version__}")
        return 0
    if arguments in ([], ["-h"], ["--help"]):
        _list_commands()
        return 0
    try:
        if arguments[:1] == ["train"]:  # its flags depend on the task, which is its first argument
            train.train(*arguments[1:])
        else:
            for command in COMMANDS.values():
                _join_lines(command)
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="qkv", args=arguments)
    except InputError as error:
        print(f"qkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"qkv: {str(error) or 'interrupted; no incomplete file was left behind'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of standard output, such as `head`, has closed it
        discard_output()
        return 141  # the exit code of a program that the signal SIGPIPE ended
    return 0


def _list_commands() -> None:
    """Print every command with the first sentence of its docstring."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    for name, command in COMMANDS.items():
        table.add_row(name, (command.__doc__ or "").partition("\n")[0])
    console = Console(highlight=False)
    console.print("usage: qkv COMMAND [OPTIONS]\n\nCompose, measure and explain attention.\n", markup=False)
    console.print(table)
    console.print("\nqkv COMMAND --help     the options of a command, with examples", markup=False)
    console.print("qkv --version          the version of qkv", markup=False)


def _join_lines(command: Callable[..., None]) -> None:
    """Put each argument's description in a docstring on one line, because tyro would keep its line breaks."""
    text, head, arguments = inspect.cleandoc(command.__doc__ or "").partition("\nArgs:\n")
    command.__doc__ = text + head + re.sub(r"\n {5,}", " ", arguments)
