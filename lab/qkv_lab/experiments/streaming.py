"""Experiments: streaming with sinks, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from torch import Tensor, nn

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.models import DecoderConfig, DecoderLM
from qkv.models.loss import token_loss
from qkv_lab.experiments.base import Experiment, Outcome, Results, Setting, paired, summary, value_of
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict
from qkv_lab.task import Measured, Training
from qkv_lab.tasks.backcopy import Backcopy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TASK = Backcopy()
TRAINING = Training(steps=500, batch=32, lr=1e-2, warmup=100, weight_decay=0.1, evaluate_every=50, save_every=500)
QUICK_TASK: Mapping[str, Any] = {"length": 16}
QUICK_TRAINING: Mapping[str, Any] = {"steps": 4, "batch": 4, "warmup": 2, "evaluate_every": 2, "log_every": 1}

SINK = 0.3
"""A head has a sink if it puts more than this on a key (ε of Gu et al. 2025, arXiv:2410.10781, §3.2)."""
LEARNT = 0.9
"""A run has learnt the task if the model gets this share of the copies right, and a variant if this share of its runs
has. Only variants that have learnt the task count as evidence."""
DATED = "2026-11-23"
"""When the criteria were written: before the runs of 10 seeds and more, and after pilots of at most 3 seeds."""
STRONGEST = "Weight of the strongest head on the first token"
LESS = 0.05
"""Smaller differences of weight do not count as an effect."""
ALPHA = "check.sink"
"""The mean weight on the first key by layer and head; `Results.values` takes the strongest head of each run."""
ACCURACY = "evaluation.backcopy_accuracy"
EXCESS = "evaluation.excess"
ALPHA_LABEL = "weight on the first token"
PLAIN = "plain"
"""The variant without changes, whose runs all experiments share."""


@dataclass(frozen=True)
class Change:
    """The settings in which a variant differs from the plain run."""

    task: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, seed: int, quick: bool) -> Setting:
        """The settings of the run with this seed. Quick runs override the sequence length and the number of steps."""
        task = replace(TASK, **{**self.task, "model": replace(TASK.model, **self.model)})
        training = replace(TRAINING, **{**self.training, "seed": seed})
        return (
            Setting(replace(task, **QUICK_TASK), replace(training, **QUICK_TRAINING))
            if quick
            else Setting(task, training)
        )


def model_variants(**by_field: Iterable[Any]) -> dict[str, Change]:
    """One variant for each value of a field of the model's configuration; the value is its name."""
    ((name, values),) = by_field.items()
    return {str(value): Change(model={name: value}) for value in values}


def training_variants(**by_field: Iterable[Any]) -> dict[str, Change]:
    """One variant for each value of a field of the training settings; the value is its name."""
    ((name, values),) = by_field.items()
    return {f"{value:g}": Change(training={name: value}) for value in values}


def decoder_and_task(model: nn.Module, setting: Setting) -> tuple[DecoderLM, Backcopy]:
    """The model and the task of a run, with their types narrowed."""
    assert isinstance(model, DecoderLM)
    assert isinstance(setting.task, Backcopy)
    return model, setting.task


class Sweep(Experiment):
    """An experiment that trains variants of one run, of about 10 seconds."""

    variants: ClassVar[Mapping[str, Change]]
    axis: ClassVar[str] = ""
    """The label of the figure's x axis: the setting that varies."""

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """The settings of every variant with a seed."""
        return {name: change.setting(seed, quick) for name, change in self.variants.items()}

    def figure(self, results: Results) -> Figure:
        """The strongest head's weight on the first token, and the excess loss, for every variant."""
        from qkv_lab import draw

        figure, (left, right) = draw.panels(
            self.conclude(results).title, note(results), columns=2, width=8.4, height=2.9
        )
        plot_sinks(left, results)
        panel_title(right, "Loss over that of the chain itself")
        draw.by_seed(right, by_seed(results, EXCESS), colour=draw.COLOURS[1], grey=unlearnt_runs(results))
        right.set_ylabel("excess loss (nats a token)")
        right.set_ylim(bottom=min(0, right.get_ylim()[0]))
        for axes in (left, right):
            axes.set_xlabel(self.axis)
            rotate_labels(axes)
        return figure


def plot_sinks(axes: Axes, results: Results, values: Mapping[str, Mapping[int, float]] | None = None) -> None:
    """Plot weights on the first token, by default of the strongest heads, and the threshold of a sink as a line."""
    from qkv_lab import draw

    panel_title(axes, "The strongest head's sink")
    shown = by_seed(results, ALPHA) if values is None else values
    draw.by_seed(axes, shown, grey=unlearnt_runs(results) if values is None else {})
    axes.axhline(SINK, color=draw.MUTED, linewidth=0.9, linestyle="--")
    axes.text(
        len(shown) - 0.42, SINK + 0.03, f"a sink is > {SINK}", size=7, color=draw.MUTED, ha="right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}, zorder=2,
    )  # fmt: skip
    axes.set_ylabel(ALPHA_LABEL)
    axes.set_ylim(0, 1)


def panel_title(axes: Axes, title: str) -> None:
    """Write the title of a panel above it."""
    from qkv_lab.draw import INK

    axes.set_title(title, loc="left", size=9, color=INK)


def rotate_labels(axes: Axes) -> None:
    """Rotate the labels of the x axis if they would not fit side by side."""
    labels = axes.get_xticklabels()
    if sum(len(x.get_text()) + 2 for x in labels) > 40:
        for label in labels:
            label.set(rotation=35, ha="right", rotation_mode="anchor")


