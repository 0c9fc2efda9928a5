"""Edits of heads, values, sublayers and layers while a model runs: `qkv.edit`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.edits import BY_NAME, Edit, Vectors
from qkv.errors import InputError
from qkv.models.loading import unwrapped
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.interventions import ACTIVE, SELF, Edits, Place, shown
from qkv.profiler.capture.observe import OBSERVERS, following
from qkv.profiler.capture.observer import Observer
from qkv.profiler.capture.residual import attention_modules, layer_around
from qkv.profiler.capture.texts import Texts

Key = tuple[int | str, int | str] | tuple[str, int, int]
MLP = re.compile(r"mlp|feed_?forward|ffn|moe|sparsemoe", re.IGNORECASE)
"""Class names of the feed-forward module of a layer."""


@contextmanager
def edit(model: nn.Module, edits: Mapping[Key, Edit | str]) -> Iterator[None]:
    """Inside, parts of a model compute something else: single heads, their values, modules and layers.

    Heads that are not edited keep the model's own output, bit for bit, and no n × n tensor is formed. Gradients flow
    through the edits. `qkv.profile` and `qkv.watch` inside record the edited model. The model is restored on exit, also
    after an error.

    Args:
        model: as in `qkv.profile`; its attention must be that of qkv, transformers' interface, torch's SDPA or
            `nn.MultiheadAttention`.
        edits: by ``(layer, head)``, with the layers of self-attention counted from 0 in the order of the forward; by
            ``(module name, head)``; or by ``(group, layer, head)`` in models with several kinds of attention.
            ``(layer, "mlp")`` is the output of the feed-forward module of a layer, ``(layer, "residual")`` the residual
            stream after a layer, and ``(module name, "output")`` the output of any module. An edit
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
    model = unwrapped(model)
    places = _checked(model, edits)
    active = Edits(model, places, [(_module(model, place), place) for place in places if isinstance(place[2], str)])
    stack = ACTIVE.setdefault(model, [])
    stack.append(active)
    with ExitStack() as opened:
        opened.callback(stack.remove, active)
        opened.enter_context(active.hooked())
        if not OBSERVERS.get(model):  # a profile or a watch around this context computes the attention
            opened.enter_context(following(Observer(model, texts=Texts())))
        yield
    missing = [place for place in active.by_place if place not in active.met]
    if missing and active.ran:
        raise InputError(f"edits has {shown(missing[0])}, at which {type(model).__name__} has no attention")


def _module(model: nn.Module, place: Place) -> nn.Module:
    """The module whose output is edited.

    Raises:
        InputError: if there is no such layer, or a layer has no module that is its feed-forward module by its name.
    """
    _, name, what = place
    if isinstance(name, str):
        return model.get_submodule(name)
    attentions = attention_modules(model)
    layers = list(dict.fromkeys(x for m in attentions if (x := layer_around(m, attentions, model)) is not None))
    if len({layer.rpartition(".")[0] for layer in layers}) != 1 or not 0 <= name < len(layers):
        raise InputError(
            f"edits has ({name}, {what!r}), but {type(model).__name__} has {len(layers)} layers with attention"
            f"{f' ({layers[0]} to {layers[-1]})' if layers else ''}; expected one of them if they are one stack, "
            'otherwise (module name, "output")'
        )
    layer = model.get_submodule(layers[name])
    if what == "residual":
        return layer
    found = [part for _, part in layer.named_children() if MLP.search(type(part).__name__)]
    if len(found) != 1:
        raise InputError(
            f"edits has ({name}, 'mlp'), but {layers[name]} has {len(found)} modules that are named as one, of "
            f'{", ".join(key for key, _ in layer.named_children())}; expected (module name, "output")'
        )
    return found[0]


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
    """The outputs of heads before the output projection, or of modules, in one forward, for `qkv.edits.Patch`.

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

        def apply(self, head: Vectors) -> Tensor:
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
        match parts:
            case (int() | str(), int()) | (str(), int(), int()) | (int(), "mlp" | "residual") | (str(), "output"):
                pass
            case _:
                raise InputError(
                    f"edits has the key {key!r}, expected (layer, head), (module, head), (group, layer, head), "
                    "(layer, 'mlp'), (layer, 'residual') or (module, 'output')"
                )
        if len(parts) == 2 and isinstance(parts[0], str) and parts[0] not in modules:
            raise InputError(f"edits names {parts[0]!r}, expected a module of the model, as in model.named_modules()")
        if isinstance(parts[-1], str) and one.of_heads:
            raise InputError(f"edits has {type(one).__name__} for {key}, expected a head, such as (0, 3)")
        place: Any = (None, *parts) if len(parts) == 2 else parts
        made[place] = one
    return made
