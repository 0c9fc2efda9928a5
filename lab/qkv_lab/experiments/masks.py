"""Experiments on the position of the sink under prefix and window masks (Gu et al. 2025, arXiv:2410.10781, §5.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import nn

from qkv_lab import heads
from qkv_lab.experiments.base import Results, Setting, paired, value_of
from qkv_lab.experiments.evidence import FAILS, HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import (
    DATED,
    MAIN_LOOKS,
    PLAIN,
    SINK,
    Change,
    Sweep,
    argmax_head,
    decoder_and_task,
    mean_of,
    not_learnt,
    note,
)
from qkv_lab.task import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX, WINDOWS = (4, 8), (8, 16, 32)
RANDOM = "any first symbol, prefix 8"
TEXTS = 16
LEAST = 4  # keys that are visible to fewer queries are left out: their means are too noisy


class MaskSweep(Sweep):
    """A sweep over masks that measures the mean weight on every key."""

    def measure(self, model: nn.Module, setting: Setting) -> Measured:
        """Weights of the head with the largest mean weight on a single key, over the queries after the prefix.

        ``by_key``: mean weight on each key, over the queries to which it is visible. ``first``: the same for the first
        key. ``prefix_first`` and ``prefix_rest``: mean weight on the first key and on the other keys of the prefix.
        ``oldest``: mean weight on the oldest key in the window, over the queries to which the first key is not visible;
        0 if there are none.
        """
        model, task = decoder_and_task(model, setting)
        config = task.model
        w = heads.maps(model, task.held_out(TEXTS)["ids"])
        n = w.shape[-1]
        query, key = np.arange(n)[:, None], np.arange(n)
        visible = (key <= query) & (query - key < (config.window or n)) & (query >= max(config.prefix, 1))
        mass = w.mean(0)
        by_key = (mass * visible).sum(-2) / np.maximum(visible.sum(0), 1)
        by_key = by_key[..., visible.sum(0) >= LEAST]
        layer, head = argmax_head(by_key.max(-1))
        own, late = mass[layer, head], range(config.window or n, n)
        inside = own[max(config.prefix, 1) :, : config.prefix].mean(0) if config.prefix else np.zeros(1)
        return {
            "by_key": by_key[layer, head].tolist(),
            "first": float(by_key[layer, head, 0]),
            "prefix_first": float(inside[0]),
            "prefix_rest": float(inside[1:].sum()),
            "oldest": float(np.mean([own[i, i - late.start + 1] for i in late])) if late else 0.0,
        }

    def figure(self, results: Results) -> Figure:
        """The mean weight on every key."""
        from qkv_lab import draw

        figure, (axes,) = draw.panels(
            self.conclude(results).title, note(results, "Lines: mean; bands: its 95 % interval"), width=7.2, height=2.9
        )
        by_key = {v: np.array([value_of(o, "measured.by_key") for o in results.finished(v)]) for v in results.variants}
        n = max(x.shape[-1] for x in by_key.values())
        draw.curves(axes, range(1, n + 1), by_key)
        axes.set_xscale("log", base=2)
        ticks = [2**i for i in range(n.bit_length())]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set(
            xlabel="key (position of the token, from 1)",
            ylabel="mean weight of queries that see it",
            ylim=(0, 1),
        )
        axes.legend(fontsize=8, frameon=False)
        return figure


class PrefixMask(MaskSweep):
    """A prefix within which attention is bidirectional."""

    name = "prefix"
    question = "Does a bidirectional prefix move the sink to other keys inside the prefix?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C083", DATED, "Weight of the strongest head, by queries after the prefix, on all other keys of the "
                  "prefix minus that on its first key", 0.0),
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

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The weights themselves."""
        return {"C083": _weights(results, {"first": "prefix_first", "others": "prefix_rest"}, without=PLAIN)}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Where the sink is."""
        says = {
            HOLDS: "A prefix moves the sink to other keys inside it",
            FAILS: "The sink stays on the first token of the prefix",
        }
        moved = [i.condition for i in verdicts["C083"].intervals if not i.unless and i.clears]
        only = f"The sink moves to other keys of the prefix only with {', '.join(moved)}" if moved else "No sink moves"
        return f"{says.get(verdicts['C083'].holds, only)} ({results.seeds} seeds)"


class WindowMask(MaskSweep):
    """Sliding windows of several sizes, which include the query's own key."""

    name = "window"
    question = "With a sliding window, is the sink the first token of the text or the first of the window?"
    looks = MAIN_LOOKS
    criteria = (
        Criterion("C084", DATED, "Weight of the strongest head on the first token of the text, by queries that see it, "
                  "minus that on the oldest key of the window, by all others", 0.1),
    )  # fmt: skip
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        **{f"window {n}": Change(model={"window": n}) for n in WINDOWS},
    }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect per window, if there is a sink on one of the two keys."""
        windows = [v for v in self.variants if v != PLAIN]
        return {"C084": [_moved(results, v, "first", "oldest") for v in windows]}

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The weights themselves."""
        return {"C084": _weights(results, {"first": "first", "oldest": "oldest"}, without=PLAIN)}

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Where the sink is."""
        says = {
            HOLDS: "With a window the sink is the first token of the text, as long as it is visible",
            FAILS: "With a window the sink is not the first token of the text",
        }
        start = says.get(verdicts["C084"].holds, "With a window the sink is not always the first token of the text")
        return f"{start} ({results.seeds} seeds)"


def _moved(results: Results, variant: str, a: str, b: str, *, sum_of: bool = False) -> Effect:
    """The effect of the weight on one key minus that on another; it counts if one of them, or their sum, is a sink."""
    found = difference_of(results, variant, a, b)
    one, other = (np.array(results.values(variant, f"measured.{x}")) for x in (a, b))
    most = one + other if sum_of else np.maximum(one, other)
    if not found.unless and len(most) and most.mean() <= SINK:
        return replace(found, unless=f"no sink: {most.mean():.2f}")
    return found


def difference_of(results: Results, variant: str, a: str, b: str) -> Effect:
    """The effect of one measurement of a variant minus another."""
    values = paired(results.by_seed(variant, f"measured.{a}"), results.by_seed(variant, f"measured.{b}"))
    return Effect(variant, values, (variant,), unless=not_learnt(results, variant))


def _weights(results: Results, names: Mapping[str, str], *, without: str) -> str:
    """Means of several measurements for every variant but one, as a sentence."""
    each = []
    for variant in results.variants:
        if variant != without:
            means = (f"{mean_of(results.values(variant, f'measured.{x}'))} ({what})" for what, x in names.items())
            each.append(f"{variant} {', '.join(means)}")
    return f"Weights: {'; '.join(each)}."
