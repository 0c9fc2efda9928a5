"""The attention calls of a model on an input, kept to ask more of them: maps, rollout, what a cache would lose.

A call is queries, keys, values and mask, so what is kept is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import Tensor, nn

from qkv.errors import InputError
from qkv.profiler.capture.inputs import real_tokens, sequences_of
from qkv.profiler.capture.observe import Observer, Seen, observe


class _Enough(Exception):  # noqa: N818  (no error)
    """Nothing is wanted of what the model has still to compute."""


def calls_of(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    layers: Collection[int] | None = None,
    group: str | None = None,
    on_call: Callable[[str], None] = lambda module: None,
) -> list[Seen]:
    """The calls of one forward, in the order the model made them; the model is left as it was.

    Args:
        model: as in `qkv.profile`.
        batch: what its forward takes, from `qkv.profiler.capture.inputs.batches`.
        layers: which to keep, counted from 0 in each group; all if None. The forward ends when it has the last of them.
        group: only calls of this kind: see `qkv.profiler.capture.groups`.
        on_call: hears the name of every module that attends, as it does.

    Raises:
        InputError: if the model makes no such call.
    """
    wanted = None if layers is None else set(layers)
    found: list[Seen] = []

    def take(seen: Seen) -> None:
        if group is None or seen.group == group:
            found.append(seen)
        if wanted is not None and group is not None and {s.layer for s in found} >= wanted:
            raise _Enough

    sequences = sequences_of(model, batch)
    source, queries = real_tokens(model, batch, sequences)
    observer = Observer(model, layers, query_masks=queries, key_masks=source, sequences=sequences, take=take)
    observer.on_call = on_call
    try:
        with observe(observer):
            model(**batch)
    except _Enough:
        pass
    missing = sorted((wanted or set()) - {s.layer for s in found})
    if not found or missing:
        what = f"layers {missing}" if missing else "attention that qkv can observe"
        kinds = f" of the kind {group!r}" if group else ""
        raise InputError(f"{type(model).__name__} has no {what}{kinds}; it has layers 0..{observer.deepest()}")
    return found


def without_values(seen: Seen) -> Seen:
    """The same for what needs no values, which then take no memory."""
    v = seen.call.v[..., :1].clone()
    given = replace(seen.call.given, v=v)
    return replace(seen, call=replace(seen.call, v=v, given=given))
