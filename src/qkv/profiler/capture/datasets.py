"""The attention calls of a model on an input, and recorded statistics as one data set for each kind of attention.

A call holds queries, keys, values and the mask, so the memory is linear in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv.engine import Call, Result
from qkv.errors import InputError
from qkv.profiler.capture.inputs import Sequences, Tokens, sequences_of
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.record import PREFIX, ObservedCall, Receive, Record, served
from qkv.profiler.data.variables import BIN, BY_HEAD, HEAD, TEXT, VARIABLES, Variable, custom_attrs
from qkv.statistics import Statistic, Streaming


class _AllCollected(Exception):  # noqa: N818  (not an error)
    """Raised to stop the forward once all requested layers were collected."""


def collecting(collect: Callable[[ObservedCall], object]) -> Receive:
    """A receiver that gives every call, with its log-sum-exp, to a function."""

    def receive(observed: ObservedCall, result: Result | None, changed: Mapping[int, Call]) -> Result:
        if changed:
            raise InputError(
                f"edits changes the weights of single heads in {observed.module}, which only qkv.profile and qkv.watch "
                "record; expected edits of outputs, such as 'zero', the same edit for all heads, or no edits here"
            )
        result = served(observed.call) if result is None else result
        collect(replace(observed, lse=None if result.lse is None else result.lse.detach()))
        return result

    return receive


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
        group: keep only calls of this kind: see `qkv.profiler.capture.inputs`. Hidden maps if it is ``"linear"``.
        on_call: callback with the name of every module that attends, at the time of its call.
    """
    wanted = None if layers is None else set(layers)
    calls: list[ObservedCall] = []

    def collect(observed: ObservedCall) -> None:
        if group is None or observed.group == group:
            calls.append(observed)
        if wanted is not None and group is not None and {s.layer for s in calls} >= wanted:
            raise _AllCollected

    observer = Observer(
        model, layers, collecting(collect), sequences=sequences_of(model, batch), on_call=on_call,
        hidden_maps=group == "linear",
    )  # fmt: skip
    try:
        with observe(observer):
            model(**batch)
    except _AllCollected:
        pass
    missing = sorted((wanted or set()) - {s.layer for s in calls})
    if not calls or missing:
        of_kind = f" of the kind {group!r}" if group else ""
        name, known = type(model).__name__, observer.numbers.known
        if missing:
            raise InputError(f"layers has {missing[0]}{of_kind}, expected {known}, the attention layers of {name}")
        raise InputError(f"model {name} has no attention{of_kind} that qkv can observe; it has layers {known}")
    return observer.numbers.in_order(calls)


def without_values(observed: ObservedCall) -> ObservedCall:
    """The call with its values cut to one column, to save memory where an analysis does not need them."""
    v = observed.call.v[..., :1].clone()
    return replace(observed, call=replace(observed.call, v=v, user=replace(observed.call.user, v=v)))


Probed = Mapping[tuple[str, int], Mapping[str, Float[Tensor, " h"]]]
"""Scores of every head on the probe texts, by module and layer."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The records of one run."""

    records: list[Record]
    sequences: Sequences
    statistics: Sequence[Statistic] = ()
    group: ProcessGroup | None = None


def datasets(
    runs: list[Recorded], tokenizer: Any, local_window: int, probed: Probed | None = None
) -> dict[str, xr.Dataset]:
    """One data set for each group, with the runs concatenated along `text`, and the scores of the probe texts."""
    parts: dict[str, list[Arrays]] = {}
    for run in runs:
        for group, records in grouped(run.records).items():
            tokens = Tokens(run.sequences, tokenizer, group, run.group)
            arrays = _arrays(records, tokens, local_window, run.statistics)
            arrays.variables.update(_of_probes(records, probed or {}))
            parts.setdefault(group, []).append(arrays)
    return {group: joined(parts[group]) for group in sorted(parts, key=lambda group: group.startswith("linear"))}


