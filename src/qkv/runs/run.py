"""`profile` runs a model on texts and computes exact statistics of where every head attends."""

from __future__ import annotations

import datetime
import functools
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qkv._progress import bar
from qkv.errors import InputError, first_line
from qkv.huggingface.attention import routes
from qkv.models.loading import load_if_named
from qkv.native.library import description
from qkv.profiler.capture import probes
from qkv.profiler.capture.datasets import Probed, Recorded, datasets
from qkv.profiler.capture.inputs import Sequences, batches, sequences_of, special_ids, tokenizer_of
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer, unobserved
from qkv.profiler.capture.patches import patches_of
from qkv.profiler.capture.record import Measures, Recorder
from qkv.profiler.capture.residual import Residuals, attention_modules, by_stack, observe_residual
from qkv.profiler.corpora import default_text
from qkv.profiler.data.frames import COLUMNS
from qkv.profiler.data.tables import ROLES, TRAITS
from qkv.profiler.data.variables import checked_custom
from qkv.runs.profiles import Profile
from qkv.statistics import Statistic


def profile(
    model: nn.Module | str,
    inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor] | None = None,
    *,
    tokenizer: Any = None,
    target: str | None = None,
    layers: Collection[int] | None = None,
    local_window: int = 8,
    map_tokens: int = 384,
    map_bins: int = 64,
    probe: bool | Literal["again"] = True,
    statistics: Sequence[Statistic] = (),
    partial: bool = False,
    progress: bool = True,
) -> Profile:
    """Measure exactly where every head of a model attends on a text, in memory linear in its length.

    The model runs once while its attention is observed. Its outputs do not change, and the model is left as it was.
    If several processes share the sequence (a model that calls `attend` with a group), each process calls this
    function with its own shard and gets the profile of the whole sequence, without geometry, hidden states, small maps
    and probes.

    Args:
        model: any module whose attention is `qkv.attend` or a layer of `qkv.nn`, such as the models of `qkv.models`; a
            Hugging Face model (docs/coverage.md lists which, and how); one whose attention is torch's
            ``scaled_dot_product_attention`` or ``nn.MultiheadAttention``, or written out: a softmax, a sigmoid or
            another function of a product of queries and keys, which is multiplied with values; or a name for
            `qkv.load`: a folder, a hub name, ``"minilm"`` or ``"random-gpt2"``.
        inputs: a text; several texts, each run separately; token ids (length,) or (batch, length); or the arguments of
            the model's forward, as a mapping of tensors. An attention mask and ``model.config.pad`` are honoured:
            padding counts neither as query nor as key. If `model` is a name, the default is `profiler.default_text`.
        tokenizer: converts text to ids, and ids to the names of tokens; if `model` is a name, its tokenizer is loaded.
            For a model that reads images or sounds, its processor: it tells how images were cut.
        target: the text that the decoder of an encoder-decoder reads; the input text if None.
        layers: which attention layers to keep, counted from 0 in each group; all if None.
        local_window: `local` is the weight on keys at most this many tokens away.
        map_tokens: whole weight matrices are kept for texts up to this long; in cross-attention, those with at most as
            many weights.
        map_bins: every map is also kept as a small map, pooled to at most this many bins a side; 0 for no small maps.
        probe: also run the model on short synthetic texts (random tokens, the same shuffled, one token repeated, a
            sequence twice), which identify induction, duplicate-token and positional heads; only for models that read
            token ids. The scores are kept for the next profile of the same model, until it changes: a new tensor, an
            operation in place, another setting, a hook added or removed. ``"again"`` runs them in any case, which is
            needed after a change that cannot be told: of single numbers through ``parameter.data``, or inside a hook.
        statistics: custom statistics (`qkv.statistics.Statistic`). Each becomes a variable of the data sets under its
            name and a column of `Profile.heads`, and appears in figures, files and reports. Reading a saved profile
            does not need the class.
        partial: if some attention of the model cannot be observed, list its modules in ``attrs["unobserved"]`` instead
            of raising.
        progress: show a progress bar while it runs, if standard error is a terminal.

    Returns:
        `Profile`, one data set for each kind of attention (`qkv.profiler.capture.inputs`). ``lse`` is NaN where the
        normalizer has none. A module that attends step by step, with one query at a time, is one layer.
        ``attrs["sources"]`` names for every module the source of its statistics. ``"interface"`` (transformers'
        attention interface), ``"qkv"`` and ``"sdpa"`` are complete calls, measured in linear memory. ``"softmax"``
        means that the scores or weights which the model itself forms were read: quadratic memory, and no queries, keys
        and values.
        ``"outputs"`` means weights that the model returned in a second forward, because nothing else could be read, and
        ``"returned"`` weights that the module's own attention function returned beside its output, because standard
        attention does not give this output. ``attrs["checks"]`` has the comparisons with the model's own attention
        function: module, function, and the largest difference of the outputs as a fraction of the largest output.
        The source ``"differential"`` means two softmaxes, one of which is subtracted: heads of the first half less λ
        times those of the second act (``attrs["differential"]`` has λ by layer), and their values are not measured.
        Layers keep their numbers where nothing attends in some of a stack: ``attrs["without_map"]`` has those.
        If the inputs have images, keys are named as patches, and ``attrs["images"]`` says what the model sees of an
        image (`qkv.profiler.capture.patches.Patches.seen`), or, as ``"unknown"``, why their places are not known.

    Raises:
        InputError: if the model does not accept the inputs, computes weights that are NaN, cannot be observed, passes
            arguments to its attention that qkv does not know, or attends by a function whose output is not that of
            standard attention with the same arguments.

    >>> import qkv
    >>> result = qkv.profile("minilm", "The keeper kept two logbooks.", progress=False)
    >>> result.data.sizes["layer"], result.data.sizes["head"]
    (6, 12)
    """
    if inputs is None:
        if not isinstance(model, str):
            raise InputError("inputs is missing, expected a text, token ids or the arguments of the model's forward")
        inputs = default_text(model)
    loaded = load_if_named(model, tokenizer, inputs=inputs)
    model, processor, tokenizer = loaded.model, loaded.tokenizer, tokenizer_of(loaded.tokenizer)
    measures = Measures(local_window, map_tokens, map_bins)
    if probe not in (True, False, "again"):
        raise InputError(f"probe is {probe!r}, expected True, False or 'again' (run the probe texts anew)")
    if layers is not None and not (
        isinstance(layers, Collection) and layers and all(isinstance(x, int) and x >= 0 for x in layers)
    ):
        raise InputError(f"layers is {layers!r}, expected layer numbers from 0")
    statistics = checked_custom(statistics, {*COLUMNS, *ROLES, *TRAITS})
    runs_on = list(batches(model, inputs, tokenizer, target))
    started = time.perf_counter()
    of = sum(map(routes, model.modules())) * len(runs_on) or None  # unknown outside transformers' interface
    runs, recorded, residuals, images = [], list[Recorded](), [], dict[str, Any]()
    with bar("profiling", "layers", show=progress) as step:
        for batch in runs_on:
            sequences = sequences_of(model, batch)
            _check_real({**sequences.real_source, **sequences.real_target})
            try:
                sequences = replace(sequences, patches=patches_of(model, batch, processor))
                images = {group: found.seen for group, found in sequences.patches.items()}
            except InputError as error:  # the profile holds without them
                images = {"unknown": str(error)}
            recorder = Recorder(replace(measures, statistics=statistics, patches=sequences.patches))
            observer = Observer(
                model, layers, recorder, lambda module: step(1, of=of), sequences=sequences, partial=partial,
                hidden_maps=True,
            )  # fmt: skip
            hidden = Residuals(sequences.real_source, sequences.real_target)
            with observe(observer), observe_residual(model, attention_modules(model), hidden.record):
                model(**batch)
            runs.append((batch, _checked(observer, layers, partial)))
            recorded.append(Recorded(observer.records, sequences, statistics, recorder.group))
            residuals.append(hidden)
    is_shared = recorded[0].group is not None
    said = "not run: several processes share the sequence" if probe else "not requested"
    probed: Probed = {}
    if probe and not is_shared:
        said, probed = _probe(model, recorded[0].sequences, tokenizer, layers, again=probe == "again")
    groups = datasets(recorded, tokenizer, local_window, probed)
    ids = recorded[0].sequences.source
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in runs[0][0].items() if isinstance(x, Tensor))
    attrs = attributes(model, loaded.name, time.perf_counter() - started) | {
        "peak_memory_bytes": _peak_memory(),
        "text_preview": shapes if ids is None else preview(ids, tokenizer),
        "unobserved": unobserved(runs[0][1]),
        "sources": runs[0][1].sources,
        "checks": [asdict(checked) for checked in runs[0][1].checks],
        "probes": said,
    }
    attrs |= {"images": images} if images else {}
    states = {} if is_shared else by_stack(residuals)  # a process sees those of its own shard
    return Profile(groups, attrs | runs[0][1].numbers.attributes(groups, all_layers=layers is None), states)


