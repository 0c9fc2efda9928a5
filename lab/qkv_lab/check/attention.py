"""Checks of exercises: alignment, and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qkv import reference, scores
from qkv.normalizers import Softmax
from qkv_lab.check.hints import (
    Wrong,
    draw,
    exercise,
    expect,
    expect_pair,
    expect_shape,
    mask_mistakes,
    pair,
    same,
    scale_mistakes,
    trial,
    truth,
)


@exercise
def additive_score(answer: Callable[..., Float64[Tensor, "b nq nk"]]) -> None:
    """Exercise of the Bahdanau lab: the score v · tanh(W q + U k) of every query and key.

    Args:
        answer: ``answer(query, keys, w_q, w_k, vector)`` for float64 queries (b, nq, dq), keys (b, nk, dk), W (a, dq),
            U (a, dk) and v (a,). Returns scores (b, nq, nk), before any softmax.
    """
    trials = {
        "2 queries, 3 keys": (2, 2, 3, 5, 4, 6, 1.0),
        "3 queries, 1 key, a batch of one": (1, 3, 1, 2, 7, 4, 1.0),
        "large states": (1, 2, 4, 3, 2, 5, 1e3),
    }
    for name, (b, nq, nk, dq, dk, a, times) in trials.items():
        shapes = ((b, nq, dq), (b, nk, dk), (a, dq), (a, dk), (a,))
        query, keys, w_q, w_k, vector = (draw(*shape, seed=i).double() for i, shape in enumerate(shapes))
        query, keys = times * query, times * keys
        score = scores.Additive(vector, w_q, w_k)
        loops = [
            [[reference.compare(score, q.numpy(), k.numpy(), 0, 0) for k in keys[i]] for q in query[i]]
            for i in range(b)
        ]
        expected = torch.tensor(loops, dtype=torch.float64)
        from_query, from_key = (query @ w_q.T)[:, :, None], (keys @ w_k.T)[:, None]
        mixed, product = torch.tanh(from_query + from_key), torch.tanh(from_query * from_key)
        mistakes = {
            "there is no tanh: without it a query adds the same number to all its scores, and the weights ignore it": (
                (from_query + from_key) @ vector
            ),
            "the tanh must come before the product with v, on every entry of the sum, not after it": (
                torch.tanh((from_query + from_key) @ vector)
            ),
            "W q and U k are multiplied; add them: this is the additive score": product @ vector,
            "the entries of tanh(…) are summed without weights; v weights them: @ vector": mixed.sum(-1),
            "the tanh is taken of W q and U k separately; then the weights do not depend on the query: add first": (
                (torch.tanh(from_query) + torch.tanh(from_key)) @ vector
            ),
            "these are weights; expected the scores before the softmax": expected.softmax(-1),
            "the scores are divided by √a; the additive score has no such factor": expected / a**0.5,
            "rows are keys, expected queries are rows and keys are columns: (b, nq, nk)": expected.mT,
            "this is tanh(W q + U k), a vector for every pair; multiply by v to get one number: @ vector": mixed,
        }
        with trial(name):
            expect(answer(query, keys, w_q, w_k, vector), expected, "the answer", mistakes, 1e-9)


@exercise
def alignment_accuracy(answer: Callable[[Tensor, Sequence[tuple[int, ...]]], float]) -> None:
    """Exercise of the Bahdanau lab: how often the strongest source word is a true counterpart.

    Args:
        answer: ``answer(weights, truth)`` for weights (t, s) of t target words on s source words, and for each target
            word the positions of its counterparts in the source: none, one, or several. Target words without a
            counterpart are left out. Returns a number from 0 to 1; 0.0 if all words are left out.
    """

    with trial("one counterpart each"):
        weights = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.1, 0.15, 0.75], [0.4, 0.35, 0.25]])
        columns = (
            "this uses the strongest target word of each source word; take argmax over the last dimension, for each "
            "target word"
        )
        mistakes = {
            3.0: "this is the number of correct words, expected their share",
            1 / 3: columns,
            1 / 4: columns,
            0.4625: "this is the mean weight on the counterparts, expected how often one of them is the strongest",
        }
        _expect_share(answer(weights, [(0,), (2,), (1,), (0,)]), 0.75, mistakes)

    with trial("several counterparts"):
        weights = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.3, 0.7], [0.8, 0.1, 0.1]])
        mistakes = {
            1 / 3: "only the first counterpart of a word was compared; any of them is correct",
            0.4: "the number of correct words is divided by the number of counterparts, expected that of target words",
        }
        _expect_share(answer(weights, [(0, 1), (2,), (1, 2)]), 2 / 3, mistakes)

    with trial("words without a counterpart"):
        weights = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
        mistakes = {
            1 / 5: "words without a counterpart are counted as wrong; leave them out of both numbers",
            4 / 5: "words without a counterpart are counted as right; leave them out of both numbers",
        }
        _expect_share(answer(weights, [(0,), (), (1,), (), ()]), 1 / 2, mistakes)

    with trial("no word with a counterpart"):
        _expect_share(answer(torch.tensor([[0.5, 0.5]]), [()]), 0.0, {1.0: "no word has a counterpart: expected 0.0"})


def _expect_share(got: object, expected: float, mistakes: dict[float, str]) -> None:
    """Raise `Wrong` unless an answer is the expected share. If it is that of a known mistake, give its hint."""
    if isinstance(got, Tensor | np.ndarray | np.generic) and got.ndim == 0:
        got = got.item()
    if not isinstance(got, int | float):
        raise Wrong(f"the answer is {type(got).__name__}, expected one number")
    if not abs(got - expected) < 1e-5:
        hints = [hint for wrong, hint in mistakes.items() if abs(got - wrong) < 1e-5]
        raise Wrong(hints[0] if hints else f"the answer is {got:.4g}, expected {expected:.4g}")


Attended = tuple[Float[Tensor, "b nq dv"], Float[Tensor, "b nq nk"]]

AXIS = (
    "each column of the weights sums to 1, not each row: a query's weights run over the keys, which are the last "
    "dimension, so softmax(dim=-1)"
)


@exercise
def attention(answer: Callable[..., Attended]) -> None:
    """Exercise of Lab 1: scaled dot-product attention of one head, with a mask.

    Args:
        answer: ``answer(q, k, v, mask=None)`` for q (b, nq, d), k (b, nk, d), v (b, nk, dv) and a mask (nq, nk) that is
            True where a query may attend. Returns out (b, nq, dv) and weights (b, nq, nk). A query with no visible key
            has weights 0 and output 0, and must not make gradients NaN.
    """
    q, k, v = draw(2, 3, 4), draw(2, 5, 4, seed=1), draw(2, 5, 7, seed=2)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]]).bool()

    with trial("shapes"):
        out, weights = pair(answer(q, k, v))
        _has_shape(weights, (2, 3, 5), "weights", "(b, nq, nk): a row for each query, a column for each key")
        _has_shape(out, (2, 3, 7), "out", "(b, nq, dv): a mean of values for each query")

    with trial("rows of weights"):
        weights = pair(answer(q, k, v))[1].detach()
        if not _ones(weights.sum(-1)):
            if _ones(weights.sum(-2)):
                raise Wrong(AXIS)
            if _ones(weights.sum((-1, -2))):
                raise Wrong("all weights of a text sum to 1: the softmax must be taken row by row, softmax(dim=-1)")
            raise Wrong("the rows of weights do not sum to 1: is the softmax missing, or not the last step?")

    with trial("scores"):
        mistakes = scale_mistakes(q.double() @ k.double().mT, 4, dv=7, nk=5)
        expect(pair(answer(q, k, v))[1], truth(q, k, v)[1], "weights", mistakes)

    with trial("output"):
        expect(pair(answer(q, k, v))[0], truth(q, k, v)[0], "out, which is weights @ v,")

    with trial("mask"):
        mistakes = mask_mistakes(q.double() @ k.double().mT / 2, mask)
        expect_pair(answer(q, k, v, mask), truth(q, k, v, mask), mistakes)

    with trial("large scores"):
        weights, right = pair(answer(200 * q, 200 * k, v))[1], truth(200 * q, 200 * k, v)[1]
        hint = (
            "scores of several thousand overflow: eˢ is infinite from s = 89 in float32; subtract each row's largest "
            "score first, or let torch.softmax do it"
        )
        expect(weights, right, "weights", finite=hint)

    with trial("a query with no visible key"):
        visible = mask.clone()
        visible[1] = False
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, weights = pair(answer(*inputs, visible))
        for what, got in (("weights", weights), ("out", out)):
            if bool(got[:, 1].isnan().any()):
                raise Wrong(
                    f"{what} of a query with no visible key is NaN: the softmax of a row of −inf is 0/0; expected 0. "
                    "Give such rows finite scores before the softmax, and weights 0 after it"
                )
        if same(weights[:, 1], torch.full((2, 5), 0.2)):
            raise Wrong(
                "a query with no visible key attends to all keys equally, though all are masked; expected weights 0"
            )
        expect_pair((out, weights), truth(q, k, v, visible))
        if out.requires_grad:
            out[:, [0, 2]].sum().backward()
            for name, x in zip("vqk", (inputs[2], *inputs[:2]), strict=True):
                if x.grad is not None and not bool(x.grad.isfinite().all()):
                    late = (
                        "replace NaN in the weights, not in the output"
                        if name == "v"
                        else "give the row finite scores before the softmax; adding −inf keeps NaN"
                    )
                    raise Wrong(
                        f"the gradient of {name} is NaN, though the loss does not use the masked row: NaN was replaced "
                        f"too late, and 0 × NaN is NaN in the backward pass; {late}"
                    )


@exercise
def entropy(answer: Callable[[Float[Tensor, "*rows nk"]], Float[Tensor, " *rows"]]) -> None:
    """Exercise 1.1: the entropy of every row of weights, −Σ a ln a, in nats.

    Args:
        answer: ``answer(weights)`` for weights (..., nk), whose rows sum to 1 or are all 0. Returns (...). A weight of
            0 adds 0, the limit of a ln a.
    """
    weights = (2 * draw(2, 3, 5, 7)).softmax(-1)
    terms = -torch.special.xlogy(weights.double(), weights.double())
    right = terms.sum(-1)

    with trial("a number for each row"):
        mistakes = {
            "the sum runs over queries: the entropy of a row is a sum over keys, the last dimension": terms.sum(-2),
            "it is one number, expected one for each row: sum over keys only": right.mean(),
            "it is one number, expected one for each row: sum over keys only, dim=-1": terms.sum(),
            "it still has a dimension for the keys: sum over it without keepdim": right[..., None],
            "it is −a ln a for every weight: the sum over keys is missing": terms,
        }
        expect_shape(answer(weights), right, "the entropy", mistakes)

    with trial("nats"):
        mistakes = {
            "it is negative: ln a is at most 0, so the sum of a ln a needs a minus sign": -right,
            "it is the mean over keys, expected the sum": terms.mean(-1),
            "it is in bits (log₂), expected nats: the natural logarithm": right / math.log(2),
            "it is divided by ln n, which makes it relative to the maximum; expected nats": right / math.log(7),
            "it is e to the entropy, the perplexity; expected the entropy": right.exp(),
            "it is −Σ ln a: weight each logarithm by a": -weights.double().log().sum(-1),
        }
        expect(answer(weights), right, "the entropy", mistakes)

    with trial("weights of 0"):
        hint = (
            "a weight of 0 makes NaN: ln 0 is −∞, and 0 × −∞ is NaN; torch.special.xlogy and torch.special.entr return "
            "the limit, 0"
        )
        got, expected = answer(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])), torch.tensor([math.log(2), 0.0])
        expect(got, expected, "the entropy of rows (½, ½, 0) and (0, 0, 0)", finite=hint)

    with trial("least and greatest"):
        expect(answer(torch.eye(6)), torch.zeros(6), "the entropy where all weight is on one key, expected 0,")
        even = torch.full((4, 9), 1 / 9)
        expect(answer(even), torch.full((4,), math.log(9)), "the entropy of nine equal weights, expected ln 9,")


@exercise
def temperature(answer: Callable[..., Attended]) -> None:
    """Exercise 1.2: attention whose scores are divided by √d · temperature.

    Args:
        answer: ``answer(q, k, v, temperature=1.0)`` for q (b, nq, d), k (b, nk, d), v (b, nk, dv). Returns out
            (b, nq, dv) and weights (b, nq, nk).
    """
    q, k, v = draw(2, 3, 5, seed=3), draw(2, 6, 5, seed=4), draw(2, 6, 4, seed=5)
    raw = q.double() @ k.double().mT
    s = raw / math.sqrt(5)

    with trial("temperature 1"):
        mistakes = {"the scores are not scaled: 1/√d stays, in addition to the temperature": raw.softmax(-1)}
        expect_pair(answer(q, k, v), truth(q, k, v), mistakes)

    for name, t in (("temperature 2", 2.0), ("temperature ½", 0.5)):
        mistakes = {
            "a high temperature sharpens: the scores are multiplied by it, expected divided": (s * t).softmax(-1),
            "the weights are divided by the temperature: then rows do not sum to 1; divide the scores, before the "
            "softmax": s.softmax(-1) / t,
            "the temperature changes nothing": s.softmax(-1),
            "the temperature is under the root: expected √d · temperature": (raw / math.sqrt(5 * t)).softmax(-1),
            "1/√d is missing: expected both √d and the temperature": (raw / t).softmax(-1),
            "temperature is added to √d, expected times √d": (raw / (math.sqrt(5) + t)).softmax(-1),
        }
        with trial(name):
            expect_pair(answer(q, k, v, t), truth(q, k, v, normalizer=Softmax(t)), mistakes)

    with trial("very cold"):
        out, weights = pair(answer(q, k, v, 1e-3))
        right = truth(q, k, v, normalizer=Softmax(1e-3))
        hint = "at temperature 0.001 it overflows: subtract each row's largest score, or use torch.softmax"
        expect(weights, right[1], "weights", finite=hint)
        expect(out, right[0], "out", finite=hint)

    with trial("very hot"):
        expect_pair(answer(q, k, v, 1e6), truth(q, k, v, normalizer=Softmax(1e6)))


def _has_shape(x: Tensor, shape: tuple[int, ...], what: str, why: str) -> None:
    if tuple(x.shape) != shape:
        raise Wrong(f"{what} has shape {tuple(x.shape)}, expected {shape}, {why}")


def _ones(sums: Tensor) -> bool:
    return same(sums, torch.ones_like(sums))
