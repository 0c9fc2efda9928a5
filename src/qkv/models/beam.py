"""Beam search for the most likely continuations of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.errors import InputError
from qkv.models.generation import Model, check, end_tokens, evaluating


@dataclass(frozen=True)
class Hypothesis:
    """A continuation and its score.

    >>> Hypothesis(tokens=[5, 2], score=-0.7).tokens
    [5, 2]
    """

    tokens: list[int]
    """The new tokens without the end token; `max_new_tokens` of them if no end token came."""
    score: float
    """Log-probability, natural, divided by (number of tokens, the end token included) ** length_penalty."""


def beam_search(
    model: Model,
    state: Any,
    start: Int[Tensor, " b"] | Int[Tensor, "b n"],
    *,
    beams: int = 4,
    max_new_tokens: int,
    end: int | Sequence[int] | None,
    length_penalty: float = 1.0,
    num_return: int = 1,
) -> list[list[Hypothesis]]:
    """The best continuations of each item of a batch that a beam of fixed width finds.

    At each step every unfinished hypothesis is extended by every token. Extensions that end, and are among the best
    `beams`, are finished; the best `beams` of the others remain, so finished hypotheses do not narrow the beam. A beam
    of one is greedy decoding. Hypotheses that remain after `max_new_tokens` count as finished. An item stops early when
    no unfinished hypothesis can beat the worst finished one that would be returned: a log-probability only falls, so
    the best possible score is the best log-probability divided by the longest length (by the next length, if
    length_penalty is negative). Stopping early saves work and never changes the result.

    Candidates, rules and scores are those of Hugging Face transformers with ``early_stopping="never"``.

    Args:
        model: anything with a `step`; it runs in evaluation mode, without autograd.
        state: the state that `model.start` returned for a batch of b; it cannot be used again.
        start: the first token of each item, or its prompt.
        beams: number of unfinished hypotheses kept for each item.
        max_new_tokens: length of the longest hypothesis.
        end: the token, or tokens, that end a hypothesis; None if there is none.
        length_penalty: log-probabilities are divided by the number of new tokens to this power: 0 compares sums, which
            favours short hypotheses; 1 compares means per token; larger powers favour long hypotheses.
        num_return: how many hypotheses of each item to return.

    Returns:
        For each item its hypotheses, best first; fewer than `num_return` only if no more were found that have a
        probability above 0.

    Raises:
        InputError: for a start without tokens or arguments out of range.

    Source: Sutskever et al. 2014, arXiv:1409.3215, §3.2, whose beam narrows; the length normalisation is that of Wu et
    al. 2016, arXiv:1609.08144, §7, in the simpler form of transformers.

    >>> class Coin(torch.nn.Module):  # 0 with probability 0.6, 1 with 0.4
    ...     vocabulary = 2
    ...     def step(self, tokens, state):
    ...         return torch.tensor([0.6, 0.4]).log().expand(len(tokens), 2)
    >>> class State:
    ...     def reorder(self, rows):
    ...         pass
    >>> found = beam_search(Coin(), State(), torch.tensor([0]), max_new_tokens=2, end=None, num_return=2)
    >>> [(h.tokens, round(math.exp(2 * h.score), 2)) for h in found[0]]
    [([0, 0], 0.36), ([0, 1], 0.24)]
    """
    prompt = start[:, None] if start.ndim == 1 else start
    check(prompt, max_new_tokens)
    ends = end_tokens(end, model.vocabulary, prompt.device)
    if beams < 1:
        raise InputError(f"beams is {beams}, expected at least 1")
    if not 1 <= num_return <= beams:
        raise InputError(f"num_return is {num_return}, expected 1 to {beams}, the number of beams")
    if not math.isfinite(length_penalty):
        raise InputError(f"length_penalty is {length_penalty}, expected a finite number")
    with evaluating(model):
        return _search(model, state, prompt, beams, max_new_tokens, ends, length_penalty, num_return)


def _search(
    model: Model, state: Any, prompt: Tensor, beams: int, longest: int, ends: Tensor, penalty: float, wanted: int
) -> list[list[Hypothesis]]:
    batch = len(prompt)
    candidates_kept = 1 if beams == 1 else beams * (1 + len(ends))  # enough that at least `beams` of them do not end
    found: list[list[Hypothesis]] = [[] for _ in range(batch)]
    alive = torch.zeros(batch, 1, dtype=torch.float64, device=prompt.device)  # log-probabilities, best first
    tokens = prompt.new_empty(batch, 1, 0)
    step = prompt
    for length in range(1, longest + 1):
        logits = model.step(step, state)
        width, size = alive.shape[1], logits.shape[-1]
        candidates = alive[..., None] + logits.double().log_softmax(-1).view(batch, width, size)
        scores, index = candidates.flatten(1).topk(min(candidates_kept, width * size))
        parent, token = index // size, index % size
        tokens = torch.cat([_gathered(tokens, parent), token[..., None]], -1)

        ended = torch.isin(token, ends)
        finished = (ended | (length == longest)) & (scores > -math.inf)
        for item, rank in finished[:, :beams].nonzero().tolist():
            new = tokens[item, rank, : length - int(ended[item, rank])].tolist()
            found[item].append(Hypothesis(new, float(scores[item, rank]) / length**penalty))
        found = [sorted(some, key=lambda h: -h.score)[:wanted] for some in found]
        if length == longest:
            break

        alive, chosen = scores.masked_fill(ended, -math.inf).topk(min(beams, scores.shape[1]))
        bound = alive[:, 0] / (longest if penalty >= 0 else length + 1) ** penalty
        if all(map(_done, found, bound.tolist(), [wanted] * batch)):
            break
        rows = torch.arange(batch, device=prompt.device)[:, None] * width + parent.gather(1, chosen)
        state.reorder(rows.flatten())
        tokens = _gathered(tokens, chosen)
        step = token.gather(1, chosen).view(-1, 1)
    return found


def _done(found: list[Hypothesis], bound: float, wanted: int) -> bool:
    """True if no unfinished hypothesis, whose score is at most `bound`, can be among the `wanted` best."""
    return bound == -math.inf or (len(found) == wanted and found[-1].score >= bound)


def _gathered(tokens: Int[Tensor, "b w t"], index: Int[Tensor, "b w2"]) -> Int[Tensor, "b w2 t"]:
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))
