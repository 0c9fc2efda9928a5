"""Recall: a block of random symbols comes twice, and the second time each is known from the first: induction."""

from __future__ import annotations

import math
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

UNSEEN = 100
"""Held-out sequences of each length that metrics are measured on."""
KINDS = {"previous": "previous\ntoken", "duplicate": "same token,\nearlier", "induction": "token\nafter that"}
"""What heads may look at, as figures say it."""


@dataclass(frozen=True)
class Recall:
    """A block of n different symbols, and the same block again: d a c b d a c b.

    In the second block each symbol but the first can be known: find where the last token stood before, and say what
    came after it. Olsson et al. 2022 (arXiv:2209.11895) found that a Transformer does so with two heads: one of an
    early layer looks at the previous token (1 back) and notes it down with each token; one of a later layer finds the
    token that has the present one noted down (n − 1 back), the induction head. A duplicate-token head looks at where
    the present token stood before (n back). Each batch has an n of its own, so that positions alone do not tell.

    >>> Recall(min_length=5, max_length=5).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 10])
    """

    name: ClassVar[str] = "recall"

    min_length: int = 4
    """Fewest symbols of a block; each batch has a length of its own."""
    max_length: int = 12
    """Most symbols of a block."""
    symbols: int = 16
    """How many kinds of symbols there are; they are tokens 2, 3 …: 0 and 1 stay unused, as in the other tasks."""
    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, positions="alibi", tied=False)
    )
    """Of the `DecoderLM`; the task decides vocab_size and context."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_length <= self.max_length <= self.symbols:
            raise InputError(
                f"min_length is {self.min_length}, max_length {self.max_length}, symbols {self.symbols}, "
                "expected 2 ≤ min_length ≤ max_length ≤ symbols: those of a block differ"
            )
        blocks = math.perm(self.symbols, self.min_length)
        heads.check_enough(blocks, f"symbols is {self.symbols} and min_length {self.min_length}")

    @staticmethod
    def training() -> Training:
        """Settings that teach it."""
        return Training(steps=1000, batch=48, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """The model, with initial weights."""
        needed = {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.max_length}
        return DecoderLM(fitted(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, length: int, *, unseen: bool) -> Int[Tensor, "b n"]:
        """Whole sequences of 2 · length tokens."""
        block = heads.drawn(
            lambda n: heads.FIRST_SYMBOL + generator.random((n, self.symbols)).argsort(1)[:, :length],
            size,
            unseen=unseen,
        )
        return torch.cat([block, block], 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Tokens as ``ids`` (size, 2n), with n drawn from min_length … max_length; none of the blocks is held out."""
        generator = np.random.default_rng((seed, step))
        length = int(generator.integers(self.min_length, self.max_length + 1))
        return {"ids": self.sequences(generator, size, length, unseen=False)}

    def count(self, batch: Batch) -> int:
        """Symbols of the second block but the first, which nothing announces."""
        return len(batch["ids"]) * (batch["ids"].shape[1] // 2 - 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats of the symbols of the second block but the first."""
        return heads.loss_after(model, batch["ids"], batch["ids"].shape[1] // 2 + 1)

    def unseen(self, length: int) -> Int[Tensor, "sequences n"]:
        """The held-out sequences with blocks of a length."""
        return self.sequences(np.random.default_rng(length), UNSEEN, length, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """Of held-out sequences, each symbol of the second block but the first predicted from the true ones before it.

        Returns:
            ``accuracy`` and ``loss`` (nats) over blocks of all lengths; ``accuracy_by_length`` for each of ``lengths``.
        """
        device = next(model.parameters()).device
        lengths = list(range(self.min_length, self.max_length + 1))
        accuracy, loss = [], []
        for length in lengths:
            ids = self.unseen(length).to(device)
            said = model(ids[:, :-1])[:, length:].argmax(-1)
            accuracy.append((said == ids[:, length + 1 :]).double().mean().item())
            loss.append(self.loss(model, {"ids": ids}).item())
        return {
            "accuracy": float(np.mean(accuracy)),
            "loss": float(np.mean(loss)),
            "lengths": lengths,
            "accuracy_by_length": accuracy,
        }

    def check(self, model: Any) -> Measured:
        """What every head looks at, in held-out sequences with blocks of max_length.

        Returns:
            By layer and head, the mean weights on the token that stands a number of tokens back: ``previous``, 1, of
            all queries but the first; ``duplicate``, n, and ``induction``, n − 1, of those that predict symbols of the
            second block. The ``induction_layer`` and ``induction_head`` with the highest induction score, which is
            ``best``.
        """
        weights = heads.maps(model, self.unseen(self.max_length)[:, :-1])
        scores = {kind: heads.mean_weight(weights, pairs) for kind, pairs in self.pairs(self.max_length).items()}
        layer, head = heads.best(scores["induction"])
        return {
            **{kind: score.tolist() for kind, score in scores.items()},
            "induction_layer": layer,
            "induction_head": head,
            "best": float(scores["induction"][layer, head]),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``induction``: what every head looks at, and the attention of the best induction head."""
        from qkv.lab import draw

        measured, found = self.evaluate(model), self.check(model)
        ids = self.unseen(self.max_length)[:1, :-1]
        layer, head = found["induction_layer"], found["induction_head"]
        scores = np.stack([np.ravel(found[kind]) for kind in KINDS], 1)
        title = (
            f"Layer {layer}, head {head} does most induction: {found['best']:.0%} of its weight is on what came "
            "next last time"
        )
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {self.model.positions} positions; {UNSEEN} "
            f"held-out blocks of {self.max_length} symbols, repeated. {measured['accuracy']:.1%} of what can be known "
            "is right."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.7)
        names = heads.head_names(np.asarray(found["previous"]))
        draw.heatmap(left, scores, rows=names, columns=[""] * len(KINDS), most=1)
        left.set_aspect("auto")
        left.set_xticks(range(len(KINDS)), list(KINDS.values()), rotation=0)
        for (row, column), score in np.ndenumerate(scores):
            left.text(column, row, f"{score:.2f}", ha="center", va="center", color="white" if score > 0.5 else draw.INK)
        left.set_ylabel("layer and head, counted from 0")
        left.set_title("mean attention weight on …", size=9)
        heads.show_map(right, heads.maps(model, ids)[0, layer, head], ids[0], self.pairs(self.max_length)["induction"])
        right.set_title(f"layer {layer}, head {head}; squares: token after the earlier one", size=9)
        return {"induction": figure}

    def files(self) -> Mapping[str, str]:
        """None: tokens are numbers."""
        return {}

    def pairs(self, length: int) -> dict[str, heads.Pairs]:
        """Queries and the key each looks at, for heads of every kind."""
        every, second = np.arange(1, 2 * length - 1), np.arange(length, 2 * length - 1)
        return {
            "previous": (every, every - 1),
            "duplicate": (second, second - length),
            "induction": (second, second - length + 1),
        }
