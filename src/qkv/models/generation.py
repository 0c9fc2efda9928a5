"""Generation with any model that has a `step`: `Sampler`, `stream`, `generate`, `text_stream`, and `beam_search`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qkv.errors import InputError, at_least_one, kind_of


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen: by default from the model's distribution; `Sampler(temperature=0)` is greedy.

    Each setting filters the result of the one before it. The order is that of Hugging Face transformers.

    Args:
        repetition_penalty: logits of tokens that already occurred are divided by it where positive and multiplied by it
            where negative (Keskar et al. 2019, arXiv:1909.05858, §4.1, in transformers' form); 1 changes nothing.
        temperature: divides the logits; 0 takes the token with the largest logit, and the first of several such tokens.
        top_k: keep the tokens whose logit is at least the k-th largest, including all ties.
        top_p: keep the fewest tokens, most likely first, whose probabilities sum to at least this (Holtzman et al.
            2020, arXiv:1904.09751, §3.1); of tokens of equal probability, the first.
        min_p: keep the tokens with at least this share of the probability of the most likely token (Nguyen et al. 2024,
            arXiv:2407.01082).

    Raises:
        InputError: for a setting outside its range.

    >>> import torch
    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    >>> Sampler(top_p=0.7).probabilities(logits).round(decimals=3).tolist()
    [[0.625, 0.375, 0.0, 0.0]]
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}, expected 0 (greedy) or a positive finite number")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise InputError(f"top_k is {self.top_k}, expected a whole number of at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, expected more than 0 and at most 1, or None")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}, expected 0 to 1, or None")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}, expected a positive finite number")

    def probabilities(
        self, logits: Float[Tensor, "b v"], seen: Int[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b v"]:
        """The probability of each token to be drawn.

        Args:
            logits: logits of the next token.
            seen: tokens that the repetition penalty applies to. Ids outside the vocabulary, such as −1 for padding, are
                ignored. Required if the penalty is not 1.

        Returns:
            Probabilities in float64, exactly 0 where a token is ruled out.

        Raises:
            InputError: if there is a penalty, but `seen` is None.
        """
        logits = logits.double()  # temperatures near 0 and long tails are safe
        if self.repetition_penalty != 1:
            if seen is None:
                raise InputError(f"seen is None, expected tokens, as repetition_penalty is {self.repetition_penalty}")
            size, penalty = logits.shape[-1], self.repetition_penalty
            # The last column is for ids outside the vocabulary.
            occurs = logits.new_zeros(len(logits), size + 1, dtype=torch.bool)
            occurs.scatter_(1, seen.masked_fill((seen < 0) | (seen >= size), size), True)
            logits = torch.where(occurs[:, :-1], torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        if self.temperature == 0:
            best, index = logits.max(-1, keepdim=True)
            return torch.zeros_like(logits).scatter(-1, index, 1 + 0 * best)  # keeps NaN, which `draw` reports
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # without the maximum it could overflow
        if self.top_k is not None:
            smallest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -math.inf)
        if self.top_p is not None:
            ordered, index = logits.sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # total probability of all more likely tokens
            before[:, 0] = 0
            out = before >= self.top_p
            logits = logits.masked_fill(out.scatter(-1, index, out), -math.inf)
        chances = logits.softmax(-1)
        if self.min_p is not None:
            chances = chances.masked_fill(chances < self.min_p * chances.amax(-1, keepdim=True), 0)
            chances = chances / chances.sum(-1, keepdim=True)
        return chances

    def draw(self, probabilities: Float[Tensor, "b v"], generators: Sequence[torch.Generator]) -> Int[Tensor, " b"]:
        """One token for each row: the first whose cumulative probability exceeds a uniform number.

        Args:
            probabilities: rows that sum to about 1.
            generators: one for each row, on the CPU. Each row draws one number from its own generator, so its token
                does not depend on the other rows of the batch; nor on the device, because the sums are computed on the
                CPU.

        Raises:
            InputError: if a row is not a distribution, for instance NaN, or the number of generators is wrong.
        """
        if len(generators) != len(probabilities):
            raise InputError(f"generators has {len(generators)} items, expected {len(probabilities)}, one for each row")
        total = probabilities.cpu().double().cumsum(-1)  # in order: a parallel sum need not be monotone
        broken = ~(total[:, -1] > 0) | total[:, -1].isinf()
        if broken.any():
            row = int(broken.nonzero()[0])
            raise InputError(
                f"probabilities of row {row} sum to {total[row, -1]:g}, expected 1: are its logits finite?"
            )
        uniform = torch.stack([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])
        # right=True skips tokens of probability 0, which add nothing to the sum.
        return torch.searchsorted(total, uniform * total[:, -1:], right=True)[:, 0].to(probabilities.device)


@runtime_checkable
class Model(Protocol):
    """A model that can generate: an `nn.Module` with a vocabulary and a `step`; see `DecoderLM.start` for a state."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""

    def step(self, tokens: Int[Tensor, "b n"], state: Any, /) -> Float[Tensor, "b v"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; changes `state`."""


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer for `text_stream`. If the prompt is a text, it also needs `encode(text)`, or a call that returns
    ``{"input_ids": …}``.
    """

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens; U+FFFD for bytes that are not UTF-8 (yet)."""


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards, restore the mode of each submodule."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def stream(
    model: Model,
    state: Any,
    prompt: Int[Tensor, "b n"],
    *,
    max_new_tokens: int,
    sampling: Sampler = Sampler(),
    end: int | Sequence[int] | None = None,
    seed: int | None = None,
    padding: Int[Tensor, " b"] | None = None,
) -> Iterator[Tensor]:
    """Generate tokens one step at a time, one token for each item of the batch.

    The model is in evaluation mode and without autograd only while it computes; between steps it has its former mode.
    The last generated token is not yet in `state`: to continue later, begin the next prompt with it.

    Args:
        model: anything with a `step`: `DecoderLM`, `EncoderDecoder`, `RNNSeq2Seq`, `Captioner`.
        state: the state that `model.start` returned for a batch of b; the steps change it. If `start` encodes a source,
            call `model.eval()` before it, or dropout affects the encoding.
        prompt: the tokens to continue, at least one.
        max_new_tokens: largest number of new tokens.
        sampling: how a token is chosen.
        end: the token, or tokens, after which an item is finished.
        seed: item i draws from its own generator, seeded with (seed, i), so its tokens do not depend on the other items
            or on the size of the batch. If None, the seed is drawn from torch's generator.
        padding: how many tokens at the left of each item are padding, which the repetition penalty ignores. The model
            itself gets this number from `model.start(…, padding=…)`.

    Yields:
        (b,) int64: the tokens of a step, including the end token; −1 for an item that was already finished. Generation
        stops when all items are finished.

    Raises:
        InputError: immediately, for a prompt without tokens or arguments outside their range.

    >>> class Count(torch.nn.Module):
    ...     vocabulary = 5
    ...     def step(self, tokens, state):
    ...         return torch.nn.functional.one_hot((tokens[:, -1] + 1) % 5, 5) * 9.0
    >>> prompt = torch.tensor([[0], [2]])
    >>> for tokens in stream(Count(), None, prompt, max_new_tokens=9, sampling=Sampler(temperature=0), end=4):
    ...     print(tokens.tolist())
    [1, 3]
    [2, 4]
    [3, -1]
    [4, -1]
    """
    check(prompt, max_new_tokens)
    batch, n = prompt.shape
    ends = end_tokens(end, model.vocabulary, prompt.device)
    if seed is not None and seed < 0:
        raise InputError(f"seed is {seed}, expected a number of at least 0, or None")
    seen = prompt
    if padding is not None:
        if padding.shape != (batch,) or bool(((padding < 0) | (padding >= n)).any()):
            raise InputError(f"padding is {padding.tolist()}, expected {batch} numbers from 0 to {n - 1}")
        pads = torch.arange(n, device=prompt.device) < padding.to(prompt.device)[:, None]
        seen = prompt.masked_fill(pads, -1)
    return _stream(model, state, prompt, seen, max_new_tokens, sampling, ends, seed)


def _stream(
    model: Model, state: Any, prompt: Tensor, seen: Tensor, steps: int, sampling: Sampler, ends: Tensor,
    seed: int | None,
) -> Iterator[Tensor]:  # fmt: skip
    generators = _generators(len(prompt), 0 if sampling.temperature == 0 else seed)
    finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens = prompt
    for _ in range(steps):
        with evaluation_mode(model), torch.inference_mode():  # for one step only, so the caller keeps its modes
            chances = sampling.probabilities(model.step(tokens, state), seen)
        drawn = sampling.draw(chances, generators).to(prompt.device)
        out = drawn.masked_fill(finished, -1)
        seen = torch.cat([seen, out[:, None]], 1)
        finished = finished | torch.isin(drawn, ends)
        tokens = drawn[:, None]  # finished items get a token, too: the batch needs one, and their output is discarded
        yield out
        if bool(finished.all()):
            return


def generate(
    model: Model,
    state: Any,
    prompt: Int[Tensor, "b n"],
    *,
    max_new_tokens: int,
    sampling: Sampler = Sampler(),
    end: int | Sequence[int] | None = None,
    seed: int | None = None,
    padding: Int[Tensor, " b"] | None = None,
) -> list[list[int]]:
    """The new tokens of each item of a batch, without the prompt and the end token. For the arguments, see `stream`.

    >>> class Count(torch.nn.Module):
    ...     vocabulary = 5
    ...     def step(self, tokens, state):
    ...         return torch.nn.functional.one_hot((tokens[:, -1] + 1) % 5, 5) * 9.0
    >>> prompt = torch.tensor([[0], [2]])
    >>> generate(Count(), None, prompt, max_new_tokens=9, sampling=Sampler(temperature=0), end=4)
    [[1, 2, 3], [3]]
    """
    steps = stream(
        model, state, prompt,
        max_new_tokens=max_new_tokens, sampling=sampling, end=end, seed=seed, padding=padding,
    )  # fmt: skip
    left_out = {-1, *end_tokens(end, model.vocabulary, prompt.device).tolist()}
    rows = torch.stack(list(steps), 1).tolist()
    return [[token for token in row if token not in left_out] for row in rows]


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]:
    """Prompts of several lengths as one batch, padded on the left so that their last tokens are aligned.

    Args:
        prompts: token ids, at least one each.
        pad: the token that fills the left side.

    Returns:
        ``(ids, padding)``: the batch, and how many ids at the left of each item are padding.

    Raises:
        InputError: if `prompts` is empty, or one of them has no tokens.

    >>> pad_left([[5, 6, 7], [8]], pad=0)
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([0, 2]))
    """
    if not len(prompts):
        raise InputError("prompts is empty, expected at least one prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompts[{i}] has no tokens, expected at least one")
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], True, pad, padding_side="left")
    return ids, ids.shape[1] - torch.tensor([len(prompt) for prompt in prompts])


def text_stream(
    model: Model,
    state: Any,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Int[Tensor, " n"],
    *,
    max_new_tokens: int,
    sampling: Sampler = Sampler(),
    end: int | Sequence[int] | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """Generate text for one prompt, piece by piece.

    The pieces are not empty, and together they are the decoded new tokens, up to a stop string or the end token. All
    new tokens are decoded again at each step, because the text of a token can depend on the tokens before it: this is
    quadratic in the number of tokens, but cheap compared with the model. Text that may still change is held back: an
    incomplete character, and an ending that may be the beginning of a stop string.

    Args:
        model: see `stream`.
        state: the state that `model.start` returned for a batch of one.
        tokenizer: of Hugging Face transformers, or any with `encode` (or a call that returns ``{"input_ids": …}``) and
            `decode`. Decoding more tokens should not change the text of the tokens before them.
        prompt: text, or token ids; at least one token.
        max_new_tokens: largest number of new tokens.
        sampling: how a token is chosen.
        end: the token, or tokens, that end the text.
        seed: see `stream`.
        stop: strings before which the text stops: at the one that is complete first, and at the longest of several. It
            does not matter how they are divided into tokens.

    Raises:
        InputError: immediately, for a prompt without tokens or arguments outside their range.

    >>> class Echo(torch.nn.Module):
    ...     vocabulary = 256
    ...     def step(self, tokens, state):
    ...         return torch.nn.functional.one_hot(tokens[:, -1] + 1, 256) * 9.0
    >>> class Bytes:
    ...     def encode(self, text):
    ...         return list(text.encode())
    ...     def decode(self, ids):
    ...         return bytes(ids).decode(errors="replace")
    >>> greedy = Sampler(temperature=0)
    >>> list(text_stream(Echo(), None, Bytes(), "a", max_new_tokens=9, sampling=greedy, stop=["ef"]))
    ['b', 'c', 'd']
    """
    if isinstance(stop, str) or not all(stop):
        raise InputError(f"stop is {stop!r}, expected a sequence of non-empty strings, such as ['\\n\\n']")
    encoded: Any = prompt
    if isinstance(prompt, str):
        whole: Any = tokenizer
        encoded = whole.encode(prompt) if hasattr(whole, "encode") else whole(prompt)["input_ids"]
    module: Any = model
    device = next((x.device for x in itertools.chain(module.parameters(), module.buffers())), torch.device("cpu"))
    ids = torch.as_tensor(encoded, dtype=torch.long).reshape(1, -1).to(device)
    tokens = stream(model, state, ids, max_new_tokens=max_new_tokens, sampling=sampling, end=end, seed=seed)
    return _text(tokens, tokenizer, set(end_tokens(end, model.vocabulary, ids.device).tolist()), stop)


def _text(steps: Iterator[Tensor], tokenizer: Tokenizer, ends: set[int], stop: Sequence[str]) -> Iterator[str]:
    emitted, text = 0, ""  # number of characters already yielded, and all new text
    new: list[int] = []
    for step in steps:
        token = int(step)
        if token in ends:
            break
        new.append(token)
        text = tokenizer.decode(new)
        complete = text.rstrip("\ufffd")  # an incomplete character decodes to U+FFFD
        stopped = _before_stop(complete, emitted, stop)
        begun = max((n for s in stop for n in range(1, len(s)) if complete.endswith(s[:n])), default=0)
        until = len(complete) - begun if stopped is None else stopped
        if until > emitted:
            yield text[emitted:until]
            emitted = until
        if stopped is not None:
            return
    rest = text[emitted : _before_stop(text, emitted, stop)]
    if rest:
        yield rest


def _before_stop(text: str, start: int, stop: Sequence[str]) -> int | None:
    """The start of the stop string that is complete first (of several, the longest), or None."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s, start)) >= 0]
    return min(found)[1] if found else None


