"""Any weight of a model on its inputs, on demand and exact: tiles, rows, columns, pairs, of every layer and head.

A forward gives the queries and keys of all layers and each query's log-sum-exp, which is linear in the text; from
those any part of any attention matrix follows alone. No matrix is ever formed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._engine.call import Call
from qkv._engine.row_state import RowState
from qkv.biases import Dense as DenseBias
from qkv.errors import InputError
from qkv.masks import Dense, Region
from qkv.normalizers import Identity
from qkv.profiler.capture.calls import calls_of, without_values
from qkv.profiler.capture.inputs import batches, real_tokens, sequences_of
from qkv.profiler.capture.models import load
from qkv.profiler.capture.observe import Observer, Seen, formed, observe
from qkv.profiler.explore.pyramid import OnProgress, Pyramid, base, deepest, kept_tiles
from qkv.profiler.explore.tile_cache import WAIT, Cancelled, Kept, Stopped, never
from qkv.statistics.maps import Picture, rectangle
from qkv.statistics.measure import row_state

__all__ = ["CacheBudget", "Cancelled", "Explorer", "Info", "of"]

BUDGET = 2**31
FOR_TILES = 8  # one part in so many of the budget


class CacheBudget:
    """Where explorers keep what they have found, together in so many bytes: queries and keys of layers, and tiles."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.calls = Kept[_Known](budget - budget // FOR_TILES, lambda known: known.bytes)
        self.tiles = kept_tiles(budget // FOR_TILES)


class Info(NamedTuple):
    """The size of the maps of a text: real tokens; the zoom at which a pixel is one query and one key; and the zoom of
    whose tiles farther ones are made, all in one pass over the whole map."""

    n_queries: int
    n_keys: int
    deepest: int
    base: int


@dataclass(frozen=True)
class _Layer:
    """Where a layer of a profile's group comes from, and which of its tokens are real."""

    kind: str
    calls: tuple[int, ...]
    """Which calls of this kind it is made of: one, or all steps of a decoder that goes step by step."""
    module: str
    shape: tuple[int, int, int, int]
    """Batch items, query heads, queries, keys."""
    queries: list[slice | None]
    """The real ones of each batch item; None where they do not lie together."""
    keys: list[slice | None]


@dataclass(frozen=True, eq=False)
class _Known:
    """A call, without its values, and what its rows know as soon as someone asks."""

    call: Call
    lse: Tensor | None
    bytes: int
    _rows: list[RowState] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> RowState:
        with self._lock:
            if not self._rows:
                self._rows.append(row_state(self.call, self.lse))
            return self._rows[0]


class Explorer:
    """Exact attention weights of a model on its inputs. Made by `of`; all methods may be called from many threads.

    In all of them: `group` is a kind of attention as in `Profile.groups`; `text` counts as the profile's dimension
    `text`, and tokens as its `query` and `key`, without padding; `layer` is a position among the group's layers; `head`
    is a query head, or None for the mean over all. `stopped` is asked again and again, from any thread: once it says
    True, `Cancelled` is raised, and nothing is lost that was done by then.
    """

    def __init__(self, model: nn.Module, runs: Sequence[Mapping[str, Tensor]], name: str, room: CacheBudget) -> None:
        self.model, self.name = model, name
        self._runs = list(runs)
        self._groups: dict[int, dict[str, list[_Layer]]] = {}
        self._kept, self._tiles = room.calls, room.tiles
        self._own = object()  # begins the keys of what is this explorer's in there
        self._model_is_free = threading.Lock()

    def __repr__(self) -> str:
        return f"Explorer({self.name}, {len(self._runs)} run{'s' if len(self._runs) > 1 else ''})"

    def info(self, group: str, text: int, *, stopped: Stopped = never) -> Info:
        """How large the maps of a text are.

        Raises:
            InputError: for a group or a text that is not there.
        """
        run, item = self._run_of(text)
        layer = self._layers(run, group, 0, stopped)[0]
        queries, keys = self._spans(layer, item, text)
        sizes = queries.stop - queries.start, keys.stop - keys.start
        return Info(*sizes, deepest(*sizes), base(*sizes))

    def tile(
        self, group: str, text: int, layer: int, head: int, zoom: int, i: int, j: int,
        *, stopped: Stopped = never, on_progress: OnProgress = lambda share: None,
    ) -> Picture | None:  # fmt: skip
        """Tile (i, j) of a head's map, counted down and across; None if the mask hides all of it.

        See `qkv.profiler.explore.pyramid.Pyramid.tile`. Edges count tokens of the call, padding included.

        Args:
            group: see above.
            text: see above.
            layer: see above.
            head: a query head.
            zoom: 0, where one tile shows the whole map, to `info(…).deepest`, where a pixel is one pair.
            i: which row of tiles.
            j: which column of tiles.
            stopped: see above.
            on_progress: hears how much of the work is done, from 0 to 1, from any thread.

        Raises:
            InputError: for what is not there, or weights that are NaN.
        """
        at = self._find(group, text, layer, head, stopped)
        pyramid = Pyramid(
            at.known.call, at.known.rows, at.item, head, self._tiles, (self._own, text, group, layer, head),
            queries=at.queries, keys=at.keys,
        )  # fmt: skip
        picture = pyramid.tile(zoom, i, j, stopped=stopped, on_progress=on_progress)
        if picture is not None and np.isnan(picture.maximum.cpu().numpy()).any():
            raise _is_nan(at.module)
        return picture

    def row(
        self, group: str, text: int, layer: int, head: int | None, query: int, *, stopped: Stopped = never
    ) -> Float[np.ndarray, " nk"]:
        """How much a query attends to each key.

        Raises:
            InputError: for what is not there, or weights that are NaN.
        """
        return self._mean(self._find(group, text, layer, head, stopped), head, query, None)[0]

    def column(
        self, group: str, text: int, layer: int, head: int | None, key: int, *, stopped: Stopped = never
    ) -> Float[np.ndarray, " nq"]:
        """How much each query attends to a key.

        Raises:
            InputError: for what is not there, or weights that are NaN.
        """
        return self._mean(self._find(group, text, layer, head, stopped), head, None, key)[:, 0]

    def pair(
        self, group: str, text: int, layer: int, head: int | None, query: int, key: int, *, stopped: Stopped = never
    ) -> float:
        """How much a query attends to a key.

        Raises:
            InputError: for what is not there, or weights that are NaN.
        """
        return float(self._mean(self._find(group, text, layer, head, stopped), head, query, key)[0, 0])

    def strongest(
        self, group: str, text: int, layer: int, query: int, *, stopped: Stopped = never
    ) -> tuple[Int[np.ndarray, " h"], Float[np.ndarray, " h"]]:
        """The key that each head attends to most, the first of several, and how much.

        Raises:
            InputError: for what is not there, or weights that are NaN.
        """
        weights = self._weights(self._find(group, text, layer, None, stopped), None, query, None)[:, 0]
        keys = weights.argmax(1)
        return keys, np.take_along_axis(weights, keys[:, None], 1)[:, 0]

    # --- what they are made of ---------------------------------------------------------------------------------------

    def _mean(self, at: _Place, head: int | None, query: int | None, key: int | None) -> Float[np.ndarray, "q k"]:
        weights = self._weights(at, head, query, key)
        return weights[0] if len(weights) == 1 else weights.mean(0, dtype=np.float64).astype(np.float32)

    def _weights(self, at: _Place, head: int | None, query: int | None, key: int | None) -> Float[np.ndarray, "h q k"]:
        """The weights of a head, or all, from one query or all to one key or all."""
        spans = []
        for name, asked, whole in (("query", query, at.queries), ("key", key, at.keys)):
            length = whole.stop - whole.start
            if asked is not None and not 0 <= asked < length:
                raise InputError(f"{name} is {asked}, expected 0..{length - 1} for this text")
            spans.append(whole if asked is None else slice(whole.start + asked, whole.start + asked + 1))
        weights = rectangle(at.known.call, at.known.rows, *spans, item=at.item, head=head)
        if bool(weights.isnan().any()):
            raise _is_nan(at.module)
        found: np.ndarray = weights.float().cpu().numpy()
        return found

    def _find(self, group: str, text: int, layer: int, head: int | None, stopped: Stopped) -> _Place:
        run, item = self._run_of(text)
        layers = self._layers(run, group, layer, stopped)
        if not 0 <= layer < len(layers):
            raise InputError(f"layer is {layer}, expected 0..{len(layers) - 1}")
        found = layers[layer]
        queries, keys = self._spans(found, item, text)
        heads = found.shape[1]
        if head is not None and not 0 <= head < heads:
            raise InputError(f"head is {head}, expected 0..{heads - 1}, or None for the mean of all")
        return _Place(self._known_of(run, found, stopped), item, queries, keys, found.module)

    def _run_of(self, text: int) -> tuple[int, int]:
        """Which run of the model a text is in, and which item of its batch it is."""
        if len(self._runs) == 1:
            return 0, text
        if not 0 <= text < len(self._runs):
            raise InputError(f"text is {text}, expected 0..{len(self._runs) - 1}")
        return text, 0

    def _spans(self, layer: _Layer, item: int, text: int) -> tuple[slice, slice]:
        """The real queries and keys of a text."""
        if not 0 <= item < len(layer.queries):
            raise InputError(f"text is {text}, expected 0..{len(layer.queries) - 1}")
        queries, keys = layer.queries[item], layer.keys[item]
        if queries is None or keys is None:
            raise InputError(f"text is {text}, which has padding between its tokens; expected padding around them only")
        return queries, keys

    def _layers(self, run: int, group: str, wanted: int, stopped: Stopped) -> list[_Layer]:
        """The layers of a group. If the model has to run for that, the `wanted` one is kept before others."""
        if run not in self._groups:
            with self._model(stopped):
                if run not in self._groups:
                    self._run(run, (group, wanted), stopped)
        groups = self._groups[run]
        if group not in groups:
            raise InputError(f"group is {group!r}, expected one of {', '.join(map(repr, groups))}")
        return groups[group]

    def _known_of(self, run: int, layer: _Layer, stopped: Stopped) -> _Known:
        """The calls of a layer, if need be from another forward, which ends with the layer."""
        key = self._own, run, layer.kind, layer.calls
        found = self._kept.find(key)
        if found is None:
            with self._model(stopped):
                found = self._kept.find(key)
                if found is None:
                    batch = self._runs[run]
                    seen = calls_of(self.model, batch, layers=layer.calls, group=layer.kind, on_call=_checking(stopped))
                    found = _known([without_values(one) for one in seen])
                    self._kept.put(key, found)
        return found

    def _run(self, run: int, wanted: tuple[str, int], stopped: Stopped) -> None:
        """The first forward of a run: which layers there are, and the calls of as many as there is room for."""
        batch = self._runs[run]
        sequences = sequences_of(self.model, batch)
        source, targets = real_tokens(self.model, batch, sequences)
        found: list[_Layer | list[Seen]] = []
        steps: dict[str, list[Seen]] = {}

        def take(seen: Seen) -> None:
            seen = without_values(seen)
            begun = steps.pop(seen.module, None)
            if not _may_be_step(seen):
                found.append(keep([seen]))
                return
            if begun is None or not torch.equal(begun[0].call.k, seen.call.k):
                begun = []
                found.append(begun)
            begun.append(seen)
            steps[seen.module] = begun

        def keep(seen: list[Seen]) -> _Layer:
            calls = tuple(step.layer for step in seen)
            known = _known(seen)
            put = self._kept.put if (seen[0].group, calls[0]) == wanted else self._kept.put_if_room
            put((self._own, run, seen[0].group, calls), known)
            return _layer(seen, known.call, targets)

        observer = Observer(self.model, query_masks=targets, key_masks=source, sequences=sequences, take=take)
        observer.on_call = _checking(stopped)
        with observe(observer):
            self.model(**batch)
        if not found:
            raise InputError(f"{type(self.model).__name__} has no attention that qkv can observe")
        self._groups[run] = _grouped([x if isinstance(x, _Layer) else keep(x) for x in found])

    @contextmanager
    def _model(self, stopped: Stopped) -> Iterator[None]:
        """The model for this thread alone."""
        while not self._model_is_free.acquire(timeout=WAIT):
            if stopped():
                raise Cancelled
        try:
            yield
        finally:
            self._model_is_free.release()


class _Place(NamedTuple):
    """A layer's call, and which of its tokens are a text."""

    known: _Known
    item: int
    queries: slice
    keys: slice
    module: str


def of(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    target: str | None = None,
    name: str = "",
    room: CacheBudget | None = None,
) -> Explorer:
    """What answers any question about the weights of a model on some inputs.

    The model runs when the first question comes, once for each text it is about. It is left as it was, but must not be
    run elsewhere at that moment.

    Args:
        model: as in `qkv.profile`.
        inputs: as in `qkv.profile`: a text, several, token ids, or what the model's forward takes.
        tokenizer: for text; loaded with the model if that is a name.
        target: the text the decoder of an encoder-decoder reads.
        name: of the model; its own if not given.
        room: where to keep queries and keys of the layers asked for last, and tiles; 2 GiB of its own if not given.
            The model runs again, up to the layer, for one that is not kept.

    Raises:
        InputError: for inputs the model cannot take.

    >>> found = of("qkv-mini", "def mean(values):\\n    return sum(values) / len(values)")
    >>> found.info("self", 0)
    Info(n_queries=21, n_keys=21, deepest=0, base=0)
    >>> row = found.row("self", 0, layer=1, head=2, query=20)
    >>> row.shape, round(float(row.sum()), 5)
    ((21,), 1.0)
    """
    if isinstance(model, str):
        texts = [inputs] if isinstance(inputs, str) else inputs if isinstance(inputs, Sequence) else []
        loaded = load(model, tokens=max((len(str(t).encode()) for t in texts), default=None))
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    return Explorer(model, list(batches(model, inputs, tokenizer, target)), name, room or CacheBudget())


def _grouped(layers: list[_Layer]) -> dict[str, list[_Layer]]:
    """Layers by group, named as in a profile (`capture.datasets.grouped`): where shapes differ it splits."""
    groups: dict[str, list[_Layer]] = {}
    for kind in dict.fromkeys(layer.kind for layer in layers):
        shapes = dict.fromkeys(layer.shape for layer in layers if layer.kind == kind)
        for n, shape in enumerate(shapes, start=1):
            those = [layer for layer in layers if layer.kind == kind and layer.shape == shape]
            groups[kind if n == 1 else f"{kind}-{n}"] = those
    return groups


def _layer(seen: list[Seen], call: Call, targets: Mapping[int, Tensor]) -> _Layer:
    """What is known of a layer whose steps are joined in `call`."""
    batch, heads, n_queries, _ = call.q.shape
    shape = batch, heads, n_queries, call.k.shape[2]
    first = seen[0]
    asking = first.queries if len(seen) == 1 else targets.get(n_queries)
    queries, keys = _real(asking, batch, n_queries), _real(first.keys, batch, shape[3])
    return _Layer(first.group, tuple(step.layer for step in seen), first.module, shape, queries, keys)


def _real(mask: Tensor | None, batch: int, length: int) -> list[slice | None]:
    """Where the real tokens of each batch item lie."""
    if mask is None:
        return [slice(0, length)] * batch
    found: list[slice | None] = []
    for row in mask.expand(batch, length):
        at = row.nonzero()[:, 0].tolist()
        together = bool(at) and at[-1] - at[0] + 1 == len(at)
        found.append(slice(at[0], at[-1] + 1) if together else None)
    return found


def _may_be_step(seen: Seen) -> bool:
    """Whether a call may be one of many that a decoder makes, as `Observer.see` tells them."""
    return seen.source == "qkv" and seen.call.q.shape[2] == 1 and not seen.causal


def _known(steps: list[Seen]) -> _Known:
    """A call of its own memory: what the model made may be a view of something larger."""
    call, lse = (steps[0].call, steps[0].lse) if len(steps) == 1 else (_joined(steps), None)
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (call.q, call.k))
    call = replace(call, q=q, k=k, given=replace(call.given, q=q, k=k))
    kept = [*call.tensors().values(), *([] if lse is None else [lse])]
    return _Known(call, lse, sum(x.numel() * x.element_size() for x in kept))


def _joined(steps: list[Seen]) -> Call:
    """Steps over the same keys as one call, whose scores are their weights: what is added to scores, and which keys
    are seen, may be another thing in each step."""
    weights = torch.cat([formed(step.call) for step in steps], 2)
    b, h, n_queries, n_keys = weights.shape
    seen = []
    for step in steps:
        mask, one = step.call.mask, Region(slice(0, 1), slice(0, n_keys))
        shown = weights.new_ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask.visible(one, step.call.grid)
        seen.append(shown.expand(b, h, 1, n_keys))
    zeros = weights.new_zeros(b, h, 1, 1)
    q, k = zeros.expand(-1, -1, n_queries, -1), zeros.expand(-1, -1, n_keys, -1)
    return Call.of(q, k, k, Dense(torch.cat(seen, 2)), (DenseBias(weights),), normalizer=Identity())


def _checking(stopped: Stopped) -> Callable[[str], None]:
    def check(module: str) -> None:
        if stopped():
            raise Cancelled

    return check


def _is_nan(module: str) -> InputError:
    return InputError(f"{module} computes weights that are NaN: the model's weights or its inputs hold NaN")
