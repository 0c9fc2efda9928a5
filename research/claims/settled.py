"""Registers all claims in the ledger: those with a check (one package per source), and those whose verdict is data."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from research.claims.claim import SOURCES, Claim, Verdict, register
from research.claims.models import everywhere
from research.claims.settle import cited, experiment, together, unseen

DATA = Path(__file__).parent / "claims.toml"


@functools.cache
def load() -> None:
    """Register all claims."""
    for source in SOURCES:
        package = importlib.import_module(f"research.claims.{source.replace(' ', '_')}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for text in DATA.read_text(encoding="utf-8").split("[[claim]]")[1:]:
        fields = tomllib.loads(text)
        register(Claim(fields["id"], fields["source"], fields["section"], fields["text"], Entry(fields, text.strip())))


@dataclass(frozen=True)
class Entry:
    """The check of a claim whose verdict is data: an entry of claims.toml."""

    fields: dict[str, object]
    code: str
    """The entry as it stands in the file."""

    def __call__(self) -> Verdict:
        match self.fields:
            case {"experiment": str(name), "id": str(id_)}:
                return experiment(str(self.fields.get("of", id_)), name, self.fields.get("wording"))  # type: ignore[arg-type]
            case {"experiments": [*names], "id": str(id_)}:
                return together(str(self.fields.get("of", id_)), *map(str, names))
            case {"models": True, "id": str(id_)}:
                return everywhere(id_)
            case {"cited": str(kind), "verdict": str(text), "links": [*links]}:
                return cited(kind, text, *map(str, links))
            case {"unseen": str(text), **rest}:
                return unseen(text, *map(str, rest.get("links", ())))  # type: ignore[call-overload]
        raise AssertionError(f"{self.fields['id']}: an entry without a verdict")
