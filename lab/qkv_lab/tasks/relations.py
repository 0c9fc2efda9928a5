"""The tasks of looking up earlier symbols, following pointers and resolving a pronoun: an answer for some positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor, stack, where

from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig
from qkv_lab import heads
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.symbols import Symbols, on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IT = 1
"""The pronoun; it takes the place of the separator of other tasks."""
ADJECTIVES = 4
"""The number of adjectives that fit animals, and of those that fit places."""
FILLERS = 16
"""The number of different words without a role."""
LEARNT = 0.9
"""Both answers are learnt if they are right at this share of positions."""
PICKS = 0.9
"""A head resolves the pronoun if it prefers the antecedent to the other noun in at least this share of sentences."""


@dataclass(frozen=True)
class Lookups(Symbols):
    """Random symbols; at each position the model names the symbols `first` and `second` positions before.

    Each look-up has tokens of its own for its answers, so one position makes two independent predictions. The correct
    attention is known: one head attends `first` tokens back and another `second` tokens back. A single head has to mix
    the two. With `second` equal to `first` there is one look-up.

    >>> Lookups(length=9).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 9])
    """

    name: ClassVar[str] = "lookups"
    recipe: ClassVar[Training] = Training(steps=400, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)
    UNSEEN: ClassVar[int] = 200

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

    @property
    def needed(self) -> Mapping[str, int]:
        return {"vocab_size": heads.FIRST_SYMBOL + 2 * self.symbols, "context": self.longest}

    def answers(self, ids: Int[Tensor, "b n"]) -> Int[Tensor, "b m 2"]:
        """The two symbols of each position that has a symbol `second` positions before."""
        found = [ids[:, self.second - back : ids.shape[1] - back] for back in (self.first, self.second)]
        return stack(found, -1) - heads.FIRST_SYMBOL

    def logits(self, model: Any, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b m 2 symbols"]:
        """Logits of both answers, from position `second` on."""
        found: Tensor = model(ids)[:, self.second :, heads.FIRST_SYMBOL :].unflatten(-1, (2, self.symbols))
        return found

    def unseen(self, length: int = 0) -> Int[Tensor, "sequences n"]:
        """The held-out sequences of a length, by default that of training."""
        return super().unseen(length or self.length)

    def evaluate(self, model: Any) -> Measured:
        """On held-out sequences of the trained length, and beyond it.

        Returns:
            ``accuracy``, the share of positions with both answers correct; ``first_accuracy`` and ``second_accuracy``
            of each answer; ``loss`` in nats; and if `longest` is more than `length`, ``longer_accuracy``: as
            ``accuracy``, at the positions beyond the trained length in sequences of `longest` symbols.
        """
        ids = on(model, self.unseen())
        right = self.right(model, ids)
        found = {
            "accuracy": right.prod(-1).mean().item(),
            "first_accuracy": right[..., 0].mean().item(),
            "second_accuracy": right[..., 1].mean().item(),
            "loss": self.loss(model, {"ids": ids}).item(),
        }
        if self.longest > self.length:
            beyond = self.right(model, on(model, self.unseen(self.longest)))[:, self.length - self.second :]
            found["longer_accuracy"] = beyond.prod(-1).mean().item()
        return found

    def check(self, model: Any) -> Measured:
        """The attention of every head to the two symbols, in held-out sequences of the trained length.

        Returns:
            By layer and head: ``first`` and ``second``, the mean weights on the symbols to look up. For each of these
            the head with the largest weight, as [layer, head]: ``first_head`` and ``second_head``, and its weight
            ``best_first`` and ``best_second``; ``heads``, 2 if these are different heads, else 1.
        """
        weights = heads.maps(model, self.unseen()[: self.CHECKED])
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
        if measured["accuracy"] < LEARNT:
            share = f"The look-ups are not learnt: both answers correct at {measured['accuracy']:.0%} of positions"
        longer = f", {measured['longer_accuracy']:.1%} beyond" if "longer_accuracy" in measured else ""
        note = (
            f"{self.shape}, {self.model.positions} positions; held-out sequences. Both answers correct at "
            f"{measured['accuracy']:.1%} of positions within the trained length of {self.length}{longer}."
        )
        figure, panels = draw.panels(share, note, columns=2, width=8.2, height=3.6)
        weights = heads.maps(model, ids)[0]
        for axes, (kind, back) in zip(panels, self._offsets().items(), strict=True):
            layer, head = found[f"{kind}_head"]
            heads.show_map(axes, weights[layer, head], ids[0], self.pairs(back))
            axes.set_ylabel("query: position that answers")
            axes.set_title(f"layer {layer}, head {head}: {found[f'best_{kind}']:.0%} of its weight {back} back", size=9)
        return {"lookups": figure}

    def pairs(self, back: int) -> heads.Pairs:
        """The queries that answer, and the key `back` positions before each."""
        queries = np.arange(self.second, self.length)
        return queries, queries - back

    def _offsets(self) -> dict[str, int]:
        return {"first": self.first, "second": self.second}


@dataclass(frozen=True)
class Hops(Symbols):
    """A random permutation: each position holds a pointer to another. Name the positions after 2, 3, … hops.

    The token at position i is its pointer p(i), so the first hop is given. A head that attends from i to p(i) reads
    p(p(i)), the second hop. In the next layer a head can attend to the position that was read before it, so that the
    number of hops doubles with each layer at best. The correct attention is known: from position i to one on its chain,
    p(i), p(p(i)), …. Attention is bidirectional: the task sets the prefix of the model to the whole sequence. Each
    number of hops has tokens of its own for its answers.

    >>> Hops(places=7).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 7])
    """

    name: ClassVar[str] = "hops"
    recipe: ClassVar[Training] = Training(steps=1000, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)

    places: int = 8
    """The number of positions, and of tokens; pointer p is token 2 + p."""
    hops: int = 4
    """The largest number of hops to answer for."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=64, layers=2, heads=4, tied=False))
    """The configuration of the `DecoderLM`; the task sets vocab_size, context and prefix."""

    def __post_init__(self) -> None:
        if self.hops < 2:
            raise InputError(f"hops is {self.hops}, expected at least 2: the first hop is in the input")
        heads.check_enough(math.factorial(min(max(self.places, 0), 64)), f"places is {self.places}")

    @property
    def lengths(self) -> tuple[int, int]:
        return self.places, self.places

    @property
    def needed(self) -> Mapping[str, int]:
        vocabulary = heads.FIRST_SYMBOL + self.places * (self.hops - 1)
        return {"vocab_size": vocabulary, "context": self.places, "prefix": self.places}

    def draw(self, generator: np.random.Generator, size: int, length: int) -> Int[np.ndarray, "size length"]:
        """Random permutations, as tokens."""
        return heads.FIRST_SYMBOL + generator.random((size, length)).argsort(1)

    def after(self, ids: Int[Tensor, "b places"]) -> Int[Tensor, "b places hops"]:
        """The position that each position reaches after 1, 2, … hops."""
        pointers = ids - heads.FIRST_SYMBOL
        found = [pointers]
        for _ in range(1, self.hops):
            found.append(pointers.gather(1, found[-1]))
        return stack(found, -1)

    def answers(self, ids: Int[Tensor, "b places"]) -> Int[Tensor, "b places more"]:
        """The positions after 2 hops and more."""
        return self.after(ids)[..., 1:]

    def logits(self, model: Any, ids: Int[Tensor, "b places"]) -> Float[Tensor, "b places more places"]:
        """Logits of the positions after 2 hops and more."""
        found: Tensor = model(ids)[..., heads.FIRST_SYMBOL :].unflatten(-1, (self.hops - 1, self.places))
        return found

    def stays(self, hops: int) -> float:
        """How often a position is back at itself after some hops: its cycle is of any length, equally likely.

        >>> [Hops().stays(hops) for hops in (2, 3, 4)]
        [0.25, 0.25, 0.375]
        """
        return sum(hops % length == 0 for length in range(1, self.places + 1)) / self.places

    def evaluate(self, model: Any) -> Measured:
        """On held-out permutations: ``accuracy`` after the most hops, ``accuracy_by_hops`` from 2 on, and ``loss``."""
        ids = on(model, self.unseen())
        by_hops = self.right(model, ids).mean((0, 1)).tolist()
        return {"accuracy": by_hops[-1], "loss": self.loss(model, {"ids": ids}).item(), "accuracy_by_hops": by_hops}

    def check(self, model: Any) -> Measured:
        """The attention of every head along the chain, in held-out permutations.

        Returns:
            By layer and head: ``hop_1``, ``hop_2``, …, the share of queries whose strongest key is the position after
            that many hops. ``best_layer``, ``best_head``, ``best_hop`` and its share ``best``, of the head and hop with
            the largest share; ``best_by_hop``, the largest share of each hop.
        """
        ids = self.unseen()[: self.CHECKED]
        weights, reached = heads.maps(model, ids), self.after(ids).numpy()
        shares = np.stack([
            heads.share_of_strongest(weights, (np.arange(self.places), reached[..., hop]))
            for hop in range(self.hops - 1)
        ])  # fmt: skip
        hop, layer, head = (int(i) for i in np.unravel_index(shares.argmax(), shares.shape))
        return {
            **{f"hop_{at}": share.tolist() for at, share in enumerate(shares, 1)},
            "best_layer": layer,
            "best_head": head,
            "best_hop": hop + 1,
            "best": float(shares[hop, layer, head]),
            "best_by_hop": shares.max((1, 2)).tolist(),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``hops``: the map of the best head, and every head's share on each position of the chain."""
        from qkv_lab import draw

        measured, found, ids = self.evaluate(model), self.check(model), self.unseen()[:1]
        layer, head, hop = found["best_layer"], found["best_head"], found["best_hop"]
        title = f"Layer {layer}, head {head} attends {hop} hop{'s' * (hop > 1)} ahead in {found['best']:.0%} of queries"
        rates = ", ".join(f"{x:.1%} after {n + 2}" for n, x in enumerate(measured["accuracy_by_hops"]))
        guesses = ", ".join(f"{self.stays(hops):.1%}" for hops in range(2, self.hops + 1))
        note = (
            f"{self.shape}, {self.UNSEEN} held-out permutations. Accuracy: {rates} hops (its own position: {guesses})."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        queries, keys = np.arange(self.places), self.after(ids)[0, :, hop - 1].numpy()
        names = [f"{i} → {token - heads.FIRST_SYMBOL}" for i, token in enumerate(ids[0].tolist())]
        heads.show_map(left, heads.maps(model, ids)[0, layer, head], ids[0], (queries, keys), names=names)
        left.set(xlabel="key: position → its pointer", ylabel="query: position → its pointer")
        left.set_title(f"layer {layer}, head {head}; squares: {hop} hop{'s' * (hop > 1)} ahead", size=9)
        heads.show_scores(right, {f"{at}": found[f"hop_{at}"] for at in range(1, self.hops)})
        right.set_xlabel("hops from the query to its strongest key")
        return {"hops": figure}


@dataclass(frozen=True)
class Coreference(Symbols):
    """An animal and a place in any order among fillers, then "it", a filler, and an adjective that fits one of them.

    At "it" the model names the antecedent: the animal if the adjective describes animals (*tired*), else the place
    (*wide*). The adjective comes after the pronoun, as in "… because it was too tired", so attention is bidirectional:
    the task sets the prefix of the model to the whole sentence. The link itself is never supervised.

    >>> Coreference(length=9).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 9])
    """

    name: ClassVar[str] = "coreference"
    recipe: ClassVar[Training] = Training(steps=500, batch=64, lr=3e-3, warmup=50, weight_decay=0.0)
    CHECKED: ClassVar[int] = 200

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

    @property
    def needed(self) -> Mapping[str, int]:
        vocabulary = heads.FIRST_SYMBOL + 2 * (self.nouns + ADJECTIVES) + FILLERS
        return {"vocab_size": vocabulary, "context": self.length, "prefix": self.length}

    def draw(self, generator: np.random.Generator, size: int, length: int) -> Int[np.ndarray, "size length"]:
        """Random sentences."""
        first, row = heads.FIRST_SYMBOL, np.arange(size)
        adjective = first + 2 * self.nouns
        ids = generator.integers(adjective + 2 * ADJECTIVES, adjective + 2 * ADJECTIVES + FILLERS, (size, length))
        places = np.argsort(generator.random((size, length - 3)), 1)[:, :2]
        for kind in (0, 1):  # an animal, then a place, each at a random position before the pronoun
            ids[row, places[:, kind]] = first + kind * self.nouns + generator.integers(self.nouns, size=size)
        ids[:, -3] = IT
        fits = generator.integers(2, size=size)
        ids[:, -1] = adjective + fits * ADJECTIVES + generator.integers(ADJECTIVES, size=size)
        return ids

    def nouns_of(self, ids: Int[Tensor, "b length"]) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
        """The positions of the antecedent and of the other noun, by the adjective."""
        first = heads.FIRST_SYMBOL
        animal, place = (self._is_kind(ids, first + kind * self.nouns).int().argmax(1) for kind in (0, 1))
        fits_place = ids[:, -1] >= first + 2 * self.nouns + ADJECTIVES
        return where(fits_place, place, animal), where(fits_place, animal, place)

    def _is_kind(self, ids: Int[Tensor, "b n"], start: int) -> Bool[Tensor, "b n"]:
        return (ids >= start) & (ids < start + self.nouns)

    def answers(self, ids: Int[Tensor, "b length"]) -> Int[Tensor, " b"]:
        """The antecedent, the noun to name in each sentence."""
        return ids.gather(1, self.nouns_of(ids)[0][:, None])[:, 0]

    def logits(self, model: Any, ids: Int[Tensor, "b length"]) -> Float[Tensor, "b vocabulary"]:
        """Logits at the pronoun."""
        found: Tensor = model(ids)[:, -3]
        return found

    def evaluate(self, model: Any) -> Measured:
        """Accuracy of the named noun, and the loss in nats, on held-out sentences."""
        ids = on(model, self.unseen())
        return {"accuracy": self.right(model, ids).mean().item(), "loss": self.loss(model, {"ids": ids}).item()}

    def check(self, model: Any) -> Measured:
        """The attention of every head from the pronoun to the two nouns of held-out sentences.

        Returns:
            By layer and head: ``antecedent`` and ``other``, the mean weights of "it" on the antecedent and on the other
            noun; ``picks``, the share of sentences in which the antecedent gets more than the other noun. For the head
            with the largest weight on the antecedent: ``best_layer``, ``best_head``, and its share ``best``;
            ``without_best``, the accuracy with that head ablated.
        """
        ids = self.unseen()
        from_it = heads.maps(model, ids[: self.CHECKED])[:, :, :, -3]  # (b, layer, head, key)
        to, away = (
            np.take_along_axis(from_it, at.numpy()[: self.CHECKED, None, None, None], -1)[..., 0]
            for at in self.nouns_of(ids)
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
            "without_best": self.right(cut, on(model, ids)).mean().item(),
        }

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """``pronoun``: the best head's map of a held-out sentence, and every head's weights on the two nouns."""
        from qkv_lab import draw

        found, ids = self.check(model), self.unseen()[:1]
        layer, head = found["best_layer"], found["best_head"]
        resolves = "prefers" if found["best"] >= PICKS else "does not reliably prefer"
        title = f'At "it" layer {layer}, head {head} {resolves} the antecedent ({found["best"]:.0%} of sentences)'
        note = (
            f"{self.shape}, bidirectional; {self.CHECKED} held-out sentences. "
            f"Accuracy {self.evaluate(model)['accuracy']:.1%}; without this head {found['without_best']:.1%}."
        )
        figure, (left, right) = draw.panels(title, note, columns=2, width=8.2, height=3.5)
        it = np.array([self.length - 3])
        names = [self.word(token) for token in ids[0].tolist()]
        weights = heads.maps(model, ids)[0, layer, head]
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
