"""`measure` for the requests of a serving engine: keys in the blocks of a paged cache, and packed queries.

An engine keeps the keys of a request in blocks that lie anywhere in memory, and may be shared by requests with the same
prefix; a table has the blocks of each request (Kwon et al. 2023, arXiv:2309.06180, section 4). The queries of all
requests that a step computes are packed, one request after another: a whole prompt, a chunk of one, or a single token.
Each request is measured alone, by `measure`, over a copy of its keys, so memory is linear in the longest request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.masks import Causal, Mask
from qkv.results import Statistics
from qkv.statistics.measure import measure

_CAUSAL = Causal()


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """The keys of several requests in a paged cache.

    Args:
        blocks: the keys in the cache of one layer, (blocks, hkv, size, d), strided in any way: of a cache of
            (blocks, size, hkv, d), as FlashAttention's, ``.transpose(1, 2)``.
        tables: the blocks of each request in order, (requests, most blocks); entries after its last key are not read.
        lengths: the number of keys of each request, those of its newest queries included.

    Raises:
        InputError: for shapes that do not fit together, lengths without a block, and blocks that the cache lacks.

    >>> cache = torch.arange(6.0).reshape(3, 1, 2, 1)
    >>> PagedKeys(cache, torch.tensor([[2, 0]]), torch.tensor([3])).of(0).flatten().tolist()
    [4.0, 5.0, 0.0]
    """

    blocks: Float[Tensor, "blocks hkv size d"]
    tables: Int[Tensor, "requests most"]
    lengths: Int[Tensor, " requests"]

    def __post_init__(self) -> None:
        if self.blocks.ndim != 4:
            raise InputError(f"blocks has shape {tuple(self.blocks.shape)}, expected (blocks, heads, size, head_dim)")
        if self.tables.ndim != 2 or self.lengths.shape != self.tables.shape[:1]:
            raise InputError(
                f"lengths has shape {tuple(self.lengths.shape)} and tables {tuple(self.tables.shape)}, expected "
                "(requests,) and (requests, blocks)"
            )
        for name, x in (("tables", self.tables), ("lengths", self.lengths)):
            if x.is_floating_point() or x.dtype == torch.bool:
                raise InputError(f"{name} is {x.dtype}, expected whole numbers")
        n_blocks, _, size, _ = self.blocks.shape
        most = self.tables.shape[1] * size
        for request, (length, table) in enumerate(zip(self.lengths.tolist(), self.tables.tolist(), strict=True)):
            if not 0 < length <= most:
                raise InputError(f"lengths has {length} for request {request}, expected 1 to {most} keys")
            used = table[: -(-length // size)]
            if min(used) < 0 or max(used) >= n_blocks:
                raise InputError(f"tables has the blocks {used} for request {request}, expected 0 to {n_blocks - 1}")

    def of(self, request: int) -> Float[Tensor, "1 hkv n d"]:
        """Return a copy of the keys of one request, in order."""
        return gathered(self.blocks, self.tables[request], int(self.lengths[request]))


def gathered(
    blocks: Float[Tensor, "blocks hkv size d"], table: Int[Tensor, " most"], length: int
) -> Float[Tensor, "1 hkv n d"]:
    """Return a copy of the first `length` keys, or values, of the blocks in a table, which are not checked."""
    used = table[: -(-length // blocks.shape[2])].to(blocks.device)
    return blocks[used].transpose(0, 1).flatten(1, 2)[None, :, :length]


def measure_paged(
    q: Float[Tensor, "tokens h d"],
    keys: PagedKeys,
    starts: Int[Tensor, " requests+1"] | Sequence[int],
    *,
    mask: Mask | None = _CAUSAL,
    **options: Any,
) -> list[Statistics]:
    """Return the statistics of the queries of each request in a packed batch over its keys in a paged cache.

    The last query of a request is aligned with its last key, so a chunk of a prompt attends to the chunks before it.
    The statistics of a request's chunks are those of one call over the whole prompt: rows follow one another, and
    `received` and `visible_queries` add up, the shorter ones padded with 0.

    Args:
        q: the queries of all requests, one after another, (tokens, h, d); tokens after the last request are padding,
            and are not read.
        keys: the keys, of which ``hkv`` divides ``h`` (grouped heads are contiguous).
        starts: the first query of each request, and the end of the last: ``query_start_loc`` of vLLM, ``cu_seqlens_q``
            of FlashAttention.
        mask: as in `qkv.measure`, for every request alike.
        **options: the other options of `qkv.measure`, for every request alike.

    Returns:
        A `Statistics` for each request, with a batch of 1.

    Raises:
        InputError: for arguments that do not fit together, and a request without a query or with more than its keys.

    >>> import torch, qkv
    >>> cache = torch.zeros(3, 1, 2, 8)
    >>> keys = PagedKeys(cache, torch.tensor([[2, 0], [1, 0]]), torch.tensor([3, 1]))
    >>> first, second = measure_paged(torch.zeros(3, 1, 8), keys, [0, 2, 3])
    >>> first.received[0, 0].tolist(), second.received[0, 0].tolist()
    ([0.8333333730697632, 0.8333333730697632, 0.3333333432674408], [1.0])
    """
    bounds = starts.tolist() if isinstance(starts, Tensor) else [*starts]
    requests = len(keys.lengths)
    if len(bounds) != requests + 1 or bounds[0] < 0 or bounds[-1] > len(q):
        raise InputError(
            f"starts is {bounds}, expected {requests + 1} numbers from 0 to {len(q)}: the first query of each of "
            f"{requests} requests, and the end of the last"
        )
    found = []
    for request, (start, stop) in enumerate(pairwise(bounds)):
        if not 0 < stop - start <= (most := int(keys.lengths[request])):
            raise InputError(
                f"starts gives request {request} {stop - start} queries, expected 1 to {most}, the number of its keys"
            )
        rows = q[start:stop].transpose(0, 1)[None]
        found.append(measure(rows, keys.of(request), mask=mask, **options))
    return found
