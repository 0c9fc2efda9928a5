"""Check of a few training steps of a task, interrupted and not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from qkv.testing.inputs import CheckFailed, calling, difference
from qkv_lab import loop, resume, settings
from qkv_lab.task import Task, Training
from qkv_lab.testing.randomness import set_generators
from qkv_lab.testing.values import changed, first_difference

STEPS, BATCH, SAVED = 4, 4, 2
"""The steps of the run, the sequences in a batch, and the step after which the interrupted run has its checkpoint."""
GPU_TOLERANCE = 1e-4
"""The tolerance of weights on a GPU, whose sums depend on the order of threads."""


def check_training(task: Task) -> None:
    """A short run changes the weights, saves the trained model, and ends with the same weights if it resumes."""
    training = replace(
        task.training(), steps=STEPS, batch=BATCH, accumulate=1, warmup=1, precision="float32", log_every=1,
        evaluate_every=STEPS, save_every=SAVED,
    )  # fmt: skip
    name = type(task).__name__
    with TemporaryDirectory() as temporary:
        whole, resumed = Path(temporary, "whole"), Path(temporary, "resumed")
        set_generators(1)
        run = _trained(task, training, whole, f"trained for {STEPS} steps")
        trained = run.model
        torch.manual_seed(training.seed)
        if changed(_weights(task.build()), _weights(trained)) is None:
            raise CheckFailed(f"{name}: no weight changed in {STEPS} steps of training, expected that the model learns")
        saved = _trained(task, training, whole, "loaded after training").model
        with torch.no_grad(), calling(task, "evaluate", "called for the saved model"):
            wrong = first_difference(run.evaluation, task.evaluate(saved))
        if wrong is not None:
            raise CheckFailed(
                f"{name}: the saved model has other metrics than the trained one, expected the same: what build makes "
                f"must follow from the model's configuration and weights: {wrong}"
            )
        resumed.mkdir()
        for file in (settings.RUN, loop.METRICS):
            shutil.copy(whole / file, resumed / file)
        first = resume.checkpoints(whole)[0]
        shutil.copytree(first, resumed / first.name)
        set_generators(2)
        fresh: Any = replace(task)  # type: ignore[type-var]  # a dataclass; as a new process has
        again = _trained(fresh, training, resumed, f"resumed after step {SAVED} of {STEPS}").model
        wrong = _difference(_weights(trained), _weights(again), exact=next(trained.parameters()).device.type == "cpu")
        if wrong is not None:
            raise CheckFailed(
                f"{name}: a run that resumed after step {SAVED} of {STEPS} ended with other weights than an "
                f"uninterrupted one, expected the same, because batches, loss and model may depend on the seed and the "
                f"step alone: {wrong}"
            )


def _trained(task: Task, training: Training, folder: Path, situation: str) -> loop.Trained:
    with calling(task, "training", situation):
        return loop.train(task, training, folder, progress=False, figures=False)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in model.state_dict().items()}


def _difference(a: dict[str, Tensor], b: dict[str, Tensor], *, exact: bool) -> str | None:
    if exact:
        return changed(a, b)
    found = ((name, difference(b[name], x, GPU_TOLERANCE)) for name, x in a.items())
    return next((f"{name!r}: {wrong}" for name, wrong in found if wrong is not None), None)
