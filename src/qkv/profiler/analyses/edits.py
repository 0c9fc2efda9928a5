"""Interventions: run a model with another normalizer or temperature in some of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.engine import Call, Result
from qkv.errors import InputError, one_of
from qkv.kernels import editing, serve
from qkv.nn import MultiHeadAttention
from qkv.normalizers import Normalizer, Sigmoid, Softmax

AS_TRAINED = "as trained"
NORMALIZERS = (AS_TRAINED, "softmax", "off-by-one", "sigmoid")
"""``softmax``, without any sink; ``off-by-one``, a softmax with an additional logit of 0 that belongs to no key;
``sigmoid``, with the library's bias of −ln of the number of visible keys."""
COLDEST, HOTTEST = 1e-3, 1e3
"""The lowest and highest temperature of an edit."""

OnWeights = Callable[[int, Float[Tensor, "b h nq nk"]], None]


@dataclass(frozen=True)
class Edit:
    """An intervention on one head: another normalizer, and a temperature by which its scores are divided.

    With ``"as trained"`` the head keeps its normalizer, and its temperature is multiplied by `temperature`.

    >>> Edit(0, 3, "off-by-one")
    Edit(layer=0, head=3, normalizer='off-by-one', temperature=1.0)
    """

    layer: int
    """Number of the attention layer, from 0, in the order of the forward."""
    head: int
    normalizer: str = AS_TRAINED
    temperature: float = 1.0

    def __post_init__(self) -> None:
        one_of("edit: normalizer", self.normalizer, NORMALIZERS)
        if not COLDEST <= self.temperature <= HOTTEST:  # beyond, scores overflow, or differ only by rounding
            raise InputError(f"edit: temperature is {self.temperature}, expected {COLDEST} to {HOTTEST:g}")


def attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    """The attention layers whose heads can be edited, in the order of the forward.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> len(attention_layers(DecoderLM(DecoderConfig(d_model=32, layers=3, heads=2))))
    3
    """
    if not getattr(model, "one_stack", False):
        raise InputError(
            f"edits: model is {type(model).__name__}, whose heads cannot be edited; expected qkv's own DecoderLM, such "
            "as qkv-mini, or Classifier"
        )
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def everywhere(model: nn.Module, normalizer: str, temperature: float = 1.0) -> list[Edit]:
    """The same edit for all heads of a model.

    >>> import qkv
    >>> mini, tokenizer = qkv.load("qkv-mini")
    >>> with edited(mini, everywhere(mini, "off-by-one")):
    ...     found = qkv.profile(mini, "import os", tokenizer=tokenizer, probe=False, progress=False)
    >>> bool(found.data["weights"].sum("key").min() < 0.9)  # the rest went to no key
    True
    """
    layers = enumerate(attention_layers(model))
    return [Edit(layer, head, normalizer, temperature) for layer, module in layers for head in range(module.heads)]


@contextmanager
def edited(model: nn.Module, edits: Iterable[Edit], *, on_weights: OnWeights | None = None) -> Iterator[None]:
    """Inside, the model runs with these edits; its parameters do not change.

    Only calls of this thread and of this model are edited. Of nested contexts the innermost applies. `qkv.profile`
    works inside if all heads of a layer have the same edit.

    Args:
        model: a `DecoderLM`, or a `Classifier` of qkv-lab.
        edits: at most one for each head; heads without an edit do not change.
        on_weights: callback with the number of every layer and the attention weights of its heads after the edits,
            (b, h, nq, nk). The weights are formed for it, which takes quadratic memory.

    Raises:
        InputError: for another kind of model, a layer or head that it does not have, or two edits of one head.

    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model, ids = DecoderLM(DecoderConfig(d_model=32, layers=2, heads=4)), torch.tensor([[1, 2, 3]])
    >>> before = model(ids)
    >>> with edited(model, [Edit(0, 3, "sigmoid"), Edit(1, 0, temperature=0.5)]):
    ...     after = model(ids)
    >>> torch.equal(model(ids), before), torch.equal(after, before)
    (True, False)
    """
    layers = attention_layers(model)
    editor = _Editor(_by_layer(layers, edits), on_weights)
    with ExitStack() as stack:
        for number, module in enumerate(layers):
            for handle in editor.add_hooks(number, module):
                stack.callback(handle.remove)
        stack.enter_context(editing(editor))
        token = _ACTIVE.set(editor)
        stack.callback(_ACTIVE.reset, token)
        yield


