"""Experiment: streaming with caches that keep or evict the first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loss import token_loss
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Results
from qkv_lab.experiments.small import DATED, PLAIN, not_learnt, setting
from qkv_lab.task import Measured
from qkv_lab.tasks.backcopy import Backcopy

BUDGET, KEPT = 4, 1  # cache size in keys, and the number of first keys that StreamingLLM never evicts
TRAINED, LENGTH = 64, 128  # tokens per text in training and in the test
TEXTS = 256
BUCKET = 8  # positions per point in the figure
LEAST = 0.01  # nats; smaller rises of the loss are ignored
CACHES: dict[str, Callable[[], Cache]] = {
    "all keys": lambda: Full(LENGTH),
    "last keys": lambda: Sliding(BUDGET),
    "first + last": lambda: Sinks(KEPT, BUDGET - KEPT),
}
ALL, WINDOW, SINKS = CACHES
LEARNED, KEY = "learned sink", "key bias"


class Streaming(Experiment):
    """Bigram-Backcopy with rotary positions, evaluated beyond its training length with three kinds of caches."""

    name = "streaming"
    question = "How much does the loss rise when the first token is evicted, and does keeping this token avoid it?"
    criteria = (
        Criterion("C101", DATED, f"Rise of the loss (nats) when a cache of {BUDGET} keys evicts the first token, "
                  "without a sink of the model's own minus with", LEAST,
                  remark="Losses from the 64 tokens of training up to 128, with all keys: "
                         "{measured.beyond.all keys of plain}; with the last 4: {measured.beyond.last keys of plain}; "
                         "with the first and the last 3: {measured.beyond.first + last of plain} (StreamingLLM, Xiao "
                         "et al. 2024)."),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """Models with plain softmax, with a learned sink logit, and with a learned key whose value is 0."""
        own: dict[str, dict[str, Any]] = {PLAIN: {}, LEARNED: {"sink": True}, KEY: {"key_bias": True}}
        return {variant: _setting(seed, quick, **parts) for variant, parts in own.items()}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """The loss in nats by position for each cache, and its means over two spans.

        ``inside`` is the span after the first token was evicted, up to the training length; ``beyond`` is everything
        after the training length.
        """
        assert isinstance(model, DecoderLM)
        assert isinstance(setting.task, Backcopy)
        batch = replace(setting.task, length=LENGTH).held_out(TEXTS)
        ids = torch.cat([batch["ids"], batch["targets"][:, -1:]], 1)
        nats = {name: token_loss(model, ids, make).mean(0).numpy() for name, make in CACHES.items()}
        return {
            "nats": {name: x.reshape(-1, BUCKET).mean(1).tolist() for name, x in nats.items()},
            "inside": {name: float(x[BUDGET:TRAINED].mean()) for name, x in nats.items()},
            "beyond": {name: float(x[TRAINED:].mean()) for name, x in nats.items()},
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        plain = rise(results, PLAIN, WINDOW)
        found = [
            Effect("the rise without a sink of the model's own", list(plain), bound=LEAST,
                   above=True, premise=True)
        ]  # fmt: skip
        for variant in (LEARNED, KEY):
            found.append(
                Effect(variant, list((plain - rise(results, variant, WINDOW)).dropna()),
                       unless=not_learnt(results, PLAIN, variant))
            )  # fmt: skip
        return {"C101": found}

    def lines(self, results: Results) -> Lines:
        nats = {name: results.rows(PLAIN, f"measured.nats.{name}") for name in CACHES}
        x = [BUCKET * (i + 0.5) for i in range(LENGTH // BUCKET)]
        found = {name: nats[name] - nats[ALL] for name in (WINDOW, SINKS)}
        return Lines(x, found, "position (tokens)", f"rise over all keys, {PLAIN} (nats)")


def rise(results: Results, variant: str, cache: str) -> pd.Series:
    """The rise of the loss over that of the full cache, in nats, for each seed, within the training length."""
    one, all_ = (results.by_seed(variant, f"measured.inside.{name}") for name in (cache, ALL))
    return one - all_


def _setting(seed: int, quick: bool, **parts: Any) -> Setting:
    """A run with a high learning rate and strong weight decay, so that the head depends strongly on its sink."""
    task = Backcopy(
        length=TRAINED, model=DecoderConfig(layers=1, heads=1, d_model=64, positions="rotary", **parts)
    )  # fmt: skip
    return setting(task, seed, quick, steps=800, lr=1e-2, weight_decay=1.0)