def _generators(batch: int, seed: int | None) -> list[torch.Generator]:
    """One generator for each item, seeded with (seed, item)."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    # torch's CPU generator uses only 32 bits of its seed, so they must depend on all bits of both numbers.
    mixed = [np.random.SeedSequence((seed, item)).generate_state(1) for item in range(batch)]
    return [torch.Generator().manual_seed(int(x[0])) for x in mixed]


def check(prompt: Int[Tensor, "b n"], max_new_tokens: int) -> None:
    """Raise `InputError` for a prompt without tokens, or less than one token to generate."""
    if not isinstance(prompt, Tensor) or prompt.ndim != 2:
        raise InputError(f"prompt is {kind_of(prompt)}, expected a tensor (batch, length) of tokens, as of pad_left")
    if prompt.shape[1] < 1:
        raise InputError("prompt has no tokens, expected at least one")
    at_least_one(max_new_tokens=max_new_tokens)


def end_tokens(end: int | Sequence[int] | None, vocabulary: int, device: torch.device) -> Int[Tensor, " e"]:
    """The end tokens as a tensor; raises `InputError` for tokens outside the vocabulary."""
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    for token in ends:
        if not 0 <= token < vocabulary:
            raise InputError(f"end: {token} is not in the vocabulary, expected tokens from 0 to {vocabulary - 1}")
    return torch.tensor(ends, dtype=torch.long, device=device)


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
    at_least_one(beams=beams)
    if not 1 <= num_return <= beams:
        raise InputError(f"num_return is {num_return}, expected 1 to {beams}, the number of beams")
    if not math.isfinite(length_penalty):
        raise InputError(f"length_penalty is {length_penalty}, expected a finite number")
    with evaluation_mode(model), torch.inference_mode():
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
        # An item is done if no unfinished hypothesis, whose score is at most the bound, can be among its best.
        if all(
            most == -math.inf or (len(best) == wanted and best[-1].score >= most)
            for best, most in zip(found, bound.tolist(), strict=True)
        ):
            break
        rows = torch.arange(batch, device=prompt.device)[:, None] * width + parent.gather(1, chosen)
        state.reorder(rows.flatten())
        tokens = _gathered(tokens, chosen)
        step = token.gather(1, chosen).view(-1, 1)
    return found


def _gathered(tokens: Int[Tensor, "b w t"], index: Int[Tensor, "b w2"]) -> Int[Tensor, "b w2 t"]:
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))
