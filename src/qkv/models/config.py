"""Configurations as JSON: checks of entries, and compositions of attention.

The values of learned tensors are parameters of the model and thus in its safetensors. Only classes and feature maps of
qkv itself have a form in JSON, so that reading a file never runs anybody's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qkv import biases, features, masks, normalizers, scores
from qkv._untrusted import Budget
from qkv.attention import Attention
from qkv.errors import InputError, kind_of, nearest


def check_ids(name: str, ids: Tensor, vocabulary: int) -> None:
    """Raise `InputError` unless `ids` has shape (batch, length) and at least one token, all within the vocabulary."""
    integers = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not integers or ids.ndim != 2 or not ids.numel():
        raise InputError(f"{name} is {kind_of(ids)}, expected a tensor of integers (batch, length), 1 token or more")
    if not torch.compiler.is_compiling() and ids.device.type == "cpu":  # on a GPU the check would wait for the device
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise InputError(f"{name} has tokens {low}..{high}, expected 0..{vocabulary - 1}")


def check_tokens(name: str, vocabulary: int, **tokens: int) -> None:
    """Raise `InputError` unless the special tokens of a configuration are distinct tokens of its vocabulary."""
    if vocabulary < 1:
        raise InputError(f"{name}: vocabulary has {vocabulary} tokens, expected at least 1")
    used: dict[int, str] = {}
    for role, token in tokens.items():
        if token in used:
            raise InputError(f"{name}: {role} is {token}, expected another token than {used[token]}")
        if not 0 <= token < vocabulary:
            raise InputError(f"{name}: {role} is {token}, expected 0..{vocabulary - 1}")
        used[token] = role


def check_dropout(name: str, dropout: float) -> None:
    """Raise `InputError` unless `dropout` is a probability below 1."""
    if not 0 <= dropout < 1:
        raise InputError(f"{name}: dropout is {dropout}, expected 0 ≤ dropout < 1")


MODULES = {"masks": masks, "biases": biases, "scores": scores, "normalizers": normalizers, "features": features}
Json = None | bool | int | float | str | list[Any] | dict[str, Any]


def described(attention: Attention) -> dict[str, Json]:
    """The composition as JSON.

    >>> from qkv.masks import Causal, Window
    >>> described(Attention(mask=Window(8) | Causal() & Window(9)))["mask"]["type"]
    'masks.Or'
    """
    return {f.name: _described(f.name, getattr(attention, f.name)) for f in fields(attention)}


def composition(entries: object) -> Attention:
    """The composition that `described` gave, with learned tensors of zeros.

    >>> from qkv.masks import Window
    >>> composition(described(Attention(mask=Window(8)))).mask
    Window(size=8, ahead=0)
    """
    known = [f.name for f in fields(Attention)]
    if not isinstance(entries, Mapping) or not set(entries) <= set(known):
        raise InputError(f"attention is {entries!r}, expected a composition with entries among {', '.join(known)}")
    return Attention(**{name: _made(name, value) for name, value in entries.items()})


def _described(place: str, x: Any) -> Json:
    if x is None or isinstance(x, bool | int | str) or (isinstance(x, float) and math.isfinite(x)):
        return x
    if isinstance(x, nn.Parameter):
        return {"parameter": list(x.shape), "learned": x.requires_grad}
    if isinstance(x, tuple | list):
        return [_described(place, one) for one in x]
    if isinstance(x, Tensor):
        raise InputError(
            f"attention has a tensor of shape {tuple(x.shape)} as {place}, expected an nn.Parameter (with "
            "requires_grad=False if it is not learned), whose values are saved with the weights"
        )
    kind = x if callable(x) and hasattr(x, "__name__") else type(x)
    name = _public_name(kind)
    if name is None or (kind is not x and not is_dataclass(x)):
        raise InputError(
            f"attention has {x if isinstance(x, float) else getattr(kind, '__name__', kind)} as {place}, expected "
            "numbers, classes and feature maps of qkv, which have a form in config.json; otherwise save "
            "model.state_dict(), and build the model in code"
        )
    if kind is x:
        return {"function": name}
    settings = {f.name: _described(f"{place}.{f.name}", getattr(x, f.name)) for f in fields(x) if f.init}
    return {"type": name, **settings}


def _made(place: str, x: Json) -> Any:
    if isinstance(x, list):
        return tuple(_made(place, one) for one in x)
    if not isinstance(x, dict):
        return x
    if set(x) == {"parameter", "learned"}:
        Budget(0).take(4 * math.prod(x["parameter"]))
        return nn.Parameter(torch.zeros(x["parameter"]), requires_grad=bool(x["learned"]))
    if set(x) == {"function"}:
        return _public(place, x["function"])
    settings = {name: _made(f"{place}.{name}", value) for name, value in x.items() if name != "type"}
    cls = _public(place, x.get("type"))
    known = [f.name for f in fields(cls) if f.init] if is_dataclass(cls) else []
    if not isinstance(cls, type) or not set(settings) <= set(known):
        raise InputError(f"attention has {x!r} as {place}, expected a type with settings among {', '.join(known)}")
    return cls(**settings)


def _public_name(thing: Any) -> str | None:
    """``masks.Window`` for that class; None for what is not public in the modules of compositions."""
    name = getattr(thing, "__name__", "")
    for module, found in MODULES.items():
        if name in found.__all__ and getattr(found, name) is thing:
            return f"{module}.{name}"
    return None


def _public(place: str, name: object) -> Any:
    """The class or function of that public name."""
    module, _, of_it = str(name).partition(".")
    if module not in MODULES or of_it not in MODULES[module].__all__:
        raise InputError(f"attention has {name!r} as {place}, expected a public name such as 'masks.Window'")
    return getattr(MODULES[module], of_it)


C = TypeVar("C")


def to_dict(config: Any) -> dict[str, Any]:
    """The entries of a configuration as a dictionary that fits in JSON; without a composition if it has none.

    >>> from qkv.masks import Window
    >>> from qkv.models.decoder import DecoderConfig
    >>> to_dict(DecoderConfig(attention=Attention(mask=Window(8))))["attention"]["mask"]
    {'type': 'masks.Window', 'size': 8, 'ahead': 0}
    """
    entries = {f.name: getattr(config, f.name) for f in fields(config)}
    if isinstance(entries.get("attention"), Attention):
        return {**entries, "attention": described(entries["attention"])}
    return {name: x for name, x in entries.items() if not (name == "attention" and x is None)}


def from_dict(cls: type[C], entries: Mapping[str, Any]) -> C:
    """The configuration with these entries; raises `InputError` for an unknown key.

    >>> from qkv.models.decoder import DecoderConfig
    >>> from_dict(DecoderConfig, {"layers": 2}).layers
    2
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in entries:
        if key not in known:
            raise InputError(
                f"{cls.__name__}: {key} is not a key, expected one of {', '.join(known)}{nearest(key, known)}"
            )
    own = entries.get("attention")
    return cls(**({**entries, "attention": composition(own)} if isinstance(own, Mapping) else entries))
