"""`edit` changes single heads of a model inside a context; `head_outputs` records their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.edits import Edit, Head
from qkv.edits.active import ACTIVE, SELF, Edits, Place
from qkv.edits.built_in import BY_NAME
from qkv.errors import InputError
from qkv.profiler.capture.inputs import batches
from qkv.profiler.capture.observe import OBSERVERS, Observer, observe, prepare

Key = tuple[int | str, int] | tuple[str, int, int]


@contextmanager
def edit(model: nn.Module, edits: Mapping[Key, Edit | str]) -> Iterator[None]:
    """Inside, single heads of a model compute something else.

    Heads that are not edited keep the model's own output, bit for bit, and no n × n tensor is formed. Gradients flow
    through the edits. `qkv.profile` and `qkv.watch` inside record the edited model; `watch` refuses edits that change
    weights. The model is restored on exit, also after an error.

    Args:
        model: as in `qkv.profile`; its attention must be that of qkv, transformers' interface or torch's SDPA.
        edits: by ``(layer, head)``, with the layers of self-attention counted from 0 in the order of the forward; by
            ``(module name, head)``; or by ``(group, layer, head)`` in models with several kinds of attention. An edit
            is ``"zero"``, ``"mean"``, or one of `qkv.edits`.

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
        if OBSERVERS.get(model, 0):  # a profile or a watch around this context computes the attention
            yield
        else:
            observer = Observer(model, beside=True, collect=lambda observed: None, for_edits=True)
            observer.on_begin = lambda module, args, named: prepare(observer, module, args, named)
            with observe(observer):
                yield
    finally:
        stack.remove(active)
    missing = [place for place in active.by_place if place not in active.met]
    if missing and active.ran:
        raise InputError(f"edits has {_shown(missing[0])}, at which {type(model).__name__} has no attention")


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
    >>> found = qkv.head_outputs(model, torch.tensor([[5, 6, 7]]), [(0, 1)])
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
        if isinstance(value, str) and value not in BY_NAME:
            raise InputError(f"edits has {value!r} for {key}, expected 'zero', 'mean' or one of qkv.edits")
        one = BY_NAME[value]() if isinstance(value, str) else value
        if not isinstance(one, Edit):
            raise InputError(f"edits has {type(value).__name__} for {key}, expected 'zero', 'mean' or one of qkv.edits")
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
