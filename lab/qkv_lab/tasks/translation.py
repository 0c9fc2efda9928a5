"""The task of translating English to French sentences of a grammar, with the true alignment of every word."""

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

from qkv.errors import InputError, one_of
from qkv_lab import grammar, translation
from qkv_lab.grammar import Pair
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig, RNNSeq2Seq, RNNSeq2SeqConfig
from qkv_lab.task import Batch, Measured, Training
from qkv_lab.translation import END, PAD, START, cross_weights, vocabularies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rnn": ("A recurrent model without attention", {"attention": "none"}),
    "tanh-rnn": ("A recurrent model of tanh cells without attention", {"attention": "none", "cell": "rnn"}),
    "bahdanau": ("A recurrent model with Bahdanau's attention", {"attention": "bahdanau"}),
    "luong": ("A recurrent model with Luong's attention", {"attention": "luong-general", "input_feeding": True}),
    "luong-local": (
        "A recurrent model with Luong's local attention",
        {"attention": "luong-general", "input_feeding": True, "kind": "local-p", "half_width": 5},
    ),
    "multihead": ("A recurrent model with multi-head attention", {"attention": "multihead"}),
    "transformer": ("A Transformer", {}),
}
"""What each is in a sentence, and its settings in `RNNSeq2SeqConfig`."""
LIMITS = (7, 11, 15, 20, 30)
"""The upper limits of the groups by length, in source words."""
STOP_WORDS = frozenset({"the", "a", "an", "some", "and", "not", "of", "to"})
"""Frequent words, which do not count when figures choose dissimilar sentences."""
BUCKETED_STEPS = 4
"""The number of steps whose sentences are drawn together and sorted by length."""
HELD_OUT = 10
"""One in this many sentences is held out."""


