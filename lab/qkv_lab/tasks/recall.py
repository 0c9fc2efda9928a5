"""The task of recall: a block of random symbols is repeated, so that induction heads can predict the second copy."""

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
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN = 100
"""The number of held-out sequences of each length for metrics."""
KINDS = {"previous": "previous\ntoken", "duplicate": "same token,\nearlier", "induction": "token\nafter that"}
"""The kinds of heads, and the tokens that they attend to, as labels of figures."""


@dataclass(frozen=True)
class Recall:
    """A block of n different symbols, repeated once: d a c b d a c b, after `gap` tokens of noise between the two.

    In the second block every symbol but the first is predictable: find the earlier occurrence of the current token, and
    predict the token after it. Olsson et al. 2022 (arXiv:2209.11895) found that Transformers do this with two heads. A
    previous-token head in an early layer attends 1 token back and copies that token's identity into each position. An
    induction head in a later layer attends to the position that follows the earlier occurrence (n − 1 tokens back). A
    duplicate-token head attends to the earlier occurrence itself (n back). n differs between batches, so that positions
    alone are not enough. With a gap, all these distances are longer by it: recall over long distances.

    >>> Recall(min_length=5, max_length=5).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 10])
    """

    name: ClassVar[str] = "recall"

    min_length: int = 4
    """The smallest number of symbols in a block; each batch has one random length."""
    max_length: int = 12
    """The largest number of symbols in a block."""
    symbols: int = 16
    """The number of different symbols. They are tokens 2, 3, …; 0 and 1 are unused, as in the other tasks."""
    gap: int = 0
    """The number of noise tokens between the two blocks. They are random tokens of as many other kinds."""
    model: DecoderConfig = field(
        default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, positions="alibi", tied=False)
    )
    """The configuration of the `DecoderLM`; the task sets vocab_size and context."""

    def __post_init__(self) -> None:
        if not 2 <= self.min_length <= self.max_length <= self.symbols:
            raise InputError(
                f"min_length is {self.min_length}, max_length {self.max_length}, symbols {self.symbols}, "
                "expected 2 ≤ min_length ≤ max_length ≤ symbols, because the symbols of a block differ"
            )
        if self.gap < 0:
            raise InputError(f"gap is {self.gap}, expected 0 or more tokens between the blocks")
        blocks = math.perm(min(self.symbols, 1000), min(self.min_length, 64))
        heads.check_enough(blocks, f"symbols is {self.symbols} and min_length {self.min_length}")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=1000, batch=48, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        kinds = self.symbols * (2 if self.gap else 1)
        needed = {"vocab_size": heads.FIRST_SYMBOL + kinds, "context": 2 * self.max_length + self.gap}
        return DecoderLM(with_entries(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, length: int, *, unseen: bool) -> Int[Tensor, "b n"]:
        """Random sequences of 2 · length + gap tokens, held out or not."""
        block = heads.drawn(
            lambda n: heads.FIRST_SYMBOL + generator.random((n, self.symbols)).argsort(1)[:, :length],
            size,
            unseen=unseen,
        )
        noise = (
            generator.integers(self.symbols, 2 * self.symbols, (size, self.gap)) if self.gap else np.empty((size, 0))
        )
        return torch.cat([block, heads.FIRST_SYMBOL + torch.from_numpy(noise.astype(np.int64)), block], 1)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, 2n + gap), with random n from min_length to max_length; no block is held out."""
        generator = np.random.default_rng((seed, step))
        length = int(generator.integers(self.min_length, self.max_length + 1))
        return {"ids": self.sequences(generator, size, length, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of symbols in the second blocks, without the first symbol, which is not predictable."""
        return len(batch["ids"]) * (self._block(batch["ids"]) - 1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats over the second block without its first symbol."""
        return heads.loss_after(model, batch["ids"], self._block(batch["ids"]) + self.gap + 1)

    def unseen(self, length: int) -> Int[Tensor, "sequences n"]:
        """The held-out sequences with blocks of a length."""
        return self.sequences(np.random.default_rng(length), UNSEEN, length, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """Teacher-forced predictions of the second block (without its first symbol) of held-out sequences.

        Returns:
            ``accuracy`` and ``loss`` (nats), averaged over all lengths; ``accuracy_by_length`` for each of ``lengths``.
        """
        device = next(model.parameters()).device
        lengths = list(range(self.min_length, self.max_length + 1))
        accuracy, loss = [], []
        for length in lengths:
            ids = self.unseen(length).to(device)
            second = length + self.gap  # where the second block begins
            predicted = model(ids[:, :-1])[:, second:].argmax(-1)
            accuracy.append((predicted == ids[:, second + 1 :]).double().mean().item())
            loss.append(self.loss(model, {"ids": ids}).item())
        return {
            "accuracy": float(np.mean(accuracy)),
            "loss": float(np.mean(loss)),
            "lengths": lengths,
            "accuracy_by_length": accuracy,
        }

    def check(self, model: Any) -> Measured:
        """The attention of every head in held-out sequences with blocks of max_length.

        Returns:
            By layer and head, mean weights on the token a fixed number of tokens back: ``previous`` (1 back), over all
            queries but the first; ``duplicate`` (n + gap back) and ``induction`` (n + gap − 1 back), over the queries
            that predict the second block. ``induction_layer`` and ``induction_head`` have the largest induction score,
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
        """``induction``: the scores of every head, and the attention map of the best induction head."""
        from qkv_lab import draw

        measured, found = self.evaluate(model), self.check(model)
        ids = self.unseen(self.max_length)[:1, :-1]
        layer, head = found["induction_layer"], found["induction_head"]
        scores = np.stack([np.ravel(found[kind]) for kind in KINDS], 1)
        title = (
            f"Induction head: layer {layer}, head {head} puts {found['best']:.0%} of its weight on the token after the "
            "earlier occurrence"
        )
        after = f" after {self.gap} tokens of noise" if self.gap else ""
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {self.model.positions} positions; {UNSEEN} "
            f"held-out blocks of {self.max_length} symbols, repeated{after}. Accuracy on predictable "
            f"tokens: {measured['accuracy']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.7)
        names = heads.head_names(np.asarray(found["previous"]))
        draw.heatmap(left, scores, rows=names, columns=[""] * len(KINDS), vmax=1)
        left.set_aspect("auto")
        left.set_xticks(range(len(KINDS)), list(KINDS.values()), rotation=0)
        for (row, column), score in np.ndenumerate(scores):
            left.text(column, row, f"{score:.2f}", ha="center", va="center", color="white" if score > 0.5 else draw.INK)
        left.set_ylabel("layer and head, counted from 0")
        left.set_title("mean attention weight on …", size=9)
        heads.show_map(right, heads.maps(model, ids)[0, layer, head], ids[0], self.pairs(self.max_length)["induction"])
        right.set_title(f"layer {layer}, head {head}; squares: token after the earlier occurrence", size=9)
        return {"induction": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def pairs(self, length: int) -> dict[str, heads.Pairs]:
        """For each kind of head, the queries and the key that each attends to."""
        apart = length + self.gap
        every, second = np.arange(1, apart + length - 1), np.arange(apart, apart + length - 1)
        return {
            "previous": (every, every - 1),
            "duplicate": (second, second - apart),
            "induction": (second, second - apart + 1),
        }

    def _block(self, ids: Int[Tensor, "b n"]) -> int:
        """The number of symbols in each block of these sequences."""
        return (ids.shape[1] - self.gap) // 2
