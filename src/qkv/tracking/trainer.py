"""`AttentionCallback` for transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from qkv.tracking.tracker import Callback


class AttentionCallback(Callback, TrainerCallback):  # type: ignore[misc]
    """Follows sinks, entropy, dead and uniform heads and massive activations in a `Trainer` run.

    Losses, gradients and random numbers are those of a run without it, and steps that are not measured are not touched.

    Args:
        every: measure each step whose number is a multiple of this.
        log: called as ``log(numbers, step=step)``, such as ``wandb.log``; by default a `CSVLog` of ``attention.csv`` in
            the output folder of the run.
        layers: which attention layers to measure, counted from 0; all if None.

    Raises:
        InputError: if `every` is less than 1.

    >>> callback = AttentionCallback(every=50)  # Trainer(..., callbacks=[callback])
    >>> callback.rows
    []
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by the trainer."""
        self._start(model, args.output_dir, main=state.is_world_process_zero)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        self._started.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer, when `global_step` already counts the step."""
        self._started.end(state.global_step - 1)
