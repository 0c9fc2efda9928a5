"""`AttentionCallback` for transformers' `Trainer`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from qkv.errors import InputError
from qkv.tracking.tracker import Tracker
from qkv.tracking.writers import CSVWriter, Writer

FILE = "attention.csv"


class AttentionCallback(TrainerCallback):  # type: ignore[misc]
    """Follows sinks, entropy, dead and uniform heads and massive activations in a `Trainer` run.

    Losses, gradients and random numbers are those of a run without it, and steps that are not measured are not touched.

    Args:
        every: measure each step whose number is a multiple of this.
        writers: get the numbers; by default a `CSVWriter` of ``attention.csv`` in the output folder of the run.
        layers: which attention layers to measure, counted from 0; all if None.

    Raises:
        InputError: if `every` is less than 1.

    >>> callback = AttentionCallback(every=50)  # Trainer(..., callbacks=[callback])
    >>> callback.rows
    []
    """

    def __init__(
        self, every: int = 100, writers: Sequence[Writer] | None = None, layers: Collection[int] | None = None
    ) -> None:
        if every < 1:
            raise InputError(f"every is {every}, expected at least 1 step")
        self.every, self.writers, self.layers = every, writers, layers
        self.tracker: Tracker | None = None

    @property
    def rows(self) -> list[dict[str, float]]:
        """The numbers of each measured step; see `qkv.tracking.tracker.NUMBERS`."""
        return [] if self.tracker is None else self.tracker.rows

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by the trainer."""
        writers = self.writers
        if writers is None:
            writers = [CSVWriter(Path(args.output_dir) / FILE)]
        self.tracker = Tracker(model, self.every, writers if state.is_world_process_zero else (), self.layers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        assert self.tracker is not None
        self.tracker.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer, when `global_step` already counts the step."""
        assert self.tracker is not None
        self.tracker.end(state.global_step - 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        assert self.tracker is not None
        self.tracker.close()
