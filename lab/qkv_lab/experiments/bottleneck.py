"""Experiments: the fixed-vector bottleneck, recurrence, and the lesson's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.models import DecoderConfig, DecoderLM
from qkv_lab import heads, settings
from qkv_lab.experiments.base import Experiment, Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Lines, Results
from qkv_lab.experiments.small import DATED, LEAST, fit, minus, setting
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.sequences import MIRRORS, Recall, Reversal
from qkv_lab.tasks.translation import Translation

NONE, BAHDANAU = "rnn", "bahdanau"
LONGEST = 20  # most words in a source sentence
STEPS = {"rnn": 4000, "bahdanau": 1400, "luong": 1400, "luong-local": 1000, "transformer": 1400}
OTHERS = 3  # seeds of the architectures that no claim is about

SHORT = 0.8  # the accuracy on the shortest sentences from which the vector counts as adequate
BOTTLENECK_ACCURACY = 0.7  # least accuracy of links
BY_LENGTH = "evaluation.exact_match_by_length"
LINKS = "Share of words on a true counterpart of which Bahdanau's attention has its largest weight"
LABELS = {"rnn": "no attention", "bahdanau": "Bahdanau", "luong": "Luong, global", "luong-local": "Luong, local",
          "transformer": "Transformer"}  # fmt: skip


class Bottleneck(Experiment):
    """Recurrent models with and without attention, and a Transformer, on the translation task."""

    name = "bottleneck"
    question = "Does a decoder that gets one vector fail on long sentences, and does attention fix this?"
    criteria = (
        Criterion("C001", DATED, "Share of sentences translated exactly without attention: of the shortest, and of the "
                  "shortest minus the longest", SHORT, parts=True),
        Criterion("C325", DATED, LINKS, BOTTLENECK_ACCURACY,
                  remark="With uniform weights it would be about 0.11. Alignment error rates, best head: "
                         "{check.best_aer}."),
        Criterion("C326", DATED, f"{LINKS}, trained on sentence pairs alone", BOTTLENECK_ACCURACY),
        Criterion("C370", DATED, "Gain in exact translations from Bahdanau's attention on the longest sentences minus "
                  "that on the shortest", LEAST),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One run per architecture. The models without attention have the most steps, which are the cheapest.

        The claims are about the first two architectures; the others, for the figure, have 3 seeds.
        """
        names = (NONE, BAHDANAU) if quick or seed >= OTHERS else STEPS
        return {name: _setting(name, seed, quick) for name in names}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        none, with_it = (results.rows(name, BY_LENGTH) for name in (NONE, BAHDANAU))
        seeds = min(len(none), len(with_it))
        gain = with_it[:seeds] - none[:seeds]
        aligned = [Effect("", results.values(BAHDANAU, "check.best_accuracy"))]
        return {
            "C001": [
                Effect("the shortest", none[:, 0].tolist()),
                Effect("the difference", (none[:, 0] - none[:, -1]).tolist(), bound=LEAST),
            ],
            "C325": aligned,
            "C326": aligned,
            "C370": [
                Effect("a gain on the longest", gain[:, -1].tolist(), bound=LEAST, premise=True),
                Effect("", (gain[:, -1] - gain[:, 0]).tolist()),
            ],
        }

    def lines(self, results: Results) -> Lines:
        names = [name for name in results.variants if results.finished(name)]
        found = {LABELS[name]: results.rows(name, BY_LENGTH) for name in names}
        return Lines(_task(NONE).groups, found, "words of the source", "exact match")


def _task(name: str) -> Translation:
    return Translation(architecture=name, max_words=LONGEST, d_model=96 if name == "transformer" else 128)  # type: ignore[arg-type]


def _setting(name: str, seed: int, quick: bool) -> Setting:
    task = replace(_task(name), d_model=32, held_out=8) if quick else _task(name)
    return setting(task, seed, quick, steps=STEPS[name], evaluate_every=5000, save_every=500)


RECURRENCE_ACCURACY = "measured.accuracy"
MEAN_ACCURACIES = "Mean accuracies: {measured.accuracy}."
RIGHT = 0.9
"""A model can do a task if this share of its predictions is right."""
DISTANCES = (3, 7, 15, 31, 63)
"""The distances over which symbols are recalled."""
FAR = DISTANCES[-1]
KINDS = ("attention", "GRU", "RNN")
BITS, SKIPPED = 24, 8
"""The bits of a sequence of the parity task, and the first ones, which are too easy to be evaluated."""


