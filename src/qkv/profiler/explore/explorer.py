"""Exact attention weights on demand: `Explorer` for any head of a model, `attention_map` for one head at any zoom.

One forward gives the queries and keys of all layers and each query's log-sum-exp, in memory linear in the text. Any
part of an attention matrix can be computed from these alone, so no whole matrix is ever formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.engine import Call, RowState
from qkv.errors import InputError, nearest
from qkv.huggingface.attention import routes
from qkv.models.loading import load_if_named
from qkv.profiler.capture.datasets import calls_of, collecting, grouped, without_values
from qkv.profiler.capture.inputs import Sequences, Tokens, batches, nan_error, sequences_of
from qkv.profiler.capture.modules import group_of_module, is_two_sided
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.patches import patches_of
from qkv.profiler.capture.record import ObservedCall
from qkv.profiler.explore.pyramid import (
    Cancelled,
    OnProgress,
    Pyramid,
    SingleFlightCache,
    Stopped,
    base,
    deepest,
    never,
    new_tile_cache,
)
from qkv.statistics.maps import HeadMap, Picture, checked_slice, rectangle
from qkv.statistics.measure import row_state

__all__ = ["AttentionMap", "CacheBudget", "Cancelled", "Explorer", "Info", "attention_map", "of"]

BUDGET = 2**31
TILE_SHARE = 8  # the tile cache has 1 / TILE_SHARE of the budget


class CacheBudget:
    """The caches that explorers share, `budget` bytes together: queries and keys of layers, and tiles."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.calls = SingleFlightCache[_CachedCall](budget - budget // TILE_SHARE, lambda cached: cached.bytes)
        self.tiles = new_tile_cache(budget // TILE_SHARE)


@dataclass(frozen=True)
class Info:
    """The size and resolution of the maps of a text, in its real queries and keys.

    Its deepest zoom, at which a pixel is one query and one key, and at another zoom 2^(deepest − zoom) times as many a
    side; the base zoom, from whose tiles all lower zooms are pooled (`qkv.profiler.explore.pyramid`); whether maps are
    ``"exact"``, or ``"stored"`` in a profile as all weights, ``"small"`` pooled ones (only tile 0/0/0 is there), or
    ``"none"``; queries and keys of a pixel of a small map, and why there is nothing else, in one sentence.
    """

    n_queries: int
    n_keys: int
    deepest: int
    base: int
    kind: Literal["exact", "stored", "small", "none"] = "exact"
    pixel_queries: int = 1
    pixel_keys: int = 1
    why: str | None = None


@dataclass(frozen=True)
class _Layer:
    """A layer of a profile's group."""

    group: str
    layer: int
    module: str
    shape: tuple[int, int, int, int]
    """Batch items, query heads, queries, keys."""
    spans: list[tuple[slice, slice] | None]
    """The real queries and keys of each batch item; None if padding lies between them."""

    @classmethod
    def of(cls, observed: ObservedCall) -> _Layer:
        batch, heads, n_queries, _ = observed.call.q.shape
        shape = batch, heads, n_queries, observed.call.k.shape[2]
        queries, keys = _real(observed.queries, batch, n_queries), _real(observed.keys, batch, shape[3])
        spans = [None if a is None or b is None else (a, b) for a, b in zip(queries, keys, strict=True)]
        return cls(observed.group, observed.layer, observed.module, shape, spans)


@dataclass(frozen=True, eq=False)
class _CachedCall:
    """A call without its values, and its row state, which is computed on first use."""

    call: Call
    lse: Tensor | None
    bytes: int

    @cached_property
    def rows(self) -> RowState:
        return row_state(self.call, self.lse)


class Maps(ABC):
    """Rows, columns and pairs of attention maps: of an `Explorer`, or of what a profile has stored.

    The arguments of all methods: `group` is a kind of attention as in `Profile.groups`; `text`, `query` and `key` are
    indices along the profile's dimensions of these names, so padding does not count; `layer` is a position among the
    group's layers; `head` is a query head, or None for the mean over all heads. `stopped` is polled from any thread:
    when it returns True, `Cancelled` is raised; results that were finished stay in the cache.
    """

    @abstractmethod
    def weights(
        self, group: str, text: int, layer: int, head: int | None, query: int | None, key: int | None,
        stopped: Stopped = never,
    ) -> Float[np.ndarray, "h q k"]:  # fmt: skip
        """The weights of one head, or of every head, by query and key; None selects all of them."""

    def row(
        self, group: str, text: int, layer: int, head: int | None, query: int, *, stopped: Stopped = never
    ) -> Float[np.ndarray, " nk"]:
        """The weights of a query on all keys."""
        return _mean(self.weights(group, text, layer, head, query, None, stopped))[0]

    def column(
        self, group: str, text: int, layer: int, head: int | None, key: int, *, stopped: Stopped = never
    ) -> Float[np.ndarray, " nq"]:
        """The weights of all queries on a key."""
        return _mean(self.weights(group, text, layer, head, None, key, stopped))[:, 0]

    def pair(
        self, group: str, text: int, layer: int, head: int | None, query: int, key: int, *, stopped: Stopped = never
    ) -> float:
        """The weight of a query on a key."""
        return float(_mean(self.weights(group, text, layer, head, query, key, stopped))[0, 0])

    def strongest(
        self, group: str, text: int, layer: int, query: int, *, stopped: Stopped = never
    ) -> tuple[Int[np.ndarray, " h"], Float[np.ndarray, " h"]]:
        """The key that each head attends to most (the first of several equal ones), and its weight."""
        weights = self.weights(group, text, layer, None, query, None, stopped)[:, 0]
        return weights.argmax(1), weights.max(1)


def _mean(weights: Float[np.ndarray, "h q k"]) -> Float[np.ndarray, "q k"]:
    return weights[0] if len(weights) == 1 else weights.mean(0, dtype=np.float64).astype(np.float32)


class Explorer(Maps):
    """Exact attention weights of a model on its inputs. Created by `of`; all methods are thread-safe."""

    def __init__(self, model: nn.Module, runs: Sequence[Mapping[str, Tensor]], name: str, caches: CacheBudget) -> None:
        self.model, self.name = model, name
        self._runs = list(runs)
        self._groups = SingleFlightCache[dict[str, list[_Layer]]](len(self._runs), lambda groups: 1)
        self._calls, self._tiles = caches.calls, caches.tiles
        self._id = object()  # prefix of this explorer's keys in the shared caches

    def __repr__(self) -> str:
        return f"Explorer({self.name}, {len(self._runs)} run{'s' if len(self._runs) > 1 else ''})"

    def info(self, group: str, text: int, *, stopped: Stopped = never) -> Info:
        """The size of the maps of a text."""
        run, item = self._run_of(text)
        layer = self._layers(run, group, 0, stopped)[0]
        queries, keys = self._spans(layer, item, text)
        sizes = queries.stop - queries.start, keys.stop - keys.start
        return Info(*sizes, deepest(*sizes), base(*sizes))

    def tile(
        self, group: str, text: int, layer: int, head: int, zoom: int, i: int, j: int,
        *, stopped: Stopped = never, on_progress: OnProgress = lambda share: None,
    ) -> Picture | None:  # fmt: skip
        """Tile in row `i` and column `j` of a head's map; None if all of its pairs are masked.

        The zoom is 0, where one tile shows the whole map, to `info(…).deepest`, where a pixel is one pair: see
        `qkv.profiler.explore.pyramid.Pyramid.tile`. Edges count tokens of the call, padding included.

        Raises:
            InputError: if an index is out of range, or weights are NaN.
        """
        found, cached, item, queries, keys = self._find(group, text, layer, head, stopped)
        pyramid = Pyramid(
            cached.call, cached.rows, item, head, self._tiles, (self._id, text, group, layer, head),
            queries=queries, keys=keys,
        )  # fmt: skip
        picture = pyramid.tile(zoom, i, j, stopped=stopped, on_progress=on_progress)
        if picture is not None and np.isnan(picture.maximum.cpu().numpy()).any():
            raise nan_error(found.module)
        return picture

    def weights(
        self, group: str, text: int, layer: int, head: int | None, query: int | None, key: int | None,
        stopped: Stopped = never,
    ) -> Float[np.ndarray, "h q k"]:  # fmt: skip
        """The weights of one head, or of every head, by query and key; None selects all of them."""
        found, cached, item, *whole = self._find(group, text, layer, head, stopped)
        spans = []
        for name, index, span in zip(("query", "key"), (query, key), whole, strict=True):
            length = span.stop - span.start
            if index is not None and not 0 <= index < length:
                raise InputError(f"{name} is {index}, expected 0..{length - 1} for this text")
            spans.append(span if index is None else slice(span.start + index, span.start + index + 1))
        weights = rectangle(cached.call, cached.rows, *spans, item=item, head=head)
        if bool(weights.isnan().any()):
            raise nan_error(found.module)
        return np.asarray(weights.float().cpu().numpy())

    # --- implementation -----------------------------------------------------------------------------------------------

    def _find(
        self, group: str, text: int, layer: int, head: int | None, stopped: Stopped
    ) -> tuple[_Layer, _CachedCall, int, slice, slice]:
        """The layer, its call, and the batch item, queries and keys of the text in it."""
        run, item = self._run_of(text)
        layers = self._layers(run, group, layer, stopped)
        if not 0 <= layer < len(layers):
            raise InputError(f"layer is {layer}, expected 0..{len(layers) - 1}")
        found = layers[layer]
        queries, keys = self._spans(found, item, text)
        if head is not None and not 0 <= head < found.shape[1]:
            raise InputError(f"head is {head}, expected 0..{found.shape[1] - 1}, or None for the mean of all")
        return found, self._cached_call(run, found, stopped), item, queries, keys

    def _run_of(self, text: int) -> tuple[int, int]:
        """The run of the model that reads a text, and the text's index in its batch."""
        if len(self._runs) == 1:
            return 0, text
        if not 0 <= text < len(self._runs):
            raise InputError(f"text is {text}, expected 0..{len(self._runs) - 1}")
        return text, 0

    def _spans(self, layer: _Layer, item: int, text: int) -> tuple[slice, slice]:
        """The real queries and keys of a text."""
        if not 0 <= item < len(layer.spans):
            raise InputError(f"text is {text}, expected 0..{len(layer.spans) - 1}")
        if (found := layer.spans[item]) is None:
            raise InputError(
                f"text is {text}, which has padding between its tokens; expected padding at its start or end only"
            )
        return found

    def _layers(self, run: int, group: str, wanted: int, stopped: Stopped) -> list[_Layer]:
        """The layers of a group. If the model has to run for that, the `wanted` layer is cached in any case."""
        groups = self._groups.get_or_compute(run, lambda: self._run(run, (group, wanted), stopped), stopped)
        if group not in groups:
            raise InputError(
                f"group is {group!r}, expected one of {', '.join(map(repr, groups))}{nearest(group, groups)}"
            )
        return groups[group]

    def _cached_call(self, run: int, layer: _Layer, stopped: Stopped) -> _CachedCall:
        """The call of a layer; if it is not cached, the model runs again, up to the layer."""

        def compute() -> _CachedCall:
            (observed,) = calls_of(
                self.model, self._runs[run], layers={layer.layer}, group=layer.group, on_call=_checking(stopped)
            )
            return _cached(observed)

        return self._calls.get_or_compute((self._id, run, layer.group, layer.layer), compute, stopped)

    def _run(self, run: int, wanted: tuple[str, int], stopped: Stopped) -> dict[str, list[_Layer]]:
        """Run the model for the first time: list its layers, and cache the calls of as many as fit."""
        batch = self._runs[run]
        found: list[_Layer] = []

        def collect(observed: ObservedCall) -> None:
            put = self._calls.put if (observed.group, observed.layer) == wanted else self._calls.put_if_it_fits
            put((self._id, run, observed.group, observed.layer), _cached(observed))
            found.append(_Layer.of(observed))

        observer = Observer(
            self.model, sequences=sequences_of(self.model, batch), receive=collecting(collect),
            on_call=_checking(stopped), hidden_maps=True,
        )  # fmt: skip
        with observe(observer):
            self.model(**batch)
        if not found:
            raise InputError(f"model {type(self.model).__name__} has no attention that qkv can observe")
        return grouped(observer.numbers.in_order(found))


def of(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    target: str | None = None,
    name: str = "",
    caches: CacheBudget | None = None,
) -> Explorer:
    """Create an `Explorer` of the attention weights of a model on some inputs.

    The model runs on the first request for a text, once for each text. It is left as it was, but must not be run
    elsewhere at the same time.

    Args:
        model: as in `qkv.profile`.
        inputs: as in `qkv.profile`: a text, several texts, token ids, or the arguments of the model's forward.
        tokenizer: converts text to ids; if `model` is a name, its tokenizer is loaded.
        target: the text that the decoder of an encoder-decoder reads.
        name: name of the model; taken from the model if not given.
        caches: the caches for queries and keys of the most recently used layers, and for tiles; new caches of 2 GiB if
            not given. For a layer that is not cached the model runs again, up to that layer.

    Raises:
        InputError: if the model does not accept the inputs.

    >>> found = of("qkv-mini", "def mean(values):\\n    return sum(values) / len(values)")
    >>> found.info("self", 0).deepest
    0
    >>> row = found.row("self", 0, layer=1, head=2, query=20)
    >>> row.shape, round(float(row.sum()), 5)
    ((21,), 1.0)
    """
    loaded = load_if_named(model, tokenizer, name, inputs=inputs)
    runs_on = list(batches(loaded.model, inputs, loaded.tokenizer, target))
    return Explorer(loaded.model, runs_on, loaded.name, caches or CacheBudget())


def _real(mask: Tensor | None, batch: int, length: int) -> list[slice | None]:
    """The real tokens of each batch item as a slice; None if padding lies between them."""
    if mask is None:
        return [slice(0, length)] * batch
    found: list[slice | None] = []
    for row in mask.expand(batch, length):
        at = row.nonzero()[:, 0].tolist()
        contiguous = bool(at) and at[-1] - at[0] + 1 == len(at)
        found.append(slice(at[0], at[-1] + 1) if contiguous else None)
    return found


def _cached(observed: ObservedCall) -> _CachedCall:
    """The call with copies of its tensors: those of the model may be views of something larger."""
    call = without_values(observed).call
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (call.q, call.k))
    call = replace(call, q=q, k=k, user=replace(call.user, q=q, k=k))
    tensors = [*call.tensors().values(), *([] if observed.lse is None else [observed.lse])]
    return _CachedCall(call, observed.lse, sum(x.numel() * x.element_size() for x in tensors))


