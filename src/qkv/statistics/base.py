"""The base class of statistics, the built-in ones, and those of installed packages by name.

The built-in ones are rows of a table: their definition in words and as a function of a tile of weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from qkv.masks import Dense, Grid, Mask, Prefix, Region, Window
from qkv.results import field_of

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
    if not isinstance(statistics, Iterable):
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


def of_equal_keys(statistic: Statistic) -> list[float]:
    """Return the values of a statistic where each of four tokens attends equally to itself and those before it.

    >>> of_equal_keys(BUILT_IN["self"])[:2]
    [1.0, 0.5]
    """
    grid = Grid.of(4, 4)
    weights = torch.ones(1, 1, 4, 4, dtype=torch.float64).tril() / torch.arange(1, 5)[:, None]
    tile = WeightTile(weights, Region(slice(0, 4), slice(0, 4)), grid, weights > 0)
    values = statistic.finish(statistic.added(tile), weights.sum(-1))
    return [round(x, 3) for x in values[0, 0].tolist()]


class PrefixSinkScores(Statistic):
    """The weight on a key, averaged over those of the first `length` queries of the text that may attend to it.

    `measure` returns those of the first `length` keys, as `Statistics.prefix_sink_scores`.

    Args:
        length: how many tokens of the text are its prefix.

    >>> of_equal_keys(PrefixSinkScores(2))[:2]
    [0.75, 0.5]
    """

    name, over, parts = "prefix_sink_scores", "key", 2
    definition = "mean weight that the first queries of the text put on the key"

    def __init__(self, length: int) -> None:
        if length < 1:
            raise InputError(f"length is {length}, expected at least 1 token of the prefix")
        self.length = length

    def __repr__(self) -> str:
        return f"PrefixSinkScores({self.length})"

    def tile(self, tile: WeightTile) -> Tensor:
        early = (tile.queries >= tile.first) & (tile.queries < tile.first + self.length)
        weights, counts = ((x * early).sum(-2, dtype=torch.float64) for x in (tile.weights, tile.counted))
        return torch.stack([weights, counts.expand_as(weights)])

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total[0] / total[1].clamp(min=1)


@dataclass(frozen=True)
class Extremes:
    """The smallest score of each query and the key of the largest: `Statistics.min_logit` and `Statistics.argmax`.

    Pass it to `measure` among the `statistics`. It is of scores, and no `Statistic` of weights.

    >>> import torch, qkv
    >>> q, k = torch.ones(1, 4), torch.tensor([[2.0], [4.0], [4.0]]).expand(3, 4)
    >>> result = qkv.measure(q, k, statistics=[Extremes()])
    >>> result.max_logit.item(), result.min_logit.item(), result.argmax.item()
    (8.0, 4.0, 1)
    """


class Mass(Statistic):
    """The sum of a query's weights inside a mask.

    Args:
        name: name of the statistic.
        mask: the pairs whose weights are added up.
        definition: the definition in words.

    Raises:
        InputError: if `mask` is not a mask, and, when measured, if the mask does not fit the call.

    >>> import torch, qkv
    >>> q = k = torch.zeros(1, 1, 4, 8)
    >>> two = Mass("two", qkv.masks.Window(2))
    >>> result = qkv.measure(q, k, mask=qkv.masks.Causal(), statistics=[two])
    >>> [round(x, 4) for x in result.own["two"][0, 0].tolist()]
    [1.0, 1.0, 0.6667, 0.5]
    """

    share = True

    def __init__(self, name: str, mask: Mask, definition: str = "") -> None:
        if not isinstance(mask, Mask):
            raise InputError(f"mask is {type(mask).__name__}, expected a mask from qkv.masks, such as Dense(tensor)")
        self.name, self.label, self.mask = name, name, mask
        self.definition = definition or f"weight inside {mask!r}"

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def tile(self, tile: WeightTile) -> Tensor:
        inside = self.mask.visible(tile.region, tile.grid)
        return (tile.weights * inside).sum(-1)


class Local(Mass):
    """The weight on the tokens around the query.

    Args:
        window: tokens at most this far away count, on either side.

    >>> of_equal_keys(Local(1))
    [1.0, 1.0, 0.667, 0.5]
    """

    one_text = True

    def __init__(self, window: int = 8) -> None:
        super().__init__("local", Window(window + 1, ahead=window), "weight on tokens at most `local_window` away")
        self.label = "Local window"


class Streaming(Mass):
    """The weight on the keys that a StreamingLLM cache keeps: the first of the text and the last before the query.

    Args:
        first: the first key of the text; one for each batch item where padding is on the left.
        n_keys: the number of keys, needed if `first` is a tensor.

    >>> of_equal_keys(Streaming())
    [1.0, 1.0, 1.0, 1.0]
    """

    one_text = True
    first_keys, last_keys = 4, 64

    def __init__(self, first: int | Tensor = 0, n_keys: int = 0) -> None:
        n_first, last = self.first_keys, Window(self.last_keys, ahead=self.last_keys - 1)
        if isinstance(first, int):
            mask = Prefix(n_first) | last
        else:
            after = torch.arange(n_keys, device=first.device) - first[:, None]
            mask = Dense(((after >= 0) & (after < n_first))[:, None, None]) | last
        super().__init__(
            "streaming_mass",
            mask,
            "weight on what a streaming cache keeps: the first `streaming_first` and last `streaming_last` keys",
        )
        self.label = "Streaming"


def _entropy(total: Tensor, mass: Tensor) -> Tensor:
    safe = torch.where(mass == 0, 1.0, mass)  # NaN is kept
    return torch.where(mass == 0, 0.0, total / safe + safe.log()).clamp(min=0)


def _moments(tile: WeightTile) -> Tensor:
    """Return the first two moments of the distances of the keys, from those of their places in the tile."""
    first, steps = tile.distances[:, :1].double().T, tile.keys.double() - tile.keys[0]
    mass, one, two = (tile.weights.double() @ torch.stack([steps**n for n in range(3)], 1)).unbind(-1)
    return torch.stack([first * mass - one, first.square() * mass - 2 * first * one + two])


def _deviation(total: Tensor, mass: Tensor) -> Tensor:
    mean, square = total / torch.where(mass == 0, 1.0, mass)
    return (square - mean.square()).clamp(min=0).sqrt()


def _at(before: int) -> Callable[[WeightTile], Tensor]:
    """Return what a tile adds to the weight on the key that is `before` tokens before the query."""
    return lambda tile: (tile.weights * (tile.distances == before)).sum(-1)


def _first(tile: WeightTile) -> Tensor:
    column = tile.first - tile.region.columns.start
    return tile.weights[..., max(0, column) : max(0, column + 1)].sum(-1)


class BuiltIn(Statistic):
    """A statistic of this package, by its functions: what a tile adds, and the number made of the total.

    >>> {name: of_equal_keys(s)[2] for name, s in BUILT_IN.items() if s.share}
    {'sink': 0.333, 'self': 0.333, 'previous': 0.333, 'next': 0.0}
    >>> [of_equal_keys(BUILT_IN[name])[2] for name in ("entropy", "distance", "spread", "effective_keys")]
    [1.099, 1.0, 0.816, 3.0]
    >>> [of_equal_keys(BUILT_IN[name])[2] for name in ("visible", "received", "visible_queries")]
    [3.0, 0.583, 2.0]
    """

    def __init__(
        self, name: str, label: str, definition: str, of_tile: Callable[[WeightTile], Tensor],
        of_total: Callable[[Tensor, Tensor], Tensor] | None = None, **attributes: Any,
    ) -> None:  # fmt: skip
        self.name, self.label, self.definition = name, label, definition
        self.of_tile, self.of_total = of_tile, of_total
        vars(self).update(attributes)

    def tile(self, tile: WeightTile) -> Tensor:
        return self.of_tile(tile)

    def finish(self, total: Tensor, mass: Tensor) -> Tensor:
        return total if self.of_total is None else self.of_total(total, mass)

    def __repr__(self) -> str:
        return f"BUILT_IN[{self.name!r}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _built_in, (self.name,)


def _built_in(name: str) -> Statistic:
    return FIELDS[field_of(name)]


_KEYS: dict[str, Any] = {"unit": "keys", "highest": 20.0, "logarithmic": True}
_QUERIES: dict[str, Any] = {"unit": "queries", "highest": 20.0, "logarithmic": True, "over": "key"}
_TOKENS: dict[str, Any] = {"unit": "tokens", "highest": 20.0, "logarithmic": True}
_SHARE: dict[str, Any] = {"share": True, "one_text": True}

FIELDS: dict[str, Statistic] = {field_of(s.name): s for s in (
    BuiltIn(
        "entropy", "Entropy", "minus the sum of a ln a over the keys, of the query's weights a, which add up to 1",
        lambda tile: -(tile.weights * tile.log_weights).sum(-1), _entropy, unit="nats", highest=14.0,
    ),
    BuiltIn("sink", "First token", "weight on the first token of the text", _first, share=True, from_second=True),
    BuiltIn("self", "Self", "weight on the query's own token", _at(0), **_SHARE),
    BuiltIn("previous", "Previous token", "weight on the token one before", _at(1), from_second=True, **_SHARE),
    BuiltIn("next", "Next token", "weight on the token one after", _at(-1), **_SHARE),
    BuiltIn(
        "distance", "Distance", "mean distance to the keys, by weight",
        lambda tile: (tile.weights * tile.distances.abs().to(tile.weights)).sum(-1, dtype=torch.float64),
        lambda total, mass: total / torch.where(mass == 0, 1.0, mass), one_text=True, **_TOKENS,
    ),
    BuiltIn(
        "spread", "Spread", "standard deviation of the keys' positions, by weight", _moments, _deviation, parts=2,
        **_TOKENS,
    ),
    BuiltIn(
        "effective_keys", "Effective keys", "1 / the sum of squared weights: how many keys share the weight",
        lambda tile: torch.linalg.vector_norm(tile.weights, dim=-1, dtype=torch.float64).square(),
        lambda total, mass: torch.where(total == 0, 0.0, mass.square() / torch.where(total == 0, 1.0, total)), **_KEYS,
    ),
    BuiltIn(
        "visible", "Visible keys", "how many keys the query may attend to",
        lambda tile: tile.counted.sum(-1).expand(tile.weights.shape[:3]), **_KEYS,
    ),
    BuiltIn(
        "received", "Received", "sum of the weights that all queries put on the key",
        lambda tile: tile.weights.sum(-2, dtype=torch.float64), **_QUERIES,
    ),
    BuiltIn(
        "visible_queries", "Visible queries", "how many queries may attend to the key",
        lambda tile: tile.counted.sum(-2).expand(*tile.weights.shape[:2], -1), **_QUERIES,
    ),
    BuiltIn("row_sum", "", "sum of the query's weights", lambda tile: tile.weights.sum(-1, dtype=torch.float64)),
)}  # fmt: skip
"""The statistics that `measure` always returns, by their field of `Statistics`."""
BUILT_IN: dict[str, Statistic] = {s.name: s for s in FIELDS.values() if s.name != "row_sum"}
"""The statistics that `measure` always returns, by name."""


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


class Product(Statistic):
    """A x: the sum of the rows of x (b, h, nk, m), times the query's weights; transposed, Aᵀ x of x (b, h, nq, m)."""

    name, definition = "product", "Σ_j A_ij x_j, or transposed Σ_i A_ij x_i"

    def __init__(self, x: Float[Tensor, "b h n m"], *, transposed: bool = False) -> None:
        self.x, self.parts, self.over = x, x.shape[3], "key" if transposed else "query"

    def tile(self, tile: WeightTile) -> Tensor:
        at, by_key = tile.region, self.over == "key"
        x = self.x[at.batch, at.heads, at.rows if by_key else at.columns].to(tile.weights)
        product = (tile.weights.mT if by_key else tile.weights) @ x
        return product[..., 0] if self.parts == 1 else product.movedim(-1, 0)


