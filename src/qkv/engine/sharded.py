"""Ring attention: a sequence that is sharded over the processes of a group, and a call on it (`Shared`).

Under a causal mask, later queries have more visible keys. To balance the load, the sequence is cut into 2 P chunks for
P processes, and the *shard* of process r is chunk r followed by chunk 2 P − 1 − r: every process then has the same
number of visible pairs at every step of the ring (the order of Llama 3: Grattafiori et al. 2024, arXiv:2407.21783,
§3.3.2).

In P steps, every shard of keys and values visits every process, which computes the attention of its own queries to it
and merges the partial result (`qkv.partial.merge`). The next shard is transferred while the current one is computed. In
the backward, the gradients of a shard travel with it and are complete when they return to its process; the gradients of
a block are exact because its kernel gets the output and log-sum-exp of the whole row. (Liu et al. 2023,
arXiv:2310.01889.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from qkv._contract import overrides
from qkv.biases import Bias
from qkv.engine.call import Call, as_biases, as_mask, at_least_float32
from qkv.engine.tiles import block_status
from qkv.engine.transforms import Results, differentiable_call
from qkv.errors import InputError, kind_of
from qkv.masks import EMPTY, Grid, Mask, Region, Tiles
from qkv.normalizers import Normalizer
from qkv.partial import Partial, merge, sink_gradient
from qkv.results import Result
from qkv.scores import Score


def shard(x: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
    """Return the shard of x for this process: chunks r and 2 P − 1 − r of 2 P along `dim`, concatenated.

    Args:
        x: tensor of the whole sequence, the same on every process; only the two chunks of this process are read.
        group: process group of P processes, in which this process has rank r.
        dim: sequence dimension; its size must be a multiple of 2 P. Pad other sequences, and mask the padding with
            `qkv.masks.Padding`.

    Returns:
        A copy of 1 / P of x. Differentiable.

    Raises:
        InputError: for a length that is not a multiple of 2 P, or a group without this process.

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
    rank, size = rank_and_size(group)
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"shard: dim is {dim}, expected a dimension of x, which has {x.ndim}")
    length = x.shape[dim]
    if length == 0 or length % (2 * size):
        raise InputError(
            f"shard: x has length {length}, which {size} processes cannot cut into {2 * size} equal chunks; pad it to "
            f"{max(1, -(-length // (2 * size))) * 2 * size} and mask the padding with qkv.masks.Padding"
        )
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def unshard(x: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
    """All-gather the shards and restore the order of the sequence: the inverse of `shard`, on every process.

    Not differentiable: a loss of the whole sequence would be computed once per process. Compute the loss of the local
    tokens on each process instead, and sum the losses.

    Args:
        x: the shard of this process; of the same shape and dtype on every process.
        group: process group over which the sequence is sharded.
        dim: sequence dimension.

    Raises:
        InputError: if x requires a gradient, or cannot be a shard.
    """
    _, size = rank_and_size(group)
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            "unshard: x requires a gradient, but unshard is not differentiable; compute the loss on shards, or pass "
            "x.detach()"
        )
    if not -x.ndim <= dim < x.ndim or x.shape[dim] % 2:
        raise InputError(f"unshard: x has shape {tuple(x.shape)}, expected an even length along dim {dim}: two chunks")
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    with naming_lost("unshard", group):
        dist.all_gather(shards, x.contiguous(), group=group)
    halves = [one.chunk(2, dim) for one in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def positions(
    length: int, group: dist.ProcessGroup, device: torch.device | str | None = None
) -> Int[Tensor, " n_local"]:
    """Return positions of this process's tokens in a sequence of `length` tokens, for positional encodings.

    Raises:
        InputError: for a length that is not a multiple of 2 P.
    """
    return shard(torch.arange(length, device=device), group, dim=0)


def rank_and_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the rank of this process in `group`, and the size of the group."""
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is {type(group).__name__}, expected a process group of torch.distributed that contains this "
            "process, such as torch.distributed.group.WORLD after init_process_group"
        )
    return dist.get_rank(group), dist.get_world_size(group)


@dataclass(frozen=True, eq=False)
class Piece:
    """One chunk of queries against one chunk of keys: a rectangle of the whole score matrix."""

    rows: slice
    """Its queries among the queries of this process."""
    keys: slice
    """Its keys among the shard of keys that is currently held."""
    region: Region
    """Its place in the whole matrix."""


@dataclass(frozen=True, eq=False)
class Shared:
    """One attention call that is sharded over the processes of a group."""

    call: Call
    """The local queries, keys and values; its mask and its biases describe the whole matrix."""
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
        mask: Mask | Tensor | None,
        bias: Bias | Sequence[Bias] | None,
        score: Score | None,
        normalizer: Normalizer | None,
    ) -> Shared:
        """Check the arguments, also against the other processes, and build the call."""
        mask, biases = as_mask(mask), as_biases(bias)
        rank, size = rank_and_size(group)
        _check_same_on_all_ranks(group, q, k, v)
        if normalizer is not None and not normalizer.has_lse:
            raise InputError(
                f"group: normalizer is {type(normalizer).__name__}, expected Softmax, whose partial results merge"
            )
        if score is not None and overrides(score, Score, "row_factor"):
            raise InputError(
                f"group: score is {type(score).__name__}, which counts the keys of each query; expected another score"
            )
        call = Call.of(q, k, v, None, (), score, normalizer)
        batch, heads, n_queries, _ = q.shape
        for name, x in (("q", q), ("k", k)):
            if x.shape[2] % 2:
                raise InputError(
                    f"group: {name} has {x.shape[2]} tokens on each of {size} processes, expected two chunks of equal "
                    f"length; pad the sequence to a multiple of {2 * size} before qkv.ring.shard"
                )
        grid = Grid.of(n_queries * size, k.shape[2] * size, batch, heads, q.device)
        if mask is not None:
            mask.check(grid)
        for one in biases:
            one.check(grid)
        bound = tuple(one.bind(call.q, grid, call.factor) for one in biases)
        for one, whole in zip(biases, bound, strict=True):
            whole.require()
            of_local_rows = whole is not one and whole.depends_on_query  # which `part` of the whole matrix cannot cut
            if not whole.position_free and (of_local_rows or not overrides(whole, Bias, "part")):
                raise InputError(
                    f"group: bias is {type(one).__name__}, which cannot be sharded; expected one with the method "
                    "part(region), such as ALiBi, T5Bias, ByDistance, TensorBias or SoftCap"
                )
        return Shared(replace(call, mask=mask, biases=bound), grid, group, rank, size)

    def pieces(self, source: int) -> Iterator[Piece]:
        """Yield the rectangles of the local queries and the keys of rank `source` that are not fully masked."""
        rows, keys = self.call.q.shape[2] // 2, self.call.k.shape[2] // 2
        for i, row in enumerate(self._chunks(self.rank)):
            for j, column in enumerate(self._chunks(source)):
                place = Region(_span(row, rows), _span(column, keys), offset=self.grid.offset)
                tile = Tiles.of_spans([place.rows], [place.columns], self.grid)
                if bool((block_status(self.call.mask, tile, self.grid) != EMPTY).any()):
                    yield Piece(_span(i, rows), _span(j, keys), place)

    def part(self, call: Call, k: Tensor, v: Tensor, piece: Piece) -> Call:
        """Return the call of a piece, with the shard of keys and values that is currently held.

        It has no sink, which is added once to the merged row.
        """
        return replace(call, k=k, v=v, sink=None).part(piece.rows, piece.keys, piece.region, self.grid)

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank


def _span(i: int, size: int) -> slice:
    return slice(i * size, (i + 1) * size)


DESCRIPTION = 400  # bytes of a text about the tensors of a process


def _check_same_on_all_ranks(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise on every process if shapes or dtypes differ between processes, which would otherwise deadlock."""
    tensors = {"q": q, "k": k, "v": v}
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors.values())
    described = ", ".join(f"{name} {kind_of(x)}" for name, x in tensors.items())
    text = f"{described} {'with' if needs_grad else 'without'} gradient".encode()
    mine = torch.tensor(
        list(text[:DESCRIPTION].ljust(DESCRIPTION)), device=q.device if isinstance(q, Tensor) else "cpu"
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with naming_lost("ring attention", group):
        dist.all_gather(everyone, mine, group=group)
    first, *others = (bytes(x.tolist()).decode(errors="replace").strip() for x in everyone)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise InputError(
                f"group: q, k and v differ between processes: process {rank} has {other}, but process 0 has {first}; "
                "expected shards of the same shape and dtype, from qkv.ring.shard"
            )


TAG = 9_999
"""The tag of messages that only test a connection: no process receives them."""


@contextmanager
def naming_lost(what: str, group: dist.ProcessGroup, peers: Sequence[int] = ()) -> Iterator[None]:
    """Turn an error of the communication inside into one that says what communicates, and names the lost process.

    `peers` are the ranks with which it communicates, if these are not all.
    """
    try:
        yield
    except RuntimeError as error:
        ranks = " or ".join(map(str, dict.fromkeys(peers or _closed(group))))
        whom = f"the process of rank {ranks} of the group" if ranks else "a process of the group"
        raise RuntimeError(
            f"{what}: the communication with {whom} failed ({str(error).partition(chr(10))[0][:200]}); if it was lost, "
            "start all processes again, from a checkpoint"
        ) from error


def _closed(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group whose connection to this process is closed: sending to them raises at once."""
    closed = []
    for peer in range(dist.get_world_size(group)) if dist.get_backend(group) == "gloo" else ():
        if peer == dist.get_rank(group):
            continue
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=peer, tag=TAG)  # nobody waits for it
        except RuntimeError:
            closed.append(peer)
    return closed


RING = "ring attention"
Choose = Callable[[Call, set[str]], ModuleType]
"""The kernel for a block, given the names of the tensors that need gradients (empty in the forward)."""


def run(shared: Shared, choose: Choose) -> Result:
    """Return out and lse of this process's queries, differentiable in every tensor of the call and through the lse."""
    forward, backward = functools.partial(_forward, shared, choose), functools.partial(_backward, shared, choose)
    return Result(*differentiable_call(shared.call, forward, backward, "ring"))


class Transfer:
    """An asynchronous transfer: send tensors to the next process, and receive the same shapes from the previous one."""

    def __init__(self, shared: Shared, tensors: tuple[Tensor, ...], tag: int) -> None:
        self.sent = [x.contiguous() for x in tensors]
        self.received = tuple(torch.empty_like(x) for x in self.sent)
        before, after = (shared.rank - 1) % shared.size, (shared.rank + 1) % shared.size
        directions = ((dist.isend, self.sent, after), (dist.irecv, self.received, before))
        self.peers = [peer for _, tensors, peer in directions for _ in tensors]
        self.group = shared.group
        with naming_lost(RING, self.group, (before, after)):
            self.works = dist.batch_isend_irecv([
                dist.P2POp(operation, x, group=shared.group, group_peer=peer, tag=tag + i)
                for operation, tensors, peer in directions
                for i, x in enumerate(tensors)
            ])  # fmt: skip

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the transfer and return the received tensors."""
        separate = len(self.works) == len(self.peers)  # some backends join all transfers in one
        for i, work in enumerate(self.works):
            with naming_lost(RING, self.group, [self.peers[i]] if separate else self.peers):
                work.wait()
        return self.received


def blocks(shared: Shared, *tensors: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield the rank and `tensors` of every process, starting with this one; the next are prefetched meanwhile."""
    for step in range(shared.size):
        next_ = Transfer(shared, tensors, tag=0) if step + 1 < shared.size else None
        yield (shared.rank - step) % shared.size, tensors
        if next_ is not None:
            tensors = next_.wait()


class RingAccumulator:
    """Sums that travel around the ring with the shards of `blocks`; each process adds its partial sums."""

    TAG = 16  # distinct from the tags of `blocks`

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.sums: tuple[Tensor, ...] | None = None
        self.transfer: Transfer | None = None

    def add(self, *partial: Tensor) -> None:
        """Add partial sums to the received sums of the current shard, and start sending them to the next process."""
        if self.sums is not None:
            for share, before in zip(partial, self.finish(), strict=True):
                share.add_(before)
        self.sums = partial
        self.transfer = Transfer(self.shared, partial, self.TAG) if self.shared.size > 1 else None

    def finish(self) -> tuple[Tensor, ...]:
        """Return the complete sums of this process's own shard, after the last shard."""
        assert self.sums is not None
        return self.sums if self.transfer is None else self.transfer.wait()


def _forward(shared: Shared, choose: Choose, call: Call) -> tuple[Results, Results]:
    """Compute attention of the local queries to all keys, including the sink."""
    wide = at_least_float32(call.q.dtype)
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3], dtype=wide)
    lse = call.q.new_full(call.q.shape[:3], -torch.inf, dtype=wide)
    for source, (k, v) in blocks(shared, call.k, call.v):
        for piece in shared.pieces(source):
            part = shared.part(call, k, v, piece)
            result = choose(part, set()).forward(part)
            at = (slice(None), slice(None), piece.rows)
            whole = merge(Partial(out[at], lse[at]), Partial(result.out, result.lse))
            out[at], lse[at] = whole.out, whole.lse
    whole = Partial(out, lse) if call.sink is None else Partial(out, lse).with_sink(call.sink)
    return (whole.out.to(call.v.dtype), whole.lse), ()


