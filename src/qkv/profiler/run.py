"""`profile`: run a model on texts and keep exact statistics of where every head attends."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import qkv
from qkv.errors import InputError
from qkv.profiler.capture import Observer, Record, observe, unobserved
from qkv.profiler.data import Profile
from qkv.profiler.inputs import Sequences, batches, real_tokens, sequences_of
from qkv.profiler.models import load

PER_QUERY = {
    "entropy": "entropy",
    "lse": "lse",
    "sink": "sink",
    "self": "self_",
    "previous": "previous",
    "next": "next_",
    "distance": "distance",
    "spread": "spread",
    "participation": "participation",
    "visible": "visible",
}
OWN_SEQUENCE = {"self", "previous", "next", "distance", "local"}  # say nothing where queries and keys are other texts


def profile(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokenizer: Any = None,
    target: str | None = None,
    layers: Collection[int] | None = None,
    dtype: str = "float32",
    local_window: int = 8,
    map_tokens: int = 256,
    partial: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
) -> Profile:
    """Where every head of a model attends on a text, exactly, in memory linear in its length.

    The model runs once, with its attention observed: outputs stay what they were, and the model is left as it was.

    Args:
        model: any module whose attention is `qkv.attend` or a layer of `qkv.nn`, such as the models of `qkv.models`; a
            Hugging Face model whose attention goes through transformers' attention interface (most do); or a name for
            `qkv.profiler.models.load`: a folder, a hub name, ``"minilm"`` or ``"random-gpt2"``.
        inputs: a text; several, each run by itself; token ids (length,) or (batch, length); or what the model's forward
            takes, as a mapping of tensors. An attention mask is honoured, and so is ``model.config.pad`` where there is
            one: padding counts neither as query nor as key.
        tokenizer: for text and for the names of tokens; loaded with the model if that is a name.
        target: the text the decoder of an encoder-decoder reads; the text itself if None.
        layers: which attention layers to keep, counted from 0 in each group; all if None.
        dtype: of the weights, if `model` is a name.
        local_window: `local` is the weight on keys at most this many tokens away.
        map_tokens: whole weight matrices are kept for texts up to this long.
        partial: go on if some attention of the model cannot be observed (its modules are listed in
            ``attrs["unobserved"]``) instead of raising.
        progress: show a progress bar while it runs, if standard error is a terminal.
        name: of the model, kept in the attributes; its own if not given.
        command: what was typed, kept in the attributes.

    Returns:
        `Profile`, one data set for each kind of attention: see `qkv.profiler.groups`. ``lse`` is NaN where the
        normalizer has none. A module that attends step by step, with one query at a time, is one layer.

    Raises:
        InputError: for inputs the model cannot take, weights that are NaN, a model that cannot be observed, or
            arguments its attention passes that qkv does not know.

    >>> import qkv
    >>> result = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> result.data.sizes["layer"], result.data.sizes["head"]
    (6, 12)
    """
    if isinstance(model, str):
        texts = [inputs] if isinstance(inputs, str) else inputs if isinstance(inputs, Sequence) else []
        loaded = load(model, dtype=dtype, tokens=max((len(str(t).encode()) for t in texts), default=None))
        model, tokenizer, name = loaded.model, tokenizer or loaded.tokenizer, name or loaded.name
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    _check_settings(local_window, map_tokens, layers)
    runs_on = list(batches(model, inputs, tokenizer, target))
    started = time.perf_counter()
    runs = []
    with _bar(progress, len(runs_on)) as step:
        for batch in runs_on:
            sequences = sequences_of(model, batch)
            source, queries = real_tokens(model, batch, sequences)
            observer = Observer(
                model, layers, local_window, map_tokens, query_masks=queries, key_masks=source, sequences=sequences
            )
            observer.on_call = lambda module, o=observer: step(len(o.expected))  # type: ignore[misc]
            with observe(observer):
                model(**batch)
            runs.append((batch, _checked(observer, partial)))
    groups = _datasets(runs, tokenizer, local_window)
    attrs = {
        "model": name,
        "dtype": str(next((p.dtype for p in model.parameters()), "unknown")).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": _versions(),
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": _peak_memory(),
        "text_preview": _preview(*runs[0], tokenizer),
        "unobserved": unobserved(runs[0][1]),
    }
    return Profile(groups, attrs)


def _check_settings(local_window: int, map_tokens: int, layers: Collection[int] | None) -> None:
    if local_window < 1:
        raise InputError(f"local_window is {local_window}, expected at least 1 token")
    if map_tokens < 0:
        raise InputError(f"map_tokens is {map_tokens}, expected 0 (keep no maps) or a number of tokens")
    if layers is not None and (not layers or min(layers) < 0):
        raise InputError(f"layers is {sorted(layers)}, expected layer numbers from 0")


def _checked(observer: Observer, partial: bool) -> Observer:
    missing, name = unobserved(observer), type(observer.model).__name__
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    if not observer.fired and not (observer.expected and not partial):
        raise InputError(
            f"{name} ran none of the attention that qkv can observe, which is that of qkv.attend, of qkv.nn and of "
            "transformers' attention interface" + (f"; it computed some of its own: {names}" if missing else "")
        )
    if missing and not partial:
        way = "transformers' attention interface" if observer.expected else "qkv"
        raise InputError(
            f"{name} has attention that did not pass through {way}: {names}; "
            "pass partial=True (--partial) to profile the rest"
        )
    asked = set(observer.layers or ())
    if asked - set(range(observer.deepest() + 1)):
        raise InputError(f"layers is {sorted(asked)}, but the model has attention layers 0..{observer.deepest()}")
    return observer


@contextmanager
def _bar(show: bool, runs: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over attention layers on standard error, if it is a terminal."""
    if not (show and sys.stderr.isatty()):
        yield lambda expected: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("profiling", total=None)

        def step(expected: int) -> None:
            progress.update(task, total=expected * runs or None, advance=1)

        yield step


