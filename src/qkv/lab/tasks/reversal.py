"""Reversal: say a sequence backwards, which a head can do by looking at the mirrored position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from qkv.errors import InputError
from qkv.lab import heads
from qkv.lab.settings import fitted
from qkv.lab.task import Batch, Measured, Training
from qkv.models.decoder import DecoderConfig, DecoderLM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN = 500
"""Held-out sequences that metrics are measured on."""
LOOKED_AT = 100
"""Those of them whose attention is looked at."""
MIRRORS = 0.95
"""A head whose strongest key is the mirrored position at this share of the queries mirrors."""


@dataclass(frozen=True)
class Reversal:
    """Random symbols, a separator, and the symbols again, last one first: a b c SEP c b a.

    The prediction of token i is made at the query before it, i − 1. So reversed symbol p of n is the prediction of
    query n + p, the separator being query n, and the symbol it has to say stands at key n − 1 − p: query + key is
    2n − 1, an anti-diagonal of the attention map.

    >>> Reversal(length=3, symbols=20).batch(step=0, size=5, seed=0)["ids"].shape
    torch.Size([5, 7])
    """

    name: ClassVar[str] = "reversal"

    length: int = 6
    """Symbols to reverse."""
    symbols: int = 14
    """How many kinds of symbols there are; they are tokens 2, 3 …, after padding (0) and the separator (1)."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4))
    """Of the `DecoderLM`; the task decides vocab_size and context."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InputError(f"length is {self.length}, expected at least 1")
        heads.check_enough(self.symbols**self.length, f"symbols is {self.symbols} and length {self.length}")

    @staticmethod
    def training() -> Training:
        """Settings that teach it."""
        return Training(steps=400, batch=64, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """The model, with initial weights."""
        needed = {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.length + 1}
        return DecoderLM(fitted(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, *, unseen: bool) -> Int[Tensor, "size n"]:
        """Whole sequences of 2 · length + 1 tokens."""
        drawn = heads.symbols(generator, size, self.length, self.symbols, unseen=unseen)
        return torch.cat([drawn, torch.full((size, 1), heads.SEPARATOR), drawn.flip(1)], 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Tokens as ``ids`` (size, 2 · length + 1); none of them is held out."""
        return {"ids": self.sequences(np.random.default_rng((seed, step)), size, unseen=False)}

    def count(self, batch: Batch) -> int:
        """Reversed symbols."""
        return len(batch["ids"]) * self.length

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats of the reversed symbols."""
        return heads.loss_after(model, batch["ids"], self.length + 1)

    def unseen(self) -> Int[Tensor, "sequences n"]:
        """The held-out sequences."""
        return self.sequences(np.random.default_rng(0), UNSEEN, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """Of held-out sequences: shares of symbols and of whole sequences that greedy generation gets right, and the
        loss (nats, teacher-forced).
        """
        ids = self.unseen()
        right = self._right(model, ids)
        device = next(model.parameters()).device
        return {
            "token_accuracy": right.mean().item(),
            "sequence_accuracy": right.prod(1).mean().item(),
            "loss": self.loss(model, {"ids": ids.to(device)}).item(),
        }

    def check(self, model: Any) -> Measured:
        """How every head looks at the mirrored position, and what the model can do without it.

        Returns:
            By layer and head: ``mirrored``, the share of queries whose strongest key is the mirrored position, and
            ``weight``, the mean weight on it. Of the head with the highest share (of equals, the most weight):
            ``best_layer``, ``best_head``, and its share as ``best``. Token accuracy ``without_best``, when that head
            adds nothing, and ``without_mirrors``, when none with a share of 95 % does.
        """
        ids = self.unseen()
        weights = heads.maps(model, ids[:LOOKED_AT, :-1])
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
        """``mirror``: the attention of the best head on a held-out sequence, and how often each head mirrors."""
        from qkv.lab import draw

        found, ids = self.check(model), self.unseen()[:1]
        layer, head = found["best_layer"], found["best_head"]
        weights = heads.maps(model, ids[:, :-1])[0, layer, head]
        shares = np.asarray(found["mirrored"])
        title = (
            f"To reverse {self.length} symbols, head {head} of layer {layer} looks at the mirrored position "
            f"({found['best']:.0%} of queries)"
        )
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {LOOKED_AT} held-out sequences. Token accuracy "
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
        """None: tokens are numbers."""
        return {}

    def mirror(self) -> heads.Pairs:
        """The queries that predict reversed symbols, and the key each should look at."""
        place = np.arange(self.length)
        return self.length + place, self.length - 1 - place

    def _right(self, model: Any, ids: Tensor) -> Tensor:
        """1.0 where generation says the right symbol: (sequences, length)."""
        said = heads.continued(model, ids[:, : self.length + 1], self.length)
        return (said == ids[:, self.length + 1 :]).double()
