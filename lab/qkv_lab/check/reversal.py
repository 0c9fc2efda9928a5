"""Checks of the reversal lab: attention with einsum, and how often a head attends to the mirrored position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from qkv import masks, reference
from qkv_lab.check.hints import draw, expect, pair
from qkv_lab.check.verdict import Wrong, judge

OutWeights = tuple[Float[Tensor, "b n m"], Float[Tensor, "b h n n"]]


def einsum_attention(answer: Callable[..., OutWeights]) -> bool:
    """Exercise of the reversal lab: multi-head self-attention, written as einsums.

    Args:
        answer: ``answer(x, w_q, w_k, w_v, w_o, mask)`` for float64 x (b, n, m), the weights of h heads w_q, w_k and w_v
            (m, h, d) and w_o (h, d, m), and a mask (n, n), True where a query (row) may attend to a key (column), or
            None. Returns out (b, n, m) and weights (b, h, n, n).

    >>> def right(x, w_q, w_k, w_v, w_o, mask):
    ...     q, k, v = (torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v))
    ...     scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    ...     if mask is not None:
    ...         scores = scores.masked_fill(~mask, -torch.inf)
    ...     weights = scores.softmax(-1)
    ...     return torch.einsum("bhqk,bhkd,hdm->bqm", weights, v, w_o), weights
    >>> einsum_attention(right)
    ✓ without a mask
    ✓ under a causal mask
    ✓ under a mask that is not causal
    ✓ one head, one token
    True
    """
    odd = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0, 1, 0, 0, 0]]).bool()
    trials = {
        "without a mask": lambda: _check_attention(answer, 2, 5, 6, 3, 4, None),
        "under a causal mask": lambda: _check_attention(answer, 2, 4, 6, 2, 5, torch.ones(4, 4).tril().bool()),
        "under a mask that is not causal": lambda: _check_attention(answer, 1, 5, 4, 3, 2, odd),
        "one head, one token": lambda: _check_attention(answer, 1, 1, 3, 1, 2, torch.ones(1, 1).bool()),
    }
    return judge(answer, trials)


def reversal_score(answer: Callable[[Tensor, int], Float[Tensor, " h"]]) -> bool:
    """Exercise of the reversal lab: how often each head's strongest key is the mirrored position.

    A sequence is `length` symbols, a separator, and the symbols again, last one first. Reversed symbol p is predicted
    by query length + p (the separator for p = 0), and is key length − 1 − p.

    Args:
        answer: ``answer(weights, length)`` for weights (b, h, n, n) of b sequences; n is 2 · length, or
            2 · length + 1 if the input includes the last token. Returns (h,) numbers from 0 to 1.

    >>> def right(weights, length):
    ...     place = torch.arange(length)
    ...     return (weights[:, :, length + place].argmax(-1) == length - 1 - place).double().mean((0, 2))
    >>> reversal_score(right)
    ✓ a head that mirrors, and one that does not
    ✓ heads that mirror sometimes
    ✓ with the last token
    True
    """

    def mirrors() -> None:
        _check_score(
            answer, torch.stack([_head_weights(5, 10, 9), _head_weights(5, 10, 10)])[None].repeat(2, 1, 1, 1), 5
        )

    def sometimes() -> None:
        weights = (3 * draw(3, 4, 8, 8)).softmax(-1)
        weights[:, 1] += _head_weights(4, 8, 7)
        weights[1:, 2, 5] += _head_weights(4, 8, 7)[5]
        weights[:, 2, 4] += _head_weights(4, 8, 7)[4]
        _check_score(answer, weights, 4)

    def whole() -> None:
        _check_score(answer, torch.stack([_head_weights(3, 7, 5), _head_weights(3, 7, 6)])[None], 3)

    trials = {
        "a head that mirrors, and one that does not": mirrors,
        "heads that mirror sometimes": sometimes,
        "with the last token": whole,
    }
    return judge(answer, trials)


def _check_attention(
    answer: Callable[..., object], b: int, n: int, m: int, h: int, d: int, mask: Tensor | None
) -> None:
    """One trial of `einsum_attention`."""
    shapes = ((b, n, m), (m, h, d), (m, h, d), (m, h, d), (h, d, m))
    x, w_q, w_k, w_v, w_o = (draw(*shape, seed=i).double() for i, shape in enumerate(shapes))
    out, weights = pair(answer(x, w_q, w_k, w_v, w_o, mask))
    q, k, v = (torch.einsum("bnm,mhd->bhnd", x, w) for w in (w_q, w_k, w_v))
    dense = None if mask is None else masks.Dense(mask[None, None])
    found = reference.attention(q, k, v, mask=dense)
    right_weights, means = torch.from_numpy(found.weights), torch.from_numpy(found.out)
    each = torch.einsum("bhnd,hdm->bhnm", means, w_o)
    masked = torch.zeros(n, n, dtype=torch.bool) if mask is None else ~mask
    plain = (q @ k.mT).masked_fill(masked, -torch.inf)
    mistakes = {
        "the scores are not scaled: divide them by √d, where d is the size of a head": plain.softmax(-1),
        "the scores are divided by √m, the root of the model's width; expected √d, where d is the size of a head": (
            (plain / m**0.5).softmax(-1)
        ),
        "the softmax runs over the queries; it should run over the keys of each query: the last dimension": (
            (plain / d**0.5).softmax(-2)
        ),
        "queries and keys are swapped: rows are queries, so the first factor must come from w_q": (
            ((k @ q.mT).masked_fill(masked, -torch.inf) / d**0.5).softmax(-1)
        ),
    }
    if mask is not None:
        scores = q @ k.mT / d**0.5
        mistakes |= {
            "the mask is ignored": scores.softmax(-1),
            "masked scores are set to 0, but e^0 = 1 is not 0: set them to −∞": (
                scores.masked_fill(masked, 0).softmax(-1)
            ),
            "the mask comes after the softmax, and rows no longer sum to one; mask the scores before it": (
                scores.softmax(-1).masked_fill(masked, 0)
            ),
            "the mask is the wrong way round: True is where a query may attend, so fill where it is False: ~mask": (
                scores.masked_fill(mask, -torch.inf).softmax(-1)
            ),
            "the mask is transposed: its rows are queries": scores.masked_fill(masked.mT, -torch.inf).softmax(-1),
        }
    expect(weights, right_weights, "weights", mistakes, 1e-9)
    expect(out, each.sum(1), "out", {
        "these are the heads' means of the values; project them by w_o, and sum over the heads": means,
        "these are the heads' means of the values; project them by w_o, and sum over h and d": means.transpose(1, 2),
        "these are the heads' means, concatenated; project them by w_o": means.transpose(1, 2).flatten(2),
        "the heads are not summed; the result has no dimension h": each,
        "the heads are averaged, expected summed": each.mean(1),
        "tokens and heads are mixed: (b, h, n, d) was reshaped before it was transposed": (
            means.reshape(b, n, h * d) @ w_o.flatten(0, 1)
        ),
    }, 1e-9)  # fmt: skip


def _check_score(answer: Callable[[Tensor, int], Tensor], weights: Tensor, length: int) -> None:
    """One trial of `reversal_score`."""
    place = torch.arange(length)
    strongest = weights.argmax(-1)
    right = (strongest[:, :, length + place] == length - 1 - place).double()
    inside = length + 1 + place < weights.shape[2]
    late = (strongest[:, :, (length + 1 + place)[inside]] == (length - 1 - place)[inside]).double()
    columns = (weights.argmax(-2)[:, :, length - 1 - place] == length + place).double()
    one_late = (
        "you count query + key = 2 · length, one too late: reversed symbol 0 is predicted *at* the separator, query "
        "length, not after it, and is key length − 1"
    )
    mistakes = {
        one_late: late.mean((0, 2)),
        f"{one_late} (and the divisor counts positions that were left out)": late.sum(2).mean(0) / length,
        "the separator is left out, but it is the query that predicts the first reversed symbol": (
            right[..., 1:].mean((0, 2))
        ),
        "the strongest key is compared with p, expected length − 1 − p: the last symbol comes first": (
            (strongest[:, :, length + place] == place).double().mean((0, 2))
        ),
        "this uses the strongest query of each key; queries are rows, so take argmax over the last dimension": (
            columns.mean((0, 2))
        ),
        "these are counts, expected shares": right.sum((0, 2)),
        "the counts are divided by the number of positions only; divide by that of sequences, too": (
            right.sum((0, 2)) / length
        ),
        "this is the mean weight on the mirrored position, expected how often it is the strongest key": (
            weights[:, :, length + place, length - 1 - place].double().mean((0, 2))
        ),
        "there is a number for each sequence; average over them, too": right.mean(2),
        "these are shares for each position; average over positions and sequences, not over heads": right.mean((0, 1)),
    }
    try:
        got = answer(weights.clone(), length)
    except IndexError as error:
        raise Wrong(f"{error}: a query index is out of range; use queries length … 2 · length − 1") from None
    expect(got.double() if isinstance(got, Tensor) else got, right.mean((0, 2)), "the answer", mistakes, 1e-6)


def _head_weights(length: int, n: int, total: int) -> Tensor:
    """Weights (n, n) of a head whose queries from `length` on attend to key total − query, and others to themselves."""
    weights = torch.eye(n)
    for query in range(length, n):
        weights[query] = 0.1 / n
        weights[query, total - query] = 0.9
    return weights
