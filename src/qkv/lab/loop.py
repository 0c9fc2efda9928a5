"""The training loop: one for every task, on one process or many."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qkv._files import write_whole
from qkv._progress import Bar, bar
from qkv.errors import InputError
from qkv.lab import log, resume, settings
from qkv.lab.task import Batch, Task, Training
from qkv.models import checkpoint

__all__ = [
    "Diverged",
    "Interrupted",
    "Trained",
    "train",
]

METRICS, RESULT, MODEL, FIGURES = "metrics.jsonl", "result.json", "model", "figures"


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    model: nn.Module
    """In evaluation mode."""
    folder: Path
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""

    @property
    def evaluation(self) -> dict[str, Any]:
        """Metrics on held-out data, at the end."""
        return dict(self.metrics[-1]["evaluation"])

    @property
    def check(self) -> dict[str, Any]:
        """Attention against the truth, at the end."""
        return dict(self.metrics[-1]["check"])


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop; its message says how to go on."""


class Diverged(InputError):  # noqa: N818  # as StopIteration: what happened
    """The loss, or its gradient, became NaN or infinite."""


def train(
    task: Task,
    training: Training,
    folder: str | Path,
    *,
    progress: bool = True,
    tensorboard: bool = False,
    figures: bool = True,
) -> Trained:
    """Train the model of a task, or go on where a run in the same folder stopped.

    A run that was interrupted, even killed, ends with the very weights of one that was not. Under ``torchrun`` or
    ``accelerate launch`` each process takes its share of every batch, and weights agree with those of one process to
    rounding.

    Args:
        task: what to learn: see `qkv.lab.tasks`.
        training: how.
        folder: gets run.toml (all settings), metrics.jsonl, checkpoints, and at the end model/ (`qkv.models.load`
            reads it), figures/ and result.json.
        progress: show a bar on standard error if it is a terminal.
        tensorboard: write scalars to ``tensorboard/`` in the folder, too.
        figures: draw them at the end.

    Returns:
        `Trained`; of a run that had finished before, what it came to.

    Raises:
        InputError: if the folder cannot be written to or holds a run with other settings; for a damaged checkpoint.
        Diverged: when the loss or its gradient is no longer a number; checkpoints before that stay.
        Interrupted: after the checkpoint that an interrupt (SIGINT, SIGTERM) asked for.

    >>> import tempfile
    >>> from qkv.lab.tasks import Reversal
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trained = train(Reversal(), Training(steps=2, batch=4), folder, progress=False)
    ...     sorted(p.name for p in (trained.folder / "model").iterdir())
    ['config.json', 'model.safetensors']
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # or it would not see the processes of torchrun
    folder = Path(folder)
    parts = accelerator.num_processes * training.accumulate
    if training.batch % parts:
        raise InputError(
            f"batch is {training.batch}, expected a multiple of {parts}: {accelerator.num_processes} processes × "
            f"accumulate={training.accumulate}"
        )
    if accelerator.is_main_process:
        _open(folder, task, training)
    accelerator.wait_for_everyone()
    if (folder / RESULT).exists():
        finished = checkpoint.load(folder / MODEL).to(accelerator.device)
        return Trained(finished, folder, log.read(folder / METRICS))

    torch.manual_seed(training.seed)
    objective, optimizer = _prepared(accelerator, task, training)
    model: nn.Module = accelerator.unwrap_model(objective).model
    found = resume.checkpoints(folder)
    done = resume.load(found[-1], model, optimizer.optimizer) if found else 0
    main = accelerator.is_main_process
    with ExitStack() as stack:
        stopped = stack.enter_context(_stop_requests())
        shown = stack.enter_context(bar(task.name, "steps", training.steps, done=done, show=progress and main))
        writer = stack.enter_context(_Writer(folder, task, training, done, shown, tensorboard)) if main else None
        if writer is not None and done == 0:
            writer.evaluation(model, 0)
        for step in range(done, training.steps):
            batch = task.batch(step, training.batch, training.seed)
            loss, norm = _step(accelerator, objective, optimizer, task, training, batch, step)
            now = step + 1
            _check_finite(loss, norm, now, training, folder)
            stop = stopped.asked(accelerator) and now < training.steps
            if writer is not None:
                writer.step(now, loss, norm, task.count(batch))
                if now % training.evaluate_every == 0 or now == training.steps:
                    writer.evaluation(model, now)
                if now % training.save_every == 0 or now == training.steps or stop:
                    resume.save(folder, now, model, optimizer.optimizer)
            if stop:
                raise Interrupted(f"stopped at step {now}, which is kept; the same command goes on from there")
    if main:
        _finish(folder, task, model, accelerator.num_processes, figures)
    accelerator.wait_for_everyone()
    return Trained(model.eval(), folder, log.read(folder / METRICS))


class _Objective(nn.Module):
    """The loss as a module's forward: what distributed training synchronises the gradients of."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.build()
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        return self._task.loss(self.model, batch)


def _prepared(accelerator: Any, task: Task, training: Training) -> tuple[nn.Module, Any]:
    """The objective and its optimizer, on this process's device."""
    objective = _Objective(task)
    prepared: tuple[nn.Module, Any] = accelerator.prepare(objective, _optimizer(objective, training))
    return prepared


