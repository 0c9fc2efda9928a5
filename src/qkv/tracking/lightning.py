"""`LightningAttentionCallback` for Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from qkv.errors import InputError
from qkv.tracking.tracker import Tracker
from qkv.tracking.trainer import FILE
from qkv.tracking.writers import CSVWriter, Writer


def _callback_class() -> type[Any]:
    """The base class of callbacks, of either name under which Lightning is published."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type[Any] = importlib.import_module(package).Callback
            return found
        except ImportError:
            continue
    raise InputError("LightningAttentionCallback needs lightning, which is not installed: pip install lightning")


def LightningAttentionCallback(  # noqa: N802 (it makes an object of a class whose base is Lightning's)
    every: int = 100, writers: Sequence[Writer] | None = None, layers: Collection[int] | None = None
) -> Any:
    """A callback that follows sinks, entropy, dead and uniform heads and massive activations in a run of Lightning.

    Args:
        every: measure each batch whose number is a multiple of this.
        writers: get the numbers; by default a `CSVWriter` of ``attention.csv`` in the trainer's ``log_dir``.
        layers: which attention layers to measure, counted from 0; all if None.

    Raises:
        InputError: if `every` is less than 1, or Lightning is not installed.

    >>> callback = LightningAttentionCallback(every=50)  # doctest: +SKIP
    """
    kind = type("LightningAttentionCallback", (_Hooks, _callback_class()), {})
    return kind(every, writers, layers)


class _Hooks:
    """The methods that Lightning's trainer calls."""

    def __init__(
        self, every: int = 100, writers: Sequence[Writer] | None = None, layers: Collection[int] | None = None
    ) -> None:
        super().__init__()
        if every < 1:
            raise InputError(f"every is {every}, expected at least 1 step")
        self.every, self.writers, self.layers = every, writers, layers
        self.tracker: Tracker | None = None
        self._batch = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        writers = self.writers
        if writers is None:
            writers = [CSVWriter(Path(trainer.log_dir or trainer.default_root_dir) / FILE)]
        self.tracker = Tracker(pl_module, self.every, writers if trainer.is_global_zero else (), self.layers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Called by the trainer."""
        assert self.tracker is not None
        self.tracker.begin(self._batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called by the trainer."""
        assert self.tracker is not None
        self.tracker.end(self._batch)
        self._batch += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        assert self.tracker is not None
        self.tracker.close()
