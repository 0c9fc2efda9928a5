"""Checks of Labs 3 and 4: the weight on the first token, the share of heads with a sink, alternatives to sinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.normalizers import Softmax
from qkv_lab.check.hints import Wrong, array, draw, exercise, expect, expect_pair, expect_shape, pair, trial, truth


@exercise
def first_token(answer: Callable[[Float[Tensor, "layers heads n n"]], Float[Tensor, " layers"]]) -> None:
    """Lab 3: the mean weight on the first token, layer by layer.

    Args:
        answer: ``answer(weights)`` for causal weights (layers, heads, n, n), rows are queries. Returns (layers,): means
            over heads and over the queries from the second on, because the first has one visible key only.
    """
    weights = _causal(draw(3, 5, 7, 7) + torch.arange(5)[:, None, None])
    column = weights[..., 0]
    right = column[..., 1:].mean((1, 2))

    with trial("a number for each layer"):
        mistakes = {
            "it is one number, expected one for each layer": right.mean(),
            "it is one number for each head: take the mean over heads, too": column[..., 1:].mean(-1),
            "it is one number for each head, first query included": column.mean(-1),
            "it is one number for each query: take the mean over queries, too": column[..., 1:].mean(1),
        }
        expect_shape(answer(weights), right, "the measure", mistakes)

    with trial("the column, without the first query"):
        mistakes = {
            "the first query is included: it sees only itself, so its weight is always 1; leave it out": column.mean(
                (1, 2)
            ),
            "it is the first row, the weights of the first query; expected the column of weights on the first key": (
                weights[..., 0, :].mean((1, 2))
            ),
            "it is the first row without its first entry; expected the first column, weights[..., 1:, 0]": (
                weights[..., 0, 1:].mean((1, 2))
            ),
            "it is the largest weight, expected the mean": column[..., 1:].amax((1, 2)),
            "it is the last token's column; the weights on the first token are weights[..., 0]": weights[
                ..., 1:, -1
            ].mean((1, 2)),
            "it is the sum over queries, expected the mean: a sum grows with the text": column[..., 1:].sum(-1).mean(1),
        }
        expect(answer(weights), right, "the measure", mistakes)


@exercise
def sink_rate(answer: Callable[..., float | Float[Tensor, ""]]) -> None:
    """Lab 4: the share of heads with a sink on the first token, as Gu et al. define it (2025, arXiv:2410.10781, eq. 4).

    Args:
        answer: ``answer(weights, threshold=0.3)`` for causal weights (layers, heads, n, n). Of every head α₁ is the
            mean weight on the first key over *all* queries, the first included. Returns the share of heads, over all
            layers, with α₁ > threshold: a number.
    """
    lift = torch.tensor([[-1.0, 0.0, 0.8, 1.3, 4.0], [-2.0, -1.0, 0.5, 1.0, 1.9]])
    scores = 1.5 * draw(2, 5, 6, 6, seed=1)
    scores[..., 0] += lift[..., None]
    weights = _causal(scores)

    def share(threshold: float) -> tuple[Tensor, dict[str, Tensor]]:
        first = weights[..., 0]
        mistakes = {
            "every weight is compared with the threshold, not every head (this is the chapter's measure); take the "
            "mean over queries first, then compare": (first > threshold).double().mean(),
            "every weight but the first query's is compared with the threshold, not every head (this is the chapter's "
            "measure); take the mean over queries first, then compare": ((first[..., 1:] > threshold).double().mean()),
            "the first query is left out of the mean: α₁ of Gu et al. is over all queries, the first included": (
                (first[..., 1:].mean(-1) > threshold).double().mean()
            ),
            "heads are averaged before the threshold: one strong head would count for a whole layer": (
                (first.mean((1, 2)) > threshold).double().mean()
            ),
            "it is the mean weight on the first key: compare each head's with the threshold": first.double().mean(),
            "it is the first row; the weight on the first key is the first column": (
                (weights[..., 0, :].mean(-1) > threshold).double().mean()
            ),
            "it counts heads, expected their share": (first.mean(-1) > threshold).double().sum(),
        }
        return (first.mean(-1) > threshold).double().mean(), mistakes

    def got(weights: Tensor, *threshold: float) -> Tensor:
        found = answer(weights, *threshold)
        if isinstance(found, Tensor) and found.ndim:
            raise Wrong(f"it returns a tensor of shape {tuple(found.shape)}, expected one number for the model")
        if not isinstance(found, float | int | Tensor):
            raise Wrong(f"it returns {type(found).__name__}, expected a number")
        return torch.as_tensor(found, dtype=torch.double)

    with trial("a head counts once"):
        right, mistakes = share(0.3)
        expect(got(weights), right, "the share of heads", mistakes)

    with trial("the threshold"):
        right, mistakes = share(0.55)
        own, _ = share(0.3)
        ignored = {"the threshold that was passed is ignored": own}
        expect(got(weights, 0.55), right, "the share of heads at threshold 0.55", {**mistakes, **ignored})

    with trial("nothing and everything"):
        even = _causal(torch.zeros(2, 3, 64, 64))
        expect(
            got(even), torch.tensor(0.0), "the share of heads for uniform causal rows of 64 tokens, which have no sink,"
        )
        full = torch.zeros(2, 3, 8, 8)
        full[..., 0] = 1
        expect(got(full), torch.tensor(1.0), "the share of heads if all attend to the first key only")


@exercise
def key_bias(answer: Callable[..., tuple[Float[Tensor, "b nq dv"], Float[Tensor, "b nq nk"]]]) -> None:
    """Exercise 4.1: attention with an additional learnt key, whose value is 0.

    Args:
        answer: ``answer(q, k, v, key, mask=None)`` for q (b, nq, d), k (b, nk, d), v (b, nk, dv), the learnt key (d,)
            and a mask (nq, nk), True where a query may attend; the learnt key is visible to all. Returns out
            (b, nq, dv) and the weights (b, nq, nk) of the text's own keys, whose rows sum to less than 1.
    """
    q, k, v, key = draw(2, 3, 6), draw(2, 5, 6, seed=1), draw(2, 5, 6, seed=2), draw(6, seed=3)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]]).bool()
    s = q.double() @ k.double().mT / math.sqrt(6)
    extra = (q.double() @ key.double() / math.sqrt(6))[..., None]
    whole = torch.cat([s, extra], -1).softmax(-1)
    normalizer = Softmax(key=key.double()[None])
    right = whole[..., :-1]

    with trial("weights"):
        raw = torch.cat([s, extra * math.sqrt(6)], -1).softmax(-1)[..., :-1]
        mistakes = {
            "the learnt key takes no weight: rows still sum to 1. Include it in the softmax and drop its column "
            "afterwards, without normalising again": s.softmax(-1),
            "the weights still have the column of the learnt key: return those of the text's own keys": whole,
            "the weights still have the column of the learnt key, first: return those of the text's own keys": (
                torch.cat([whole[..., -1:], right], -1)
            ),
            "the learnt key's score is not divided by √d, as the others are": raw,
            "the extra score is 0, as in softmax off by one: expected q · key / √d, which depends on the query": (
                torch.cat([s, torch.zeros_like(extra)], -1).softmax(-1)[..., :-1]
            ),
        }
        expect(pair(answer(q, k, v, key))[1], right, "weights", mistakes)

    with trial("output"):
        plain = right @ v.double()
        mistakes = {
            "the learnt key's value is the key itself: its value must be 0, so that its weight adds nothing": (
                plain + whole[..., -1:] * key.double()
            ),
            "the output uses weights that were normalised again, without the weight of the learnt key": (
                s.softmax(-1) @ v.double()
            ),
            "the learnt key has a value of ones: its value is 0": plain + whole[..., -1:],
            "the learnt key has the mean of the values: its value is 0": (
                plain + whole[..., -1:] * v.double().mean(1, keepdim=True)
            ),
        }
        expect(pair(answer(q, k, v, key))[0], plain, "out", mistakes)

    with trial("mask"):
        mistakes = {
            "the mask is ignored": right,
            "the learnt key is masked: it must be visible to all queries": s.masked_fill(~mask, -torch.inf).softmax(-1),
            "the mask comes after the softmax: mask the scores": right * mask,
        }
        expect_pair(answer(q, k, v, key, mask), truth(q, k, v, mask, normalizer), mistakes)

    with trial("a query with no visible key of the text"):
        visible = mask.clone()
        visible[1] = False
        (out, weights), expected = pair(answer(q, k, v, key, visible)), truth(q, k, v, visible, normalizer)
        hint = "weights are NaN: with the learnt key in the softmax every row has a visible key; is that key masked?"
        expect(weights, expected[1], "weights", finite=hint)
        expect(out, expected[0], "out")

    with trial("the key learns"):
        own = key.clone().requires_grad_()
        out = pair(answer(q, k, v, own))[0]
        if not out.requires_grad:
            raise Wrong(
                "the output does not depend on the key for autograd: no detach, no .item(), no new tensor of it"
            )
        out.square().sum().backward()
        if own.grad is None or not bool((own.grad != 0).any()):
            raise Wrong("the key gets no gradient, so it cannot be trained")


@exercise
def off_by_one(answer: Callable[[Float[Tensor, "*rows n"]], Float[Tensor, "*rows n"]]) -> None:
    """Exercise 4.2: softmax off by one, eˢ / (1 + Σ eˢ): softmax with a column of zeros that is dropped afterwards.

    Args:
        answer: ``answer(scores)`` for scores (..., n), some of which may be −inf. Returns weights (..., n); rows sum to
            less than 1, and a row of −inf is a row of zeros.
    """
    scores = draw(2, 3, 7)

    def expected(s: Tensor) -> Tensor:
        s = s.double()
        return (s - torch.cat([s, torch.zeros_like(s[..., :1])], -1).logsumexp(-1, keepdim=True)).exp()

    with trial("weights"):
        s, right = scores.double(), expected(scores)
        shifted = (s - s.amax(-1, keepdim=True)).exp()
        rest = 1 - right.sum(-1, keepdim=True)
        along = torch.cat([s, torch.zeros_like(s[:, :1])], 1).softmax(1)[:, :-1]
        mistakes = {
            "it is the plain softmax: rows sum to 1. Include the zero in the softmax and drop its column afterwards, "
            "without normalising again": s.softmax(-1),
            "the column of zeros is still there: drop it": torch.cat([right, rest], -1),
            "the column of zeros is still there, first: drop it": torch.cat([rest, right], -1),
            "the largest score is subtracted from the scores, but the 1 is not: 1 becomes e^(−max)": shifted
            / (1 + shifted.sum(-1, keepdim=True)),
            "1 is added to the softmax's weights, after they are normalised; expected to the sum of eˢ": (
                s.softmax(-1) / 2
            ),
            "the zeros are an additional query, and the softmax runs over queries; keys are the last dimension": along,
            "the additional score is 1, expected 0, for which e⁰ = 1": (
                torch.cat([s, torch.ones_like(s[..., :1])], -1).softmax(-1)[..., :-1]
            ),
            "1 is subtracted from the sum, expected added": s.exp() / (s.exp().sum(-1, keepdim=True) - 1),
        }
        expect(answer(scores), right, "weights", mistakes)

    with trial("large scores"):
        hint = (
            "it overflows for scores of several hundred: subtract the largest of the scores and 0 from all of them "
            "(also from the 0), or use torch.softmax with the column of zeros"
        )
        large = scores * 100 + 300
        expect(answer(large), expected(large), "weights of large scores", finite=hint)

    with trial("very low scores"):
        low_scores = scores - 50
        mistakes = {
            "the weights of scores near −50 are large: the 1 in the denominator must be rescaled with the largest "
            "score that was subtracted": (low_scores.double().softmax(-1))
        }
        expect(answer(low_scores), expected(low_scores), "weights of scores near −50, which are all about 0,", mistakes)

    with trial("masked keys"):
        s = scores.clone()
        s[0, 1], s[1, :, 2:] = -torch.inf, -torch.inf
        hint = "a row of −inf gives NaN: −inf − (−inf) is NaN; with the 0 among the scores the largest is ≥ 0"
        expect(answer(s), expected(s), "weights of masked keys", finite=hint)


def _causal(scores: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    n = scores.shape[-1]
    return scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)


@exercise
def sink_curve(answer: Callable[[np.ndarray], np.ndarray]) -> None:
    """Exercise 3.1: the mean weight on the first key of a text's first 2, 3, … tokens, from one run.

    Args:
        answer: ``answer(whole)`` for an array (layers, heads, n): the weight of every query on the first key. Returns
            (layers, heads, n − 1), whose entry i is the mean over queries 1 … i + 1.
    """
    whole = _causal(draw(2, 3, 9, 9))[..., 0].double()
    counts = torch.arange(1, 9)
    right = whole[..., 1:].cumsum(-1) / counts
    mistakes = {
        "the first query is included: it sees only itself, so its weight is always 1; leave it out": (
            whole.cumsum(-1)[..., 1:] / (counts + 1)
        ),
        "the first query is included in the sum, but not in the count": whole.cumsum(-1)[..., 1:] / counts,
        "the sums are not divided by the number of queries": whole[..., 1:].cumsum(-1),
        "these are the weights of single queries, expected means over all queries up to each": whole[..., 1:],
        "all sums are divided by the largest number of queries": whole[..., 1:].cumsum(-1) / 8,
    }
    with trial("a mean for each number of tokens"):
        expect(array(answer(whole.numpy().copy()), "the answer"), right, "the answer", mistakes, 1e-9)


@exercise
def compare_models(answer: Callable[[np.ndarray, bool], tuple[np.ndarray, float]]) -> None:
    """Exercise 3.2: the mean weight on the first key in every head, and its value where rows are uniform.

    Args:
        answer: ``answer(sink, causal)`` for an array (layers, heads, n), the weight of every query on the first key.
            Returns the means (layers, heads) over queries 1 … n − 1, and the mean of these queries if each gave its
            visible keys the same weight: query i has i + 1 of them if the model is causal, else n.
    """
    for name, n, causal in (("a causal model", 7, True), ("every key is visible", 6, False)):
        sink = _causal(draw(2, 3, n, n))[..., 0].double()
        harmonic = sum(1 / i for i in range(2, n + 1))
        floors = {
            "the floor of a causal model is the mean of 1/(i + 1) over queries 1 … n − 1, not 1/n": 1 / n,
            "the first query is included in the floor: leave it out there, too": sum(1 / i for i in range(1, n + 1))
            / n,
            "where every key is visible, uniform rows give each key 1/n": harmonic / (n - 1),
        }
        floor = harmonic / (n - 1) if causal else 1 / n
        with trial(name):
            got = answer(sink.numpy().copy(), causal)
            if not (isinstance(got, tuple) and len(got) == 2):
                raise Wrong(f"it returns {type(got).__name__}, expected two: the means of heads, and the floor")
            mistakes = {"the first query is included: leave it out": sink.mean(-1),
                        "it is one number, expected one for each head": sink[..., 1:].mean()}  # fmt: skip
            expect(array(got[0], "the means"), sink[..., 1:].mean(-1), "the means", mistakes, 1e-9)
            wrong = {hint: torch.tensor(x, dtype=torch.float64) for hint, x in floors.items()}
            expect(array(got[1], "the floor"), torch.tensor(floor, dtype=torch.float64), "the floor", wrong, 1e-9)
