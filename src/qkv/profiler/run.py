"""`profile`: run a model on texts and keep exact statistics of where every head attends."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import qkv
from qkv._progress import bar
from qkv.errors import InputError
from qkv.profiler.capture import probes
from qkv.profiler.capture.datasets import datasets
from qkv.profiler.capture.inputs import batches, real_tokens, sequences_of
from qkv.profiler.capture.models import load
from qkv.profiler.capture.observe import Observer, observe, unobserved
from qkv.profiler.capture.residual import Residuals, attending, by_stack, follow
from qkv.profiler.capture.tokens import special_ids
from qkv.profiler.data.frames import COLUMNS
from qkv.profiler.data.types import ROLES, TRAITS
from qkv.profiler.data.variables import own_checked
from qkv.profiler.profiles import Profile
from qkv.statistics import Statistic

if TYPE_CHECKING:
    import xarray as xr


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
    map_bins: int = 64,
    probe: bool = True,
    statistics: Sequence[Statistic] = (),
    partial: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
) -> Profile:
    """Where every head of a model attends on a text, exactly, in memory linear in its length.

    The model runs once, with its attention observed: outputs stay what they were, and the model is left as it was.
    If several processes share the sequence (a model that calls `attend` with a group), each runs this with its own
    shard, and each gets the profile of the whole, without geometry, hidden states, small maps and probes.

    Args:
        model: any module whose attention is `qkv.attend` or a layer of `qkv.nn`, such as the models of `qkv.models`; a
            Hugging Face model (docs/coverage.md lists which, and how); one whose attention is torch's
            ``scaled_dot_product_attention``, ``nn.MultiheadAttention``, or a softmax of scores in a module that calls
            itself attention; or a name for `qkv.load`: a folder, a hub name, ``"minilm"`` or ``"random-gpt2"``.
        inputs: a text; several, each run by itself; token ids (length,) or (batch, length); or what the model's forward
            takes, as a mapping of tensors. An attention mask is honoured, and so is ``model.config.pad`` where there is
            one: padding counts neither as query nor as key.
        tokenizer: for text and for the names of tokens; loaded with the model if that is a name.
        target: the text the decoder of an encoder-decoder reads; the text itself if None.
        layers: which attention layers to keep, counted from 0 in each group; all if None.
        dtype: of the weights, if `model` is a name.
        local_window: `local` is the weight on keys at most this many tokens away.
        map_tokens: whole weight matrices are kept for texts up to this long.
        map_bins: every map is kept in small, pooled over bins: at most so many a side, 0 for none.
        probe: also run the model on short made-up texts (random tokens, one token repeated, a sequence twice, the
            text shuffled), which tell induction, duplicate-token and positional heads; for models that read token ids.
        statistics: your own (`qkv.statistics.Statistic`): each is a variable of the data sets under its name, a column
            of `Profile.heads`, and in figures, files and reports. Saved profiles keep it without its class.
        partial: go on if some attention of the model cannot be observed (its modules are listed in
            ``attrs["unobserved"]``) instead of raising.
        progress: show a progress bar while it runs, if standard error is a terminal.
        name: of the model, kept in the attributes; its own if not given.
        command: what was typed, kept in the attributes.

    Returns:
        `Profile`, one data set for each kind of attention: see `qkv.profiler.capture.groups`. ``lse`` is NaN where the
        normalizer has none. A module that attends step by step, with one query at a time, is one layer.
        ``attrs["sources"]`` says of every module where its numbers come from: ``"interface"`` (transformers' attention
        interface), ``"qkv"`` and ``"sdpa"`` are whole calls, in linear memory; ``"softmax"`` are the scores that the
        model itself forms, which is quadratic, and of which no vectors are known; ``"outputs"`` are weights that the
        model returns, in a second forward, where nothing else can be read.

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
    _check_settings(local_window, map_tokens, map_bins, layers)
    statistics = own_checked(statistics, {*COLUMNS, *ROLES, *TRAITS})
    runs_on = list(batches(model, inputs, tokenizer, target))
    started = time.perf_counter()
    runs, residuals = [], []
    with bar("profiling", "layers", show=progress) as step:
        for batch in runs_on:
            sequences = sequences_of(model, batch)
            source, queries = real_tokens(model, batch, sequences)
            observer = Observer(
                model,
                layers,
                local_window,
                map_tokens,
                map_bins,
                statistics,
                query_masks=queries,
                key_masks=source,
                sequences=sequences,
            )
            known = len(observer.expected) * len(runs_on) or None  # of models that transformers does not route: unknown
            observer.on_call = lambda module, of=known: step(1, of=of)  # type: ignore[misc]
            hidden = Residuals(source, queries)
            with observe(observer), follow(model, attending(model), hidden.look):
                model(**batch)
            runs.append((batch, _checked(observer, partial)))
            residuals.append(hidden)
    groups = datasets([observer for _, observer in runs], tokenizer, local_window)
    probed = _probe(model, runs[0][1], tokenizer, groups, layers) if probe else "not asked for"
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
        "sources": runs[0][1].sources,
        "probes": probed,
    }
    alone = runs[0][1].group is None  # of a shared sequence, a process has hidden states of its own tokens only
    return Profile(groups, attrs, by_stack(residuals) if alone else {})


def _probe(
    model: nn.Module, observer: Observer, tokenizer: Any, groups: dict[str, xr.Dataset], layers: Collection[int] | None
) -> str:
    """Add to the groups what made-up texts tell; returns "run", or why they were not."""
    ids = observer.sequences.source
    if observer.group is not None:
        return "not run: several processes share the sequence"
    if ids is None:
        return "not run: the model reads something else than token ids"
    real = observer.key_masks.get(ids.shape[1])
    try:
        text = ids[:1] if real is None else ids[:1, real[0]]
        found = probes.probe(model, text, special_ids(model, tokenizer), layers)
    except InputError as error:  # some models read nothing so short
        return f"not run: {error}"
    except Exception as error:  # the model's own: it may want pixels beside ids, or texts of one length only
        return f"not run: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    for group in groups.values():
        probes.add_to(group, found)
    return "run"


def _check_settings(local_window: int, map_tokens: int, map_bins: int, layers: Collection[int] | None) -> None:
    if local_window < 1:
        raise InputError(f"local_window is {local_window}, expected at least 1 token")
    if map_tokens < 0:
        raise InputError(f"map_tokens is {map_tokens}, expected 0 (keep no maps) or a number of tokens")
    if map_bins < 0:
        raise InputError(f"map_bins is {map_bins}, expected 0 (no small maps) or a number of bins")
    if layers is not None and (not layers or min(layers) < 0):
        raise InputError(f"layers is {sorted(layers)}, expected layer numbers from 0")


def _checked(observer: Observer, partial: bool) -> Observer:
    missing, name = unobserved(observer), type(observer.model).__name__
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    if not observer.fired and not (observer.expected and not partial):
        raise InputError(
            f"{name} ran none of the attention that qkv can observe: its own, that of transformers' attention "
            "interface, torch's functions, or one softmax in a module that calls itself attention"
            + (f"; it computed some of its own: {names}" if missing else "")
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
