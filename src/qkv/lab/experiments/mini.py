"""Experiment on the bundled language model qkv-mini: its sinks, and its loss when they are evicted from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.lab import settings, track
from qkv.lab.experiments.base import UNSEEN, Conclusion, Experiment, Results, Verdict, holds_if, summary
from qkv.lab.experiments.streaming import perplexity_by_position
from qkv.lab.task import Measured
from qkv.lab.tasks.language import Language
from qkv.models import DecoderLM, bundled, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "qkv-mini"
GROUPS, TEXTS = 3, 16  # groups of texts, whose range shows the noise; texts per group
SHORT = 64  # tokens per text for the sink measures (T of Gu et al. 2025)
KEPT = 4  # first keys that are never evicted (StreamingLLM)
BUDGETS = (16, 32, 64, 128)  # cache sizes in keys
SINK, DRAINED = track.THRESHOLD, 0.5
LEAST = 0.02  # nats; smaller rises of the loss are ignored
MODEL = "model"


class Mini(Experiment):
    """Evaluates qkv-mini on held-out Python with full, sliding and StreamingLLM caches; nothing is trained."""

    name = "mini"
    question = "Does a language model of Python have sinks, and how much does evicting them from the cache cost?"
    claims = ("C061", "C063", "C067", "C068")

    def compute(self, quick: bool) -> Mapping[str, Sequence[Measured]]:
        """For each group of texts: attention statistics, and the mean loss at late positions with each cache."""
        folder = bundled.folder_of(NAME)
        assert folder is not None
        model = load(folder)
        task, _ = settings.from_toml(folder / settings.RUN)
        assert isinstance(model, DecoderLM)
        assert isinstance(task, Language)
        texts, groups = (2, 1) if quick else (TEXTS, GROUPS)
        rows = []
        for group in range(groups):
            ids = task.unseen[group::groups][:texts]
            statistics = track.attention(model, ids[:, :SHORT])
            nats = {
                name: np.log(perplexity_by_position(model, ids, make)) for name, make in _caches(ids.shape[1]).items()
            }
            rows.append({
                **{name: statistics[name] for name in ("sink", "sink_score", "value_drain", "massive")},
                "late": {name: float(x[max(BUDGETS) :].mean()) for name, x in nats.items()},
            })  # fmt: skip
        return {MODEL: rows}

    def conclude(self, results: Results) -> Conclusion:
        """Sinks by their weight, values and magnitudes; the cost of a window by the loss beyond all cache sizes."""
        alpha = np.array([o.measured["sink"] for o in results.finished(MODEL)])
        drain = np.array([o.measured["value_drain"] for o in results.finished(MODEL)])
        peak = results.values(MODEL, "measured.massive")
        layer, head = np.unravel_index(alpha.mean(0).argmax(), alpha.shape[1:])
        strongest, drained = alpha[:, layer, head].tolist(), drain[:, layer, head].tolist()
        heads = int((alpha.min(0) > SINK).sum())
        has = heads > 0
        text = (
            f"On the first {SHORT} tokens of held-out Python {heads} of {alpha[0].size} heads put more than {SINK} on "
            f"the first token in every group of texts; head {layer}.{head} puts {summary(strongest)}. It holds if one "
            "head does."
        )
        cost = {name: self._cost(results, name) for name in _caches(1)}
        spared = np.array([np.subtract(cost[f"last {budget}"], cost[_sinks_name(budget)]) for budget in BUDGETS])
        pays = bool(spared.min() > 0 and spared.mean(1).min() > LEAST)  # the same texts: group by group
        rises = "; ".join(
            f"{budget} keys: {summary(cost[f'last {budget}'], 3)} (window), {summary(cost[_sinks_name(budget)], 3)} "
            f"(with the first {KEPT})"
            for budget in BUDGETS
        )
        verdicts = [
            Verdict("C061", holds_if(has), text),
            Verdict("C063", holds_if(has), text),
            Verdict("C067", UNSEEN if max(peak) < 100 else holds_if(min(peak) >= 1000), (
                f"The largest magnitude at the first token is {summary(peak, 0)} times the median. It holds from 1000 "
                "on, and cannot be seen below 100."
            )),
            Verdict("C068", holds_if(max(drained) < DRAINED, seen=has), (
                f"The first value's norm at head {layer}.{head} is {summary(drained)} of the others' mean. It holds "
                f"below {DRAINED}, and cannot be seen without a sink."
            )),
        ]  # fmt: skip
        title = (
            "qkv-mini needs its sink tokens: a window without them has a higher loss than one with them"
            if pays
            else "qkv-mini does not need its first tokens more than any others"
        )
        paragraph = f"{text} Nats above those of all keys, from position {max(BUDGETS)} on: {rises}."
        return Conclusion(verdicts, title, paragraph)

    def figure(self, results: Results) -> Figure:
        """The weight on the first token in every head, and the loss by type and size of the cache."""
        from qkv.lab import draw

        figure, (left, right) = draw.panels(
            self.conclude(results).title,
            f"qkv-mini on held-out Python. Left: mean weight on <s> in the first {SHORT} tokens. Right: nats above "
            f"those of all keys, from position {max(BUDGETS)} on; dots: {results.seeds} groups of texts.",
            columns=2, width=7.8, height=2.9,
        )  # fmt: skip
        alpha = np.array([o.measured["sink"] for o in results.finished(MODEL)]).mean(0)
        layers, heads = (list(map(str, range(n))) for n in alpha.shape)
        image = draw.heatmap(left, alpha, rows=layers, columns=heads, vmax=1)
        for (row, column), value in np.ndenumerate(alpha):
            colour = "white" if value > 0.5 else draw.COLOURS[0]
            left.text(column, row, f"{value:.2f}", ha="center", va="center", size=7, color=colour)
        left.set(xlabel="head", ylabel="layer")
        figure.colorbar(image, ax=left, shrink=0.8).set_label("weight on the first token", size=8)
        by_kind = {
            "the last keys": [self._cost(results, f"last {b}") for b in BUDGETS],
            f"the first {KEPT} and the last": [self._cost(results, _sinks_name(b)) for b in BUDGETS],
        }
        draw.curves(right, BUDGETS, {name: np.array(values).T for name, values in by_kind.items()}, markers=True)
        right.set_xscale("log", base=2)
        right.set_xticks(BUDGETS, list(map(str, BUDGETS)))
        right.set(xlabel="keys in the cache", ylabel="loss above that of all keys (nats)")
        right.set_ylim(bottom=min(0, right.get_ylim()[0]))
        right.legend(frameon=False, fontsize=8)
        return figure

    @staticmethod
    def _cost(results: Results, cache: str) -> list[float]:
        """The rise of the loss over that of the full cache, in nats, for each group."""
        found: list[Any] = [o.measured["late"] for o in results.finished(MODEL)]
        return [late[cache] - late["all keys"] for late in found]


def _sinks_name(budget: int) -> str:
    return f"first {KEPT} + last {budget - KEPT}"


def _caches(length: int) -> dict[str, Callable[[], Cache]]:
    """The caches by name: full, and for each size a sliding window and StreamingLLM (first keys and window)."""
    made: dict[str, Callable[[], Cache]] = {"all keys": lambda: Full(length)}
    for budget in BUDGETS:
        made[f"last {budget}"] = lambda b=budget: Sliding(b)  # type: ignore[misc]
        made[_sinks_name(budget)] = lambda b=budget: Sinks(KEPT, b - KEPT)  # type: ignore[misc]
    return made