def _check_finite(loss: float, norm: float, step: int, training: Training, folder: Path) -> None:
    """A gradient that is no number has spoilt the weights, whatever the loss was: no checkpoint may hold them."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    good = resume.checkpoints(folder)
    kept = f"{good[-1].name} is the last checkpoint before it" if good else "there is no checkpoint before it"
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {norm}"
    raise Diverged(f"{what} at step {step}; {kept}; expected a lower lr than {training.lr}")


class _Writer:
    """Metrics to the file and to the terminal, with predictions a second between evaluations."""

    def __init__(self, folder: Path, task: Task, training: Training, done: int, shown: Bar, tensorboard: bool) -> None:
        self._task, self._training = task, training
        self._log = log.Log(
            folder / METRICS, resume_at=done, tensorboard=folder / "tensorboard" if tensorboard else None
        )
        self._bar, self._shown = shown, done
        self._restart()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._log.close()

    def _restart(self) -> None:
        self._predictions, self._began = 0, time.perf_counter()

    def step(self, step: int, loss: float, norm: float, predictions: int) -> None:
        self._predictions += predictions
        if step % self._training.log_every and step < self._training.steps:
            return
        rate = self._predictions / (time.perf_counter() - self._began)
        line = {"step": step, "loss": loss, "lr": self._training.lr_at(step - 1)}
        self._log.write({**line, "gradient_norm": norm, "tokens_per_second": rate})
        self._bar(step - self._shown, note=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        self._shown = step
        self._restart()

    @torch.no_grad()
    def evaluation(self, model: nn.Module, step: int) -> None:
        training = model.training
        model.eval()
        try:
            found = self._task.evaluate(model)
            line = {"step": step, "evaluation": found, "check": self._task.check(model)}
        finally:
            model.train(training)
        self._log.write(line)
        scores = "  ".join(f"{name} {value:.4g}" for name, value in log.scalars(found)[:4])
        self._bar.say(f"step {step:>6}  {scores}")
        self._restart()


def _optimizer(module: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); vectors do not decay."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=(training.beta1, training.beta2), fused=True)


def _step(
    accelerator: Any, objective: nn.Module, optimizer: Any, task: Task, training: Training, batch: Batch, step: int
) -> tuple[float, float]:
    """One optimizer step: the loss over the whole batch, and the norm of its gradient.

    Each part's loss is weighed by its share of the predictions, so that any number of processes and parts has the same
    gradient. What a step draws (dropout) depends on the seed, the step and the process alone.
    """
    processes, rank = accelerator.num_processes, accelerator.process_index
    for group in optimizer.param_groups:
        group["lr"] = training.lr_at(step)
    torch.manual_seed(((training.seed * 1_000_003 + step) * 4099 + rank) % 2**63)
    objective.train()
    whole, mine = task.count(batch), torch.zeros((), device=accelerator.device)
    parts = [_part(batch, rank + processes * i, processes * training.accumulate) for i in range(training.accumulate)]
    narrow = training.precision == "bfloat16"
    for at, part in enumerate(parts):
        share = task.count(part) / whole
        here = {name: x.to(accelerator.device) for name, x in part.items()}
        waits = at < len(parts) - 1
        with accelerator.no_sync(objective) if waits else nullcontext():
            with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=narrow):
                loss = objective(here) * share
            accelerator.backward(loss * processes)  # distributed training takes the mean over processes
        mine += loss.detach()
    norm = accelerator.clip_grad_norm_(objective.parameters(), training.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(mine)), float(norm)


def _part(batch: Batch, which: int, of: int) -> Batch:
    return {name: x.tensor_split(of)[which] for name, x in batch.items()}


def _open(folder: Path, task: Task, training: Training) -> None:
    """A folder that is this run's; `InputError` if it is another's."""
    try:
        text = settings.to_toml(task, training)
        file = folder / settings.RUN
        if file.exists():
            there, asked = settings.read(file), settings.parsed(text)
            differs = settings.difference(there, asked)
            if differs:
                raise InputError(
                    f"{folder} holds a run with other settings ({'; '.join(differs)}), expected another folder"
                )
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror})") from error


@torch.no_grad()
def _finish(folder: Path, task: Task, model: nn.Module, processes: int, figures: bool) -> None:
    """The model, its figures, and last the result, which says that all is there."""
    from qkv.lab.draw import save_figure
    from qkv.lab.history import loss_figure

    model.eval()
    unfinished = folder / f".{MODEL}.part"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        checkpoint.save(model, unfinished)
        for name, text in task.files().items():
            (unfinished / name).write_text(text, encoding="utf-8")
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        unfinished.replace(folder / MODEL)
        metrics = log.read(folder / METRICS)
        if figures:
            (folder / FIGURES).mkdir(exist_ok=True)
            for name, figure in {"loss": loss_figure(task.name, metrics), **task.figures(model)}.items():
                save_figure(figure, folder / FIGURES / f"{name}.png")
        parameters = sum(p.numel() for p in model.parameters())
        result = {"task": task.name, **metrics[-1], "parameters": parameters, "processes": processes}
        write_whole(folder / RESULT, json.dumps(log.finite(result), indent=1) + "\n")
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror}); the checkpoints are there") from error


class _Requests:
    """Whether this process, or any of them, was asked to stop."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def asked(self, accelerator: Any) -> bool:
        if accelerator.num_processes == 1:
            return self.count > 0
        flag = torch.tensor(float(self.count > 0), device=accelerator.device)
        return bool(accelerator.reduce(flag) > 0)


@contextmanager
def _stop_requests() -> Iterator[_Requests]:
    """Interrupts wait for the end of a step, where everything is whole; a second one does not."""
    requests = _Requests()
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {s: signal.signal(s, requests.note) for s in signals}
    except ValueError:  # not the main thread: nobody can interrupt it
        before = {}
    try:
        yield requests
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
