"""What checks read: the results of experiments and of benchmarks, as they come with the package or from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from qkv.errors import InputError, renamed
from qkv_lab.experiments.record import load
from qkv_lab.experiments.run import SHIPPED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "results"
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


class MissingResult(InputError):  # noqa: N818  # a name without "Error"
    """A check needs a result that is not there; the message names the command that makes it."""


@contextmanager
def results_in(folder: str | Path) -> Iterator[None]:
    """Inside, checks read experiments' results from this folder only, as `qkv experiment --out` writes them.

    >>> import shutil, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = shutil.copy(SHIPPED / "window.json", folder)
    ...     with results_in(folder):
    ...         result("window")["claims"], claims_in(folder)
    (['C084'], ['C084'])
    """
    claims_in(folder)
    token = _folder.set(Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


def result(name: str) -> dict[str, Any]:
    """The result of an experiment: the contents of NAME.json.

    >>> [verdict["claim"] for verdict in result("window")["verdicts"]]
    ['C084']
    """
    folder = _folder.get()
    file = (folder or SHIPPED) / f"{name}.json"
    if not file.exists():
        raise MissingResult(f"results: {folder or 'qkv-lab'} has no {name}.json; {_command(name)} makes it")
    with renamed(out="results"):
        return load(file)


def verdict_in(found: Mapping[str, Any], name: str, id_: str) -> dict[str, Any]:
    """The verdict on a claim in the result of the experiment NAME."""
    verdicts = {verdict["claim"]: verdict for verdict in found["verdicts"]}
    if id_ not in verdicts:
        raise MissingResult(
            f"results of the experiment {name!r} have verdicts on {', '.join(verdicts) or 'no claim'}, expected one on "
            f"{id_}; {_command(name)} makes it"
        )
    return dict(verdicts[id_])


def claims_in(folder: str | Path) -> list[str]:
    """The numbers of all claims on which the results in a folder have a verdict."""
    found: set[str] = set()
    for file in sorted(Path(folder).glob("*.json")):
        try:
            found |= {verdict["claim"] for verdict in load(file)["verdicts"]}
        except InputError:  # a JSON file of something else
            continue
    if not found:
        raise InputError(f"results is {str(folder)!r}, expected a folder that `qkv experiment --out` wrote")
    return sorted(found)


def benchmark(path: str) -> dict[str, Any]:
    """A benchmark's result.

    Args:
        path: the file, relative to benchmarks/results.

    >>> "cells" in benchmark("decoder.json")
    True
    """
    if (BENCHMARKS / path).exists():
        found: dict[str, Any] = json.loads((BENCHMARKS / path).read_text(encoding="utf-8"))
        return found
    raise MissingResult(f"results: there is no benchmark {path!r}; `make bench` in the repository makes it")


def _command(name: str) -> str:
    folder = _folder.get()
    return f"`qkv experiment {name}`" if folder is None else f"`qkv experiment {name} --out {folder}`"