def _backward(
    shared: Shared, choose: Choose, call: Call, results: Results, more: Results, grads: Results, wanted: set[str]
) -> dict[str, Tensor]:
    """Return gradients of the local tensors; those of k and v are summed over all processes around the ring."""
    (out, lse), (grad, grad_lse) = results, grads
    whole, grad = Partial(out, lse), torch.zeros_like(out) if grad is None else grad  # every process takes part
    wide = at_least_float32(call.q.dtype)
    totals = {name: torch.zeros_like(x, dtype=wide) for name, x in call.tensors().items()}
    if call.sink is not None:
        totals["sink"] = sink_gradient(call.sink, whole, grad, grad_lse)
    of_blocks = {"q", "k", "v"} | (wanted - {"sink"})
    travelling = RingAccumulator(shared)
    for source, (k, v) in blocks(shared, call.k, call.v):
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for piece in shared.pieces(source):
            part, rows = shared.part(call, k, v, piece), (slice(None), slice(None), piece.rows)
            row = Partial(whole.out[rows], whole.lse[rows])
            slope = None if grad_lse is None else grad_lse[rows]
            gradients = choose(part, of_blocks).gradients(part, row, grad[rows], slope, of_blocks)
            places = totals | {"q": totals["q"][rows], "k": dk[:, :, piece.keys], "v": dv[:, :, piece.keys]}
            for i, bias in enumerate(call.biases):
                names = {name: f"bias {i} {name}" for name in bias.tensors() if f"bias {i} {name}" in of_blocks}
                if names:
                    sums = bias.with_tensors({name: totals[key] for name, key in names.items()})
                    of_part = sums.part(piece.region).tensors()
                    places |= {key: of_part[name] for name, key in names.items()}
            for name in of_blocks:
                places[name].add_(gradients[name])
        travelling.add(dk, dv)
    totals["k"], totals["v"] = travelling.finish()
    return totals
