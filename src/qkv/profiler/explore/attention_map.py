"""The attention map of any head of a model at any zoom: exact, made on demand in memory linear in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.huggingface.attention import routes
from qkv.profiler.capture import groups
from qkv.profiler.capture.calls import calls_of, without_values
from qkv.profiler.capture.inputs import Sequences, batches, sequences_of
from qkv.profiler.capture.models import load
from qkv.profiler.capture.observe import Seen
from qkv.profiler.capture.tokens import Tokens
from qkv.profiler.explore.pyramid import Pyramid, deepest, kept_tiles
from qkv.statistics.maps import HeadMap, Picture, checked_slice
from qkv.statistics.measure import row_state

CACHE = 2**26  # bytes of tiles kept

OnRows = Callable[[int], None]


class AttentionMap:
    """The weights of one head on one input, as pictures of any part of them. Made by `attention_map`.

    Rows are queries and columns are keys, both counted in the tokens of the call, padding included. What is kept is
    the head's queries, keys and log-sum-exp, and up to `cache` bytes of the tiles made last.

    >>> found = attention_map("qkv-mini", "def f(x):\\n    return x\\n", layer=0, head=3)
    >>> found.n_queries, found.picture(size=4).mean.shape
    (10, torch.Size([4, 4]))
    """

    def __init__(self, seen: Seen, head: int, tokens: Tokens, model: str = "", cache: int = CACHE) -> None:
        self.model, self.module, self.group = model, seen.module, seen.group
        self.layer, self.head = seen.layer, head
        self.batch, heads, self.n_queries, _ = seen.call.q.shape
        self.n_keys = seen.call.k.shape[2]
        if not 0 <= head < heads:
            raise InputError(f"head is {head}, but layer {seen.layer} has heads 0..{heads - 1}")
        self._call, self._tokens = seen.call, tokens
        self._real = None if seen.queries is None else seen.queries.bool().expand(self.batch, self.n_queries)
        self._rows = row_state(seen.call, seen.lse)
        self._heads: dict[int, HeadMap] = {}
        self._kept = kept_tiles(cache)

    def __repr__(self) -> str:
        what = f"{self.model}, {self.group} attention, layer {self.layer}, head {self.head}"
        return f"AttentionMap({what}: {self.n_queries:,} queries × {self.n_keys:,} keys)"

    def picture(
        self,
        rows: slice = slice(None),
        columns: slice = slice(None),
        size: int | tuple[int, int] = 1024,
        *,
        item: int = 0,
        on_rows: OnRows = lambda rows: None,
    ) -> Picture:
        """Queries `rows` × keys `columns`, pooled to at most `size` bins a side by maximum and by mean.

        Takes time in proportion to the visible pairs it shows.

        Args:
            rows: which queries; all by default.
            columns: which keys; all by default.
            size: bins a side at most, or (down, across); with fewer tokens each has a bin of its own.
            item: of the batch.
            on_rows: hears how many more queries are done, from any thread.

        Returns:
            `qkv.statistics.maps.Picture`.

        Raises:
            InputError: for rows, columns or an item that are not there, or a size below 1; and if weights are NaN.
        """
        checked_slice("rows", rows, self.n_queries), checked_slice("columns", columns, self.n_keys)
        down, across = (size, size) if isinstance(size, int) else size
        return self._checked(self._of(item).pooled(rows, columns, (down, across), on_rows))

    @property
    def deepest(self) -> int:
        """The zoom at which a pixel is one query and one key."""
        return deepest(self.n_queries, self.n_keys)

    def tile(self, zoom: int, i: int, j: int, *, item: int = 0) -> Picture | None:
        """Tile (i, j), counted down and across, of a pyramid for viewers, or None if the mask hides all of it.

        See `qkv.profiler.explore.pyramid.Pyramid`, which keeps it for the next time.

        Raises:
            InputError: for a zoom or a tile that is not there; and if weights are NaN.
        """
        pyramid = Pyramid(self._call, self._rows, item, self.head, self._kept, item, real=self._real)
        made = pyramid.tile(zoom, i, j)
        return None if made is None else self._checked(made)

    def query_tokens(self, rows: slice = slice(None), *, item: int = 0) -> list[str]:
        """Names of the queries: pieces of text, or positions where there are no token ids."""
        return self._names(self._tokens.queries, checked_slice("rows", rows, self.n_queries), self.n_queries, item)

    def key_tokens(self, columns: slice = slice(None), *, item: int = 0) -> list[str]:
        """Names of the keys."""
        return self._names(self._tokens.keys, checked_slice("columns", columns, self.n_keys), self.n_keys, item)

    def _names(self, ids: Tensor | None, within: slice, length: int, item: int) -> list[str]:
        if ids is None or ids.shape[1] != length:
            return [str(n) for n in range(within.start, within.stop)]
        part = ids[:, within]
        return self._tokens.names(part, item, np.ones(part.shape[1], bool))

    def _of(self, item: int) -> HeadMap:
        if item not in self._heads:
            self._heads[item] = HeadMap(self._call, self._rows, item=item, head=self.head, real=self._real)
        return self._heads[item]

    def _checked(self, picture: Picture) -> Picture:
        if picture.maximum.isnan().any():
            raise InputError(f"{self.module} computes weights that are NaN: the model's weights or its inputs hold NaN")
        return picture


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
    cache: int = CACHE,
    on_call: Callable[[str], None] = lambda module: None,
) -> AttentionMap:
    """The attention map of one head of a model on one input; the model is left as it was.

    One forward up to the layer gives what pictures are made of; of a model with several kinds of attention it runs to
    the end, unless `group` is given.

    Args:
        model: as in `qkv.profile`, or a name for `qkv.load`.
        inputs: a text; token ids (length,) or (batch, length); or what the model's forward takes, as a mapping.
        layer: counted from 0 in each group.
        head: query head.
        tokenizer: for text and for the names of tokens; loaded with the model if that is a name.
        target: the text the decoder of an encoder-decoder reads.
        group: kind of attention (see `capture.groups`); if None the main one: decoder where there is one.
        name: of the model, for figures; its own if not given.
        cache: bytes of a viewer's tiles to keep.
        on_call: hears the name of every module that attends, as it does.

    Raises:
        InputError: for inputs the model cannot take, and a layer, head or group it does not have.

    >>> found = attention_map("qkv-mini", "def mean(values):\\n    return sum(values) / len(values)", layer=1, head=2)
    >>> found
    AttentionMap(qkv-mini, self attention, layer 1, head 2: 21 queries × 21 keys)
    >>> picture = found.picture(rows=slice(16, 21), size=4)
    >>> tuple(picture.mean.shape), found.query_tokens(slice(0, 2))
    ((4, 4), ['<s>', 'def'])
    """
    if isinstance(model, str):
        length = len(inputs.encode()) if isinstance(inputs, str) else None
        loaded = load(model, tokens=length)
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    if not isinstance(inputs, str | Tensor | Mapping):
        raise InputError(f"inputs is {type(inputs).__name__}, expected one text, token ids, or a mapping of tensors")
    batch = next(iter(batches(model, inputs, tokenizer, target)))
    sequences = sequences_of(model, batch)
    calls = _calls(model, batch, layer, group or _only_group(model, sequences), group, on_call)
    found = {seen.group: seen for seen in calls}
    seen = found["decoder"] if "decoder" in found else next(iter(found.values()))
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    return AttentionMap(without_values(seen), head, Tokens(sequences, tokenizer, seen.group), name, cache)


def _calls(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    layer: int,
    likely: str | None,
    group: str | None,
    on_call: Callable[[str], None],
) -> list[Seen]:
    """The calls of a layer; of the `likely` kind, or if there are none, and no `group` was asked for, of any."""
    if likely != group:
        with suppress(InputError):
            return calls_of(model, batch, layers={layer}, group=likely, on_call=on_call)
    return calls_of(model, batch, layers={layer}, group=group, on_call=on_call)


def _only_group(model: nn.Module, sequences: Sequences) -> str | None:
    """The kind of all the attention of a model, where that is known before it runs: it need not run to its end."""
    routed = {groups.of_transformers(name, model) for name, module in model.named_modules() if routes(module)}
    if len(routed) == 1:
        return routed.pop()
    return None if routed or sequences.two or groups.is_two_sided(model) else "self"
