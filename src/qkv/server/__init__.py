"""The web server behind `qkv view`: profiles and models as pages, numbers and tiles. Nothing of it is imported by the
rest of qkv, and FastAPI only with it."""

from __future__ import annotations
