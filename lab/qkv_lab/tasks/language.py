"""The task of language modelling on a text corpus, with a check for attention sinks on the first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from qkv.errors import InputError, one_of
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads, tokens
from qkv_lab.task import Batch, Measured, Training, with_entries
from qkv_lab.tokens import Baselines, Prepared, baselines, prepare, prepare_more

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATED, CHECKED = 8192, 2048
"""The approximate numbers of held-out tokens for `evaluate` and for `check`."""
PART = 4096
"""The number of tokens in a batch of `evaluate`."""


@dataclass(frozen=True)
class Language:
    """Predict each token of a text from the tokens before it.

    Sequences are windows at random positions of the corpus. Some documents, or the end of each, are held out. The loss
    is printed beside those of a unigram and a bigram model (`qkv_lab.tokens.baselines`). A model whose prefix is the
    whole context has no causal mask: its loss then leaks the next token, which `writing_loss` shows.

    >>> Language(context=32).batch(step=0, size=3, seed=0)["ids"].shape
    torch.Size([3, 33])
    """

    name: ClassVar[str] = "language"

    corpus: str = "library"
    """``library`` (Python's standard library), ``package:NAME`` (an installed package), ``shakespeare``, ``hf:NAME``,
    or the path of a text file or folder."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """``bytes``, or byte-level BPE trained on the corpus."""
    vocab_size: int = 2048
    """The number of BPE tokens, ``<s>`` included. The byte tokenizer always has 257."""
    context: int = 128
    """The number of tokens that the model reads, and predicts, in a sequence."""
    longest: int | None = None
    """Also evaluate on sequences of so many tokens, more than in training; None for no longer ones."""
    first: Literal["fixed", "random"] = "fixed"
    """The first token of a sequence: always ``<s>``, or the first token of the window."""
    tokens: int | None = None
    """Train on only the first so many tokens of the corpus; on all if None."""
    more: str = ""
    """Further corpora to train on, separated by commas. Their documents that share a passage with the held-out text are
    left out (`qkv_lab.tokens.without_passages`)."""
    more_share: float = 0.5
    """The share of training sequences that come from `more`."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig.llama(d_model=128, layers=4, heads=4))
    """The configuration of the `DecoderLM`; the task sets vocab_size and context."""

    def __post_init__(self) -> None:
        one_of("tokenizer", self.tokenizer, tokens.KINDS)
        one_of("first", self.first, ("fixed", "random"))
        if self.vocab_size < tokens.MIN_VOCAB_SIZE:
            raise InputError(
                f"vocab_size is {self.vocab_size}, expected at least {tokens.MIN_VOCAB_SIZE}: all bytes and <s>"
            )
        if self.context < 2:
            raise InputError(f"context is {self.context}, expected at least 2 tokens")
        if self.longest is not None and self.longest <= self.context:
            raise InputError(f"longest is {self.longest}, expected more than the context, {self.context}, or None")
        if self.tokens is not None and self.tokens <= self.context:
            raise InputError(f"tokens is {self.tokens}, expected more than the context, {self.context}")
        if not 0 <= self.more_share <= 1:
            raise InputError(f"more_share is {self.more_share}, expected a share from 0 to 1")

    @staticmethod
    def training() -> Training:
        """Training settings for a few minutes on one core, after which the model writes text that looks like Python."""
        return Training(steps=600, batch=16, lr=3e-3, warmup=60)

    def build(self) -> nn.Module:
        """A new model with random weights; `InputError` if the corpus cannot be loaded or is too small."""
        vocabulary = self._data.vocab_size
        self._train, self._more, self.unseen  # noqa: B018  (raises if a corpus is too small)
        needed = {"vocab_size": vocabulary, "context": self.longest or self.context}
        return DecoderLM(with_entries(self.model, **needed))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` (size, context + 1): windows at random positions; every token but the first is a target."""
        draw = np.random.default_rng((seed, step))
        starts = draw.integers(0, len(self._train) - self._window_length + 1, size)
        ids = self._windows(self._train, starts)
        if self._more is not None:
            starts = draw.integers(0, len(self._more) - self._window_length + 1, size)
            chosen = torch.from_numpy(draw.random(size) < self.more_share)
            ids = torch.where(chosen[:, None], self._windows(self._more, starts), ids)
        return {"ids": ids}

    def count(self, batch: Batch) -> int:
        """The number of tokens without the first of each sequence."""
        size, width = batch["ids"].shape
        return size * (width - 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats per token."""
        loss: Tensor = model.loss(batch["ids"])  # type: ignore[operator]
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Measured:
        """Losses on held-out text, beside those of a unigram and a bigram model of the training text.

        Returns:
            ``loss``, ``unigram_loss`` and ``bigram_loss`` in nats per token; ``bits_per_byte``,
            ``unigram_bits_per_byte`` and ``bigram_bits_per_byte``, which compare between tokenizers; ``perplexity``.
            The baselines are smoothed as in `qkv_lab.tokens.baselines` and know the text of `corpus`, not of `more`.
            If the model has a prefix, ``writing_loss``: see `writing_loss`. If `longest` is given, ``places``, such as
            ``"33-64"``, and ``loss_by_place``, the loss at these positions of sequences of `longest` tokens;
            ``longest_loss`` is that at the last of them.
        """
        ids = self.unseen
        losses = self._token_losses(model, ids)
        loss = float(losses.mean())
        lengths = tokens.byte_lengths(self._data.tokenizer)
        bits = 1 / log(2) / float(lengths[ids[:, 1:].numpy()].mean())
        known = self._baselines
        found: dict[str, Any] = {
            "loss": loss,
            "unigram_loss": known.unigram,
            "bigram_loss": known.bigram,
            "bits_per_byte": loss * bits,
            "unigram_bits_per_byte": known.unigram * bits,
            "bigram_bits_per_byte": known.bigram * bits,
            "perplexity": float(torch.tensor(loss).exp()),
        }
        if self.model.prefix:
            found["writing_loss"] = self.writing_loss(model)
        return found | (self._by_place(model) if self.longest else {})

    def writing_loss(self, model: nn.Module) -> float:
        """The loss in nats of the next token when the model reads only the tokens before it, as it does when it writes.

        It is a mean over held-out sequences and 8 lengths, up to the whole context. With a causal mask the loss of a
        whole sequence is the same at these positions; without one the whole sequence contains the next tokens.
        """
        lengths = sorted({-(-self.context * part // 8) for part in range(1, 9)})
        losses = [self._token_losses(model, self.unseen[:, : n + 1])[:, -1] for n in lengths]
        return float(torch.stack(losses).mean())

    def _by_place(self, model: nn.Module) -> dict[str, Any]:
        """The loss at positions from half the trained length on, in ranges of which each is twice as long."""
        assert self.longest is not None
        longer = replace(self, context=self.longest, longest=None)
        losses = self._token_losses(model, longer.unseen).mean(0)
        stops = [self.context]
        while stops[-1] < self.longest:
            stops.append(min(2 * stops[-1], self.longest))
        places = list(zip([self.context // 2, *stops], stops, strict=False))
        by_place = [float(losses[start:stop].mean()) for start, stop in places]
        return {
            "places": [f"{start + 1}-{stop}" for start, stop in places],
            "loss_by_place": by_place,
            "longest_loss": by_place[-1],
        }

    @torch.no_grad()
    def _token_losses(self, model: nn.Module, ids: Int[Tensor, "texts width"]) -> Float[Tensor, "texts n"]:
        """The loss of every token of some texts but the first, in nats, on the CPU."""
        device = next(model.parameters()).device
        found = []
        for part in ids.split(max(1, PART // (ids.shape[1] - 1))):
            logits = model(part[:, :-1].to(device)).transpose(1, 2)
            found.append(nn.functional.cross_entropy(logits, part[:, 1:].to(device), reduction="none").cpu())
        return torch.cat(found)

    @cached_property
    def _baselines(self) -> Baselines:
        return baselines(self._train, self.unseen.numpy(), self._data.vocab_size)

    def check(self, model: nn.Module) -> Measured:
        """Attention statistics of every head on held-out text: see `qkv_lab.heads.attention`."""
        ids = self.unseen[: max(1, CHECKED // self.context), :-1]
        return heads.attention(model, ids)  # type: ignore[arg-type]  # `build` returns a DecoderLM

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """``first_token``: the mean weight on the first token in every head.

        If `longest` is given, also ``places``: the loss by position, within the trained length and beyond it.
        """
        found = {"first_token": _first_token_figure(np.asarray(self.check(model)["sink"]), self)}
        return found | ({"places": _places_figure(self._by_place(model), self)} if self.longest else {})

    def files(self) -> Mapping[str, str]:
        """tokenizer.json, which prepends ``<s>`` if the training texts began with it."""
        made = self._data.tokenizer
        return {"tokenizer.json": tokens.with_bos(made) if self.first == "fixed" else made}

    @property
    def _window_length(self) -> int:
        """The number of corpus tokens in a sequence of context + 1 tokens: one fewer if it begins with ``<s>``."""
        return self.context if self.first == "fixed" else self.context + 1

    @cached_property
    def _data(self) -> Prepared:
        return prepare(self.corpus, self.tokenizer, self.vocab_size)

    @cached_property
    def _train(self) -> Integer[np.ndarray, " tokens"]:
        """The training tokens."""
        train = self._data.train
        if self.tokens is not None and self.tokens > len(train):
            raise InputError(f"tokens is {self.tokens:,}, but {self.corpus} has {len(train):,} to train on")
        found = train[: self.tokens]
        self._check_length(found, "to train on")
        return found

    @cached_property
    def _more(self) -> Integer[np.ndarray, " tokens"] | None:
        """The tokens of the further corpora; None if there are none."""
        names = [name.strip() for name in self.more.split(",") if name.strip()]
        if not names:
            return None
        found = prepare_more(names, self.corpus, self._data)
        self._check_length(found, "more to train on")
        return found

    @cached_property
    def unseen(self) -> Int[Tensor, "windows width"]:
        """The held-out sequences of `evaluate`: about 8,192 tokens."""
        return self.held_out(max(8, EVALUATED // self.context))

    def held_out(self, most: int) -> Int[Tensor, "windows width"]:
        """At most so many windows, evenly spaced over the held-out text, without overlap."""
        tokens = self._data.held_out
        self._check_length(tokens, "held out")
        windows = len(tokens) // self._window_length
        count = min(windows, most)
        return self._windows(tokens, np.arange(count) * windows // count * self._window_length)

    def _check_length(self, tokens: Integer[np.ndarray, " tokens"], what: str) -> None:
        if len(tokens) < self._window_length:
            raise InputError(
                f"corpus is {self.corpus!r}, which has {len(tokens):,} tokens {what}, expected a context of "
                f"{self._window_length:,}: a larger corpus, or a smaller context"
            )

    def _windows(
        self, tokens: Integer[np.ndarray, " tokens"], starts: Int[np.ndarray, " size"]
    ) -> Int[Tensor, "size width"]:
        """Windows that start at these positions, with ``<s>`` prepended if `first` is fixed."""
        found = torch.from_numpy(tokens[starts[:, None] + np.arange(self._window_length)].astype(np.int64))
        return nn.functional.pad(found, (1, 0), value=self._data.bos) if self.first == "fixed" else found


def _first_token_figure(weight: np.ndarray, task: Language) -> Figure:
    """The mean weight on the first token as a heatmap, layers by heads."""
    from qkv.profiler.data.frames import percent
    from qkv_lab import draw

    layers, columns = weight.shape
    sinks = int((weight > heads.THRESHOLD).sum()) or "none"
    what, begins = ("<s>", "<s>") if task.first == "fixed" else ("The first token", "any token")
    figure, (axes,) = draw.panels(
        f"{what} gets more than {percent(heads.THRESHOLD)} of the attention in {sinks} of {weight.size} heads",
        f"Mean over later queries; {task.context} tokens of held-out text ({task.corpus}), the first is {begins}.",
        width=max(5.4, 0.6 * columns + 1.8),
        height=0.5 * layers + 0.6,
    )
    names = [[str(i) for i in range(n)] for n in (layers, columns)]
    image = draw.heatmap(axes, weight, rows=names[0], columns=names[1], vmax=1.0)
    axes.set(xlabel="head", ylabel="layer", aspect="auto")
    draw.write_cells(axes, image, "{:.2f}".format)
    draw.scale(image, axes, "mean weight on the first token")
    return figure


def _places_figure(found: Mapping[str, Any], task: Language) -> Figure:
    """The loss in ranges of positions, of which the first is within the trained length."""
    from qkv_lab.draw import COLOURS, panels

    rise = found["longest_loss"] - found["loss_by_place"][0]
    says = f"rises by {rise:.2f}" if rise > 0 else f"falls by {-rise:.2f}"
    figure, (axes,) = panels(
        f"Trained on {task.context} tokens, the loss {says} nats per token up to position {task.longest}",
        f"Held-out text ({task.corpus}), {task.model.positions} positions.",
        width=5.6,
        height=2.8,
    )
    shades = [COLOURS[0], *[COLOURS[1]] * (len(found["places"]) - 1)]
    axes.bar(found["places"], found["loss_by_place"], color=shades)
    axes.set(xlabel="position (orange: beyond the trained length)", ylabel="loss (nats per token)")
    return figure
