"""One attention head that looks values up by their keys, its questions, and three ways to train hard attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor, nn

import qkv
from qkv.normalizers import Normalizer
from qkv.scores import Score
from qkv_lab.experiments.small import fit
from qkv_lab.task import Training

SYMBOLS, WIDTH, BATCH, TESTED = 64, 64, 64, 2000
Asked = tuple[Int[Tensor, " b"], Int[Tensor, "b keys"], Int[Tensor, "b keys"]]
"""The symbol asked for, the keys, and their values."""


class Lookup(nn.Module):
    """One head: given pairs of key and value, predict the value whose key the query asks for.

    Which query symbol asks for which key symbol is learnt. Queries and keys start with variance 1 in each dimension.
    """

    def __init__(
        self, size: int, score: Callable[[Lookup], Score], normalizer: Normalizer | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self.queries, self.keys = (nn.Parameter(torch.randn(SYMBOLS, size)) for _ in range(2))
        self.w_q, self.w_k = (nn.Parameter(torch.randn(size, size) / size**0.5) for _ in range(2))
        self.values, self.out = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, SYMBOLS)
        self.vector = nn.Parameter(torch.randn(size) / size**0.5)  # of the additive score
        self.score, self.normalizer = score, normalizer

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = (self.queries @ self.w_q)[query][:, None, None]
        k = (self.keys @ self.w_k)[keys][:, None]
        v = self.values(values)[:, None]
        found = qkv.attend(q, k, v, score=self.score(self), normalizer=self.normalizer, kernel="eager")
        assert isinstance(found, Tensor)
        out: Tensor = self.out(found[:, 0, 0])
        return out

    def logits(self, query: Tensor, keys: Tensor) -> Tensor:
        """The scaled dot products of queries and keys, (b, keys)."""
        q, k = (self.queries @ self.w_q)[query], (self.keys @ self.w_k)[keys]
        return (k @ q[:, :, None])[..., 0] / q.shape[-1] ** 0.5


def questions(size: int, keys: int, generator: torch.Generator) -> tuple[Asked, Int[Tensor, " b"]]:
    """Random questions: queries (size,), distinct keys (size, keys), their values; and the values asked for.

    >>> (query, keys, values), answer = questions(3, 5, torch.Generator().manual_seed(0))
    >>> keys.shape, bool((values[keys == query[:, None]] == answer).all())
    (torch.Size([3, 5]), True)
    """
    chosen = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :keys]
    values = torch.randint(SYMBOLS, (size, keys), generator=generator)
    at = torch.randint(keys, (size,), generator=generator)
    row = torch.arange(size)
    return (chosen[row, at], chosen, values), values[row, at]


def cross_entropy(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of a model that answers with all its weights."""
    return nn.functional.cross_entropy(model(*asked), answer)


def learn(
    model: Lookup,
    seed: int,
    *,
    keys: int,
    steps: int,
    loss: Callable[[Lookup, Asked, Tensor], Tensor] = cross_entropy,
) -> dict[str, float]:
    """Train a model; ``accuracy`` on 2,000 new questions."""
    generator = torch.Generator().manual_seed(seed)
    training = Training(steps=steps, warmup=0, decay="none", weight_decay=0.0, clip=0.0, beta2=0.999)
    fit(model, lambda _: loss(model, *questions(BATCH, keys, generator)), training)
    asked, answer = questions(TESTED, keys, torch.Generator().manual_seed(10_000 + seed))
    with torch.no_grad():
        return {"accuracy": (model(*asked).argmax(-1) == answer).double().mean().item()}


def straight_through(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the best key's value, with the gradient of softmax: that of `Hard`."""
    return cross_entropy(model, asked, answer)


def plain(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the best key's value by plain backpropagation: the scores get no gradient."""
    query, keys, values = asked
    chosen = model.logits(query, keys).argmax(-1)
    return nn.functional.cross_entropy(_taken(model, values, chosen), answer)


def reinforce(model: Lookup, asked: Asked, answer: Tensor) -> Tensor:
    """The loss of the value of a key that is sampled from the softmax, and REINFORCE for it (Xu et al. 2015)."""
    query, keys, values = asked
    draw = torch.distributions.Categorical(logits=model.logits(query, keys))
    chosen = draw.sample()
    cost = nn.functional.cross_entropy(_taken(model, values, chosen), answer, reduction="none")
    return (cost + (cost - cost.mean()).detach() * draw.log_prob(chosen)).mean()


def _taken(model: Lookup, values: Tensor, chosen: Tensor) -> Tensor:
    """The answer from the value of one key of each list."""
    found: Tensor = model.out(model.values(values[torch.arange(len(chosen)), chosen]))
    return found
