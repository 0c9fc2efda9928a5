"""Imports all checks (one package per source), which registers them in the ledger."""

from __future__ import annotations

import importlib
import pkgutil

SOURCES = ("chapter", "notebook", "lesson", "deep_dive", "overview")


def load() -> None:
    """Import all checks."""
    for source in SOURCES:
        package = importlib.import_module(f"research.claims.{source}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"research.claims.{source}.{module.name}")