def check_queries(queries: Bool[Tensor, "b nq"], q: Float[Tensor, "b h nq d"], name: str = "queries") -> None:
    """Raise `InputError` unless it tells of each query in q whether it counts."""
    if queries.dtype != torch.bool or queries.shape != (len(q), q.shape[2]):
        raise InputError(f"{name} is {kind_of(queries)}, expected bool of shape {(len(q), q.shape[2])}")


@dataclass(frozen=True, eq=False)
class Request:
    """The statistics to compute, in terms of the rows and keys of the call; masks and `firsts` of the whole matrix."""

    mass: Mapping[str, Mask]
    firsts: Sequence[int]
    """The first key of the text of each batch item."""
    queries: Bool[Tensor, "b nq"] | None = None
    prefix_keys: int | None = None
    bins: int | None = None
    statistics: Sequence[Statistic] = ()
    value_norms: Float[Tensor, "b h nk"] | None = None
    """The norm of each value, for `Statistics.first_contribution`."""
    extremes: bool = False
    """Whether `Statistics.min_logit` and `Statistics.argmax` are wanted."""

    def own(self) -> dict[str, Statistic]:
        """Return the statistics that the user passed, by name."""
        return {f"own {s.name}": s for s in self.statistics}

    def every(self) -> dict[str, Statistic]:
        """Return all statistics, by the field of `Statistics` or by kind and name."""
        named = FIELDS | {f"mass {name}": Mass(name, mask) for name, mask in self.mass.items()} | self.own()
        if self.prefix_keys is not None:
            named["prefix_sink_scores"] = PrefixSinkScores(self.prefix_keys)
        if self.value_norms is not None:
            named["value_norms"] = Product(self.value_norms[..., None])
        return named
