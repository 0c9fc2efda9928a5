"""What a fixed-size vector between encoder and decoder costs (Bahdanau et al. 2015, arXiv:1409.0473, fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.lab.experiments.base import Conclusion, Experiment, Results, Setting, Verdict, holds_if, larger, summary
from qkv.lab.tasks.translation import ARCHITECTURES, Translation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE, BAHDANAU = "rnn", "bahdanau"
LONGEST = 20  # words of a source
STEPS = {"rnn": 4000, "bahdanau": 1400, "luong": 1400, "luong-local": 1000, "transformer": 1400}
LEAST = 0.05  # of a share: a smaller difference is none
SHORT = 0.8  # of the shortest sentences, what a model must get right for its vector to be adequate
ACCURACY, CHANCE = 0.7, 2.0  # share of links that must be right, and how many times that of even weights
LABELS = {"rnn": "no attention", "bahdanau": "Bahdanau", "luong": "Luong, global", "luong-local": "Luong, local",
          "transformer": "Transformer"}  # fmt: skip


class Bottleneck(Experiment):
    """The same translations by recurrent models with and without attention, and by a Transformer."""

    name = "bottleneck"
    question = "Does a decoder that sees one vector fail at long sentences, and does attention repair it?"
    claims = ("C001", "C325", "C326", "C370")

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """One run each; the model without attention, whose steps are the cheapest, has the most of them."""
        return {name: [_setting(name, 0, quick)] for name in ((NONE, BAHDANAU) if quick else ARCHITECTURES)}

    def conclude(self, results: Results) -> Conclusion:
        """By exact match of the shortest and longest sentences, and the share of true links."""
        none, with_it = (by_length(results, name) for name in (NONE, BAHDANAU))
        falls = larger(none[:, 0].tolist(), none[:, -1].tolist(), LEAST)
        adequate = float(none[:, 0].mean()) >= SHORT
        gain = with_it - none.mean(0)
        widest = larger(gain[:, -1].tolist(), gain[:, 0].tolist(), LEAST)
        helped = larger(with_it[:, -1].tolist(), none[:, -1].tolist(), LEAST)
        ends = f"{summary(none[:, 0].tolist())} of the shortest and {summary(none[:, -1].tolist())} of the longest sentences"
        text1 = (
            f"Without attention {ends} come out word for word. It holds if at least {SHORT} of the shortest do, and "
            "fewer "
            f"of the longest by more than {LEAST} and the spread over seeds."
        )
        text370 = (
            f"Bahdanau's attention adds {summary(gain[:, 0].tolist())} to exact match on the shortest sentences and "
            f"{summary(gain[:, -1].tolist())} on the longest. It holds if the second is larger by more than {LEAST} "
            "and the spread "
            f"over seeds; it cannot be seen unless attention helps on the longest."
        )
        right = results.values(BAHDANAU, "check.best_accuracy")
        even = float(np.mean([1 / n for n in _words()]))
        aligned = min(right) >= max(ACCURACY, CHANCE * even)
        aer = {name: results.values(name, "check.best_aer") for name in results.variants if name != NONE}
        text325 = (
            f"Trained on pairs of sentences alone, Bahdanau's attention is strongest on a true counterpart for "
            f"{summary(right)} of the words; even weights would be right about {even:.2f} of the time. It holds at "
            f"{ACCURACY} "
            f"or more."
        )
        verdicts = [
            Verdict("C001", holds_if(adequate and falls), text1),
            Verdict("C325", holds_if(aligned), text325),
            Verdict("C326", holds_if(aligned), f"No alignment was ever shown to the model. {text325}"),
            Verdict("C370", holds_if(widest, seen=helped), text370),
        ]
        if falls and helped:
            title = "One vector carries short sentences and loses long ones; with attention length matters less"
        elif falls:
            title = "Long sentences come out worse without attention, and attention does not repair it here"
        else:
            title = "At this scale one vector carries long sentences as well as short ones"
        rates = "; ".join(f"{LABELS[name]} {summary(values)}" for name, values in aer.items() if values)
        paragraph = f"{text1} {text370} {text325} Alignment error rates of the best head: {rates}."
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """Exact match and BLEU by length, and alignment error rate."""
        from qkv.lab import draw

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
        errors = {LABELS[n].replace(", ", ",\n"): results.values(n, "check.best_aer") for n in names if n != NONE}
        draw.by_seed(panels[2], errors)
        panels[2].tick_params(axis="x", labelsize=7)
        panels[2].set(ylabel="alignment error rate (best head)", ylim=(0, None))
        return figure


def by_length(results: Results, variant: str, entry: str = "exact_match") -> np.ndarray:
    """A metric of each seed by length of the source, (seeds, groups)."""
    return np.array([o.evaluation[f"{entry}_by_length"] for o in results.finished(variant)], float)


def _words() -> list[int]:
    """Words of the held-out sources."""
    return [len(pair.source) for group in _task(BAHDANAU).unseen() for pair in group]


def _task(name: str) -> Translation:
    return Translation(architecture=name, max_words=LONGEST, d_model=96 if name == "transformer" else 128)  # type: ignore[arg-type]


def _setting(name: str, seed: int, quick: bool) -> Setting:
    settings: dict[str, Any] = {"seed": seed, "evaluate_every": 5000, "save_every": 500, "steps": STEPS[name]}
    if quick:
        settings |= {"steps": 20, "batch": 16, "warmup": 5}
    task = replace(_task(name), d_model=32, held_out=8) if quick else _task(name)
    return Setting(task, replace(Translation.training(), **settings))
