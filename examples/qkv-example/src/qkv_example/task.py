"""A task of the lab: say the first symbol again. The last query has to attend to the first key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from qkv.models import DecoderConfig, DecoderLM
from qkv_lab import Training, heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class First:
    """Random symbols, a separator, and the first symbol again: a b c SEP a."""

    name: ClassVar[str] = "first"

    length: int = 8
    """Symbols before the separator."""
    symbols: int = 14
    """How many kinds of symbols there are."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(d_model=32, layers=1, heads=2))

    @staticmethod
    def training() -> Training:
        """Settings with which the model learns the task."""
        return Training(steps=300, batch=64, lr=3e-3, warmup=50)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        return DecoderLM(replace(self.model, vocab_size=heads.FIRST_SYMBOL + self.symbols, context=self.length + 2))

    def sequences(self, generator: np.random.Generator, size: int, *, unseen: bool) -> Tensor:
        """Token ids (size, length + 2), held out or not."""
        first, last = heads.FIRST_SYMBOL, heads.FIRST_SYMBOL + self.symbols
        drawn = heads.drawn(lambda n: generator.integers(first, last, (n, self.length)), size, unseen=unseen)
        return torch.cat([drawn, torch.full((size, 1), heads.SEPARATOR), drawn[:, :1]], 1)

    def batch(self, step: int, size: int, seed: int) -> Mapping[str, Tensor]:
        """``ids`` (size, length + 2)."""
        return {"ids": self.sequences(np.random.default_rng((seed, step)), size, unseen=False)}

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """One prediction for each sequence."""
        return len(batch["ids"])

    def loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross-entropy in nats of the last token."""
        return heads.loss_after(model, batch["ids"], self.length + 1)

    def held_out(self) -> Tensor:
        """Sequences that are never trained on."""
        return self.sequences(np.random.default_rng(0), 200, unseen=True)

    def evaluate(self, model: Any) -> Mapping[str, Any]:
        """``accuracy``: the share of held-out sequences that end right."""
        ids = self.held_out()
        return {"accuracy": (heads.continued(model, ids[:, :-1], 1) == ids[:, -1:]).double().mean().item()}

    def check(self, model: Any) -> Mapping[str, Any]:
        """``weight`` (layer, head): the weight of the last query on the first key; ``best``: the largest."""
        weights = heads.maps(model, self.held_out()[:, :-1])[..., -1, 0].mean(0)
        return {"weight": weights.tolist(), "best": float(weights.max())}

    def figures(self, model: Any) -> Mapping[str, Figure]:
        """No pictures."""
        return {}

    def files(self) -> Mapping[str, str]:
        """No files beside the model."""
        return {}
