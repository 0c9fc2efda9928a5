"""The base class of statistics, and those of installed packages by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import Definition, require
from qkv._registry import Registry
from qkv.errors import InputError, kind_of
from qkv.masks import Grid, Region

LOG_OF_ZERO = -1e30  # stands for ln 0: finite, so that 0 · ln 0 = 0


@dataclass(frozen=True, eq=False)
class WeightTile:
    """A tile of final attention weights: some queries and keys of some heads. Its tensors are read-only.

    >>> region, grid = Region(slice(0, 1), slice(0, 2), offset=1), Grid.of(1, 2)
    >>> tile = WeightTile(torch.tensor([[[[0.25, 0.75]]]]), region, grid, visible=None)
    >>> tile.distances.tolist(), (tile.weights * tile.distances).sum(-1).tolist()
    ([[1, 0]], [[[0.25]]])
    """

    weights: Float[Tensor, "b h q k"]
    """0 at masked pairs, and for queries that do not count."""
    region: Region
    grid: Grid
    visible: Bool[Tensor, "#b #h q k"] | None
    """True where a query may attend; None if no pair is masked."""
    log: Float[Tensor, "b h q k"] | None = None
    first: int = 0
    """The first key of the text; keys before it are padding (`first` of `measure`)."""

    @cached_property
    def log_weights(self) -> Float[Tensor, "b h q k"]:
        """Natural logarithms of the weights; −1e30 for a weight of 0, so that weight · logarithm is 0."""
        if self.log is not None:
            return self.log
        return torch.where(self.weights > 0, self.weights.log(), LOG_OF_ZERO)

    @property
    def counted(self) -> Bool[Tensor, "#b #h q k"]:
        """True where a query may attend."""
        if self.visible is not None:
            return self.visible
        return torch.ones(1, 1, *self.weights.shape[2:], dtype=torch.bool, device=self.weights.device)

    @property
    def queries(self) -> Int[Tensor, "q 1"]:
        """Positions of the queries, counted from the first key, as a column."""
        return self.region.queries

    @property
    def keys(self) -> Int[Tensor, " k"]:
        """Positions of the keys."""
        return self.region.keys

    @cached_property
    def distances(self) -> Int[Tensor, "q k"]:
        """How many tokens each key stands before its query; negative for keys after it."""
        return self.queries - self.keys


class Statistic(Definition):
    """Base class: one number for each query, or for each key, of each head, reduced from tiles of weights.

    A user-defined statistic implements one method, `tile`, and describes itself by the attributes below. Pass it to
    `measure`, `profile` or a survey as ``statistics=[Mine()]``; `qkv.testing.check_statistic` checks it.

    >>> import torch, qkv
    >>> class Heavy(Statistic):
    ...     name, label, unit, highest = "heavy", "Heavy keys", "keys", 100.0
    ...     definition = "number of keys with a tenth of the weight or more"
    ...     def tile(self, tile):
    ...         return (tile.weights >= 0.1).sum(-1)
    >>> q = k = torch.zeros(1, 1, 20, 8)
    >>> result = qkv.measure(q, k, mask=qkv.masks.Causal(), statistics=[Heavy()])
    >>> result.own["heavy"][0, 0, 8:12].tolist()
    [9.0, 10.0, 0.0, 0.0]
    """

    definitions: ClassVar[Mapping[str, tuple[str, ...]]] = {"tile": ()}

    name: str
    """The name in tables, data sets and files: letters, digits and underscores."""
    label: str = ""
    """The name on figures and pages; `name` if empty."""
    unit: str = "1"
    """"nats", "tokens", "keys", "queries" …; "1" for a plain number or a share."""
    definition: str
    """The definition, as a formula or in words."""
    over: Literal["query", "key"] = "query"
    """Whether there is a number for each query or for each key."""
    share: bool = False
    """Whether it is a share of a query's weight, to be printed as a percentage."""
    highest: float = 1.0
    """Upper end of histograms, in the unit, or in log2(1 + unit); larger values are counted in the last bin."""
    logarithmic: bool = False
    """Whether bins of histograms are equally wide in log2(1 + x)."""
    one_text: bool = False
    """Whether it is defined only where queries and keys are tokens of the same text (self-attention)."""
    from_second: bool = False
    """Whether means leave out the first query of a text: in a causal model it can attend only to itself."""
    zero: float = 0.0
    """The neutral element of `merge`, with which accumulation starts."""
    parts: int = 1
    """Numbers that a tile adds for each query or key, such as several moments; if more than one, they are the first
    dimension."""

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "name" in cls.__dict__ and "label" not in cls.__dict__:
            cls.label = cls.name

    def tile(self, tile: WeightTile) -> Float[Tensor, "*parts b h n"]:
        """Return the contribution of one tile to each of its queries (b, h, q) or keys (b, h, k); with several parts
        (parts, b, h, …)."""
        raise NotImplementedError

    def merge(self, a: Float[Tensor, "*n"], b: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Combine two partial results; the sum unless overridden. Must be associative and commutative."""
        return a + b

    def finish(self, total: Float[Tensor, "*parts b h n"], mass: Float[Tensor, "b h nq"]) -> Float[Tensor, "b h n"]:
        """Return the final number from all contributions merged and the sum of each query's weights `mass`; float64.

        Returns `total` unchanged unless overridden.
        """
        return total

    def by_head(
        self, values: Float[np.ndarray, "text layer head n"], counted: Bool[np.ndarray, "text n"]
    ) -> Float[np.ndarray, "text layer head"]:
        """Return one number for each head and text: the mean over the queries or keys that count, without NaN."""
        valid = counted[:, None, None] & ~np.isnan(values)
        n = valid.sum(-1)
        sums = np.where(valid, values, 0).sum(-1, dtype=np.float64)
        return np.where(n > 0, sums / np.maximum(n, 1), np.nan)

    def check(self, grid: Grid) -> None:
        """Raise `InputError` if the statistic is not defined for weights on `grid`."""

    def require(self) -> None:
        """Raise `InputError` if the class lacks a method or attribute that every statistic needs."""
        require(self, Statistic, "tile", "tile", "what a tile adds for each query (b, h, q) or key (b, h, k)")
        for attribute in ("name", "definition"):
            if not isinstance(getattr(self, attribute, None), str):
                raise InputError(
                    f"{type(self).__name__}: {attribute} is missing, expected a class attribute that is a string"
                )
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name):
            raise InputError(f"{type(self).__name__}: name is {self.name!r}, expected letters, digits and underscores")
        if self.over not in ("query", "key"):
            raise InputError(f"{type(self).__name__}: over is {self.over!r}, expected 'query' or 'key'")

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of partial results: ``(parts,)``, or none for a single part."""
        return () if self.parts == 1 else (self.parts,)

    def added(self, tile: WeightTile) -> Float[Tensor, "*parts b h n"]:
        """Return `tile` in float64; raises `InputError` if it returns the wrong shape."""
        contribution = self.tile(tile)
        b, h, q, k = tile.weights.shape
        shape = (*self.lead, b, h, q if self.over == "query" else k)
        if not isinstance(contribution, Tensor) or contribution.shape != shape:
            got = tuple(contribution.shape) if isinstance(contribution, Tensor) else type(contribution).__name__
            raise InputError(
                f"{type(self).__name__}: tile returned {got} for weights {tuple(tile.weights.shape)}, expected {shape}"
            )
        return contribution.double()


def validated(statistics: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """Return the statistics as a tuple; `InputError` unless all are complete and have different names."""
    if isinstance(statistics, Statistic):
        name = type(statistics).__name__
        raise InputError(f"statistics is one {name} object, expected a sequence of statistics: [{name}(…)]")
    statistics = tuple(statistics)
    for s in statistics:
        if not isinstance(s, Statistic):
            raise InputError(f"statistics holds {kind_of(s)}, expected objects of classes that inherit from Statistic")
        s.require()
    names = [s.name for s in statistics]
    if len(set(names)) < len(names):
        raise InputError(f"statistics are named {', '.join(names)}, expected a different name for each")
    return statistics


def _problem(cls: Any) -> str | None:
    """Return why a class that an installed package registers cannot be used as a statistic."""
    if not issubclass(cls, Statistic):
        return "is not a subclass of qkv.statistics.Statistic"
    if not isinstance(getattr(cls, "name", None), str):
        return "has no class attribute name"
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        return f"cannot be made without arguments ({error})"
    return None


STATISTICS = Registry("statistic", "qkv.statistics", {}, "qkv.statistics", _problem)
"""Commands find statistics of other packages here, in the group of entry points ``qkv.statistics``. Every profile has
the built-in ones, so they need no name."""
