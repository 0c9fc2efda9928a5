"""Checks and JSON conversion for model configurations, which are flat dataclasses of plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from qkv.errors import InputError, nearest

C = TypeVar("C")


def one_of(name: str, value: object, expected: Collection[str]) -> None:
    """Raise `InputError` unless `value` is in `expected`."""
    if value not in expected:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, expected))}")


def to_dict(config: Any) -> dict[str, Any]:
    """The entries of a configuration as a dictionary."""
    return asdict(config)


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
    return cls(**entries)
