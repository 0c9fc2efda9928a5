"""Experiments on how sinks depend on the training data: its amount, and the first token (Gu et al. 2025, §5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from qkv_lab import track
from qkv_lab.experiments.base import Results, Setting, paired
from qkv_lab.experiments.evidence import FAILS, HOLDS, ONLY, Criterion, Effect, Verdict, number
from qkv_lab.experiments.sinks import (
    ALPHA,
    DATED,
    LEARNT,
    MAIN_LOOKS,
    PLAIN,
    SINK,
    TRAINING,
    Change,
    Sweep,
    argmax_head,
    decoder_and_task,
    difference,
    has_sink,
    mean_of,
    not_learnt,
    note,
    panel_title,
    plot_sinks,
    rotate_labels,
)
from qkv_lab.task import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIQUE = (16, 64, 256, 1024)
FEW, MANY = UNIQUE[-2:]
HALF = ", half the steps"
NO_LIMIT = "no limit"
TEXTS = 16
RANDOM = "random first"


class DataAmount(Sweep):
    """Different numbers of distinct training sequences, repeated to fill the same number of steps."""

    name = "data_amount"
    question = "How many distinct sequences does a sink need, and does diversity matter more than the number of steps?"
    criteria = (
        Criterion("C080", DATED, "Weight of the strongest head on the first token of its own training sequences, with "
                  f"{UNIQUE[0]} distinct ones", SINK, above=False),
        Criterion("C081", DATED, f"Gain in weight from {MANY // FEW} times as many distinct sequences minus that from "
                  "twice the steps", 0.05),
    )  # fmt: skip
    axis = "distinct sequences in training"
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{n}": Change(task={"unique": n}) for n in UNIQUE},
        NO_LIMIT: Change(),
        **{f"{n}{HALF}": Change(task={"unique": n}, training={"steps": TRAINING.steps // 2}) for n in (FEW, MANY)},
    }

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """On sequences of the training: the strongest head's weight on the first token, and the accuracy of copies."""
        model, task = decoder_and_task(model, setting)
        batch = task.batch(0, TEXTS, setting.training.seed)
        ids, targets = batch["ids"], batch["targets"]
        copies = task.is_trigger(ids)
        right = (model(ids).argmax(-1) == targets)[copies]
        first = track.weights(model, ids)["first"][..., 1:].mean((0, 3))
        return {"own_sink": float(first.max()), "own_accuracy": float(right.double().mean())}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C080 by the fewest sequences, if they are learnt; C081 by more sequences against more steps."""
        fewest = f"{UNIQUE[0]}"
        accuracy = results.values(fewest, "measured.own_accuracy")
        able = sum(x >= LEARNT for x in accuracy)
        why = (
            "" if accuracy and able >= LEARNT * len(accuracy) else f"{fewest}: {able} of {len(accuracy)} runs learnt it"
        )
        needs = [
            has_sink(results, NO_LIMIT),
            Effect("", results.values(fewest, "measured.own_sink"), (fewest,), unless=why),
        ]
        diverse = difference(results, f"{MANY}{HALF}", f"{FEW}", "")
        return {"C080": needs, "C081": [has_sink(results, NO_LIMIT), diverse]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The weights on held-out sequences."""
        held_out = ", ".join(f"{v} {mean_of(x)}" for v, x in results.by_variant(ALPHA).items())
        return {"C080": f"On held-out sequences, by their number in training: {held_out}."}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Whether the fewest sequences are enough."""
        seeds = f"({results.seeds} seeds)"
        most = mean_of(results.values(NO_LIMIT, ALPHA))
        says = {
            HOLDS: f"A sink needs diverse data: none with {UNIQUE[0]} sequences, {most} without a limit {seeds}",
            FAILS: f"Even {UNIQUE[0]} distinct sequences are enough for a sink {seeds}",
        }
        return says.get(verdicts["C080"].holds, f"Sinks and the number of distinct sequences {seeds}")


class FirstToken(Sweep):
    """Training sequences with a fixed or a random first token, tested on changed and random sequences."""

    name = "first_token"
    question = "Does a sink depend on which token is first, and does it form on random tokens?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C062", DATED, "Weight of the strongest head on the first position", SINK),
        Criterion("C065", DATED, "Weight of the strongest head on the first token, followed by random symbols", SINK),
    )
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        RANDOM: Change(task={"first": "random"}),
        f"{RANDOM}, 3 × the steps": Change(task={"first": "random"}, training={"steps": 3 * TRAINING.steps}),
    }

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Mean weights on the first token, for the head that has the largest on held-out sequences.

        ``replaced``: with the first token replaced by each symbol; ``random_tokens``: with all tokens but the first
        drawn uniformly; ``all_random``: with all tokens drawn uniformly.
        """
        model, task = decoder_and_task(model, setting)
        ids = task.held_out(TEXTS)["ids"]
        first = track.weights(model, ids)["first"][..., 1:].mean((0, 3))
        layer, head = argmax_head(first)

        def weight(texts: torch.Tensor) -> np.ndarray:
            return np.asarray(track.weights(model, texts)["first"][:, layer, head, 1:].mean(1))

        changed = ids.repeat(task.symbols, 1)
        changed[:, 0] = torch.arange(task.symbols).repeat_interleave(len(ids))
        noise = torch.randint(task.symbols, ids.shape, generator=torch.Generator().manual_seed(0))
        kept = noise.clone()
        kept[:, 0] = ids[:, 0]
        replaced = weight(changed).reshape(task.symbols, len(ids)).mean(1)
        return {
            "replaced": float(replaced.mean()),
            "replaced_least": float(replaced.min()),
            "replaced_most": float(replaced.max()),
            "random_tokens": float(weight(kept).mean()),
            "all_random": float(weight(noise).mean()),
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """C062 for models that always saw <s> first, when it is replaced, and for models that saw any symbol first."""
        others = [v for v in self.variants if v != PLAIN]
        first = [
            has_sink(results),
            Effect("trained with <s> first, which is replaced by every symbol in turn",
                   results.values(PLAIN, "measured.replaced"), (PLAIN,), unless=not_learnt(results, PLAIN)),
            *(Effect(f"trained with any symbol first{v.removeprefix(RANDOM)}", results.values(v, ALPHA), (v,),
                     unless=not_learnt(results, v)) for v in others),
        ]  # fmt: skip
        noise = Effect("", results.values(PLAIN, "measured.random_tokens"), (PLAIN,), unless=not_learnt(results, PLAIN))
        return {"C062": first, "C065": [has_sink(results), noise]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The range over symbols."""
        if not results.finished(PLAIN):
            return {}
        least = min(results.values(PLAIN, "measured.replaced_least"))
        most = max(results.values(PLAIN, "measured.replaced_most"))
        lower = paired(results.by_seed(PLAIN, "measured.replaced"), results.by_seed(PLAIN, ALPHA))
        return {
            "C062": f"Replacing <s> changes the weight by {number(float(np.mean(lower)))}; single symbols get "
            f"{number(least)} to {number(most)}."
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Whether the sink depends on the token."""
        says = {
            HOLDS: "The sink is on the first position, whichever token is there",
            FAILS: "The sink is specific to <s>: other first tokens have none",
            ONLY: "The sink is on the first position under some conditions only",
        }
        return f"{says.get(verdicts['C062'].holds, 'Whether the first token matters is open')} ({results.seeds} seeds)"

    def figure(self, results: Results) -> Figure:
        """The weight on the first token: on held-out sequences, with another first token, and on random tokens."""
        from qkv_lab import draw

        figure, panels = draw.panels(self.conclude(results).title, note(results), columns=2, width=8.4, height=2.9)
        names: dict[str, str] = {PLAIN: "always <s>", RANDOM: "any symbol"}
        measures: dict[str, Any] = {
            "as trained": ALPHA,
            "first replaced": "measured.replaced",
            "random tokens after it": "measured.random_tokens",
            "all tokens random": "measured.all_random",
        }
        for axes, (variant, name) in zip(panels, names.items(), strict=True):
            plot_sinks(axes, results, {what: results.by_seed(variant, x) for what, x in measures.items()})
            panel_title(axes, f"Trained with {name} first")
            axes.set_xlabel("sequences the model reads")
            rotate_labels(axes)
        return figure
