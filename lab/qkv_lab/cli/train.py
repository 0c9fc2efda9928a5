"""`qkv train`: train a small model on a task and compare its attention with the known truth."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from qkv.cli.terminal import print_files, print_line, show, table
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv_lab import Task, Trained

EXAMPLES = """\
qkv train reversal                                          (a task with its default settings)

qkv train reversal --help                                   (all settings of the task)

qkv train reversal --length 8 --model.layers 1 --steps 500  (change some settings)

qkv train --config qkv-runs/reversal/run.toml --seed 1 --out qkv-runs/again

qkv train --config lesson                                   (a lesson's model, 26,672 parameters)"""


@dataclass(frozen=True)
class Run:
    """The command line of one task: every setting of the task and of the training is a flag.

    tyro takes the types of the first two fields from their defaults, so that `qkv --help` need not import torch.
    """

    task: Annotated[Any, tyro.conf.arg(name="")]
    training: Annotated[Any, tyro.conf.arg(name="")]
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder of the run. If it contains an interrupted run with the same settings, that run continues."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Read settings from this TOML file, such as the run.toml of another run; flags override them. The package has
    one: lesson, the model of 26,672 parameters that a lesson trains to reverse six symbols."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Number of threads that torch uses; by default torch decides."""


def train(*arguments: str) -> None:
    """Train a small model on a task whose correct attention is known: minutes on one core.

    `qkv train` lists the tasks, and `qkv train TASK --help` lists the settings of a task. A run writes its settings,
    metrics, checkpoints, model and figures to its folder. Repeat the command to continue an interrupted run.

    qkv train reversal --length 8 --model.layers 1 --steps 500

    Args:
        arguments: The task and its flags.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        _list()
        return
    run = _read(arguments)
    if run.threads is not None:
        if run.threads < 1:
            raise InputError(f"--threads is {run.threads}, expected at least 1")
        import torch

        torch.set_num_threads(run.threads)
    from qkv_lab import loop

    trained = loop.train(run.task, run.training, run.out, progress=True)
    _show(run.task, trained)


def _read(arguments: Sequence[str]) -> Run:
    """The settings of a run: flags override --config, which overrides the defaults of the task."""
    from qkv_lab import settings
    from qkv_lab.tasks import names, task_class

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, nargs="?")
    config = first.parse_known_args(arguments)[0].config
    name = None if arguments[0].startswith("-") else arguments[0]
    if name is not None:
        cls = task_class(name)
        task, training = cls(), cls.training()
    elif config is None:
        raise InputError(f"task is missing before {arguments[0]}, expected one of {', '.join(names())}")
    if config is not None:
        task, training = settings.from_toml(config)
        if name not in (None, task.name):
            raise InputError(f"--config: {config} has the settings of the task {task.name!r}, expected {name!r}")
    with _without_compositions():
        run: Run = tyro.cli(
            Run,
            default=Run(task, training, Path("qkv-runs", task.name)),
            prog=f"qkv train {task.name}",
            description=_about(type(task)),
            args=arguments[name is not None :],
        )
    return run


def _without_compositions() -> tyro.constructors.ConstructorRegistry:
    """Rules for tyro by which a composition, such as `DecoderConfig.attention`, is None: only code can make one."""
    from qkv.attention import Attention

    def parsed(given: list[str]) -> None:
        if given != ["None"]:
            raise ValueError(f"{given[0]} is not None; a composition can be set in code alone")

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(field: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[None] | None:
        if field.type != (Attention | None):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="None",
            instance_from_str=parsed,
            is_instance=lambda x: x is None,
            str_from_instance=lambda _: ["None"],
        )

    return registry


def _about(task: type[Task]) -> str:
    """The docstring of a task's class without its examples."""
    lines = [line.strip() for line in (task.__doc__ or "").partition(">>>")[0].splitlines()]
    return "\n".join(lines).strip()


def _list() -> None:
    """Print the tasks and some examples."""
    from qkv_lab.tasks import names, task_class

    rows = table("task", "about")
    rows.columns[0].style, rows.columns[0].no_wrap = "bold", True
    for name in names():
        try:
            about = _about(task_class(name)).partition("\n")[0]
        except InputError as error:  # a broken entry point of an installed package
            about = str(error)
        rows.add_row(name, about)
    show("usage: qkv train TASK [--config FILE] [--out DIR] [OPTIONS]\n", rows)
    print(EXAMPLES)


def _show(task: Task, trained: Trained) -> None:
    """Print the final metrics and the names of the files."""
    from qkv_lab.log import scalars
    from qkv_lab.loop import FIGURES, MODEL
    from qkv_lab.settings import RUN

    rows = table(f"{task.name} at step {trained.metrics[-1]['step']:,}", ">")
    for found in (trained.evaluation, trained.check):
        for name, value in scalars(found):
            rows.add_row(name, f"{value:.4g}")
        rows.add_section()
    show(rows)
    model = trained.folder / MODEL
    size = sum(p.numel() for p in trained.model.parameters())
    named = shlex.quote(str(model))
    print_line("Model", f"{model}   ({size:,} parameters; qkv.models.load)", main=True)
    print_files(sorted((trained.folder / FIGURES).glob("*.png")))
    print_line("Settings", trained.folder / RUN)
    print_line("Next", f"qkv profile {named}")
    examples = {"language": '"def "', "translation": '"the black cat"'}
    if task.name in examples:
        print_line("Next", f"qkv generate {named} {examples[task.name]}")
