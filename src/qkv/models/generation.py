"""Generation from any model that takes steps: tokens as they come (`stream`), together (`generate`), or as text
(`text_stream`). Beam search is in `qkv.models.beam`.
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
    """What generation asks of a model, beside being an `nn.Module`; see `DecoderLM.start` for a state."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens it can emit."""

    def step(self, tokens: Int[Tensor, "b n"], state: Any, /) -> Float[Tensor, "b v"]:
        """Logits of what follows the last of `tokens`, which come after all that `state` has seen; changes `state`."""

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
    """What `text_stream` asks of a tokenizer. A prompt that is text needs `encode(text)`, or a call that returns
    ``{"input_ids": …}``, as well.
    """

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens; U+FFFD for bytes that are not UTF-8 (yet)."""


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode without autograd; afterwards each submodule is in the mode it was in."""
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
    """Tokens as they come, one for each item of the batch at a time.

    The model is in evaluation mode and without autograd while it computes, and as it was before whenever the caller
    has control. The last token that came is not yet in `state`: to go on later, begin the next prompt with it.

    Args:
        model: anything with a `step`: `DecoderLM`, `EncoderDecoder`, `RNNSeq2Seq`, `Captioner`.
        state: what `model.start` returned for a batch of b; the steps change it. Call `model.eval()` before `start` if
            that encodes a source: dropout there is not undone here.
        prompt: the tokens to continue, at least one.
        max_new_tokens: how many come at most.
        sampling: how a token is chosen.
        end: the token, or tokens, after which an item is finished.
        seed: item i draws from a generator of its own, seeded by (seed, i): what it draws does not depend on the other
            items, nor on how many they are. From torch's generator if None.
        padding: how many tokens at the left of each item are no prompt, for the repetition penalty to leave out. The
            model is not told: it knows from `model.start(…, padding=…)`.

    Yields:
        (b,) int64: the tokens of a step, an end token included; −1 for an item that was finished before. Stops when
        all are.

    Raises:
        InputError: at once, for a prompt without tokens or arguments out of range.

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
        with evaluating(model):  # one step at a time: the caller's code between steps must not run in these modes
            chances = sampling.probabilities(model.step(tokens, state), seen)
        drawn = sampling.draw(chances, generators).to(prompt.device)
        out = drawn.masked_fill(finished, -1)
        seen = torch.cat([seen, out[:, None]], 1)
        finished = finished | torch.isin(drawn, ends)
        tokens = drawn[:, None]  # of finished items too: some token must go in, and nobody hears of what follows
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
    """The new tokens of each item of a batch, without the prompt and without the end token; arguments as of `stream`.

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
    silent = {-1, *end_tokens(end, model.vocabulary, prompt.device).tolist()}
    rows = torch.stack(list(steps), 1).tolist()
    return [[token for token in row if token not in silent] for row in rows]


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, " b"]]:
    """Prompts of several lengths as one batch, their last tokens aligned.

    Args:
        prompts: token ids, at least one each.
        pad: the id to fill up with, at the left.

    Returns:
        ``(ids, padding)``: the batch, and how many ids at the left of each item are padding.

    Raises:
        InputError: if there is no prompt, or one has no tokens.

    >>> pad_left([[5, 6, 7], [8]], pad=0)
    (tensor([[5, 6, 7],
            [0, 0, 8]]), tensor([0, 2]))
    """
    if not len(prompts):
        raise InputError("prompts is empty, expected at least one prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {i} has no tokens, expected at least one")
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
    """Text as it comes, for one prompt.

    The pieces, none of them empty, concatenate to the tokenizer's decoding of all new tokens (up to a stop string or
    the end token, which are left out). All tokens are decoded at each step, as what a token adds can depend on those
    before it: that is quadratic in the tokens, and cheap beside the model. What may still change is held back: bytes
    that are not a whole character yet, and a tail that may be the beginning of a stop string.

    Args:
        model: as of `stream`.
        state: what `model.start` returned for a batch of one.
        tokenizer: of Hugging Face transformers, or any with `encode` (or a call that returns ``{"input_ids": …}``) and
            `decode`. Its `decode` should leave what it said of fewer tokens as it was.
        prompt: text, or token ids; at least one token.
        max_new_tokens: how many tokens come at most.
        sampling: how a token is chosen.
        end: the token, or tokens, that end the text.
        seed: as of `stream`.
        stop: strings before which the text stops, at the one that is complete first (of those, the longest); how the
            text is cut into tokens does not matter.

    Raises:
        InputError: at once, for a prompt without tokens or arguments out of range.

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
        raise InputError(f"stop is {stop!r}, expected a sequence of strings that are not empty, such as ['\\n\\n']")
    ids = _encode(tokenizer, prompt) if isinstance(prompt, str) else torch.as_tensor(prompt, dtype=torch.long)
    ids = ids.reshape(1, -1).to(_device(model))
    tokens = stream(model, state, ids, max_new_tokens=max_new_tokens, sampling=sampling, end=end, seed=seed)
    return _text(tokens, tokenizer, set(end_tokens(end, model.vocabulary, ids.device).tolist()), stop)


def _text(steps: Iterator[Tensor], tokenizer: Tokenizer, ends: set[int], stop: Sequence[str]) -> Iterator[str]:
    said, text = 0, ""  # characters that came out, and all there are
    new: list[int] = []
    for step in steps:
        token = int(step)
        if token in ends:
            break
        new.append(token)
        text = tokenizer.decode(new)
        whole = text.rstrip("\ufffd")  # the beginning of a character decodes to U+FFFD until the rest has come
        stopped = _before_stop(whole, said, stop)
        until = len(whole) - _begun(whole, stop) if stopped is None else stopped
        if until > said:
            yield text[said:until]
            said = until
        if stopped is not None:
            return
    rest = text[said : _before_stop(text, said, stop)]
    if rest:
        yield rest


def _before_stop(text: str, start: int, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is the first to be complete; of those, the longest."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s, start)) >= 0]
    return min(found)[1] if found else None


def _begun(text: str, stop: Sequence[str]) -> int:
    """Length of the longest tail of `text` that a stop string begins with."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def _encode(tokenizer: Any, text: str) -> Tensor:
    found = tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)["input_ids"]
    return torch.as_tensor(found, dtype=torch.long)


