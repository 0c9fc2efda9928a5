"""The training loop of all tasks, with exact resumption."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qkv._files import write_atomically
from qkv._progress import Bar, bar
from qkv._untrusted import SizeError, free_memory
from qkv.errors import InputError, refusing
from qkv.models import checkpoint
from qkv.models.loading import SAMPLE
from qkv_lab import resume, settings
from qkv_lab.log import METRICS, finite, heads_figure, loss_figure, read, scalars
from qkv_lab.task import Batch, Task, Training

if TYPE_CHECKING:
    from qkv.tracking.tracker import Log

__all__ = ["Diverged", "Interrupted", "Trained", "train"]

LEAST_PER_TOKEN = 256
"""Bytes that a token of a batch takes at least, as ids and in the layers of the smallest model."""
MOST_TENSORS = 2000  # of a model
RESULT, MODEL, FIGURES = "result.json", "model", "figures"


@dataclass(frozen=True)
class Trained:
    """The model, the folder and the metrics of a finished run."""

    model: nn.Module
    """In evaluation mode."""
    folder: Path
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""

    @property
    def evaluation(self) -> dict[str, Any]:
        """Metrics on held-out data, at the end."""
        return dict(self.metrics[-1]["evaluation"])

    @property
    def check(self) -> dict[str, Any]:
        """The attention check at the end."""
        return dict(self.metrics[-1]["check"])


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; the message says how to resume it."""


class Diverged(InputError):  # noqa: N818  # a name without "Error", as StopIteration
    """The loss, or its gradient, became NaN or infinite."""


def train(
    task: Task,
    training: Training,
    folder: str | Path,
    *,
    progress: bool = True,
    figures: bool = True,
    log: Log | None = None,
) -> Trained:
    """Train the model of a task, or resume a run in the same folder.

    A run that was interrupted or killed ends with exactly the same weights as an uninterrupted one. It runs on a GPU if
    there is one.

    Args:
        task: the task, see `qkv_lab.tasks`.
        training: the training settings.
        folder: the run's folder. It gets run.toml (all settings), metrics.jsonl and checkpoints, and at the end model/
            (for `qkv.models.load`), figures/ and result.json.
        progress: show a progress bar if standard error is a terminal.
        figures: draw the task's figures at the end.
        log: called as ``log(numbers, step=step)`` for each line of metrics.jsonl, such as ``wandb.log``.

    Returns:
        The trained model and its metrics. A finished run is loaded, not trained again.

    Raises:
        InputError: if the folder cannot be written or holds a run with other settings; for a damaged checkpoint.
        Diverged: if the loss or its gradient becomes NaN or infinite; earlier checkpoints stay.
        Interrupted: on SIGINT or SIGTERM, after a checkpoint was saved.

    >>> import tempfile
    >>> from qkv_lab.tasks import Reversal
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trained = train(Reversal(), Training(steps=2, batch=4), folder, progress=False)
    ...     sorted(p.name for p in (trained.folder / "model").iterdir())
    ['config.json', 'model.safetensors', 'sample.json']
    """
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise InputError(f"WORLD_SIZE is {world}, expected a single process: models of the lab are small")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(folder)
    if training.batch % training.accumulate:
        raise InputError(f"batch is {training.batch}, expected a multiple of accumulate={training.accumulate}")
    _check_size(task)
    _check_batch(task, training)
    torch.manual_seed(training.seed)
    model = task.build().to(device)  # before the folder is made, which is then that of a model that can be built
    _claim_folder(folder, task, training)
    if (folder / RESULT).exists():
        finished = checkpoint.load(folder / MODEL).to(device)
        return Trained(finished, folder, read(folder / METRICS))

    optimizer = _optimizer(model, training)
    found = resume.checkpoints(folder)
    done = resume.load(found[-1], model, optimizer) if found else 0
    with ExitStack() as stack:
        requests = stack.enter_context(_stop_requests())
        shown = stack.enter_context(bar(task.name, "steps", training.steps, done=done, show=progress))
        writer = stack.enter_context(closing(_Writer(folder, task, training, done, shown, log)))
        if done == 0:
            writer.evaluation(model, 0)
        for step in range(done, training.steps):
            batch = task.batch(step, training.batch, training.seed)
            loss, norm = _step(model, optimizer, task, training, batch, step)
            now = step + 1
            _check_finite(loss, norm, now, training, folder)
            stop = bool(requests) and now < training.steps
            writer.step(now, loss, norm, task.count(batch))
            if now % training.evaluate_every == 0 or now == training.steps:
                writer.evaluation(model, now)
            if now % training.save_every == 0 or now == training.steps or stop:
                resume.save(folder, now, model, optimizer)
            if stop:
                raise Interrupted(
                    f"stopped at step {now} after saving a checkpoint; run the same command again to resume"
                )
    _finish(folder, task, model, figures)
    return Trained(model.eval(), folder, read(folder / METRICS))


