"""Experiment on training without a causal mask, and with a mask that also hides the query's own key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

import qkv
from qkv.models import DecoderConfig, DecoderLM
from qkv_lab.experiments.base import Results, Setting, paired
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect
from qkv_lab.experiments.sinks import DATED
from qkv_lab.experiments.small import LEAST, Small, fit, means_of, minus, setting, unlearnt
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.copy import Copy
from qkv_lab.tasks.language import Language
from qkv_lab.tasks.reversal import Reversal

CONTEXT = 64
SHAPE = DecoderConfig.llama(d_model=32, layers=2, heads=4)
TEXT = Language(context=CONTEXT, model=SHAPE)
COPY = Copy(
    max_length=5, longest=5, symbols=10, model=DecoderConfig(d_model=64, layers=2, heads=4, tied=False)
)  # fmt: skip
REVERSAL = Reversal(length=6)
CLEAR, LEAK = 0.1, 0.1
"""Nats: a difference of losses that counts, and the loss below which training looks perfect."""


class NoMask(Small):
    """Text, copying and reversal with and without a causal mask; text without each query's own key."""

    name = "no_mask"
    question = "What happens without a causal mask, and must the diagonal stay open?"
    says: ClassVar[Mapping[str, str]] = {
        HOLDS: "Without a causal mask no task is learnt",
        FAILS: "Without a causal mask all tasks are learnt",
        ONLY: "Without a causal mask models fail where the past leaves open what comes next",
    }
    criteria = (
        Criterion("C158", DATED, "Without the causal mask: rise of the loss in nats when only earlier tokens are read "
                  "(text), loss of accuracy of what the model writes (copying, reversal)", LEAST),
        Criterion("C199", DATED, "Loss (nats per byte) with the query's own key masked minus that with it visible",
                  LEAST),
        Criterion("C200", DATED, "Without the causal mask, loss in nats of a text when only earlier tokens are read "
                  "minus that of token frequencies, and accuracy above chance of what is written", 0.0),
    )  # fmt: skip
    looks = (10, 20)
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
        guess = paired(
            results.by_seed(text[1], "measured.writing_loss"), results.by_seed(text[1], "evaluation.unigram_loss")
        )
        chance = {"copying": 1 / COPY.symbols, "reversal": 1 / REVERSAL.symbols}
        perfect = [
            Effect(f"the loss in training of {name} (nats)", results.values(f"{name}, unmasked",
                   "measured.training_loss"), (f"{name}, unmasked",), bound=LEAK, above=False, premise=True)
            for name in ("text", "reversal")
        ]  # fmt: skip
        said = [
            Effect(name, [x - chance[name] for x in results.values(f"{name}, unmasked", accuracy)],
                   (f"{name}, unmasked",), bound=LEAST, above=False)
            for name in written
        ]  # fmt: skip
        return {
            "C158": [replace(read, bound=CLEAR), *lost],
            "C199": [minus(results, "own key masked", "own key visible", "measured.loss")],
            "C200": [*perfect, Effect("text", guess, (text[1],)), *said],
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The means."""
        losses = means_of(results, ["text, masked", "text, unmasked"], "measured.writing_loss")
        trained = means_of(results, [f"{n}, unmasked" for n in self.steps], "measured.training_loss")
        wrote = means_of(
            results, [f"{n}, {k}" for n in ("copying", "reversal") for k in ("masked", "unmasked")],
            "evaluation.token_accuracy",
        )  # fmt: skip
        return {
            "C158": f"Mean losses when only earlier tokens are read: {losses}. Accuracy of what is written: {wrote}.",
            "C200": f"Mean losses in training: {trained}. Accuracy of what is written: {wrote}.",
        }


def _trained_on_text(model: DecoderLM, training: Training, seed: int, quick: bool) -> float:
    """The held-out loss of a model of text, in nats per byte."""
    fit(model, lambda step: TEXT.loss(model, TEXT.batch(step, 4 if quick else training.batch, seed)), training)
    return float(TEXT.evaluate(model)["loss"])
