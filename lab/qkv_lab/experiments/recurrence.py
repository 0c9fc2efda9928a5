"""Experiments on attention against recurrent networks: recall of a block, recall over a distance, running parity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments.base import Results
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import LEAST, Small, fit, means_of, minus
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.recall import Recall

ACCURACY = "measured.accuracy"
RIGHT = 0.9
"""A model can do a task if this share of its predictions is right."""
FAR = 63
"""The distance over which symbols are recalled."""
BITS, SKIPPED = 24, 8
"""The bits of a sequence of the parity task, and the first ones, which are too easy to be evaluated."""


class RecurrentLM(nn.Module):
    """A language model with one recurrent layer, with the methods of a `DecoderLM` that tasks call."""

    def __init__(self, vocabulary: int, kind: str, width: int = 64) -> None:
        super().__init__()
        layer = nn.GRU if kind == "GRU" else nn.RNN
        self.embedding, self.output = nn.Embedding(vocabulary, width), nn.Linear(2 * width, vocabulary)
        self.layer = layer(width, 2 * width, batch_first=True)

    def forward(self, ids: Int[Tensor, "b n"]) -> Tensor:
        """Logits of the next token at each position, (b, n, vocabulary)."""
        out: Tensor = self.output(self.layer(self.embedding(ids))[0])
        return out

    def loss(self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"]) -> Tensor:
        """The mean cross-entropy in nats; targets of −100 are ignored."""
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def on_recall(task: Recall, model: nn.Module, seed: int, training: Training) -> dict[str, float]:
    """Train on batches of the task; the accuracy on its held-out sequences."""
    fit(model, lambda step: task.loss(model, task.batch(step, training.batch, seed)), training)
    with torch.no_grad():
        return {"accuracy": float(task.evaluate(model)["accuracy"]), "parameters": float(_count(model))}


def on_parity(model: nn.Module, seed: int, training: Training) -> dict[str, float]:
    """Train to say after each bit whether the number of ones so far is odd; the accuracy on new bits."""

    def bits(step: int, size: int) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(np.random.default_rng((seed, step)).integers(0, 2, (size, BITS)))
        return found, found.cumsum(1) % 2

    def loss(step: int) -> Tensor:
        ids, odd = bits(step, training.batch)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), odd.flatten())

    fit(model, loss, training)
    with torch.no_grad():
        ids, odd = bits(10**6, 500)
        right = (model(ids).argmax(-1) == odd)[:, SKIPPED:].double().mean().item()
    return {"accuracy": right, "parameters": float(_count(model))}


class Recurrence(Small):
    """Attention, a GRU and a tanh RNN, trained alike on three tasks."""

    name = "recurrence"
    question = "On which tasks is attention better than a recurrent network, and on which can it replace one?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Attention recalls over long distances that a recurrent network loses",
        FAILS: "Attention does not recall over long distances better than a recurrent network",
    }
    criteria = (
        Criterion("C146", DATED, f"Recall of symbols {FAR} tokens back: accuracy with attention, and that minus the "
                  "accuracy of a tanh RNN", RIGHT, parts=True),
        Criterion("C291", DATED, "Accuracy with attention minus that of a GRU after as many steps (300), on sequences "
                  "of at most 68 tokens", LEAST),
        Criterion("C373", DATED, "Accuracy with attention minus that of a GRU after as many steps (300)", -LEAST),
    )  # fmt: skip
    tasks: Mapping[str, str] = {
        "recall": "recall of 8 symbols",
        "far": f"recall over {FAR} tokens",
        "parity": f"running parity of {BITS} bits",
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """Every model on every task; the RNN only on the long distance, where it is compared."""
        training = Training(steps=3 if quick else 300, warmup=30, weight_decay=0.0)
        near, far = Recall(min_length=8, max_length=8), Recall(min_length=4, max_length=4, gap=FAR - 3)
        made: dict[str, tuple[Callable[..., dict[str, float]], Callable[[str], nn.Module]]] = {
            "recall": (lambda *a: on_recall(near, *a), lambda kind: _model(kind, 18, context=16)),
            "far": (lambda *a: on_recall(far, *a), lambda kind: _model(kind, 34, context=68, layers=1)),
            "parity": (on_parity, lambda kind: _model(kind, 2, context=BITS)),
        }
        found: dict[str, dict[str, float]] = {}
        for task, (learn, make) in made.items():
            for kind in ("attention", "GRU", *(["RNN"] if task == "far" else [])):
                torch.manual_seed(seed)
                found[f"{kind}, {task}"] = learn(make(kind), seed, training)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect for each task, of runs with equally many steps."""
        ahead = [minus(results, f"attention, {task}", f"GRU, {task}", ACCURACY, name)
                 for task, name in self.tasks.items()]  # fmt: skip
        rnn = results.differences("attention, far", "RNN, far", ACCURACY)
        return {
            "C146": [
                Effect("attention", results.values("attention, far", ACCURACY), ("attention, far",)),
                Effect("attention minus RNN", rnn, ("attention, far", "RNN, far"), bound=LEAST),
            ],
            "C291": ahead,
            "C373": ahead,
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The mean accuracies."""
        means = f"Mean accuracies: {means_of(results, list(results.variants), ACCURACY)}."
        return {"C291": means, "C373": means}


def _model(kind: str, vocabulary: int, **shape: Any) -> nn.Module:
    """Attention or a recurrent network of about as many parameters."""
    if kind != "attention":
        return RecurrentLM(vocabulary, kind)
    positions = "learned" if shape.get("layers") == 1 else "alibi"
    given = {"d_model": 64, "layers": 2, "heads": 4, "d_hidden": 128, "positions": positions, "tied": False, **shape}
    return DecoderLM(DecoderConfig(vocab_size=vocabulary, **given))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
