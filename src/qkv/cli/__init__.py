"""The command line: `qkv COMMAND`, one module for each command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

import qkv
from qkv.cli import bench, evict, experiment, flow, generate, maps, profile, survey, train, view
from qkv.cli.files import forget_output
from qkv.errors import InputError

COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profile.profile,
    "survey": survey.survey,
    "evict": evict.evict,
    "flow": flow.flow,
    "map": maps.head_map,
    "view": view.view,
    "generate": generate.generate,
    "bench": bench.bench,
    "train": train.train,
    "experiment": experiment.experiment,
}
DESCRIPTION = "Attention you can compose, measure and explain. `qkv COMMAND --help` says more."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qkv`. Bad input gets one sentence on standard error and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"qkv {qkv.__version__}")
        return 0
    try:
        if arguments[:1] == ["train"]:  # its flags depend on its first word, the task, so it reads them itself
            train.train(*arguments[1:])
        else:
            arguments = arguments or ["--help"]
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="qkv", description=DESCRIPTION, args=arguments)
    except InputError as error:
        print(f"qkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"qkv: {str(error) or 'interrupted; nothing half-written was left behind'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read has left, as `head` does: nobody is there to be told
        forget_output()
        return 141  # as of a program that the signal ended
    return 0
