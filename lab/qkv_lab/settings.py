"""Reads and writes the settings of a run as TOML: run.toml in every run's folder, and `qkv train --config`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from qkv._untrusted import TEXT, check_nested, check_version, read_bytes
from qkv.attention import Attention
from qkv.errors import InputError, nearest, refusing
from qkv_lab.task import Task, Training

C = TypeVar("C")
RUN = "run.toml"
VERSION = 1
"""The version of the format; files without one have version 1."""
CONFIGS = Path(__file__).parent / "configs"
"""The folder of configurations that come with the package: `qkv train --config lesson`."""


def updated(settings: C, entries: Mapping[str, Any], where: str = "") -> C:
    """The settings with some entries changed; nested settings are nested mappings.

    >>> updated(Training(), {"steps": 5}).steps
    5
    """
    known = {f.name: getattr(settings, f.name) for f in fields(settings)}  # type: ignore[arg-type]
    kinds, values = get_type_hints(type(settings)), dict[str, Any]()
    for name, value in entries.items():
        if name not in known:
            raise InputError(f"{where}{name} is no setting, expected one of {', '.join(known)}{nearest(name, known)}")
        old = known[name]
        if is_dataclass(old) and not isinstance(old, type):
            if not isinstance(value, Mapping):
                raise InputError(f"{where}{name} is {value!r}, expected a table of settings")
            values[name] = updated(old, value, f"{where}{name}.")
        else:
            values[name] = _typed(f"{where}{name}", value, kinds[name])
    return replace(settings, **values)  # type: ignore[type-var]


def entries_of(settings: Any) -> dict[str, Any]:
    """All entries except those that are None, which TOML cannot express: None is a default, or in a tuple "none".

    >>> from qkv.models import DecoderConfig
    >>> entries = entries_of(DecoderConfig(window=(8, None)))
    >>> entries["window"], updated(DecoderConfig(), entries).window
    ([8, 'none'], (8, None))
    """
    found = {f.name: getattr(settings, f.name) for f in fields(settings)}
    for name, value in found.items():
        if isinstance(value, Attention):
            raise InputError(f"{name} is a composition, expected None: run.toml holds all settings of a task, as text")
        if isinstance(value, tuple):
            found[name] = ["none" if x is None else x for x in value]
    return {k: entries_of(v) if is_dataclass(v) else v for k, v in found.items() if v is not None}


def to_toml(task: Task, training: Training) -> str:
    """All settings of a run, as the text of run.toml."""
    import tomli_w

    return tomli_w.dumps(
        {"format_version": VERSION, "task": task.name, task.name: entries_of(task), "training": entries_of(training)}
    )


def read_toml(path: Path, argument: str = "config") -> dict[str, Any]:
    """The contents of a TOML file; `InputError`, which names the caller's `argument`, if it cannot be read."""
    with (
        refusing(f"{argument}: cannot read {path} ({{}})", OSError),
        # tomllib raises ValueError also for numbers and dates that do not exist
        refusing(f"{argument}: the file {path} is not TOML ({{}})", ValueError, RecursionError),
    ):
        found = tomllib.loads(read_bytes(path, TEXT).decode("utf-8"))
        check_nested(found)
    with refusing(f"{argument}: cannot read {path}: {{}}", ValueError):
        check_version(found, VERSION)
    return found


def from_toml(path: Path) -> tuple[Task, Training]:
    """The task and the training settings in a file; settings that it leaves out have the task's defaults.

    Args:
        path: the file, or the name of a configuration in the package: ``lesson``.

    >>> task, training = from_toml(Path("lesson"))
    >>> task.name, task.model.d_model, training.steps
    ('reversal', 32, 4000)
    """
    from qkv_lab.tasks import names, task_class  # the modules of tasks import this one

    if not path.exists() and (CONFIGS / f"{path}.toml").is_file():
        path = CONFIGS / f"{path}.toml"
    found = read_toml(path)
    name = found.get("task")
    if not isinstance(name, str) or name not in names():
        raise InputError(
            f"task is {name!r} in {path}, expected one of {', '.join(names())}{nearest(str(name), names())}"
        )
    cls = task_class(name)
    for key in found:
        if key not in ("format_version", "task", name, "training"):
            raise InputError(f"{key} is an unknown table in {path}, expected [{name}] and [training]")
    task = updated(cls(), found.get(name, {}), f"{name}.")
    return task, updated(cls.training(), found.get("training", {}), "training.")


def difference(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> list[str]:
    """One text for each entry that differs between two nested mappings, such as ``"training.seed: 0, not 3"``."""
    out = []
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            out += difference(x, y, f"{where}{key}.")
        elif x != y:
            one, other = ("none" if value is None else repr(value) for value in (x, y))
            out.append(f"{where}{key}: {one}, not {other}")
    return out


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """The value, converted for a field of that type; `InputError` if it has another type."""
    if get_origin(annotation) in (Union, UnionType):
        if value is None and type(None) in get_args(annotation):
            return None
        kinds = [x for x in get_args(annotation) if x is not type(None)]
        several = [x for x in kinds if get_origin(x) is tuple and isinstance(value, list | tuple)]
        annotation = (several or kinds)[0]
    if get_origin(annotation) is tuple and isinstance(value, list | tuple):
        return tuple(_typed(name, None if x in (None, "none") else x, get_args(annotation)[0]) for x in value)
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            raise InputError(f"{name} is {value!r}, expected one of {', '.join(map(repr, get_args(annotation)))}")
        return value
    if annotation is float and type(value) is int and value.bit_length() < 1024:  # larger ones are no float
        return float(value)
    if type(value) is not annotation:
        raise InputError(f"{name} is {value!r}, expected {getattr(annotation, '__name__', annotation)}")
    return value