def _probe(
    model: nn.Module, sequences: Sequences, tokenizer: Any, layers: Collection[int] | None, *, again: bool
) -> tuple[str, Probed]:
    """Run the synthetic texts: "run", or the reason why they were not run, and the scores of the heads on them."""
    ids = sequences.source
    if ids is None:
        return "not run: the model does not read token ids", {}
    real = sequences.real_source.get(ids.shape[1])
    try:
        text = ids[:1] if real is None else ids[:1, real[0]]
        return "run", probes.probe(model, text, special_ids(model, tokenizer), layers, again=again)
    except InputError as error:  # the model may not accept texts that short
        return f"not run: {error}", {}
    except Exception as error:  # raised by the model: it may need pixels besides ids, or texts of one fixed length
        return f"not run: {type(error).__name__}: {first_line(error)}", {}


def _check_real(masks: Mapping[int, Tensor]) -> None:
    for mask in masks.values():
        if len(empty := (~mask.any(1)).nonzero()):
            raise InputError(
                f"inputs has only padding in text {int(empty[0])}, expected at least one token in each text"
            )


def _checked(observer: Observer, layers: Collection[int] | None, partial: bool) -> Observer:
    missing, name = unobserved(observer), type(observer.modules.model).__name__
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    reason = next((f" ({name}: {observer.unreadable[name]})" for name in missing if name in observer.unreadable), "")
    names += reason
    if not observer.sources and not (missing and observer.modules.routed and not partial):
        raise InputError(
            f"model {name} made no attention call that qkv can observe, expected calls of qkv's attention, "
            "transformers' attention interface or torch's attention functions, or a softmax or sigmoid of a product of "
            "queries and keys that is multiplied with values"
            + (f"; these modules attend in another way: {names}" if missing else "")
        )
    if missing and not partial:
        interface = "transformers' attention interface" if observer.modules.routed else "qkv"
        raise InputError(
            f"model {name} has attention that did not pass through {interface}: {names}; "
            "pass partial=True (--partial) to profile the rest"
        )
    if layers is not None and {*layers} - {*observer.numbers.numbers.values()}:
        raise InputError(f"layers is {sorted(layers)}, but the model has attention layers {observer.numbers.known}")
    return observer


_version = functools.cache(version)  # it reads a file


def attributes(model: nn.Module, name: str, seconds: float) -> dict[str, Any]:
    """The attributes of a profile that tell what was measured, with which versions, and when."""
    return {
        "model": name,
        "dtype": str(next((p.dtype for p in model.parameters()), "unknown")).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": versions(),
        "native_library": description(),
        "command": "",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
    }


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("qkv", "transformers"):
        with suppress(PackageNotFoundError):  # qkv in a source tree that is not installed
            found[package] = _version(package)
    return found


def _peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # more exact than ru_maxrss, which may also count the parent process
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def preview(ids: Tensor, tokenizer: Any) -> str:
    """The beginning of the first text."""
    if not hasattr(tokenizer, "decode"):
        return f"{ids.shape[1]:,} token ids"
    return " ".join(str(tokenizer.decode(ids[0, :64], skip_special_tokens=True)).split())[:200]
