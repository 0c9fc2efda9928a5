"""Checks of exercises: heads, and Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

import qkv
from qkv_lab.check.hints import (
    Wrong,
    draw,
    exercise,
    expect,
    expect_pair,
    mask_mistakes,
    pair,
    same,
    scale_mistakes,
    trial,
)
from qkv_lab.course import MinimalTransformer

Heads = tuple[Float[Tensor, "b n d_model"], Float[Tensor, "b heads n m"]]


@exercise
def causal_mask(answer: Callable[[int], Bool[Tensor, "n n"]]) -> None:
    """Lab 2: the causal mask.

    Args:
        answer: ``answer(n)`` returns a boolean tensor (n, n), rows are queries: True where the key is at the
            query's position or before it.
    """

    with trial("booleans"):
        got = answer(5)
        if not isinstance(got, Tensor):
            raise Wrong(f"it returns {type(got).__name__}, expected a tensor")
        if got.shape != (5, 5):
            raise Wrong(
                f"for n = 5 the mask has shape {tuple(got.shape)}, expected (5, 5); it broadcasts over batch and heads"
            )
        if got.dtype != torch.bool:
            raise Wrong(
                f"the mask is {got.dtype}, expected torch.bool: ~ does not invert ones, and adding 1 to scores masks "
                "nothing"
            )

    for name, lengths in (("visible keys", (5,)), ("other lengths", (1, 2, 9))):
        with trial(name):
            for n in lengths:
                ones = torch.ones(n, n, dtype=torch.double)
                mistakes = {
                    "queries see later keys instead of earlier ones: rows are queries, so use the lower triangle": (
                        ones.triu()
                    ),
                    "a query must see itself, or the first one has no visible key: the diagonal must be True": (
                        ones.tril(-1)
                    ),
                    "True marks masked keys (as in torch.nn.MultiheadAttention); expected visible keys": ones.triu(1),
                    "every query sees one key too many, the one after it": ones.tril(1),
                }
                expect(answer(n).double(), ones.tril(), "the mask", mistakes)


@exercise
def multi_head(answer: Callable[..., Heads]) -> None:
    """Lab 2: self-attention in several heads over four matrices.

    Args:
        answer: ``answer(x, w_q, w_k, w_v, w_o, heads, mask=None)`` for x (b, n, d_model), matrices (d_model, d_model)
            that are applied from the right, ``x @ w_q``, and a mask (n, n), True where a query may attend. Head i has
            the columns from i · d_model/heads on of the projections. Returns out (b, n, d_model) and weights
            (b, heads, n, n).
    """
    x, place = draw(2, 5, 12), torch.arange(5)
    mask = (place[:, None] + 2 * place) % 3 < 2  # every query has a visible key, and a masked one
    matrices = [draw(12, 12, seed=i) / math.sqrt(12) for i in (1, 2, 3, 4)]
    w_o = matrices[3].double()

    with trial("one head"):
        out, weights = pair(answer(x, *matrices, 1))
        right_out, right_weights, inner = _heads(x, x, matrices, 1)
        transposed = [m.T for m in matrices]
        wrong = _heads(x, x, transposed, 1)
        _check_weights(weights, right_weights, {"the matrices are transposed: expected x @ w_q": wrong[1]})
        mistakes = {
            "the output matrix is missing: multiply the merged heads by w_o": _merged(inner),
            "the output matrix is transposed: expected … @ w_o": _merged(inner) @ w_o.T,
        }
        expect(out, right_out, "out", mistakes)

    with trial("weights of three heads"):
        right = _heads(x, x, matrices, 3)[1]
        q, k = (x.double() @ m.double() for m in matrices[:2])

        def scored(split: Callable[[Tensor], Tensor]) -> Tensor:
            return (split(q) @ split(k).mT / 2).softmax(-1)

        mistakes = {
            **scale_mistakes(_split(q, 3) @ _split(k, 3).mT, 4, d_model=12),
            "the heads are split along the length, which mixes tokens: view as (b, n, heads, …), then transpose": (
                scored(lambda x: x.reshape(2, 3, 5, 4))
            ),
            "the heads are interleaved: head 0 must have the first d_model / heads columns, unflatten to (heads, "
            "d_head), not (d_head, heads)": scored(lambda x: x.unflatten(-1, (4, 3)).permute(0, 3, 1, 2)),
            "heads attend to heads within a token: heads must come before the length, transpose(1, 2)": scored(
                lambda x: x.unflatten(-1, (3, 4))
            ),
            "the weights are averaged over the heads: return those of each head": right.mean(1),
        }
        _check_weights(pair(answer(x, *matrices, 3))[1], right, mistakes)

    with trial("output of three heads"):
        right, _, inner = _heads(x, x, matrices, 3)
        mistakes = {
            "heads are merged without moving them back behind the length: transpose(1, 2), then flatten": (
                inner.reshape(2, 5, 12) @ w_o
            ),
            "heads are merged in the wrong order: concatenate each token's heads, head 0 first": (
                inner.permute(0, 2, 3, 1).flatten(2) @ w_o
            ),
            "the output matrix is missing: multiply the merged heads by w_o": _merged(inner),
        }
        expect(pair(answer(x, *matrices, 3))[0], right, "out", mistakes)

    with trial("mask"):
        out, weights = pair(answer(x, *matrices, 3, mask))
        q, k = (_split(x.double() @ m.double(), 3) for m in matrices[:2])
        expect_pair((out, weights), _heads(x, x, matrices, 3, mask)[:2], mask_mistakes(q @ k.mT / 2, mask))


@exercise
def dropout(answer: Callable[..., tuple[Float[Tensor, "b n dv"], Float[Tensor, "b n m"]]]) -> None:
    """Exercise 2.1: attention with dropout of its weights.

    Args:
        answer: ``answer(q, k, v, p, training)`` for q (b, n, d), k (b, m, d), v (b, m, dv), a probability and whether
            the model is in training mode. Returns out (b, n, dv) and the weights (b, n, m) after dropout.
    """
    q, k, v = draw(2, 40, 8), draw(2, 50, 8, seed=1), draw(2, 50, 6, seed=2)
    plain = (q.double() @ k.double().mT / math.sqrt(8)).softmax(-1)
    p = 0.3

    def run(training: bool, p: float = p) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20)
            out, weights = pair(answer(q, k, v, p, training))
        if weights.shape != plain.shape:
            raise Wrong(f"weights has shape {tuple(weights.shape)}, expected {tuple(plain.shape)}, (b, n, m)")
        return out.detach().double(), weights.detach().double()

    with trial("in evaluation"):
        out, weights = run(False)
        if bool((weights == 0).any()) or same(weights.sum(-1), torch.full((2, 40), 1 - p)):
            raise Wrong(
                "weights are dropped in evaluation, too: pass `training` to functional.dropout, whose default is True"
            )
        expect(weights, plain, "weights in evaluation")
        if not same(out, plain @ v.double()):
            raise Wrong("out is not weights @ v in evaluation, where nothing is dropped")

    with trial("in training"):
        _, weights = run(True)
        ratio = weights / plain
        kept = ratio[weights != 0]
        dropped = (weights == 0).double().mean().item()
        if same(weights, plain):
            raise Wrong("no weight is dropped in training; is dropout applied to the output, or not at all?")
        if same(weights.sum(-1), torch.ones(2, 40)):
            raise Wrong(
                "rows still sum to 1 in training: dropout comes after the softmax, without normalising again; only the "
                "mean over draws is the plain attention"
            )
        for dim, what, all_of in ((1, "keys", "queries"), (2, "queries", "keys")):
            if bool(((weights == 0).all(dim) | (weights != 0).all(dim)).all()):
                raise Wrong(f"whole {what} are dropped, the same for all {all_of}; draw each weight independently")
        if same(kept, torch.ones_like(kept)):
            raise Wrong("the remaining weights are not scaled up: 1/(1 − p) keeps the mean over draws unchanged")
        if abs(dropped - p) > 0.05 and abs(dropped - (1 - p)) < 0.05:
            raise Wrong(
                f"{dropped:.0%} of the weights are dropped, expected {p:.0%}: p is the share that is dropped, not kept"
            )
        if abs(dropped - p) > 0.05:
            raise Wrong(f"{dropped:.0%} of the weights are dropped, expected {p:.0%}")
        expect(kept, torch.full_like(kept, 1 / (1 - p)), "the ratio of remaining to plain weights", tolerance=1e-4)

    with trial("the output"):
        out, weights = run(True)
        if same(out, plain @ v.double(), 1e-4):
            raise Wrong("out uses the plain weights: dropout comes before weights @ v")
        expect(out, weights @ v.double(), "out, which is the dropped weights @ v,", tolerance=1e-4)

    with trial("nothing to drop"):
        expect(run(True, 0.0)[1], plain, "weights with p = 0, in training,")


@exercise
def cross_attention(answer: Callable[..., Heads]) -> None:
    """Exercise 2.2: queries of one sequence, keys and values of another.

    Args:
        answer: ``answer(x, context, w_q, w_k, w_v, w_o, heads)`` for x (b, n, d_model), context (b, m, d_context), w_q
            and w_o (d_model, d_model), w_k and w_v (d_context, d_model), applied from the right. Returns out
            (b, n, d_model) and weights (b, heads, n, m).
    """
    x = draw(2, 5, 12)

    def made(m: int, width: int) -> tuple[Tensor, list[Tensor]]:
        widths = (12, width, width, 12)
        return draw(2, m, width, seed=1), [draw(w, 12, seed=2 + i) / math.sqrt(w) for i, w in enumerate(widths)]

    with trial("queries, keys and values"):
        context, matrices = made(5, 12)
        out, weights = pair(answer(x, context, *matrices, 3))
        right_out, right, _ = _heads(x, context, matrices, 3)
        own = _heads(x, x, matrices, 3)
        mistakes = {
            "keys come from x: this is self-attention; expected keys from the context": own[1],
            "queries come from the context, expected from x": _heads(context, context, matrices, 3)[1],
            "the sequences are swapped: queries come from x, keys and values from the context": _heads(
                context, x, matrices, 3
            )[1],
            "a causal mask masks part of the context, but all of it must be visible": _heads(
                x, context, matrices, 3, torch.ones(5, 5).tril().bool()
            )[1],
        }
        expect(weights, right, "weights", mistakes)
        values = _merged(right @ _split(x.double() @ matrices[2].double(), 3)) @ matrices[3].double()
        expect(out, right_out, "out", {"values come from x, expected from the context, as the keys do": values})

    trials = {
        "other lengths": (7, 12, "for a context of 7 tokens and 5 queries: weights are (b, heads, n, m); n and m can "
                          "differ"),
        "other widths": (4, 10, "for a context 10 wide: the context has its own width before w_k and w_v"),
    }  # fmt: skip
    for name, (m, width, hint) in trials.items():
        context, matrices = made(m, width)
        with trial(name):
            try:
                got = answer(x, context, *matrices, 3)
            except RuntimeError as error:
                raise Wrong(f"it fails {hint} ({str(error).splitlines()[0]})") from None
            expect_pair(got, _heads(x, context, matrices, 3)[:2])


def _heads(
    x: Tensor, context: Tensor, matrices: list[Tensor], heads: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights, and the heads' outputs before they are merged, (b, heads, n, d), in float64."""
    x, context = x.double(), context.double()
    w_q, w_k, w_v, w_o = (m.double() for m in matrices)
    q, k, v = _split(x @ w_q, heads), _split(context @ w_k, heads), _split(context @ w_v, heads)
    inner, weights = qkv.attend(q, k, v, mask=mask, return_weights=True)
    return _merged(inner) @ w_o, weights, inner


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _check_weights(got: Tensor, right: Tensor, mistakes: dict[str, Tensor]) -> None:
    if got.ndim == 3 and right.shape[1] == 1 and got.shape == right[:, 0].shape:
        raise Wrong("weights has no dimension for the heads: expected (b, heads, n, n), also for one head")
    expect(got, right, "weights", mistakes)


