"""Experiment on normalizers, learned sinks and gates, with which a head can be inactive without attending to a token
(Gu et al. 2025, §6.2; Qiu et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from qkv.profiler.capture.residual import attention_modules, observe_residual
from qkv_lab import heads
from qkv_lab.experiments import small
from qkv_lab.experiments.base import Setting
from qkv_lab.experiments.evidence import Criterion, Effect
from qkv_lab.experiments.results import Results
from qkv_lab.experiments.small import DATED, LEAST, SINK, STRONGEST, Change, Sweep, difference, sink
from qkv_lab.task import Measured

SOFTMAX, OFF, LEARNED, KEY, ELEMENT, HEAD, BARE = (
    "softmax", "off by one", "learned sink", "key bias", "gate elementwise", "gate a head", "no <s>",
)  # fmt: skip
UNNORMALISED = ("sigmoid", "elu", "relu")
DIVIDED = {"sigmoid": "sigmoid / sum", "elu": "elu / sum"}
"""The same weights divided by their sum, so that rows are normalised."""
STEPS = {"elu": 1500, "elu / sum": 1500}
"""Variants that need more steps to learn the task."""
GATES = (ELEMENT, HEAD)
TEXTS = 16
PEAK = 10.0
"""A layer has a peak if its largest magnitude at the first token is above this multiple of the median. It would be a
massive activation above 100 and 1,000 times the median (Sun et al. 2024, arXiv:2402.17762)."""
WORSE = 0.02
"""Smaller differences of loss, in nats a token, do not count as an effect."""


def _normalizer(name: str, value: str) -> Change:
    return Change(model={"normalizer": value}, training={"steps": STEPS[name]} if name in STEPS else {})


class Normalizers(Sweep):
    """Softmax, its alternatives, and learned sinks and gates in addition to it."""

    name = "normalizers"
    question = "Which normalizers, learned sinks and gates remove the sink, and what else changes?"
    criteria = (
        Criterion("C089", DATED, f"{STRONGEST} with rows divided by their sum, minus without", LEAST),
        Criterion("C090", DATED, f"{STRONGEST} without normalisation (rows divided by their sum to measure it)", SINK,
                  above=False),
        Criterion("C094", DATED, f"{STRONGEST} without normalisation (rows divided by their sum to measure it)", SINK,
                  above=False, remark="Only models of this size were trained."),
        Criterion("C098", DATED, "Largest magnitude at the first token over the median, with softmax minus with a "
                  "learned sink", 0.0),
        Criterion("C099", DATED, "Largest relative error of a layer's output in int8 (scaled by the largest "
                  "magnitude), with softmax minus with a learned sink", 0.0),
        Criterion("C103", DATED, f"{STRONGEST} with softmax minus with softmax off by one", LEAST),
        Criterion("C105", DATED, f"{STRONGEST} with a gate on the attention output", SINK, above=False,
                  remark="Only that sinks are gone is judged; these models have no massive activations with softmax "
                         "either."),
        Criterion("C134", DATED, f"{STRONGEST} with softmax minus with a learned key of value 0", LEAST),
        Criterion("C135", DATED, f"{STRONGEST} with softmax minus with softmax off by one", LEAST),
        Criterion("C140", DATED, "Weight on a learned first token <s> minus that on the first token of the text",
                  LEAST),
        Criterion("C378", "2026-11-24", "Excess loss, in nats a token, without normalisation minus with the same "
                  "weights divided by their sum", WORSE),
    )  # fmt: skip

    variants: ClassVar[Mapping[str, Change]] = {
        SOFTMAX: Change(),
        BARE: Change(task={"first": "random"}),
        OFF: Change(model={"normalizer": "off_by_one"}),
        LEARNED: Change(model={"sink": True}),
        KEY: Change(model={"key_bias": True}),
        **{name: _normalizer(name, name) for name in UNNORMALISED},
        **{name: _normalizer(name, f"{of}_sum") for of, name in DIVIDED.items()},
        ELEMENT: Change(model={"gate": "elementwise"}),
        HEAD: Change(model={"gate": "head"}),
    }

    def measure(self, model: Any, setting: Setting) -> Measured:
        """``int8_error``: the largest quantisation error of a layer's output; ``first``, ``second``: weights on keys.

        The weights are means over the queries from the third on, for the head with the largest weight on the first key.
        """
        task: Any = setting.task
        ids = task.held_out(TEXTS)["ids"]
        states: list[Tensor] = []
        with observe_residual(model, attention_modules(model), lambda _, depth, x: states.append(x.float())):
            w = heads.maps(model, ids)[..., 2:, :2].mean((0, 3))
        first, second = w[small.argmax_head(w[..., 0])]
        return {"int8_error": max(int8_error(x) for x in states[1:]), "first": float(first), "second": float(second)}

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """Each claim by the weight on the first token, or the measure that it names, compared with plain softmax."""
        premise = small.has_sink(results, SOFTMAX)
        peak = Effect(
            "the largest magnitude at the first token over the median, with softmax,",
            results.values(SOFTMAX, "check.massive"), bound=PEAK, premise=True,
        )  # fmt: skip
        off = [premise, difference(results, SOFTMAX, OFF)]
        token = results.by_seed(SOFTMAX, "measured.first") - results.by_seed(SOFTMAX, "measured.second")
        learned = {"a learned logit": LEARNED, "a learned key": KEY}

        def less(name: str) -> list[Effect]:
            return [peak, *(difference(results, SOFTMAX, v, what, name) for what, v in learned.items())]

        return {
            "C089": [premise, *(difference(results, by_sum, of, of) for of, by_sum in DIVIDED.items())],
            "C090": [premise, sink(results, "sigmoid")],
            "C094": [premise, sink(results, "sigmoid"), sink(results, "elu")],
            "C098": less("check.massive"),
            "C099": less("measured.int8_error"),
            "C103": off,
            "C105": [premise, *(sink(results, v) for v in GATES)],
            "C134": [premise, difference(results, SOFTMAX, KEY)],
            "C135": off,
            "C140": [premise, Effect("", list(token), unless=small.not_learnt(results, SOFTMAX))],
            "C378": [  # also of runs that did not learn the task, which is a harm
                small.minus(results, of, by_sum, small.EXCESS, of) for of, by_sum in DIVIDED.items()
            ],
        }


def int8_error(x: Float[Tensor, "b n d"]) -> float:
    """The relative error (RMS) of quantising a text's states to int8 with one scale, the largest magnitude in the text.

    >>> import torch
    >>> int8_error(torch.tensor([[[127.0, 1.0]]])), int8_error(torch.tensor([[[254.0, 1.0]]])) > 0
    (0.0, True)
    """
    scale = x.abs().flatten(1).amax(1)[:, None, None] / 127
    off = (x / scale).round() * scale - x
    return float((off.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).mean())