def _checking(stopped: Stopped) -> Callable[[str], None]:
    def check(module: str) -> None:
        if stopped():
            raise Cancelled

    return check


# --- the map of one head at any zoom ----------------------------------------------------------------------------------

OnRows = Callable[[int], None]


class AttentionMap:
    """The weights of one head on one input, rendered for any part of the matrix. Created by `attention_map`.

    Rows are queries and columns are keys, both counted in the tokens of the call, padding included. The object holds
    the head's queries, keys and log-sum-exp.

    >>> found = attention_map("qkv-mini", "def f(x):\\n    return x\\n", layer=0, head=3)
    >>> found.n_queries, found.picture(size=4).mean.shape
    (10, torch.Size([4, 4]))
    """

    def __init__(self, observed: ObservedCall, head: int, tokens: Tokens, model: str = "") -> None:
        self.model, self.module, self.group = model, observed.module, observed.group
        self.layer, self.head = observed.layer, head
        self.batch, heads, self.n_queries, _ = observed.call.q.shape
        self.n_keys = observed.call.k.shape[2]
        if not 0 <= head < heads:
            raise InputError(f"head is {head}, but layer {observed.layer} has heads 0..{heads - 1}")
        self._call, self._tokens = observed.call, tokens
        self._real = None if observed.queries is None else observed.queries.bool().expand(self.batch, self.n_queries)
        self._rows = row_state(observed.call, observed.lse)
        self._heads: dict[int, HeadMap] = {}

    def __repr__(self) -> str:
        source = f"{self.model}, {self.group} attention, layer {self.layer}, head {self.head}"
        return f"AttentionMap({source}: {self.n_queries:,} queries × {self.n_keys:,} keys)"

    def picture(
        self,
        rows: slice = slice(None),
        columns: slice = slice(None),
        size: int | tuple[int, int] = 1024,
        *,
        item: int = 0,
        on_rows: OnRows = lambda rows: None,
    ) -> Picture:
        """The weights of queries `rows` on keys `columns`, pooled to at most `size` bins a side by maximum and mean.

        The time is proportional to the number of visible pairs in this part.

        Args:
            rows: which queries; all by default.
            columns: which keys; all by default.
            size: the largest number of bins a side, or (down, across); if there are fewer tokens, each is a bin.
            item: index in the batch.
            on_rows: progress callback, called with the number of further queries that are finished; thread-safe.

        Returns:
            `qkv.statistics.maps.Picture`.

        Raises:
            InputError: if rows, columns or item are out of range, the size is below 1, or weights are NaN.
        """
        checked_slice("rows", rows, self.n_queries), checked_slice("columns", columns, self.n_keys)
        down, across = (size, size) if isinstance(size, int) else size
        if item not in self._heads:
            self._heads[item] = HeadMap(self._call, self._rows, item=item, head=self.head, real=self._real)
        picture = self._heads[item].pooled(rows, columns, (down, across), on_rows)
        if picture.maximum.isnan().any():
            raise nan_error(self.module)
        return picture

    def query_tokens(self, rows: slice = slice(None), *, item: int = 0) -> list[str]:
        """Names of the queries: pieces of text, or positions where there are no token ids."""
        return self._names(self._tokens.queries, checked_slice("rows", rows, self.n_queries), self.n_queries, item)

    def key_tokens(self, columns: slice = slice(None), *, item: int = 0) -> list[str]:
        """Names of the keys."""
        return self._names(self._tokens.keys, checked_slice("columns", columns, self.n_keys), self.n_keys, item)

    def _names(self, ids: Tensor | None, within: slice, length: int, item: int) -> list[str]:
        return self._tokens.names(ids, item, np.ones(length, bool))[within]


