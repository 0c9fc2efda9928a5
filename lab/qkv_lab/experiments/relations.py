"""Experiments on relations between tokens: pronouns, several hops, and separate projections for a direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

import qkv
from qkv.models import DecoderConfig
from qkv_lab.experiments.base import Results, Setting
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import LEAST, Small, fit, means_of, minus, setting, unlearnt
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.coreference import PICKS, Coreference
from qkv_lab.tasks.hops import Hops

READER = "2 layers × 2 heads"


class Pronouns(Small):
    """Models that name the antecedent of a pronoun, without supervision of the link."""

    name = "coreference"
    question = "Does a head attend from a pronoun to its antecedent when the model resolves it?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "A head attends from the pronoun to its antecedent",
        FAILS: "Models resolve the pronoun, often without a head that attends to its antecedent",
    }
    criteria = (
        Criterion("C006", DATED, "Share of sentences in which the head with the largest weight on the antecedent gives "
                  "it more than the other noun", PICKS),
    )  # fmt: skip
    looks: ClassVar[tuple[int, ...]] = (20, 40)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The task's default model and training."""
        return {READER: setting(Coreference(), seed, quick)}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """It counts if the models name the right noun."""
        why = unlearnt(results, "evaluation.accuracy", 0.95, READER)
        return {"C006": [Effect("", results.values(READER, "check.best"), (READER,), unless=why)]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """Accuracy, and the runs in which no head does it."""
        best, right = (results.values(READER, x) for x in ("check.best", "evaluation.accuracy"))
        few = sum(x < PICKS for x in best)
        named = f"The models name the right noun in {min(right):.1%} of the sentences or more" if right else ""
        return {
            "C006": f"{named}; in {few} of {len(best)} runs that head prefers it in fewer than {PICKS:.0%}."
            if right
            else ""
        }


class Depth(Small):
    """Pointer chasing with 1, 2 and 3 layers."""

    name = "hops"
    question = "Does depth allow reasoning in several hops?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Three layers follow more hops than one",
        FAILS: "One layer follows as many hops as three",
    }
    criteria = (
        Criterion("C059", DATED, "Share of positions right after 4 hops, with 3 layers minus with 1 layer", LEAST),
    )
    looks: ClassVar[tuple[int, ...]] = (10, 20)
    depths = (1, 2, 3)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model for each depth."""
        return {
            _layers(n): setting(
                Hops(model=DecoderConfig(d_model=32, layers=n, heads=4, tied=False)), seed, quick, steps=600
            )
            for n in self.depths
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """After the most hops."""
        return {"C059": [minus(results, _layers(3), _layers(1), "evaluation.accuracy")]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """Accuracy by hops and depth; a guess is right in 1 of 8 cases."""
        parts = []
        for n in self.depths:
            runs = results.finished(_layers(n))
            if runs:
                means = np.mean([o.evaluation["accuracy_by_hops"] for o in runs], 0)
                parts.append(f"{_layers(n)} {', '.join(f'{x:.2f}' for x in means)}")
        return {"C059": f"Means after 2, 3 and 4 hops: {'; '.join(parts)}; a guess would be 0.12."}


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
    def tokens(
        cls, generator: np.random.Generator, size: int
    ) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"], Int[Tensor, "b n"]]:
        """All symbols in random order, with random colours; and the colour that each token asks for."""
        symbols = torch.from_numpy(np.argsort(generator.random((size, cls.symbols)), 1))
        colours = torch.from_numpy(generator.integers(cls.symbols, size=(size, cls.symbols)))
        where = symbols.argsort(1).gather(1, (symbols + 1) % cls.symbols)
        return symbols, colours, colours.gather(1, where)


class Projections(Small):
    """One attention layer on a directed relation, with three projections, one, or none."""

    name = "projections"
    question = "What do separate projections of queries, keys and values express that the input itself cannot?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Separate projections find a direction that the input itself cannot",
        FAILS: "Separate projections are no better than the input itself",
    }
    criteria = (
        Criterion("C009", DATED, "Share of tokens that find the colour of the next symbol, with separate W_Q, W_K and "
                  "W_V minus with X itself in all three places", LEAST),
    )  # fmt: skip
    looks: ClassVar[tuple[int, ...]] = (20, 40)
    variants: ClassVar[Mapping[str, int]] = {"three": 3, "one for all": 1, "X itself": 0}

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """The accuracy on new rows."""
        found = {}
        for name, projections in self.variants.items():
            torch.manual_seed(seed)
            generator, model = np.random.default_rng(seed), NextColour(projections)

            def loss(_: int, model: NextColour = model, generator: np.random.Generator = generator) -> Tensor:
                symbols, colours, answer = model.tokens(generator, 64)
                return nn.functional.cross_entropy(model(symbols, colours).flatten(0, 1), answer.flatten())

            fit(model, loss, replace(Training(), steps=3 if quick else 500, warmup=20, weight_decay=0.0))
            symbols, colours, answer = model.tokens(np.random.default_rng([9, seed]), 500)
            with torch.no_grad():
                right = (model(symbols, colours).argmax(-1) == answer).double().mean().item()
            found[name] = {"accuracy": right}
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Against the input itself, as the claim says."""
        return {"C009": [minus(results, "three", "X itself", "measured.accuracy")]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means; with W_Q = W_K scores are symmetric."""
        means = means_of(results, list(self.variants), "measured.accuracy")
        return {"C009": f"Means: {means}; by chance 0.08. With W_Q = W_K no relation has a direction."}
