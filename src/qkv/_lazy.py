"""Lazy imports: a package loads its public names on first use, so that importing it is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qkv.errors import nearest


def lazy(package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: it imports a public name from its module, or a public submodule, on first use.

    `names` are the public names of the package, by the dotted module that defines them.
    """
    origin = {name: module for module, found in names.items() for name in found}

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in origin:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{nearest(name, [*origin, *modules])}")
        value = getattr(importlib.import_module(origin[name]), name)
        setattr(sys.modules[package], name, value)  # later accesses bypass `load`
        return value

    return load
