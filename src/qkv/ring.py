"""One sequence over many processes: who holds which tokens, and which queries and keys meet where.

Under a causal mask the end of a sequence has more to do than its beginning. So P processes cut it into 2 P chunks, and
process r holds chunks r and 2 P − 1 − r, an early and a late one: all then have the same number of visible pairs, at
every step of the ring (the order of Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, §3.3.2). That is a *shard*; its
tokens are those of the two chunks, one after the other. The passing around is in `qkv.kernels.ring`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from qkv._contract import overrides
from qkv._engine.call import Call
from qkv.biases import Bias
from qkv.errors import InputError
from qkv.masks import EMPTY, FULL, Grid, Mask, Region, Tiles
from qkv.masks.base import Placed
from qkv.normalizers import Normalizer
from qkv.scores import Score

__all__ = [
    "positions",
    "shard",
    "unshard",
]


def __dir__() -> list[str]:
    return __all__


def shard(x: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
    """The part of x that this process holds: chunks r and 2 P − 1 − r of 2 P along `dim`, one after the other.

    Args:
        x: of the whole sequence, the same on every process; only this process's two chunks of it are read.
        group: P processes, of which this is number r.
        dim: the dimension of length; its size must be a multiple of 2 P. Pad a sequence that is none, and hide the
            padding with `qkv.masks.Padding`.

    Returns:
        A copy of 1 / P of x. Differentiable.

    Raises:
        InputError: for a length that is no multiple of 2 P, or a group this process is not in.

    Source: Grattafiori et al. 2024, arXiv:2407.21783, §3.3.2.

    >>> import tempfile, torch, qkv
    >>> import torch.distributed as dist
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    ...     x = torch.arange(6.0).view(1, 1, 6, 1)
    ...     print(qkv.ring.shard(x, dist.group.WORLD).flatten().tolist())
    ...     dist.destroy_process_group()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    rank, size = place(group)
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"shard: dim is {dim}, expected a dimension of x, which has {x.ndim}")
    length = x.shape[dim]
    if length == 0 or length % (2 * size):
        raise InputError(
            f"shard: x has length {length}, which {size} processes cannot cut into {2 * size} equal chunks; pad it to "
            f"{max(1, -(-length // (2 * size))) * 2 * size} and hide the padding with qkv.masks.Padding"
        )
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def unshard(x: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
    """The whole, on every process, of what each holds a `shard` of: the inverse of `shard`.

    No gradient passes: every process would have its own loss of the same numbers, and which of them counts is not to be
    guessed. Compute the loss of the tokens at hand on each process and add the losses up instead.

    Args:
        x: this process's shard; of the same shape and dtype on every process.
        group: the processes that share the sequence.
        dim: the dimension of length.

    Raises:
        InputError: if x wants a gradient, or cannot be a shard.
    """
    _, size = place(group)
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            "unshard: x wants a gradient, which does not pass; compute the loss on shards, or pass x.detach()"
        )
    if not -x.ndim <= dim < x.ndim or x.shape[dim] % 2:
        raise InputError(f"unshard: x has shape {tuple(x.shape)}, expected an even length along dim {dim}: two chunks")
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(shards, x.contiguous(), group=group)
    halves = [one.chunk(2, dim) for one in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def positions(
    length: int, group: dist.ProcessGroup, device: torch.device | str | None = None
) -> Int[Tensor, " n_local"]:
    """Where the tokens of this process stand in a sequence of `length` tokens: for rotary and other positions.

    Raises:
        InputError: for a length that is no multiple of 2 P.
    """
    return shard(torch.arange(length, device=device), group, dim=0)


def place(group: dist.ProcessGroup) -> tuple[int, int]:
    """This process's number in `group`, and how many there are."""
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is {type(group).__name__}, expected a process group of torch.distributed that this process is in, "
            "such as torch.distributed.group.WORLD after init_process_group"
        )
    return dist.get_rank(group), dist.get_world_size(group)


@dataclass(frozen=True, eq=False)
class Piece:
    """Queries and keys of one chunk each: a rectangle of the whole matrix, and where it lies in the shards."""

    rows: slice
    """Of the queries of this process."""
    keys: slice
    """Of the block of keys that is passing."""
    region: Region
    """Of the whole matrix."""
    grid: Grid
    """The whole matrix."""
    mask: Mask | None = None
    """What of it is visible; None: all."""

    def see(self, mask: Mask) -> Mask:
        """A mask of the whole, seen from here."""
        n_queries, n_keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        # Where the last query stands at the last key, as in any call of this size, it is `n_keys - n_queries` further.
        down = self.region.rows.start + self.grid.offset - (n_keys - n_queries)
        right = self.region.columns.start
        alike = mask.band is not None and down == right  # distances are all it looks at, and they are the same
        return mask if alike else Placed(mask, self.grid, down, right)

    def kinds(self, mask: Mask) -> set[int]:
        """EMPTY, PARTIAL or FULL: what `mask` makes of this rectangle for some batch item and head."""
        rows, keys = self.region.rows, self.region.columns
        spans = (rows.start, rows.stop - 1, keys.start, keys.stop - 1)
        q_first, q_last, k_first, k_last = (torch.tensor([x]) for x in spans)
        tiles = Tiles(q_first + self.grid.offset, q_last + self.grid.offset, k_first, k_last)
        return set(mask.classify(tiles, self.grid).flatten().tolist())

    def of(self, call: Call, k: Tensor, v: Tensor) -> Call:
        """The part of a shared call that is here, without its sink, which belongs to the whole row."""
        return replace(
            call,
            q=call.q[:, :, self.rows],
            k=k[:, :, self.keys],
            v=v[:, :, self.keys],
            mask=self.mask,
            biases=tuple(part_of(bias, self.region) for bias in call.biases),
            sink=None,
        )

    @property
    def ahead(self) -> int:
        """How many positions the first query here stands after the first key here."""
        return self.region.rows.start + self.grid.offset - self.region.columns.start


