"""Experiments: causal masks, windows, prefixes, and lengths beyond training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import qkv
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.experiments import small
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Outcome, Results
from qkv_lab.experiments.small import DATED, LEAST, PLAIN, SINK, Change, Sweep, fit, minus, setting, unlearnt
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.language import Language
from qkv_lab.tasks.relations import Lookups
from qkv_lab.tasks.sequences import Copy, Reversal

CONTEXT = 64
SHAPE = DecoderConfig.llama(d_model=32, layers=2, heads=4)
TEXT = Language(context=CONTEXT, model=SHAPE)
COPY = Copy(
    max_length=5, longest=5, symbols=10, model=DecoderConfig(d_model=64, layers=2, heads=4, tied=False)
)  # fmt: skip
REVERSAL = Reversal(length=6)
CLEAR, LEAK = 0.1, 0.1
"""Nats: a difference of losses that counts, and the loss below which training looks perfect."""


class NoMask(Experiment):
    """Text, copying and reversal with and without a causal mask; text without each query's own key."""

    name = "no_mask"
    question = "What happens without a causal mask, and must the diagonal stay open?"
    criteria = (
        Criterion("C158", DATED, "Without the causal mask: rise of the loss in nats when only earlier tokens are read "
                  "(text), loss of accuracy of what the model writes (copying, reversal)", LEAST,
                  remark="Mean losses when only earlier tokens are read: {measured.writing_loss}. Accuracy of what is "
                         "written: {evaluation.token_accuracy}."),
        Criterion("C199", DATED, "Loss (nats per byte) with the query's own key masked minus that with it visible",
                  LEAST),
        Criterion("C200", DATED, "Without the causal mask, loss in nats of a text when only earlier tokens are read "
                  "minus that of token frequencies, and accuracy above chance of what is written", 0.0,
                  remark="Mean losses in training: {measured.training_loss}. Accuracy of what is written: "
                         "{evaluation.token_accuracy}."),
    )  # fmt: skip
    steps: Mapping[str, int] = {"text": 700, "copying": 300, "reversal": 300}

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """A prefix of the whole sequence removes the causal mask."""
        runs = {}
        lengths = {"text": CONTEXT, "copying": 2 * COPY.longest + 1, "reversal": 2 * REVERSAL.length + 1}
        for name, task in (("text", TEXT), ("copying", COPY), ("reversal", REVERSAL)):
            for kind, prefix in (("masked", 0), ("unmasked", lengths[name])):
                changed = replace(task, model=replace(task.model, prefix=prefix))
                runs[f"{name}, {kind}"] = setting(changed, seed, quick, steps=self.steps[name])
        return runs

    @torch.no_grad()
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``training_loss`` of a new batch as in training; for text ``writing_loss`` (`Language.writing_loss`)."""
        task = setting.task
        batch = task.batch(10**6, 64, setting.training.seed)
        found = {"training_loss": float(task.loss(model, batch))}
        return found | ({"writing_loss": task.writing_loss(model)} if isinstance(task, Language) else {})

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """Text with the own key visible or masked. Without any key, the first query gets no value (0)."""
        found = {}
        training = replace(TEXT.training(), steps=2 if quick else 400, warmup=40)
        strict = qkv.masks.Causal() & ~qkv.masks.Window(1)
        for name, mask in (("own key visible", qkv.masks.Causal()), ("own key masked", strict)):
            torch.manual_seed(seed)
            config = replace(SHAPE, vocab_size=257, context=CONTEXT, attention=qkv.Attention(mask=mask))
            found[name] = {"loss": _trained_on_text(DecoderLM(config), training, seed, quick)}
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per task; that training looks perfect is presupposed by C200."""
        accuracy, written = "evaluation.token_accuracy", ("copying", "reversal")
        text = ("text, masked", "text, unmasked")
        read = minus(results, text[1], text[0], "measured.writing_loss", "text")
        lost = [
            minus(results, f"{name}, masked", f"{name}, unmasked", accuracy, name,
                  unless=unlearnt(results, accuracy, 0.9, f"{name}, masked"))
            for name in written
        ]  # fmt: skip
        written_loss, unigram = (
            results.by_seed(text[1], x) for x in ("measured.writing_loss", "evaluation.unigram_loss")
        )
        chance = {"copying": 1 / COPY.symbols, "reversal": 1 / REVERSAL.symbols}
        perfect = [
            Effect(f"the loss in training of {name} (nats)", results.values(f"{name}, unmasked",
                   "measured.training_loss"), bound=LEAK, above=False, premise=True)
            for name in ("text", "reversal")
        ]  # fmt: skip
        said = [
            Effect(name, [x - chance[name] for x in results.values(f"{name}, unmasked", accuracy)], bound=LEAST,
                   above=False)
            for name in written
        ]  # fmt: skip
        return {
            "C158": [replace(read, bound=CLEAR), *lost],
            "C199": [minus(results, "own key masked", "own key visible", "measured.loss")],
            "C200": [*perfect, Effect("text", list(written_loss - unigram)), *said],
        }


