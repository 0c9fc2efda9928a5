"""What a statistic is: its name, its definition, its unit, and what a tile of weights adds to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import Definition, require
from qkv.errors import InputError
from qkv.masks import Grid, Region

LEAST = -1e30  # the logarithm of a weight of 0: times 0 it is 0


@dataclass(frozen=True, eq=False)
class WeightTile:
    """The final weights of some queries and keys of some heads. Nothing in it may be written to.

    >>> region, grid = Region(slice(0, 1), slice(0, 2), offset=1), Grid.of(1, 2)
    >>> tile = WeightTile(torch.tensor([[[[0.25, 0.75]]]]), region, grid, visible=None)
    >>> tile.distances.tolist(), (tile.weights * tile.distances).sum(-1).tolist()
    ([[1, 0]], [[[0.25]]])
    """

    weights: Float[Tensor, "b h q k"]
    """0 where the mask hides, and for queries that do not count."""
    region: Region
    grid: Grid
    visible: Bool[Tensor, "#b #h q k"] | None
    """True where a query may attend; None if it may everywhere."""
    log: Float[Tensor, "b h q k"] | None = None
    first: int = 0
    """The key with which the text of these queries begins: keys before it are padding (`first` of `measure`)."""

    @cached_property
    def log_weights(self) -> Float[Tensor, "b h q k"]:
        """Natural logarithms, −1e30 for a weight of 0, so that weight · logarithm is 0 there."""
        if self.log is not None:
            return self.log
        return torch.where(self.weights > 0, self.weights.log(), LEAST)

    @property
    def queries(self) -> Int[Tensor, "q 1"]:
        """Positions of the queries among the keys, as a column."""
        return self.region.queries

    @property
    def keys(self) -> Int[Tensor, " k"]:
        """Positions of the keys."""
        return self.region.keys

    @property
    def distances(self) -> Int[Tensor, "q k"]:
        """How many tokens each key stands before its query; negative for keys after it."""
        return self.queries - self.keys


class Statistic(Definition):
    """A number for each query, or for each key, of each head: a reduction of the weights, tile by tile.

    A statistic of your own needs one method, `tile`, and says what it is by the attributes below. Give it to `measure`,
    `profile` or a survey as ``statistics=[Mine()]``; `qkv.testing.check_statistic` checks it.

    >>> import torch, qkv
    >>> class Heavy(Statistic):
    ...     name, label, unit, highest = "heavy", "Heavy keys", "keys", 100.0
    ...     definition = "number of keys with a tenth of the weight or more"
    ...     def tile(self, tile):
    ...         return (tile.weights >= 0.1).sum(-1)
    >>> q = k = torch.zeros(1, 1, 20, 8)
    >>> found = qkv.measure(q, k, mask=qkv.masks.Causal(), statistics=[Heavy()])
    >>> found.own["heavy"][0, 0, 8:12].tolist()
    [9.0, 10.0, 0.0, 0.0]
    """

    definitions: ClassVar[Mapping[str, tuple[str, ...]]] = {"tile": ()}

    name: str
    """In tables, data sets and files: letters, digits and underscores."""
    label: str = ""
    """On figures and pages; the name if empty."""
    unit: str = "1"
    """"nats", "tokens", "keys", "queries" …; "1" is a plain number or a share."""
    definition: str
    """What it says, as a formula or in words."""
    over: Literal["query", "key"] = "query"
    """Whether there is a number for each query or for each key."""
    share: bool = False
    """Whether it is a share of a query's weight, to be written as a percentage."""
    highest: float = 1.0
    """Where histograms end, in the unit, or in log2(1 + it); what lies beyond is counted in the last bin."""
    logarithmic: bool = False
    """Whether bins of histograms are equally wide in log2(1 + x)."""
    one_text: bool = False
    """Whether it says something only where queries and keys are tokens of the same text."""
    from_second: bool = False
    """Whether means over a causal text leave out its first query, which sees nothing but itself."""
    zero: float = 0.0
    """What `merge` starts with: merged with it, every number stays."""
    parts: int = 1
    """How many numbers a tile adds for each query or key; if more than one, they are a first dimension: moments."""

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "name" in cls.__dict__ and "label" not in cls.__dict__:
            cls.label = cls.name

    def tile(self, tile: WeightTile) -> Float[Tensor, "*parts b h n"]:
        """What a tile adds, for each of its queries (b, h, q) or keys (b, h, k); (parts, b, h, …) for several parts."""
        raise NotImplementedError

    def merge(self, a: Float[Tensor, "*n"], b: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Two parts as one, in any order and however the tiles are shared out; the sum if not redefined."""
        return a + b

    def finish(self, total: Float[Tensor, "*parts b h n"], mass: Float[Tensor, "b h nq"]) -> Float[Tensor, "b h n"]:
        """The number, from all parts merged, and from the sum M of each query's weights; float64.

        As it is if not redefined.
        """
        return total

    def by_head(
        self, values: Float[np.ndarray, "text layer head n"], counted: Bool[np.ndarray, "text n"]
    ) -> Float[np.ndarray, "text layer head"]:
        """One number a head of each text: the mean over queries or keys that are there, NaN left out."""
        there = counted[:, None, None] & ~np.isnan(values)
        n = there.sum(-1)
        sums = np.where(there, values, 0).sum(-1, dtype=np.float64)
        return np.where(n > 0, sums / np.maximum(n, 1), np.nan)

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if it cannot be taken of weights on `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the class lacks what a statistic needs."""
        require(self, Statistic, "tile", "tile", "what a tile adds for each query (b, h, q) or key (b, h, k)")
        for attribute in ("name", "definition"):
            if not isinstance(getattr(self, attribute, None), str):
                raise InputError(f"{type(self).__name__}: no {attribute}, expected a class attribute that is a string")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name):
            raise InputError(
                f"{type(self).__name__}: the name is {self.name!r}, expected letters, digits and underscores"
            )
        if self.over not in ("query", "key"):
            raise InputError(f"{type(self).__name__}: over is {self.over!r}, expected 'query' or 'key'")

    @property
    def lead(self) -> tuple[int, ...]:
        """The first dimension of its parts, if there are several."""
        return () if self.parts == 1 else (self.parts,)

    def added(self, tile: WeightTile) -> Float[Tensor, "*parts b h n"]:
        """`tile`, in float64, known to have the right shape."""
        made = self.tile(tile)
        b, h, q, k = tile.weights.shape
        shape = (*self.lead, b, h, q if self.over == "query" else k)
        if not isinstance(made, Tensor) or made.shape != shape:
            got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise InputError(
                f"{type(self).__name__}: tile returned {got} for weights {tuple(tile.weights.shape)}, expected {shape}"
            )
        return made.double()


def all_checked(statistics: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """The statistics, known to be some, each with a name of its own."""
    if isinstance(statistics, Statistic):
        name = type(statistics).__name__
        raise InputError(f"statistics is a {name}, expected a sequence of statistics: [{name}(…)]")
    statistics = tuple(statistics)
    for s in statistics:
        if not isinstance(s, Statistic):
            what = f"the class {s.__name__}" if isinstance(s, type) else type(s).__name__
            raise InputError(f"statistics holds {what}, expected objects of classes that inherit from Statistic")
        s.require()
    names = [s.name for s in statistics]
    if len(set(names)) < len(names):
        raise InputError(f"statistics are named {', '.join(names)}, expected a name of its own for each")
    return statistics
