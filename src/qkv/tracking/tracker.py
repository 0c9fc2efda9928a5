"""`Tracker` measures the attention of single steps of a training; `CSVLog` writes its numbers to a table.

`LightningAttentionCallback` is a `Tracker` in a run of Lightning.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv.errors import InputError, at_least_one, refusing
from qkv.profiler.capture.intercept import unwatched
from qkv.profiler.capture.residual import MASSIVE, TIMES_MEDIAN, attention_modules, observe_residual
from qkv.profiler.data.tables import SINK_THRESHOLD
from qkv.runs.profiles import Profile
from qkv.runs.watching import Watched, watch

if TYPE_CHECKING:
    import pandas as pd

Log = Callable[..., Any]
"""Called as ``log(numbers, step=step)`` with a dict of names and numbers, such as ``wandb.log`` or ``trackio.log``."""
FILE = "attention.csv"
DEAD, UNIFORM = 0.9, 0.9
NUMBERS = {
    "sink_rate": "share of heads with a sink score above 0.3 on the first token (Gu et al. 2025, arXiv:2410.10781)",
    "first_share": "mean share of the row on the first token, over heads and queries from the second on",
    "entropy_ratio": "mean of entropy / ln(visible keys); 1 is uniform",
    "dead_heads": "share of heads with more than 0.9 of the row on the first token or a null key, which move almost "
    "no information between tokens",
    "uniform_heads": "share of heads with an entropy of more than 0.9 of that of uniform attention",
    "largest_activation": "largest magnitude in the hidden states between layers",
    "massive_layers": "share of layers with an activation above 100 and above 1,000 times the median (Sun et al. 2024, "
    "arXiv:2402.17762, §2)",
}


class Tracker:
    """Measures the attention of some steps of a training and logs a few numbers about it.

    The model computes by its own functions, so losses, gradients and random numbers do not change; a step that is not
    measured is not touched at all. Of a measured step the first forward counts.

    Args:
        model: as in `qkv.watch`.
        every: measure each step whose number is a multiple of this.
        log: called as ``log(numbers, step=step)`` for each measured step, such as ``wandb.log``.
        layers: which attention layers to measure, counted from 0; all if None.

    Raises:
        InputError: if `every` is less than 1.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4))
    >>> tracker = Tracker(model, every=2)
    >>> for step in range(4):
    ...     tracker.begin(step)
    ...     model.loss(torch.randint(50, (2, 16))).backward()
    ...     _ = tracker.end(step)
    >>> [row["step"] for row in tracker.rows], 0 <= tracker.rows[0]["sink_rate"] <= 1
    ([0, 2], True)
    """

    def __init__(
        self, model: nn.Module, every: int = 100, log: Log | None = None, layers: Collection[int] | None = None
    ) -> None:
        at_least_one(every=every)
        self.model, self.every, self.log, self.layers = model, every, log, layers
        self.rows: list[dict[str, float]] = []
        """The numbers of each measured step, with its number as ``step``."""
        self.profile: Profile | None = None
        """The profile of the last measured step."""
        self._open: ExitStack | None = None
        self._watched: Watched | None = None
        self._largest: dict[tuple[str, int], tuple[float, float]] = {}

    def begin(self, step: int) -> None:
        """Call before the forward of a step."""
        self.close()
        if step % self.every:
            return
        self._largest = {}
        self._open = ExitStack()
        self._watched = self._open.enter_context(watch(self.model, every=2**62, layers=self.layers, map_tokens=0))
        modules = attention_modules(self.model)
        self._open.enter_context(observe_residual(self.model, modules, self._hidden))

    def end(self, step: int) -> dict[str, float] | None:
        """Call after the step; returns its numbers if it was measured."""
        watched = self._watched
        if watched is None:
            return None
        self.close()
        self.profile = watched.profile()
        row = {"step": step, **numbers(self.profile, self._largest)}
        self.rows.append(row)
        if self.log is not None:
            self.log({name: x for name, x in row.items() if name != "step"}, step=step)
        return row

    def close(self) -> None:
        """Stop measuring a step that did not end, such as one that raised an error; call after the training, too."""
        if self._open is not None:
            self._open.close()
        self._open = self._watched = None

    @torch.no_grad()
    def _hidden(self, stack: str, depth: int, hidden: Tensor) -> None:
        if (stack, depth) in self._largest:  # a further forward, or one that is computed again for the gradients
            return
        with unwatched():
            size = hidden.detach().abs().flatten().float()
            self._largest[stack, depth] = float(size.max()), float(size.median())


class CSVLog:
    """A log to a CSV file with one row for each step; rows before the first new step stay, as of a resumed training.

    Args:
        file: its path; the folder is created.

    Raises:
        InputError: at the first step, if the file is another table.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     CSVLog(f"{folder}/attention.csv")({"sink_rate": 0.5}, step=100)
    ...     print(Path(folder, "attention.csv").read_text().split())
    ['step,sink_rate', '100,0.5']
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        self._rows: list[dict[str, Any]] | None = None

    def __call__(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Write the numbers of a step."""
        import pandas as pd

        if self._rows is None:
            self._rows = self._read(step) if self.file.exists() else []
        self._rows.append({"step": step, **numbers})
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, pd.DataFrame(self._rows).to_csv(index=False, lineterminator="\n"))

    def _read(self, before: int) -> list[dict[str, Any]]:
        import pandas as pd

        wrong = f"file {self.file} is not a table with a column step; expected a new file, or one of qkv"
        with refusing(wrong, ValueError, KeyError, TypeError):
            table = pd.read_csv(self.file)
            return table[table["step"] < before].to_dict("records")


class Callback:
    """What the callbacks of trainers share: a `Tracker` from the start of the training to its end."""

    def __init__(self, every: int = 100, log: Log | None = None, layers: Collection[int] | None = None) -> None:
        super().__init__()
        at_least_one(every=every)
        self.every, self.log, self.layers = every, log, layers
        self.tracker: Tracker | None = None

    @property
    def rows(self) -> list[dict[str, float]]:
        """The numbers of each measured step; see `qkv.tracking.tracker.NUMBERS`."""
        return [] if self.tracker is None else self.tracker.rows

    def _start(self, model: nn.Module, folder: str, *, main: bool) -> None:
        """Begin to follow a model; only the main process of several logs, by default to a table in the folder."""
        log = (self.log or CSVLog(Path(folder) / FILE)) if main else None
        self.tracker = Tracker(model, self.every, log, self.layers)

    @property
    def _started(self) -> Tracker:
        assert self.tracker is not None
        return self.tracker

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Called by the trainer."""
        self._started.close()


class _Hooks(Callback):
    """The methods that the trainer of Lightning calls."""

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


def numbers(profile: Profile, largest: Mapping[tuple[str, int], tuple[float, float]]) -> dict[str, float]:
    """The numbers of `NUMBERS`, from the profile of a step and the largest and median activation of each depth."""
    tables = [profile.sinks(group=group) for group in profile.groups if group.partition("-")[0] != "cross"]
    heads = [profile.heads(group=group) for group in profile.groups if group.partition("-")[0] != "cross"]

    def column(frames: Sequence[pd.DataFrame], name: str) -> np.ndarray:
        return np.concatenate([f[name].to_numpy(float) for f in frames if name in f])

    first, ratio = column(tables, "share_first"), column(heads, "entropy_ratio")
    null = np.concatenate([f.get("learned_sink", 0 * f["share_first"]).to_numpy(float) for f in tables])
    found = {
        "sink_rate": float((column(tables, "alpha_first") > SINK_THRESHOLD).mean()),
        "first_share": float(np.nanmean(first)),
        "entropy_ratio": float(np.nanmean(ratio)),
        "dead_heads": float((first + np.nan_to_num(null) > DEAD).mean()),
        "uniform_heads": float((ratio > UNIFORM).mean()),
    }
    if largest:
        massive = [x > MASSIVE and x >= TIMES_MEDIAN * median for (_, depth), (x, median) in largest.items() if depth]
        found["largest_activation"] = max(x for x, _ in largest.values())
        found["massive_layers"] = float(np.mean(massive)) if massive else 0.0
    return found
