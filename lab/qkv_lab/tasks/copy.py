"""The task of copying a sequence, with tests beyond the trained lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN = 100
"""The number of held-out sequences of each length for metrics."""


@dataclass(frozen=True)
class Copy:
    """Random symbols, a separator, and the symbols again: a b c SEP a b c.

    Each token is predicted at the position before it. Copied symbol p of n is therefore the prediction of query n + p
    (the separator is query n), and the symbol to copy is key p, n tokens back. n differs between batches.

    >>> Copy(min_length=4, max_length=4, symbols=20).batch(step=0, size=5, seed=0)["ids"].shape
    torch.Size([5, 9])
    """

    name: ClassVar[str] = "copy"

    min_length: int = 4
    """The smallest number of symbols to copy; each batch has one random length."""
    max_length: int = 10
    """The largest number of symbols in training."""
    longest: int = 16
    """The largest number of symbols in tests."""
    symbols: int = 14
    """The number of different symbols. They are tokens 2, 3, …, after padding (0) and the separator (1)."""
    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, positions="alibi", tied=False)
    )
    """The configuration of the `DecoderLM`; the task sets vocab_size and context."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length <= self.longest:
            raise InputError(
                f"min_length is {self.min_length}, max_length {self.max_length}, longest {self.longest}, "
                "expected 1 ≤ min_length ≤ max_length ≤ longest"
            )
        heads.check_enough(
            self.symbols ** min(self.min_length, 64), f"symbols is {self.symbols} and min_length {self.min_length}"
        )

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=1800, batch=48, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        needed = {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.longest + 1}
        return DecoderLM(with_entries(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, length: int, *, unseen: bool) -> Int[Tensor, "b n"]:
        """Random sequences of 2 · length + 1 tokens, held out or not."""
        drawn = heads.symbols(generator, size, length, self.symbols, unseen=unseen)
        return torch.cat([drawn, torch.full((size, 1), heads.SEPARATOR), drawn], 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, 2n + 1), with random n from min_length to max_length; no sequence is held out."""
        generator = np.random.default_rng((seed, step))
        length = int(generator.integers(self.min_length, self.max_length + 1))
        return {"ids": self.sequences(generator, size, length, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of copied symbols."""
        return len(batch["ids"]) * _length(batch["ids"])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the copied symbols."""
        return heads.loss_after(model, batch["ids"], _length(batch["ids"]) + 1)

    def unseen(self, length: int) -> Int[Tensor, "sequences n"]:
        """The held-out sequences of a length."""
        return self.sequences(np.random.default_rng(length), UNSEEN, length, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """The accuracy of greedy copies of held-out sequences.

        Returns:
            ``token_accuracy`` and ``sequence_accuracy``, over the trained lengths; ``token_accuracy_by_length``
            and ``sequence_accuracy_by_length`` for each of ``lengths``, min_length … longest.
        """
        lengths = list(range(self.min_length, self.longest + 1))
        tokens, whole = [], []
        for length in lengths:
            ids = self.unseen(length)
            right = (heads.continued(model, ids[:, : length + 1], length) == ids[:, length + 1 :]).double()
            tokens.append(right.mean().item())
            whole.append(right.prod(1).mean().item())
        trained = self.max_length - self.min_length + 1
        return {
            "token_accuracy": float(np.mean(tokens[:trained])),
            "sequence_accuracy": float(np.mean(whole[:trained])),
            "lengths": lengths,
            "token_accuracy_by_length": tokens,
            "sequence_accuracy_by_length": whole,
        }

    def check(self, model: Any) -> Measured:
        """The attention of every head to the symbol to copy, in held-out sequences of max_length.

        Returns:
            By layer and head: ``copied``, the share of queries whose strongest key is the symbol to copy, and
            ``weight``, the mean weight on it. For the head with the largest share (ties: the largest weight):
            ``best_layer``, ``best_head``, and its share ``best``.
        """
        weights = heads.maps(model, self.unseen(self.max_length)[:, :-1])
        pairs = self.sources(self.max_length)
        copied, weight = heads.share_of_strongest(weights, pairs), heads.mean_weight(weights, pairs)
        layer, head = heads.best(copied, weight)
        return {
            "copied": copied.tolist(),
            "weight": weight.tolist(),
            "best_layer": layer,
            "best_head": head,
            "best": float(copied[layer, head]),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``copy``: the attention map of the best head on a held-out sequence, and accuracy by length."""
        from qkv_lab import draw

        measured, found, ids = self.evaluate(model), self.check(model), self.unseen(self.max_length)[:1, :-1]
        layer, head = found["best_layer"], found["best_head"]
        title = f"Copying: layer {layer}, head {head} attends to the symbol to copy in {found['best']:.0%} of queries"
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {self.model.positions} positions; {UNSEEN} "
            f"held-out sequences of each length, greedy generation. Token accuracy: "
            f"{measured['token_accuracy']:.1%} at trained lengths, "
            f"{measured['token_accuracy_by_length'][-1]:.1%} at length {self.longest}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.6)
        heads.show_map(left, heads.maps(model, ids)[0, layer, head], ids[0], self.sources(self.max_length))
        left.set_title(f"layer {layer}, head {head}; squares: the symbol to copy", size=9)
        shown = {
            "symbols": measured["token_accuracy_by_length"],
            "whole sequences": measured["sequence_accuracy_by_length"],
        }
        right.axvspan(self.min_length - 0.5, self.max_length + 0.5, color=draw.HAIRLINE, alpha=0.5, linewidth=0)
        draw.curves(right, measured["lengths"], shown, markers=True)
        right.set_ylim(-0.03, 1.05)
        right.set_xlabel("symbols to copy (shaded: trained)")
        right.set_ylabel("accuracy")
        right.legend(frameon=False, fontsize=8, loc="lower left")
        return {"copy": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def sources(self, length: int) -> heads.Pairs:
        """The queries that predict copied symbols, and the key that each should attend to."""
        return length + np.arange(length), np.arange(length)


def _length(ids: Tensor) -> int:
    return (ids.shape[1] - 1) // 2
