"""Collect the attention calls of a model on an input, for analyses such as maps, attention rollout and eviction.

A call holds queries, keys, values and the mask, so the memory is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import Tensor, nn

from qkv.errors import InputError
from qkv.profiler.capture.inputs import real_tokens, sequences_of
from qkv.profiler.capture.observe import ObservedCall, Observer, observe


class _AllCollected(Exception):  # noqa: N818  (not an error)
    """Raised to stop the forward once all requested layers were collected."""


def calls_of(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    layers: Collection[int] | None = None,
    group: str | None = None,
    on_call: Callable[[str], None] = lambda module: None,
) -> list[ObservedCall]:
    """The attention calls of one forward, in the order the model made them; the model is left as it was.

    Args:
        model: as in `qkv.profile`.
        batch: the arguments of its forward, from `qkv.profiler.capture.inputs.batches`.
        layers: which layers to keep, counted from 0 in each group; all if None. If `group` is given, too, the forward
            stops after the last of these layers.
        group: keep only calls of this kind: see `qkv.profiler.capture.groups`.
        on_call: callback with the name of every module that attends, at the time of its call.

    Raises:
        InputError: if the model makes no such call.
    """
    wanted = None if layers is None else set(layers)
    found: list[ObservedCall] = []

    def collect(observed: ObservedCall) -> None:
        if group is None or observed.group == group:
            found.append(observed)
        if wanted is not None and group is not None and {s.layer for s in found} >= wanted:
            raise _AllCollected

    sequences = sequences_of(model, batch)
    source, queries = real_tokens(model, batch, sequences)
    observer = Observer(model, layers, query_masks=queries, key_masks=source, sequences=sequences, collect=collect)
    observer.on_call = on_call
    try:
        with observe(observer):
            model(**batch)
    except _AllCollected:
        pass
    missing = sorted((wanted or set()) - {s.layer for s in found})
    if not found or missing:
        of_kind = f" of the kind {group!r}" if group else ""
        name, last = type(model).__name__, observer.deepest()
        if missing:
            raise InputError(f"layers has {missing[0]}{of_kind}, expected 0 to {last}, the attention layers of {name}")
        raise InputError(f"model {name} has no attention{of_kind} that qkv can observe; it has layers 0 to {last}")
    return found


def without_values(observed: ObservedCall) -> ObservedCall:
    """The call with its values cut to one column, to save memory where an analysis does not need them."""
    v = observed.call.v[..., :1].clone()
    given = replace(observed.call.given, v=v)
    return replace(observed, call=replace(observed.call, v=v, given=given))
