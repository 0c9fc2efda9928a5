"""What the tasks on random sequences of symbols share: data, model and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Training, with_entries


class Symbols:
    """A task on random sequences of symbols, for a `DecoderLM`; the correct attention is known.

    A subclass is a frozen dataclass. It says how a sequence is drawn (`draw`, and `completed` if more follows), which
    tokens are to be named (`answers`, from `logits`), and what `evaluate`, `check` and `figures` measure. A tenth of
    the sequences is held out, by a hash of what `draw` gives.
    """

    name: ClassVar[str]
    recipe: ClassVar[Training]
    """Training settings with which the model learns the task."""
    UNSEEN: ClassVar[int] = 500
    """The number of held-out sequences, of each length, for metrics."""
    CHECKED: ClassVar[int] = 100
    """The number of held-out sequences for the attention check."""

    model: DecoderConfig
    length: int
    symbols: int

    @classmethod
    def training(cls) -> Training:
        """Training settings with which the model learns the task."""
        return cls.recipe

    @property
    def lengths(self) -> tuple[int, int]:
        """The smallest and the largest trained length; each batch has one random length."""
        return self.length, self.length

    @property
    def needed(self) -> Mapping[str, int]:
        """The entries of the model's configuration that the task sets."""
        raise NotImplementedError

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        return DecoderLM(with_entries(self.model, **self.needed))

    def draw(self, generator: np.random.Generator, size: int, length: int) -> Int[np.ndarray, "size length"]:
        """Random tokens, held out or not: here independent symbols."""
        return generator.integers(heads.FIRST_SYMBOL, heads.FIRST_SYMBOL + self.symbols, (size, length))

    def completed(self, drawn: Int[Tensor, "b length"], generator: np.random.Generator) -> Int[Tensor, "b n"]:
        """Whole sequences from the drawn tokens."""
        return drawn

    def sequences(self, generator: np.random.Generator, size: int, length: int, *, unseen: bool) -> Int[Tensor, "b n"]:
        """Random sequences: only held-out ones if `unseen`, else only training ones."""
        return self.completed(heads.drawn(lambda n: self.draw(generator, n, length), size, unseen=unseen), generator)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, n), of one random length; no sequence is held out."""
        generator, (low, high) = np.random.default_rng((seed, step)), self.lengths
        length = low if low == high else int(generator.integers(low, high + 1))
        return {"ids": self.sequences(generator, size, length, unseen=False)}

    def unseen(self, length: int = 0) -> Int[Tensor, "sequences n"]:
        """The held-out sequences of a length; by default of the largest trained one."""
        return self.sequences(np.random.default_rng(length), self.UNSEEN, length or self.lengths[1], unseen=True)

    def answers(self, ids: Int[Tensor, "b n"]) -> Int[Tensor, "b *m"]:
        """What is to be predicted, as a number among the logits."""
        raise NotImplementedError

    def asked(self, batch: Batch) -> list[int]:
        """The positions of the answers among the tokens; none, as the answers are no next tokens."""
        return []

    def logits(self, model: Any, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b *m classes"]:
        """The logits of each answer."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """The number of answers."""
        return self.answers(batch["ids"]).numel()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the answers."""
        answers = self.answers(batch["ids"])
        return nn.functional.cross_entropy(self.logits(model, batch["ids"]).flatten(0, -2), answers.flatten())

    def right(self, model: Any, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b *m"]:
        """1.0 where the answer is correct, else 0.0, in float64."""
        return (self.logits(model, ids).argmax(-1) == self.answers(ids)).double()

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    @property
    def shape(self) -> str:
        """The number of layers and heads, for figures."""
        return f"{self.model.layers} layers × {self.model.heads} heads"


def on(model: Any, ids: Tensor) -> Tensor:
    """The tokens on the model's device."""
    return ids.to(next(model.parameters()).device)
