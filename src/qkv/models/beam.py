"""Beam search: the likeliest continuations, looked for breadth first."""

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
    """A continuation and what it is worth.

    >>> Hypothesis(tokens=[5, 2], score=-0.7).tokens
    [5, 2]
    """

    tokens: list[int]
    """Without the end token; as many as `max_new_tokens` if it was cut off there."""
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

    At each step the candidates are all tokens after all live hypotheses. Those that end, and are among the best
    `beams`, are finished; the best `beams` of the others live on, so finished ones do not narrow the beam. A beam of
    one has no second best to go on with: it is greedy decoding. What is alive after `max_new_tokens` is finished as
    it is. An item is done when nothing alive can beat the worst finished hypothesis that would be returned: since a
    log-probability only falls, the best score to hope for is the best live log-probability over the longest length
    (over the next one, if length_penalty is negative). This rule only saves work; it never changes the result.

    Candidates, rules and scores are those of Hugging Face transformers with ``early_stopping="never"``.

    Args:
        model: anything with a `step`; it runs in evaluation mode, without autograd.
        state: what `model.start` returned for a batch of b; used up.
        start: the first token of each item, or its prompt.
        beams: hypotheses alive at a time, for each item.
        max_new_tokens: length of the longest hypothesis.
        end: the token, or tokens, that end a hypothesis; None if nothing does.
        length_penalty: power of the length that log-probabilities are divided by: 0 compares sums, which favours
            short hypotheses; 1 means a token; more favours long ones. The length is that of the new tokens.
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
        raise InputError(f"num_return is {num_return}, expected 1 to {beams}, as many as there are beams")
    if not math.isfinite(length_penalty):
        raise InputError(f"length_penalty is {length_penalty}, expected a finite number")
    with evaluating(model):
        return _search(model, state, prompt, beams, max_new_tokens, ends, length_penalty, num_return)


def _search(
    model: Model, state: Any, prompt: Tensor, beams: int, longest: int, ends: Tensor, penalty: float, wanted: int
) -> list[list[Hypothesis]]:
    batch = len(prompt)
    looked_at = 1 if beams == 1 else beams * (1 + len(ends))  # so many that `beams` of them do not end
    found: list[list[Hypothesis]] = [[] for _ in range(batch)]
    alive = torch.zeros(batch, 1, dtype=torch.float64, device=prompt.device)  # log-probabilities, best first
    tokens = prompt.new_empty(batch, 1, 0)
    step = prompt
    for length in range(1, longest + 1):
        logits = model.step(step, state)
        width, size = alive.shape[1], logits.shape[-1]
        candidates = alive[..., None] + logits.double().log_softmax(-1).view(batch, width, size)
        scores, index = candidates.flatten(1).topk(min(looked_at, width * size))
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
        hope = alive[:, 0] / (longest if penalty >= 0 else length + 1) ** penalty
        if all(map(_done, found, hope.tolist(), [wanted] * batch)):
            break
        rows = torch.arange(batch, device=prompt.device)[:, None] * width + parent.gather(1, chosen)
        state.reorder(rows.flatten())
        tokens = _gathered(tokens, chosen)
        step = token.gather(1, chosen).view(-1, 1)
    return found


def _done(found: list[Hypothesis], hope: float, wanted: int) -> bool:
    """Whether nothing alive can come among those wanted, given the best score it can hope for."""
    return hope == -math.inf or (len(found) == wanted and found[-1].score >= hope)


def _gathered(tokens: Int[Tensor, "b w t"], index: Int[Tensor, "b w2"]) -> Int[Tensor, "b w2 t"]:
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))
