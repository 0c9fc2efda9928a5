"""Experiment on the cost of a fixed-size vector between encoder and decoder (Bahdanau et al. 2015, arXiv:1409.0473,
fig. 2)."""

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
LONGEST = 20  # most words in a source sentence
STEPS = {"rnn": 4000, "bahdanau": 1400, "luong": 1400, "luong-local": 1000, "transformer": 1400}
LEAST = 0.05  # differences of accuracy below this are ignored
SHORT = 0.8  # the accuracy on the shortest sentences from which the vector counts as adequate
ACCURACY, CHANCE = 0.7, 2.0  # least accuracy of links, absolute and as a multiple of that of uniform weights
LABELS = {"rnn": "no attention", "bahdanau": "Bahdanau", "luong": "Luong, global", "luong-local": "Luong, local",
          "transformer": "Transformer"}  # fmt: skip


class Bottleneck(Experiment):
    """Recurrent models with and without attention, and a Transformer, on the translation task."""

    name = "bottleneck"
    question = "Does a decoder that gets one vector fail on long sentences, and does attention fix this?"
    claims = ("C001", "C325", "C326", "C370")

    def settings(self, quick: bool) -> Mapping[str, Sequence[Setting]]:
        """One run per architecture. The model without attention has the most steps, which are the cheapest."""
        return {name: [_setting(name, 0, quick)] for name in ((NONE, BAHDANAU) if quick else ARCHITECTURES)}

    def conclude(self, results: Results) -> Conclusion:
        """By exact match on the shortest and longest sentences, and by the accuracy of alignment links."""
        none, with_it = (by_length(results, name) for name in (NONE, BAHDANAU))
        falls = larger(none[:, 0].tolist(), none[:, -1].tolist(), LEAST)
        adequate = float(none[:, 0].mean()) >= SHORT
        gain = with_it - none.mean(0)
        widest = larger(gain[:, -1].tolist(), gain[:, 0].tolist(), LEAST)
        helped = larger(with_it[:, -1].tolist(), none[:, -1].tolist(), LEAST)
        short, long = summary(none[:, 0].tolist()), summary(none[:, -1].tolist())
        ends = f"{short} of the shortest and {long} of the longest sentences"
        text1 = (
            f"Without attention {ends} are translated exactly. It holds if at least {SHORT} of the shortest do, and "
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
            f"Trained on sentence pairs alone, Bahdanau's attention has its strongest weight on a true counterpart for "
            f"{summary(right)} of the words; with uniform weights this would be about {even:.2f}. It holds at "
            f"{ACCURACY} "
            f"or more."
        )
        verdicts = [
            Verdict("C001", holds_if(adequate and falls), text1),
            Verdict("C325", holds_if(aligned), text325),
            Verdict("C326", holds_if(aligned), f"The model was not trained on alignments. {text325}"),
            Verdict("C370", holds_if(widest, seen=helped), text370),
        ]
        if falls and helped:
            title = (
                "One vector is enough for short sentences but not for long ones; with attention, length matters less"
            )
        elif falls:
            title = "Without attention long sentences are translated worse, and attention does not fix this here"
        else:
            title = "At this scale one vector is enough for long sentences as well as for short ones"
        rates = "; ".join(f"{LABELS[name]} {summary(values)}" for name, values in aer.items() if values)
        paragraph = f"{text1} {text370} {text325} Alignment error rates of the best head: {rates}."
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """Exact match and BLEU by length, and alignment error rates."""
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
