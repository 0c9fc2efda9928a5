"""The texts on which a model is studied: windows of tokens, with the special tokens that its tokenizer puts around."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.models import checkpoint
from qkv.profiler.capture.inputs import Special, positions, special_ids, tokens_of, vocabulary

SHORT, LONG = 64, 512
"""The lengths at which a model is measured, in tokens: T of Gu et al. 2025, and the whole text."""
CHOICE, JUDGED = 4, 12
"""The number of texts that choose the sink heads, and of texts on which they are measured."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Windows of tokens without special tokens, and the special tokens around them.

    >>> texts = Texts(torch.arange(10).view(2, 5), Special((101,), (102,)), torch.arange(10))
    >>> texts.of(4)[0].tolist(), texts.without_special(4)[0].tolist()
    ([101, 0, 1, 102], [0, 1, 2, 102])
    """

    windows: Int[Tensor, "t m"]
    special: Special
    ordinary: Int[Tensor, " v"]
    """The ids of all tokens that are not special."""

    def of(self, n: int) -> Int[Tensor, "t n"]:
        """The texts at a length of n tokens."""
        return self._within(self.windows, self.special.before, n)

    def without_special(self, n: int) -> Int[Tensor, "t n"]:
        """The same without special tokens at the start, so that the text's own first token is first."""
        return self._within(self.windows, (), n)

    def random(self, n: int, generator: torch.Generator) -> Int[Tensor, "t n"]:
        """The same with random ordinary tokens in place of all but the first token, and the special ones at the end."""
        ids = self.of(n)
        last = n - len(self.special.after)
        ids[:, 1:last] = self.drawn((len(ids), last - 1), generator)
        return ids

    def drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> Int[Tensor, "..."]:
        """Random ordinary tokens."""
        return self.ordinary[torch.randint(len(self.ordinary), shape, generator=generator)]

    def _within(self, windows: Tensor, before: tuple[int, ...], n: int) -> Tensor:
        inner = n - len(before) - len(self.special.after)
        around = (torch.tensor(x, dtype=torch.long).expand(len(windows), -1) for x in (before, self.special.after))
        start, end = around
        return torch.cat([start, windows[:, :inner], end], 1)


def prepared(model: nn.Module, texts: Sequence[str] | Int[Tensor, "t n"], tokenizer: Any) -> Texts:
    """Cut texts into 16 windows of at most 512 tokens: one of each text first, then a second one, and so on.

    The windows are half as long, or a quarter, if the model reads fewer tokens, or there is too little text.

    Raises:
        InputError: for fewer than 16 windows of 64 tokens, and a model that reads fewer than 64 tokens.
    """
    special = Special() if isinstance(texts, Tensor) or tokenizer is None else Special.of(tokenizer)
    limit, size = context(model), vocabulary(model)
    if limit < SHORT or size is None:
        raise InputError(
            f"model {type(model).__name__} reads {limit} tokens of a vocabulary of {size}, expected at least {SHORT} "
            "tokens of a known vocabulary"
        )
    ids = list(texts) if isinstance(texts, Tensor) else [torch.tensor(_tokens(tokenizer, text)) for text in texts]
    length = min(LONG, limit)
    while len(windows := list(_windows(ids, length))) < CHOICE + JUDGED:
        if length == SHORT:
            raise InputError(
                f"texts has {len(windows)} windows of {SHORT} tokens, expected {CHOICE + JUDGED}: more or longer texts"
            )
        length = max(SHORT, length // 2)
    known = special_ids(model, tokenizer)
    ordinary = torch.tensor([i for i in range(size) if i not in known])
    return Texts(torch.stack(windows[: CHOICE + JUDGED]), special, ordinary)


def default_texts(name: str) -> list[str]:
    """Texts for a model by its name: for qkv-mini the files of its corpus that were held out from its training, and
    for all others chapters of the Python language reference, which come with Python (`pydoc_data.topics`)."""
    if name == "qkv-mini":
        from qkv.profiler import corpora
        from qkv_lab import settings
        from qkv_lab.tasks.language import Language

        folder = checkpoint.folder_of(name)
        assert folder is not None
        task, _ = settings.from_toml(folder / settings.RUN)
        assert isinstance(task, Language)
        return corpora.load(task.corpus).split()[1]
    from pydoc_data.topics import topics

    return [topics[topic] for topic in sorted(topics)]


def context(model: nn.Module) -> int:
    """The number of tokens that a model reads at most: that of its configuration, or `LONG`."""
    config: Any = getattr(model, "config", None)
    return positions(model) or getattr(config, "context", None) or LONG


def _tokens(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        raise InputError("texts is text, but the model has no tokenizer; expected token ids (texts, length)")
    return tokens_of(tokenizer, text)


def _windows(ids: Sequence[Int[Tensor, " n"]], length: int) -> Iterator[Int[Tensor, " length"]]:
    """Consecutive windows: the first one of each text, then the second ones, and so on."""
    for start in range(0, max(map(len, ids), default=0), length):
        yield from (x[start : start + length] for x in ids if len(x) >= start + length)
