"""`attention_map`: the exact attention map of a head at any zoom, computed on demand in linear memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.huggingface.attention import routes
from qkv.models.loading import load_if_named
from qkv.profiler.capture.datasets import calls_of, without_values
from qkv.profiler.capture.inputs import Sequences, Tokens, batches, nan_error, sequences_of
from qkv.profiler.capture.modules import group_of_module, is_two_sided
from qkv.profiler.capture.patches import patches_of
from qkv.profiler.capture.record import ObservedCall
from qkv.statistics.maps import HeadMap, Picture, checked_slice
from qkv.statistics.measure import row_state

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
        layer: counted from 0 in each group.
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
    except InputError:
        if likely == group:
            raise
        calls = calls_of(model, batch, layers={layer}, group=group)
    by_group = {observed.group: observed for observed in calls}
    observed = by_group["decoder"] if "decoder" in by_group else next(iter(by_group.values()))
    return AttentionMap(without_values(observed), head, Tokens(sequences, tokenizer, observed.group), loaded.name)


def _only_group(model: nn.Module, sequences: Sequences) -> str | None:
    """The only group that the model has, if that is known before it runs, so that it need not run to its end."""
    routed = {group_of_module(name, model) for name, module in model.named_modules() if routes(module)}
    if len(routed) == 1:
        return routed.pop()
    return None if routed or sequences.two or is_two_sided(dict(model.named_modules())) else "self"
