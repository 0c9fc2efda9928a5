"""The task of two look-ups at once: at each position, the symbols a fixed number of positions back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn, stack

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNSEEN, CHECKED = 200, 100
"""The numbers of held-out sequences for metrics and for the attention check."""


@dataclass(frozen=True)
class Lookups:
    """Random symbols; at each position the model names the symbols `first` and `second` positions before.

    Each look-up has tokens of its own for its answers, so one position makes two independent predictions. The correct
    attention is known: one head attends `first` tokens back and another `second` tokens back. A single head has to mix
    the two. With `second` equal to `first` there is one look-up.

    >>> Lookups(length=9).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 9])
    """

    name: ClassVar[str] = "lookups"

    first: int = 1
    """How many positions back the first symbol is."""
    second: int = 4
    """How many positions back the second symbol is."""
    length: int = 12
    """The number of symbols in training."""
    longest: int = 24
    """The number of symbols in the longest tests."""
    symbols: int = 16
    """The number of different symbols: tokens 2, 3, …. The answers are the tokens after these, for each look-up."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=32, layers=1, heads=2, tied=False))
    """The configuration of the `DecoderLM`; the task sets vocab_size and context."""

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.second < self.length <= self.longest:
            raise InputError(
                f"first is {self.first}, second {self.second}, length {self.length}, longest {self.longest}, "
                "expected 1 ≤ first ≤ second < length ≤ longest"
            )
        heads.check_enough(self.symbols ** min(self.length, 64), f"symbols is {self.symbols} and length {self.length}")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=400, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        needed = {"vocab_size": heads.FIRST_SYMBOL + 2 * self.symbols, "context": self.longest}
        return DecoderLM(with_entries(self.model, **needed))

    def sequences(self, generator: np.random.Generator, size: int, length: int, *, unseen: bool) -> Int[Tensor, "b n"]:
        """Random sequences of symbols, held out or not."""
        return heads.symbols(generator, size, length, self.symbols, unseen=unseen)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, length); no sequence is held out."""
        return {"ids": self.sequences(np.random.default_rng((seed, step)), size, self.length, unseen=False)}

    def count(self, batch: Batch) -> int:
        """The number of predictions: two at each position that has a symbol `second` positions before."""
        return 2 * len(batch["ids"]) * (batch["ids"].shape[1] - self.second)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of both answers."""
        logits, answers = self._predicted(model, batch["ids"])
        return nn.functional.cross_entropy(logits.flatten(0, 2), answers.flatten())

    def _predicted(
        self, model: Any, ids: Int[Tensor, "b n"]
    ) -> tuple[Float[Tensor, "b m 2 symbols"], Int[Tensor, "b m 2"]]:
        """Logits of both answers and the correct symbols, from position `second` on."""
        logits = model(ids)[:, self.second :, heads.FIRST_SYMBOL :].unflatten(-1, (2, self.symbols))
        answers = [ids[:, self.second - back : ids.shape[1] - back] for back in (self.first, self.second)]
        return logits, stack(answers, -1) - heads.FIRST_SYMBOL

    def unseen(self, length: int | None = None) -> Int[Tensor, "sequences n"]:
        """The held-out sequences of a length, by default that of training."""
        n = length or self.length
        return self.sequences(np.random.default_rng(n), UNSEEN, n, unseen=True)

    def evaluate(self, model: Any) -> Measured:
        """On held-out sequences of the trained length, and beyond it.

        Returns:
            ``accuracy``, the share of positions with both answers correct; ``first_accuracy`` and ``second_accuracy``
            of each answer; ``loss`` in nats; and if `longest` is more than `length`, ``longer_accuracy``: as
            ``accuracy``, at the positions beyond the trained length in sequences of `longest` symbols.
        """
        device = next(model.parameters()).device
        ids = self.unseen().to(device)
        right = self._right(model, ids).double()
        found = {
            "accuracy": right.prod(-1).mean().item(),
            "first_accuracy": right[..., 0].mean().item(),
            "second_accuracy": right[..., 1].mean().item(),
            "loss": self.loss(model, {"ids": ids}).item(),
        }
        if self.longest > self.length:
            beyond = self._right(model, self.unseen(self.longest).to(device))[:, self.length - self.second :]
            found["longer_accuracy"] = beyond.all(-1).double().mean().item()
        return found

    def check(self, model: Any) -> Measured:
        """The attention of every head to the two symbols, in held-out sequences of the trained length.

        Returns:
            By layer and head: ``first`` and ``second``, the mean weights on the symbols to look up. For each of these
            the head with the largest weight, as [layer, head]: ``first_head`` and ``second_head``, and its weight
            ``best_first`` and ``best_second``; ``heads``, 2 if these are different heads, else 1.
        """
        weights = heads.maps(model, self.unseen()[:CHECKED])
        scores = {kind: heads.mean_weight(weights, self.pairs(back)) for kind, back in self._offsets().items()}
        at = {kind: heads.best(score) for kind, score in scores.items()}
        return {
            **{kind: score.tolist() for kind, score in scores.items()},
            **{f"{kind}_head": list(place) for kind, place in at.items()},
            **{f"best_{kind}": float(scores[kind][place]) for kind, place in at.items()},
            "heads": len(set(at.values())),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``lookups``: for each look-up, the map of the head with the largest weight on it."""
        from qkv_lab import draw

        measured, found, ids = self.evaluate(model), self.check(model), self.unseen()[:1]
        share = "One head does both look-ups" if found["heads"] == 1 else "Each look-up has a head of its own"
        longer = f", {measured['longer_accuracy']:.1%} beyond" if "longer_accuracy" in measured else ""
        note = (
            f"{self.model.layers} layers × {self.model.heads} heads, {self.model.positions} positions; held-out "
            f"sequences. Both answers correct at {measured['accuracy']:.1%} of positions within the trained length of "
            f"{self.length}{longer}."
        )
        figure, panels = draw.panels(share, note, columns=2, width=8.2, height=3.6)
        weights = heads.maps(model, ids)[0]
        for axes, (kind, back) in zip(panels, self._offsets().items(), strict=True):
            layer, head = found[f"{kind}_head"]
            heads.show_map(axes, weights[layer, head], ids[0], self.pairs(back))
            axes.set_ylabel("query: position that answers")
            axes.set_title(f"layer {layer}, head {head}: {found[f'best_{kind}']:.0%} of its weight {back} back", size=9)
        return {"lookups": figure}

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def pairs(self, back: int) -> heads.Pairs:
        """The queries that answer, and the key `back` positions before each."""
        queries = np.arange(self.second, self.length)
        return queries, queries - back

    def _offsets(self) -> dict[str, int]:
        return {"first": self.first, "second": self.second}

    def _right(self, model: Any, ids: Int[Tensor, "b n"]) -> Bool[Tensor, "b m 2"]:
        """Whether each answer is correct."""
        logits, answers = self._predicted(model, ids)
        return logits.argmax(-1) == answers
