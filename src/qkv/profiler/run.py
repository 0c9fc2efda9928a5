"""`profile`: run a model on texts and keep exact statistics of where every head attends."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        model: a Hugging Face model whose attention goes through transformers' attention interface (most do), or a name
            for `qkv.profiler.models.load`: a folder, a hub name, ``"minilm"`` or ``"random-gpt2"``.
        inputs: a text; several, each run by itself; token ids (length,) or (batch, length); or what the model's forward
            takes, as a mapping of tensors. An attention mask is honoured: padding counts neither as query nor as key.
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
        `Profile`, one data set for each kind of attention.

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
    name = name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    _check_settings(local_window, map_tokens, layers)
    batches = list(_batches(model, inputs, tokenizer, target))
    started = time.perf_counter()
    runs = []
    with _bar(progress, len(batches)) as step:
        for batch in batches:
            observer = Observer(
                model,
                layers,
                local_window,
                map_tokens,
                query_masks=_real_tokens(batch, "decoder_attention_mask"),
                key_masks=_real_tokens(batch, "attention_mask"),
            )
            observer.on_call = lambda module, o=observer: step(len(o.expected))  # type: ignore[misc]
            with observe(observer):
                model(**batch)
            runs.append((batch, _checked(observer, partial)))
    groups = _datasets(model, runs, tokenizer, local_window)
    attrs = {
        "model": name,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": _versions(),
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": _peak_memory(),
        "text_preview": _preview(runs[0][0], tokenizer),
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


def _batches(
    model: nn.Module, inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor], tokenizer: Any, target: str | None
) -> Iterator[dict[str, Tensor]]:
    """What the model's forward takes, once for each run."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Tensor):
        if inputs.dtype not in (torch.int32, torch.int64) or inputs.ndim not in (1, 2):
            raise InputError(
                f"inputs is a {inputs.dtype} tensor of shape {tuple(inputs.shape)}, expected token ids of shape "
                "(length,) or (batch, length); pass anything else by name, such as {'pixel_values': tensor}"
            )
        inputs = {"input_ids": inputs if inputs.ndim == 2 else inputs[None]}
    if isinstance(inputs, Mapping):
        yield _ready(model, dict(inputs))
        return
    if not inputs:
        raise InputError("inputs: no text given, expected at least one")
    for text in inputs:
        if not isinstance(text, str):
            raise InputError(f"inputs holds {type(text).__name__}, expected texts, token ids or a mapping of tensors")
        if not text.strip():
            raise InputError("inputs: the text is empty, expected at least one token")
        if tokenizer is None:
            raise InputError("inputs is text but there is no tokenizer; pass tokenizer=…, or token ids")
        batch = {k: v for k, v in tokenizer(text, return_tensors="pt").items() if k in ("input_ids", "attention_mask")}
        if target is not None:
            if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
                raise InputError(f"target is given, but {type(model).__name__} has no decoder that could read it")
            batch["decoder_input_ids"] = tokenizer(target, return_tensors="pt")["input_ids"]
        yield _ready(model, batch)


def _ready(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch checked against the model, completed, and on its device."""
    config: Any = getattr(model, "config", None)
    ids = batch.get("input_ids")
    if ids is not None:
        both = (ids, batch.get("decoder_input_ids", ids))
        if any(x.numel() == 0 for x in both):
            raise InputError("inputs: no tokens, expected at least one")
        longest = max(x.shape[1] for x in both)
        limit = _positions(model)
        if limit and longest > limit:
            raise InputError(
                f"inputs: {longest:,} tokens, but {type(model).__name__} has {limit:,} positions; "
                "expected a shorter text"
            )
        for x, vocabulary in zip(both, ("vocab_size", "decoder_vocab_size"), strict=True):
            size = getattr(config, vocabulary, None) or getattr(config, "vocab_size", None)
            low, high = map(int, x.aminmax())
            if size and (low < 0 or high >= size):
                raise InputError(f"inputs: token ids lie in {low}..{high}, expected 0..{size - 1} for this model")
        if getattr(config, "is_encoder_decoder", False):
            batch.setdefault("decoder_input_ids", ids)
    if "logits_to_keep" in _parameters(model):
        batch["logits_to_keep"] = 1  # type: ignore[assignment]  # nobody looks at the logits: do not make them all
    device = next(model.parameters()).device
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _positions(model: nn.Module) -> int | None:
    """How many tokens the model has positions for, if it says."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if limit and name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1  # RoBERTa and its kin count from after the padding token's number
    return limit


def _parameters(model: nn.Module) -> Collection[str]:
    import inspect

    return inspect.signature(model.forward).parameters


def _real_tokens(batch: Mapping[str, Tensor], name: str) -> dict[int, Tensor]:
    """The real tokens that an attention mask (batch, length) tells, by their number."""
    mask = batch.get(name)
    return {} if mask is None or mask.ndim != 2 else {mask.shape[1]: mask.bool()}


def _checked(observer: Observer, partial: bool) -> Observer:
    missing = unobserved(observer)
    if missing and not partial:
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise InputError(
            f"{type(observer.model).__name__} has attention that did not pass through transformers' attention "
            f"interface: {names}; pass partial=True (--partial) to profile the rest"
        )
    if not observer.fired:
        raise InputError(f"{type(observer.model).__name__} ran none of the attention that qkv can observe")
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
            progress.update(task, total=expected * runs, advance=1)

        yield step


def _datasets(
    model: nn.Module, runs: list[tuple[dict[str, Tensor], Observer]], tokenizer: Any, local_window: int
) -> dict[str, xr.Dataset]:
    """One data set a group, runs side by side along `text`."""
    parts: dict[str, list[xr.Dataset]] = {}
    for batch, observer in runs:
        for group, records in _grouped(observer.records).items():
            tokens = _Tokens(batch, tokenizer, group)
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

    def __init__(self, batch: Mapping[str, Tensor], tokenizer: Any, group: str) -> None:
        self.tokenizer = tokenizer
        source, target = batch.get("input_ids"), batch.get("decoder_input_ids")
        self.queries = target if group in ("decoder", "cross") and target is not None else source
        self.keys = target if group == "decoder" and target is not None else source

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
        values = stack([getattr(r.statistics, attribute) for r in records], real_q)
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
    import transformers

    return {
        "qkv": qkv.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # exact; ru_maxrss may also count the process that started this one
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _preview(batch: Mapping[str, Tensor], tokenizer: Any) -> str:
    """The beginning of the first text, or what else was given."""
    ids = batch.get("input_ids")
    if ids is None:
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items() if isinstance(x, Tensor))
    if not hasattr(tokenizer, "decode"):
        return f"{ids.shape[1]:,} token ids"
    return " ".join(str(tokenizer.decode(ids[0, :64], skip_special_tokens=True)).split())[:200]
