"""`Study`: the measurements of one model, the verdicts that follow from them, and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkv._files import write_atomically
from qkv._untrusted import first_line, load_json
from qkv.errors import InputError
from qkv_lab.experiments.evidence import Verdict
from research.sinks.conclude import conclude

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORM = "qkv sinks 1"
"""The form of the files; it changes when a reader of the old form would misread the new one."""


@dataclass(frozen=True)
class Study:
    """The sinks of one model."""

    attrs: Mapping[str, Any]
    """Facts about the run: model, parameters, whether it is causal, versions, seconds."""
    lengths: Mapping[int, Mapping[str, Any]]
    """All measurements by the length of the texts in tokens: see `research.sinks.measure.measure`."""

    @property
    def verdicts(self) -> dict[int, list[Verdict]]:
        """The verdict on each claim, by the length of the texts in tokens."""
        return {n: conclude(dict(found), causal=self.attrs["causal"]) for n, found in self.lengths.items()}

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, lists and strings: the content of the file that `save` writes."""
        return {
            "form": FORM,
            "attrs": dict(self.attrs),
            "verdicts": [{"tokens": n, **_plain(verdict)} for n, found in self.verdicts.items() for verdict in found],
            "lengths": [dict(found) for found in self.lengths.values()],
        }

    def save(self, file: str | Path) -> None:
        """Write measurements and verdicts as JSON."""
        write_atomically(Path(file), json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")

    @staticmethod
    def load(file: str | Path) -> Study:
        """Read a file of `save`; the verdicts follow from its measurements.

        Raises:
            InputError: if the file cannot be read or is none of `save`.
        """
        try:
            data = load_json(Path(file))
        except (OSError, ValueError) as error:
            raise InputError(f"file: cannot read {file} as JSON ({first_line(error)})") from error
        if not isinstance(data, dict) or data.get("form") != FORM:
            raise InputError(f"file is {str(file)!r}, expected one that Study.save wrote, of the form {FORM!r}")
        try:
            found = Study(data["attrs"], {one["tokens"]: one for one in data["lengths"]})
            with np.errstate(invalid="raise", over="raise"):  # a measurement that is infinite or no number
                _ = found.verdicts
        except Exception as error:  # the verdicts read all measurements
            raise InputError(f"file: {str(file)!r} is a damaged study ({first_line(error)})") from error
        return found

    def figure(self) -> Figure:
        """The measurements at the first length: weights, vectors of the first token, and interventions."""
        from research.sinks.figure import figure

        return figure(self)


def _plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON has it: without infinite numbers."""
    made: dict[str, Any] = json.loads(json.dumps(asdict(verdict)), parse_constant=lambda _: None)
    return made
