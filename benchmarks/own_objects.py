"""The cost of normalizers other than softmax: those of the package, a user's function, and a user's searched level.

``python -m benchmarks own`` runs it all; ``python -m benchmarks.own_objects TOKENS`` is one forward, for its memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import qkv
from benchmarks.mechanisms.run import slope
from benchmarks.mechanisms.timing import alone, alternating, median_ratio, resident
from benchmarks.timing import THREADS
from qkv.normalizers import EluPlusOne, Entmax, Normalizer, Pointwise, ReLU, Sigmoid, SumToOne

TOKENS, HEADS, DIM = 4096, 8, 64
CAUSAL = qkv.masks.Causal()


class OwnSigmoid(Pointwise):
    """σ(s − 8), as a user writes it."""

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores - 8)


class SoftplusSquared(SumToOne):
    """softplus(s − level)²."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return softplus(scores - level) ** 2


NORMALIZERS: dict[str, Normalizer | None] = {
    "softmax": None,
    "sigmoid": Sigmoid(-8.0),
    "ReLU": ReLU(),
    "ELU + 1": EluPlusOne(),
    "entmax": Entmax(1.5),
    "own sigmoid": OwnSigmoid(),
    "own softplus²": SoftplusSquared(),
}


def tensors(tokens: int, *, grad: bool) -> list[Tensor]:
    """q, k and v, (1, heads, tokens, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3))
    return [x.requires_grad_(grad) for x in made]


def own(repeats: int = 9) -> dict[str, Any]:
    """Causal, 8 heads × 64, float32, 4,096 tokens; memory from 2,048 to 16,384."""
    torch.set_num_threads(THREADS)
    inputs, leaves = tensors(TOKENS, grad=False), tensors(TOKENS, grad=True)

    def forward(normalizer: Normalizer | None) -> None:
        qkv.attend(*inputs, mask=CAUSAL, normalizer=normalizer)

    def both(normalizer: Normalizer | None) -> None:
        torch.autograd.grad(qkv.attend(*leaves, mask=CAUSAL, normalizer=normalizer).sum(), leaves)

    ways = {"forward": forward, "both": both}
    seconds = {
        way: alternating({name: lambda x=x, run=run: run(x) for name, x in NORMALIZERS.items()}, repeats)  # type: ignore[misc]
        for way, run in ways.items()
    }
    runs = {n: alone("benchmarks.own_objects", n) for n in (2048, 4096, 8192, 16384)}
    grown = {n: run["peak"] - run["base"] for n, run in runs.items()}
    return {
        "seconds": seconds,
        "grown": grown,
        **{
            f"time: {name} / softmax, {label}": median_ratio(seconds[way], name, "softmax")
            for name in NORMALIZERS
            for way, label in (("forward", "forward"), ("both", "both ways"))
            if name != "softmax"
        },
        "exponent of memory, own softplus²": slope(grown),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    qkv.attend(*tensors(256, grad=False), mask=CAUSAL, normalizer=SoftplusSquared())  # imports are not counted
    base = resident("VmRSS")
    qkv.attend(*tensors(int(sys.argv[1]), grad=False), mask=CAUSAL, normalizer=SoftplusSquared())
    print(json.dumps({"base": base, "peak": resident()}))


if __name__ == "__main__":
    main()
