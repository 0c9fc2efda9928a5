"""Warnings that point at the user's line, and deprecated public names that still work."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any


def user_frame() -> int:
    """`stacklevel` for `warnings.warn` of the first stack frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("qkv."):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


def deprecated(old: str, new: str) -> None:
    """Warn the user: `old` is now `new`."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=user_frame())


def alias(old: str, new: str) -> Any:
    """A property that serves an attribute under its deprecated name."""

    def get(self: object) -> Any:
        deprecated(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated name of `{new}`.")


def renamed(module: str, names: Mapping[str, str], name: str) -> Any:
    """The value of a deprecated name of a module, for its ``__getattr__``; `names` maps old names to new ones."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    deprecated(f"{module}.{name}", names[name])
    return getattr(sys.modules[module], names[name])
