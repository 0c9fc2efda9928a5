"""The attention weights that a model itself returns, where nothing else can be read: the last resort."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkv.profiler.capture import groups

RETURNED = {  # what models of transformers call them
    "attentions": ("self", "text", "vision", "audio"),
    "encoder_attentions": ("encoder",),
    "decoder_attentions": ("decoder",),
    "cross_attentions": ("cross",),
}


class Inputs:
    """What the model was called with, to call it once more."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self.calls) < 2:  # two are already too many: a text that is generated, say
            self.calls.append((args, kwargs))


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Inside, what the model is called with is kept."""
    asked = Inputs()
    handle = model.register_forward_pre_hook(asked, with_kwargs=True)
    try:
        yield asked
    finally:
        handle.remove()


@torch.no_grad()
def returned(model: nn.Module, asked: Inputs, modules: list[str], seen: set[str]) -> dict[str, Tensor]:
    """Weights (batch, heads, nq, nk) that the model returns for `modules`, by their names; only what is beyond doubt.

    The model runs once more, and forms all of its weights. A kind of attention is taken as a whole or not at all: as
    many layers are returned as it has modules, all of them in `modules`, and their rows are distributions over as many
    keys as there are queries, unless they are cross-attention.

    Args:
        model: of transformers; of others nothing is known.
        asked: what it was called with, once.
        modules: names of attention modules whose calls could not be read, in the model's order.
        seen: kinds of attention (`qkv.profiler.capture.groups`) of which some modules could be.
    """
    bands = hasattr(getattr(model, "config", None), "attention_window")  # Longformer and LED return them unmarked
    if not modules or len(asked.calls) != 1 or bands or not type(model).__module__.startswith("transformers."):
        return {}
    args, kwargs = asked.calls[0]
    try:
        outputs = model(*args, **kwargs | {"output_attentions": True})
    except (TypeError, ValueError):  # it cannot return any; its modules stay unobserved, by name
        return {}
    found: dict[str, Tensor] = {}
    kinds = {name: groups.of_transformers(name, model) for name in modules}
    for key, of in RETURNED.items():
        mine = [name for name in modules if kinds[name] in of]
        weights = outputs.get(key) if isinstance(outputs, Mapping) else None
        if mine and not seen & set(of) and weights is not None and len(weights) == len(mine):
            square = key != "cross_attentions"
            if all(isinstance(w, Tensor) and _are_distributions(w, square=square) for w in weights):
                found |= dict(zip(mine, weights, strict=True))
    return found


def _are_distributions(weights: Tensor, *, square: bool) -> bool:
    """Whether these are weights of every query on every key. (A query of padding may have none.)"""
    if weights.ndim != 4 or (square and weights.shape[2] != weights.shape[3]) or bool((weights < 0).any()):
        return False
    total = weights.sum(-1)
    return bool((((total - 1).abs() < 1e-3) | (total == 0)).all())
