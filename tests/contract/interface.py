"""The public interface as text: names with their parameters, options of the command line, saved formats.

`make contract` writes names.txt, options.txt and formats.txt beside this file. `tests/docs/test_public.py` fails if
they differ from the code. Types are left out: how Python writes them changes with its version.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

FOLDER = Path(__file__).parent


def modules(package: str = "qkv") -> Iterator[str]:
    """The public modules: those that `__all__` of a public package names."""
    module = importlib.import_module(package)
    yield package
    for name in module.__all__:
        if inspect.ismodule(getattr(module, name)) and getattr(module, name).__name__ == f"{package}.{name}":
            yield from modules(f"{package}.{name}")


def names() -> Iterator[str]:
    """A line for every public function, class, member of a class, and constant."""
    for module in [*modules(), *modules("qkv_lab")]:
        found = importlib.import_module(module)
        for name in sorted(found.__all__):
            thing = getattr(found, name)
            if isinstance(thing, ModuleType):
                yield f"{module}.{name}"
            elif inspect.isclass(thing):
                yield f"{module}.{name}{parameters(thing)}"
                yield from (f"{module}.{name}.{member}" for member in members(thing))
            else:
                yield f"{module}.{name}{parameters(thing) if callable(thing) else ''}"


def members(cls: type) -> Iterator[str]:
    """The public attributes of a class that qkv defines; inherited ones of torch are torch's promise."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("qkv"):
            continue
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        yield f"{name}{parameters(function) if inspect.isfunction(function) else ''}"


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function with their defaults, without types."""
    if inspect.isclass(function) and issubclass(function, BaseException):
        return ""  # its signature is Python's
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def options() -> Iterator[str]:
    """A line for every option of the command line, and for every setting of a task in `qkv train` and run.toml."""
    from tyro.conf import Fixed

    from qkv.cli import commands
    from qkv_lab.cli.train import Run
    from qkv_lab.tasks import names as tasks
    from qkv_lab.tasks import task_class

    for command, function in commands().items():
        if command != "train":
            hints = get_type_hints(function, include_extras=True)
            for parameter in inspect.signature(function).parameters.values():
                metadata = getattr(hints[parameter.name], "__metadata__", ())
                if dataclasses.is_dataclass(parameter.default):
                    shared = get_type_hints(type(parameter.default), include_extras=True)
                    for p in inspect.signature(type(parameter.default)).parameters.values():
                        own = getattr(shared[p.name], "__metadata__", ())
                        if Fixed not in own:
                            yield f"qkv {command} {option(p, own)}"
                else:
                    yield f"qkv {command} {option(parameter, metadata)}"
    for field in dataclasses.fields(Run)[2:]:
        yield f"qkv train TASK --{field.name.replace('_', '-')}"
    for name in sorted(tasks()):
        cls = task_class(name)
        for flag in [*settings(cls()), *settings(cls.training())]:
            yield f"qkv train {name} --{flag}"


def option(parameter: inspect.Parameter, metadata: tuple[Any, ...]) -> str:
    """`--name = default`, or the placeholder of a positional argument."""
    from tyro.conf import Positional

    given = {key: getattr(x, key) for x in metadata for key in ("name", "metavar") if getattr(x, key, None)}
    name = f"--{given.get('name', parameter.name.replace('_', '-'))}"
    if Positional in metadata or parameter.kind is parameter.POSITIONAL_ONLY:
        name = given.get("metavar", parameter.name.upper())
    return name if parameter.default is parameter.empty else f"{name} = {shown(parameter.default)}"


def shown(default: Any) -> str:
    """A default value as text that is the same on every machine."""
    return str(default) if isinstance(default, Path) else re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def settings(made: Any, prefix: str = "") -> Iterator[str]:
    """The settings of a task or a training with their defaults; those of the model are nested."""
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        name = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from settings(value, f"{name}.")
        else:
            yield f"{name} = {shown(value)}"


def formats() -> Iterator[str]:
    """The versions of saved formats, the variables of a profile, and the entries of a model's config.json."""
    from qkv.models import checkpoint
    from qkv.profiler.data import archive, variables
    from qkv.profiler.surveys import data
    from qkv_lab import tokens

    yield f"{archive.FORMAT} {archive.VERSION}"
    yield f"{data.FORMAT} {data.VERSION}"
    yield f"tokens of a corpus {tokens.VERSION}"
    for name, variable in sorted(variables.VARIABLES.items()):
        yield f"{archive.FORMAT} {name}({', '.join(variable.dims)}) in {variable.units}"
    for name, dims in sorted(variables.COORDINATES.items()):
        yield f"{archive.FORMAT} coordinate {name}({', '.join(dims)})"
    yield from (f"{archive.FORMAT} attribute {name}" for name in sorted(variables.ATTRIBUTES))
    for kind in sorted(checkpoint.KINDS):
        yield from (
            f"config.json of {kind}: {field.name}" for field in dataclasses.fields(checkpoint.class_of(kind)[0])
        )


TEXTS: dict[str, Callable[[], Iterator[str]]] = {"names": names, "options": options, "formats": formats}


def text(name: str) -> str:
    return "\n".join(TEXTS[name]()) + "\n"


if __name__ == "__main__":
    for kind in TEXTS:
        (FOLDER / f"{kind}.txt").write_text(text(kind), encoding="utf-8")