def _trained_on_text(model: DecoderLM, training: Training, seed: int, quick: bool) -> float:
    """The held-out loss of a model of text, in nats per byte."""
    fit(model, lambda step: TEXT.loss(model, TEXT.batch(step, 4 if quick else training.batch, seed)), training)
    return float(TEXT.evaluate(model)["loss"])


JUDGED = ("learned", "sinusoidal", "rotary")
SCHEMES = (*JUDGED, "alibi", "t5", "none")
OTHERS = 3
TRAINED, LONGEST = 32, 128
RISE = 0.1
"""A loss that rises by more than this (nats per byte) has not generalised."""
MEAN_LOSS = "Mean loss of the stretch of positions with the largest: {evaluation.loss_by_place}."


class Extrapolation(Experiment):
    """Byte language models trained on 32 tokens and evaluated on 128."""

    name = "extrapolation"
    question = "Which position schemes work beyond the trained length?"
    seeds = 20
    criteria = (
        Criterion("C227", DATED, f"Loss (nats per byte) with sinusoidal positions at positions 65–{LONGEST} minus that "
                  f"at 17–{TRAINED}", RISE, above=False, remark=MEAN_LOSS),
        Criterion("C228", DATED, "Rise of the loss (nats per byte) beyond the trained length, with absolute positions "
                  "minus with rotary ones", 0.0, remark=MEAN_LOSS),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One model for each position scheme; those that no claim is about have 3 seeds."""
        runs = {}
        for positions in SCHEMES if seed < OTHERS else JUDGED:
            model = DecoderConfig(d_model=64, layers=2, heads=4, positions=positions)
            task = Language(context=TRAINED, longest=LONGEST, model=model)
            runs[positions] = setting(task, seed, quick, steps=500, batch=32, warmup=50)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By the rise of the loss over that within the trained length; near and far are conditions."""
        found = []
        for other in ("sinusoidal", "learned"):
            for at, place in ((1, "33–64"), (2, f"65–{LONGEST}")):
                found.append(Effect(f"{other}, positions {place},", results.differences(other, "rotary", _rise(at))))
        return {"C227": [Effect("", list(results.by_seed("sinusoidal", _rise(2))))], "C228": found}

    def lines(self, results: Results) -> Lines:
        """The loss within the length of training, up to twice, and up to four times as far."""
        found = {name: results.rows(name, "evaluation.loss_by_place") for name in SCHEMES}
        return Lines((TRAINED, 2 * TRAINED, LONGEST), found, "positions up to", "loss, nats per byte")


def _rise(at: int) -> Callable[[Outcome], float]:
    """The rise of the loss at a range of positions."""
    return lambda outcome: outcome.evaluation["loss_by_place"][at] - outcome.evaluation["loss_by_place"][0]


class RelativePositions(Experiment):
    """The symbol two positions before, with absolute and relative positions, within the trained length and beyond."""

    name = "relative_positions"
    question = 'Is "attend to the word two before" easier to learn, or to carry over, with relative positions?'
    criteria = (
        Criterion("C374", DATED, "Accuracy in finding the symbol two before, with relative positions (T5, rotary) "
                  "minus with absolute ones (learned, sinusoidal)", LEAST,
                  remark="Mean accuracies beyond the trained positions: {evaluation.longer_accuracy}."),
    )  # fmt: skip
    curves = ("evaluation.accuracy",)
    kinds: Mapping[str, tuple[str, str]] = {"relative": ("t5", "rotary"), "absolute": ("learned", "sinusoidal")}
    length, longest = 16, 64
    seeds = 20

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        runs = {}
        for positions in (*self.kinds["relative"], *self.kinds["absolute"]):
            model = DecoderConfig(d_model=32, layers=1, heads=2, positions=positions, tied=False)
            task = Lookups(first=2, second=2, length=self.length, longest=self.longest, model=model)
            every = 4 if quick else 25
            runs[positions] = setting(task, seed, quick, steps=400, batch=32, evaluate_every=every)
        return runs

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """In training: the mean accuracy over evaluations every 25 steps, which is higher if learning is quicker."""
        variants = tuple(v for pair in self.kinds.values() for v in pair)
        why = unlearnt(results, "evaluation.accuracy", 0.9, *variants)
        within = f"within the {self.length} trained positions, over training,"
        beyond = f"beyond them, up to {self.longest},"
        quick, far = (self._gaps(results, of) for of in (_mean_accuracy, "evaluation.longer_accuracy"))
        return {"C374": [Effect(within, quick, why), Effect(beyond, far, why)]}

    def _gaps(self, results: Results, of: str | Callable[[Outcome], Any]) -> list[float]:
        """The mean of the relative schemes minus that of the absolute ones, for each seed that all have."""
        found = results.across([v for pair in self.kinds.values() for v in pair], of)
        relative, absolute = (found[list(kinds)].mean(axis=1) for kinds in self.kinds.values())
        return list(relative - absolute)


def _mean_accuracy(outcome: Outcome) -> float:
    """The mean accuracy over training."""
    return float(np.mean(outcome.curves["evaluation.accuracy"]["values"]))


PREFIX, WINDOWS = (4, 8), (8, 16, 32)
RANDOM = "any first symbol, prefix 8"
TEXTS = 16
LEAST_QUERIES = 4  # keys that are visible to fewer queries are left out: their means are too noisy


class MaskSweep(Sweep):
    """A sweep over masks that measures the mean weight on every key."""

    def measure(self, model: Any, setting: Setting) -> Measured:
        """Weights of the head with the largest mean weight on a single key, over the queries after the prefix.

        ``by_key``: mean weight on each key, over the queries to which it is visible. ``first``: the same for the first
        key. ``prefix_first`` and ``prefix_rest``: mean weight on the first key and on the other keys of the prefix.
        ``oldest``: mean weight on the oldest key in the window, over the queries to which the first key is not visible;
        0 if there are none.
        """
        task: Any = setting.task
        config = task.model
        w = heads.maps(model, task.held_out(TEXTS)["ids"])
        n = w.shape[-1]
        query, key = np.arange(n)[:, None], np.arange(n)
        visible = (key <= query) & (query - key < (config.windows[0] or n)) & (query >= max(config.prefix, 1))
        mass = w.mean(0)
        by_key = (mass * visible).sum(-2) / np.maximum(visible.sum(0), 1)
        by_key = by_key[..., visible.sum(0) >= LEAST_QUERIES]
        layer, head = small.argmax_head(by_key.max(-1))
        own, late = mass[layer, head], range(config.windows[0] or n, n)
        inside = own[max(config.prefix, 1) :, : config.prefix].mean(0) if config.prefix else np.zeros(1)
        return {
            "by_key": by_key[layer, head].tolist(),
            "first": float(by_key[layer, head, 0]),
            "prefix_first": float(inside[0]),
            "prefix_rest": float(inside[1:].sum()),
            "oldest": float(np.mean([own[i, i - late.start + 1] for i in late])) if late else 0.0,
        }

    def lines(self, results: Results) -> Lines:
        found = {v: results.rows(v, "measured.by_key") for v in results.variants}
        n = max(x.shape[-1] for x in found.values())
        return Lines(range(1, n + 1), found, "key", "mean weight of queries that see it", log=True)


class PrefixMask(MaskSweep):
    """A prefix within which attention is bidirectional."""

    name = "prefix"
    question = "Does a bidirectional prefix move the sink to other keys inside the prefix?"
    seeds = 20
    criteria = (
        Criterion("C083", DATED, "Weight of the strongest head, by queries after the prefix, on all other keys of the "
                  "prefix minus that on its first key", 0.0,
                  remark="Weights on the first key: {measured.prefix_first}; on the others of the prefix: "
                         "{measured.prefix_rest}."),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        **{f"prefix {n}": Change(model={"prefix": n}) for n in PREFIX},
        RANDOM: Change(task={"first": "random"}, model={"prefix": 8}),
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per prefix, if there is a sink in it."""
        prefixed = [v for v in self.variants if v != PLAIN]
        return {"C083": [_moved(results, v, "prefix_rest", "prefix_first", sum_of=True) for v in prefixed]}


class WindowMask(MaskSweep):
    """Sliding windows of several sizes, which include the query's own key."""

    name = "window"
    question = "With a sliding window, is the sink the first token of the text or the first of the window?"
    seeds = 20
    criteria = (
        Criterion("C084", DATED, "Weight of the strongest head on the first token of the text, by queries that see it, "
                  "minus that on the oldest key of the window, by all others", 0.1,
                  remark="Weights on the first key: {measured.first}; on the oldest of the window: {measured.oldest}."),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        **{f"window {n}": Change(model={"window": n}) for n in WINDOWS},
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per window, if there is a sink on one of the two keys."""
        windows = [v for v in self.variants if v != PLAIN]
        return {"C084": [_moved(results, v, "first", "oldest") for v in windows]}


def _moved(results: Results, variant: str, a: str, b: str, *, sum_of: bool = False) -> Effect:
    """The effect of the weight on one key minus that on another; it counts if one of them, or their sum, is a sink."""
    one, other = (results.by_seed(variant, f"measured.{x}") for x in (a, b))
    most = one + other if sum_of else np.maximum(one, other)
    why = small.not_learnt(results, variant)
    if not why and len(most) and most.mean() <= SINK:
        why = f"no sink: {most.mean():.2f}"
    return Effect(variant, list(one - other), unless=why)
