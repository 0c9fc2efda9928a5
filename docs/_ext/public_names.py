"""Writes reference/: a page for every public name, from `__all__`, when the site is built."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

MODULES = {
    "qkv": "attention: `attend`, compositions, plans and statistics",
    "qkv.masks": "which query may attend to which key",
    "qkv.scores": "how similar a query and a key are",
    "qkv.biases": "numbers that are added to scores, and caps",
    "qkv.normalizers": "how scores become weights",
    "qkv.features": "feature maps of linear attention",
    "qkv.plot": "figures of weights of any library",
    "qkv.positions": "sinusoids, rotations, tables",
    "qkv.nn": "modules: multi-head, additive and linear attention, transformer blocks",
    "qkv.cache": "key-value caches and their eviction policies",
    "qkv.models": "models, checkpoints, generation",
    "qkv.huggingface": "models of the transformers library with these kernels",
    "qkv.ring": "sequence parallelism over several processes",
    "qkv.statistics": "statistics of the weights",
    "qkv.testing": "checks of your own masks, scores, biases, normalizers, statistics and edits",
    "qkv.kernels": "kernels, and the interface for your own",
    "qkv.reference": "the definitions, in float64 and plain loops",
    "qkv.profiler": "profiles of models: statistics of all heads",
    "qkv_lab": "tasks for small models, and training",
    "qkv_lab.tasks": "the tasks",
    "qkv_lab.check": "checks of the labs' exercises",
    "qkv_lab.models": "models that teach: translation, captions, classification",
    "qkv_lab.course": "attention with the calls that courses use",
    "qkv_lab.testing": "checks of your own tasks and experiments",
}


def public(module: str) -> dict[str, Any]:
    """The names in a module's `__all__`, without its submodules."""
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__ if not inspect.ismodule(getattr(found, name))}


def directive(thing: Any) -> str:
    """The autodoc directive for an object."""
    if inspect.isclass(thing):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return "autofunction" if callable(thing) else "autodata"


def page(module: str, name: str, thing: Any) -> str:
    title = f"{module}.{name}"
    lines = [title, "=" * len(title), "", f".. currentmodule:: {module}", "", f".. {directive(thing)}:: {name}", ""]
    if inspect.isclass(thing):
        lines.insert(-1, "   :members:")
    if module != "qkv" and getattr(importlib.import_module("qkv"), name, None) is thing:
        lines.insert(-1, "   :no-index:")  # its page in qkv has the index entry
    return "\n".join(lines)


def index() -> str:
    """The first page of the reference: all modules and their names."""
    lines = ["# Reference", "", "Every public name with its docstring. All invalid input raises `qkv.InputError`,"]
    lines += ["a `ValueError` with one sentence. The help of the command line is `qkv COMMAND --help`.", ""]
    for module, what in MODULES.items():
        lines += [f"## [{module}]({module}.md)", "", f"{what[0].upper()}{what[1:]}.", "", _names(module), ""]
    lines += ["```{toctree}", ":hidden:", "", *MODULES, "```", ""]
    return "\n".join(lines)


def _names(module: str) -> str:
    names = sorted(public(module), key=str.lower)
    return " · ".join(f"[{name}]({module}.{name}.rst)" for name in names)


def module_page(module: str) -> str:
    """The page of a module: its docstring and links to its names."""
    said = (importlib.import_module(module).__doc__ or "").split(">>>")[0].strip().replace("``", "`")
    names = sorted(public(module), key=str.lower)
    toc = [f"{name} <{module}.{name}>" for name in names]
    return "\n".join([f"# {module}", "", said, "", _names(module), "", "```{toctree}", ":hidden:", "", *toc, "```", ""])


def write(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    pages = {"index.md": index()} | {f"{module}.md": module_page(module) for module in MODULES}
    for module in MODULES:
        pages |= {f"{module}.{name}.rst": page(module, name, thing) for name, thing in public(module).items()}
    for old in folder.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
