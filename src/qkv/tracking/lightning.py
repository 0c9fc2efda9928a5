"""`LightningAttentionCallback` for Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from qkv.errors import InputError
from qkv.tracking.tracker import Callback, Log


def LightningAttentionCallback(  # noqa: N802 (it makes an object of a class whose base is Lightning's)
    every: int = 100, log: Log | None = None, layers: Collection[int] | None = None
) -> Any:
    """A callback that follows sinks, entropy, dead and uniform heads and massive activations in a run of Lightning.

    Args:
        every: measure each batch whose number is a multiple of this.
        log: called as ``log(numbers, step=step)``, such as ``wandb.log``; by default a `CSVLog` of ``attention.csv`` in
            the trainer's ``log_dir``.
        layers: which attention layers to measure, counted from 0; all if None.

    Raises:
        InputError: if `every` is less than 1, or Lightning is not installed.

    >>> callback = LightningAttentionCallback(every=50)  # doctest: +SKIP
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):  # the two names under which it is published
        try:
            base = importlib.import_module(package).Callback
        except ImportError:
            continue
        return type("LightningAttentionCallback", (_Hooks, base), {})(every, log, layers)
    raise InputError("LightningAttentionCallback needs lightning, which is not installed: pip install lightning")


class _Hooks(Callback):
    """The methods that Lightning's trainer calls."""

    _batch = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        self._start(pl_module, trainer.log_dir or trainer.default_root_dir, main=trainer.is_global_zero)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called by the trainer."""
        self._started.begin(self._batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called by the trainer."""
        self._started.end(self._batch)
        self._batch += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        self._started.close()
