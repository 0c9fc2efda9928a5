"""Texts as sequences that a model can take: long ones in pieces, every token counted once; batches of like length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.profiler.capture.special import Special


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence for the model. Queries from `start` up to `stop` count; the others give them context."""

    ids: Sequence[int]
    start: int
    stop: int
    begins: bool
    """Whether it is the beginning of a text."""


def pieces(ids: Sequence[int], special: Special, length: int, overlap: int) -> Iterator[Piece]:
    """A text, without its special tokens, cut into sequences of at most `length` tokens with them.

    All counted queries together are the tokens of the whole text, each once, and its special tokens once: what a piece
    repeats of the one before, `overlap` tokens of it and special tokens, is context only.

    >>> [(p.ids, p.start, p.stop) for p in pieces([1, 2, 3, 4, 5], Special((8,), (9,)), length=5, overlap=1)]
    [([8, 1, 2, 3, 9], 0, 4), ([8, 3, 4, 5, 9], 2, 5)]
    """
    before, after = list(special.before), list(special.after)
    room = length - len(before) - len(after)
    if room < 1 or not 0 <= overlap < room:
        raise InputError(
            f"length is {length} and overlap {overlap}, expected a length of more than {len(before) + len(after)} "
            f"special tokens and an overlap from 0 to less than the {max(room, 0)} tokens that leaves"
        )
    for start in range(0, max(len(ids) - overlap, 1), room - overlap):
        part, last = ids[start : start + room], start + room >= len(ids)
        whole = [*before, *part, *after]
        counted_to = len(whole) if last else len(before) + len(part)
        yield Piece(whole, len(before) + overlap if start else 0, counted_to, begins=start == 0)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of like length, padded on the right."""

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
    """Batches of at most `tokens` tokens, padding included, the longest sequences first; at least one in each.

    Args:
        found: sequences.
        tokens: how many at once.
        pad: the id to pad with; None if the model takes no padding: only sequences of one length go together then.
    """
    some: list[Piece] = []
    for piece in sorted(found, key=lambda p: -len(p.ids)):  # stable: the same batches every time
        full = some and (len(some) + 1) * len(some[0].ids) > tokens
        if some and (full or (pad is None and len(some[0].ids) != len(piece.ids))):
            yield Batch.of(some, pad or 0)
            some = []
        some.append(piece)
    if some:
        yield Batch.of(some, pad or 0)
