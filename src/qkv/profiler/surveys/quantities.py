"""The quantities that a survey measures at every query of every head: built-in and custom statistics of the weights."""

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
"""Number of bins of a histogram."""


@dataclass(frozen=True)
class Quantity:
    """A number measured at every query of every head."""

    unit: str
    """"1" stands for a plain number or a share."""
    definition: str
    high: float
    """End of the last bin of the histogram, which also counts larger values; the first bin begins at 0."""
    scale: Literal["x", "log2(1 + x)"] = "x"
    """The scale in which bins have equal width."""
    label: str = ""
    share: bool = False
    one_text: bool = False
    """True if it is defined only where queries and keys are the same text."""
    later: bool = False
    """True if the first query of a text is left out: in a causal model it can attend only to itself."""
    parameters: tuple[tuple[str, str], ...] | None = None
    """The settings of a custom statistic; None if the quantity is built in."""

    @classmethod
    def of(cls, about: Variable) -> Quantity:
        """The quantity with the description of a profile's variable."""
        scale: Literal["x", "log2(1 + x)"] = "log2(1 + x)" if about.logarithmic else "x"
        return cls(
            about.units, about.definition, about.highest, scale, about.label, about.share, about.one_text,
            about.from_second,
        )  # fmt: skip

    @property
    def logarithmic(self) -> bool:
        """True if bins have equal width in log2(1 + x)."""
        return self.scale != "x"


Quantities = Mapping[str, Quantity]

_LEFT_OUT = ("spread",)  # nearly redundant with distance
QUANTITIES: Quantities = {name: Quantity.of(VARIABLES[name]) for name in OF_HEADS if name not in _LEFT_OUT} | {
    "entropy_ratio": Quantity(
        "1", "entropy / ln(visible keys), for queries with two or more visible keys; 1 is uniform", 1.0,
        label="Entropy ratio",
    ),
    "sink_mass": Quantity.of(VARIABLES["sink_mass"]),
}  # fmt: skip


def edges(quantity: str | Quantity) -> Float[np.ndarray, " edges"]:
    """The edges of the bins of a quantity's histogram, in its unit.

    >>> edges("sink")[:3]
    array([0.       , 0.0078125, 0.015625 ])
    """
    q = QUANTITIES[quantity] if isinstance(quantity, str) else quantity
    at = np.linspace(0, q.high, BINS + 1)
    return np.exp2(at) - 1 if q.logarithmic else at


def described(statistics: Iterable[Statistic] = ()) -> dict[str, Any]:
    """The description of all quantities for the header of a file; custom statistics are sorted by name."""
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


def of_description(description: Mapping[str, Any]) -> Quantities:
    """The quantities of a survey, from the description in the header of its file."""
    found = {}
    for name, entry in description.items():
        if name in QUANTITIES:
            found[name] = QUANTITIES[name]
        else:
            custom = {**entry.get("own", {})}
            parameters = tuple(sorted(custom.pop("parameters", {}).items()))
            found[name] = Quantity(
                entry["unit"], entry["definition"], entry["high"], entry["scale"], **custom, parameters=parameters
            )
    return found


def _parameters(statistic: Statistic) -> dict[str, str]:
    """The settings of a statistic's object as text; settings without a reproducible text are left out."""
    texts = {n: repr(x) for n, x in sorted(vars(statistic).items()) if n not in ("name", "label", "definition")}
    return {name: x for name, x in texts.items() if not re.search(r" at 0x[0-9a-f]+", x)}
