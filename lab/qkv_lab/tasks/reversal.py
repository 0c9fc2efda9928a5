"""The task of reversing a sequence, which a head can solve by attending to the mirrored position."""

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

UNSEEN = 500
"""The number of held-out sequences for metrics."""
CHECKED = 100
"""The number of held-out sequences for the attention check."""
MIRRORS = 0.95
"""A head counts as a mirror head if its strongest key is the mirrored position for at least this share of queries."""


@dataclass(frozen=True)
class Reversal:
    """Random symbols, a separator, and the symbols again, last one first: a b c SEP c b a.

    Each token is predicted at the position before it. Reversed symbol p of n is therefore the prediction of query n + p
    (the separator is query n), and the symbol to copy is key n − 1 − p. query + key is always 2n − 1: an anti-diagonal
    of the attention map.

    >>> Reversal(length=3, symbols=20).batch(step=0, size=5, seed=0)["ids"].shape
    torch.Size([5, 7])
    """

    name: ClassVar[str] = "reversal"

    length: int = 6
    """The number of symbols to reverse."""
    symbols: int = 14
    """The number of different symbols. They are tokens 2, 3, …, after padding (0) and the separator (1)."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4))
    """The configuration of the `DecoderLM`; the task sets vocab_size and context."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"length is {self.length}, expected at least 1")
        heads.check_enough(self.symbols ** min(self.length, 64), f"symbols is {self.symbols} and length {self.length}")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=400, batch=64, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        needed = {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.length + 1}
        return DecoderLM(with_entries(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, *, unseen: bool) -> Int[Tensor, "size n"]:
        """Random sequences of 2 · length + 1 tokens, held out or not."""
        drawn = heads.symbols(generator, size, self.length, self.symbols, unseen=unseen)
        return torch.cat([drawn, torch.full((size, 1), heads.SEPARATOR), drawn.flip(1)], 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, 2 · length + 1); no sequence is held out."""
        return {"ids": self.sequences(np.random.default_rng((seed, step)), size, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of reversed symbols."""
        return len(batch["ids"]) * self.length

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the reversed symbols."""
        return heads.loss_after(model, batch["ids"], self.length + 1)

    def unseen(self) -> Int[Tensor, "sequences n"]:
        """The held-out sequences."""
        return self.sequences(np.random.default_rng(0), UNSEEN, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """On held-out sequences: token and sequence accuracy of greedy generation; teacher-forced loss (nats)."""
        ids = self.unseen()
        right = self._right(model, ids)
        device = next(model.parameters()).device
        return {
            "token_accuracy": right.mean().item(),
            "sequence_accuracy": right.prod(1).mean().item(),
            "loss": self.loss(model, {"ids": ids.to(device)}).item(),
        }

    def check(self, model: Any) -> Measured:
        """The attention of every head to the mirrored position, and the accuracy without the mirror heads.

        Returns:
            By layer and head: ``mirrored``, the share of queries whose strongest key is the mirrored position, and
            ``weight``, the mean weight on it. For the head with the largest share (ties: the largest weight):
            ``best_layer``, ``best_head``, and its share ``best``. Token accuracies ``without_best``, with that head
            ablated, and ``without_mirrors``, with all heads ablated whose share is at least 95 %.
        """
        ids = self.unseen()
        weights = heads.maps(model, ids[:CHECKED, :-1])
        mirrored = heads.share_of_strongest(weights, self.mirror())
        weight = heads.mean_weight(weights, self.mirror())
        layer, head = heads.best(mirrored, weight)
        mirrors = [(int(at), int(which)) for at, which in np.argwhere(mirrored >= MIRRORS)]
        return {
            "mirrored": mirrored.tolist(),
            "weight": weight.tolist(),
            "best_layer": layer,
            "best_head": head,
            "best": float(mirrored[layer, head]),
            "without_best": self._right(heads.without_heads(model, [(layer, head)]), ids).mean().item(),
            "without_mirrors": self._right(heads.without_heads(model, mirrors), ids).mean().item(),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``mirror``: the attention map of the best head on a held-out sequence, and the share of every head."""
        from qkv_lab import draw

        found, ids = self.check(model), self.unseen()[:1]
        layer, head = found["best_layer"], found["best_head"]
        weights = heads.maps(model, ids[:, :-1])[0, layer, head]
        shares = np.asarray(found["mirrored"])
        title = (
            f"Reversing {self.length} symbols: layer {layer}, head {head} attends to the mirrored position "
            f"({found['best']:.0%} of queries)"
        )
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {CHECKED} held-out sequences. Token accuracy "
            f"{self.evaluate(model)['token_accuracy']:.1%}; without this head {found['without_best']:.1%}, "
            f"without all {int((shares >= MIRRORS).sum())} heads over the line {found['without_mirrors']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        heads.show_map(left, weights, ids[0, :-1], self.mirror())
        left.set_title(f"layer {layer}, head {head}; squares: mirrored positions", size=9)
        heads.bars(right, shares, MIRRORS)
        right.set_ylabel("share of queries")
        right.set_title("strongest key is the mirrored position", size=9)
        return {"mirror": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def mirror(self) -> heads.Pairs:
        """The queries that predict reversed symbols, and the key that each should attend to."""
        place = np.arange(self.length)
        return self.length + place, self.length - 1 - place

    def _right(self, model: Any, ids: Tensor) -> Tensor:
        """1.0 where the generated symbol is correct, else 0.0: (sequences, length)."""
        generated = heads.continued(model, ids[:, : self.length + 1], self.length)
        return (generated == ids[:, self.length + 1 :]).double()
