"""Sections 3 to 5: projections, scores, softmax, heads."""

from __future__ import annotations

import torch

from ledger import Verdict, claim, holds


@claim("C014", "chapter", "4.2", "For independent parts of mean 0 and variance 1, Var(q · k) = d_k.")
def c014() -> Verdict:
    generator = torch.Generator().manual_seed(0)
    ratio = {}
    for d in (4, 64, 512):
        q, k = torch.randn(2, 20_000, d, generator=generator)
        ratio[d] = ((q * k).sum(-1).var() / d).item()
    found = ", ".join(f"{d}: {r:.3f}" for d, r in ratio.items())
    return holds(all(abs(r - 1) < 0.05 for r in ratio.values()), f"Variance over d_k of 20,000 products, {found}.")