def _device(model: Model) -> torch.device:
    tensors: Iterable[Tensor] = itertools.chain(model.parameters(), model.buffers())
    return next((x.device for x in tensors), torch.device("cpu"))


def _generators(batch: int, seed: int | None) -> list[torch.Generator]:
    """One for each item, seeded by (seed, item)."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    # torch's CPU generator takes 32 bits of a seed: they must depend on all of both numbers.
    mixed = [np.random.SeedSequence((seed, item)).generate_state(1) for item in range(batch)]
    return [torch.Generator().manual_seed(int(x[0])) for x in mixed]


def check(prompt: Int[Tensor, "b n"], max_new_tokens: int) -> None:
    """`InputError` for a prompt without tokens, or nothing to generate."""
    if not isinstance(prompt, Tensor) or prompt.ndim != 2:
        found = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InputError(f"prompt has {found}, expected a tensor (batch, length) of tokens, such as pad_left makes")
    if prompt.shape[1] < 1:
        raise InputError("prompt has no tokens, expected at least one")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected at least 1")


def end_tokens(end: int | Sequence[int] | None, vocabulary: int, device: torch.device) -> Int[Tensor, " e"]:
    """The end tokens; `InputError` for one that the model cannot emit."""
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    for token in ends:
        if not 0 <= token < vocabulary:
            raise InputError(f"end: {token} is not in the vocabulary, expected tokens from 0 to {vocabulary - 1}")
    return torch.tensor(ends, dtype=torch.long, device=device)