class RecurrentLM(nn.Module):
    """A language model with one recurrent layer, with the methods of a `DecoderLM` that tasks call."""

    def __init__(self, vocabulary: int, kind: str, width: int = 64) -> None:
        super().__init__()
        layer = nn.GRU if kind == "GRU" else nn.RNN
        self.embedding, self.output = nn.Embedding(vocabulary, width), nn.Linear(2 * width, vocabulary)
        self.layer = layer(width, 2 * width, batch_first=True)

    def forward(self, ids: Int[Tensor, "b n"]) -> Tensor:
        """Logits of the next token at each position, (b, n, vocabulary)."""
        out: Tensor = self.output(self.layer(self.embedding(ids))[0])
        return out

    def loss(self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"]) -> Tensor:
        """The mean cross-entropy in nats; targets of −100 are ignored."""
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def on_recall(task: Recall, model: nn.Module, seed: int, training: Training) -> Measured:
    """Train on batches of the task; the accuracy on its held-out sequences."""
    fit(model, lambda step: task.loss(model, task.batch(step, training.batch, seed)), training)
    with torch.no_grad():
        return {"accuracy": float(task.evaluate(model)["accuracy"]), "parameters": float(_count(model))}


def on_parity(model: nn.Module, seed: int, training: Training) -> Measured:
    """Train to say after each bit whether the number of ones so far is odd; the accuracy on new bits."""

    def bits(step: int, size: int = training.batch) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(np.random.default_rng((seed, step)).integers(0, 2, (size, BITS)))
        return found, found.cumsum(1) % 2

    def loss(step: int) -> Tensor:
        ids, odd = bits(step)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), odd.flatten())

    fit(model, loss, training)
    with torch.no_grad():
        ids, odd = bits(10**6, 500)
        right = (model(ids).argmax(-1) == odd)[:, SKIPPED:].double().mean().item()
    return {"accuracy": right, "parameters": float(_count(model))}


class Recurrence(Experiment):
    """Attention, a GRU and a tanh RNN, trained alike on three tasks."""

    name = "recurrence"
    question = "On which tasks is attention better than a recurrent network, and on which can it replace one?"
    criteria = (
        Criterion("C146", DATED, f"Recall of symbols {FAR} tokens back: accuracy with attention, and that minus the "
                  "accuracy of a tanh RNN", RIGHT, parts=True),
        Criterion("C291", DATED, "Accuracy with attention minus that of a GRU after as many steps (300), on sequences "
                  "of at most 68 tokens", LEAST, remark=MEAN_ACCURACIES),
        Criterion("C373", DATED, "Accuracy with attention minus that of a GRU after as many steps (300)", -LEAST,
                  remark=MEAN_ACCURACIES),
    )  # fmt: skip
    tasks: Mapping[str, str] = {
        "recall": "recall of 8 symbols",
        "far": f"recall over {FAR} tokens",
        "parity": f"running parity of {BITS} bits",
    }

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """Every model on every task; the RNN only on recall over distances, where it is compared."""
        training = Training(steps=3 if quick else 300, warmup=30, weight_decay=0.0)
        near = Recall(min_length=8, max_length=8)
        found: dict[str, Measured] = {}
        for kind in KINDS:
            by_distance = []
            for distance in DISTANCES:
                task = Recall(min_length=4, max_length=4, gap=distance - 3)
                torch.manual_seed(seed)
                far = on_recall(task, _model(kind, 34, context=68, layers=1), seed, training)
                by_distance.append(far["accuracy"])
            found[f"{kind}, far"] = {**far, "by_distance": by_distance}
            if kind != "RNN":
                torch.manual_seed(seed)
                found[f"{kind}, recall"] = on_recall(near, _model(kind, 18, context=16), seed, training)
                torch.manual_seed(seed)
                found[f"{kind}, parity"] = on_parity(_model(kind, 2, context=BITS), seed, training)
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        ahead = [minus(results, f"attention, {task}", f"GRU, {task}", RECURRENCE_ACCURACY, name)
                 for task, name in self.tasks.items()]  # fmt: skip
        rnn = results.differences("attention, far", "RNN, far", RECURRENCE_ACCURACY)
        return {
            "C146": [
                Effect("attention", results.values("attention, far", RECURRENCE_ACCURACY)),
                Effect("attention minus RNN", rnn, bound=LEAST),
            ],
            "C291": ahead,
            "C373": ahead,
        }

    def lines(self, results: Results) -> Lines:
        """The accuracy of recall by distance."""
        by_kind = {kind: results.rows(f"{kind}, far", "measured.by_distance") for kind in KINDS}
        return Lines(DISTANCES, by_kind, "distance of the recalled symbols, in tokens", "accuracy of recall", log=True)


def _model(kind: str, vocabulary: int, **shape: Any) -> nn.Module:
    """Attention or a recurrent network of about as many parameters."""
    if kind != "attention":
        return RecurrentLM(vocabulary, kind)
    positions = "learned" if shape.get("layers") == 1 else "alibi"
    given = {"d_model": 64, "layers": 2, "heads": 4, "d_hidden": 128, "positions": positions, "tied": False, **shape}
    return DecoderLM(DecoderConfig(vocab_size=vocabulary, **given))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


