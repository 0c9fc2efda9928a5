"""Checks of Lab 5: the number of parameters of a Transformer, and a learnt token before the text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkv_lab.check.hints import draw, expect
from qkv_lab.check.verdict import Wrong, judge


def parameter_count(answer: Callable[..., int]) -> bool:
    """Lab 5: a formula for the number of parameters of the chapter's Transformer.

    Attention has four matrices without biases, the feed-forward layer two matrices with biases. Each block has two
    layer norms and the model one more, each with gain and bias. There is an embedding table for tokens and one for
    positions. If `tied`, the output matrix is the token table; else it is another matrix of that size, without bias.

    Args:
        answer: ``answer(vocab, d_model, layers, d_ff, context, tied=True)`` returns an int.

    >>> def right(vocab, d, layers, d_ff, context, tied=True):
    ...     block = 4 * d * d + (2 * d * d_ff + d_ff + d) + 2 * 2 * d
    ...     return (vocab if tied else 2 * vocab) * d + context * d + layers * block + 2 * d
    >>> parameter_count(right)
    ✓ the defaults of the chapter
    ✓ other sizes
    ✓ an untied output matrix
    True
    """

    def check(vocab: int, d: int, layers: int, d_ff: int, context: int, tied: bool) -> None:
        right = _count(vocab, d, layers, d_ff, context, tied)
        passed = (vocab, d, layers, d_ff, context) if tied else (vocab, d, layers, d_ff, context, tied)
        got = answer(*passed)
        if isinstance(got, bool) or not isinstance(got, int):
            raise Wrong(f"it returns {type(got).__name__}, expected a whole number (int)")
        missing = {
            "the biases of the feed-forward layers are missing, d_ff + d_model a block": layers * (d_ff + d),
            "the last layer norm is missing, 2 · d_model": 2 * d,
            "the layer norms have no biases: each has a gain and a bias, 2 · d_model": (2 * layers + 1) * d,
            "the layer norms of the blocks are missing, two a block": 4 * layers * d,
            "the layer norms are missing: two a block and one at the end": 4 * layers * d + 2 * d,
            "a block has two layer norms, not one": 2 * layers * d,
            "the table of positions is missing, context · d_model": context * d,
            "the attention's output matrix is missing: there are four matrices, not three": layers * d * d,
            "the feed-forward layer has two matrices, up and down": layers * d * d_ff,
            "the output matrix is counted, although it is the table of tokens": -vocab * d if tied else 0,
            "the output matrix is missing: it is not the table of tokens here": 0 if tied else vocab * d,
            "the output matrix has no bias": -vocab,
            "the attention's matrices have no biases": -4 * layers * d,
            "all but one block are missing: times layers": (layers - 1) * (4 * d * d + 2 * d * d_ff + d_ff + 5 * d),
            "d_ff is taken to be 4 · d_model": layers * (d_ff - 4 * d) * (2 * d + 1),
        }
        for hint, count in missing.items():
            if count and got == right - count:
                raise Wrong(hint)
        if got != right:
            way = "too many" if got > right else "too few"
            raise Wrong(f"{got:,} for {(vocab, d, layers, d_ff, context)}, {abs(got - right):,} {way}")

    return judge(
        answer,
        {
            "the defaults of the chapter": lambda: check(1000, 256, 4, 1024, 512, True),
            "other sizes": lambda: check(101, 30, 3, 47, 53, True),
            "an untied output matrix": lambda: check(101, 30, 3, 47, 53, False),
        },
    )


def sink_token(answer: Callable[[int], nn.Module]) -> bool:
    """Exercise 5.2: a learnt token before every text.

    Args:
        answer: a module class. ``answer(d_model)`` creates the module; called with x (b, n, d_model) it returns
            (b, n + 1, d_model): the learnt vector, which is the same for every text, then x.

    >>> class Right(nn.Module):
    ...     def __init__(self, d_model):
    ...         super().__init__()
    ...         self.token = nn.Parameter(torch.zeros(d_model))
    ...     def forward(self, x):
    ...         return torch.cat([self.token.expand(len(x), 1, -1), x], 1)
    >>> sink_token(Right)
    ✓ one more token
    ✓ before the text
    ✓ the same for every text
    ✓ it learns
    True
    """
    x = draw(3, 5, 8)

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the module may draw its vector
            module = answer(8)
        if not isinstance(module, nn.Module):
            raise Wrong(f"it returns {type(module).__name__}, expected a torch.nn.Module")
        return module

    def one() -> None:
        got = made()(x)
        if not isinstance(got, Tensor):
            raise Wrong(f"it returns {type(got).__name__}, expected a tensor (b, n + 1, d_model)")
        if got.shape == x.shape:
            if torch.equal(got[:, 1:], x[:, :-1]):
                raise Wrong("the last token of the text is lost: the result is one token longer than x")
            raise Wrong("the result is as long as x: the vector is put before the text, not added to its tokens")
        if got.shape != (3, 6, 8):
            raise Wrong(f"for x of shape {tuple(x.shape)} it returns {tuple(got.shape)}, expected (3, 6, 8)")

    def before() -> None:
        got = made()(x).detach()
        if torch.equal(got[:, :-1], x):
            raise Wrong(
                "the token comes after the text, where causal attention masks it for all other tokens; put it first"
            )
        expect(got[:, 1:], x, "the output after the first token, which is x,")

    def same_for_all() -> None:
        module = made()
        first = module(x).detach()[:, 0]
        if not torch.equal(first, first[:1].expand_as(first)):
            raise Wrong("texts of one batch have different tokens before them, expected one vector for all")
        if not torch.equal(first, module(x).detach()[:, 0]):
            raise Wrong("the vector is drawn again at every call: create it once, in __init__")
        if not torch.equal(first, module(2 * x + 1).detach()[:, 0]):
            raise Wrong("the vector depends on the text, expected a parameter of its own")

    def learns() -> None:
        module = made()
        count = sum(p.numel() for p in module.parameters())
        if count != 8:
            hint = (
                ": nn.Parameter(torch.zeros(d_model)); a plain tensor, or a buffer, is not trained" if not count else ""
            )
            raise Wrong(f"it has {count} parameters, expected d_model = 8{hint}")
        module(x)[:, 0].sum().backward()
        if any(p.grad is None or not bool((p.grad != 0).any()) for p in module.parameters()):
            raise Wrong("the vector gets no gradient: is it detached, or its .data used?")

    names = "one more token", "before the text", "the same for every text", "it learns"
    return judge(answer, dict(zip(names, (one, before, same_for_all, learns), strict=True)))


def _count(vocab: int, d: int, layers: int, d_ff: int, context: int, tied: bool) -> int:
    """The number of parameters of the model, built on the meta device."""
    with torch.device("meta"):
        parts: list[nn.Module] = [nn.Embedding(vocab, d), nn.Embedding(context, d), nn.LayerNorm(d)]
        for _ in range(layers):
            parts += [nn.Linear(d, d, bias=False) for _ in range(4)]
            parts += [nn.Linear(d, d_ff), nn.Linear(d_ff, d), nn.LayerNorm(d), nn.LayerNorm(d)]
        if not tied:
            parts.append(nn.Linear(d, vocab, bias=False))
    return sum(p.numel() for part in parts for p in part.parameters())
