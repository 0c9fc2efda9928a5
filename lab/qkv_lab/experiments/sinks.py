"""Shared parts of the experiments on attention sinks in Bigram-Backcopy: run settings, criteria and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from torch import nn

from qkv.models import DecoderLM
from qkv_lab.experiments.base import Experiment, Outcome, Results, Setting, summary, value_of
from qkv_lab.experiments.evidence import Effect
from qkv_lab.task import Training
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
MAIN_LOOKS = (20, 40)
"""The looks of the experiments on the main claims about sinks."""
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
    return Effect(name, values, (variant,), unless=not_learnt(results, variant), **own)


def has_sink(results: Results, variant: str = PLAIN) -> Effect:
    """The premise that a variant has a sink."""
    return Effect(
        f"a weight of {variant} on the first token", results.values(variant, ALPHA), (variant,), bound=SINK,
        above=True, premise=True,
    )  # fmt: skip


def difference(results: Results, a: str, b: str, condition: str = "", name: str = ALPHA, **own: Any) -> Effect:
    """The effect of variant `a` minus variant `b` with the same seed; it counts if both have learnt the task."""
    return Effect(condition, results.differences(a, b, name), (a, b), unless=not_learnt(results, a, b), **own)


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
