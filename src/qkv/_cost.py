"""FLOPs, memory traffic and peak memory of one attention call, for `plan`.

The numbers come from formulas because PyTorch's FLOP counter reports 0 for its fused CPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qkv._engine.call import Call, at_least_float32
from qkv._engine.sizes import sizes
from qkv._engine.tiles import block_status
from qkv.kernels import FORM_WEIGHTS, linear
from qkv.masks import EMPTY, FULL, Tiles


@dataclass(frozen=True)
class Cost:
    """Cost of the forward pass of one call."""

    pairs: int
    """Pairs of query and key that are computed; a partial tile counts half of its pairs."""
    flops: int
    """Multiplications and additions of the two matrix products: q·k and weights·v."""
    bytes: int
    """Minimum memory traffic: q, k, v, the output, the log-sum-exp, and the weights if they are formed."""
    peak: int
    """Estimated memory in bytes beyond the inputs: outputs, copies, tiles."""


def cost(kernel: str, call: Call) -> Cost:
    """The cost of `call` on the kernel of that name."""
    b, h, n_queries, d = call.q.shape
    n_keys, dv = call.v.shape[2:]
    own, wide = call.q.element_size(), at_least_float32(call.q.dtype).itemsize
    pairs = b * h * n_queries * n_keys if kernel in FORM_WEIGHTS else visible_pairs(call)
    inputs = call.q.numel() + call.k.numel() + call.v.numel()
    out = b * h * n_queries * dv
    moved = own * (inputs + out) + wide * b * h * n_queries
    score_flops = 2 * d if call.pairwise is None else 4 * d  # an addition, a function, a product and a sum
    flops = pairs * (score_flops + 2 * dv)
    result = own * out + wide * b * h * n_queries
    if kernel == "linear":
        chunks = -(-n_keys // linear.CHUNK)
        causal = linear.causal(call)
        inside = b * h * n_queries * linear.CHUNK if causal else 0
        pairs = inside
        flops = inside * 2 * (d + dv) + 2 * d * (dv + 1) * (b * h * n_queries + b * call.k.shape[1] * n_keys)
        peak = result + wide * (inputs + out + inside + (b * call.k.shape[1] * chunks * d * dv if causal else 0))
    elif kernel == "eager":
        peak = result + 4 * wide * b * h * n_queries * n_keys
    elif kernel == "reference":
        peak = result + 8 * b * h * n_queries * n_keys
    elif kernel == "tiled":
        table = sizes(call.q.device)
        peak = (
            result
            + wide * (inputs + 2 * out)
            + torch.get_num_threads() * 3 * wide * min(table.heads, h) * table.tile**2
        )
    else:  # flash, flex
        padded = b * h * n_queries * max(d, dv) + b * call.k.shape[1] * n_keys * 2 * max(d, dv) if d != dv else 0
        peak = result + own * padded + torch.get_num_threads() * wide * 2 * 256 * (512 + dv)
    moved += own * b * h * n_queries * n_keys if kernel in FORM_WEIGHTS else 0
    return Cost(pairs, flops, moved, peak)


def visible_pairs(call: Call) -> int:
    """Estimated number of visible pairs: all pairs of FULL tiles and half the pairs of PARTIAL tiles."""
    grid = call.grid
    size = max(64, grid.n_keys // 1024)
    tiles = Tiles.of(grid, size, size)
    status = block_status(call.mask, tiles, grid).expand(grid.batch, grid.heads, -1, -1)
    area = (tiles.q_last - tiles.q_first + 1)[:, None] * (tiles.k_last - tiles.k_first + 1)
    share = torch.where(status == FULL, 1.0, torch.where(status == EMPTY, 0.0, 0.5))
    return int((share.double() * area).sum())