def attention_map(
    model: nn.Module | str,
    inputs: str | Tensor | Mapping[str, Tensor],
    *,
    layer: int,
    head: int,
    tokenizer: Any = None,
    target: str | None = None,
    group: str | None = None,
    name: str = "",
) -> AttentionMap:
    """Compute the attention map of one head of a model on one input; the model is left as it was.

    The model runs once, up to the layer; a model with several kinds of attention runs to the end unless `group` is
    given.

    Args:
        model: as in `qkv.profile`, or a name for `qkv.load`.
        inputs: a text; token ids (length,) or (batch, length); or the arguments of the model's forward, as a mapping.
        layer: counted from 0 in each group. In a hybrid, layers of linear attention have the numbers of the model:
            their maps are the hidden maps, of absolute weights.
        head: query head.
        tokenizer: converts text to ids, and ids to the names of tokens; if `model` is a name, its tokenizer is loaded.
        target: the text that the decoder of an encoder-decoder reads.
        group: kind of attention (see `capture.groups`); if None the main one: the decoder's if there is a decoder.
        name: name of the model, for figures; taken from the model if not given.

    Raises:
        InputError: if the model does not accept the inputs, or has no such layer, head or group.

    >>> found = attention_map("qkv-mini", "def mean(values):\\n    return sum(values) / len(values)", layer=1, head=2)
    >>> found
    AttentionMap(qkv-mini, self attention, layer 1, head 2: 21 queries × 21 keys)
    >>> picture = found.picture(rows=slice(16, 21), size=4)
    >>> tuple(picture.mean.shape), found.query_tokens(slice(0, 2))
    ((4, 4), ['<s>', 'def'])
    """
    loaded = load_if_named(model, tokenizer, name, inputs=inputs)
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(inputs, str | Tensor | Mapping):
        raise InputError(f"inputs is {type(inputs).__name__}, expected one text, token ids, or a mapping of tensors")
    batch = next(iter(batches(model, inputs, tokenizer, target)))
    sequences = sequences_of(model, batch)
    with suppress(InputError):  # keys of images have the names of tokens then
        sequences = replace(sequences, patches=patches_of(model, batch, tokenizer))
    likely = group or _only_group(model, sequences)
    try:
        calls = calls_of(model, batch, layers={layer}, group=likely)
    except InputError as error:
        calls = _otherwise(error, model, batch, layer, group, likely)
    by_group = {observed.group: observed for observed in calls}
    observed = by_group["decoder"] if "decoder" in by_group else next(iter(by_group.values()))
    return AttentionMap(without_values(observed), head, Tokens(sequences, tokenizer, observed.group), loaded.name)


def _otherwise(
    error: InputError, model: nn.Module, batch: Mapping[str, Tensor], layer: int, group: str | None, likely: str | None
) -> list[ObservedCall]:
    """The calls of a layer that is not of the likely kind: in a hybrid it may be linear attention."""
    if group is None:
        for kind in ("linear",) if likely is None else ("linear", None):
            with suppress(InputError):
                return calls_of(model, batch, layers={layer}, group=kind)
    raise error


def _only_group(model: nn.Module, sequences: Sequences) -> str | None:
    """The only group that the model has, if that is known before it runs, so that it need not run to its end."""
    routed = {group_of_module(name, model) for name, module in model.named_modules() if routes(module)}
    if len(routed) == 1:
        return routed.pop()
    return None if routed or sequences.two or is_two_sided(dict(model.named_modules())) else "self"
