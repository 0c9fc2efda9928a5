"""Trial: hard attention learns to look up a value, by backpropagation, a straight-through gradient, or REINFORCE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qkv.ledger.trials.dive_scores import SEEDS, Lookup, batch
from qkv.normalizers import Hard
from qkv.scores import Dot

KEYS, SIZE = 4, 32
Hidden = tuple[Tensor, Tensor, Tensor]


def parts(model: Lookup, asked: Hidden) -> Hidden:
    """Scores (b, keys), values (b, keys, 64), and chosen keys by the largest score (b,)."""
    query, keys, values = asked
    q, k = (model.queries @ model.w_q)[query], (model.keys @ model.w_k)[keys]
    scores = (k @ q[:, :, None])[..., 0] / SIZE**0.5
    return scores, model.values(values), scores.argmax(-1)


def taken(model: Lookup, values: Tensor, chosen: Tensor) -> Tensor:
    return model.out(values[torch.arange(len(chosen)), chosen])


def plain(model: Lookup, asked: Hidden, answer: Tensor) -> Tensor:
    """Only the best key; the scores get no gradient."""
    _, values, chosen = parts(model, asked)
    return nn.functional.cross_entropy(taken(model, values, chosen), answer)


def straight_through(model: Lookup, asked: Hidden, answer: Tensor) -> Tensor:
    """Only the best key, with the gradient of softmax (straight-through)."""
    return nn.functional.cross_entropy(model(*asked), answer)


def reinforce(model: Lookup, asked: Hidden, answer: Tensor) -> Tensor:
    """A key sampled from the softmax of scores, trained by REINFORCE (Xu et al. 2015)."""
    scores, values, _ = parts(model, asked)
    draw = torch.distributions.Categorical(logits=scores)
    chosen = draw.sample()
    cost = nn.functional.cross_entropy(taken(model, values, chosen), answer, reduction="none")
    less = (cost - cost.mean()).detach()
    return (cost + less * draw.log_prob(chosen)).mean()


def learn(loss: Callable[[Lookup, Hidden, Tensor], Tensor], seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    model = Lookup(SIZE, lambda _: Dot(), Hard())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        asked, answer = batch(64, KEYS, generator)
        optimizer.zero_grad()
        loss(model, asked, answer).backward()
        optimizer.step()
    asked, answer = batch(2000, KEYS, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        return round((model(*asked).argmax(-1) == answer).double().mean().item(), 4)


def run(quick: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"keys": KEYS, "steps": 3 if quick else 1500, "accuracy": {}}
    for name, loss in (("plain", plain), ("straight-through", straight_through), ("REINFORCE", reinforce)):
        found["accuracy"][name] = [learn(loss, seed, found["steps"]) for seed in SEEDS]
    return found
