"""Trial: the lesson's build-along, reversing six symbols with d 32, 2 × 4 heads, Adam at 3e-4 and 4,000 steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LENGTH, KINDS, BATCH = 6, 14, 128
VOCABULARY = KINDS + 2
"""Tokens 2 to 15 are symbols, 1 is the separator, 0 is never used."""
MIRRORS = 0.9
"""A head whose strongest key is the mirrored position at this share of the queries mirrors."""


class Layer(nn.Module):
    """A pre-norm block with the lesson's initialisation, which also returns its attention weights."""

    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.project = nn.ParameterList(torch.randn(heads, d, d // heads) * 0.02 for _ in range(3))
        self.out = nn.Parameter(torch.randn(heads, d // heads, d) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.drop_weights, self.drop_out = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, without: frozenset[int]) -> tuple[Tensor, Tensor]:
        y = self.norm1(x)
        q, k, v = (torch.einsum("bne,hed->bhnd", y, w) for w in self.project)
        hidden = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + hidden).softmax(-1)
        if not mask.any(-1).all():
            weights = weights * mask  # fully masked rows have weights 0
        heads = self.drop_weights(weights) @ v
        if without:
            heads = heads * torch.tensor([float(h not in without) for h in range(heads.shape[1])])[:, None, None]
        x = x + self.drop_out(torch.einsum("bhnd,hde->bne", heads, self.out))
        return x + self.ffn(self.norm2(x)), weights


class Model(nn.Module):
    """The lesson's model: embeddings, blocks, a norm and a linear map. Masks are True where a query may attend."""

    def __init__(
        self, vocabulary: int, context: int, d: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(Layer(d, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)

    def forward(
        self, ids: Tensor, mask: Tensor, without: frozenset[tuple[int, int]] = frozenset()
    ) -> tuple[Tensor, list[Tensor]]:
        x, found = self.tokens(ids) + self.places(torch.arange(ids.shape[1])), []
        for i, layer in enumerate(self.layers):
            x, weights = layer(x, mask, frozenset(h for at, h in without if at == i))
            found.append(weights)
        return self.head(self.norm(x)), found


def sequences(size: int, generator: torch.Generator) -> Tensor:
    """Random sequences (size, 13): symbols, the separator, and the symbols reversed."""
    drawn = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return torch.cat([drawn, torch.ones(size, 1, dtype=torch.long), drawn.flip(1)], 1)


def loss_of(model: Model, ids: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Teacher-forced mean cross-entropy and accuracy of the reversed symbols."""
    logits = model(ids[:, :-1], mask)[0][:, LENGTH:]
    targets = ids[:, LENGTH + 1 :]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, (logits.argmax(-1) == targets).float().mean().item()


@torch.no_grad()
def generated(model: Model, ids: Tensor, mask: Tensor) -> Tensor:
    """Whether each symbol of greedy generation is correct: (size, 6)."""
    said = ids[:, : LENGTH + 1]
    for n in range(LENGTH + 1, 2 * LENGTH + 1):
        said = torch.cat([said, model(said, mask[:n, :n])[0][:, -1:].argmax(-1)], 1)
    return (said[:, LENGTH + 1 :] == ids[:, LENGTH + 1 :]).float()


def causal(n: int = 2 * LENGTH) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def looked_at(model: Model, ids: Tensor) -> dict[str, Any]:
    """Of every head, the share of queries from the separator on whose strongest key is the mirrored position, the
    one that the lesson's analysis asks for, the separator, the token before; and mean distances, and ablations."""
    with torch.no_grad():
        weights = torch.stack(model(ids[:, :-1], causal())[1])  # layers, batch, heads, queries, keys
    strongest = weights[..., LENGTH:, :].argmax(-1).transpose(1, 2).double()  # layers, heads, batch, six queries
    at = torch.arange(LENGTH, 2 * LENGTH)
    mirrored = (strongest == 2 * LENGTH - 1 - at).double().mean((2, 3))
    printed = (strongest[..., 1:] == 2 * LENGTH - at[1:]).double().sum(-1).mean(-1) / LENGTH
    distance = (at[:, None] - torch.arange(2 * LENGTH)).abs()
    apart = (weights[..., LENGTH:, :] * distance).sum(-1).mean((1, 3))

    def accuracy(*without: tuple[int, int]) -> float:
        with torch.no_grad():
            said = model(ids[:, :-1], causal(), frozenset(without))[0][:, LENGTH:].argmax(-1)
        return (said == ids[:, LENGTH + 1 :]).float().mean().item()

    layers, heads = mirrored.shape
    each = [[accuracy((layer, h)) for h in range(heads)] for layer in range(layers)]
    mirrors = [(int(layer), int(h)) for layer, h in (mirrored >= MIRRORS).nonzero()]
    best = divmod(int(mirrored.argmax()), heads)
    return {
        "mirrored": mirrored.tolist(),
        "by_the_lessons_analysis": printed.tolist(),
        "separator": (strongest[..., 1:] == LENGTH).double().mean((2, 3)).tolist(),
        "token_before": (strongest[..., 1:] == at[1:] - 1).double().mean((2, 3)).tolist(),
        "distance": apart.tolist(),
        "best": mirrored.max().item(),
        "best_at": best,
        "without_each": each,
        "without_best": each[best[0]][best[1]],
        "without_mirrors": accuracy(*mirrors),
        "without_layer": [accuracy(*((layer, h) for h in range(heads))) for layer in range(layers)],
    }


def one(seed: int, epochs: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    train, test = sequences(5000, generator), sequences(500, generator)
    model = Model(VOCABULARY, 2 * LENGTH + 1)
    adam, mask = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True), causal()
    curve, total, right = [], 0.0, 0.0
    for epoch in range(epochs):
        parts = train[torch.randperm(len(train), generator=generator)].split(BATCH)
        total = right = 0.0
        for part in parts:
            loss, share = loss_of(model, part, mask)
            adam.zero_grad()
            loss.backward()
            adam.step()
            total, right = total + loss.item(), right + share * len(part) / len(train)
        if epoch == 0 or epoch % 10 == 9:
            with torch.no_grad():
                curve.append([epoch + 1, total, right, loss_of(model, test, mask)[1]])
    said = generated(model, test, mask)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": epochs * len(parts),
        "epoch, sum of losses, training accuracy, test accuracy": curve,
        "train_accuracy": right,
        "test_accuracy": curve[-1][-1],
        "generated": said.mean().item(),
        "whole_sequences": said.prod(1).mean().item(),
    } | looked_at(model, test)


def run(quick: bool = False) -> dict[str, Any]:
    """For each seed: accuracies, scores of the heads, and accuracies with heads ablated."""
    return {"seeds": {str(seed): one(seed, 1 if quick else 100) for seed in range(1 if quick else 3)}}