class _Editor:
    """Tracks which layer is running, and applies the edits of its heads to its attention call."""

    def __init__(self, edits: dict[int, dict[int, Edit]], on_weights: OnWeights | None) -> None:
        self.edits, self.on_weights = edits, on_weights
        self.layer: int | None = None

    def add_hooks(self, number: int, module: nn.Module) -> Iterator[Any]:
        """Add hooks that record the start and end of a layer's forward."""

        def begins(*_: object) -> None:
            if _ACTIVE.get() is self:  # False if another thread runs the same model
                self.layer = number

        def ends(*_: object) -> None:
            if _ACTIVE.get() is self:
                self.layer = None

        yield module.register_forward_pre_hook(begins)
        yield module.register_forward_hook(ends, always_call=True)

    def __call__(self, call: Call, weights: bool) -> Call | Result:
        if self.layer is None:
            return call
        edits = self.edits.get(self.layer, {})
        heads_of: dict[tuple[str, float], list[int]] = {}
        for head in range(call.q.shape[1]):
            edit = edits.get(head)
            kind = (AS_TRAINED, 1.0) if edit is None else (edit.normalizer, edit.temperature)
            heads_of.setdefault(kind, []).append(head)
        calls = {kind: _changed(call, *kind) for kind in heads_of}
        if len(calls) == 1 and self.on_weights is None:
            return next(iter(calls.values()))
        # Masks and biases may differ by head: compute each kind of edit for all heads, then select its heads.
        needs_weights = weights or self.on_weights is not None
        found = {kind: serve(changed, weights=needs_weights) for kind, changed in calls.items()}
        result = _joined([(heads, found[kind]) for kind, heads in heads_of.items()])
        if self.on_weights is not None:
            assert result.weights is not None
            self.on_weights(self.layer, result.weights)
        return result


_ACTIVE: ContextVar[_Editor | None] = ContextVar("qkv editor of a model", default=None)


def _by_layer(layers: list[MultiHeadAttention], edits: Iterable[Edit]) -> dict[int, dict[int, Edit]]:
    found: dict[int, dict[int, Edit]] = {}
    for edit in edits:
        if not 0 <= edit.layer < len(layers):
            raise InputError(f"edit: layer is {edit.layer}, expected 0 to {len(layers) - 1}")
        heads = layers[edit.layer].heads
        if not 0 <= edit.head < heads:
            raise InputError(f"edit: head is {edit.head}, expected 0 to {heads - 1}")
        of_layer = found.setdefault(edit.layer, {})
        if edit.head in of_layer:
            raise InputError(f"edits has two edits of layer {edit.layer}, head {edit.head}, expected one for each head")
        of_layer[edit.head] = edit
    return found


def _changed(call: Call, normalizer: str, temperature: float) -> Call:
    if (normalizer, temperature) == (AS_TRAINED, 1):
        return call
    given = call.given
    return Call.of(
        given.q, given.k, given.v, given.mask, given.biases, given.score,
        _normalizer(given.normalizer, normalizer, temperature), call.dropout_p, call.seed,
    )  # fmt: skip


def _normalizer(trained: Normalizer, name: str, temperature: float) -> Normalizer:
    match name:
        case "softmax":
            return Softmax(temperature)
        case "off-by-one":
            return Softmax(temperature, sink=0.0)
        case "sigmoid":
            return Sigmoid().with_temperature(temperature)
    return trained.with_temperature(trained.temperature * temperature)


def _joined(parts: list[tuple[list[int], Result]]) -> Result:
    """Combine the results of several calls by head: each result is used for the heads beside it."""
    order = torch.tensor([head for heads, _ in parts for head in heads]).argsort()

    def combined(tensors: list[Tensor | None]) -> Tensor | None:
        selected = [x[:, heads] for x, (heads, _) in zip(tensors, parts, strict=True) if x is not None]
        return torch.cat(selected, 1)[:, order] if len(selected) == len(parts) else None

    out = combined([result.out for _, result in parts])
    assert out is not None
    return Result(out, combined([result.lse for _, result in parts]), combined([r.weights for _, r in parts]))
