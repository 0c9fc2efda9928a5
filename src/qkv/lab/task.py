"""What a task is, and the settings of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models.config import one_of

__all__ = [
    "Task",
    "Training",
]


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = Mapping[str, Tensor]
"""Tensors whose first dimension is the sequence, or image."""
Measured = Mapping[str, Any]
"""Numbers by name, or nested lists of them (layer, head), as JSON holds them."""


class Task(Protocol):
    """Data, model, metric and truth of something small to learn.

    A task is a frozen dataclass of plain values, with the configuration of its model as the field `model`. Everything
    it makes is a function of these and of its arguments, so that a run can go on anywhere: batch 500 is the same
    whether or not batches 0 … 499 were made before.

    >>> from qkv.lab.tasks import task_class
    >>> task = task_class("reversal")(length=4)
    >>> sorted(task.batch(0, size=2, seed=0))
    ['ids']
    """

    name: ClassVar[str]

    @staticmethod
    def training() -> Training:
        """Settings that teach it in minutes on one core."""

    @property
    def model(self) -> Any:
        """Configuration of the model: a flat dataclass of `qkv.models`."""

    def build(self) -> nn.Module:
        """The model, with initial weights drawn from torch's generator."""

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """What the model is trained on at a step: `size` sequences, on the CPU."""

    def count(self, batch: Batch) -> int:
        """How many predictions the loss of a batch is the mean of."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss in nats a prediction."""

    def evaluate(self, model: nn.Module) -> Measured:
        """Metrics on held-out data, the same at every call. The model is in evaluation mode, without gradients."""

    def check(self, model: nn.Module) -> Measured:
        """Where the model attends, against what is known to be right. As `evaluate`."""

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Pictures of what was learnt, by name."""

    def files(self) -> Mapping[str, str]:
        """Texts to keep beside the model, by name: a tokenizer."""


@dataclass(frozen=True)
class Training:
    """How to train: AdamW, warm-up and cosine decay.

    >>> Training(steps=100, warmup=10).lr_at(4)
    0.0015
    """

    steps: int = 1000
    """Optimizer steps."""
    batch: int = 32
    """Sequences a step, over all processes."""
    accumulate: int = 1
    """Parts in which each process takes its share of a batch, to need less memory."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 100
    """Steps over which the learning rate rises from 0."""
    decay: Literal["cosine", "none"] = "cosine"
    """How it falls after that."""
    floor: float = 0.1
    """Share of the peak at which cosine decay ends."""
    weight_decay: float = 0.1
    """Of matrices; vectors (biases, norms) have none."""
    beta1: float = 0.9
    """Share of the old in AdamW's running mean of gradients."""
    beta2: float = 0.95
    """The same of their squares."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no limit."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: products of matrices in bfloat16 (autocast), weights in float32."""
    seed: int = 0
    """Of initial weights, data and dropout."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate_every: int = 250
    """Steps between evaluations, with a look at the attention."""
    save_every: int = 250
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "log_every", "evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("lr", "warmup", "weight_decay", "clip", "seed"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 0")
        for name in ("floor", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected a number from 0 to 1")
        one_of("decay", self.decay, ("cosine", "none"))
        one_of("precision", self.precision, ("float32", "bfloat16"))

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        from math import cos, pi

        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay == "none":
            return self.lr
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + cos(pi * done)) / 2)
