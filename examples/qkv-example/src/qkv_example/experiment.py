"""An experiment of the lab: what temperature does to the effective number of keys."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import qkv
from qkv.lab.experiments import Conclusion, Experiment, Results, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPERATURES = (0.5, 1.0, 2.0, 4.0)


class Temperature(Experiment):
    """Attention of random vectors under softmax of several temperatures. Nothing is trained."""

    name = "temperature"
    question = "Does a higher temperature spread attention over more keys?"
    claims = ("EXAMPLE-1",)

    def compute(self, quick: bool) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The effective number of keys at each temperature, one per seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for seed in range(2 if quick else 5):
            q, k = torch.randn(2, 1, 1, 64, 16, generator=torch.Generator().manual_seed(seed))
            for temperature in TEMPERATURES:
                statistics = qkv.measure(q, k, normalizer=qkv.normalizers.Softmax(temperature=temperature))
                found.setdefault(f"{temperature:g}", []).append({"keys": statistics.effective_keys.mean().item()})
        return found

    def conclude(self, results: Results) -> Conclusion:
        """Holds if the mean over seeds rises with every step of the temperature."""
        means = [float(np.mean(x)) for x in results.by_variant("measured.keys").values()]
        text = "Effective keys of 64 at temperatures " + ", ".join(
            f"{t:g}: {mean:.1f}" for t, mean in zip(TEMPERATURES, means, strict=True)
        )
        rises = all(a < b for a, b in itertools.pairwise(means))
        title = "Temperature spreads attention" if rises else "Temperature does not always spread attention"
        return Conclusion([Verdict("EXAMPLE-1", "holds" if rises else "does not hold", text)], title, f"{text}.")

    def figure(self, results: Results) -> Figure:
        """Effective keys against temperature, a point for each seed."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        for temperature, keys in results.by_variant("measured.keys").items():
            axes.plot([float(temperature)] * len(keys), keys, "o", color="C0", alpha=0.6)
        axes.set(xlabel="temperature", ylabel="effective keys of 64", ylim=(0, 64), title=self.conclude(results).title)
        return figure
