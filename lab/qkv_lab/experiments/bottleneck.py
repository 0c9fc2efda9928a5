"""Experiment on the cost of a fixed-size vector between encoder and decoder (Bahdanau et al. 2015, arXiv:1409.0473,
fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv_lab.experiments.base import Experiment, Results, Setting, summary
from qkv_lab.experiments.evidence import HOLDS, Criterion, Effect, Verdict
from qkv_lab.experiments.sinks import DATED
from qkv_lab.tasks.translation import ARCHITECTURES, Translation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE, BAHDANAU = "rnn", "bahdanau"
LONGEST = 20  # most words in a source sentence
STEPS = {"rnn": 4000, "bahdanau": 1400, "luong": 1400, "luong-local": 1000, "transformer": 1400}
OTHERS = 3  # seeds of the architectures that no claim is about
LEAST = 0.05  # smaller differences of accuracy do not count as an effect
SHORT = 0.8  # the accuracy on the shortest sentences from which the vector counts as adequate
ACCURACY = 0.7  # least accuracy of links
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
        Criterion("C325", DATED, LINKS, ACCURACY),
        Criterion("C326", DATED, f"{LINKS}, trained on sentence pairs alone", ACCURACY),
        Criterion("C370", DATED, "Gain in exact translations from Bahdanau's attention on the longest sentences minus "
                  "that on the shortest", LEAST),
    )  # fmt: skip
    looks = (10, 20)

    def settings(self, seed: int, quick: bool) -> Mapping[str, Setting]:
        """One run per architecture. The models without attention have the most steps, which are the cheapest.

        The claims are about the first two architectures; the others, for the figure, have 3 seeds.
        """
        names = (NONE, BAHDANAU) if quick or seed >= OTHERS else ARCHITECTURES
        return {name: _setting(name, seed, quick) for name in names}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """By exact match on the shortest and longest sentences, and by the accuracy of alignment links."""
        none, with_it = (by_length(results, name) for name in (NONE, BAHDANAU))
        seeds = min(len(none), len(with_it))
        gain = with_it[:seeds] - none[:seeds]
        both = (NONE, BAHDANAU)
        aligned = [Effect("", results.values(BAHDANAU, "check.best_accuracy"), (BAHDANAU,))]
        return {
            "C001": [
                Effect("the shortest", none[:, 0].tolist(), (NONE,)),
                Effect("the difference", (none[:, 0] - none[:, -1]).tolist(), (NONE,), bound=LEAST),
            ],
            "C325": aligned,
            "C326": aligned,
            "C370": [
                Effect("a gain on the longest", gain[:, -1].tolist(), both, bound=LEAST, premise=True),
                Effect("", (gain[:, -1] - gain[:, 0]).tolist(), both),
            ],
        }

    def remarks(self, results: Results) -> Mapping[str, str]:
        """Chance, and the other architectures."""
        even = float(np.mean([1 / n for n in _words()]))
        aer = {name: results.values(name, "check.best_aer") for name in results.variants if name != NONE}
        rates = "; ".join(f"{LABELS[name]} {summary(values)}" for name, values in aer.items() if values)
        return {
            "C325": f"With uniform weights it would be about {even:.2f}. Alignment error rates, best head: {rates}."
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """Whether the vector is too small for long sentences, and whether attention helps."""
        falls, helps = (verdicts[claim].holds == HOLDS for claim in ("C001", "C370"))
        seeds = f"({len(results.finished(NONE))} seeds)"
        if falls and helps:
            return f"One vector is enough for short sentences only; with attention, length matters less {seeds}"
        if falls:
            return f"Without attention long sentences are translated worse {seeds}"
        return f"At this scale one vector serves long sentences, too {seeds}"

    def figure(self, results: Results) -> Figure:
        """Exact match and BLEU by length, and alignment error rates."""
        from qkv_lab import draw

        names = [name for name in results.variants if results.finished(name)]
        note = f"Generated English–French grammar, held-out sentences, greedy decoding. {results.note}"
        figure, panels = draw.panels(self.conclude(results).title, note, columns=3, width=9.6, height=2.9)
        groups = _task(NONE).groups
        x = list(range(len(groups)))
        for axes, entry, label in zip(panels, ("exact_match", "bleu"), ("exact match", "BLEU"), strict=False):
            draw.curves(axes, x, {LABELS[n]: by_length(results, n, entry) for n in names}, markers=True)
            axes.set_xticks(x, groups)
            axes.set(xlabel="words of the source", ylabel=label, ylim=(0, None))
        panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        panels[1].legend(fontsize=7.5, frameon=False, loc="lower left")
        errors = {LABELS[n].replace(", ", ",\n"): results.by_seed(n, "check.best_aer") for n in names if n != NONE}
        draw.by_seed(panels[2], errors)
        panels[2].tick_params(axis="x", labelsize=7)
        panels[2].set(ylabel="alignment error rate (best head)", ylim=(0, None))
        return figure


def by_length(results: Results, variant: str, entry: str = "exact_match") -> np.ndarray:
    """A metric by seed and length of the source, (seeds, groups)."""
    return np.array([o.evaluation[f"{entry}_by_length"] for o in results.finished(variant)], float)


def _words() -> list[int]:
    """The number of words in each held-out source."""
    return [len(pair.source) for group in _task(BAHDANAU).unseen() for pair in group]


def _task(name: str) -> Translation:
    return Translation(architecture=name, max_words=LONGEST, d_model=96 if name == "transformer" else 128)  # type: ignore[arg-type]


def _setting(name: str, seed: int, quick: bool) -> Setting:
    settings: dict[str, Any] = {"seed": seed, "evaluate_every": 5000, "save_every": 500, "steps": STEPS[name]}
    if quick:
        settings |= {"steps": 20, "batch": 16, "warmup": 5}
    task = replace(_task(name), d_model=32, held_out=8) if quick else _task(name)
    return Setting(task, replace(Translation.training(), **settings))