def note(
    results: Results, marks: str = "Dots: seeds, joined by thin lines, grey if not learnt; bars: mean and interval"
) -> str:
    """The line under a figure's title: task, model and training."""
    model = TASK.model
    length, steps = TASK.length, TRAINING.steps
    if results.quick:
        length, steps = QUICK_TASK["length"], QUICK_TRAINING["steps"]
    return (
        f"Bigram-Backcopy, {length} tokens; a decoder of {model.layers} layer, {model.heads} head, width "
        f"{model.d_model}, {steps} steps unless stated otherwise. {marks}. {results.note}"
    )


# --- evidence ---------------------------------------------------------------------------------------------------------


def by_seed(results: Results, name: str) -> dict[str, dict[int, float]]:
    """`Results.by_seed` of every variant with at least one run that did not diverge."""
    return {variant: results.by_seed(variant, name) for variant in results.variants if results.finished(variant)}


def sink(results: Results, variant: str, condition: str | None = None, **own: Any) -> Effect:
    """The effect of a variant's weight on the first token; it counts if the variant has learnt the task."""
    values = results.values(variant, ALPHA)
    name = variant if condition is None else condition
    return Effect(name, values, unless=not_learnt(results, variant), **own)


def has_sink(results: Results, variant: str = PLAIN) -> Effect:
    """The premise that a variant has a sink."""
    return Effect(
        f"a weight of {variant} on the first token", results.values(variant, ALPHA), bound=SINK,
        above=True, premise=True,
    )  # fmt: skip


def difference(results: Results, a: str, b: str, condition: str = "", name: str = ALPHA, **own: Any) -> Effect:
    """The effect of variant `a` minus variant `b` with the same seed; it counts if both have learnt the task."""
    return Effect(condition, results.differences(a, b, name), unless=not_learnt(results, a, b), **own)


def learnt(outcome: Outcome) -> bool:
    """Whether a run has learnt the task."""
    return outcome.diverged is None and value_of(outcome, ACCURACY) >= LEARNT


def not_learnt(results: Results, *variants: str) -> str:
    """Why variants do not count, such as "elu learnt its task in 1 of 20 runs"; an empty text if they do."""
    for variant in variants:
        runs = results.variants.get(variant, ())
        count = sum(map(learnt, runs))
        if not runs or count < LEARNT * len(runs):
            return f"{variant} learnt its task in {count} of {len(runs)} runs"
    return ""


def unlearnt_runs(results: Results) -> dict[str, set[int]]:
    """For each variant the seeds of the runs that did not learn the task."""
    return {v: {o.seed for o in runs if not learnt(o)} for v, runs in results.variants.items()}


def mean_of(values: Sequence[float]) -> str:
    """The mean with two decimals, for titles; "none" without values."""
    return f"{np.mean(values):.2f}" if len(values) else "none"


def summaries(values: Mapping[str, Sequence[float]], digits: int = 2) -> str:
    """The mean and range of each variant, as text.

    >>> summaries({"pre": [0.5], "post": [0.25, 0.75]})
    'pre 0.50, post 0.50 (0.25–0.75)'
    """
    return ", ".join(f"{name} {summary(found, digits)}" for name, found in values.items())


def strongest_head(outcome: Outcome) -> tuple[int, int]:
    """The layer and head with the largest mean weight on the first key."""
    return argmax_head(value_of(outcome, ALPHA))


def argmax_head(values: Any) -> tuple[int, int]:
    """The layer and head, counted from 0, of the largest number.

    >>> argmax_head([[0.1, 0.2], [0.9, 0.3]])
    (1, 0)
    """
    layer, head = np.unravel_index(np.argmax(values), np.shape(values))
    return int(layer), int(head)


def at_strongest_head(results: Results, name: str) -> dict[str, dict[int, float]]:
    """The value of a measure by layer and head at each run's strongest head, for every variant by seed."""
    found: dict[str, dict[int, float]] = {}
    for variant in results.variants:
        for outcome in results.finished(variant):
            layer, head = strongest_head(outcome)
            found.setdefault(variant, {})[outcome.seed] = float(value_of(outcome, name)[layer][head])
    return found


def alpha_over_steps(results: Results, variant: str) -> tuple[list[int], np.ndarray]:
    """The steps, and the weight on the first key (seeds, steps) of the head that is strongest at the end."""
    steps, values = results.curve(variant, ALPHA)
    best = [strongest_head(o) for o in results.finished(variant)]
    return steps, np.stack([run[:, layer, head] for run, (layer, head) in zip(values, best, strict=True)])


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
LEARNED, KEY = "learned sink", "key bias"


class Streaming(Experiment):
    """Bigram-Backcopy with rotary positions, evaluated beyond its training length with three kinds of caches."""

    name = "streaming"
    question = "How much does the loss rise when the first token is evicted, and does keeping this token avoid it?"
    criteria = (
        Criterion("C101", DATED, f"Rise of the loss (nats) when a cache of {BUDGET} keys evicts the first token, "
                  "without a sink of the model's own minus with", LEAST),
    )  # fmt: skip

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
            Effect("the rise without a sink of the model's own", list(plain.values()), bound=LEAST,
                   above=True, premise=True)
        ]  # fmt: skip
        for variant in (LEARNED, KEY):
            found.append(
                Effect(variant, paired(plain, rise(results, variant, WINDOW)),
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
