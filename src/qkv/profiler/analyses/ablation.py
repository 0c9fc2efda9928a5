"""The loss of a language model without each head, without its attention to the first token, or without that value."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv._files import write_atomically
from qkv._progress import Step, bar
from qkv._untrusted import parse_json, read_bytes
from qkv.edits import AtTokens, Edit, Head, HideFirst, Mean, Values, Zero
from qkv.errors import InputError, nearest, refusing
from qkv.models.decoder import DecoderLM
from qkv.models.generation import evaluation_mode
from qkv.profiler.capture.caches import overridden
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches, texts_of
from qkv.profiler.capture.probes import weights_hash
from qkv.profiler.capture.record import mapped
from qkv.profiler.capture.residual import attention_modules, layer_around
from qkv.profiler.data.frames import confidence
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
WHOLE = (-2, -2)  # the model with all its heads
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
    ['layer', 'head', 'nats', 'delta_nats', 'low', 'high']
    """

    table: pd.DataFrame
    """A row for each head: ``nats``, the loss per token without it; ``delta_nats``, its rise; ``low`` and ``high``, the
    ends of its 95 % confidence interval over texts (NaN for one text)."""
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
    counted: Collection[int] | None = None,
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
        inputs: as in `qkv.profile`. Every text is run without its padding. With several texts there is an interval.
        what: ``"heads"`` sets a head's output to 0, ``"means"`` replaces it by its mean over the tokens, ``"sinks"``
            hides the first token from the head's queries, ``"values"`` sets the value of the first token to 0.
        layers: which layers, counted from 0; all if None.
        counted: positions of the tokens whose loss counts; all but the first of each text if None.
        tokenizer: converts a text to ids.
        folder: keeps the finished heads in ``ablation.jsonl``, so that an interrupted run resumes.
        progress: show a progress bar, if standard error is a terminal.
        name: of the model, kept in the attributes.

    Raises:
        InputError: for a model without a loss on the next token, a text of fewer than 2 tokens, or a position in
            `counted` that has no loss.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=50, d_model=32, layers=2, heads=4))
    >>> ablation(model, torch.arange(9)[None], what="sinks", layers=[1], progress=False).table.shape
    (4, 6)
    """
    import pandas as pd

    if what not in REMOVED:
        raise InputError(f"what is {what!r}, expected one of {', '.join(map(repr, REMOVED))}{nearest(what, REMOVED)}")
    _check_head(model)
    runs = [_Removing.of(model, ids, REMOVED[what], layers, counted) for ids in texts_of(model, inputs, tokenizer)]
    kept = Kept(None if folder is None else Path(folder) / PROGRESS, ("key", "layer", "head"), "nats")
    weights = "" if folder is None else weights_hash(model)
    heads = runs[0].heads
    sets = [(layer, head) for layer, count in heads.items() for head in (*range(count), ALL)]
    with evaluation_mode(model), bar("ablating", "heads", len(runs) * (len(sets) + 1), show=progress) as step:
        losses = [run.losses(sets, kept, f"{what}:{weights}:{run.digest}", step) for run in runs]
    counts = [run.count for run in runs]

    def mean(at: tuple[int, int]) -> float:
        return sum(one[at] * count for one, count in zip(losses, counts, strict=True)) / sum(counts)

    def row(at: tuple[int, int]) -> tuple[float, ...]:
        rises = [(one[at] - one[WHOLE]) * count for one, count in zip(losses, counts, strict=True)]
        ends = confidence(rises, sizes=counts)[1:] if len(runs) > 1 else (math.nan, math.nan)
        return (*at, mean(at), mean(at) - mean(WHOLE), *ends)

    columns = ["layer", "head", "nats", "delta_nats", "low", "high"]
    table = pd.DataFrame([row(at) for at in sets], columns=columns)
    of_layers = table[table["head"] == ALL].drop(columns="head").reset_index(drop=True)
    table = table[table["head"] != ALL].reset_index(drop=True)
    attrs = {"model": name or type(model).__name__, "what": what, "tokens": sum(run.ids.shape[1] for run in runs)}
    attrs |= {"texts": len(runs), "counted": sum(counts)}
    return Ablation(table, of_layers, mean(WHOLE), mean((ALL, ALL)), attrs)


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
    counted: Collection[int] | None = None
    """The positions whose loss counts."""

    @classmethod
    def of(
        cls, model: nn.Module, ids: Tensor, edit: Edit, layers: Collection[int] | None, counted: Collection[int] | None
    ) -> _Removing:
        """For one text, (n,)."""
        if (n := len(ids)) < 2:
            raise InputError(f"inputs has a text of {n} token, expected at least 2, to predict the last one")
        if counted is not None and (not counted or min(counted) < 1 or max(counted) >= n):
            raise InputError(f"counted is {sorted(counted)}, expected positions from 1 to {n - 1}, which have a loss")
        [batch] = batches(model, ids[None], None, None)
        further: dict[str, Any] = {} if isinstance(model, DecoderLM) else {"use_cache": False}
        calls = calls_of(model, batch | further, layers=layers)
        calls = [call for call in calls if call.group in ("self", "text")]
        if calls and not any(call.causal for call in calls):
            raise InputError(f"model {type(model).__name__} sees later tokens, so it has no loss on the next token")
        places = {one.layer: (one.group, one.module) for one in calls}
        return cls(model, ids[None], edit, places, {one.layer: one.call.q.shape[1] for one in calls}, counted)

    @property
    def digest(self) -> str:
        """What tells this text, and the positions that count."""
        places = "" if self.counted is None else f":{sorted(self.counted)}"
        return xxhash.xxh3_128_hexdigest(self.ids.cpu().contiguous().numpy().data) + places

    @property
    def count(self) -> int:
        return self.ids.shape[1] - 1 if self.counted is None else len(self.counted)

    def losses(self, sets: Sequence[tuple[int, int]], kept: Kept, key: str, step: Step) -> dict[tuple[int, int], float]:
        """The loss of the whole model, and without each of these heads; those that are kept are not computed again."""
        done = {at: float(kept.rows[key, *at]) for at in sets if (key, *at) in kept.rows}
        done[WHOLE] = self.loss()
        step(len(done.keys() & {*sets}))
        for layer in self.heads:
            wanted = [head for of, head in sets if of == layer and (of, head) not in done]
            for losses in self.without(layer, wanted):
                done.update({(layer, head): nats for head, nats in losses.items()})
                kept.put({(key, layer, head): nats for head, nats in losses.items()})
                step(len(losses))
        done[ALL, ALL] = self.loss({(n, m) for n in self.heads for m in range(self.heads[n])})
        self.outputs.clear()
        step(1)
        return done

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
                return _loss(_logits(self.model, self.ids)[0], self.ids, self.counted)
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_hook(self._keep).remove)
            logits = _logits(self.model, self.ids)
        self.size = NUMBERS // logits[0].numel() - 1
        if self.size < 1:  # a second item would take too much memory
            self.blocks = []
        else:
            self.logits = logits[0]
        return _loss(logits[0], self.ids, self.counted)

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
        return {head: _loss(logits[i], self.ids, self.counted) for i, head in enumerate(heads)}


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


def _loss(
    logits: Float[Tensor, "n vocabulary"], ids: Int[Tensor, "1 n"], counted: Collection[int] | None = None
) -> float:
    at = torch.tensor(range(1, len(logits)) if counted is None else sorted(counted))
    return float(nn.functional.cross_entropy(logits[at - 1].double(), ids[0].to(logits.device)[at]))


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


class Kept:
    """The finished parts of a run, by names, in a file of JSON lines from which an interrupted run resumes."""

    def __init__(self, file: Path | None, names: Sequence[str], value: str) -> None:
        self.file, self.names, self.value, self.rows = file, names, value, dict[tuple[Any, ...], Any]()
        if file is not None and file.exists():
            wrong = f"folder has {file}, which holds no finished parts of such a run; expected another folder"
            with refusing(wrong, OSError, ValueError, KeyError, TypeError):
                rows = map(parse_json, read_bytes(file).decode().splitlines())
                self.rows = {tuple(row[name] for name in names): row[value] for row in rows}

    def put(self, found: Mapping[tuple[Any, ...], Any]) -> None:
        self.rows |= found
        if self.file is not None:
            rows = (dict(zip(self.names, at, strict=True)) | {self.value: x} for at, x in self.rows.items())
            write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in rows))
