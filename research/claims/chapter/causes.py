"""Checks for section 8.5: when sinks emerge."""

from __future__ import annotations