@exercise
def parameter_count(answer: Callable[..., int]) -> None:
    """Lab 5: a formula for the number of parameters of the chapter's Transformer.

    Attention has four matrices without biases, the feed-forward layer two matrices with biases. Each block has two
    layer norms and the model one more, each with gain and bias. There is an embedding table for tokens and one for
    positions. If `tied`, the output matrix is the token table; else it is another matrix of that size, without bias.

    Args:
        answer: ``answer(vocab, d_model, layers, d_ff, context, tied=True)`` returns an int.
    """
    trials = {
        "the defaults of the chapter": (1000, 256, 4, 1024, 512, True),
        "other sizes": (101, 30, 3, 47, 53, True),
        "an untied output matrix": (101, 30, 3, 47, 53, False),
    }
    for name, (vocab, d, layers, d_ff, context, tied) in trials.items():
        with trial(name):
            with torch.device("meta"):
                model = MinimalTransformer(vocab, d, 1, layers, d_ff, context)
            right = sum(p.numel() for p in model.parameters()) + (0 if tied else vocab * d)
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


@exercise
def sink_token(answer: Callable[[int], nn.Module]) -> None:
    """Exercise 5.2: a learnt token before every text.

    Args:
        answer: a module class. ``answer(d_model)`` creates the module; called with x (b, n, d_model) it returns
            (b, n + 1, d_model): the learnt vector, which is the same for every text, then x.
    """
    x = draw(3, 5, 8)

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the module may draw its vector
            module = answer(8)
        if not isinstance(module, nn.Module):
            raise Wrong(f"it returns {type(module).__name__}, expected a torch.nn.Module")
        return module

    with trial("one more token"):
        got = made()(x)
        if not isinstance(got, Tensor):
            raise Wrong(f"it returns {type(got).__name__}, expected a tensor (b, n + 1, d_model)")
        if got.shape == x.shape:
            if torch.equal(got[:, 1:], x[:, :-1]):
                raise Wrong("the last token of the text is lost: the result is one token longer than x")
            raise Wrong("the result is as long as x: the vector is put before the text, not added to its tokens")
        if got.shape != (3, 6, 8):
            raise Wrong(f"for x of shape {tuple(x.shape)} it returns {tuple(got.shape)}, expected (3, 6, 8)")

    with trial("before the text"):
        got = made()(x).detach()
        if torch.equal(got[:, :-1], x):
            raise Wrong(
                "the token comes after the text, where causal attention masks it for all other tokens; put it first"
            )
        expect(got[:, 1:], x, "the output after the first token, which is x,")

    with trial("the same for every text"):
        module = made()
        first = module(x).detach()[:, 0]
        if not torch.equal(first, first[:1].expand_as(first)):
            raise Wrong("texts of one batch have different tokens before them, expected one vector for all")
        if not torch.equal(first, module(x).detach()[:, 0]):
            raise Wrong("the vector is drawn again at every call: create it once, in __init__")
        if not torch.equal(first, module(2 * x + 1).detach()[:, 0]):
            raise Wrong("the vector depends on the text, expected a parameter of its own")

    with trial("it learns"):
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