def _datasets(
    runs: list[tuple[dict[str, Tensor], Observer]], tokenizer: Any, local_window: int
) -> dict[str, xr.Dataset]:
    """One data set a group, runs side by side along `text`."""
    parts: dict[str, list[xr.Dataset]] = {}
    for _, observer in runs:
        for group, records in _grouped(observer.records).items():
            tokens = _Tokens(observer.sequences, tokenizer, group)
            parts.setdefault(group, []).append(_dataset(records, tokens, local_window))
    return {group: _joined(datasets) for group, datasets in parts.items()}


def _grouped(records: list[Record]) -> dict[str, list[Record]]:
    """Records by group; where shapes differ within one (towers, hybrid models) it splits: text, text-2 …"""
    groups: dict[str, list[Record]] = {}
    shapes: dict[str, list[Any]] = {}
    for record in records:
        shape = (record.statistics.entropy.shape, record.statistics.received.shape)
        seen = shapes.setdefault(record.group, [])
        if shape not in seen:
            seen.append(shape)
        n = seen.index(shape)
        groups.setdefault(record.group if n == 0 else f"{record.group}-{n + 1}", []).append(record)
    return groups


class _Tokens:
    """Names of the tokens that a group's queries and keys are."""

    def __init__(self, sequences: Sequences, tokenizer: Any, group: str) -> None:
        self.tokenizer = tokenizer
        source, target = sequences.source, sequences.target if sequences.two else sequences.source
        kind = group.partition("-")[0]
        self.queries = target if kind in ("decoder", "cross") else source
        self.keys = target if kind == "decoder" else source

    def names(self, ids: Tensor | None, item: int, real: np.ndarray) -> list[str]:
        """Names of the real tokens of one batch item: pieces of text, or positions where there are no ids."""
        if ids is None or ids.shape[1] != len(real):
            return [str(n) for n in range(int(real.sum()))]
        kept = ids[item].cpu().numpy()[real].tolist()
        if self.tokenizer is None:
            return [str(i) for i in kept]
        return [_readable(self.tokenizer, i, piece) for i, piece in zip(kept, self._pieces(kept), strict=True)]

    def _pieces(self, ids: list[int]) -> list[str]:
        return [str(piece) for piece in self.tokenizer.convert_ids_to_tokens(ids)]

    @property
    def special(self) -> list[str]:
        return list(getattr(self.tokenizer, "all_special_tokens", ()) or ())


def _readable(tokenizer: Any, token: int, piece: str) -> str:
    """A token as a person reads it: byte-level and sentencepiece marks become spaces and characters."""
    if "▁" in piece:
        return piece.replace("▁", " ")
    if ("Ġ" in piece or "Ċ" in piece or not piece.isascii()) and hasattr(tokenizer, "decode"):
        return str(tokenizer.decode([token])) or piece
    return piece


