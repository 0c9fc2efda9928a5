"""Experiments on the position of the sink under prefix and window masks (Gu et al. 2025, arXiv:2410.10781, §5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import nn

from qkv.lab import heads
from qkv.lab.experiments.base import Conclusion, Results, Setting, Verdict, holds_if, larger, value_of
from qkv.lab.experiments.sinks import (
    PLAIN,
    SINK,
    Change,
    Sweep,
    argmax_head,
    decoder_and_task,
    has_sink,
    note,
    summaries,
)
from qkv.lab.task import Measured

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
        from qkv.lab import draw

        figure, (axes,) = draw.panels(
            self.conclude(results).title, note(results, "Lines: mean; bands: range over seeds"), width=7.2, height=2.9
        )
        by_key = {v: np.array([value_of(o, "measured.by_key") for o in results.finished(v)]) for v in results.variants}
        n = max(x.shape[-1] for x in by_key.values())
        draw.curves(axes, range(1, n + 1), by_key)
        axes.set_xscale("log", base=2)
        ticks = [2**i for i in range(n.bit_length())]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set(
            xlabel="key (position of the token, from 1)",
            ylabel="mean weight (over queries with the key visible)",
            ylim=(0, 1),
        )
        axes.legend(fontsize=8, frameon=False)
        return figure


class PrefixMask(MaskSweep):
    """A prefix within which attention is bidirectional."""

    name = "prefix"
    question = "Does a bidirectional prefix move the sink to other keys inside the prefix?"
    claims = ("C083",)
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        **{f"prefix {n}": Change(model={"prefix": n}) for n in PREFIX},
        RANDOM: Change(task={"first": "random"}, model={"prefix": 8}),
    }

    def conclude(self, results: Results) -> Conclusion:
        """By the weight on the first key of the prefix and on its other keys."""
        prefixed = [v for v in results.variants if v != PLAIN and results.finished(v)]
        first = {v: results.values(v, "measured.prefix_first") for v in prefixed}
        rest = {v: results.values(v, "measured.prefix_rest") for v in prefixed}
        resting = [v for v in prefixed if min(np.add(first[v], rest[v])) > SINK]
        moved = [v for v in resting if larger(rest[v], first[v])]
        text = (
            f"Weight of the strongest head, by queries after the prefix, on its first key: {summaries(first)}; on all "
            f"its others: {summaries(rest)}. The claim holds if in every variant with a sink in the prefix (together > "
            f"{SINK}) the others have more than the first, by more than the spread over seeds; it cannot be seen if "
            "none has one."
        )
        title = (
            "No sink forms in a prefix"
            if not resting
            else "A prefix moves the sink to other keys inside it"
            if moved == resting
            else f"The sink moves to other keys of the prefix only with {', '.join(moved)}"
            if moved
            else "The sink stays on the first token of the prefix"
        )
        holds = holds_if(moved == resting, bool(resting))
        return Conclusion([Verdict("C083", holds, text)], title, f"{title}. {text}")


class WindowMask(MaskSweep):
    """Sliding windows of several sizes, which include the query's own key."""

    name = "window"
    question = "With a sliding window, is the sink the first token of the text or the first of the window?"
    claims = ("C084",)
    variants: ClassVar[Mapping[str, Change]] = {
        PLAIN: Change(),
        **{f"window {n}": Change(model={"window": n}) for n in WINDOWS},
    }

    def conclude(self, results: Results) -> Conclusion:
        """By the weight on the first token while it is visible, and on the oldest key of the window after that."""
        windows = [v for v in results.variants if v != PLAIN and results.finished(v)]
        first = {v: results.values(v, "measured.first") for v in windows}
        oldest = {v: results.values(v, "measured.oldest") for v in windows}
        absolute = [v for v in windows if has_sink(first[v]) and larger(first[v], oldest[v])]
        resting = [v for v in windows if has_sink(first[v]) or has_sink(oldest[v])]
        text = (
            f"Weight of the strongest head on the first token of the text, over queries that see it: "
            f"{summaries(first)}; on the oldest key of the window, over all other queries: {summaries(oldest)}. The "
            f"claim holds if in every variant that has a sink on either (> {SINK} in every run) it is the first token, "
            "by more than the spread over seeds, and cannot be seen if none has."
        )
        title = (
            "No sink forms with a window"
            if not resting
            else "With a window the sink is the first token of the text, as long as it is visible"
            if absolute == resting
            else "With a window the sink is not always the first token of the text"
        )
        without = [v for v in windows if v not in resting]
        extra = f" No sink with {', '.join(without)}." if without and resting else ""
        verdict = Verdict("C084", holds_if(absolute == resting, bool(resting)), f"{text}{extra}")
        return Conclusion([verdict], title, f"{title}. {text}{extra}")
