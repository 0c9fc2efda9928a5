"""Edits of heads while a model runs (`qkv.edit`), and their ablation one after another."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import bar
from qkv._untrusted import parse_json, read_bytes
from qkv.edits import ACTIVE, BY_NAME, SELF, Edit, Edits, Head, HideFirst, Mean, Place, Zero
from qkv.errors import InputError, nearest
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.observe import OBSERVERS, following
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.texts import Texts

if TYPE_CHECKING:
    import pandas as pd


Key = tuple[int | str, int] | tuple[str, int, int]


@contextmanager
def edit(model: nn.Module, edits: Mapping[Key, Edit | str]) -> Iterator[None]:
    """Inside, single heads of a model compute something else.

    Heads that are not edited keep the model's own output, bit for bit, and no n × n tensor is formed. Gradients flow
    through the edits. `qkv.profile` and `qkv.watch` inside record the edited model. The model is restored on exit, also
    after an error.

    Args:
        model: as in `qkv.profile`; its attention must be that of qkv, transformers' interface or torch's SDPA.
        edits: by ``(layer, head)``, with the layers of self-attention counted from 0 in the order of the forward; by
            ``(module name, head)``; or by ``(group, layer, head)`` in models with several kinds of attention. An edit
            is one of `qkv.edits`, or one of the names ``"zero"``, ``"mean"``, ``"softmax"`` (without a sink),
            ``"off-by-one"`` (with a logit of 0 that belongs to no key) and ``"sigmoid"``.

    Raises:
        InputError: for what is not an edit, for a head or layer that does not exist (at the latest at the end), and for
            attention that cannot be edited.

    >>> import torch, qkv
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model, ids = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)), torch.tensor([[5, 6, 7]])
    >>> plain = model(ids)
    >>> with qkv.edit(model, {(1, 3): "zero", (0, 2): qkv.edits.HideFirst()}):
    ...     changed = model(ids)
    >>> torch.equal(plain, changed), torch.equal(plain, model(ids))
    (False, True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a torch module; qkv.load gives one by its name")
    model = getattr(model, "_orig_mod", model)
    active = Edits(_checked(model, edits))
    stack = ACTIVE.setdefault(model, [])
    stack.append(active)
    try:
        if OBSERVERS.get(model):  # a profile or a watch around this context computes the attention
            yield
        else:
            texts = Texts(keys=any(one.positional for one in active.by_place.values()))
            with following(Observer(model, texts=texts)):
                yield
    finally:
        stack.remove(active)
    missing = [place for place in active.by_place if place not in active.met]
    if missing and active.ran:
        raise InputError(f"edits has {_shown(missing[0])}, at which {type(model).__name__} has no attention")


def everywhere(model: nn.Module, change: Edit | str) -> dict[Key, Edit | str]:
    """The same edit for all heads of self-attention of a model that reads token ids, for `qkv.edit`.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> with qkv.edit(mini, everywhere(mini, "off-by-one")):
    ...     found = qkv.profile(mini, "import os", tokenizer=tokenizer, probe=False, progress=False)
    >>> bool(found.data["weights"].sum("key").min() < 0.9)  # the rest went to no key
    True
    """
    (batch,) = batches(model, torch.zeros(1, 2, dtype=torch.long), None, None)
    calls = calls_of(model, batch)
    return {(one.group, one.layer, head): change for one in calls if one.group in SELF
            for head in range(one.call.q.shape[1])}  # fmt: skip


def head_outputs(
    model: nn.Module, inputs: Any, heads: Iterator[Key] | list[Key], *, tokenizer: Any = None
) -> dict[Key, Float[Tensor, "b nq dv"]]:
    """The outputs of heads before the output projection in one forward, for `qkv.edits.Patch`.

    Args:
        model: as in `edit`.
        inputs: as in `qkv.profile`, one text or batch.
        heads: which, named as in `edit`.
        tokenizer: converts a text to ids.

    >>> import torch, qkv
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4))
    >>> found = qkv.profiler.head_outputs(model, torch.tensor([[5, 6, 7]]), [(0, 1)])
    >>> found[0, 1].shape
    torch.Size([1, 3, 8])
    """
    found: dict[Key, Tensor] = {}

    class Recorded(Edit):
        def __init__(self, key: Key) -> None:
            self.key = key

        def apply(self, head: Head) -> Tensor:
            found[self.key] = head.output.detach().clone()
            return head.output

    (batch,) = batches(model, inputs, tokenizer, None)
    with torch.no_grad(), edit(model, {key: Recorded(key) for key in heads}):
        model(**batch)
    return found


def _checked(model: nn.Module, edits: Mapping[Key, Edit | str]) -> dict[Place, Edit]:
    if not edits:
        raise InputError("edits is empty, expected at least one edit, such as {(0, 3): 'zero'}")
    modules = {name for name, _ in model.named_modules()} | {type(model).__name__}
    made: dict[Place, Edit] = {}
    for key, value in edits.items():
        one = BY_NAME.get(value) if isinstance(value, str) else value
        if not isinstance(one, Edit):
            found = repr(value) if isinstance(value, str) else type(value).__name__
            raise InputError(
                f"edits has {found} for {key}, expected one of qkv.edits, or {', '.join(map(repr, BY_NAME))}"
            )
        one.check()
        parts = key if isinstance(key, tuple) else ()
        if len(parts) not in (2, 3) or not all(isinstance(x, int) for x in parts[-1:]) or (
            len(parts) == 3 and not (isinstance(parts[0], str) and isinstance(parts[1], int))
        ):  # fmt: skip
            raise InputError(
                f"edits has the key {key!r}, expected (layer, head), (module, head) or (group, layer, head)"
            )
        if len(parts) == 2 and isinstance(parts[0], str) and parts[0] not in modules:
            raise InputError(f"edits names {parts[0]!r}, expected a module of the model, as in model.named_modules()")
        place: Any = (None, *parts) if len(parts) == 2 else parts
        made[place] = one
    return made


def _shown(place: Place) -> str:
    group, layer, head = place
    named = f"({group!r}, {layer}, {head})" if group else f"({layer!r}, {head})"
    of = "" if group or isinstance(layer, str) else f" of the groups {' and '.join(SELF)}"
    return f"{named}{of}"


REMOVED: dict[str, type[Edit]] = {"heads": Zero, "means": Mean, "sinks": HideFirst}
"""What is removed: the head's output, what it tells about single tokens, or its attention to the first token."""
PROGRESS = "ablation.jsonl"
ALL = -1  # all layers, or all heads of a layer


@dataclass(frozen=True)
class Ablation:
    """How the loss changes without each head, without each layer's heads, and without all heads of these layers.

    >>> import qkv
    >>> model, tokenizer = qkv.load("qkv-mini")
    >>> found = qkv.profiler.ablation(model, "import os, sys", tokenizer=tokenizer, layers=[0], progress=False)
    >>> found.table.columns.tolist()
    ['layer', 'head', 'nats', 'delta_nats']
    """

    table: pd.DataFrame
    """A row for each head: ``nats``, the loss per token without it, and ``delta_nats``, its rise."""
    layers: pd.DataFrame
    """A row for each layer: the same without all its heads at once."""
    nats: float
    """The loss of the whole model, in nats per token."""
    all_nats: float
    """The loss without all heads of these layers at once."""
    attrs: dict[str, Any]

    def save(self, folder: str | Path) -> list[Path]:
        """Write ablation.csv, ablation-layers.csv and ablation.json; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / name for name in ("ablation.csv", "ablation-layers.csv", "ablation.json")]
        write_atomically(files[0], self.table.to_csv(index=False))
        write_atomically(files[1], self.layers.to_csv(index=False))
        numbers = {"nats": self.nats, "all_nats": self.all_nats}
        write_atomically(files[2], json.dumps(self.attrs | numbers, indent=1) + "\n")
        return files


def ablation(
    model: nn.Module,
    inputs: Any,
    *,
    what: str = "heads",
    layers: Collection[int] | None = None,
    tokenizer: Any = None,
    folder: str | Path | None = None,
    progress: bool = True,
    name: str = "",
) -> Ablation:
    """The loss on the next token when each head of self-attention, or its sink, is removed.

    The model runs once for each head, once for the heads of each layer, and once for all these heads: one head hardly
    shows what many do together.

    Args:
        model: a causal language model with its output head, of qkv or of Hugging Face.
        inputs: a text, or token ids (1, n), as in `qkv.profile`.
        what: ``"heads"`` sets a head's output to 0, ``"means"`` replaces it by its mean over the tokens, ``"sinks"``
            hides the first token from the head's queries.
        layers: which layers, counted from 0; all if None.
        tokenizer: converts a text to ids.
        folder: keeps the finished heads in ``ablation.jsonl``, so that an interrupted run resumes.
        progress: show a progress bar, if standard error is a terminal.
        name: of the model, kept in the attributes.

    Raises:
        InputError: for a model without a loss on the next token, or a text of fewer than 2 tokens.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4))
    >>> ablation(model, torch.arange(9)[None], what="sinks", layers=[1], progress=False).table.shape
    (4, 4)
    """
    import pandas as pd

    if what not in REMOVED:
        raise InputError(f"what is {what!r}, expected one of {', '.join(map(repr, REMOVED))}{nearest(what, REMOVED)}")
    (batch,) = batches(model, inputs, tokenizer, None)
    ids = next((x for x in batch.values() if isinstance(x, Tensor) and x.ndim == 2), None)
    if ids is None or ids.shape[0] != 1 or ids.shape[1] < 2:
        found = "none" if ids is None else tuple(ids.shape)
        raise InputError(f"inputs has token ids of shape {found}, expected (1, n) of at least 2 tokens")
    _check_head(model)
    further: dict[str, Any] = {} if isinstance(model, DecoderLM) else {"use_cache": False}
    calls = calls_of(model, batch | further, layers=layers)
    calls = [call for call in calls if call.group in ("self", "text")]
    heads = {one.layer: one.call.q.shape[1] for one in calls}
    group = {one.layer: one.group for one in calls}
    sets: list[tuple[int, int]] = [(n, head) for n in heads for head in (*range(heads[n]), ALL)] + [(ALL, ALL)]
    key = f"{what}:{_hash(model, ids)}"
    kept = Path(folder) / PROGRESS if folder is not None else None
    done = _read(kept, key)
    with evaluation_mode(model):
        whole = next_token_loss(model, ids)
        with bar("ablating", "heads", show=progress) as step:
            for layer, head in sets:
                if (layer, head) not in done:
                    removed = [(n, m) for n in heads if layer in (n, ALL) for m in range(heads[n]) if head in (m, ALL)]
                    with edit(model, {(group[n], n, m): REMOVED[what]() for n, m in removed}):
                        done[layer, head] = next_token_loss(model, ids)
                    if kept is not None:
                        _write(kept, key, done)
                step(1, of=len(sets))
    rows = [(layer, head, done[layer, head], done[layer, head] - whole) for layer, head in sets if layer != ALL]
    table = pd.DataFrame(rows, columns=["layer", "head", "nats", "delta_nats"])
    of_layers = table[table["head"] == ALL].drop(columns="head").reset_index(drop=True)
    table = table[table["head"] != ALL].reset_index(drop=True)
    attrs = {"model": name or type(model).__name__, "what": what, "tokens": int(ids.shape[1])}
    return Ablation(table, of_layers, whole, done[ALL, ALL], attrs)


@torch.no_grad()
def next_token_loss(model: nn.Module, ids: Int[Tensor, "1 n"]) -> float:
    """The mean loss on the next token, in nats."""
    _check_head(model)
    if isinstance(model, DecoderLM):
        logits = model(ids)
    else:
        logits = model(input_ids=ids, use_cache=False).logits
    return float(nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:].to(logits.device)))


def predicts_next_token(model: nn.Module) -> bool:
    """Whether a model is a causal language model with its output head."""
    if isinstance(model, DecoderLM):
        return True
    config: Any = getattr(model, "config", None)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    whole = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return head is not None and whole and not getattr(config, "is_encoder_decoder", False)


def _check_head(model: nn.Module) -> None:
    if not predicts_next_token(model):
        raise InputError(
            f"model {type(model).__name__} has no loss on the next token; expected a causal language model with its "
            "output head, such as qkv-mini or one that AutoModelForCausalLM loads"
        )


def _hash(model: nn.Module, ids: Tensor) -> str:
    """Changes with the model's parameters and the text."""
    digest = xxhash.xxh3_128()
    for name, x in [*model.state_dict().items(), ("ids", ids)]:
        digest.update(name.encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(file: Path | None, key: str) -> dict[tuple[int, int], float]:
    """What an earlier run with the same model, text and edit has finished, but for all layers: it may name others."""
    if file is None or not file.exists():
        return {}
    try:
        rows = [parse_json(line) for line in read_bytes(file).decode().splitlines()]
        own = (row for row in rows if row["key"] == key and row["layer"] != ALL)
        return {(row["layer"], row["head"]): float(row["nats"]) for row in own}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"folder has {file}, which is not a file of an ablation; expected another folder") from error


def _write(file: Path, key: str, done: dict[tuple[int, int], float]) -> None:
    rows = ({"key": key, "layer": layer, "head": head, "nats": nats} for (layer, head), nats in done.items())
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
