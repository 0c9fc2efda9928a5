"""Checks of the Bahdanau lab: the additive score, and the accuracy of alignments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from qkv import reference, scores
from qkv_lab.check.hints import draw, expect
from qkv_lab.check.verdict import Wrong, judge


def additive_score(answer: Callable[..., Float64[Tensor, "b nq nk"]]) -> bool:
    """Exercise of the Bahdanau lab: the score v · tanh(W q + U k) of every query and key.

    Args:
        answer: ``answer(query, keys, w_q, w_k, vector)`` for float64 queries (b, nq, dq), keys (b, nk, dk), W (a, dq),
            U (a, dk) and v (a,). Returns scores (b, nq, nk), before any softmax.

    >>> def right(query, keys, w_q, w_k, vector):
    ...     return torch.tanh((query @ w_q.T)[:, :, None] + (keys @ w_k.T)[:, None]) @ vector
    >>> additive_score(right)
    ✓ 2 queries, 3 keys
    ✓ 3 queries, 1 key, a batch of one
    ✓ large states
    True
    """
    trials = {
        "2 queries, 3 keys": lambda: _check_additive(answer, 2, 2, 3, 5, 4, 6),
        "3 queries, 1 key, a batch of one": lambda: _check_additive(answer, 1, 3, 1, 2, 7, 4),
        "large states": lambda: _check_additive(answer, 1, 2, 4, 3, 2, 5, times=1e3),
    }
    return judge(answer, trials)


def alignment_accuracy(answer: Callable[[Tensor, Sequence[tuple[int, ...]]], float]) -> bool:
    """Exercise of the Bahdanau lab: how often the strongest source word is a true counterpart.

    Args:
        answer: ``answer(weights, truth)`` for weights (t, s) of t target words on s source words, and for each target
            word the positions of its counterparts in the source: none, one, or several. Target words without a
            counterpart are left out. Returns a number from 0 to 1; 0.0 if all words are left out.

    >>> def right(weights, truth):
    ...     found = [row.argmax().item() in places for row, places in zip(weights, truth) if places]
    ...     return sum(found) / len(found) if found else 0.0
    >>> alignment_accuracy(right)
    ✓ one counterpart each
    ✓ several counterparts
    ✓ words without a counterpart
    ✓ no word with a counterpart
    True
    """

    def one() -> None:
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

    def several() -> None:
        weights = torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.3, 0.7], [0.8, 0.1, 0.1]])
        mistakes = {
            1 / 3: "only the first counterpart of a word was compared; any of them is correct",
            0.4: "the number of correct words is divided by the number of counterparts, expected that of target words",
        }
        _expect_share(answer(weights, [(0, 1), (2,), (1, 2)]), 2 / 3, mistakes)

    def without() -> None:
        weights = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
        mistakes = {
            1 / 5: "words without a counterpart are counted as wrong; leave them out of both numbers",
            4 / 5: "words without a counterpart are counted as right; leave them out of both numbers",
        }
        _expect_share(answer(weights, [(0,), (), (1,), (), ()]), 1 / 2, mistakes)

    def nothing() -> None:
        _expect_share(answer(torch.tensor([[0.5, 0.5]]), [()]), 0.0, {1.0: "no word has a counterpart: expected 0.0"})

    trials = {
        "one counterpart each": one,
        "several counterparts": several,
        "words without a counterpart": without,
        "no word with a counterpart": nothing,
    }
    return judge(answer, trials)


def _check_additive(
    answer: Callable[..., object], b: int, nq: int, nk: int, dq: int, dk: int, a: int, times: float = 1.0
) -> None:
    """One trial of `additive_score`."""
    shapes = ((b, nq, dq), (b, nk, dk), (a, dq), (a, dk), (a,))
    query, keys, w_q, w_k, vector = (draw(*shape, seed=i).double() for i, shape in enumerate(shapes))
    query, keys = times * query, times * keys
    score = scores.Additive(vector, w_q, w_k)
    loops = [
        [[reference.compare(score, q.numpy(), k.numpy(), 0, 0) for k in keys[i]] for q in query[i]] for i in range(b)
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
    expect(answer(query, keys, w_q, w_k, vector), expected, "the answer", mistakes, 1e-9)


def _expect_share(got: object, expected: float, mistakes: dict[float, str]) -> None:
    """Raise `Wrong` unless an answer is the expected share. If it is that of a known mistake, give its hint."""
    if isinstance(got, Tensor | np.ndarray | np.generic) and got.ndim == 0:
        got = got.item()
    if not isinstance(got, int | float):
        raise Wrong(f"the answer is {type(got).__name__}, expected one number")
    if not abs(got - expected) < 1e-5:
        hints = [hint for wrong, hint in mistakes.items() if abs(got - wrong) < 1e-5]
        raise Wrong(hints[0] if hints else f"the answer is {got:.4g}, expected {expected:.4g}")
