"""Experiments: associations, look-ups, relations between symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import qkv
from qkv.features import elu_plus_one
from qkv.models import DecoderConfig
from qkv.normalizers import Hard, Identity, Normalizer
from qkv.scores import Additive, Dot, Features, Score
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Results
from qkv_lab.experiments.small import DATED, LEAST, Questions, learn, minus, setting, unlearnt
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.relations import PICKS, Coreference, Hops

SYMBOLS, WIDTH, BATCH, TESTED = 64, 64, 64, 2000


class Lookup(nn.Module):
    """One head: given pairs of key and value, predict the value whose key the query asks for.

    Which query symbol asks for which key symbol is learnt. Queries and keys start with variance 1 in each dimension.
    """

    def __init__(self, size: int, score: Callable[[Any], Score], normalizer: Normalizer | None = None) -> None:
        super().__init__()
        self.queries, self.keys = (nn.Parameter(torch.randn(SYMBOLS, size)) for _ in range(2))
        self.w_q, self.w_k = (nn.Parameter(torch.randn(size, size) / size**0.5) for _ in range(2))
        self.values, self.out = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, SYMBOLS)
        self.vector = nn.Parameter(torch.randn(size) / size**0.5)  # of the additive score
        self.score, self.normalizer = score, normalizer

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = (self.queries @ self.w_q)[query][:, None, None]
        k = (self.keys @ self.w_k)[keys][:, None]
        v = self.values(values)[:, None]
        found = qkv.attend(q, k, v, score=self.score(self), normalizer=self.normalizer, kernel="eager")
        assert isinstance(found, Tensor)
        out: Tensor = self.out(found[:, 0, 0])
        return out

    def logits(self, query: Tensor, keys: Tensor) -> Tensor:
        """The scaled dot products of queries and keys, (b, keys)."""
        q, k = (self.queries @ self.w_q)[query], (self.keys @ self.w_k)[keys]
        return (k @ q[:, :, None])[..., 0] / q.shape[-1] ** 0.5


def questions(size: int, keys: int, generator: torch.Generator) -> Questions:
    """Random questions: the symbols asked for (size,), distinct keys (size, keys), their values; and the answers.

    >>> (query, keys, values), answer = questions(3, 5, torch.Generator().manual_seed(0))
    >>> keys.shape, bool((values[keys == query[:, None]] == answer).all())
    (torch.Size([3, 5]), True)
    """
    chosen = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :keys]
    values = torch.randint(SYMBOLS, (size, keys), generator=generator)
    at = torch.randint(keys, (size,), generator=generator)
    row = torch.arange(size)
    return (chosen[row, at], chosen, values), values[row, at]


def looked_up(
    seed: int, keys: int, steps: int, size: int, score: Callable[[Any], Score], normalizer: Normalizer | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> Measured:  # fmt: skip
    """Train a head on lists of so many keys; its ``accuracy`` on 2,000 new questions."""
    torch.manual_seed(seed)
    model, generator = Lookup(size, score, normalizer), torch.Generator().manual_seed(seed)
    tests = questions(TESTED, keys, torch.Generator().manual_seed(10_000 + seed))
    training = Training(steps=steps, warmup=0, decay="none", weight_decay=0.0, clip=0.0, beta2=0.999)
    return learn(model, partial(questions, BATCH, keys, generator), tests, training, loss)


def plain(model: Lookup, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
    """The loss of the best key's value by plain backpropagation: the scores get no gradient."""
    query, keys, values = inputs
    chosen = model.logits(query, keys).argmax(-1)
    return nn.functional.cross_entropy(_taken(model, values, chosen), answer)


