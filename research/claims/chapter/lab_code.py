"""What the code of labs 2, 4 and 5 does, written in our own words: checks run it and compare it with qkv."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LabAttention(nn.Module):
    """Lab 2's layer of (batch, n, width): all of it projected, split into heads; returns the output and weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        assert width % heads == 0, f"{width} is not divisible by {heads}"
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (into_heads(part(x), self.heads) for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:  # 1 where a query may look
            scores = scores.masked_fill(mask == 0, -torch.inf)
        weights = scores.softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def into_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, n, width) to (batch, heads, n, width // heads), by a view, as lab 2 does it."""
    batch, n, width = x.shape
    return x.view(batch, n, heads, width // heads).transpose(1, 2)


class LabBlock(nn.Module):
    """Lab 5's block, without its dropout: normalise, attend, add; normalise, feed forward, add."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = LabAttention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.before_attention(x), mask)[0]
        return x + self.feed_forward(self.before_feed_forward(x))


class LabModel(nn.Module):
    """Lab 5's model, without its dropout: tables of tokens and positions, blocks, a norm, logits by the tokens.

    All parameters have torch's initial values, as in the lab: tables from N(0, 1).
    """

    def __init__(self, vocab: int, width: int = 256, heads: int = 4, layers: int = 4, context: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(LabBlock(width, heads, 4 * width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(n))
        for block in self.blocks:
            x = block(x, torch.ones(n, n).tril())
        return self.norm(x) @ self.tokens.weight.T

    def loss(self, ids: Tensor) -> Tensor:
        """The mean cross-entropy of each token but the first, in nats."""
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def lab_score(weights: Tensor, threshold: float = 0.3) -> float:
    """Lab 4's sink score of (head, n, n) weights: the share of column 0, without its first row, above the threshold."""
    _heads, _queries, _keys = weights.shape
    return (weights[:, 1:, 0] > threshold).double().mean().item()


def sigmoid_experiment(size: int = 64, n: int = 32) -> Tensor:
    """The weights of lab 4's experiment, (1, n, n): no heads, and a first key that is twice the mean query."""
    q, k = torch.randn(2, 1, n, size)
    k[0, 0] = 2 * q.mean((0, 1))
    scores = (q @ k.mT / size**0.5).masked_fill(torch.ones(n, n).tril() == 0, -torch.inf)
    return scores.softmax(-1)
