"""Experiments on the number of heads: several look-ups at once, and keys that heads share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from qkv.models import DecoderConfig
from qkv.nn import FeedForward, MultiHeadAttention
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Results
from qkv_lab.experiments.small import DATED, LEAST, Questions, learn, minus, setting
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.language import Language
from qkv_lab.tasks.relations import Lookups

WIDTH, HEADS = 64, 8
"""The shape of the language models."""


class TwoLookups(Experiment):
    """Two look-ups at each position, with one head or two of equally many parameters."""

    name = "two_lookups"
    question = "Do two heads do two look-ups at once that one head cannot?"
    seeds = 20
    criteria = (
        Criterion("C031", DATED, "Share of positions with both symbols correct, with two heads minus with one of the "
                  "same total width", LEAST,
                  remark="Means: {evaluation.accuracy}. Largest mean weight of a head on the symbol 1 back: "
                         "{check.best_first}; 4 back: {check.best_second}."),
    )  # fmt: skip
    kinds: Mapping[str, int | None] = {"without a feed-forward layer": 1, "with a feed-forward layer": None}
    """The number of hidden units: a single one is next to no feed-forward layer."""

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        runs = {}
        for kind, hidden in self.kinds.items():
            for heads in (1, 2):
                model = DecoderConfig(d_model=32, layers=1, heads=heads, d_hidden=hidden, tied=False)
                runs[_variant(heads, kind)] = setting(Lookups(longest=12, model=model), seed, quick, steps=1000)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect with a feed-forward layer, which can take a mixture of values apart, and one without."""
        return {
            "C031": [
                minus(results, _variant(2, kind), _variant(1, kind), "evaluation.accuracy", kind)
                for kind in self.kinds
            ]
        }  # fmt: skip

    def lines(self, results: Results) -> Lines:
        found = {
            kind: results.across([_variant(n, kind) for n in (1, 2)], "evaluation.accuracy") for kind in self.kinds
        }
        return Lines((1, 2), found, "heads", "share of positions with both symbols right")


def _variant(heads: int, kind: str) -> str:
    return f"{heads} head{'s' * (heads > 1)} {kind}"


class FourQuestions(nn.Module):
    """A query is the sum of four key symbols, each in a slot of its own; the answer is their four values, in order.

    The feed-forward layer is wider by as many weights as shared key heads save, so that all variants are as large.
    """

    width, symbols, values, slots, pairs = 64, 32, 16, 4, 12

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.asked = nn.Parameter(torch.randn(self.slots, self.symbols, self.width) / self.slots**0.5)
        self.key, self.value = nn.Embedding(self.symbols, self.width), nn.Embedding(self.values, self.width)
        self.attention = MultiHeadAttention(self.width, heads, bias=False)
        self.after = FeedForward(self.width, 2 * self.width, bias=False)
        self.out = nn.Linear(self.width, self.slots * self.values)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query = torch.stack([self.asked[slot, asked[:, slot]] for slot in range(self.slots)]).sum(0)
        found = self.attention(query[:, None], self.key(keys) + self.value(values))[:, 0]
        out: Tensor = self.out(found + self.after(found)).unflatten(-1, (self.slots, self.values))
        return out

    @classmethod
    def questions(cls, size: int, generator: torch.Generator) -> Questions:
        """Four of the keys, all keys, all values; and the four values."""
        keys = torch.rand(size, cls.symbols, generator=generator).argsort(1)[:, : cls.pairs]
        values = torch.randint(cls.values, (size, cls.pairs), generator=generator)
        at = torch.rand(size, cls.pairs, generator=generator).argsort(1)[:, : cls.slots]
        return (keys.gather(1, at), keys, values), values.gather(1, at)


class FourLookups(Experiment):
    """A token that needs four others at once, with eight heads or one of full width."""

    name = "four_lookups"
    question = "Is one head of full width more constrained than several of the same total width?"
    seeds = 20
    criteria = (
        Criterion("C324", DATED, "Share of the values of four keys that one query finds at once, with eight heads "
                  "minus with one of the same total width", LEAST, remark="Means: {measured.accuracy}."),
    )  # fmt: skip
    heads: Mapping[str, int] = {"8 heads": 8, "1 head": 1}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        training = Training(steps=3 if quick else 1000, warmup=20, weight_decay=0.0)
        tests = FourQuestions.questions(1000, torch.Generator().manual_seed(10_000 + seed))
        found = {}
        for name, heads in self.heads.items():
            torch.manual_seed(seed)
            model, generator = FourQuestions(heads), torch.Generator().manual_seed(seed)
            found[name] = learn(model, partial(model.questions, 64, generator), tests, training)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Both have equally many parameters, and a feed-forward layer."""
        return {"C324": [minus(results, "8 heads", "1 head", "measured.accuracy")]}


class SharedKeys(Experiment):
    """Language models whose 8 query heads have 8, 2 or 1 heads of keys and values, with equally many parameters."""

    name = "shared_keys"
    question = "Is multi-head attention better than grouped-query, and this better than multi-query attention?"
    seeds = 20
    criteria = (
        Criterion("C308", DATED, "Held-out loss (nats per byte) of multi-query minus multi-head, multi-query minus "
                  "grouped-query, and grouped-query minus multi-head attention", 0.0, parts=True,
                  remark="Mean losses: {evaluation.loss}; of a bigram model: {evaluation.bigram_loss of multi-head}. "
                         "Models of two layers and 64 dimensions only."),
    )  # fmt: skip
    key_heads: Mapping[str, int] = {"multi-head": 8, "grouped-query": 2, "multi-query": 1}

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The feed-forward layers are wider by as many weights as shared keys and values save."""
        runs = {}
        for name, n in self.key_heads.items():
            hidden = 4 * WIDTH + WIDTH // HEADS * (HEADS - n)
            model = DecoderConfig(
                d_model=WIDTH, layers=2, heads=HEADS, kv_heads=n, d_hidden=hidden, bias=False, positions="rotary"
            )
            runs[name] = setting(Language(context=64, model=model), seed, quick, steps=400, warmup=40)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        most, some, one = self.key_heads
        pairs = ((one, most), (one, some), (some, most))
        return {"C308": [minus(results, a, b, "evaluation.loss", f"{a} minus {b}") for a, b in pairs]}
