"""Settings of a run as TOML, and back: what stands beside every run, and what `qkv train --config` reads."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from qkv.errors import InputError
from qkv.lab.task import Task, Training
from qkv.models.config import nearest

C = TypeVar("C")
RUN = "run.toml"


def fitted(config: C, **needed: Any) -> C:
    """A model's configuration with the entries that the task decides.

    Raises:
        InputError: if the configuration asks for another value, and not just for its class's default.

    >>> from qkv.models import DecoderConfig
    >>> fitted(DecoderConfig(layers=2), vocab_size=17).vocab_size
    17
    """
    defaults = {f.name: f.default for f in fields(config)}  # type: ignore[arg-type]
    for name, value in needed.items():
        asked = getattr(config, name)
        if asked not in (defaults[name], value):
            raise InputError(f"model.{name} is {asked!r}, but the task decides it: {value!r}")
    return replace(config, **needed)  # type: ignore[type-var]


def changed(settings: C, entries: Mapping[str, Any], where: str = "") -> C:
    """Settings with some entries changed; nested ones as nested mappings.

    Raises:
        InputError: for an unknown entry (with the nearest name), or one of another type.

    >>> changed(Training(), {"steps": 5}).steps
    5
    """
    known = {f.name: getattr(settings, f.name) for f in fields(settings)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in entries.items():
        if name not in known:
            raise InputError(f"{where}{name} is no setting, expected one of {', '.join(known)}{nearest(name, known)}")
        old = known[name]
        if is_dataclass(old) and not isinstance(old, type):
            if not isinstance(value, Mapping):
                raise InputError(f"{where}{name} is {value!r}, expected a table of settings")
            values[name] = changed(old, value, f"{where}{name}.")
        else:
            values[name] = _typed(f"{where}{name}", value, _annotation(settings, name))
    return replace(settings, **values)  # type: ignore[type-var]


def entries_of(settings: Any) -> dict[str, Any]:
    """All entries but those that are None, which TOML cannot say and which are defaults."""
    found = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return {k: entries_of(v) if is_dataclass(v) else v for k, v in found.items() if v is not None}


def to_toml(task: Task, training: Training) -> str:
    """All settings of a run."""
    import tomli_w

    return tomli_w.dumps({"task": task.name, task.name: entries_of(task), "training": entries_of(training)})


def parsed(text: str) -> dict[str, Any]:
    """What TOML says."""
    return tomllib.loads(text)


def read(path: Path) -> dict[str, Any]:
    """What a TOML file says."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML ({error})") from error


def from_toml(path: Path) -> tuple[Task, Training]:
    """The settings a file holds; what it leaves out is as the task has it by default."""
    from qkv.lab.tasks import names, task_class  # the modules of tasks import this one

    found = read(path)
    name = found.get("task")
    if not isinstance(name, str):
        raise InputError(f"task is {name!r} in {path}, expected one of {', '.join(names())}")
    cls = task_class(name)
    for key in found:
        if key not in ("task", name, "training"):
            raise InputError(f"{key} is an unknown table in {path}, expected [{name}] and [training]")
    task = changed(cls(), found.get(name, {}), f"{name}.")
    return task, changed(cls.training(), found.get("training", {}), "training.")


def difference(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> list[str]:
    """Which entries differ, in words."""
    out = []
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            out += difference(x, y, f"{where}{key}.")
        elif x != y:
            out.append(f"{where}{key}: {_shown(x)} there, {_shown(y)} asked for")
    return out


def _shown(value: Any) -> str:
    return "none" if value is None else repr(value)


def _annotation(settings: Any, name: str) -> Any:
    from typing import get_type_hints

    return get_type_hints(type(settings))[name]


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """The value, if it may stand in a field of that type."""
    from types import UnionType
    from typing import Literal, Union, get_args, get_origin

    if get_origin(annotation) in (Union, UnionType):
        if value is None and type(None) in get_args(annotation):
            return None
        annotation = next(x for x in get_args(annotation) if x is not type(None))
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, get_args(annotation)))}")
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        raise InputError(f"{name} is {value!r}, expected {getattr(annotation, '__name__', annotation)}")
    return value
