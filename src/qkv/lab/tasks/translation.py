"""Translation: English to French by a grammar, where the right alignment of every word is known."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.lab import grammar, sentences
from qkv.lab.grammar import Pair
from qkv.lab.task import Batch, Measured, Training
from qkv.lab.translation import (
    END,
    PAD,
    START,
    VOCABULARY,
    cross_weights,
    greedy,
    padded,
    vocabularies,
    vocabulary_file,
)
from qkv.models import EncoderDecoder, EncoderDecoderConfig, RNNSeq2Seq, RNNSeq2SeqConfig
from qkv.models.config import one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "rnn": {"attention": "none"},
    "bahdanau": {"attention": "bahdanau"},
    "luong": {"attention": "luong-general", "input_feeding": True},
    "luong-local": {"attention": "luong-general", "input_feeding": True, "kind": "local-p", "half_width": 5},
    "transformer": {},
}  # fmt: skip
LIMITS = (7, 11, 15, 20, 30)
"""The longest sources, in words, of each group by length."""
EVERYWHERE = frozenset({"the", "a", "an", "some", "and", "not", "of", "to"})
"""Words that do not make two sentences alike."""
TOGETHER = 4
"""Steps whose sentences are shared out by length."""
ONE_OF = 10
"""One of so many sentences is held out."""


@dataclass(frozen=True)
class Translation:
    """English sentences of a grammar (`qkv.lab.grammar`) to be said in French, by one of five kinds of model.

    >>> Translation().batch(step=0, size=3, seed=0)["source"].shape[0]
    3
    """

    name: ClassVar[str] = "translation"

    architecture: Literal["rnn", "bahdanau", "luong", "luong-local", "transformer"] = "bahdanau"
    """An `RNNSeq2Seq` without attention or with that of Bahdanau or Luong (general score and input feeding, over all
    words or local-p), or an `EncoderDecoder`."""
    d_model: int = 128
    """Size of states, or of the residual stream; embeddings of a recurrent model have half of it."""
    layers: int | None = None
    """Of encoder and decoder each; 1 of a recurrent model and 2 of a Transformer if None."""
    heads: int = 4
    """Of a Transformer."""
    dropout: float = 0.0
    max_words: int = 30
    """Of a source, at most."""
    held_out: int = 60
    """Sentences of each group by length that metrics are measured on."""

    def __post_init__(self) -> None:
        one_of("architecture", self.architecture, tuple(ARCHITECTURES))
        if not grammar.SHORTEST <= self.max_words <= LIMITS[-1]:
            raise InputError(f"max_words is {self.max_words}, expected {grammar.SHORTEST} to {LIMITS[-1]}")
        if self.held_out < 1:
            raise InputError(f"held_out is {self.held_out}, expected at least 1")

    @staticmethod
    def training() -> Training:
        """Settings that teach it."""
        return Training(steps=1400, batch=32, lr=4e-3, warmup=100, weight_decay=0.01)

    @property
    def model(self) -> RNNSeq2SeqConfig | EncoderDecoderConfig:
        """Of the architecture."""
        source, target = map(len, vocabularies())
        if self.architecture == "transformer":
            return EncoderDecoderConfig(
                source, target, context=4 * LIMITS[-1], d_model=self.d_model, layers=self.layers or 2, heads=self.heads,
                d_hidden=2 * self.d_model, place="pre", dropout=self.dropout,
            )  # fmt: skip
        return RNNSeq2SeqConfig(
            source, target, d_embedding=max(1, self.d_model // 2), d_hidden=self.d_model, layers=self.layers or 1,
            dropout=self.dropout, **ARCHITECTURES[self.architecture],
        )  # fmt: skip

    def build(self) -> RNNSeq2Seq | EncoderDecoder:
        """The model, with initial weights."""
        config = self.model
        return RNNSeq2Seq(config) if isinstance(config, RNNSeq2SeqConfig) else EncoderDecoder(config)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``source`` (size, s), and ``target`` (size, t) from `START` to `END`; none of them is held out.

        The sentences of every four steps are drawn together and shared out by length, for less padding.
        """
        rng = Random(f"{seed} {step // TOGETHER}")
        pairs: list[Pair] = []
        while len(pairs) < TOGETHER * size:
            pair = sentences.sentence(rng, self.max_words)
            if not is_held_out(pair):
                pairs.append(pair)
        pairs.sort(key=lambda pair: len(pair.target))
        shares = rng.sample(range(TOGETHER), TOGETHER)
        return tensors(pairs[shares[step % TOGETHER] * size :][:size])

    def count(self, batch: Batch) -> int:
        """Words and ends to predict."""
        return int((batch["target"][:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats a word of the target."""
        found: Tensor = model.loss(batch["source"], batch["target"])  # type: ignore[operator]
        return found

    @property
    def groups(self) -> list[str]:
        """Numbers of source words that metrics are given for: "2–7", …"""
        return [f"{low}–{high}" for low, high in _ranges(self.max_words)]

    def unseen(self) -> list[list[Pair]]:
        """The held-out sentences, by length."""
        return [list(pairs) for pairs in _unseen(self.max_words, self.held_out)]

    def evaluate(self, model: nn.Module) -> Measured:
        """Greedy translations of held-out sentences against the grammar's.

        Returns:
            ``exact_match``: share of sentences all of whose words are right; ``bleu`` (0 … 100); ``loss`` (nats a word,
            teacher-forced); both first also as ``…_by_length``, in the order of `groups`.

        Raises:
            InputError: if sacrebleu is not installed.
        """
        groups = self.unseen()
        pairs = [pair for group in groups for pair in group]
        batch = tensors(pairs, next(model.parameters()).device)
        said = [vocabularies()[1].text(row) for row in greedy(model, batch["source"], batch["target"].shape[1] + 10)]
        right = [" ".join(words) == " ".join(pair.target) for words, pair in zip(said, pairs, strict=True)]
        ends = np.cumsum([0, *map(len, groups)])
        parts = [slice(a, b) for a, b in pairwise(ends)]
        return {
            "exact_match": float(np.mean(right)),
            "bleu": bleu(said, pairs),
            "loss": self.loss(model, batch).item(),
            "exact_match_by_length": [float(np.mean(right[part])) for part in parts],
            "bleu_by_length": [bleu(said[part], pairs[part]) for part in parts],
        }

    def check(self, model: nn.Module) -> Measured:
        """The attention against the grammar's alignments, on the right translations of held-out sentences.

        Words of the target that translate nothing are left out.

        Returns:
            Of every layer and head: ``aer``, the alignment error rate of the links from each word of the target to its
            strongest word of the source; ``accuracy``: share of those links that are right; ``entropy`` of the weights
            (nats); and ``best_…`` and ``mean_…``, of the best head and of the mean of all. A recurrent model has one
            head. Nothing for a model without attention.
        """
        pairs = [pair for group in self.unseen() for pair in group]
        batch = tensors(pairs, next(model.parameters()).device)
        weights = cross_weights(model, batch["source"], batch["target"][:, :-1])
        if weights is None:
            return {}
        heads = [[alignment(w, pairs) for w in layer] for layer in weights]
        flat = [head for layer in heads for head in layer]
        return {
            **{name: [[head[name] for head in layer] for layer in heads] for name in flat[0]},
            "best_aer": min(head["aer"] for head in flat),
            "best_accuracy": max(head["accuracy"] for head in flat),
            **{f"mean_{name}": value for name, value in alignment(weights.mean((0, 1)), pairs).items()},
        }

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """``length``: exact match and BLEU by length; ``alignment``: where the model looks, if it has attention."""
        found = {"length": self._by_length(self.evaluate(model))}
        checked = self.check(model)
        if checked:
            found["alignment"] = self._alignments(model, checked)
        return found

    def _by_length(self, found: Measured) -> Figure:
        from qkv.lab import draw

        whole, last = found["exact_match"], found["exact_match_by_length"][-1]
        figure, axes = draw.panels(
            f"{whole:.0%} of unseen sentences are translated exactly, {last:.0%} of the longest",
            f"{self._described()}; English to French by a grammar. Greedy translations of {self.held_out} held-out "
            "sentences in each group.",
            columns=2, height=2.8,
        )  # fmt: skip
        labels = (("exact_match_by_length", "exact translations (%)", 100), ("bleu_by_length", "BLEU (0 … 100)", 1))
        for ax, (name, label, scale), colour in zip(axes, labels, draw.COLOURS, strict=False):
            y = [scale * value for value in found[name]]
            ax.plot(range(len(y)), y, color=colour, marker="o", markersize=5, linewidth=1.8, clip_on=False)
            ax.set_xticks(range(len(y)), self.groups)
            ax.set(xlabel="words in the English sentence", ylabel=label, ylim=(0, 102))
        return figure

    def _alignments(self, model: nn.Module, checked: Measured) -> Figure:
        from matplotlib.patches import Rectangle

        from qkv.lab import draw

        pairs = _shown(self.unseen())
        batch = tensors(pairs, next(model.parameters()).device)
        weights = cross_weights(model, batch["source"], batch["target"][:, :-1])
        assert weights is not None
        layer, head = np.unravel_index(np.argmax(checked["accuracy"]), np.shape(checked["accuracy"]))
        which = "" if weights.shape[:2] == (1, 1) else f" Layer {layer}, head {head}, the best of all heads."
        figure, axes = draw.panels(
            f"{checked['best_accuracy']:.0%} of French words are predicted looking most at the English they translate",
            f"{self._described()}, held-out sentences.{which} Each row: the weights with which that word is predicted. "
            "Outlined: the words it translates, by the grammar; the model was never told.",
            columns=len(pairs), width=3.3 * len(pairs), height=3.5,
        )  # fmt: skip
        for ax, pair, w in zip(axes, pairs, weights[layer, head], strict=True):
            seen = w[: len(pair.target), : len(pair.source)]
            draw.heatmap(ax, seen, rows=pair.target, columns=pair.source, most=1.0)
            for t, gold in enumerate(pair.alignment):
                for s in gold:
                    ax.add_patch(Rectangle((s - 0.42, t - 0.42), 0.84, 0.84, fill=False, ec=draw.COLOURS[1], lw=1.3))
            ax.xaxis.tick_top()
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        axes[0].set_ylabel("French, predicted")
        figure.supxlabel("English, looked at", size=9)
        bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.7, pad=0.01)
        bar.set_label("attention weight", size=8)
        bar.ax.tick_params(labelsize=8)
        return figure

    def _described(self) -> str:
        return {
            "rnn": "A recurrent model without attention",
            "bahdanau": "A recurrent model with Bahdanau's attention",
            "luong": "A recurrent model with Luong's attention",
            "luong-local": "A recurrent model with Luong's local attention",
            "transformer": "A Transformer",
        }[self.architecture]

    def files(self) -> Mapping[str, str]:
        """The words of both languages."""
        return {VOCABULARY: vocabulary_file(*vocabularies())}


def alignment(weights: Float[Tensor, "b t s"], pairs: Sequence[Pair]) -> dict[str, float]:
    """How attention agrees with the true links, all of which are sure: each word is linked to its strongest.

    ``aer`` is 1 − 2 |A ∩ G| / (|A| + |G|) with the links A of attention and G of the grammar (Och and Ney 2003,
    doi:10.1162/089120103321337421, eq. 21), ``accuracy`` is |A ∩ G| / |A|, ``entropy`` is that of the weights (nats),
    which are divided by their sum. A word with two true links cannot have both: no attention has AER 0 then.

    >>> pair = Pair(("black", "cat"), ("chat", "noir"), ((1,), (0,)))
    >>> alignment(torch.tensor([[[0.2, 0.8], [0.1, 0.9]]]), [pair])["aer"]
    0.5
    """
    right = links = true = 0
    entropy = 0.0
    strongest = weights.argmax(-1).tolist()
    share = weights.double() / weights.double().sum(-1, keepdim=True).clamp(min=1e-30)
    entropies = torch.special.entr(share).sum(-1).tolist()
    for i, pair in enumerate(pairs):
        for t, gold in enumerate(pair.alignment):
            if gold:
                right += strongest[i][t] in gold
                links += 1
                true += len(gold)
                entropy += entropies[i][t]
    return {"aer": 1 - 2 * right / (links + true), "accuracy": right / links, "entropy": entropy / links}


def bleu(said: Sequence[Sequence[str]], pairs: Sequence[Pair]) -> float:
    """Of a corpus, 0 … 100, on the grammar's words."""
    try:
        import sacrebleu
    except ImportError as error:
        raise InputError("BLEU is measured with sacrebleu, which is not installed: pip install sacrebleu") from error
    texts, references = [" ".join(words) for words in said], [" ".join(pair.target) for pair in pairs]
    return float(sacrebleu.corpus_bleu(texts, [references], tokenize="none").score)


def is_held_out(pair: Pair) -> bool:
    """Whether a sentence is for measuring: by its source alone, so it is so always."""
    return zlib.crc32(" ".join(pair.source).encode()) % ONE_OF == 0


def tensors(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> dict[str, Int[Tensor, "b n"]]:
    """Sentences as a batch."""
    source, target = vocabularies()
    return {
        "source": padded([source.numbers(pair.source) for pair in pairs]).to(device),
        "target": padded([[START, *target.numbers(pair.target), END] for pair in pairs]).to(device),
    }


def _shown(groups: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Three sentences of up to 11 words whose words are most reordered, in different ways."""
    short = [pair for group in groups[:2] for pair in group if len(pair.source) >= 5] or list(groups[0])
    found: list[Pair] = []
    for pair in sorted(short, key=_reordered, reverse=True):
        if all(not {*pair.source} & {*other.source} - EVERYWHERE for other in found):
            found.append(pair)
    return found[:3]


def _reordered(pair: Pair) -> int:
    """How many two words of the target translate words of the source that stand in the other order."""
    at = [min(links) for links in pair.alignment if links]
    return sum(a > b for i, a in enumerate(at) for b in at[i + 1 :])


@lru_cache(1)
def _ranges(max_words: int) -> list[tuple[int, int]]:
    lows = (2, *(limit + 1 for limit in LIMITS[:-1]))
    return [(low, min(high, max_words)) for low, high in zip(lows, LIMITS, strict=True) if low <= max_words]


@lru_cache(8)
def _unseen(max_words: int, size: int) -> tuple[tuple[Pair, ...], ...]:
    rng = Random("held out")
    ranges = _ranges(max_words)
    found: list[dict[tuple[str, ...], Pair]] = [{} for _ in ranges]
    while any(len(group) < size for group in found):
        pair = sentences.sentence(rng, max_words)
        at = next(i for i, (_, high) in enumerate(ranges) if len(pair.source) <= high)
        if is_held_out(pair) and len(found[at]) < size:
            found[at][pair.source] = pair
    return tuple(tuple(group.values()) for group in found)
