"""Experiments on how sinks depend on the training data: its amount, and the first token (Gu et al. 2025, §5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn

from qkv.lab import track
from qkv.lab.experiments.base import Conclusion, Results, Setting, Verdict, holds_if, larger, summary, value_of
from qkv.lab.experiments.sinks import (
    ALPHA,
    PLAIN,
    SINK,
    TRAINING,
    Change,
    Sweep,
    argmax_head,
    decoder_and_task,
    has_sink,
    note,
    panel_title,
    plot_sinks,
    rotate_labels,
    summaries,
)
from qkv.lab.task import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIQUE = (16, 64, 256, 1024)
FEW, MANY = UNIQUE[-2:]
HALF = ", half the steps"
TEXTS = 16
RANDOM = "random first"


class DataAmount(Sweep):
    """Different numbers of distinct training sequences, repeated to fill the same number of steps."""

    name = "data_amount"
    question = "How many distinct sequences does a sink need, and does diversity matter more than the number of steps?"
    claims = ("C080", "C081")
    axis = "distinct sequences in training"
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{n}": Change(task={"unique": n}) for n in UNIQUE},
        "no limit": Change(),
        **{f"{n}{HALF}": Change(task={"unique": n}, training={"steps": TRAINING.steps // 2}) for n in (FEW, MANY)},
    }

    def conclude(self, results: Results) -> Conclusion:
        """C080 by the fewest sequences against no limit; C081 by four times the diversity against twice the steps."""
        found = results.by_variant(ALPHA)
        fewest, most = found.get(f"{UNIQUE[0]}", []), found.get("no limit", [])
        seen = has_sink(most)
        needs = bool(fewest) and max(fewest) <= SINK
        short, long, diverse = (found.get(v, []) for v in (f"{FEW}{HALF}", f"{FEW}", f"{MANY}{HALF}"))
        compared = bool(short and long and diverse)
        by_size, by_diversity = (float(np.mean(x) - np.mean(short)) if compared else 0.0 for x in (long, diverse))
        moved = compared and (larger(long, short) or larger(diverse, short))
        more = moved and larger(diverse, long)
        values = f"Weight of the strongest head on the first token: {summaries(found)}."
        first = (
            f"The claim holds if no run with {UNIQUE[0]} distinct sequences has more than {SINK} and every run without "
            f"a limit has ({summary(fewest) if fewest else 'none'} against {summary(most) if most else 'none'})."
        )
        second = (
            f"From {FEW} distinct sequences and half the steps, {MANY // FEW} times as many distinct ones change it by "
            f"{by_diversity:+.2f}, twice the steps by {by_size:+.2f}. The claim holds if the first is more by more "
            "than the spread over seeds, and cannot be seen if neither adds more than that."
        )
        title = (
            f"A sink needs diverse data: none with {UNIQUE[0]} distinct sequences, {np.mean(most):.2f} without a limit"
            if seen and needs
            else f"Even {UNIQUE[0]} distinct sequences are enough for a sink"
            if seen and has_sink(fewest)
            else "With few distinct sequences some runs form a sink and others do not"
            if seen
            else "No sink forms with any amount of data"
        )
        verdicts = [
            Verdict("C080", holds_if(needs, seen), f"{values} {first}"),
            Verdict("C081", holds_if(more, moved), second),
        ]
        return Conclusion(verdicts, title, f"{values} {first} {second}")


class FirstToken(Sweep):
    """Training sequences with a fixed or a random first token, tested on changed and random sequences."""

    name = "first_token"
    question = "Does a sink depend on which token is first, and does it form on random tokens?"
    claims = ("C062", "C065")
    variants: ClassVar[Mapping[str, Change]] = {PLAIN: Change(), RANDOM: Change(task={"first": "random"})}

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
        return {
            "replaced": weight(changed).reshape(task.symbols, len(ids)).mean(1).tolist(),
            "random_tokens": float(weight(kept).mean()),
            "all_random": float(weight(noise).mean()),
        }

    def conclude(self, results: Results) -> Conclusion:
        """By the model with a fixed first token: C062 when that token is replaced, C065 on random tokens."""
        found = results.by_variant(ALPHA)
        plain, other = found.get(PLAIN, []), found.get(RANDOM, [])
        seen = has_sink(plain)
        replaced = [value_of(o, "measured.replaced") for o in results.finished(PLAIN)]
        means = [float(np.mean(x)) for x in replaced]
        random = results.values(PLAIN, "measured.random_tokens")
        symbols = (
            f"With <s> replaced by each of the {len(replaced[0])} symbols in turn the weight on the first token is "
            f"{summary(means)}, between {min(map(min, replaced)):.2f} and {max(map(max, replaced)):.2f} for single "
            f"symbols (with <s>: {summary(plain)}). A model trained on sequences that begin with any symbol has "
            f"{summary(other)}. The claim holds if every mean with replaced tokens is above {SINK}."
            if replaced and other
            else "No run was finished."
        )
        noise = (
            f"On <s> and then uniformly random symbols it is {summary(random)}; the claim holds if every run has more "
            f"than {SINK}."
        )
        verdicts = [
            Verdict("C062", holds_if(has_sink(means), seen), symbols),
            Verdict("C065", holds_if(has_sink(random), seen), noise),
        ]
        title = (
            "No sink forms with a fixed first token"
            if not seen
            else "The sink stays on the first token, whichever token that is"
            if has_sink(means)
            else "The sink is specific to <s>: another first token does not replace it"
        )
        return Conclusion(verdicts, title, f"{symbols} {noise}")

    def figure(self, results: Results) -> Figure:
        """The weight on the first token: on held-out sequences, with another first token, and on random tokens."""
        from qkv.lab import draw

        figure, (left, right) = draw.panels(
            self.conclude(results).title, note(results), columns=2, width=7.6, height=2.9
        )
        names = {PLAIN: "always <s>", RANDOM: "any symbol"}
        for axes, variant in ((left, PLAIN), (right, RANDOM)):
            runs = results.finished(variant)
            values = {
                "as trained": results.values(variant, ALPHA),
                "first replaced": [float(np.mean(value_of(o, "measured.replaced"))) for o in runs],
                "random tokens after it": results.values(variant, "measured.random_tokens"),
                "all tokens random": results.values(variant, "measured.all_random"),
            }
            plot_sinks(axes, values)
            panel_title(axes, f"Trained with {names[variant]} first")
            axes.set_xlabel("sequences the model reads")
            rotate_labels(axes)
        return figure
