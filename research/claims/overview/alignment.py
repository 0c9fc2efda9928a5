"""Checks on attention as alignment: weights of a trained translator and of an untrained one."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from qkv.models import checkpoint, load
from qkv_lab.models import RNNSeq2Seq
from qkv_lab.translation import padded, read_vocabulary, translate
from research.claims import Verdict, claim, experiment, false, holds, only_when
from research.claims.deep_dive.efficient import listed, path
from research.claims.results import result

BOTTLENECK = "[experiment `bottleneck`](../experiments/README.md#bottleneck)"


def links() -> dict[str, np.ndarray]:
    """For each architecture with attention: by run and head, the share of words whose strongest source is true."""
    found = {name: variant["results"] for name, variant in result("bottleneck")["variants"].items()}
    return {
        name: np.stack([np.ravel(run["check"]["accuracy"]) for run in runs])
        for name, runs in found.items()
        if "check" in runs[0]
    }


def bahdanau_demo() -> torch.Tensor:
    """The weights that its demonstration prints: untrained, seed 42, scaled by 0.01; one row per target word."""
    rng = np.random.RandomState(42)
    encoder = [rng.randn(8, 1) for _ in range(4)]
    on_keys, on_query, vector = rng.randn(8, 8) * 0.01, rng.randn(8, 8) * 0.01, rng.randn(8, 1) * 0.01
    queries = [rng.randn(8, 1) for _ in range(4)]
    rows = [[(vector.T @ np.tanh(on_keys @ h + on_query @ q)).item() for h in encoder] for q in queries]
    return torch.tensor(rows, dtype=torch.float64).softmax(-1)


@cache
def entropies() -> tuple[float, float]:
    """Mean entropy divided by that of uniform weights, for the bundled translator and for an untrained one."""
    english, french = "the black cat sat on the mat", "le chat noir était assis sur le tapis"
    trained = load("qkv-translation")
    torch.manual_seed(0)
    fresh = RNNSeq2Seq(trained.config).eval()
    words = read_vocabulary(checkpoint.folder_of("qkv-translation"))
    numbers = [padded([v.numbers(text.split())]) for v, text in zip(words, (english, french), strict=True)]
    found = []
    for model in (trained, fresh):
        with torch.no_grad():
            weights = model.alignments(*numbers)[0].double()
        found.append(float(-torch.xlogy(weights, weights).sum(-1).mean() / math.log(weights.shape[-1])))
    return found[0], found[1]


@claim("1", "When “noir” is generated, the weight is on “black”.")
def c325() -> Verdict:
    found = translate("qkv-translation", "the black cat sat on the mat")
    weight = found.weights[found.target.index("noir"), found.source.index("black")].item()
    trained = experiment("C325", "bottleneck", f"{weight:.2f} of it, in a model trained here.")
    return holds(weight > 0.9 and trained.kind == "holds", trained.text, *trained.by)


@claim("1", "Between any two positions the path is O(1) long in self-attention, O(n) in a recurrent network.")
def c327() -> Verdict:
    lengths = (8, 16, 32)
    chain = [path(torch.ones(n, n).tril().triu(-1).bool(), 0, n - 1) for n in lengths]
    direct = [path(torch.ones(n, n).bool(), 0, n - 1) for n in lengths]
    return holds(
        chain == [n - 1 for n in lengths] and direct == [1, 1, 1],
        f"From the first to the last of {listed(lengths)} positions: {listed(direct)} and {listed(chain)} steps.",
    )


@claim("1", "Attention is differentiable and can be trained end to end.")
def c328() -> Verdict:
    from qkv import attend
    from qkv.masks import Causal

    torch.manual_seed(0)
    inputs, towards = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64), torch.randn(1, 2, 4, 3, dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (attend(*x, mask=Causal()) * towards).sum()

    leaf = inputs.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(loss(leaf), leaf)
    steps = 1e-6 * torch.eye(inputs.numel(), dtype=torch.float64).view(-1, *inputs.shape)
    differences = torch.stack([(loss(inputs + step) - loss(inputs - step)) / 2e-6 for step in steps])
    error = (slopes.flatten() - differences).abs().max().item()
    least = slopes.abs().amax((1, 2, 3, 4)).min().item()
    return holds(
        error < 1e-8 and least > 0.01,
        f"Gradients in queries, keys and values agree with finite differences, with a causal mask too, to {error:.0e}.",
    )


@claim("1", "What attention learns often matches human intuition.")
def c329() -> Verdict:
    """It holds if in most of the models a head's strongest word is a true counterpart for 0.9 of the words."""
    by_head = links()
    best = {name: found.max(1).mean() for name, found in by_head.items()}
    worst = by_head["transformer"].min(1).mean()
    seeds = min(len(found) for found in by_head.values())
    return holds(
        sum(share >= 0.9 for share in best.values()) > len(best) / 2,
        "Against the true alignment of a small grammar, the strongest source word is right for this share of words, in "
        f"the best head (means of at least {seeds} runs): {', '.join(f'{name} {x:.2f}' for name, x in best.items())}. "
        f"Not in every head: the Transformer's worst reaches {worst:.2f}.",
        BOTTLENECK,
    )


@claim("4 Bahdanau", "The demonstration shows the model learning to focus on the relevant words.")
def c350() -> Verdict:
    weights = bahdanau_demo()
    low, high = weights.min().item(), weights.max().item()
    return false(
        high < 0.251 and low > 0.249,
        f"Nothing is trained in it, and it prints 0.25 for every word and every target ({low:.4f} to {high:.4f}): "
        "random weights times 0.01 make scores of nearly 0. Trained models do focus (C325).",
    )


@claim("4 Bahdanau", "In a trained model the alignments would be much sharper.")
def c351() -> Verdict:
    trained, fresh = entropies()
    return holds(
        trained < fresh / 2,
        f"Entropy over that of even weights, of Bahdanau's attention in `qkv-translation`: {trained:.2f} trained, "
        f"{fresh:.2f} with initial weights. It holds if it is less than half.",
    )


@claim("4 Seq2Seq", "The model uses attention to focus on the relevant source words.")
def c364() -> Verdict:
    trained, fresh = entropies()
    return only_when(
        trained < 0.3 and fresh > 0.9,
        f"Once trained, which its demonstration is not. Entropy over that of even weights, in our translator with "
        f"Bahdanau's attention: {fresh:.2f} with initial weights, {trained:.2f} trained.",
    )
