"""Numbers of SmolLM2-135M-Instruct, from which tests of sentences about a real language model are computed.

qkv profile smollm2 --chat "Why is the sky blue?" --out chat; qkv profile smollm2 --tokens 1024 --out text
python tests/smollm2.py chat/profile.qkv.zip text/profile.qkv.zip > tests/smollm2.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import qkv
from qkv.profiler.data import tables

COLUMNS = ("alpha_first", "alpha_even", "alpha_random", "alpha_repeated", "value_norm_first", "contribution_first")
RESIDUAL = ("largest", "largest_token", "largest_dimension", "median", "massive", "ratio")


def numbers(profile: qkv.Profile) -> dict[str, Any]:
    """The sink table, the largest activations, and the shares of repeated tokens."""
    (stack,) = profile.residual.values()
    names, shares, counts = tables.repeated_shares(profile.data)
    chosen = np.argsort(shares.max(0), kind="stable")[::-1][:3].tolist()
    return {
        "table": {name: [round(x, 3) for x in profile.sinks()[name].tolist()] for name in COLUMNS},
        "tokens": profile.data["key_token"].values[0, :4].tolist(),
        "residual": {name: np.round(stack[name].values[0], 1).tolist() for name in RESIDUAL},
        "limits": {name: stack.attrs[name] for name in ("massive_above", "massive_times_median")},
        "repeated": [[names[at] for at in chosen], np.round(shares[:, chosen], 3).tolist(), counts[chosen].tolist()],
    }


def kept(text: str) -> dict[str, Any]:
    """The numbers of ``"chat"`` (36 tokens) or ``"text"`` (1,024 tokens of Python's standard library)."""
    found: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[text]
    return found


def heads(text: str) -> pd.DataFrame:
    """The sink table of 30 layers × 9 heads."""
    table = pd.DataFrame(kept(text)["table"])
    return table.assign(layer=np.repeat(np.arange(30), 9), head=np.tile(np.arange(9), 30))


def residual(text: str) -> xr.Dataset:
    """The largest activations at each depth."""
    found = kept(text)
    data = {name: np.array(x)[None] for name, x in found["residual"].items()}
    ranked = {name: (("text", "depth", "rank")[: x.ndim], x) for name, x in data.items()}
    return xr.Dataset(ranked, {"depth": np.arange(data["median"].shape[1])}, found["limits"])


if __name__ == "__main__":
    profiles = {name: qkv.Profile.load(file) for name, file in zip(("chat", "text"), sys.argv[1:], strict=True)}
    print(json.dumps({name: numbers(profile) for name, profile in profiles.items()}, separators=(",", ":")))
