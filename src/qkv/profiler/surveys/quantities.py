"""What a survey measures at every query of every head: statistics of weights, the built-in ones and one's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from qkv.profiler.data.variables import OF_HEADS, VARIABLES, Variable
from qkv.statistics import Statistic

BINS = 128
"""Of a histogram."""


@dataclass(frozen=True)
class Quantity:
    """A number that every query of every head has."""

    unit: str
    """"1" is a plain number or a share."""
    definition: str
    high: float
    """Where the last bin of the histogram ends; the first begins at 0. What lies beyond is counted in the last."""
    scale: Literal["x", "log2(1 + x)"] = "x"
    """What the bins are equally wide in."""
    label: str = ""
    share: bool = False
    one_text: bool = False
    """Says something only where queries and keys are the same text."""
    later: bool = False
    """Leaves out the first query of a causal text, which sees nothing but itself."""
    parameters: tuple[tuple[str, str], ...] | None = None
    """Of a statistic of one's own: the settings of its object. None if it is built in."""

    @classmethod
    def of(cls, about: Variable) -> Quantity:
        """What a variable of a profile says of itself."""
        scale: Literal["x", "log2(1 + x)"] = "log2(1 + x)" if about.logarithmic else "x"
        return cls(
            about.units, about.definition, about.highest, scale, about.label, about.share, about.one_text,
            about.from_second,
        )  # fmt: skip

    @property
    def logarithmic(self) -> bool:
        """Whether bins are equally wide in log2(1 + x)."""
        return self.scale != "x"


Quantities = Mapping[str, Quantity]

_OLD = ("spread",)  # in no survey, so that surveys of before and of today merge
QUANTITIES: Quantities = {name: Quantity.of(VARIABLES[name]) for name in OF_HEADS if name not in _OLD} | {
    "entropy_ratio": Quantity(
        "1", "entropy / ln(visible keys), of queries that see two or more; 1 is uniform", 1.0,
        label="Entropy ratio",
    ),
    "sink_mass": Quantity.of(VARIABLES["sink_mass"]),
}  # fmt: skip


def edges(quantity: str | Quantity) -> Float[np.ndarray, " edges"]:
    """The borders of the bins of a quantity's histogram, in its unit.

    >>> edges("sink")[:3]
    array([0.       , 0.0078125, 0.015625 ])
    """
    q = QUANTITIES[quantity] if isinstance(quantity, str) else quantity
    at = np.linspace(0, q.high, BINS + 1)
    return np.exp2(at) - 1 if q.logarithmic else at


def described(statistics: Iterable[Statistic] = ()) -> dict[str, Any]:
    """All that says what is measured, for the head of a file; statistics of one's own in the order of their names."""
    found: dict[str, Any] = {
        name: {"unit": q.unit, "definition": q.definition, "bins": BINS, "high": q.high, "scale": q.scale}
        for name, q in QUANTITIES.items()
    }
    for statistic in sorted(statistics, key=lambda s: s.name):
        q = Quantity.of(Variable.of(statistic))
        found[statistic.name] = {
            "unit": q.unit, "definition": q.definition, "bins": BINS, "high": q.high, "scale": q.scale,
            "own": {"label": q.label, "share": q.share, "one_text": q.one_text, "later": q.later,
                    "parameters": _parameters(statistic)},
        }  # fmt: skip
    return found


def of_description(said: Mapping[str, Any]) -> Quantities:
    """The quantities of a survey, from what the head of its file says."""
    found = {}
    for name, entry in said.items():
        if name in QUANTITIES:
            found[name] = QUANTITIES[name]
        else:
            own = {**entry.get("own", {})}
            parameters = tuple(sorted(own.pop("parameters", {}).items()))
            found[name] = Quantity(
                entry["unit"], entry["definition"], entry["high"], entry["scale"], **own, parameters=parameters
            )
    return found


def as_today(said: Mapping[str, Any]) -> dict[str, Any]:
    """A description in the order and the words of today: other words or another order are no other measurement."""
    names = [name for name in QUANTITIES if name in said] + [name for name in said if name not in QUANTITIES]
    today = described()
    return {name: today[name] if name in today and _same(said[name], today[name]) else said[name] for name in names}


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(name) == b.get(name) for name in ("bins", "high", "scale"))


def _parameters(statistic: Statistic) -> dict[str, str]:
    """The settings of an object, as far as they can be written down."""
    said = {name: repr(x) for name, x in sorted(vars(statistic).items()) if name not in ("name", "label", "definition")}
    return {name: x for name, x in said.items() if not re.search(r" at 0x[0-9a-f]+", x)}
