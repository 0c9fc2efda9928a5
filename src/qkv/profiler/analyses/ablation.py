"""The loss of a language model without each head, without its attention to the first token, or without that value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from qkv.edits import AtTokens, Edit, Head, HideFirst, Mean, Values, Zero
from qkv.errors import InputError, nearest, refusing
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.observe import overridden
from qkv.profiler.capture.probes import weights_hash
from qkv.profiler.capture.record import mapped
from qkv.profiler.capture.residual import attention_modules, layer_around
from qkv.profiler.editing import edit

if TYPE_CHECKING:
    import pandas as pd

REMOVED: dict[str, Edit] = {
    "heads": Zero(),
    "means": Mean(),
    "sinks": HideFirst(),
    "values": Values(AtTokens([0], Zero())),
}
"""What is removed: the head's output, what it tells about single tokens, its attention to the first token, or the value
of the first token."""
PROGRESS = "ablation.jsonl"
ALL = -1  # all layers, or all heads of a layer
NUMBERS = 2**27
"""The logits of a batch have at most so many numbers: 512 MB in float32."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far the logits of a model that begins at a layer may be from those of the whole model, in their largest size."""


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

    Each head is removed alone, then the heads of each layer, then all these heads: one head hardly shows what many do
    together. What a layer reads is computed once; then the model runs from this layer on, with a batch item for each
    head. One more item has all heads; if its logits are not those of the whole model, as in a model whose layers share
    more than the residual stream, the whole model runs for each head of this layer.

    Args:
        model: a causal language model with its output head, of qkv or of Hugging Face.
        inputs: a text, or token ids (1, n), as in `qkv.profile`.
        what: ``"heads"`` sets a head's output to 0, ``"means"`` replaces it by its mean over the tokens, ``"sinks"``
            hides the first token from the head's queries, ``"values"`` sets the value of the first token to 0.
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
    if calls and not any(call.causal for call in calls):
        raise InputError(f"model {type(model).__name__} sees later tokens, so it has no loss on the next token")
    heads = {one.layer: one.call.q.shape[1] for one in calls}
    removing = _Removing(model, ids, REMOVED[what], {one.layer: (one.group, one.module) for one in calls}, heads)
    kept, key = None, ""
    if folder is not None:
        kept = Path(folder) / PROGRESS
        key = f"{what}:{weights_hash(model)}:{xxhash.xxh3_128_hexdigest(ids.cpu().contiguous().numpy().data)}"
    done = _read(kept, key)
    sets = [(layer, head) for layer, count in heads.items() for head in (*range(count), ALL)]
    with evaluation_mode(model), bar("ablating", "heads", show=progress) as step:
        whole = removing.loss()
        step(len(done.keys() & set(sets)), of=len(sets) + 1)
        for layer in heads:
            wanted = [head for of, head in sets if of == layer and (of, head) not in done]
            for losses in removing.without(layer, wanted):
                done.update({(layer, head): nats for head, nats in losses.items()})
                if kept is not None:
                    _write(kept, key, done)
                step(len(losses), of=len(sets) + 1)
        done[ALL, ALL] = removing.loss({(n, m) for n in heads for m in range(heads[n])})
        step(1, of=len(sets) + 1)
    rows = [(*one, done[one], done[one] - whole) for one in sets]
    table = pd.DataFrame(rows, columns=["layer", "head", "nats", "delta_nats"])
    of_layers = table[table["head"] == ALL].drop(columns="head").reset_index(drop=True)
    table = table[table["head"] != ALL].reset_index(drop=True)
    attrs = {"model": name or type(model).__name__, "what": what, "tokens": int(ids.shape[1])}
    return Ablation(table, of_layers, whole, done[ALL, ALL], attrs)


