"""Checks and JSON conversion for model configurations: flat dataclasses of plain values, and possibly a composition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from qkv.attention import Attention
from qkv.errors import InputError, nearest
from qkv.models.composition import composition, described

C = TypeVar("C")


def one_of(name: str, value: object, expected: Collection[str]) -> None:
    """Raise `InputError` unless `value` is in `expected`."""
    if value not in expected:
        hint = nearest(value, expected) if isinstance(value, str) else ""
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, expected))}{hint}")


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
