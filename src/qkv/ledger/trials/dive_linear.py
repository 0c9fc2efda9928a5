"""Trial: softmax and linear attention look up one of many pairs, with head dimension 16."""

from __future__ import annotations

from typing import Any

import torch

from qkv.features import elu_plus_one
from qkv.ledger.trials.dive_scores import SEEDS, Lookup, learn
from qkv.normalizers import Identity
from qkv.scores import Dot, Features

SIZE, KEYS = 16, (4, 16, 48)


def run(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"size": SIZE, "steps": 3 if quick else 800, "accuracy": {"softmax": {}, "linear": {}}}
    for keys in KEYS:
        for name in ("softmax", "linear"):
            runs = []
            for seed in SEEDS:
                torch.manual_seed(seed)
                if name == "softmax":
                    model = Lookup(SIZE, lambda _: Dot())
                else:
                    model = Lookup(SIZE, lambda _: Features(elu_plus_one), Identity("sum"))
                runs.append(learn(model, seed, keys=keys, steps=found["steps"]))
            found["accuracy"][name][str(keys)] = runs
    return found
