"""Language modelling: what comes next in a text; do heads park their attention on its first token?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.lab import settings, tokenizers, track
from qkv.lab.task import Batch, Measured, Training
from qkv.lab.tokens import Prepared, prepare
from qkv.models.config import one_of
from qkv.models.decoder import DecoderConfig, DecoderLM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATED, CHECKED = 8192, 2048
"""Held-out tokens that are predicted by `evaluate`, and read by `check`, about."""
PART = 4096
"""Tokens that `evaluate` predicts at a time."""


@dataclass(frozen=True)
class Language:
    """Predict each token of a text from those before it.

    Sequences are windows of the corpus at random places. What is held out is other documents, or the end of each.

    >>> Language(context=32).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 33])
    """

    name: ClassVar[str] = "language"

    corpus: str = "library"
    """``library`` (Python's own), ``shakespeare``, ``hf:NAME``, or the path of a text file or a folder."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """``bytes``, or byte-level BPE trained on the corpus."""
    vocab_size: int = 2048
    """Tokens of BPE, ``<s>`` included. Bytes and ``<s>`` are 257."""
    context: int = 128
    """Tokens the model reads, and predicts, in a sequence."""
    first: Literal["fixed", "random"] = "fixed"
    """The first token read: always ``<s>``, or whichever the window begins with."""
    tokens: int | None = None
    """Train on this many tokens of the corpus, again and again; on all if None."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig.llama(d_model=128, layers=4, heads=4))
    """Of the model; its vocabulary and context are as the task has them."""

    def __post_init__(self) -> None:
        one_of("tokenizer", self.tokenizer, tokenizers.KINDS)
        one_of("first", self.first, ("fixed", "random"))
        if self.vocab_size < tokenizers.SMALLEST:
            raise InputError(
                f"vocab_size is {self.vocab_size}, expected at least {tokenizers.SMALLEST}: all bytes, <s>"
            )
        if self.context < 2:
            raise InputError(f"context is {self.context}, expected at least 2 tokens")
        if self.tokens is not None and self.tokens <= self.context:
            raise InputError(f"tokens is {self.tokens}, expected more than the context, {self.context}")

    @staticmethod
    def training() -> Training:
        """Some minutes on one core: past words and indentation, to the look of Python."""
        return Training(steps=600, batch=16, lr=3e-3, warmup=60)

    def build(self) -> nn.Module:
        """The model, once the corpus is there and large enough."""
        vocabulary = self._data.vocab_size
        self._train, self.unseen  # noqa: B018  (a corpus that is too small is refused now)
        return DecoderLM(settings.fitted(self.model, vocab_size=vocabulary, context=self.context))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Windows at random places: ids (size, context + 1), each token but the first a target."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self._train) - self._width + 1, size)
        return {"ids": self._cut(self._train, starts)}

    def count(self, batch: Batch) -> int:
        """All tokens but the first of each sequence."""
        size, width = batch["ids"].shape
        return size * (width - 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats a token."""
        loss: Tensor = model.loss(batch["ids"])  # type: ignore[operator]
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Measured:
        """Loss in nats a token, perplexity, and bits a byte (of text: tokens of any size compare), held out."""
        device = next(model.parameters()).device
        ids = self.unseen
        parts = ids.split(max(1, PART // self.context))
        loss = sum(float(self.loss(model, {"ids": x.to(device)})) * len(x) for x in parts) / len(ids)
        lengths = tokenizers.byte_lengths(self._data.tokenizer)
        bytes_per_token = float(lengths[ids[:, 1:].numpy()].mean())
        return {
            "loss": loss,
            "bits_per_byte": loss / log(2) / bytes_per_token,
            "perplexity": float(torch.tensor(loss).exp()),
        }

    def check(self, model: nn.Module) -> Measured:
        """Where each head looks in held-out text, and what its first token does: see `qkv.lab.track.attention`."""
        ids = self.unseen[: max(1, CHECKED // self.context), :-1]
        return track.attention(model, ids)  # type: ignore[arg-type]  # `build` made it: a DecoderLM

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """The weight of the first token in every head."""
        return {"first_token": _first_token_figure(np.asarray(self.check(model)["sink"]), self)}

    def files(self) -> Mapping[str, str]:
        """The tokenizer, which begins a text with ``<s>`` if the model has learnt texts that begin so."""
        made = self._data.tokenizer
        return {"tokenizer.json": tokenizers.starting(made) if self.first == "fixed" else made}

    @property
    def _width(self) -> int:
        """Tokens of text in a sequence: one is only a target, and `<s>` takes the place of another."""
        return self.context if self.first == "fixed" else self.context + 1

    @cached_property
    def _data(self) -> Prepared:
        return prepare(self.corpus, self.tokenizer, self.vocab_size)

    @cached_property
    def _train(self) -> Integer[np.ndarray, " tokens"]:
        """What the model is trained on."""
        there = self._data.train
        if self.tokens is not None and self.tokens > len(there):
            raise InputError(f"tokens is {self.tokens:,}, but {self.corpus} has {len(there):,} to train on")
        found = there[: self.tokens]
        self._check_length(found, "to train on")
        return found

    @cached_property
    def unseen(self) -> Int[Tensor, "windows width"]:
        """Held-out sequences, evenly over the text and none over another."""
        there = self._data.held_out
        self._check_length(there, "held out")
        most = len(there) // self._width
        count = min(most, max(8, EVALUATED // self.context))
        return self._cut(there, np.arange(count) * most // count * self._width)

    def _check_length(self, tokens: Integer[np.ndarray, " tokens"], what: str) -> None:
        if len(tokens) < self._width:
            raise InputError(
                f"corpus: {self.corpus} has {len(tokens):,} tokens {what}, expected a context of {self._width:,}: "
                "a larger corpus, or a smaller context"
            )

    def _cut(
        self, tokens: Integer[np.ndarray, " tokens"], starts: Int[np.ndarray, " size"]
    ) -> Int[Tensor, "size width"]:
        """Windows from these places on, after `<s>` if it comes first."""
        found = torch.from_numpy(tokens[starts[:, None] + np.arange(self._width)].astype(np.int64))
        return nn.functional.pad(found, (1, 0), value=self._data.bos) if self.first == "fixed" else found


def _first_token_figure(weight: np.ndarray, task: Language) -> Figure:
    """Layers downwards, heads to the right; the mean weight of the first token as colour and number."""
    from qkv.figures.style import percent
    from qkv.lab.draw import heatmap, panels

    layers, heads = weight.shape
    sinks = int((weight > track.THRESHOLD).sum())
    what = "<s>" if task.first == "fixed" else "The first token"
    where = f"in {sinks or 'none'} of {weight.size} heads"
    begins = "<s>" if task.first == "fixed" else "any token"
    figure, (axes,) = panels(
        f"{what} gets more than {percent(track.THRESHOLD)} of the attention {where}",
        f"Mean over later queries; {task.context} tokens of held-out text ({task.corpus}), the first is {begins}.",
        width=max(5.4, 0.6 * heads + 1.8),
        height=0.5 * layers + 0.6,
    )
    names = [[str(i + 1) for i in range(n)] for n in (layers, heads)]
    image = heatmap(axes, weight, rows=names[0], columns=names[1], most=1.0)
    for (layer, head), value in np.ndenumerate(weight):
        ink = "white" if value > 0.6 else "black"
        axes.text(head, layer, f"{value:.2f}", ha="center", va="center", size=8, color=ink)
    axes.set(xlabel="head", ylabel="layer, from the input on", aspect="auto")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("mean weight on the first token", size=9)
    bar.ax.tick_params(labelsize=8)
    return figure
