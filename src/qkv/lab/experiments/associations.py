"""Experiments on looking a value up by its key: additive and dot-product scores, linear and hard attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

import qkv
from qkv.features import elu_plus_one
from qkv.lab.experiments.base import Experiment, Results
from qkv.lab.experiments.evidence import Criterion, Effect
from qkv.lab.experiments.sinks import DATED
from qkv.lab.experiments.small import LEAST, fit, means_of, minus
from qkv.lab.task import Measured, Training
from qkv.normalizers import Hard, Identity, Normalizer
from qkv.scores import Additive, Dot, Features, Score

SYMBOLS, WIDTH, BATCH, TESTED = 64, 64, 64, 2000
ACCURACY = "measured.accuracy"
RIGHT = 0.9
"""A model can do the task if it finds this share of the values."""
Asked = tuple[Int[Tensor, " b"], Int[Tensor, "b keys"], Int[Tensor, "b keys"]]
"""The symbol asked for, the keys, and their values."""


class Lookup(nn.Module):
    """One head: given pairs of key and value, predict the value whose key the query asks for.

    Which query symbol asks for which key symbol is learnt. Queries and keys start with variance 1 in each dimension.
    """

    def __init__(
        self, size: int, score: Callable[[Lookup], Score], normalizer: Normalizer | None = None
    ) -> None:  # fmt: skip
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


def questions(size: int, keys: int, generator: torch.Generator) -> tuple[Asked, Int[Tensor, " b"]]:
    """Random questions: queries (size,), distinct keys (size, keys), their values; and the values asked for.

    >>> (query, keys, values), answer = questions(3, 5, torch.Generator().manual_seed(0))
    >>> keys.shape, bool((values[keys == query[:, None]] == answer).all())
    (torch.Size([3, 5]), True)
    """
    chosen = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :keys]
    values = torch.randint(SYMBOLS, (size, keys), generator=generator)
    at = torch.randint(keys, (size,), generator=generator)
    row = torch.arange(size)
    return (chosen[row, at], chosen, values), values[row, at]


def cross_entropy(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of a model that answers with all its weights."""
    return nn.functional.cross_entropy(model(*asked), answer)


