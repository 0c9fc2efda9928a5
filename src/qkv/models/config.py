"""Configurations: flat dataclasses of plain values, from and to JSON."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from qkv.errors import InputError

C = TypeVar("C")


def one_of(name: str, value: object, expected: Collection[str]) -> None:
    """Raise `InputError` unless `value` is one of the names expected."""
    if value not in expected:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, expected))}")


def nearest(name: str, known: Collection[str]) -> str:
    """; did you mean …? if a known name is near.

    >>> nearest("layer", ["layers", "heads"])
    "; did you mean 'layers'?"
    """
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_dict(config: Any) -> dict[str, Any]:
    """All entries, by name."""
    return asdict(config)


def from_dict(cls: type[C], entries: Mapping[str, Any]) -> C:
    """The configuration with these entries; `InputError` for a key it does not have.

    >>> from qkv.models.decoder import DecoderConfig
    >>> from_dict(DecoderConfig, {"layers": 2}).layers
    2
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in entries:
        if key not in known:
            raise InputError(
                f"{cls.__name__} has no key {key!r}, expected some of {', '.join(known)}{nearest(key, known)}"
            )
    return cls(**entries)
