"""The tasks of reversing, copying and repeating random symbols: the model predicts the end of each sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig
from qkv_lab import heads
from qkv_lab.task import Batch, Measured, Training
from qkv_lab.tasks.symbols import Symbols, on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIRRORS = 0.95
"""A head counts as a mirror head if its strongest key is the mirrored position for at least this share of queries."""
KINDS = {"previous": "previous\ntoken", "duplicate": "same token,\nearlier", "induction": "token\nafter that"}
"""The kinds of heads, and the tokens that they attend to, as labels of figures."""


class Ending(Symbols):
    """Sequences whose second half, without its first token, follows from the first; each token is predicted before it.

    The correct heads are those that `pairs` names: a query and the key that it should attend to.
    """

    gap: int = 0
    """The number of tokens between the halves."""

    def start(self, ids: Int[Tensor, "b n"]) -> int:
        """The position of the first token that is predicted."""
        return (ids.shape[1] + self.gap) // 2 + 1

    def answers(self, ids: Int[Tensor, "b n"]) -> Int[Tensor, "b m"]:
        """The predictable tokens."""
        return ids[:, self.start(ids) :]

    def asked(self, batch: Batch) -> list[int]:
        """The positions of the predictable tokens."""
        return list(range(self.start(batch["ids"]), batch["ids"].shape[1]))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats of the predictable tokens."""
        return heads.loss_after(model, batch["ids"], self.start(batch["ids"]))

    def right(self, model: Any, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b m"]:
        """1.0 where greedy generation gives the correct token, else 0.0."""
        start = self.start(ids)
        return (heads.continued(model, ids[:, :start], ids.shape[1] - start) == ids[:, start:]).double()


@dataclass(frozen=True)
class Reversal(Ending):
    """Random symbols, a separator, and the symbols again, last one first: a b c SEP c b a.

    Each token is predicted at the position before it. Reversed symbol p of n is therefore the prediction of query n + p
    (the separator is query n), and the symbol to copy is key n − 1 − p. query + key is always 2n − 1: an anti-diagonal
    of the attention map.

    >>> Reversal(length=3, symbols=20).batch(step=0, size=5, seed=0)["ids"].shape
    torch.Size([5, 7])
    """

    name: ClassVar[str] = "reversal"
    recipe: ClassVar[Training] = Training(steps=400, batch=64, lr=3e-3, warmup=50)

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

    @property
    def needed(self) -> Mapping[str, int]:
        return {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.length + 1}

    def completed(self, drawn: Int[Tensor, "b length"], generator: np.random.Generator) -> Int[Tensor, "b n"]:
        """The symbols, a separator, and the symbols from the last to the first."""
        return torch.cat([drawn, torch.full((len(drawn), 1), heads.SEPARATOR), drawn.flip(1)], 1)

    def evaluate(self, model: Any) -> Measured:
        """On held-out sequences: token and sequence accuracy of greedy generation; teacher-forced loss (nats)."""
        ids = self.unseen()
        right = self.right(model, ids)
        return {
            "token_accuracy": right.mean().item(),
            "sequence_accuracy": right.prod(1).mean().item(),
            "loss": self.loss(model, {"ids": on(model, ids)}).item(),
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
        found = heads.marked("mirrored", heads.maps(model, ids[: self.CHECKED, :-1]), self.mirror())
        cuts: dict[str, list[Any]] = {
            "without_best": [(found["best_layer"], found["best_head"])],
            "without_mirrors": np.argwhere(np.asarray(found["mirrored"]) >= MIRRORS).tolist(),
        }
        for name, cut in cuts.items():
            found[name] = self.right(heads.without_heads(model, cut), ids).mean().item()
        return found

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``mirror``: the attention map of the best head on a held-out sequence, and the share of every head."""
        from qkv_lab import draw

        found, ids = self.check(model), self.unseen()[:1]
        layer, head = found["best_layer"], found["best_head"]
        shares = np.asarray(found["mirrored"])
        title = (
            f"Reversing {self.length} symbols: layer {layer}, head {head} attends to the mirrored position "
            f"({found['best']:.0%} of queries)"
        )
        note = (
            f"{self.shape}, {self.CHECKED} held-out sequences. Token accuracy "
            f"{self.evaluate(model)['token_accuracy']:.1%}; without this head {found['without_best']:.1%}, "
            f"without all {int((shares >= MIRRORS).sum())} heads over the line {found['without_mirrors']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        heads.show_map(left, heads.maps(model, ids[:, :-1])[0, layer, head], ids[0, :-1], self.mirror())
        left.set_title(f"layer {layer}, head {head}; squares: mirrored positions", size=9)
        heads.bars(right, shares, MIRRORS)
        right.set_ylabel("share of queries")
        right.set_title("strongest key is the mirrored position", size=9)
        return {"mirror": figure}

    def mirror(self) -> heads.Pairs:
        """The queries that predict reversed symbols, and the key that each should attend to."""
        place = np.arange(self.length)
        return self.length + place, self.length - 1 - place


@dataclass(frozen=True)
class Copy(Ending):
    """Random symbols, a separator, and the symbols again: a b c SEP a b c.

    Each token is predicted at the position before it. Copied symbol p of n is therefore the prediction of query n + p
    (the separator is query n), and the symbol to copy is key p, n tokens back. n differs between batches.

    >>> Copy(min_length=4, max_length=4, symbols=20).batch(step=0, size=5, seed=0)["ids"].shape
    torch.Size([5, 9])
    """

    name: ClassVar[str] = "copy"
    recipe: ClassVar[Training] = Training(steps=1800, batch=48, lr=3e-3, warmup=50)
    UNSEEN: ClassVar[int] = 100

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

    @property
    def lengths(self) -> tuple[int, int]:
        return self.min_length, self.max_length

    @property
    def needed(self) -> Mapping[str, int]:
        return {"vocab_size": heads.FIRST_SYMBOL + self.symbols, "context": 2 * self.longest + 1}

    def completed(self, drawn: Int[Tensor, "b length"], generator: np.random.Generator) -> Int[Tensor, "b n"]:
        """The symbols, a separator, and the symbols again."""
        return torch.cat([drawn, torch.full((len(drawn), 1), heads.SEPARATOR), drawn], 1)

    def evaluate(self, model: Any) -> Measured:
        """The accuracy of greedy copies of held-out sequences, and the loss where each next token is predicted.

        Returns:
            ``token_accuracy`` and ``sequence_accuracy``, over the trained lengths; ``token_accuracy_by_length``
            and ``sequence_accuracy_by_length`` for each of ``lengths``, min_length … longest; ``loss`` (nats), with
            teacher forcing, at max_length. Without a causal mask the loss is small, and no copy can be written.
        """
        lengths = list(range(self.min_length, self.longest + 1))
        right = [self.right(model, self.unseen(length)) for length in lengths]
        tokens, whole = [x.mean().item() for x in right], [x.prod(1).mean().item() for x in right]
        trained = self.max_length - self.min_length + 1
        return {
            "token_accuracy": float(np.mean(tokens[:trained])),
            "sequence_accuracy": float(np.mean(whole[:trained])),
            "loss": self.loss(model, {"ids": on(model, self.unseen(self.max_length))}).item(),
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
        return heads.marked("copied", weights, self.sources(self.max_length))

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``copy``: the attention map of the best head on a held-out sequence, and accuracy by length."""
        from qkv_lab import draw

        measured, found, ids = self.evaluate(model), self.check(model), self.unseen(self.max_length)[:1, :-1]
        layer, head = found["best_layer"], found["best_head"]
        shown = {
            "symbols": measured["token_accuracy_by_length"],
            "whole sequences": measured["sequence_accuracy_by_length"],
        }
        title = f"Copying: layer {layer}, head {head} attends to the symbol to copy in {found['best']:.0%} of queries"
        note = (
            f"{self.shape}, {self.model.positions} positions; {self.UNSEEN} held-out sequences of each length, greedy "
            f"generation. Token accuracy: {measured['token_accuracy']:.1%} at trained lengths, "
            f"{shown['symbols'][-1]:.1%} at length {self.longest}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.6)
        heads.show_map(left, heads.maps(model, ids)[0, layer, head], ids[0], self.sources(self.max_length))
        left.set_title(f"layer {layer}, head {head}; squares: the symbol to copy", size=9)
        right.axvspan(self.min_length - 0.5, self.max_length + 0.5, color=draw.HAIRLINE, alpha=0.5, linewidth=0)
        draw.curves(right, measured["lengths"], shown, markers=True)
        right.set_ylim(-0.03, 1.05)
        right.set_xlabel("symbols to copy (shaded: trained)")
        right.set_ylabel("accuracy")
        right.legend(frameon=False, fontsize=8, loc="lower left")
        return {"copy": figure}

    def sources(self, length: int) -> heads.Pairs:
        """The queries that predict copied symbols, and the key that each should attend to."""
        return length + np.arange(length), np.arange(length)


@dataclass(frozen=True)
class Recall(Ending):
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
    recipe: ClassVar[Training] = Training(steps=1000, batch=48, lr=3e-3, warmup=50)
    UNSEEN: ClassVar[int] = 100

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

    @property
    def lengths(self) -> tuple[int, int]:
        return self.min_length, self.max_length

    @property
    def needed(self) -> Mapping[str, int]:
        kinds = self.symbols * (2 if self.gap else 1)
        return {"vocab_size": heads.FIRST_SYMBOL + kinds, "context": 2 * self.max_length + self.gap}

    def draw(self, generator: np.random.Generator, size: int, length: int) -> Int[np.ndarray, "size length"]:
        """Blocks of different symbols."""
        return heads.FIRST_SYMBOL + generator.random((size, self.symbols)).argsort(1)[:, :length]

    def completed(self, drawn: Int[Tensor, "b length"], generator: np.random.Generator) -> Int[Tensor, "b n"]:
        """The block, noise, and the block again."""
        noise = torch.zeros(len(drawn), 0, dtype=torch.int64)
        if self.gap:
            noise = torch.from_numpy(generator.integers(self.symbols, 2 * self.symbols, (len(drawn), self.gap)))
        return torch.cat([drawn, heads.FIRST_SYMBOL + noise, drawn], 1)

    def evaluate(self, model: Any) -> Measured:
        """Teacher-forced predictions of the second block (without its first symbol) of held-out sequences.

        Returns:
            ``accuracy`` and ``loss`` (nats), averaged over all lengths; ``accuracy_by_length`` for each of ``lengths``.
        """
        lengths = list(range(self.min_length, self.max_length + 1))
        accuracy, loss = [], []
        for length in lengths:
            ids = on(model, self.unseen(length))
            predicted = model(ids[:, :-1])[:, self.start(ids) - 1 :].argmax(-1)
            accuracy.append((predicted == self.answers(ids)).double().mean().item())
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

        found, ids = self.check(model), self.unseen(self.max_length)[:1, :-1]
        layer, head = found["induction_layer"], found["induction_head"]
        title = (
            f"Induction head: layer {layer}, head {head} puts {found['best']:.0%} of its weight on the token after the "
            "earlier occurrence"
        )
        after = f" after {self.gap} tokens of noise" if self.gap else ""
        note = (
            f"{self.shape}, {self.model.positions} positions; {self.UNSEEN} held-out blocks of {self.max_length} "
            f"symbols, repeated{after}. Accuracy on predictable tokens: {self.evaluate(model)['accuracy']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.7)
        heads.show_scores(left, {label: found[kind] for kind, label in KINDS.items()})
        left.set_title("mean attention weight on …", size=9)
        heads.show_map(right, heads.maps(model, ids)[0, layer, head], ids[0], self.pairs(self.max_length)["induction"])
        right.set_title(f"layer {layer}, head {head}; squares: token after the earlier occurrence", size=9)
        return {"induction": figure}

    def pairs(self, length: int) -> dict[str, heads.Pairs]:
        """For each kind of head, the queries and the key that each attends to."""
        apart = length + self.gap
        every, second = np.arange(1, apart + length - 1), np.arange(apart, apart + length - 1)
        return {
            "previous": (every, every - 1),
            "duplicate": (second, second - apart),
            "induction": (second, second - apart + 1),
        }
