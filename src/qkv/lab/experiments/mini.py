"""Experiment on the bundled language model qkv-mini: its sinks, and its loss when they are evicted from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv.cache import Cache, Full, Sinks, Sliding
from qkv.lab import settings, track
from qkv.lab.experiments.base import Experiment, Results, summary
from qkv.lab.experiments.evidence import Criterion, Effect, Verdict, number
from qkv.lab.experiments.sinks import DATED
from qkv.lab.experiments.streaming import perplexity_by_position
from qkv.lab.task import Measured
from qkv.lab.tasks.language import Language
from qkv.models import DecoderLM, bundled, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "qkv-mini"
GROUPS, TEXTS = 10, 16  # groups of texts, which stand for seeds; texts per group
SHORT = 64  # tokens per text for the sink measures (T of Gu et al. 2025)
KEPT = 4  # first keys that are never evicted (StreamingLLM)
BUDGETS = (16, 32, 64, 128)  # cache sizes in keys
SINK, DRAINED = track.THRESHOLD, 0.5
MASSIVE = 100.0
SMALLEST = BUDGETS[0]
MODEL = "model"


class Mini(Experiment):
    """Evaluates qkv-mini on held-out Python with full, sliding and StreamingLLM caches; nothing is trained."""

    name = "mini"
    question = "Does a language model of Python have sinks, and how much does evicting them from the cache cost?"
    criteria = (
        Criterion("C061", DATED, f"Weight of qkv-mini's strongest head on the first of {SHORT} tokens", SINK),
        Criterion("C063", DATED, f"Weight of qkv-mini's strongest head on the first of {SHORT} tokens", SINK),
        Criterion("C067", DATED, "Largest magnitude of qkv-mini's hidden states at the first token over the median",
                  MASSIVE, ratio=True),
        Criterion("C068", DATED, "Norm of the first value over the mean of the others, in qkv-mini's strongest head",
                  DRAINED, above=False),
    )  # fmt: skip
    looks = (GROUPS,)

    def compute(self, seed: int, quick: bool) -> Mapping[str, Measured]:
        """For a group of texts: attention statistics, and the mean loss at late positions with each cache."""
        folder = bundled.folder_of(NAME)
        assert folder is not None
        model = load(folder)
        task, _ = settings.from_toml(folder / settings.RUN)
        assert isinstance(model, DecoderLM)
        assert isinstance(task, Language)
        ids = task.held_out(GROUPS * TEXTS)[seed::GROUPS][: 2 if quick else TEXTS]
        statistics = track.attention(model, ids[:, :SHORT])
        nats = {name: np.log(perplexity_by_position(model, ids, make)) for name, make in _caches(ids.shape[1]).items()}
        return {
            MODEL: {
                **{name: statistics[name] for name in ("sink", "sink_score", "value_drain", "massive")},
                "late": {name: float(x[max(BUDGETS) :].mean()) for name, x in nats.items()},
            }
        }

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Sinks by their weight, values and magnitudes; a group of texts stands for a seed."""
        alpha, drain = (self._by_head(results, name) for name in ("sink", "value_drain"))
        layer, head = self._strongest(results)
        weight = Effect("", alpha[:, layer, head].tolist())
        drained = Effect("", drain[:, layer, head].tolist())
        return {
            "C061": [weight],
            "C063": [weight],
            "C067": [Effect("", results.values(MODEL, "measured.massive"))],
            "C068": [replace(weight, condition="its weight on the first token", premise=True, bound=SINK, above=True),
                     drained],
        }  # fmt: skip

    def remarks(self, results: Results) -> Mapping[str, str]:
        """The number of heads with a sink, and what evicting it costs."""
        alpha = self._by_head(results, "sink")
        layer, head = self._strongest(results)
        heads = int((alpha.min(0) > SINK).sum())
        rises = "; ".join(
            f"{budget} keys: {summary(self._cost(results, f'last {budget}'), 3)} (window), "
            f"{summary(self._cost(results, _sinks_name(budget)), 3)} (with the first {KEPT})"
            for budget in BUDGETS
        )
        return {
            "C061": f"It is head {layer}.{head}; {heads} of {alpha[0].size} heads put more than {SINK} there in every "
            f"group of {TEXTS} texts. Rise of the loss (nats) from position {max(BUDGETS)} on: {rises}."
        }

    def title(self, results: Results, verdicts: Mapping[str, Verdict]) -> str:
        """What a window costs with and without the first tokens."""
        lost, kept = (np.mean(self._cost(results, x)) for x in (f"last {SMALLEST}", _sinks_name(SMALLEST)))
        return (
            f"qkv-mini with a cache of {SMALLEST} keys: its loss rises by {number(float(lost))} nats, and by "
            f"{number(float(kept))} if the first {KEPT} tokens stay ({results.seeds} groups of texts)"
        )

    @staticmethod
    def _by_head(results: Results, name: str) -> np.ndarray:
        """A measure by group, layer and head."""
        return np.array([o.measured[name] for o in results.finished(MODEL)], float)

    def _strongest(self, results: Results) -> tuple[int, int]:
        """The layer and head with the largest mean weight on the first token."""
        mean = self._by_head(results, "sink").mean(0)
        layer, head = np.unravel_index(mean.argmax(), mean.shape)
        return int(layer), int(head)

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
