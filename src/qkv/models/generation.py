"""Generation with any model that has a `step`: token by token (`stream`), all at once (`generate`), or as text
(`text_stream`). Beam search is in `qkv.models.sampling`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models.sampling import Sampler


@runtime_checkable
class Model(Protocol):
    """A model that can generate: an `nn.Module` with a vocabulary and a `step`; see `DecoderLM.start` for a state."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""

    def step(self, tokens: Int[Tensor, "b n"], state: Any, /) -> Float[Tensor, "b v"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; changes `state`."""

    def modules(self) -> Iterator[nn.Module]:
        """As `nn.Module.modules`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `nn.Module.parameters`."""

    def buffers(self) -> Iterator[Tensor]:
        """As `nn.Module.buffers`."""

    def eval(self) -> Any:
        """As `nn.Module.eval`."""


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer for `text_stream`. If the prompt is a text, it also needs `encode(text)`, or a call that returns
    ``{"input_ids": …}``.
    """

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens; U+FFFD for bytes that are not UTF-8 (yet)."""


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode without autograd; afterwards, restore the mode of each submodule."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
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
    sampling: Sampler = Sampler(),  # noqa: B008 (frozen)
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
        with evaluating(model):  # for one step only: the caller's code between steps keeps its modes
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
    sampling: Sampler = Sampler(),  # noqa: B008 (frozen)
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
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [[pad] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(ids), torch.tensor(padding)


def text_stream(
    model: Model,
    state: Any,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Int[Tensor, " n"],
    *,
    max_new_tokens: int,
    sampling: Sampler = Sampler(),  # noqa: B008 (frozen)
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
    ids = _encode(tokenizer, prompt) if isinstance(prompt, str) else torch.as_tensor(prompt, dtype=torch.long)
    ids = ids.reshape(1, -1).to(_device(model))
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
        until = len(complete) - _partial_stop(complete, stop) if stopped is None else stopped
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


def _partial_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest ending of `text` that is the beginning of a stop string."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def _encode(tokenizer: Any, text: str) -> Tensor:
    found = tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)["input_ids"]
    return torch.as_tensor(found, dtype=torch.long)


def _device(model: Model) -> torch.device:
    tensors: Iterable[Tensor] = itertools.chain(model.parameters(), model.buffers())
    return next((x.device for x in tensors), torch.device("cpu"))


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
        found = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InputError(f"prompt has {found}, expected a tensor (batch, length) of tokens, such as pad_left makes")
    if prompt.shape[1] < 1:
        raise InputError("prompt has no tokens, expected at least one")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")


def end_tokens(end: int | Sequence[int] | None, vocabulary: int, device: torch.device) -> Int[Tensor, " e"]:
    """The end tokens as a tensor; raises `InputError` for tokens outside the vocabulary."""
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    for token in ends:
        if not 0 <= token < vocabulary:
            raise InputError(f"end: {token} is not in the vocabulary, expected tokens from 0 to {vocabulary - 1}")
    return torch.tensor(ends, dtype=torch.long, device=device)
