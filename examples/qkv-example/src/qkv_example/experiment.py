"""An experiment of the lab: what temperature does to the effective number of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

import qkv
from qkv_lab.experiments import Criterion, Effect, Experiment, Results

TEMPERATURES = ("0.5", "1", "2", "4")


class Temperature(Experiment):
    """Attention of random vectors under softmax of several temperatures. Nothing is trained."""

    name = "temperature"
    question = "Does a higher temperature spread attention over more keys?"
    criteria = (
        Criterion("EXAMPLE-1", "2026-11-23", "Effective keys of 64 at a temperature minus those at half of it", 1.0),
    )

    def compute(self, seed: int, quick: bool) -> Mapping[str, Mapping[str, Any]]:
        """The effective number of keys at each temperature."""
        q, k = torch.randn(2, 1, 1, 64, 16, generator=torch.Generator().manual_seed(seed))
        found = {}
        for temperature in TEMPERATURES:
            statistics = qkv.measure(q, k, normalizer=qkv.normalizers.Softmax(temperature=float(temperature)))
            found[temperature] = {"keys": statistics.effective_keys.mean().item()}
        return found

    def effects(self, results: Results) -> Mapping[str, Sequence[Effect]]:
        """One effect for each doubling of the temperature; the claim says that each of them spreads attention."""
        doublings = [
            Effect(f"from {low} to {high}", results.differences(high, low, "measured.keys"))
            for low, high in pairwise(TEMPERATURES)
        ]
        return {"EXAMPLE-1": doublings}