def _dataset(records: list[Record], tokens: _Tokens, local_window: int) -> xr.Dataset:
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
                x = np.stack([_packed(one, axis - 1, k) for one, k in zip(x, keep, strict=True)])
        return x

    by_query, by_key = ("text", "layer", "head", "query"), ("text", "layer", "head", "key")
    variables: dict[str, Any] = {}
    for name, attribute in PER_QUERY.items():
        found = [getattr(r.statistics, attribute) for r in records]  # no log-sum-exp where the normalizer has none
        missing = torch.full_like(first.statistics.entropy, torch.nan)
        values = stack([missing if x is None else x for x in found], real_q)
        variables[name] = (by_query, values * np.nan if cross and name in OWN_SEQUENCE else values)
    local = stack([r.statistics.mass["local"] for r in records], real_q)
    variables["local"] = (by_query, local * np.nan if cross else local)
    variables["received"] = (by_key, stack([r.statistics.received for r in records], real_k))
    if all(r.statistics.sink_mass is not None for r in records):
        masses = [r.statistics.sink_mass for r in records]
        variables["sink_mass"] = (by_query, stack([m for m in masses if m is not None], real_q))
    if all(r.weights is not None for r in records):
        maps = [r.weights for r in records if r.weights is not None]
        variables["weights"] = ((*by_query, "key"), stack(maps, real_q, real_k))
    query_names = [tokens.names(tokens.queries, i, keep) for i, keep in enumerate(real_q)]
    key_names = [tokens.names(tokens.keys, i, keep) for i, keep in enumerate(real_k)]
    return xr.Dataset(
        variables,
        coords={
            "layer": [r.layer for r in records],
            "head": np.arange(first.statistics.entropy.shape[1]),
            "module": ("layer", [r.module for r in records]),
            "query_token": (("text", "query"), _table(query_names, n_queries)),
            "key_token": (("text", "key"), _table(key_names, n_keys)),
            "n_queries": ("text", real_q.sum(1)),
            "n_keys": ("text", real_k.sum(1)),
        },
        attrs={
            "causal": all(r.causal for r in records),
            "local_window": local_window,
            "special_tokens": [t for t in tokens.special if any(t in names for names in key_names)],
        },
    )


def _real(mask: Tensor | None, batch: int, length: int) -> np.ndarray:
    return np.ones((batch, length), bool) if mask is None else mask.expand(batch, length).cpu().numpy()


def _packed(x: np.ndarray, axis: int, keep: np.ndarray) -> np.ndarray:
    """What is kept along an axis moved to its start, NaN after it."""
    kept = np.compress(keep, x, axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, x.shape[axis] - kept.shape[axis])
    return np.pad(kept, widths, constant_values=np.nan)


def _table(names: list[list[str]], length: int) -> np.ndarray:
    table = np.full((len(names), length), "", dtype=object)
    for row, row_names in zip(table, names, strict=True):
        row[: len(row_names)] = row_names
    return table


def _joined(datasets: list[xr.Dataset]) -> xr.Dataset:
    """Runs of different lengths along `text`, the shorter ones filled with NaN and empty tokens."""
    if len(datasets) == 1:
        return datasets[0]
    longest = {dim: max(d.sizes[dim] for d in datasets) for dim in ("query", "key")}
    if any("weights" not in d for d in datasets):
        datasets = [d.drop_vars("weights", errors="ignore") for d in datasets]
    empty = {"query_token": "", "key_token": ""}
    padded = [
        d.reset_coords(list(empty)).pad(
            {dim: (0, longest[dim] - d.sizes[dim]) for dim in longest},
            constant_values=dict.fromkeys(d.data_vars, np.nan) | empty,
        )
        for d in datasets
    ]
    specials = {t: None for d in datasets for t in d.attrs["special_tokens"]}
    joined = xr.concat(padded, "text", data_vars="all", coords="minimal", compat="override", join="exact")
    return joined.set_coords(list(empty)).assign_attrs(datasets[0].attrs | {"special_tokens": list(specials)})


def _versions() -> dict[str, str]:
    found = {"qkv": qkv.__version__, "torch": torch.__version__, "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found


def _peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # exact; ru_maxrss may also count the process that started this one
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _preview(batch: Mapping[str, Tensor], observer: Observer, tokenizer: Any) -> str:
    """The beginning of the first text, or what else was given."""
    ids = observer.sequences.source
    if ids is None:
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items() if isinstance(x, Tensor))
    if not hasattr(tokenizer, "decode"):
        return f"{ids.shape[1]:,} token ids"
    return " ".join(str(tokenizer.decode(ids[0, :64], skip_special_tokens=True)).split())[:200]
