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
from qkv.lab.experiments.base import Conclusion, Experiment, Results, Setting, Verdict, holds_if, larger, summary
from qkv.lab.task import Measured
from qkv.lab.tasks.backcopy import Backcopy
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.token_loss import token_loss

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
PLAIN, LEARNED, KEY = "plain", "learned sink", "key bias"


class Streaming(Experiment):
    """Bigram-Backcopy with rotary positions, evaluated beyond its training length with three kinds of caches."""

    name = "streaming"
    question = "How much does the loss rise when the first token is evicted, and does keeping this token avoid it?"
    claims = ("C101",)

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """Models with plain softmax, with a learned sink logit, and with a learned key whose value is 0."""
        own: dict[str, dict[str, Any]] = {PLAIN: {}, LEARNED: {"sink": True}, KEY: {"key_bias": True}}
        seeds = range(1 if quick else 3)
        return {variant: [_setting(seed, quick, **parts) for seed in seeds] for variant, parts in own.items()}

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

    def conclude(self, results: Results) -> Conclusion:
        """By the rise of the loss over that of the full cache, on the same tokens."""
        plain, sink, key = (rise(results, variant, WINDOW) for variant in (PLAIN, LEARNED, KEY))
        kept = rise(results, PLAIN, SINKS)
        lost = larger(plain, [0.0], LEAST)
        saved = lost and larger(plain, kept, LEAST)
        helped = lost and any(larger(plain, own, LEAST) for own in (sink, key))
        text = (
            f"When a cache of {BUDGET} keys evicts the first token the loss rises by {summary(plain, 3)} nats without "
            "a sink "
            f"of the model's own, by {summary(sink, 3)} with a learned sink and by {summary(key, 3)} with a learned "
            "key of value "
            f"0. It holds if one of these two rises less than the first, by more than {LEAST} nats and the spread over "
            f"seeds; it cannot be seen unless the first rises by as much."
        )
        far = {name: summary(results.values(PLAIN, f"measured.beyond.{name}"), 3) for name in CACHES}
        paragraph = (
            f"{text} With {KEPT} first and {BUDGET - KEPT} last keys it rises by {summary(kept, 3)}. From the "
            f"{TRAINED} tokens "
            f"of training up to {LENGTH} the first model's loss is {far[ALL]} nats with all keys, {far[WINDOW]} with "
            "the "
            f"last {BUDGET} and {far[SINKS]} with the first and the last {BUDGET - KEPT} (StreamingLLM, Xiao et al. "
            "2024)."
        )
        if not lost:
            title = "This model does not need its first token: a window does not raise its loss"
        elif saved:
            own = " or a learned sink" if helped else ""
            title = f"The loss rises when the first token is evicted; keeping it{own} avoids this"
        else:
            title = "The loss rises when the first token is evicted, and keeping it does not help"
        return Conclusion([Verdict("C101", holds_if(helped, seen=lost), text)], title, paragraph)

    def figure(self, results: Results) -> Figure:
        """The loss with each cache by position, one panel per model."""
        from qkv.lab import draw

        shown = [variant for variant in (PLAIN, LEARNED, KEY) if results.finished(variant)]
        note = (
            f"Bigram-Backcopy, 1 layer × 1 head, rotary positions, trained on {TRAINED} tokens (dotted line); {TEXTS} "
            "held-out "
            f"texts. “Last keys” holds {BUDGET}, “first + last” {KEPT} + {BUDGET - KEPT}; {WINDOW} and {ALL} are "
            "drawn against "
            f"{SINKS}, on the same tokens. {results.note}"
        )
        title = self.conclude(results).title
        figure, panels = draw.panels(title, note, columns=len(shown), width=2.6 * len(shown), height=2.6)
        x = [BUCKET * (i + 0.5) for i in range(LENGTH // BUCKET)]
        low, high = 0.0, LEAST
        for axes, variant in zip(panels, shown, strict=True):
            nats = {name: np.array([o.measured["nats"][name] for o in results.finished(variant)]) for name in CACHES}
            lost = {name: values - nats[SINKS] for name, values in nats.items()}
            low, high = min(low, *(v.min() for v in lost.values())), max(high, *(v.max() for v in lost.values()))
            draw.curves(axes, x, lost)
            axes.axvline(TRAINED, color=draw.MUTED, linewidth=0.8, linestyle=":")
            axes.set_title(variant, loc="left", size=9)
            axes.set_xlabel("position (tokens)")
        for axes in panels:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        panels[0].set_ylabel(f"loss over {SINKS} (nats)")
        panels[0].legend(fontsize=8, frameon=False)
        return figure


def rise(results: Results, variant: str, cache: str) -> list[float]:
    """The rise of the loss over that of the full cache, in nats, for each seed, within the training length."""
    found = [results.values(variant, f"measured.inside.{name}") for name in (cache, ALL)]
    return [a - b for a, b in zip(*found, strict=True)]


def perplexity_by_position(
    model: DecoderLM, ids: Int[Tensor, "b n"], make_cache: Callable[[], Cache], *, chunk: int = 64
) -> Float[np.ndarray, " positions"]:
    """The perplexity of the next token at each of n − 1 positions: e to the mean token loss over texts.

    See `qkv.models.token_loss`. To average over positions, average the logarithms.

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
