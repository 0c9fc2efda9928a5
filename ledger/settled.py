"""All checks: a package a source, a file a subject. Importing them enters them into the ledger."""

from __future__ import annotations

import importlib
import pkgutil

SOURCES = ("chapter", "notebook", "lesson", "deep_dive", "overview")


def load() -> None:
    """Enter all claims."""
    for source in SOURCES:
        package = importlib.import_module(f"ledger.{source}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"ledger.{source}.{module.name}")
