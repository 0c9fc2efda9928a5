"""What a sink needs of the data: enough of it, and a first token that is known (Gu et al. 2025, §5)."""

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
    """So many distinct sequences, seen as often as it takes to fill the same number of steps."""

    name = "data_amount"
    question = (
        "How many distinct sequences does a sink need, and is their number more important than how many are seen?"
    )
    claims = ("C080", "C081")
    axis = "distinct sequences in training"
    variants: ClassVar[Mapping[str, Change]] = {
        **{f"{n}": Change(task={"unique": n}) for n in UNIQUE},
        "no limit": Change(),
        **{f"{n}{HALF}": Change(task={"unique": n}, training={"steps": TRAINING.steps // 2}) for n in (FEW, MANY)},
    }

    def conclude(self, results: Results) -> Conclusion:
        """C080 by the fewest against no limit; C081 by what four times the diversity and twice the size add."""
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
            f"A sink needs data: none with {UNIQUE[0]} distinct sequences, {np.mean(most):.2f} without a limit"
            if seen and needs
            else f"Even {UNIQUE[0]} distinct sequences make a sink"
            if seen and has_sink(fewest)
            else "Some runs with few distinct sequences have a sink and some have none"
            if seen
            else "No sink appears, however much data there is"
        )
        verdicts = [
            Verdict("C080", holds_if(needs, seen), f"{values} {first}"),
            Verdict("C081", holds_if(more, moved), second),
        ]
        return Conclusion(verdicts, title, f"{values} {first} {second}")


class FirstToken(Sweep):
    """Sequences that begin with the same token, or with any; and strange sequences for both models."""

    name = "first_token"
    question = "Does a sink depend on what the first token is, and does it appear on random tokens?"
    claims = ("C062", "C065")
    variants: ClassVar[Mapping[str, Change]] = {PLAIN: Change(), RANDOM: Change(task={"first": "random"})}

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Weights on the first token, of the head with most on held-out sequences.

        ``replaced``: with each symbol in place of the first token; ``random_tokens``: with all tokens but the first
        drawn uniformly; ``all_random``: with all.
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
        """C062 by the model that knows its first token, when it is replaced; C065 by the same on random tokens."""
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
            "No sink appears with a fixed first token"
            if not seen
            else "The sink stays on the first token whatever stands there"
            if has_sink(means)
            else "The sink belongs to <s>: another first token does not take its place"
        )
        return Conclusion(verdicts, title, f"{symbols} {noise}")

    def figure(self, results: Results) -> Figure:
        """The weight on the first token: as trained, replaced, on random tokens."""
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
