"""Bigram-Backcopy, the smallest task whose models form attention sinks and drained values."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError, one_of
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Batch, Training, with_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS = 2**14  # probabilities are multiples of 1 / DRAWS, so that a table maps uniform integers to tokens
HELD_OUT = 8  # one sequence in this many is held out
EVALUATED, CHECKED, SHOWN = 256, 32, 24  # held-out sequences for metrics and for attention; tokens of the map
SKIP = -100


@dataclass(frozen=True)
class Backcopy:
    """A Markov chain with trigger tokens, which repeat the token before them (Guo et al. 2024, arXiv:2410.13835, §2.1).

    A sequence is ``<s>`` followed by bytes. After an ordinary byte the next is drawn by the bigram counts of the
    top-level modules of Python's standard library. After a trigger the next byte is the one before the trigger,
    xᵢ₊₁ = xᵢ₋₁. The first byte is drawn by frequency and is not a trigger, so triggers never follow each other.
    Attention is useful only at triggers: elsewhere the copying head must be inactive, and it then attends to ``<s>``.

    Tokens are the ranks of bytes by frequency, from 0; ``<s>`` is the last token. Triggers are ranks 1 … `triggers`;
    rank 0, the space, is left out because it would make every other token a copy. One sequence in 8 is held out, by a
    hash of its tokens. The chain depends on the version of Python, because its standard library does.

    >>> task = Backcopy(length=16)
    >>> batch = task.batch(step=0, size=4, seed=0)
    >>> batch["ids"].shape, bool((batch["ids"][:, 0] == task.symbols).all())
    (torch.Size([4, 16]), True)
    """

    name: ClassVar[str] = "backcopy"

    symbols: int = 64
    """The number of different bytes: the most frequent ones."""
    length: int = 64
    """The number of tokens that the model reads, ``<s>`` included."""
    triggers: int = 3
    """The number of triggers: the most frequent bytes except the first."""
    first: Literal["fixed", "random"] = "fixed"
    """The first token of a sequence: ``<s>`` if fixed, else a byte."""
    unique: int | None = None
    """The number of distinct training sequences, which depend on the training seed; unlimited if None."""
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(layers=1, heads=1, d_model=64))
    """The configuration of the `DecoderLM`. If it has a prefix, the loss ignores the tokens inside."""

    def __post_init__(self) -> None:
        if not 8 <= self.symbols <= 128:
            raise InputError(f"symbols is {self.symbols}, expected 8 to 128")
        if not 0 <= self.triggers <= self.symbols // 2:
            raise InputError(f"triggers is {self.triggers}, expected 0 to {self.symbols // 2}, half of the symbols")
        one_of("first", self.first, ("fixed", "random"))
        if self.length < 8:
            raise InputError(f"length is {self.length}, expected at least 8 tokens")
        if self.unique is not None and self.unique < 1:
            raise InputError(f"unique is {self.unique}, expected at least 1 sequence or None for no limit")
        if self.model.prefix > self.length:
            raise InputError(f"model.prefix is {self.model.prefix}, expected at most the length, {self.length}")

    @staticmethod
    def training() -> Training:
        """Training settings with which a head forms a sink within a minute on one core."""
        return Training(steps=1500, batch=32, lr=3e-3, warmup=100, weight_decay=0.1)

    def build(self) -> DecoderLM:
        """A new model with random weights."""
        return DecoderLM(with_entries(self.model, vocab_size=self.symbols + 1, context=self.length))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """``ids`` and ``targets`` (size, length): the tokens, and the tokens that follow them; −100 inside a prefix."""
        generator = np.random.default_rng([seed, step])
        if self.unique is None:
            return self._examples(self._draw(generator, size))
        pool = _pool(self, self.unique, seed)
        return self._examples(pool[generator.integers(len(pool), size=size)])

    def asked(self, batch: Batch) -> list[int]:
        """The positions of the tokens outside the prefix."""
        return [at + 1 for at in (batch["targets"][0, :-1] != SKIP).nonzero()[:, 0].tolist()]

    def count(self, batch: Batch) -> int:
        """The number of targets outside the prefix."""
        return int((batch["targets"] != SKIP).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy in nats."""
        loss: Tensor = model.loss(batch["ids"], batch["targets"])  # type: ignore[operator]
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Losses on held-out sequences, outside of the prefix.

        ``bigram_excess`` is the loss after ordinary tokens (``<s>`` included) minus the loss of the true chain, in
        nats; 0 is optimal. ``backcopy_accuracy`` and ``backcopy_loss`` are measured after triggers. ``excess`` is over
        all tokens, and ``entropy`` is the true chain's loss. The chain's losses are measured on the same tokens.
        """
        batch = self.held_out(EVALUATED)
        device = next(model.parameters()).device
        ids, targets = batch["ids"].to(device), batch["targets"].to(device)
        logits = model(ids).float()
        counts, after = targets != SKIP, self.is_trigger(ids)
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        chain = torch.as_tensor(
            _chain(self.symbols, self.triggers).log_probabilities, dtype=losses.dtype, device=device
        )
        own = -chain[ids, targets.clamp(min=0)].masked_fill(after, 0)  # after a trigger the next token is certain
        ordinary, copies = counts & ~after, counts & after
        return {
            "excess": float((losses - own)[counts].mean()),
            "entropy": float(own[counts].mean()),
            "bigram_excess": float((losses - own)[ordinary].mean()),
            "backcopy_loss": float(losses[copies].mean()),
            "backcopy_accuracy": float((logits.argmax(-1) == targets)[copies].float().mean()),
        }

    def check(self, model: nn.Module) -> dict[str, Any]:
        """`qkv_lab.heads.attention`, and mean weights (layer, head) that show which heads are active at triggers only.

        ``trigger_previous`` and ``trigger_first`` are the mean weights of trigger queries on the previous and on the
        first token; ``other_first`` is the mean weight of all other queries (from the second on) on the first token.
        If a head is active at triggers and dormant elsewhere, ``trigger_previous`` and ``other_first`` are near 1.
        """
        return self._measured(model)[0]

    def _measured(self, model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The result of `check`, and the weights of every query: `qkv_lab.heads.weights`."""
        ids = self.held_out(CHECKED)["ids"]
        statistics, weights = heads.attention_and_weights(model, ids)
        trigger, other = self._queries(ids)

        def mean(values: np.ndarray, at: np.ndarray) -> list[list[float]]:
            at = at[:, None, None, : values.shape[3]]
            return ((values * at).sum((0, 3), dtype=np.float64) / max(at.sum(), 1)).tolist()

        statistics["trigger_previous"] = mean(weights["previous"], trigger)
        statistics["trigger_first"] = mean(weights["first"], trigger)
        statistics["other_first"] = mean(weights["first"], other)
        return statistics, weights

    def _queries(self, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Which queries are triggers, and which are others from the second on."""
        trigger = self.is_trigger(ids).numpy()
        return trigger, ~trigger & (np.arange(ids.shape[1]) > 0)

    def figures(self, model: nn.Module) -> Mapping[str, Figure]:
        """``weights``: attention map of the head with the strongest sink; ``sink``: its mean weights and norms."""
        found, weights = self._measured(model)
        layer, head = heads.best(np.asarray(found["other_first"]))
        of_head = {name: values[layer][head] for name, values in found.items() if np.ndim(values) == 2}
        config, where = self.model, "<s>" if self.first == "fixed" else "the first token"
        note = (
            f"Bigram-Backcopy, layers × heads: {config.layers} × {config.heads}; layer {layer}, head {head}; held out"
        )
        return {
            "weights": self._map_figure(model, (layer, head), of_head, where, note),
            "sink": self._sink_figure({name: x[:, layer, head] for name, x in weights.items()}, of_head, where, note),
        }

    def _map_figure(
        self, model: Any, at: tuple[int, int], found: Mapping[str, float], where: str, note: str
    ) -> Figure:  # fmt: skip
        """The attention map of a head on the beginning of the sequence with the most triggers."""
        import qkv
        from qkv_lab import draw

        copies, sink = found["trigger_previous"], found["other_first"]
        if copies > heads.THRESHOLD and sink > heads.THRESHOLD:
            title = f"Triggers attend to the previous token, all other tokens to {where}"
        else:
            title = f"This head does not both copy at triggers and attend to {where} elsewhere"
        note += (
            f"; triggers in orange. Mean weight of triggers on the previous token: {copies:.2f}; of other queries on "
            f"{where}: {sink:.2f}."
        )
        held, n = self.held_out(CHECKED)["ids"], min(SHOWN, self.length)
        ids = held[int(self.is_trigger(held[:, :n]).sum(1).argmax()), :n]
        data = qkv.profile(model, ids[None], progress=False, map_tokens=n, probe=False).data
        names, triggers = self.labels(ids), self.is_trigger(ids).tolist()
        figure, (axes,) = draw.panels(title, note, width=6.2, height=4.9)
        image = draw.heatmap(axes, data["weights"].values[0][at], rows=names, columns=names)
        axes.set_xticks(range(n), names, rotation=0, fontsize=7.5)
        for labels in (axes.get_yticklabels(), axes.get_xticklabels()):
            for label, trigger in zip(labels, triggers, strict=True):
                label.set(color=draw.COLOURS[1] if trigger else draw.INK, weight="bold" if trigger else "normal")
        axes.set(xlabel="key", ylabel="query")
        draw.scale(image, axes, "weight", shrink=0.8)
        return figure

    def _sink_figure(
        self, weights: Mapping[str, np.ndarray], found: Mapping[str, float], where: str, note: str
    ) -> Figure:  # fmt: skip
        """Mean weights on the first and the previous token, by kind of query, and the norm of values by position."""
        from qkv_lab import draw

        norms, drain = weights["value_norm"].mean(0), found["value_drain"]
        drained = "is drained" if drain < 1 else "is not drained"
        title = f"Away from triggers {where} gets {found['other_first']:.0%} of the weight; its value {drained}"
        note += ". Left: bars are means, lines from the 10th to the 90th percentile of queries."
        figure, (bars, line) = draw.panels(title, note, columns=2, width=7.2, height=2.9)
        trigger, other = self._queries(self.held_out(CHECKED)["ids"])
        for shift, (name, at, colour) in enumerate((("triggers", trigger, 1), ("other tokens", other, 0))):
            for place, key in enumerate(("previous", "first")):
                of_queries = weights[key][at[:, : weights[key].shape[1]]]
                x = place + 0.38 * shift - 0.19
                bars.bar(x, of_queries.mean(), 0.36, color=draw.COLOURS[colour], label=name if place == 0 else None)
                bars.vlines(x, *np.quantile(of_queries, (0.1, 0.9)), color=draw.INK, linewidth=1)
        bars.set_xticks((0, 1), ("previous token", where))
        bars.set(xlabel="key", ylabel="weight", ylim=(0, 1.05))
        bars.legend(title="query is", fontsize=8, title_fontsize=8, frameon=False, loc="center")
        line.plot(range(1, len(norms)), norms[1:], color=draw.COLOURS[0], linewidth=1.6)
        line.plot(0, norms[0], "o", color=draw.COLOURS[1], markersize=6)
        told = f"{where}: {drain:.2f} of the others' mean"
        line.annotate(told, (0, norms[0]), (7, -1), textcoords="offset points", fontsize=8)
        line.set(xlabel="position (tokens)", ylabel="norm of the value", ylim=(0, None))
        return figure

    def files(self) -> Mapping[str, str]:
        """No files: tokens have no text."""
        return {}

    def held_out(self, size: int) -> Batch:
        """The first `size` held-out sequences, always the same. None of them is used in training."""
        return self._examples(self._draw(np.random.default_rng(2410_13835), size, held_out=True))

    def is_trigger(self, ids: Int[Tensor, "*n"]) -> Tensor:
        """True where the token is a trigger."""
        return (ids >= 1) & (ids <= self.triggers)

    def labels(self, ids: Int[Tensor, " n"]) -> list[str]:
        """Readable names of tokens: a character, ␣ or ⏎, or two hexadecimal digits."""
        names = {ord(" "): "␣", ord("\n"): "⏎"}
        known = _chain(self.symbols, self.triggers).bytes.tolist()
        shown = [*(names.get(b, chr(b) if 32 < b < 127 else f"{b:02x}") for b in known), "<s>"]
        return [shown[i] for i in ids.tolist()]

    def _examples(self, sequences: np.ndarray) -> Batch:
        tokens = torch.from_numpy(sequences.astype(np.int64))
        ids, targets = tokens[:, :-1], tokens[:, 1:].clone()
        # The last query of a prefix is the first that cannot see its target.
        targets[:, : max(self.model.prefix - 1, 0)] = SKIP
        return {"ids": ids, "targets": targets}

    def _draw(self, generator: np.random.Generator, size: int, *, held_out: bool = False) -> np.ndarray:
        """Random sequences (size, length + 1): only held-out ones, or only the others."""
        share, found = 1 / HELD_OUT if held_out else 1 - 1 / HELD_OUT, np.empty((0, self.length + 1), np.uint8)
        while len(found) < size:
            drawn = self._sequences(generator, math.ceil(1.1 * (size - len(found)) / share) + 4)
            found = np.concatenate([found, drawn[_is_held_out(drawn) == held_out]])
        return found[:size]

    def _sequences(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Random sequences (size, length + 1) of the chain, held out or not."""
        table, start = _chain(self.symbols, self.triggers).table, self.first == "fixed"
        numbers = generator.integers(DRAWS, size=(self.length + 1, size), dtype=np.uint16)
        made = np.empty((self.length + 1, size), np.uint8)  # rows are positions, which are drawn one after the other
        made[0] = self.symbols if start else table[self.symbols, numbers[0]]
        before = made[0]
        for at in range(1, self.length + 1):
            last = made[at - 1]
            made[at] = np.where((last - np.uint8(1)) < self.triggers, before, table[last, numbers[at]])
            before = last
        return made.T


@dataclass(frozen=True, eq=False)
class Chain:
    """The transition probabilities of the chain; the last row is for the first byte of a sequence."""

    bytes: np.ndarray
    """The byte of each token, by descending frequency."""
    table: np.ndarray
    """(symbols + 1, DRAWS): the next token for each equally likely integer below DRAWS."""
    probabilities: Float[np.ndarray, "rows symbols"]
    """The probabilities of the next token; the rows of triggers are not used."""

    @property
    def log_probabilities(self) -> np.ndarray:
        """ln of the probabilities; impossible transitions have a finite value, which is never used."""
        return np.log(np.maximum(self.probabilities, 1 / DRAWS))


@lru_cache(maxsize=4)
def _chain(symbols: int, triggers: int) -> Chain:
    """The chain of the most frequent bytes; every bigram has a positive probability."""
    pairs = _pairs()
    totals = pairs.sum(1)
    chosen = np.argsort(-totals, kind="stable")[:symbols]
    counts = pairs[np.ix_(chosen, chosen)].astype(float)
    starts = totals[chosen].astype(float)
    starts[1 : triggers + 1] = 0
    parts = np.stack([*(_apportion(row, np.ones(symbols, bool)) for row in counts), _apportion(starts, starts > 0)])
    table = np.stack([np.repeat(np.arange(symbols, dtype=np.uint8), row) for row in parts])
    return Chain(chosen.astype(np.uint8), table, parts / DRAWS)


def _apportion(weights: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """Split DRAWS into integers in proportion to the weights, with at least 1 for every possible entry."""
    left = DRAWS - int(possible.sum())
    ends = np.rint(np.cumsum(weights) / max(weights.sum(), 1) * left).astype(int)
    parts = np.diff(ends, prepend=0) + possible
    parts[0] += DRAWS - parts.sum()  # takes everything if all weights are 0
    return parts


@lru_cache(maxsize=1)
def _pairs() -> np.ndarray:
    """Bigram counts (256, 256) of the bytes in the top-level modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    counts = np.zeros(256 * 256, np.int64)
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(
            f"task is 'backcopy', which needs the source files of Python's standard library, but {folder} has none"
        )
    for file in files:
        text = np.frombuffer(file.read_bytes(), np.uint8).astype(np.int64)
        counts += np.bincount(256 * text[:-1] + text[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


def _is_held_out(sequences: np.ndarray) -> np.ndarray:
    """True for one sequence in `HELD_OUT`, by a hash of its tokens."""
    powers = np.cumprod(np.full(sequences.shape[1], 0x9E3779B97F4A7C15, np.uint64))
    mixed = (sequences.astype(np.uint64) + np.uint64(1)) @ powers
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    held: np.ndarray = (mixed >> np.uint64(32)) % np.uint64(HELD_OUT) == 0
    return held


@lru_cache(maxsize=4)
def _pool(task: Backcopy, size: int, seed: int) -> np.ndarray:
    """The `size` distinct sequences of a training with a limit on their number."""
    generator = np.random.default_rng([seed, 0, size])
    found = np.empty((0, task.length + 1), np.uint8)
    for _ in range(20):
        found = np.concatenate([found, task._draw(generator, size - len(found))])
        found = found[np.sort(np.unique(found, axis=0, return_index=True)[1])]
        if len(found) >= size:
            return found[:size]
    raise InputError(
        f"unique is {size}, but only {len(found)} distinct sequences were found; expected fewer, or longer ones"
    )