def _check_size(task: Task) -> None:
    """Raise `InputError` for a model that does not fit in memory, before it is built: settings may be a stranger's."""
    try:
        checkpoint.build_without_memory(task.build, MOST_TENSORS, free_memory())
    except SizeError as error:
        raise InputError(f"model of the task {task.name!r} is too large: {error}") from error
    except Exception:  # a task of the user's own may need real tensors to build its model; then it is just built
        return


def _check_batch(task: Task, training: Training) -> None:
    """Raise `InputError` for a batch that does not fit in memory, before it is made."""
    tokens = task.count(task.batch(0, 1, training.seed)) * training.batch // training.accumulate
    if tokens * LEAST_PER_TOKEN > free_memory():
        raise InputError(
            f"batch is {training.batch}, whose {tokens:,} tokens do not fit in memory; expected a smaller one, or "
            "more parts with accumulate"
        )


def _check_finite(loss: float, norm: float, step: int, training: Training, folder: Path) -> None:
    """Raise `Diverged` if the loss or the gradient's norm is not finite: the weights are NaN and must not be saved."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    good = resume.checkpoints(folder)
    kept = f"{good[-1].name} is the last checkpoint before it" if good else "there is no checkpoint before it"
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
    raise Diverged(f"lr is {training.lr}, expected a lower one: {what} at step {step}; {kept}")


class _Writer:
    """Writes metrics to files and to the progress bar, and measures predictions per second between evaluations."""

    def __init__(self, folder: Path, task: Task, training: Training, done: int, progress: Bar, log: Log | None) -> None:
        self._task, self._training, self._log = task, training, log
        self._bar, self._shown_step = progress, done
        path = folder / METRICS
        with refusing(f"folder: cannot write {path} ({{}})", OSError):
            if path.exists():  # lines after the step are written again
                lines = [line for line in read(path) if line["step"] <= done] if done else []
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
            self._file = path.open("a", encoding="utf-8")
        self._restart_clock()

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line and flush it, so that it survives a crash of this process."""
        with refusing(f"folder: cannot write {self._file.name} ({{}})", OSError):
            self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
            self._file.flush()
        if self._log is not None:
            self._log(dict(scalars(line)), step=line["step"])

    def _restart_clock(self) -> None:
        self._predictions, self._began = 0, time.perf_counter()

    def step(self, step: int, loss: float, norm: float, predictions: int) -> None:
        self._predictions += predictions
        if step % self._training.log_every and step < self._training.steps:
            return
        rate = self._predictions / (time.perf_counter() - self._began)
        line = {"step": step, "loss": loss, "lr": self._training.lr_at(step - 1)}
        self._write({**line, "gradient_norm": norm, "tokens_per_second": rate})
        self._bar(step - self._shown_step, note=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        self._shown_step = step
        self._restart_clock()

    @torch.no_grad()
    def evaluation(self, model: nn.Module, step: int) -> None:
        training = model.training
        model.eval()
        try:
            found = self._task.evaluate(model)
            line = {"step": step, "evaluation": found, "check": self._task.check(model)}
        finally:
            model.train(training)
        self._write(line)
        scores = "  ".join(f"{name} {value:.4g}" for name, value in scalars(found)[:4])
        self._bar.say(f"step {step:>6}  {scores}")
        self._restart_clock()


def _optimizer(module: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); vectors are not decayed."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=(training.beta1, training.beta2), fused=True)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, training: Training, batch: Batch, step: int
) -> tuple[float, float]:
    """One optimizer step; returns the loss over the whole batch and the norm of its gradient.

    Each micro-batch's loss is weighted by its share of the predictions, so that the gradient does not depend on the
    number of micro-batches. Dropout depends on the seed and the step alone.
    """
    device = next(model.parameters()).device
    for group in optimizer.param_groups:
        group["lr"] = training.lr_at(step)
    generator: Any = torch.default_generator if device.type == "cpu" else torch  # a millisecond
    generator.manual_seed(((training.seed * 1_000_003 + step) * 4099) % 2**63)
    model.train()
    total, summed = task.count(batch), torch.zeros((), device=device)
    for i in range(training.accumulate):
        part = {name: x.tensor_split(training.accumulate)[i] for name, x in batch.items()}
        share = task.count(part) / total
        on_device = {name: x.to(device) for name, x in part.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bfloat16"):
            loss = task.loss(model, on_device) * share
        loss.backward()
        summed += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return float(summed), float(norm)


def _claim_folder(folder: Path, task: Task, training: Training) -> None:
    """Write run.toml; `InputError` if the folder holds a run with other settings."""
    with refusing(f"folder: cannot write to {folder} ({{}})", OSError):
        text = settings.to_toml(task, training)
        file = folder / settings.RUN
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
            return
        found = {"format_version": 1, **settings.read_toml(file, "folder")}
        if differs := settings.difference(found, tomllib.loads(text)):
            raise InputError(
                f"folder: the run in {folder} has other settings ({'; '.join(differs)}), expected another folder"
            )


@torch.no_grad()
def _finish(folder: Path, task: Task, model: nn.Module, figures: bool) -> None:
    """Save the model and its figures, and last result.json, which marks the run as finished."""
    from qkv_lab.draw import save_figure

    model.eval()
    unfinished = folder / f".{MODEL}.part"
    with refusing(f"folder: cannot write to {folder} ({{}}); the checkpoints are complete", OSError):
        shutil.rmtree(unfinished, ignore_errors=True)
        checkpoint.save(model, unfinished)
        for name, text in {SAMPLE: sample(task, model), **task.files()}.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        unfinished.replace(folder / MODEL)
        metrics = read(folder / METRICS)
        if figures:
            (folder / FIGURES).mkdir(exist_ok=True)
            drawn = {"loss": loss_figure(task.name, metrics), "heads": heads_figure(task.name, metrics)}
            for name, figure in {**drawn, **task.figures(model)}.items():
                if figure is not None:
                    save_figure(figure, folder / FIGURES / f"{name}.png")
        parameters = sum(p.numel() for p in model.parameters())
        result = {"task": task.name, **metrics[-1], "parameters": parameters}
        write_atomically(folder / RESULT, json.dumps(finite(result), indent=1) + "\n")


def sample(task: Task, model: nn.Module) -> str:
    """The first training sequence as the inputs of the model, in JSON: commands run on it if they get no text.

    If the task asks for some of its tokens only, ``asked`` has their positions; none if its answers are no next tokens.
    """
    inputs = inspect.signature(model.forward).parameters
    batch = {name: x for name, x in task.batch(0, 1, 0).items() if name in inputs}
    short = {name: x.double().round(decimals=3) if x.is_floating_point() else x for name, x in batch.items()}
    entries = {name: x.tolist() for name, x in short.items()}
    if (asked := getattr(task, "asked", None)) is not None:
        entries["asked"] = asked(task.batch(0, 1, 0))
    return json.dumps(entries) + "\n"


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Defer the first SIGINT or SIGTERM to the end of the step, in a list; a second one interrupts at once."""
    requests: list[int] = []

    def handle(number: int, frame: Any) -> None:
        requests.append(number)
        if len(requests) > 1:
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {s: signal.signal(s, handle) for s in signals}
    except ValueError:  # signals reach the main thread only
        before = {}
    try:
        yield requests
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
