"""Ring attention: shards of keys and values travel around a ring of processes, and partial results merge.

Each of P processes holds one shard of the sequence (`qkv.ring`). In P steps, every shard of keys and values visits
every process, which computes the attention of its own queries to it and merges the partial result
(`qkv.partial.merge`). The next shard is transferred while the current one is computed. In the backward, the gradients
of a shard travel with it and are complete when they return to its process; the gradients of a block are exact because
its kernel gets the output and log-sum-exp of the whole row. (Liu et al. 2023, arXiv:2310.01889.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from qkv.engine.call import Call, Result, at_least_float32
from qkv.engine.sharded import Shared, naming_lost
from qkv.engine.transforms import Results, differentiable_call
from qkv.partial import Partial, merge, sink_gradient

RING = "ring attention"
Choose = Callable[[Call, set[str]], ModuleType]
"""The kernel for a block, given the names of the tensors that need gradients (empty in the forward)."""


def run(shared: Shared, choose: Choose) -> Result:
    """out and lse of this process's queries, differentiable in every tensor of the call and through the lse."""

    def compute(call: Call) -> tuple[Results, Results]:
        return _forward(shared, call, choose), ()

    def backward(call: Call, results: Results, more: Results, grads: Results, wanted: set[str]) -> dict[str, Tensor]:
        (out, lse), (grad, grad_lse) = results, grads
        assert out is not None
        assert lse is not None
        slope = torch.zeros_like(out) if grad is None else grad  # every process must take part in the ring
        return _backward(shared, call, Partial(out, lse), slope, grad_lse, wanted, choose)

    return Result(*differentiable_call(shared.call, compute, backward, "ring"))


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
    """The rank and `tensors` of every process in turn, starting with this one; the next are prefetched meanwhile."""
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
        """After the last shard: the complete sums of this process's own shard."""
        assert self.sums is not None
        return self.sums if self.transfer is None else self.transfer.wait()


def _forward(shared: Shared, call: Call, choose: Choose) -> tuple[Tensor, Tensor]:
    """Attention of the local queries to all keys, including the sink."""
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
    return whole.out.to(call.v.dtype), whole.lse


def _backward(
    shared: Shared, call: Call, whole: Partial, grad: Tensor, grad_lse: Tensor | None, wanted: set[str], choose: Choose
) -> dict[str, Tensor]:
    """Gradients of the local tensors; those of k and v are summed over all processes around the ring."""
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
            grads = choose(part, of_blocks).gradients(part, row, grad[rows], slope, of_blocks)
            places = totals | {"q": totals["q"][rows], "k": dk[:, :, piece.keys], "v": dv[:, :, piece.keys]}
            for i, bias in enumerate(call.biases):
                names = {name: f"bias {i} {name}" for name in bias.tensors() if f"bias {i} {name}" in of_blocks}
                if names:
                    sums = bias.with_tensors({name: totals[key] for name, key in names.items()})
                    of_part = sums.part(piece.region).tensors()
                    places |= {key: of_part[name] for name, key in names.items()}
            for name in of_blocks:
                places[name].add_(grads[name])
        travelling.add(dk, dv)
    totals["k"], totals["v"] = travelling.finish()
    return totals
