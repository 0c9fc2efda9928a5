"""Deprecated public names: they still work and raise a DeprecationWarning that gives the new name."""

from __future__ import annotations

import warnings
from typing import Any


def warn(old: str, new: str) -> None:
    """Warn the caller of the function that calls this: `old` is now `new`."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def alias(old: str, new: str) -> Any:
    """A property that serves an attribute under its deprecated name."""

    def get(self: object) -> Any:
        warn(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")
