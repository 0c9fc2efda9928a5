"""Do budgets for each layer, advised from one profile, beat equal ones at equal bytes? On SmolLM2.

    python -m research.budgets sinks 32,64

The advice reads two texts with the full cache. It takes what a policy costs each layer at some budgets, and gives keys
to the layers where they save most, while the sum stays that of equal budgets. The cost is taken in three ways:
attention on evicted keys; the change of the attention's output, relative to the residual stream; or relative to the
output. Then the model reads eight other texts of 512 tokens with these budgets, and with equal ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import qkv
from qkv.cache.evicting import policies_of
from qkv.cli.evict import FILES
from qkv.profiler import corpora
from qkv.profiler.analyses.eviction import held_keys, mass_lost, nats_of
from qkv.profiler.capture.datasets import calls_of
from qkv.profiler.data.frames import confidence

GRID = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
TOKENS = 512
WAYS = ("attention", "output over residual", "output")


def curves(
    model: torch.nn.Module, ids: Int[Tensor, "b n"], policy: str
) -> Mapping[str, Float[np.ndarray, "layers grid"]]:
    """What a policy costs each layer at each budget, by each way."""
    residual = dict[int, Tensor]()
    layers: torch.nn.ModuleList = model.model.layers  # type: ignore[assignment, union-attr]
    hooks = [
        layer.register_forward_pre_hook(lambda _, got, at=at: residual.update({at: got[0]}))
        for at, layer in enumerate(layers)
    ]
    calls = calls_of(model, {"input_ids": ids})
    for hook in hooks:
        hook.remove()
    found = {way: np.zeros((len(layers), len(GRID))) for way in WAYS}
    for observed in calls:
        call, at = observed.call, observed.layer
        size = residual[at].square().sum(-1)

        def output(mask: qkv.masks.Mask) -> Tensor:
            heads = qkv.attend(call.q, call.k, call.v, mask=mask)  # noqa: B023
            return layers[at].self_attn.o_proj(heads.transpose(1, 2).flatten(2))  # type: ignore[operator, union-attr] # noqa: B023

        whole = output(qkv.masks.Causal())
        for column, keys in enumerate(GRID):
            [cache] = policies_of([policy], keys).values()
            lost = mass_lost(observed, {(policy, keys): cache.fresh()})[policy, keys]
            change = (output(qkv.masks.Causal() & held_keys(call, cache)) - whole).square().sum(-1)
            parts = (lost, change / size, change / whole.square().sum(-1))
            for way, part in zip(WAYS, parts, strict=True):
                found[way][at, column] = float(part.mean())
    return found


def advised(cost: Float[np.ndarray, "layers grid"], mean: int) -> list[int]:
    """Budgets with this mean: four keys at a time go to the layer in which they save most."""
    grid = np.log([*GRID, TOKENS])
    keys = [max(8, mean // 4)] * len(cost)

    def at(layer: int, budget: int) -> float:
        return float(np.interp(np.log(budget), grid, [*cost[layer], 0.0]))

    while sum(keys) < mean * len(keys):
        saved = [at(layer, budget) - at(layer, budget + 4) for layer, budget in enumerate(keys)]
        keys[int(np.argmax(saved))] += 4
    return keys


@torch.no_grad()
def main(policy: str, means: list[int]) -> None:
    model, tokenizer = qkv.load("smollm2", head=True)
    other = (text[:8192] for text in corpora.load("library").texts)
    long = [
        ids[:, :TOKENS]
        for text in other
        if (ids := tokenizer(text, return_tensors="pt")["input_ids"]).shape[1] >= TOKENS
    ]
    texts = torch.cat(long[:FILES])
    costs = curves(model, torch.cat(long[FILES:]), policy)
    full = np.array(nats_of(model, texts, None, lambda tokens: None))
    for mean in means:
        equal = None
        for way in ("equal", *WAYS):
            keys = [mean] * len(costs[WAYS[0]]) if way == "equal" else advised(costs[way], mean)
            caches = [policies_of([policy], budget)[policy] for budget in keys]
            nats = np.array(nats_of(model, texts, caches, lambda tokens: None))
            rise, equal = nats - full, nats if equal is None else equal
            sizes = [TOKENS - 1] * len(nats)
            change, low, high = confidence((nats - equal).tolist(), sizes=sizes)
            print(
                f"{policy}, {mean} keys in the mean, {way}: rise {rise.sum() / sum(sizes):+.3f} nats, "
                f"over equal budgets {change:+.3f} [{low:+.3f}, {high:+.3f}]; keys {keys}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], [int(x) for x in sys.argv[2].split(",")])