def part_of(bias: Bias, region: Region) -> Bias:
    """The part of a bound bias that a rectangle of the matrix needs: a view of its tensors."""
    part = bias.part(region)
    assert part is not None
    return part


@dataclass(frozen=True, eq=False)
class Shared:
    """One attention call that all processes of a group make together."""

    call: Call
    """Of the tokens of this process; its mask and its biases are those of the whole matrix."""
    grid: Grid
    """The whole matrix."""
    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(
        group: dist.ProcessGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        biases: Sequence[Bias],
        score: Score | None,
        normalizer: Normalizer | None,
    ) -> Shared:
        """Check the arguments, with the other processes, and make them ready."""
        rank, size = place(group)
        _agree(group, q, k, v)
        if normalizer is not None and not normalizer.has_lse:
            raise InputError(f"group: normalizer is {type(normalizer).__name__}, expected Softmax, whose parts merge")
        call = Call.of(q, k, v, None, (), score, normalizer)
        batch, heads, n_queries, _ = q.shape
        for name, x in (("q", q), ("k", k)):
            if x.shape[2] % 2:
                raise InputError(
                    f"group: {name} has {x.shape[2]} tokens on each of {size} processes, expected an even number, two "
                    f"chunks of a whole whose length is a multiple of {2 * size}: pad it before qkv.ring.shard"
                )
        n_queries, n_keys = n_queries * size, k.shape[2] * size
        grid = Grid(batch, heads, n_queries, n_keys, n_keys - n_queries, q.device)
        if mask is not None:
            mask.check(grid)
        for bias in biases:
            bias.check(grid)
        bound = tuple(bias.bound(call.q, grid, call.factor) for bias in biases)
        for bias, made in zip(biases, bound, strict=True):
            made.require()
            if not overrides(made, Bias, "part"):
                raise InputError(
                    f"group: bias is {type(bias).__name__}, of which no process can take a part; expected one with the "
                    "method part(region), such as ALiBi, T5Bias, ByDistance, Dense or SoftCap"
                )
        return Shared(replace(call, mask=mask, biases=bound), grid, group, rank, size)

    def pieces(self, source: int) -> Iterator[Piece]:
        """The rectangles of this process's queries and the keys of `source` that are not all hidden."""
        rows, keys = self.call.q.shape[2] // 2, self.call.k.shape[2] // 2
        for i, row in enumerate(self._chunks(self.rank)):
            for j, column in enumerate(self._chunks(source)):
                piece = Piece(_span(i, rows), _span(j, keys), Region(_span(row, rows), _span(column, keys)), self.grid)
                kinds = {FULL} if self.call.mask is None else piece.kinds(self.call.mask)
                if kinds == {FULL}:
                    yield piece
                elif kinds != {EMPTY}:
                    assert self.call.mask is not None
                    yield replace(piece, mask=piece.see(self.call.mask))

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank


def _span(i: int, size: int) -> slice:
    return slice(i * size, (i + 1) * size)


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _agree(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise on every process if they do not all pass the same shapes: else they would wait for one another for ever."""
    described = []
    for x in (q, k, v):
        shape = [*x.shape, 0, 0, 0, 0][:4] if isinstance(x, Tensor) else [0] * 4
        dtype = _DTYPES.index(x.dtype) if isinstance(x, Tensor) and x.dtype in _DTYPES else -1
        described += [*shape, dtype]
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v))
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    mine = torch.tensor([*described, int(wanted)], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    first, *others = (x.tolist() for x in everyone)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise InputError(
                f"group: process {rank} passes {_said(other)}, but process 0 {_said(first)}; expected the same of all: "
                "shards made by qkv.ring.shard"
            )


def _said(described: list[int]) -> str:
    tensors = []
    for i, name in enumerate("qkv"):
        *shape, dtype = described[5 * i : 5 * i + 5]
        tensors.append(f"{name} {tuple(shape)} {_DTYPES[dtype] if dtype >= 0 else 'of another dtype'}")
    return ", ".join(tensors) + (" with" if described[-1] else " without") + " gradient"
