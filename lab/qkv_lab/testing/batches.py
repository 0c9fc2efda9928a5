"""Checks of a task's batches, of its loss, and of the gradients of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.testing.inputs import calling, difference, fail, number, shape_of
from qkv_lab.task import Batch, Task
from qkv_lab.testing.randomness import set_generators
from qkv_lab.testing.values import changed

SIZE = 5
"""The number of sequences in a batch; odd, so that halves differ in size."""
STEPS, SEEDS = (0, 1, 2, 5), (0, 1, 2)
TOLERANCE = 1000 * torch.finfo(torch.float32).eps
"""The tolerance of losses in float32, relative to 1 or to the loss."""


def check_batches(task: Task) -> None:
    """Batches depend on step, size and seed alone."""
    set_generators(1)
    made = {step: _batch(task, step) for step in STEPS}
    set_generators(2)
    wrong = changed(made[STEPS[-1]], _batch(task, STEPS[-1]))
    if wrong is not None:
        fail(task, "batch", f"made another batch for step {STEPS[-1]} the second time, expected the same: {wrong}")
    other: Any = replace(task)  # type: ignore[type-var]  # a dataclass
    for step in reversed(STEPS):
        wrong = changed(made[step], _batch(other, step))
        if wrong is not None:
            fail(
                task,
                "batch",
                f"depends on the batches made before, expected the same in any order: step {step}, {wrong}",
            )
    first = made[STEPS[0]]
    if all(changed(first, made[step]) is None for step in STEPS[1:]):
        fail(task, "batch", "made the same batch for every step, expected others: a run would train on one batch")
    if all(changed(first, _batch(task, STEPS[0], seed=seed)) is None for seed in SEEDS[1:]):
        fail(task, "batch", f"made the same batch for the seeds {', '.join(map(str, SEEDS))}, expected others")
    _batch(task, STEPS[0], size=1)


def _batch(task: Task, step: int, *, size: int = SIZE, seed: int = SEEDS[0]) -> dict[str, Tensor]:
    """A copy of a batch; fails unless it has the right form."""
    call = f"batch({step}, {size}, {seed})"
    with calling(task, "batch", f"called as {call}"):
        made = task.batch(step, size, seed)
    if not isinstance(made, Mapping) or not made or not all(isinstance(x, Tensor) for x in made.values()):
        fail(task, "batch", f"returned {shape_of(made)} for {call}, expected tensors by name")
    for name, x in made.items():
        if x.ndim < 1 or len(x) != size:
            fail(task, "batch", f"made {name!r} {shape_of(x)} for {call}, expected {size} as the first dimension")
        if x.device.type != "cpu":
            fail(task, "batch", f"made {name!r} on {x.device} for {call}, expected the CPU")
    return {name: x.clone() for name, x in made.items()}


@torch.no_grad()
def check_loss(task: Task, model: nn.Module) -> None:
    """The loss is the mean over `count` predictions, in evaluation mode, where there is no dropout."""
    model.eval()
    for step in STEPS[:2]:
        batch = _batch(task, step)
        kept = {name: x.clone() for name, x in batch.items()}
        set_generators(1)
        count, loss = _counted(task, model, batch, f"batch {step}")
        set_generators(2)
        again, second = _counted(task, model, batch, f"batch {step}")
        wrong = changed(kept, batch)
        if wrong is not None:
            fail(task, "loss", f"or count wrote to the batch, expected it unchanged: {wrong}")
        if count != again:
            fail(task, "count", f"returned {count} and then {again} for one batch, expected the same")
        if loss != second:
            fail(
                task, "loss", f"returned {number(loss)} and then {number(second)} in evaluation mode, expected the same"
            )
        for parts in (2, SIZE):
            _check_mean(task, model, batch, parts, count, loss)


def _check_mean(task: Task, model: nn.Module, batch: Batch, parts: int, count: int, loss: float) -> None:
    cut = {name: x.tensor_split(parts) for name, x in batch.items()}
    made = [
        _counted(task, model, {name: x[i] for name, x in cut.items()}, f"part {i} of {parts} of a batch")
        for i in range(parts)
    ]
    if sum(n for n, _ in made) != count:
        each = " + ".join(str(n) for n, _ in made)
        fail(task, "count", f"is {count} for a batch, but {each} for its {parts} parts, expected the sum")
    mean = sum(n * x for n, x in made) / count
    if not abs(loss - mean) <= TOLERANCE * max(1.0, abs(mean)):
        fail(
            task, "loss", f"is not the mean over its count of {count} predictions: the loss of a batch is "
            f"{number(loss)}, expected {number(mean)}, the mean of those of its {parts} parts, weighted by their counts"
        )  # fmt: skip


def _counted(task: Task, model: nn.Module, batch: Batch, what: str) -> tuple[int, float]:
    """The count and the loss of a batch; fails unless they have the right form."""
    with calling(task, "count", f"called for {what}"):
        count: object = task.count(batch)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        fail(task, "count", f"returned {count!r} for {what}, expected an int, at least 1")
    return count, float(_loss(task, model, batch, what))


def _loss(task: Task, model: nn.Module, batch: Batch, what: str) -> Tensor:
    with calling(task, "loss", f"called for {what}"):
        loss = task.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        fail(task, "loss", f"returned {shape_of(loss)} for {what}, expected a floating-point tensor of shape ()")
    if not bool(loss.isfinite()):
        fail(task, "loss", f"is {number(loss.item())} for {what}, expected a finite number")
    return loss


def check_gradients(task: Task, model: nn.Module) -> None:
    """Every trained parameter receives a finite gradient, and some are not zero."""
    model.train()
    set_generators(1)
    loss = _loss(task, model, _batch(task, STEPS[0]), "a batch in training mode")
    if not loss.requires_grad:
        fail(task, "loss", "has no gradient, expected a loss that is computed by the model, outside of torch.no_grad")
    with calling(task, "loss", "differentiated"):
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, gradient in gradients.items() if gradient is None]
    if without:
        fail(
            task, "loss", f"gives no gradient to {', '.join(without)}, expected one for each trained parameter, "
            "which training with several processes requires"
        )  # fmt: skip
    for name, gradient in gradients.items():
        if gradient is not None and not bool(gradient.isfinite().all()):
            fail(task, "loss", f"gives a gradient to {name} that is not finite, expected finite numbers")
    if all(
        gradient is None or difference(gradient, torch.zeros_like(gradient)) is None for gradient in gradients.values()
    ):
        fail(task, "loss", "has a gradient of zero for every parameter, expected a loss that depends on the model")
    model.zero_grad()
