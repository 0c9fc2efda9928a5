"""Ring attention: one sequence shared by the processes of a group, each of which holds a shard of its tokens.

`shard` cuts the sequence, `attend` and `measure` compute what one process would with all of it, and `unshard` gathers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from qkv.biases import Bias
from qkv.engine.call import RowState
from qkv.engine.sharded import Shared, positions, shard, unshard
from qkv.kernels import opaque, serve_shared, serving
from qkv.masks import Mask
from qkv.normalizers import Normalizer
from qkv.results import Result, Statistics
from qkv.scores import Score
from qkv.statistics.base import Extremes, PrefixSinkScores
from qkv.statistics.measure import sweep

__all__ = ["attend", "measure", "positions", "shard", "unshard"]
__dir__ = __all__.copy


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, *, mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None, score: Score | None = None, normalizer: Normalizer | None = None,
    kernel: str = "auto", return_lse: Literal[False] = False, return_statistics: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, *, mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None, score: Score | None = None, normalizer: Normalizer | None = None,
    kernel: str = "auto", return_lse: bool = False, return_statistics: bool = False,
) -> Result[Tensor]: ...  # fmt: skip
@opaque
def attend(
    q: Float[Tensor, "b h nq dq"],
    k: Float[Tensor, "b hkv nk dk"],
    v: Float[Tensor, "b hkv nk dv"],
    group: ProcessGroup,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    return_statistics: bool = False,
) -> Tensor | Result[Tensor]:
    """Return `qkv.attend` over the whole sequence, of which each process of the group holds a shard.

    Every process of the group must make the call, forward and backward. See docs/ring.md.

    Args:
        q: queries of this process, in the order of `shard`.
        k: keys of this process.
        v: values of this process.
        group: the process group over which the sequence is sharded.
        mask: as in `qkv.attend`, of the whole sequence.
        bias: as in `qkv.attend`, of the whole sequence; not `RelativePosition`.
        score: as in `qkv.attend`.
        normalizer: a `Softmax`; others raise an error, as their partial results do not merge.
        kernel: the kernel for each block: ``"auto"``, ``"native"``, ``"flex"`` or ``"tiled"``.
        return_lse: also return the log-sum-exp of the scores of this process's queries.
        return_statistics: also return the statistics of this process's queries and keys.

    Returns:
        ``out`` of this process's queries, or a `Result` with all that is requested.

    Raises:
        InputError: for arguments that do not fit together, or that differ between processes.

    Source: Liu et al. 2023, arXiv:2310.01889.

    >>> import tempfile, torch, qkv
    >>> import torch.distributed as dist
    >>> q = k = v = torch.randn(1, 2, 8, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    ...     out = qkv.ring.attend(q, k, v, dist.group.WORLD, mask=qkv.masks.Causal())
    ...     dist.destroy_process_group()
    >>> torch.allclose(out, qkv.attend(q, k, v, mask=qkv.masks.Causal()), atol=1e-6)
    True
    """
    shared = Shared.of(group, q, k, v, mask, bias, score, normalizer)
    result = serve_shared(shared, kernel)
    if not (return_lse or return_statistics):
        return result.out
    assert result.lse is not None
    statistics = sweep(shared.call, RowState(result.lse.detach()), shared=shared) if return_statistics else None
    return Result(result.out, result.lse if return_lse else None, None, statistics)


@torch.no_grad()
def measure(
    q: Float[Tensor, "b h nq dq"],
    k: Float[Tensor, "b hkv nk dk"],
    group: ProcessGroup,
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    mass: Mapping[str, Mask] | None = None,
    first: int | Int[Tensor, " b"] = 0,
    queries: Bool[Tensor, "b nq"] | None = None,
    statistics: Sequence[PrefixSinkScores | Extremes] = (),
) -> Statistics:
    """Return `qkv.measure` over the whole sequence, of which each process of the group holds a shard.

    Args:
        q: queries of this process, in the order of `shard`.
        k: keys of this process.
        group: the process group over which the sequence is sharded; every process must make the call.
        mask: as in `qkv.attend`, of the whole sequence.
        bias: as in `qkv.attend`, of the whole sequence.
        score: as in `qkv.attend`.
        normalizer: a `Softmax`.
        mass: masks by name, of the whole sequence, as in `qkv.measure`.
        first: the first key of the text in the whole sequence.
        queries: which queries of this process count.
        statistics: ``[PrefixSinkScores(length)]``, whose result covers the whole sequence on every process,
            and `Extremes()`, whose keys are numbered over the whole sequence.

    Returns:
        The statistics of this process's queries and keys.

    Raises:
        InputError: for arguments that do not fit together, or that differ between processes.

    >>> import tempfile, torch, qkv
    >>> import torch.distributed as dist
    >>> q = k = torch.randn(1, 2, 8, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    ...     statistics = qkv.ring.measure(q, k, dist.group.WORLD)
    ...     dist.destroy_process_group()
    >>> round(statistics.received.sum().item(), 4)  # a weight of 1 for each of 2 × 8 queries
    16.0
    """
    # No statistic depends on values: one column of the keys replaces them and is cheap to send around the ring.
    shared = Shared.of(group, q, k, k[..., :1], mask, bias, score, normalizer)
    with serving(None):
        lse = serve_shared(shared).lse
    return sweep(
        shared.call, RowState(lse), shared=shared, mass=mass, first=first, queries=queries, statistics=statistics
    )
