"""A task that trains within a test, with dropout and with micro-batches of unequal numbers of targets, and more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.results import Results
from qkv_lab.task import Batch, Measured, Training, with_entries


@dataclass(frozen=True)
class Counting:
    """Predict the next number, modulo `modulo`."""

    name: ClassVar[str] = "counting"
    modulo: int = 7
    length: int = 9
    poison: int | None = None
    """The first step with NaN; none if None."""
    poisoned: str = "loss"
    """What is NaN: ``"loss"``, or ``"gradient"`` with a finite loss."""
    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=16, layers=2, heads=2, context=32, dropout=0.1)
    )

    @staticmethod
    def training() -> Training:
        return Training(steps=12, batch=8, warmup=2, log_every=1, evaluate_every=6, save_every=4)

    def build(self) -> nn.Module:
        return DecoderLM(with_entries(self.model, vocab_size=self.modulo))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        first = torch.randint(self.modulo, (size, 1), generator=generator)
        ids = (first + torch.arange(self.length)) % self.modulo
        ignored = torch.arange(self.length - 1) >= torch.randint(2, self.length, (size, 1), generator=generator)
        return {"ids": ids[:, :-1], "targets": ids[:, 1:].masked_fill(ignored, -100), "step": torch.full((size,), step)}

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, DecoderLM)
        loss = model.loss(batch["ids"], batch["targets"])
        if self.poison is None or int(batch["step"][0]) < self.poison:
            return loss
        if self.poisoned == "loss":
            return loss * float("nan")
        return loss + (0 * model.embedding.weight.sum()).sqrt()  # 0, but its gradient is 0 / 0

    def evaluate(self, model: nn.Module) -> Measured:
        return {"loss": float(self.loss(model, {**self.batch(-1, 16, 99)}))}

    def check(self, model: nn.Module) -> Measured:
        return {"nothing": [[0.5, float("nan")]]}

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        return {"empty": Figure((1, 1))}

    def files(self) -> Mapping[str, str]:
        return {"note.txt": "seven"}


class Tiny(Experiment):
    """Two variants; ``same`` shares the first run of ``plain``."""

    name = "tiny"
    question = "Does it count?"
    claims = ("C900",)
    curves = ("loss", "evaluation.loss")
    seeds = 2
    task = Counting()

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        training = replace(Counting.training(), steps=2, evaluate_every=1, save_every=2, seed=seed)
        run = Setting(self.task, training)
        return {"plain": run, "same": run} if seed == 0 else {"plain": run}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        assert not torch.is_grad_enabled()
        assert not model.training
        return {"seven": 7.0000001}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {"computed": {"x": 0.5}}

    def conclude(self, results: Results) -> list[Verdict]:
        seen = results.values("plain", "measured.seven")
        holds = HOLDS if min(seen) > max(results.values("computed", "measured.x")) else FAILS
        return [Verdict("C900", holds, "seven is more")]

    def figure(self, results: Results) -> Figure:
        return Figure((1, 1))


THREE = {"clear": (1, 0.1), "later": (1, 0.8), "never": (0, 2.0)}
"""The mean and the spread of each variant of `Three`."""


class Three(Experiment):
    """Three variants without training: the claim on `never` stays undecided."""

    name = "three"
    question = "Which variants are decided?"
    criteria = tuple(Criterion(f"C90{i}", "2026-11-23", name, bound=0.0) for i, name in enumerate(THREE, 1))
    seeds = 16

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        return {variant: {"x": mean + spread * (-1) ** seed} for variant, (mean, spread) in THREE.items()}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        pairs = zip(self.claims, THREE, strict=True)
        return {claim: [Effect("", results.values(variant, "measured.x"))] for claim, variant in pairs}


def weights(folder: Any) -> dict[str, Tensor]:
    """The weights of a finished run."""
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def train_until(folder: Path, at: int) -> None:
    """Train on `Counting`; after the step `at`, print its number and wait for the file ``go on`` beside the folder."""
    from qkv_lab import loop

    step = loop._step

    def waiting(*args: Any) -> Any:
        found = step(*args)
        if args[-1] + 1 == at:
            print(at, flush=True)
            while not (folder.parent / "go on").exists():
                time.sleep(0.01)
        return found

    loop._step = waiting
    loop.train(Counting(), Counting.training(), folder, progress=False)
