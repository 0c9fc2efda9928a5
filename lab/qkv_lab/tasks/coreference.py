"""The task of coreference: at a pronoun the model names the noun that the sentence's adjective fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN, CHECKED = 500, 200
"""The numbers of held-out sentences for metrics and for the attention check."""
IT = 1
"""The pronoun; it takes the place of the separator of other tasks."""
ADJECTIVES = 4
"""The number of adjectives that fit animals, and of those that fit places."""
FILLERS = 16
"""The number of different words without a role."""
PICKS = 0.9
"""A head resolves the pronoun if it prefers the antecedent to the other noun in at least this share of sentences."""


@dataclass(frozen=True)
class Coreference:
    """An animal and a place in any order among fillers, then "it", a filler, and an adjective that fits one of them.

    At "it" the model names the antecedent: the animal if the adjective describes animals (*tired*), else the place
    (*wide*). The adjective comes after the pronoun, as in "… because it was too tired", so attention is bidirectional:
    the task sets the prefix of the model to the whole sentence. The link itself is never supervised.

    >>> Coreference(length=9).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 9])
    """

    name: ClassVar[str] = "coreference"

    length: int = 12
    """The number of words in a sentence."""
    nouns: int = 8
    """The number of different animals, and of different places."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=32, layers=2, heads=2, tied=False))
    """The configuration of the `DecoderLM`; the task sets vocab_size, context and prefix."""

    def __post_init__(self) -> None:
        if self.length < 5:
            raise InputError(f"length is {self.length}, expected at least 5 words: two nouns, it, a filler, adjective")
        if self.nouns < 2:
            raise InputError(f"nouns is {self.nouns}, expected at least 2 animals and as many places")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=500, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        vocabulary = heads.FIRST_SYMBOL + 2 * (self.nouns + ADJECTIVES) + FILLERS
        return DecoderLM(
            with_entries(self.model, vocab_size=vocabulary, context=self.length, prefix=self.length)
        )  # fmt: skip

    def sentences(self, generator: np.random.Generator, size: int, *, unseen: bool) -> Int[Tensor, "size length"]:
        """Random sentences, held out or not."""
        return heads.drawn(lambda n: self._draw(generator, n), size, unseen=unseen)

    def _draw(self, generator: np.random.Generator, size: int) -> Int[np.ndarray, "size length"]:
        first, row = heads.FIRST_SYMBOL, np.arange(size)
        adjective = first + 2 * self.nouns
        ids = generator.integers(adjective + 2 * ADJECTIVES, adjective + 2 * ADJECTIVES + FILLERS, (size, self.length))
        places = np.argsort(generator.random((size, self.length - 3)), 1)[:, :2]
        for kind in (0, 1):  # an animal, then a place, each at a random position before the pronoun
            ids[row, places[:, kind]] = first + kind * self.nouns + generator.integers(self.nouns, size=size)
        ids[:, -3] = IT
        fits = generator.integers(2, size=size)
        ids[:, -1] = adjective + fits * ADJECTIVES + generator.integers(ADJECTIVES, size=size)
        return ids

    def nouns_of(self, ids: Int[Tensor, "b length"]) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """The positions of the antecedent and of the other noun, by the adjective."""
        first = heads.FIRST_SYMBOL
        animal, place = (
            self._is_kind(ids, first + kind * self.nouns).int().argmax(1) for kind in (0, 1)
        )  # fmt: skip
        fits_place = ids[:, -1] >= first + 2 * self.nouns + ADJECTIVES
        return torch.where(fits_place, place, animal), torch.where(fits_place, animal, place)

    def _is_kind(self, ids: Int[Tensor, "b n"], start: int) -> Bool[Tensor, "b n"]:
        return (ids >= start) & (ids < start + self.nouns)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, length); no sentence is held out."""
        return {"ids": self.sentences(np.random.default_rng((seed, step)), size, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of sentences: each has one prediction."""
        return len(batch["ids"])

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the antecedent at the pronoun."""
        return nn.functional.cross_entropy(model(batch["ids"])[:, -3], self._answers(batch["ids"]))

    def _answers(self, ids: Int[Tensor, "b length"]) -> Int[Tensor, " b"]:
        """The noun to name in each sentence."""
        return ids.gather(1, self.nouns_of(ids)[0][:, None])[:, 0]

    def unseen(self) -> Int[Tensor, "sentences length"]:
        """The held-out sentences."""
        return self.sentences(np.random.default_rng(0), UNSEEN, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """Accuracy of the named noun, and the loss in nats, on held-out sentences."""
        ids = self.unseen().to(next(model.parameters()).device)
        return {"accuracy": self._accuracy(model, ids), "loss": self.loss(model, {"ids": ids}).item()}

    def check(self, model: Any) -> Measured:
        """The attention of every head from the pronoun to the two nouns of held-out sentences.

        Returns:
            By layer and head: ``antecedent`` and ``other``, the mean weights of "it" on the antecedent and on the other
            noun; ``picks``, the share of sentences in which the antecedent gets more than the other noun. For the head
            with the largest weight on the antecedent: ``best_layer``, ``best_head``, and its share ``best``;
            ``without_best``, the accuracy with that head ablated.
        """
        ids = self.unseen()
        from_it = heads.maps(model, ids[:CHECKED])[:, :, :, -3]  # (b, layer, head, key)
        to, away = (
            np.take_along_axis(from_it, at.numpy()[:CHECKED, None, None, None], -1)[..., 0] for at in self.nouns_of(ids)
        )
        layer, head = heads.best(to.mean(0))
        picks = (to > away).mean(0)
        cut = heads.without_heads(model, [(layer, head)])
        return {
            "antecedent": to.mean(0).tolist(),
            "other": away.mean(0).tolist(),
            "picks": picks.tolist(),
            "best_layer": layer,
            "best_head": head,
            "best": float(picks[layer, head]),
            "without_best": self._accuracy(cut, ids.to(next(model.parameters()).device)),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``pronoun``: the best head's map of a held-out sentence, and every head's weights on the two nouns."""
        from qkv_lab import draw

        found, ids = self.check(model), self.unseen()[:1]
        layer, head = found["best_layer"], found["best_head"]
        resolves = "prefers" if found["best"] >= PICKS else "does not reliably prefer"
        title = f'At "it" layer {layer}, head {head} {resolves} the antecedent ({found["best"]:.0%} of sentences)'
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, bidirectional; {CHECKED} held-out sentences. "
            f"Accuracy {self.evaluate(model)['accuracy']:.1%}; without this head {found['without_best']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        weights = heads.maps(model, ids)[0, layer, head]
        it = np.array([self.length - 3])
        names = [self.word(token) for token in ids[0].tolist()]
        heads.show_map(left, weights, ids[0], (it, self.nouns_of(ids)[0].numpy()), names=names)
        left.set_ylabel("query")
        left.set_title(f"layer {layer}, head {head}; square: it → antecedent", size=9)
        to, away = (np.ravel(found[kind]) for kind in ("antecedent", "other"))
        x = np.arange(len(to))
        right.bar(x - 0.2, to, 0.38, color=draw.COLOURS[0], label="antecedent")
        right.bar(x + 0.2, away, 0.38, color=draw.COLOURS[3], label="other noun")
        right.set_xticks(x, heads.head_names(np.asarray(found["antecedent"])))
        right.set(xlabel="layer and head, counted from 0", ylabel='mean weight from "it"', ylim=(0, 1.08))
        right.legend(frameon=False, fontsize=8)
        return {"pronoun": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def word(self, token: int) -> str:
        """The label of a token: its role, and a number within the role."""
        if token == IT:
            return "it"
        at = token - heads.FIRST_SYMBOL
        for role, size in (("animal", self.nouns), ("place", self.nouns), ("tired", ADJECTIVES), ("wide", ADJECTIVES)):
            if at < size:
                return f"{role} {at}"
            at -= size
        return f"word {at}"

    def _accuracy(self, model: Any, ids: Int[Tensor, "b length"]) -> float:
        return (model(ids)[:, -3].argmax(-1) == self._answers(ids)).double().mean().item()
