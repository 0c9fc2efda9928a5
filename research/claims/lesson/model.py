"""The model and the sequences of the lesson's build-along, in our words: d 32, 2 layers of 4 heads, six symbols."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

LENGTH, KINDS, BATCH = 6, 14, 128
VOCABULARY = KINDS + 2
"""Tokens 2 to 15 are symbols, 1 is the separator, 0 is never used."""


class Layer(nn.Module):
    """A pre-norm block with the lesson's initialisation, which also returns its attention weights."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.project = nn.ParameterList(torch.randn(heads, d, d // heads) * 0.02 for _ in range(3))
        self.out = nn.Parameter(torch.randn(heads, d // heads, d) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "n n"]) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        q, k, v = (torch.einsum("bne,hed->bhnd", y, w) for w in self.project)
        hidden = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + hidden).softmax(-1)
        x = x + torch.einsum("bhnd,hde->bne", weights @ v, self.out)
        return x + self.ffn(self.norm2(x)), weights


class Model(nn.Module):
    """The lesson's model: embeddings, blocks, a norm and a linear map. Masks are True where a query may attend."""

    def __init__(self, vocabulary: int, context: int, d: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    def forward(self, ids: Int[Tensor, "b n"], mask: Bool[Tensor, "n n"]) -> tuple[Tensor, list[Tensor]]:
        x, found = self.tokens(ids) + self.places(torch.arange(ids.shape[1])), []
        for layer in self.layers:
            x, weights = layer(x, mask)
            found.append(weights)
        return self.head(self.norm(x)), found


def sequences(size: int, generator: torch.Generator) -> Int[Tensor, "size 13"]:
    """Random symbols, the separator, and the symbols reversed."""
    drawn = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return torch.cat([drawn, torch.ones(size, 1, dtype=torch.long), drawn.flip(1)], 1)


def causal(n: int = 2 * LENGTH) -> Bool[Tensor, "n n"]:
    return torch.ones(n, n, dtype=torch.bool).tril()
