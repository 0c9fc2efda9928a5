"""The models behind the Live page: one forward with edits of the normalizer or temperature of single heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import edits as of_heads
from qkv.errors import InputError
from qkv.models import DecoderLM
from qkv.models.generation import evaluating
from qkv.normalizers import Sigmoid, Softmax
from qkv.profiler.analyses import edits as own_edits
from qkv.profiler.analyses.edits import Edit, attention_layers, edited
from qkv.profiler.capture.inputs import device_of, positions
from qkv.profiler.editing import Key, edit
from qkv.profiler.run import profile

if TYPE_CHECKING:
    import xarray as xr

NAMES = {"softmax": "softmax", "off_by_one": "off-by-one", "sigmoid": "sigmoid"}
"""Normalizers of `DecoderConfig` that the page offers, with the names that the page uses."""


class Answer(NamedTuple):
    """Logits of the next token, and the attention weights of every layer."""

    logits: Float[Tensor, "1 vocabulary"]
    weights: list[Float[Tensor, "heads n n"]]


class LiveModel(Protocol):
    """A language model whose heads can get another normalizer or temperature."""

    own: str
    """The name of the normalizer that the model was trained with."""
    heads: list[int]
    """The number of heads of each layer."""
    most_tokens: int | None
    """The largest number of tokens; None if there is no limit."""

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        """One forward over the tokens, with these edits."""


def live_model(model: nn.Module) -> LiveModel | None:
    """The model for the Live page; None if it is no language model whose heads can be edited."""
    if isinstance(model, DecoderLM):
        known = model.config.normalizer in NAMES and model.config.attention is None  # else its normalizer may be any
        return _Own(model) if known else None
    head = getattr(model, "get_output_embeddings", None)
    if head is None or head() is None or getattr(model.config, "is_encoder_decoder", False):
        return None
    try:
        return _HuggingFace(model)
    except InputError:  # its attention cannot be read, or not be edited
        return None


class _Own:
    """A `DecoderLM`."""

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self.own = NAMES[model.config.normalizer]
        self.heads = [layer.heads for layer in attention_layers(model)]
        self.most_tokens: int | None = model.config.context

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        weights: list[Tensor] = []
        with (
            evaluating(self.model),
            edited(self.model, edits, on_weights=lambda layer, found: weights.append(found[0].float().cpu())),
        ):
            logits = self.model(torch.tensor([list(ids)], device=device_of(self.model)))[:, -1].cpu()
        return Answer(logits, weights)


class _HuggingFace:
    """A causal language model of Hugging Face, edited by `qkv.edit`; a profile inside reads its weights.

    Raises:
        InputError: if its attention is not a softmax that qkv can read and edit.
    """

    own = "softmax"

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.most_tokens = positions(model)
        data = _profiled(model, [0, 0])
        if "sink_mass" in data or not data.attrs["causal"]:
            raise InputError("model has a learned sink or sees the future, expected a causal softmax")
        self.heads = [data.sizes["head"]] * data.sizes["layer"]
        self.run([0, 0], [Edit(0, 0, "off-by-one")])

    def run(self, ids: Sequence[int], edits: list[Edit]) -> Answer:
        changes: dict[Key, of_heads.Edit | str] = {(one.layer, one.head): _of_head(one) for one in edits}
        with torch.no_grad(), evaluating(self.model), edit(self.model, changes) if changes else nullcontext():
            logits = self.model(torch.tensor([list(ids)], device=device_of(self.model))).logits[:, -1].float().cpu()
            data = _profiled(self.model, ids)
        return Answer(logits, [torch.from_numpy(one.copy()) for one in data["weights"].values[0]])


def everywhere(model: nn.Module, normalizer: str) -> Callable[[], AbstractContextManager[None]]:
    """A context in which all heads of a model have another normalizer, with the same parameters.

    Raises:
        InputError: for a model whose heads cannot be edited.
    """
    if getattr(model, "one_stack", False):
        changes = own_edits.everywhere(model, normalizer)
        return lambda: own_edits.edited(model, changes)
    if not hasattr(model, "get_input_embeddings") or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"model is {type(model).__name__}, whose heads cannot be edited here; expected a decoder or an encoder of "
            "qkv or Hugging Face"
        )
    data = _profiled(model, [0, 0])
    every = itertools.product(range(data.sizes["layer"]), range(data.sizes["head"]))
    made: dict[Key, of_heads.Edit | str] = {at: _of_head(Edit(*at, normalizer)) for at in every}
    return lambda: edit(model, made)


def _profiled(model: nn.Module, ids: Sequence[int]) -> xr.Dataset:
    tokens = torch.tensor([list(ids)], device=device_of(model))
    found = profile(model, tokens, map_tokens=len(ids), map_bins=0, probe=False, progress=False)
    if list(found.groups) != ["self"]:
        raise InputError(f"model has attention of the kinds {', '.join(found.groups)}, expected self-attention only")
    return found.data


def _of_head(one: Edit) -> of_heads.Edit:
    match one.normalizer:
        case "off-by-one":
            return of_heads.Normalizer(Softmax(one.temperature, sink=0.0))
        case "sigmoid":
            return of_heads.Normalizer(Sigmoid().with_temperature(one.temperature))
        case "softmax" | "as trained":
            return of_heads.Temperature(one.temperature)
    raise InputError(f"normalizer is {one.normalizer!r}, expected one of {', '.join(NAMES.values())}")
