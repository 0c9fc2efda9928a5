"""Trained models that come with the package; `qkv train` made them, and their settings and logs are beside them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

NAMES = {
    "qkv-mini": "a causal language model of Python code",
    "qkv-reversal": "reverses six symbols: its heads look at the mirrored position",
    "qkv-translation": "English to French with Bahdanau's attention, in a small grammar",
    "qkv-caption": "captions of small scenes, each word found by looking at the image",
}


def folder_of(name: str) -> Path | None:
    """The folder of a model that comes with the package, for `qkv.models.load`; None for any other name.

    >>> folder_of("gpt2") is None
    True
    """
    return Path(str(files("qkv.models") / "trained" / name)) if name in NAMES else None