def learn(
    model: Lookup,
    seed: int,
    *,
    keys: int,
    steps: int,
    loss: Callable[[Lookup, Asked, Tensor], Tensor] = cross_entropy,
) -> dict[str, float]:
    """Train a model; ``accuracy`` on 2,000 new questions."""
    generator = torch.Generator().manual_seed(seed)
    training = Training(steps=steps, warmup=0, decay="none", weight_decay=0.0, clip=0.0, beta2=0.999)
    fit(model, lambda _: loss(model, *questions(BATCH, keys, generator)), training)
    asked, answer = questions(TESTED, keys, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        return {"accuracy": (model(*asked).argmax(-1) == answer).double().mean().item()}


class ScoreFunctions(Experiment):
    """Additive, dot-product and scaled dot-product scores at several head dimensions."""

    name = "score_functions"
    question = "Which scores learn a look-up: additive, dot-product, scaled dot-product, at several head dimensions?"
    criteria = (
        Criterion("C257", DATED, "Share of values that additive scores find, without a scale", RIGHT),
        Criterion("C261", DATED, "Absolute difference of the shares that additive and scaled dot-product scores find",
                  LEAST, above=False),
        Criterion("C332", DATED, "Share of values that dot products find without a scale minus that of additive scores",
                  -LEAST),
        Criterion("C337", DATED, "Share of values that dot products find at head dimension 256, with 1/√d minus "
                  "without a scale", LEAST),
    )  # fmt: skip
    looks = (20, 40)
    sizes = (16, 64, 256)
    scores: Mapping[str, Callable[[Any], Score]] = {
        "additive": lambda m: Additive(m.vector),
        "dot": lambda m: Dot(scale=1.0),
        "scaled dot": lambda m: Dot(),
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each score and size."""
        found = {}
        for size in self.sizes:
            for name, score in self.scores.items():
                torch.manual_seed(seed)
                found[f"{name}, {size}"] = learn(Lookup(size, score), seed, keys=8, steps=3 if quick else 600)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per head dimension."""
        sizes = [n for n in self.sizes if results.finished(f"additive, {n}")]
        works, differs, plain_minus = [], [], []
        for n in sizes:
            a, b = f"additive, {n}", f"scaled dot, {n}"
            works.append(Effect(f"head dimension {n}", results.values(a, ACCURACY), (a,)))
            gaps = [abs(x) for x in results.differences(a, b, ACCURACY)]
            differs.append(Effect(f"head dimension {n}", gaps, (a, b)))
            plain_minus.append(minus(results, f"dot, {n}", a, ACCURACY, f"head dimension {n}"))
        largest = self.sizes[-1]
        scale = minus(results, f"scaled dot, {largest}", f"dot, {largest}", ACCURACY)
        return {"C257": works, "C261": differs, "C332": plain_minus, "C337": [scale]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all scores."""
        unscaled = means_of(results, [f"dot, {n}" for n in self.sizes], ACCURACY)
        scaled = means_of(results, [v for v in results.variants if not v.startswith("dot")], ACCURACY)
        return {
            "C257": f"Dot products without a scale: {unscaled}.",
            "C261": f"Means: {scaled}.",
            "C332": f"Means: {unscaled}.",
            "C337": f"Without a scale: {unscaled}. Queries and keys have unit variance at the start.",
        }


class LinearAttention(Experiment):
    """Softmax and linear attention with the same projections, on lists of 4 and of 48 pairs."""

    name = "linear_attention"
    question = "Does linear attention find fewer values than softmax attention in a long list?"
    criteria = (
        Criterion("C298", DATED, "Share of values that a head of 16 dimensions finds among 48 pairs, with softmax "
                  "minus with linear attention", LEAST),
    )  # fmt: skip
    looks = (20, 40)
    size = 16
    lengths = (4, 48)

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each kind of attention and number of pairs."""
        found = {}
        for keys in self.lengths:
            for name in ("softmax", "linear"):
                torch.manual_seed(seed)
                score = (lambda _: Dot()) if name == "softmax" else (lambda _: Features(elu_plus_one))
                model = Lookup(self.size, score, None if name == "softmax" else Identity("sum"))
                found[f"{name}, {keys} pairs"] = learn(model, seed, keys=keys, steps=3 if quick else 600)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the longest list: what is less expressive fails there first."""
        return {"C298": [minus(results, "softmax, 48 pairs", "linear, 48 pairs", ACCURACY)]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all runs."""
        means = means_of(results, list(results.variants), ACCURACY)
        return {"C298": f"Means: {means} (linear: φ = elu + 1). Its sum of 16 × 64 numbers must hold all pairs."}


def straight_through(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the best key's value, with the gradient of softmax: that of `Hard`."""
    return cross_entropy(model, asked, answer)


def plain(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the best key's value by plain backpropagation: the scores get no gradient."""
    query, keys, values = asked
    chosen = model.logits(query, keys).argmax(-1)
    return nn.functional.cross_entropy(_taken(model, values, chosen), answer)


def reinforce(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the value of a key that is sampled from the softmax, and REINFORCE for it (Xu et al. 2015)."""
    query, keys, values = asked
    draw = torch.distributions.Categorical(logits=model.logits(query, keys))
    chosen = draw.sample()
    cost = nn.functional.cross_entropy(_taken(model, values, chosen), answer, reduction="none")
    return (cost + (cost - cost.mean()).detach() * draw.log_prob(chosen)).mean()


def _taken(model: Lookup, values: Tensor, chosen: Tensor) -> Tensor:
    """The answer from the value of one key of each list."""
    found: Tensor = model.out(model.values(values[torch.arange(len(chosen)), chosen]))
    return found


class HardAttention(Experiment):
    """Hard attention to one of 4 keys, trained in three ways."""

    name = "hard_attention"
    question = "Can hard attention be trained without reinforcement learning?"
    criteria = (
        Criterion("C365", DATED, "Share of values that hard attention finds when trained without reinforcement "
                  "learning, in the better of two ways", RIGHT, above=False),
    )  # fmt: skip
    looks = (20, 40)
    ways: Mapping[str, Callable[[Lookup, Asked, Tensor], Tensor]] = {
        "plain backpropagation": plain,
        "straight-through": straight_through,
        "REINFORCE": reinforce,
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """One model for each way of training."""
        found = {}
        for name, loss in self.ways.items():
            torch.manual_seed(seed)
            model = Lookup(32, lambda _: Dot(), Hard())
            found[name] = learn(model, seed, keys=4, steps=3 if quick else 1000, loss=loss)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """The claim fails if a way without rewards learns the task."""
        without = [results.by_seed(name, ACCURACY) for name in ("plain backpropagation", "straight-through")]
        better = [max(x[seed] for x in without) for seed in without[0] if all(seed in x for x in without)]
        learnt = Effect("the share with REINFORCE", results.values("REINFORCE", ACCURACY), bound=RIGHT, above=True,
                        premise=True)  # fmt: skip
        return {"C365": [learnt, Effect("", better, ("plain backpropagation", "straight-through"))]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means of all ways; a guess among 4 is right in a quarter of the cases."""
        return {"C365": f"Means: {means_of(results, list(self.ways), ACCURACY)}; guessing one of 4 would be 0.25."}
