"""Read the attention weights that a model itself returns: the last resort, if nothing else can be observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkv.profiler.capture import groups

RETURNED = {  # fields of transformers' outputs, and the groups that they hold
    "attentions": ("self", "text", "vision", "audio"),
    "encoder_attentions": ("encoder",),
    "decoder_attentions": ("decoder",),
    "cross_attentions": ("cross",),
}


class RecordedInputs:
    """A forward pre-hook that records the model's arguments, to call it again."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self.calls) < 2:  # two are enough to know that the model ran more than once (text generation, say)
            self.calls.append((args, kwargs))


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[RecordedInputs]:
    """Inside, the arguments of every call of the model are recorded."""
    recorded = RecordedInputs()
    handle = model.register_forward_pre_hook(recorded, with_kwargs=True)
    try:
        yield recorded
    finally:
        handle.remove()


@torch.no_grad()
def returned(model: nn.Module, recorded: RecordedInputs, modules: list[str], observed: set[str]) -> dict[str, Tensor]:
    """Weights (batch, heads, nq, nk) that the model returns for `modules`, by their names, if they are unambiguous.

    The model runs again and forms all of its weights. The weights of a kind of attention are used only if as many
    layers are returned as there are modules of this kind, all of them in `modules`, and every row is a distribution
    over as many keys as there are queries (over any number of keys in cross-attention).

    Args:
        model: a transformers model; for any other the result is empty.
        recorded: the arguments of its only call.
        modules: names of attention modules whose calls could not be observed, in the model's order.
        observed: kinds of attention (`qkv.profiler.capture.groups`) of which some modules were observed.
    """
    banded = hasattr(getattr(model, "config", None), "attention_window")  # Longformer and LED return weights in bands
    if not modules or len(recorded.calls) != 1 or banded or not type(model).__module__.startswith("transformers."):
        return {}
    args, kwargs = recorded.calls[0]
    try:
        outputs = model(*args, **kwargs | {"output_attentions": True})
    except (TypeError, ValueError):  # the model cannot return weights; its modules are reported as unobserved
        return {}
    found: dict[str, Tensor] = {}
    kinds = {name: groups.of_transformers(name, model) for name in modules}
    for key, group in RETURNED.items():
        names = [name for name in modules if kinds[name] in group]
        weights = outputs.get(key) if isinstance(outputs, Mapping) else None
        if names and not observed & set(group) and weights is not None and len(weights) == len(names):
            square = key != "cross_attentions"
            if all(isinstance(w, Tensor) and _are_distributions(w, square=square) for w in weights):
                found |= dict(zip(names, weights, strict=True))
    return found


def _are_distributions(weights: Tensor, *, square: bool) -> bool:
    """True if the weights of every query add up to 1, or to 0 (at padding)."""
    if weights.ndim != 4 or (square and weights.shape[2] != weights.shape[3]) or bool((weights < 0).any()):
        return False
    total = weights.sum(-1)
    return bool((((total - 1).abs() < 1e-3) | (total == 0)).all())
