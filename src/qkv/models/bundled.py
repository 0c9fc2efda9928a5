"""Trained models that come with qkv and qkv-lab; `qkv train` made them, and their settings and logs are beside them."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path

from qkv._packages import LAB, lab_is_missing
from qkv.errors import InputError

NAMES = {
    "qkv-mini": "a causal language model of Python code",
    "qkv-reversal": "reverses six symbols: its heads look at the mirrored position",
    "qkv-translation": "English to French with Bahdanau's attention, in a small grammar",
    "qkv-caption": "captions of small scenes, each word found by looking at the image",
}


def folder_of(name: str) -> Path | None:
    """The folder of a model that comes with qkv or qkv-lab, for `qkv.models.load`; None for any other name.

    Raises:
        InputError: if the model is in qkv-lab, which is not installed.

    >>> folder_of("gpt2") is None
    True
    """
    if name not in NAMES:
        return None
    if name == "qkv-mini":
        return Path(str(files("qkv.models") / "trained" / name))
    if importlib.util.find_spec(LAB) is None:
        raise InputError(lab_is_missing(f"model {name!r}"))
    return Path(str(files("qkv_lab.models") / "trained" / name))