MODEL = "the lesson's model"
PATTERN = 0.9
"""A head attends to a position if that is its strongest key at this share of the queries."""
HALF = 0.5
CHECKED = 100


class Lesson(Experiment):
    """The lesson's model, learning rate and number of steps.

    Two things differ from the lesson: every batch has new sequences, and the initial weights are those of GPT-2 (the
    lesson's embeddings have a standard deviation of 1).
    """

    name = "lesson"
    question = "What do the heads of a lesson's small model learn, and does its analysis find it?"
    seeds = 20
    criteria = (
        Criterion("C213", DATED, "Share of symbols predicted in the last batches of training minus that written by "
                  "itself on new sequences (absolute difference)", 0.01, above=False),
        Criterion("C214", DATED, "Share of symbols that the model writes correctly on new sequences after 4,000 steps",
                  0.95),
        Criterion("C215", DATED, "Share of the answering queries whose strongest key is the mirrored position, in the "
                  "head with the largest", PATTERN,
                  remark="Mean number of heads, of 8, that do this at 90 % of the queries: "
                         "{measured.mirrors of the lesson's model}."),
        Criterion("C220", DATED, "Share of the queries after the separator whose strongest key is the separator or "
                  "the token before, in the head with the largest", HALF,
                  remark="Mean number of heads, of 8, that attend to the mirrored position: "
                         "{measured.mirrors of the lesson's model}."),
        Criterion("C221", DATED, "Mean distance (tokens) to which the first layer attends minus that of even weights",
                  0.0, above=False),
        Criterion("C223", DATED, "Share of the answering queries whose strongest key is the mirrored position, in the "
                  "head with the largest", PATTERN),
        Criterion("C224", DATED, "Loss of accuracy when heads with the mirrored position as strongest key are "
                  "ablated", HALF,
                  remark="Chance is 0.07; accuracy without all such heads: "
                         "{check.without_mirrors of the lesson's model}."),
    )  # fmt: skip

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The configuration `lesson` of the package, `qkv train --config lesson`."""
        task, training = settings.from_toml(Path("lesson"))
        training = replace(training, seed=seed, evaluate_every=4000, save_every=4000)
        return {MODEL: Setting(task, replace(training, steps=4, batch=4) if quick else training)}

    @torch.no_grad()
    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """``trained``: accuracy with the true symbols as input, on batches of training; and shares of strongest keys.

        ``separator`` and ``token_before``: by layer and head, shares of the queries after the separator. ``distance``:
        by layer, the mean distance of a query's attention; ``even``: that of even weights. ``mirrors``: the number of
        heads with the mirrored position as their strongest key at 90 % of the answering queries.
        """
        task = setting.task
        assert isinstance(task, Reversal)
        n = task.length
        last = [task.batch(setting.training.steps - 1 - i, 128, setting.training.seed)["ids"] for i in range(4)]
        ids = torch.cat(last)
        said = model(ids[:, :-1])[:, n:].argmax(-1)
        weights = heads.maps(model, task.unseen()[:CHECKED, :-1])
        query = np.arange(n, 2 * n)
        apart = np.abs(query[:, None] - np.arange(2 * n))
        after = query[1:]
        return {
            "trained": float((said == ids[:, n + 1 :]).double().mean()),
            "separator": heads.share_of_strongest(weights, (after, np.full(n - 1, n))).tolist(),
            "token_before": heads.share_of_strongest(weights, (after, after - 1)).tolist(),
            "distance": (weights[..., n:, :] * apart).sum(-1).mean((0, 2, 3)).tolist(),
            "even": float(query.mean() / 2),
            "mirrors": int((heads.share_of_strongest(weights, task.mirror()) >= PATTERN).sum()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        runs = results.finished(MODEL)
        wrote = results.values(MODEL, "evaluation.token_accuracy")
        trained = results.values(MODEL, "measured.trained")
        other = [max(np.max(o.measured["separator"]), np.max(o.measured["token_before"])) for o in runs]
        first = [o.measured["distance"][0] - o.measured["even"] for o in runs]
        mirrored = [Effect("", results.values(MODEL, "check.best"))]
        without = {
            "that head alone": results.values(MODEL, "check.without_best"),
            f"all heads at {MIRRORS:.0%}": results.values(MODEL, "check.without_mirrors"),
        }
        return {
            "C213": [Effect("", [abs(a - b) for a, b in zip(trained, wrote, strict=True)])],
            "C214": [Effect("", wrote)],
            "C215": mirrored,
            "C220": [Effect("", [float(x) for x in other])],
            "C221": [Effect("", [float(x) for x in first])],
            "C223": mirrored,
            "C224": [Effect(name, [a - b for a, b in zip(wrote, left, strict=True)]) for name, left in without.items()],
        }
