"""Classes by name: the built-in ones, and those that installed packages register as Python entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from qkv.errors import InputError, first_line, nearest


@dataclass(frozen=True)
class Registry:
    """Finds the class of a name. Entry points are read only for names that are not built in, or to list all names."""

    kind: str
    """What is registered, and the argument that errors name: ``"experiment"``."""
    package: str
    """The package of the built-in classes."""
    built_in: Mapping[str, str]
    """The module in `package` and the class of each built-in name, as ``"module.Class"``."""
    group: str
    """The group of entry points in which other packages register theirs."""
    problem: Callable[[Any], str | None]
    """Why an object that an entry point loads cannot be used, or None if it can."""

    def names(self) -> tuple[str, ...]:
        """All names: the built-in ones, and then those of installed packages in alphabetical order.

        Nothing is imported.
        """
        registered = self._registered()
        for name, found in registered.items():
            if name in self.built_in:
                raise InputError(
                    f"{self.kind} {name!r} of the installed package {_package(found[0])} has the name of a built-in "
                    f"{self.kind}, expected another name; uninstall the package or rename its entry point"
                )
            self._only(name, found)
        return (*self.built_in, *registered)

    def load(self, name: str) -> type[Any]:
        """The class of a name."""
        if name in self.built_in:
            module, cls = self.built_in[name].split(".")
            built_in: type[Any] = getattr(import_module(f"{self.package}.{module}"), cls)
            return built_in
        registered = self._registered()
        if name not in registered:
            names = dict.fromkeys((*self.built_in, *registered))
            if not names:
                raise InputError(f"{self.kind} is {name!r}, but no installed package registers one in {self.group}")
            raise InputError(f"{self.kind} is {name!r}, expected one of {', '.join(names)}{nearest(name, names)}")
        entry = self._only(name, registered[name])
        about = f"{self.kind} {name!r} of the installed package {_package(entry)}"
        try:
            found: type[Any] = entry.load()
        except Exception as error:  # importing a module can raise anything
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{about} cannot be loaded from {entry.value} ({reason})") from error
        problem = self.problem(found) if isinstance(found, type) else f"is a {type(found).__name__}, expected a class"
        if problem is None and found.name != name:
            problem = f"has the name {found.name!r} in its class, expected {name!r} as in its entry point"
        if problem is not None:
            raise InputError(f"{about} cannot be used: {entry.value} {problem}")
        return found

    def _registered(self) -> dict[str, list[EntryPoint]]:
        """The entry points of installed packages, by name."""
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
            by_name.setdefault(entry.name, []).append(entry)
        return by_name

    def _only(self, name: str, found: list[EntryPoint]) -> EntryPoint:
        """The entry point of a name; `InputError` if several packages register it."""
        if len(found) > 1:
            packages = " and ".join(sorted(map(_package, found)))
            raise InputError(
                f"{self.kind} {name!r} is registered by {packages}, expected one package; uninstall another"
            )
        return found[0]


def _package(entry: EntryPoint) -> str:
    """Name and version of the package that an entry point belongs to."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "(unknown)"