@dataclass(eq=False)
class _Removing:
    """The losses of a model on a text without some heads."""

    model: nn.Module
    ids: Int[Tensor, "1 n"]
    edit: Edit
    places: Mapping[int, tuple[str, str]]
    """Group and module of each layer."""
    heads: Mapping[int, int]
    """Number of heads of each layer."""

    def __post_init__(self) -> None:
        attentions = attention_modules(self.model)
        around = {n: layer_around(module, attentions, self.model) for n, (_, module) in self.places.items()}
        stacks = {name.rpartition(".")[0] for name in around.values() if name is not None}
        self.blocks: list[nn.Module] = []
        """The layers of the model; none if they are not one stack."""
        if len(stacks) == 1 and None not in around.values():
            named = self.model.get_submodule(stacks.pop()).named_children()
            self.blocks = [block for name, block in named if name.isdigit()]
        self.block = {n: None if name is None else self.model.get_submodule(name) for n, name in around.items()}
        self.outputs: dict[nn.Module, Any] = {}
        """What each layer gives in the whole model."""
        self.logits = torch.empty(0)
        self.size = 0
        """How many heads are removed by one forward."""

    def loss(self, without: Collection[tuple[int, int]] = ()) -> float:
        """The loss of the whole model, or without some heads, by one forward."""
        if without:
            with edit(self.model, {(self.places[n][0], n, head): self.edit for n, head in without}):
                return next_token_loss(self.model, self.ids)
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_hook(self._keep).remove)
            logits = _logits(self.model, self.ids)
        self.size = NUMBERS // logits[0].numel() - 1
        if self.size < 1:  # a second item would take too much memory
            self.blocks = []
        else:
            self.logits = logits[0]
        return _loss(logits[0], self.ids)

    def _keep(self, block: nn.Module, args: Any, output: Any) -> None:
        if block in self.outputs:  # it is applied several times, so its output is not that of one layer
            self.blocks = []
        self.outputs[block] = output

    def without(self, layer: int, wanted: list[int]) -> Iterator[dict[int, float]]:
        """The losses without single heads of a layer, or all of them, a few at a time."""
        while wanted:
            losses = self._together(layer, wanted[: self.size])
            if losses is None:
                every = range(self.heads[layer])
                losses = {wanted[0]: self.loss({(layer, head) for head in every if wanted[0] in (head, ALL)})}
            yield losses
            wanted = wanted[len(losses) :]

    def _together(self, layer: int, heads: list[int]) -> dict[int, float] | None:
        """The losses by one forward from the layer on; None if the model does not allow it."""
        block = self.block[layer]
        if block is None or block not in self.blocks:
            return None
        items, every = len(heads) + 1, range(self.heads[layer])
        one = _InItems(self.edit, {n: [i for i, head in enumerate(heads) if head in (n, ALL)] for n in every})
        earlier = {other: self.outputs[other] for other in self.blocks[: self.blocks.index(block)]}
        module = self.places[layer][1]
        try:
            with given_outputs(earlier, items), edit(self.model, {(module, head): one for head in every}):
                logits = _logits(self.model, self.ids.expand(items, -1))
            far = (logits[-1] - self.logits).abs().max() / self.logits.abs().max()
        except Exception:  # the model may need what the earlier layers compute inside; the whole model tells
            far = torch.tensor(torch.inf)
        if not far <= CLOSE.get(self.logits.dtype, 0.05):
            self.blocks = []
            return None
        return {head: _loss(logits[i], self.ids) for i, head in enumerate(heads)}


@dataclass(eq=False)
class _InItems(Edit):
    """An edit of each head in some batch items, all of which have the same text."""

    edit: Edit
    items: Mapping[int, list[int]]

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        out, items = head.output.clone(), self.items[head.number]
        out[items] = self.edit.apply(head)[items].to(out)
        return out


@contextmanager
def given_outputs(outputs: Mapping[nn.Module, Any], items: int = -1) -> Iterator[None]:
    """Inside, modules give known outputs, those of one batch item repeated `items` times, instead of computing them."""
    with ExitStack() as stack:
        for module, output in outputs.items():
            repeated = mapped(output, lambda x: x.expand(items, *x.shape[1:]))
            stack.enter_context(overridden(module, {"forward": lambda *args, of=repeated, **named: of}))
        yield


@torch.no_grad()
def next_token_loss(model: nn.Module, ids: Int[Tensor, "1 n"]) -> float:
    """The mean loss on the next token, in nats."""
    _check_head(model)
    return _loss(_logits(model, ids)[0], ids)


@torch.no_grad()
def _logits(model: nn.Module, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n vocabulary"]:
    if isinstance(model, DecoderLM):
        return model(ids)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _loss(logits: Float[Tensor, "n vocabulary"], ids: Int[Tensor, "1 n"]) -> float:
    return float(nn.functional.cross_entropy(logits[:-1].double(), ids[0, 1:].to(logits.device)))


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


def _read(file: Path | None, key: str) -> dict[tuple[int, int], float]:
    """What an earlier run with the same model, text and edit has finished, but for all layers: it may name others."""
    if file is None or not file.exists():
        return {}
    wrong = f"folder has {file}, which is not a file of an ablation; expected another folder"
    with refusing(wrong, OSError, ValueError, KeyError, TypeError):
        rows = [parse_json(line) for line in read_bytes(file).decode().splitlines()]
        own = (row for row in rows if row["key"] == key and row["layer"] != ALL)
        return {(row["layer"], row["head"]): float(row["nats"]) for row in own}


def _write(file: Path, key: str, done: dict[tuple[int, int], float]) -> None:
    rows = ({"key": key, "layer": layer, "head": head, "nats": nats} for (layer, head), nats in done.items())
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))