def grouped(layers: list[Any]) -> dict[str, list[Any]]:
    """Layers by group; if shapes differ within a group (towers, hybrid models), it is split into text, text-2 …"""
    groups: dict[str, list[Any]] = {}
    shapes: dict[str, list[Any]] = {}
    for layer in layers:
        known = shapes.setdefault(layer.group, [])
        if layer.shape not in known:
            known.append(layer.shape)
        n = known.index(layer.shape)
        groups.setdefault(layer.group if n == 0 else f"{layer.group}-{n + 1}", []).append(layer)
    return groups


def _arrays(records: list[Record], tokens: Tokens, local_window: int, statistics: Sequence[Statistic]) -> Arrays:
    first = records[0]
    b, _, n_queries = first.statistics.entropy.shape
    n_keys = first.statistics.received.shape[2]
    real_q = _real(first.queries, b, n_queries)
    real_k = _real(first.keys, b, n_keys)
    cross = first.group == "cross"

    def stack(values: list[Tensor], *real: np.ndarray) -> np.ndarray:
        """(text, layer, head, …) with each text's real tokens at the start and NaN after."""
        x = torch.stack([v.float().cpu() for v in values], 1).numpy()
        for axis, keep in enumerate(real, start=x.ndim - len(real)):
            if not keep.all():
                x = np.stack([_packed(text, axis - 1, k) for text, k in zip(x, keep, strict=True)])
        return x

    real = {"query": real_q, "key": real_k}
    variables: dict[str, Any] = {}
    for name, about in (VARIABLES | {x.name: Variable.of(x) for x in statistics}).items():
        dims, by_layer = about.dims, [_found(record, name) for record in records]
        measured = [x is not None for x in by_layer]
        some = about.always or (name == "sink_mass" and any(measured))
        if dims == HEAD or not (some or all(measured)):
            continue
        if dims == BIN and not (real_q.all() and real_k.all()):
            continue  # bins are of positions and would mix padding with real tokens
        # Missing are the log-sum-exp of other normalizers, and the null key of layers that have none.
        missing = torch.full_like(first.statistics.entropy, 0 if name == "sink_mass" else torch.nan)
        values = stack([missing if x is None else x for x in by_layer], *[real[d] for d in dims if d in real])
        if cross and about.one_text:
            values = values * np.nan
        if name == "prefix_sink_scores":
            values = np.where(np.arange(PREFIX) < real_k.sum(1)[:, None, None, None], values, np.nan)
        variables[name] = (dims, values, about.attrs)
    if "image" in variables and tokens.patches is not None:
        places = zip(tokens.patches.place, real_k, strict=True)
        about = VARIABLES["patch"]
        variables["patch"] = about.dims, np.stack([_packed(x, 0, keep) for x, keep in places]), about.attrs
    causal = all(r.causal for r in records)
    for x in statistics:
        values = variables[x.name][1]
        variables[x.name] = (*variables[x.name][:2], custom_attrs(x))
        variables[x.name + BY_HEAD] = (TEXT, _by_head(x, values, real_q if x.over == "query" else real_k), {
            "units": x.unit, "definition": f"{x.definition}; of each head",
        })  # fmt: skip
    small = first.statistics.thumbnail if "map_max" in variables else None
    bins = (0, 0) if small is None else (small.query_bin, small.key_bin)
    query_names, key_names = (
        np.array([tokens.names(ids, i, kept) + [""] * int((~kept).sum()) for i, kept in enumerate(real)], object)
        for ids, real in ((tokens.queries, real_q), (tokens.keys, real_k))
    )
    return Arrays(
        variables,
        {
            "layer": ("layer", [r.layer for r in records]),
            "head": ("head", np.arange(first.statistics.entropy.shape[1])),
            "module": ("layer", np.array([r.module for r in records], object)),
            "query_token": (("text", "query"), query_names),
            "key_token": (("text", "key"), key_names),
            "n_queries": ("text", real_q.sum(1)),
            "n_keys": ("text", real_k.sum(1)),
            "bin_queries": ("text", np.full(b, bins[0])),
            "bin_keys": ("text", np.full(b, bins[1])),
        },
        {
            "causal": causal,
            "local_window": local_window,
            "streaming_first": Streaming.first_keys,
            "streaming_last": Streaming.last_keys,
            "special_tokens": [t for t in tokens.special if t in key_names],
        },
    )


