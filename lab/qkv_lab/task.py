"""The protocol that every task follows, and the settings of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor, nn

from qkv.errors import InputError, one_of

__all__ = ["Task", "Training"]
__dir__ = __all__.copy


if TYPE_CHECKING:
    from matplotlib.figure import Figure

C = TypeVar("C")
Batch = Mapping[str, Tensor]
"""Tensors by name; the first dimension of each is the batch."""
Measured = Mapping[str, Any]
"""Numbers, or nested lists of numbers such as (layer, head), by name; JSON can hold them."""


class Task(Protocol):
    """A small learning problem: data, model, metrics, and a ground truth to check the attention against.

    A task is a frozen dataclass of plain values, with the configuration of its model in the field `model`. Its methods
    are pure functions of these values and their arguments, so that a run can resume at any step: batch 500 is the same
    whether or not batches 0 … 499 were made before. An installed package can register a task as an entry point in the
    group ``qkv.tasks``.

    >>> from qkv_lab.tasks import task_class
    >>> task = task_class("reversal")(length=4)
    >>> sorted(task.batch(0, size=2, seed=0))
    ['ids']
    """

    name: ClassVar[str]

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task in minutes on one core."""

    @property
    def model(self) -> Any:
        """Configuration of the model: a flat dataclass of `qkv.models`."""

    def build(self) -> nn.Module:
        """A new model; its weights are drawn from torch's global generator."""

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The training batch of a step: `size` sequences, on the CPU."""

    def count(self, batch: Batch) -> int:
        """The number of predictions that the loss of a batch averages over."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss in nats per prediction."""

    def evaluate(self, model: nn.Module) -> Measured:
        """Metrics on held-out data, the same at every call. The model is in evaluation mode; gradients are disabled."""

    def check(self, model: nn.Module) -> Measured:
        """The model's attention compared with the ground truth; called as `evaluate` is."""

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """Figures of a trained model, by name."""

    def files(self) -> Mapping[str, str]:
        """Text files to save beside the model, by name, such as tokenizer.json."""


@dataclass(frozen=True)
class Training:
    """Settings of the training loop: AdamW with warm-up and cosine decay.

    >>> Training(steps=100, warmup=10).lr_at(4)
    0.0015
    """

    steps: int = 1000
    """Optimizer steps."""
    batch: int = 32
    """Sequences per step."""
    accumulate: int = 1
    """Gradient accumulation: micro-batches into which a batch is split."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup: int = 100
    """Steps over which the learning rate rises from 0."""
    decay: Literal["cosine", "none"] = "cosine"
    """The learning-rate schedule after the warm-up."""
    floor: float = 0.1
    """Final learning rate of the cosine decay, as a share of the peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (biases, norms) are not decayed."""
    beta1: float = 0.9
    """AdamW's β₁, the decay rate of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's β₂, the decay rate of the mean of squared gradients."""
    clip: float = 1.0
    """Gradient clipping: the largest norm; 0 for no limit."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 multiplies matrices in bfloat16 (autocast); the weights stay in float32."""
    seed: int = 0
    """Seed of the initial weights, the data and dropout."""
    log_every: int = 10
    """Steps between lines of metrics."""
    evaluate_every: int = 250
    """Steps between evaluations (metrics and attention check)."""
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
        """The learning rate at a step, counted from 0."""
        from math import cos, pi

        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.decay == "none":
            return self.lr
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + cos(pi * done)) / 2)


def with_entries(config: C, **needed: Any) -> C:
    """A model's configuration with the entries that the task determines, such as the vocabulary size.

    >>> from qkv.models import DecoderConfig
    >>> with_entries(DecoderConfig(layers=2), vocab_size=17).vocab_size
    17
    """
    defaults = {f.name: f.default for f in fields(config)}  # type: ignore[arg-type]
    for name, value in needed.items():
        given = getattr(config, name)
        if given not in (defaults[name], value):
            raise InputError(f"model.{name} is {given!r}, but the task sets it to {value!r}")
    return replace(config, **needed)  # type: ignore[type-var]