@dataclass(frozen=True)
class Translation:
    """Translate English sentences of a grammar (`qkv_lab.grammar`) to French, with one of seven architectures.

    >>> Translation().batch(step=0, size=3, seed=0)["source"].shape[0]
    3
    """

    name: ClassVar[str] = "translation"

    architecture: Literal["rnn", "tanh-rnn", "bahdanau", "luong", "luong-local", "multihead", "transformer"] = (
        "bahdanau"
    )
    """An `RNNSeq2Seq` of LSTMs without attention, or of plain cells tanh(W x + U h + b), or of LSTMs with Bahdanau's,
    Luong's (general score and input feeding; global or local-p) or multi-head attention; or an `EncoderDecoder`."""
    d_model: int = 128
    """The size of recurrent states or of the residual stream; embeddings of recurrent models have half of it."""
    layers: int | None = None
    """The number of layers of encoder and decoder each; if None, 1 for recurrent models and 2 for the Transformer."""
    heads: int = 4
    """The number of heads of the Transformer, and of multi-head attention."""
    dropout: float = 0.0
    max_words: int = 30
    """The largest number of words in a source."""
    held_out: int = 60
    """The number of held-out sentences in each group by length."""

    def __post_init__(self) -> None:
        one_of("architecture", self.architecture, tuple(ARCHITECTURES))
        if not grammar.SHORTEST <= self.max_words <= LIMITS[-1]:
            raise InputError(f"max_words is {self.max_words}, expected {grammar.SHORTEST} to {LIMITS[-1]}")
        if self.held_out < 1:
            raise InputError(f"held_out is {self.held_out}, expected at least 1")

    @staticmethod
    def training() -> Training:
        """Training settings with which the model learns the task."""
        return Training(steps=1400, batch=32, lr=4e-3, warmup=100, weight_decay=0.01)

    @property
    def model(self) -> RNNSeq2SeqConfig | EncoderDecoderConfig:
        """The configuration of the model, from `architecture` and the sizes."""
        source, target = map(len, vocabularies())
        if self.architecture == "transformer":
            return EncoderDecoderConfig(
                source, target, context=4 * LIMITS[-1], d_model=self.d_model, layers=self.layers or 2, heads=self.heads,
                d_hidden=2 * self.d_model, place="pre", dropout=self.dropout,
            )  # fmt: skip
        return RNNSeq2SeqConfig(
            source, target, d_embedding=max(1, self.d_model // 2), d_hidden=self.d_model, layers=self.layers or 1,
            heads=self.heads, dropout=self.dropout, **ARCHITECTURES[self.architecture][1],
        )  # fmt: skip

    def build(self) -> RNNSeq2Seq | EncoderDecoder:
        """A new model with random weights."""
        config = self.model
        return RNNSeq2Seq(config) if isinstance(config, RNNSeq2SeqConfig) else EncoderDecoder(config)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``source`` (size, s) and ``target`` (size, t), from `START` to `END`; no sentence is held out.

        The sentences of four consecutive steps are drawn together and sorted into batches by length, for less padding.
        """
        rng = Random(f"{seed} {step // BUCKETED_STEPS}")
        pairs: list[Pair] = []
        while len(pairs) < BUCKETED_STEPS * size:
            pair = grammar.sentence(rng, self.max_words)
            if not is_held_out(pair):
                pairs.append(pair)
        pairs.sort(key=lambda pair: len(pair.target))
        shares = rng.sample(range(BUCKETED_STEPS), BUCKETED_STEPS)
        return tensors(pairs[shares[step % BUCKETED_STEPS] * size :][:size])

    def count(self, batch: Batch) -> int:
        """The number of words and end tokens to predict."""
        return int((batch["target"][:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats per target word."""
        found: Tensor = model.loss(batch["source"], batch["target"])  # type: ignore[operator]
        return found

    @property
    def groups(self) -> list[str]:
        """The groups by number of source words: "2–7", …"""
        return [f"{low}–{high}" for low, high in _ranges(self.max_words)]

    def unseen(self) -> list[list[Pair]]:
        """The held-out sentences of each group by length."""
        return [list(pairs) for pairs in _unseen(self.max_words, self.held_out)]

    def evaluate(self, model: nn.Module) -> Measured:
        """Metrics of greedy translations of held-out sentences.

        Returns:
            ``exact_match``: the share of sentences translated without error; ``bleu`` (0 … 100); ``loss`` (nats
            per word, teacher-forced). The first two also as ``…_by_length``, in the order of `groups`.

        Raises:
            InputError: if sacrebleu is not installed.
        """
        groups = self.unseen()
        pairs = [pair for group in groups for pair in group]
        batch = tensors(pairs, next(model.parameters()).device)
        found = [
            vocabularies()[1].text(row)
            for row in translation.greedy(model, batch["source"], batch["target"].shape[1] + 10)
        ]
        right = [" ".join(words) == " ".join(pair.target) for words, pair in zip(found, pairs, strict=True)]
        ends = np.cumsum([0, *map(len, groups)])
        parts = [slice(a, b) for a, b in pairwise(ends)]
        return {
            "exact_match": float(np.mean(right)),
            "bleu": bleu(found, pairs),
            "loss": self.loss(model, batch).item(),
            "exact_match_by_length": [float(np.mean(right[part])) for part in parts],
            "bleu_by_length": [bleu(found[part], pairs[part]) for part in parts],
        }

    def check(self, model: nn.Module) -> Measured:
        """The attention compared with the true alignments, on the true translations of held-out sentences.

        Target words without an alignment are left out.

        Returns:
            By layer and head: ``aer``, the alignment error rate when each target word is linked to its strongest source
            word; ``accuracy``, the share of these links that are correct; ``entropy`` of the weights (nats). The same
            as ``best_…`` for the best head and as ``mean_…`` for the weights averaged over heads. A recurrent model has
            one head. The result is empty for a model without attention.
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
        """``length``: exact match and BLEU by length. ``alignment``: attention maps, if the model has attention."""
        found = {"length": self._by_length(self.evaluate(model))}
        checked = self.check(model)
        if checked:
            found["alignment"] = self._alignments(model, checked)
        return found

    def _by_length(self, found: Measured) -> Figure:
        from qkv_lab import draw

        whole, last = found["exact_match"], found["exact_match_by_length"][-1]
        figure, axes = draw.panels(
            f"{whole:.0%} of held-out sentences are translated exactly, {last:.0%} of the longest",
            f"{ARCHITECTURES[self.architecture][0]}; English to French by a grammar. Greedy translations of "
            f"{self.held_out} held-out sentences in each group.",
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

        from qkv_lab import draw

        pairs = _reordered_examples(self.unseen())
        batch = tensors(pairs, next(model.parameters()).device)
        weights = cross_weights(model, batch["source"], batch["target"][:, :-1])
        assert weights is not None
        layer, head = np.unravel_index(np.argmax(checked["accuracy"]), np.shape(checked["accuracy"]))
        which = "" if weights.shape[:2] == (1, 1) else f" Layer {layer}, head {head}, the best of all heads."
        figure, axes = draw.panels(
            f"For {checked['best_accuracy']:.0%} of French words the strongest weight is on a word they translate",
            f"{ARCHITECTURES[self.architecture][0]}, held-out sentences.{which} Rows: the weights with which a word is "
            "predicted. Outlined: the true alignment, which the model was not trained on.",
            columns=len(pairs), width=3.3 * len(pairs), height=3.5,
        )  # fmt: skip
        for ax, pair, w in zip(axes, pairs, weights[layer, head], strict=True):
            shown = w[: len(pair.target), : len(pair.source)]
            draw.heatmap(ax, shown, rows=pair.target, columns=pair.source, vmax=1.0)
            for t, gold in enumerate(pair.alignment):
                for s in gold:
                    ax.add_patch(Rectangle((s - 0.42, t - 0.42), 0.84, 0.84, fill=False, ec=draw.COLOURS[1], lw=1.3))
            ax.xaxis.tick_top()
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        axes[0].set_ylabel("French, predicted")
        figure.supxlabel("English, attended to", size=9)
        draw.scale(axes[0].images[0], axes, "attention weight", shrink=0.7)
        return figure

    def files(self) -> Mapping[str, str]:
        """The vocabulary of both languages."""
        return {translation.VOCABULARY: translation.vocabulary_file(*vocabularies())}


def alignment(weights: Float[Tensor, "b t s"], pairs: Sequence[Pair]) -> dict[str, float]:
    """Alignment metrics of attention weights: each target word is linked to its strongest source word.

    ``aer`` is 1 − 2 |A ∩ G| / (|A| + |G|) with the links A of attention and G of the grammar, all of them sure (Och and
    Ney 2003, doi:10.1162/089120103321337421, eq. 21). ``accuracy`` is |A ∩ G| / |A|. ``entropy`` is the mean entropy of
    the normalised weights (nats). If a word has two true links, the AER cannot be 0, because it gets only one link.

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


def bleu(translations: Sequence[Sequence[str]], pairs: Sequence[Pair]) -> float:
    """The corpus BLEU (0 … 100) of translated sentences, on the grammar's words."""
    import sacrebleu

    texts, references = [" ".join(words) for words in translations], [" ".join(pair.target) for pair in pairs]
    return float(sacrebleu.corpus_bleu(texts, [references], tokenize="none").score)


def is_held_out(pair: Pair) -> bool:
    """True if a sentence is held out, by a hash of its source."""
    return zlib.crc32(" ".join(pair.source).encode()) % HELD_OUT == 0


def tensors(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> dict[str, Int[Tensor, "b n"]]:
    """Sentence pairs as a padded batch."""
    source, target = vocabularies()
    return {
        "source": translation.padded([source.numbers(pair.source) for pair in pairs]).to(device),
        "target": translation.padded([[START, *target.numbers(pair.target), END] for pair in pairs]).to(device),
    }


def _reordered_examples(groups: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Up to three dissimilar sentences of at most 11 words, those with the most inversions."""
    short = [pair for group in groups[:2] for pair in group if len(pair.source) >= 5] or list(groups[0])
    found: list[Pair] = []
    for pair in sorted(short, key=_inversions, reverse=True):
        if all(not {*pair.source} & {*other.source} - STOP_WORDS for other in found):
            found.append(pair)
    return found[:3]


def _inversions(pair: Pair) -> int:
    """The number of pairs of target words whose source words have the opposite order."""
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
        pair = grammar.sentence(rng, max_words)
        at = next(i for i, (_, high) in enumerate(ranges) if len(pair.source) <= high)
        if is_held_out(pair) and len(found[at]) < size:
            found[at][pair.source] = pair
    return tuple(tuple(group.values()) for group in found)
