"""Split texts into sequences that fit into the model, counting every token once, and batch sequences by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.profiler.capture.inputs import Special


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence for the model. Queries from `start` up to `stop` count; the others are context."""

    ids: Sequence[int]
    start: int
    stop: int
    begins: bool
    """True if it is the beginning of a text."""


def pieces(ids: Sequence[int], special: Special, length: int, overlap: int) -> Iterator[Piece]:
    """Split a text, given without special tokens, into sequences of at most `length` tokens including special tokens.

    Every token of the text and every special token counts once over all pieces. The `overlap` tokens that a piece
    repeats from the previous one, and repeated special tokens, are context only.

    >>> [(p.ids, p.start, p.stop) for p in pieces([1, 2, 3, 4, 5], Special((8,), (9,)), length=5, overlap=1)]
    [([8, 1, 2, 3, 9], 0, 4), ([8, 3, 4, 5, 9], 2, 5)]
    """
    before, after = list(special.before), list(special.after)
    capacity = length - len(before) - len(after)
    if capacity < 1:
        raise InputError(f"length is {length}, expected more than the {len(before) + len(after)} special tokens")
    if not 0 <= overlap < capacity:
        raise InputError(
            f"overlap is {overlap}, expected 0 to less than {capacity}, the tokens of text in a sequence of {length}"
        )
    for start in range(0, max(len(ids) - overlap, 1), capacity - overlap):
        part, last = ids[start : start + capacity], start + capacity >= len(ids)
        whole = [*before, *part, *after]
        counted_to = len(whole) if last else len(before) + len(part)
        yield Piece(whole, len(before) + overlap if start else 0, counted_to, begins=start == 0)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of similar length, padded on the right."""

    ids: Int[Tensor, "b n"]
    real: Bool[Tensor, "b n"]
    counted: Bool[Tensor, "b n"]
    begins: Bool[Tensor, " b"]

    @classmethod
    def of(cls, some: Sequence[Piece], pad: int) -> Batch:
        longest = max(len(p.ids) for p in some)
        ids = torch.full((len(some), longest), pad)
        real, counted = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for row, piece in enumerate(some):
            ids[row, : len(piece.ids)] = torch.tensor(piece.ids)
            real[row, : len(piece.ids)] = True
            counted[row, piece.start : piece.stop] = True
        return cls(ids, real, counted, torch.tensor([p.begins for p in some]))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device) for x in (self.ids, self.real, self.counted, self.begins)))


def batches_of(found: Sequence[Piece], tokens: int, *, pad: int | None) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens including padding, the longest sequences first.

    Args:
        found: sequences.
        tokens: largest number of tokens in a batch; a longer sequence is a batch of its own.
        pad: id of padding; None if the model does not accept padding, then a batch has sequences of one length only.
    """
    some: list[Piece] = []
    for piece in sorted(found, key=lambda p: -len(p.ids)):  # a stable sort: reproducible batches
        full = some and (len(some) + 1) * len(some[0].ids) > tokens
        if some and (full or (pad is None and len(some[0].ids) != len(piece.ids))):
            yield Batch.of(some, pad or 0)
            some = []
        some.append(piece)
    if some:
        yield Batch.of(some, pad or 0)
