"""Trial: training without the causal mask, and with a mask that excludes the query's own key, on reversal and on a
Markov chain, whose next symbol can only be known from the future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkv.ledger.trials.lesson_reversal import LENGTH, VOCABULARY, Model, causal, generated, loss_of, sequences

MASKS = {
    "causal": causal(),
    "none": torch.ones(2 * LENGTH, 2 * LENGTH, dtype=torch.bool),
    "strict": causal().tril(-1),
}
STATES = 8
NEXT = (2 * torch.randn(STATES, STATES, generator=torch.Generator().manual_seed(7))).softmax(1)
"""NEXT[a, b]: how likely b is after a."""


def chains(size: int, generator: torch.Generator) -> Tensor:
    """Sequences of 13 states of a Markov chain."""
    ids = [torch.randint(STATES, (size, 1), generator=generator)]
    for _ in range(2 * LENGTH):
        ids.append(torch.multinomial(NEXT[ids[-1][:, 0]], 1, generator=generator))
    return torch.cat(ids, 1)


def chain_loss(model: Model, ids: Tensor, mask: Tensor) -> Tensor:
    """The cross-entropy of each next state, (size, 12), from one teacher-forced forward pass."""
    logits = model(ids[:, :-1], mask)[0]
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def trained(
    mask: Tensor, model: Model, draw: Callable[..., Tensor], loss_of: Callable[..., Tensor], steps: int, seed: int
) -> float:
    """Train a model; returns the mean loss over the last tenth of the steps."""
    generator = torch.Generator().manual_seed(1000 + seed)
    adam, losses = torch.optim.Adam(model.parameters(), lr=2e-3), []
    for _ in range(steps):
        loss = loss_of(model, draw(64, generator), mask)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def on_reversal(mask: Tensor, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model(VOCABULARY, 2 * LENGTH, d=64)
    loss = trained(mask, model, sequences, lambda *a: loss_of(*a)[0], steps, seed)
    test = sequences(500, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        accuracy = loss_of(model, test, mask)[1]
    return {"training_loss": loss, "fed_with_the_truth": accuracy, "alone": generated(model, test, mask).mean().item()}


def on_chains(mask: Tensor, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model(STATES, 2 * LENGTH, d=64)
    loss = trained(mask, model, chains, lambda *a: chain_loss(*a).mean(), steps, seed)
    test = chains(500, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        fed = chain_loss(model, test, mask).mean().item()
        alone = [
            chain_loss(model, test[:, : n + 1], mask[:n, :n])[:, -1].mean().item() for n in range(1, 2 * LENGTH + 1)
        ]
    return {"training_loss": loss, "fed_with_the_truth": fed, "alone": sum(alone) / len(alone), "alone_by_place": alone}


def run(quick: bool = False) -> dict[str, Any]:
    """By task, mask and seed: with the truth fed in, and alone, knowing only what is before. Accuracies for reversal
    (the model writes all six symbols), nats a state for chains (it reads the true states up to each place)."""
    at = torch.linalg.matrix_power(NEXT, 100)[0]
    floor = -(at[:, None] * NEXT * NEXT.log()).sum().item()
    tasks = {"reversal": (on_reversal, 400, ("causal", "none")), "chains": (on_chains, 250, tuple(MASKS))}
    seeds = range(1 if quick else 3)
    return {"entropy_of_chains": floor, "uniform": torch.tensor(float(STATES)).log().item()} | {
        task: {name: {str(seed): one(MASKS[name], seed, 3 if quick else steps) for seed in seeds} for name in names}
        for task, (one, steps, names) in tasks.items()
    }
