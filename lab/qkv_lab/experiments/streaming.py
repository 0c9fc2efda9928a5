"""Experiment on StreamingLLM: the loss when the first tokens are evicted from the cache (Xiao et al. 2024,
arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loss import token_loss
from qkv_lab.experiments.base import Experiment, Results, Setting, paired
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import DATED, mean_of, not_learnt
from qkv_lab.task import Measured
from qkv_lab.tasks.backcopy import Backcopy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
FULL = f"measured.inside.{ALL}"
PLAIN, LEARNED, KEY = "plain", "learned sink", "key bias"


class Streaming(Experiment):
    """Bigram-Backcopy with rotary positions, evaluated beyond its training length with three kinds of caches."""

    name = "streaming"
    question = "How much does the loss rise when the first token is evicted, and does keeping this token avoid it?"
    criteria = (
        Criterion("C101", DATED, f"Rise of the loss (nats) when a cache of {BUDGET} keys evicts the first token, "
                  "without a sink of the model's own minus with", LEAST),
    )  # fmt: skip
    looks = (10, 20, 40)

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
        nats = {name: np.log(perplexity_by_position(model, ids, make)) for name, make in CACHES.items()}
        return {
            "nats": {name: x.reshape(-1, BUCKET).mean(1).tolist() for name, x in nats.items()},
            "inside": {name: float(x[BUDGET:TRAINED].mean()) for name, x in nats.items()},
            "beyond": {name: float(x[TRAINED:].mean()) for name, x in nats.items()},
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the rise of the loss over that of the full cache, on the same tokens."""
        plain = rise(results, PLAIN, WINDOW)
        found = [
            Effect("the rise without a sink of the model's own", list(plain.values()), (PLAIN,), bound=LEAST,
                   above=True, premise=True)
        ]  # fmt: skip
        for variant in (LEARNED, KEY):
            found.append(
                Effect(variant, paired(plain, rise(results, variant, WINDOW)), (PLAIN, variant),
                       unless=not_learnt(results, PLAIN, variant))
            )  # fmt: skip
        return {"C101": found}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The rises themselves, and losses beyond the training length."""
        each = ", ".join(
            f"{v} {np.mean(list(rise(results, v, WINDOW).values())):.3f}" for v in results.by_variant(FULL)
        )
        kept = np.mean(list(rise(results, PLAIN, SINKS).values())) if results.finished(PLAIN) else float("nan")
        far = {name: mean_of(results.values(PLAIN, f"measured.beyond.{name}")) for name in CACHES}
        return {
            "C101": f"Rises: {each} nats. With {KEPT} first and {BUDGET - KEPT} last keys the first model's is "
            f"{kept:.3f}. From the {TRAINED} tokens of training up to {LENGTH} its loss is {far[ALL]} nats with all "
            f"keys, {far[WINDOW]} with the last {BUDGET} and {far[SINKS]} with the first and the last {BUDGET - KEPT} "
            "(StreamingLLM, Xiao et al. 2024)."
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Whether evicting the first token costs anything, and what avoids it."""
        plain = np.mean(list(rise(results, PLAIN, WINDOW).values())) if results.finished(PLAIN) else float("nan")
        end = "; a sink of the model's own avoids this" if verdicts["C101"].holds == HOLDS else ""
        return f"Evicting the first token raises the loss by {plain:.3f} nats{end} ({results.seeds} seeds)"

    def figure(self, results: Results) -> Figure:
        """The rise of the loss by model and cache, and by position for the model with plain softmax."""
        from qkv_lab import draw

        note = (
            f"Bigram-Backcopy, 1 layer × 1 head, rotary positions, trained on {TRAINED} tokens; {TEXTS} held-out "
            f"texts. “Last {BUDGET}” is a window; “first + last” holds {KEPT} first and {BUDGET - KEPT} last keys. "
            f"Dots: seeds, joined by thin lines; bars: mean and interval. {results.note}"
        )
        figure, (left, right) = draw.panels(self.conclude(results).title, note, columns=2, width=8.8, height=2.9)
        shown = [variant for variant in (PLAIN, LEARNED, KEY) if results.finished(variant)]
        cases = {f"{v},\nlast {BUDGET}": rise(results, v, WINDOW) for v in shown}
        draw.by_seed(left, {**cases, f"{PLAIN},\nfirst + last": rise(results, PLAIN, SINKS)})
        left.axhline(0, color=draw.MUTED, linewidth=0.8)
        left.set(ylabel=f"rise of the loss, positions {BUDGET}–{TRAINED} (nats)")
        left.tick_params(axis="x", labelsize=7.5)
        x = [BUCKET * (i + 0.5) for i in range(LENGTH // BUCKET)]
        nats = {name: np.array([o.measured["nats"][name] for o in results.finished(PLAIN)]) for name in CACHES}
        names = {WINDOW: f"last {BUDGET}", SINKS: "first + last"}
        draw.curves(right, x, {what: nats[name] - nats[ALL] for name, what in names.items()})
        right.axvline(TRAINED, color=draw.MUTED, linewidth=0.8, linestyle=":")
        right.text(TRAINED, right.get_ylim()[1], " beyond the training length", size=7, color=draw.MUTED, va="top")
        right.axhline(0, color=draw.MUTED, linewidth=0.8)
        right.set(xlabel="position (tokens)", ylabel="rise over all keys (nats)", xlim=(0, LENGTH))
        right.set_title(PLAIN, loc="left", size=9)
        right.legend(fontsize=8, frameon=False)
        return figure


def rise(results: Results, variant: str, cache: str) -> dict[int, float]:
    """The rise of the loss over that of the full cache, in nats, for each seed, within the training length."""
    one, all_ = (results.by_seed(variant, f"measured.inside.{name}") for name in (cache, ALL))
    return {seed: one[seed] - all_[seed] for seed in one}


def perplexity_by_position(
    model: DecoderLM, ids: Int[Tensor, "b n"], make_cache: Callable[[], Cache], *, chunk: int = 64
) -> Float[np.ndarray, " positions"]:
    """The perplexity of the next token at each of n − 1 positions: e to the mean token loss over texts.

    See `qkv.models.loss`. To average over positions, average the logarithms.

    Args:
        model: the model; with rotary, ALiBi or no positions if the texts are longer than its context.
        ids: texts.
        make_cache: creates the cache of one layer.
        chunk: tokens per step; it affects memory, not the result.

    >>> from qkv.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2, positions="rotary")).eval()
    >>> perplexity_by_position(model, torch.arange(9)[None], lambda: Sliding(4)).shape
    (8,)
    """
    found: np.ndarray = token_loss(model, ids, make_cache, chunk=chunk).mean(0).exp().cpu().numpy()
    return found


def _setting(seed: int, quick: bool, **parts: Any) -> Setting:
    """A run with a high learning rate and strong weight decay, so that the head depends strongly on its sink."""
    config = DecoderConfig(layers=1, heads=1, d_model=64, positions="rotary", **parts)
    steps: dict[str, Any] = {"steps": 40, "warmup": 10} if quick else {"steps": 800, "evaluate_every": 800}
    training = replace(Backcopy.training(), lr=1e-2, weight_decay=1.0, seed=seed, **steps)
    return Setting(Backcopy(length=TRAINED, model=config), training)