def _of_probes(records: list[Record], probed: Probed) -> dict[str, tuple[Any, ...]]:
    """The scores of the heads of these layers; NaN at layers that were not probed."""
    layers = [probed.get((record.module, record.layer), {}) for record in records]
    missing = torch.full((records[0].shape[1],), torch.nan)
    rows = {name: [layer.get(name, missing).float().cpu() for layer in layers] for scores in layers for name in scores}
    return {name: (VARIABLES[name].dims, torch.stack(x).numpy(), VARIABLES[name].attrs) for name, x in rows.items()}


def _found(record: Record, name: str) -> Tensor | None:
    """A variable of one layer, or None if it was not measured."""
    statistics = record.statistics
    if name in ("map_max", "map_mean"):
        small = statistics.thumbnail
        return None if small is None else small.maximum if name == "map_max" else small.mean
    if name == "weights":
        return record.weights
    return record.geometry[name] if name in record.geometry else statistics.named(name)


def _by_head(statistic: Statistic, values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """A custom statistic averaged for each head of each text by its own `by_head`: (text, layer, head)."""
    counted = np.arange(values.shape[-1]) < real.sum(1)[:, None]
    if statistic.from_second and statistic.over == "query":
        counted[:, 0] = False
    means = statistic.by_head(values, counted)
    if not isinstance(means, np.ndarray) or means.shape != values.shape[:3]:
        got = means.shape if isinstance(means, np.ndarray) else type(means).__name__
        raise InputError(
            f"{type(statistic).__name__}: by_head returned {got} for values {values.shape}, expected {values.shape[:3]}"
        )
    return means.astype(np.float32)


def _real(mask: Tensor | None, batch: int, length: int) -> np.ndarray:
    return np.ones((batch, length), bool) if mask is None else mask.expand(batch, length).cpu().numpy()


def _packed(x: np.ndarray, axis: int, keep: np.ndarray) -> np.ndarray:
    """Move the entries where `keep` is True to the start of an axis and fill its end with NaN."""
    kept = np.compress(keep, x, axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, x.shape[axis] - kept.shape[axis])
    return np.pad(kept, widths, constant_values=np.nan)


class Arrays(NamedTuple):
    """The arrays of one run, by name, each with its dimensions, and with attributes or without."""

    variables: dict[str, tuple[Any, ...]]
    coords: dict[str, tuple[Any, ...]]
    attrs: dict[str, Any]


def joined(parts: Sequence[Arrays]) -> xr.Dataset:
    """One data set of several runs, one after another along `text`, the first dimension.

    Shorter texts are padded with NaN and empty names, and variables that some runs lack are left out.
    """
    first = parts[0]
    for part in parts[1:]:
        if "module" in part.coords and list(part.coords["module"][1]) != list(first.coords["module"][1]):
            have = [", ".join(map(str, run.coords["layer"][1])) for run in (first, part)]
            raise InputError(
                f"model attends in layers {have[0]} of the group for one text, and in {have[1]} for another; expected "
                "the same layers, or a profile of each"
            )

    def whole(entries: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        dims, _, *attrs = entries[0]
        if len(entries) == 1 or "text" not in dims:
            return entries[0]
        arrays = [np.asarray(values) for _, values, *_ in entries]
        shape = np.max([x.shape[1:] for x in arrays], 0, initial=0).astype(int)
        empty = "" if arrays[0].dtype == object else np.nan
        short = [[(0, 0), *((0, n - m) for n, m in zip(shape, x.shape[1:], strict=True))] for x in arrays]
        padded = [np.pad(x, n, constant_values=empty) if np.any(n) else x for x, n in zip(arrays, short, strict=True)]
        return dims, np.concatenate(padded), *attrs

    variables, coords = (
        {name: whole([run[name] for run in all_]) for name in all_[0] if all(name in run for run in all_)}
        for all_ in ([part.variables for part in parts], [part.coords for part in parts])
    )
    attrs = dict(first.attrs)
    if "causal" in attrs:
        attrs["causal"] = all(part.attrs["causal"] for part in parts)
        attrs["special_tokens"] = list(dict.fromkeys(token for part in parts for token in part.attrs["special_tokens"]))
    return xr.Dataset(variables, coords, attrs)