def reinforce(model: Lookup, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
    """The loss of the value of a key that is sampled from the softmax, and REINFORCE for it (Xu et al. 2015)."""
    query, keys, values = inputs
    draw = torch.distributions.Categorical(logits=model.logits(query, keys))
    chosen = draw.sample()
    cost = nn.functional.cross_entropy(_taken(model, values, chosen), answer, reduction="none")
    return (cost + (cost - cost.mean()).detach() * draw.log_prob(chosen)).mean()


def _taken(model: Lookup, values: Tensor, chosen: Tensor) -> Tensor:
    """The answer from the value of one key of each list."""
    found: Tensor = model.out(model.values(values[torch.arange(len(chosen)), chosen]))
    return found


ACCURACY, MEANS = "measured.accuracy", "Means: {measured.accuracy}."
RIGHT = 0.9
"""A model can do the task if it finds this share of the values."""


class ScoreFunctions(Experiment):
    """Additive, dot-product and scaled dot-product scores at several head dimensions."""

    name = "score_functions"
    question = "Which scores learn a look-up: additive, dot-product, scaled dot-product, at several head dimensions?"
    seeds = 20
    criteria = (
        Criterion("C257", DATED, "Share of values that additive scores find, without a scale", RIGHT, remark=MEANS),
        Criterion("C261", DATED, "Absolute difference of the shares that additive and scaled dot-product scores find",
                  LEAST, above=False, remark=MEANS),
        Criterion("C332", DATED, "Share of values that dot products find without a scale minus that of additive scores",
                  -LEAST, remark=MEANS),
        Criterion("C337", DATED, "Share of values that dot products find at head dimension 256, with 1/√d minus "
                  "without a scale", LEAST, remark=f"{MEANS} Queries and keys have unit variance at the start."),
    )  # fmt: skip
    sizes = (16, 64, 256)
    scores: Mapping[str, Callable[[Any], Score]] = {
        "additive": lambda m: Additive(m.vector),
        "dot": lambda m: Dot(scale=1.0),
        "scaled dot": lambda m: Dot(),
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        steps = 3 if quick else 600
        return {
            f"{name}, {size}": looked_up(seed, 8, steps, size, score)
            for size in self.sizes
            for name, score in self.scores.items()
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        works, differs, plain_minus = [], [], []
        for n in self.sizes:
            of, additive = f"head dimension {n}", f"additive, {n}"
            works.append(Effect(of, results.values(additive, ACCURACY)))
            differs.append(Effect(of, [abs(x) for x in results.differences(additive, f"scaled dot, {n}", ACCURACY)]))
            plain_minus.append(minus(results, f"dot, {n}", additive, ACCURACY, of))
        largest = self.sizes[-1]
        scale = minus(results, f"scaled dot, {largest}", f"dot, {largest}", ACCURACY)
        return {"C257": works, "C261": differs, "C332": plain_minus, "C337": [scale]}


class LinearAttention(Experiment):
    """Softmax and linear attention with the same projections, on lists of 4 and of 48 pairs."""

    name = "linear_attention"
    question = "Does linear attention find fewer values than softmax attention in a long list?"
    seeds = 20
    criteria = (
        Criterion("C298", DATED, "Share of values that a head of 16 dimensions finds among 48 pairs, with softmax "
                  "minus with linear attention", LEAST,
                  remark="Means: {measured.accuracy} (linear: φ = elu + 1). Its sum of 16 × 64 numbers must hold all "
                         "pairs."),
    )  # fmt: skip
    kinds: Mapping[str, tuple[Callable[[Any], Score], Normalizer | None]] = {
        "softmax": (lambda _: Dot(), None),
        "linear": (lambda _: Features(elu_plus_one), Identity("sum")),
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        steps = 3 if quick else 600
        return {
            f"{name}, {keys} pairs": looked_up(seed, keys, steps, 16, *kind)
            for keys in (4, 48)
            for name, kind in self.kinds.items()
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the longest list: what is less expressive fails there first."""
        return {"C298": [minus(results, "softmax, 48 pairs", "linear, 48 pairs", ACCURACY)]}


class HardAttention(Experiment):
    """Hard attention to one of 4 keys, trained in three ways."""

    name = "hard_attention"
    question = "Can hard attention be trained without reinforcement learning?"
    seeds = 20
    criteria = (
        Criterion("C365", DATED, "Share of values that hard attention finds when trained without reinforcement "
                  "learning, in the better of two ways", RIGHT, above=False,
                  remark="Means: {measured.accuracy}; guessing one of 4 would be 0.25."),
    )  # fmt: skip
    losses: Mapping[str, Callable[..., Tensor] | None] = {
        "plain backpropagation": plain,
        "straight-through": None,  # the cross-entropy, with the gradient of `Hard`: that of softmax
        "REINFORCE": reinforce,
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        steps = 3 if quick else 1000
        return {
            name: looked_up(seed, 4, steps, 32, lambda _: Dot(), Hard(), loss) for name, loss in self.losses.items()
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The claim fails if a way without rewards learns the task."""
        better = list(results.across(["plain backpropagation", "straight-through"], ACCURACY).max(axis=1))
        learnt = Effect("the share with REINFORCE", results.values("REINFORCE", ACCURACY), bound=RIGHT, above=True,
                        premise=True)  # fmt: skip
        return {"C365": [learnt, Effect("", better)]}


READER = "2 layers × 2 heads"


class Pronouns(Experiment):
    """Models that name the antecedent of a pronoun, without supervision of the link."""

    name = "coreference"
    question = "Does a head attend from a pronoun to its antecedent when the model resolves it?"
    seeds = 40
    criteria = (
        Criterion("C006", DATED, "Share of sentences in which the head with the largest weight on the antecedent gives "
                  "it more than the other noun", PICKS,
                  remark="Share of sentences in which the right noun is named: {evaluation.accuracy}."),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return {READER: setting(Coreference(), seed, quick)}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """It counts if the models name the right noun."""
        why = unlearnt(results, "evaluation.accuracy", 0.95, READER)
        return {"C006": [Effect("", results.values(READER, "check.best"), unless=why)]}


class Depth(Experiment):
    """Pointer chasing with 1, 2 and 3 layers."""

    name = "hops"
    question = "Does depth allow reasoning in several hops?"
    criteria = (
        Criterion("C059", DATED, "Share of positions right after 4 hops, with 3 layers minus with 1 layer", LEAST,
                  remark="Means: {evaluation.accuracy}; naming its own position would be right in 0.38 of the cases."),
    )  # fmt: skip
    depths = (1, 2, 3)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        return {
            _layers(n): setting(
                Hops(model=DecoderConfig(d_model=32, layers=n, heads=4, tied=False)), seed, quick, steps=600
            )
            for n in self.depths
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C059": [minus(results, _layers(3), _layers(1), "evaluation.accuracy")]}

    def lines(self, results: Results) -> Lines:
        found = results.across([_layers(n) for n in self.depths], "evaluation.accuracy")
        return Lines(self.depths, {"": found}, "layers", "share of positions right after 4 hops")


def _layers(n: int) -> str:
    return f"{n} layer{'s' * (n > 1)}"


class NextColour(nn.Module):
    """Tokens are pairs of a symbol and a colour; each asks for the colour of the next symbol's token.

    One attention layer whose queries, keys and values have projections of their own, one in common, or none.
    """

    symbols, width = 12, 32

    def __init__(self, projections: int) -> None:
        super().__init__()
        self.symbol, self.colour = (nn.Embedding(self.symbols, self.width) for _ in range(2))
        made: list[nn.Module] = [nn.Linear(self.width, self.width, bias=False) for _ in range(projections)]
        self.q, self.k, self.v = made if projections == 3 else (made or [nn.Identity()]) * 3
        self.output = nn.Sequential(nn.Linear(2 * self.width, 128), nn.GELU(), nn.Linear(128, self.symbols))

    def forward(self, symbols: Tensor, colours: Tensor) -> Tensor:
        """Logits of each token's answer, (b, n, symbols)."""
        x = self.symbol(symbols) + self.colour(colours)
        q, k, v = (f(x)[:, None] for f in (self.q, self.k, self.v))
        out: Tensor = self.output(torch.cat([x, qkv.attend(q, k, v)[:, 0]], -1))
        return out

    @classmethod
    def questions(cls, size: int, generator: np.random.Generator) -> Questions:
        """All symbols in random order, with random colours; and the colour that each token asks for."""
        symbols = torch.from_numpy(np.argsort(generator.random((size, cls.symbols)), 1))
        colours = torch.from_numpy(generator.integers(cls.symbols, size=(size, cls.symbols)))
        where = symbols.argsort(1).gather(1, (symbols + 1) % cls.symbols)
        return (symbols, colours), colours.gather(1, where)


class Projections(Experiment):
    """One attention layer on a directed relation, with three projections, one, or none."""

    name = "projections"
    question = "What do separate projections of queries, keys and values express that the input itself cannot?"
    seeds = 20
    criteria = (
        Criterion("C009", DATED, "Share of tokens that find the colour of the next symbol, with separate W_Q, W_K and "
                  "W_V minus with X itself in all three places", LEAST,
                  remark="Means: {measured.accuracy}; by chance 0.08. With W_Q = W_K no relation has a direction."),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, int]] = {"three": 3, "one for all": 1, "X itself": 0}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        training = Training(steps=3 if quick else 500, warmup=20, weight_decay=0.0)
        tests = NextColour.questions(500, np.random.default_rng([9, seed]))
        found = {}
        for name, projections in self.variants.items():
            torch.manual_seed(seed)
            model, generator = NextColour(projections), np.random.default_rng(seed)
            found[name] = learn(model, partial(model.questions, 64, generator), tests, training)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        return {"C009": [minus(results, "three", "X itself", "measured.accuracy")]}
