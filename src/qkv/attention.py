"""`attend`: every attention mechanism as one call, and `plan`, which says what will serve it and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.biases import Bias
from qkv.call import Call, as_biases, as_mask, at_least_float32
from qkv.errors import InputError
from qkv.kernels import KERNELS, choose
from qkv.masks import EMPTY, FULL, Mask, Tiles
from qkv.measure import Statistics, measure
from qkv.normalizers import Normalizer
from qkv.scores import Score
from qkv.tiles import classes


@dataclass(frozen=True)
class Plan:
    """What will serve a call, and at what cost."""

    kernel: str
    reason: str
    rejected: Mapping[str, str]
    """Why each other kernel was not taken."""
    flops: int
    """Multiplications and additions of the two products over the tiles that are not empty."""
    bytes: int
    """Size of what is read and written once: q, k, v, the output, the lse, and the weights if they are formed."""

    def __str__(self) -> str:
        lines = [
            f"kernel   {self.kernel}: {self.reason}",
            f"work     {self.flops / 1e9:,.3g} GFLOP, {self.bytes / 2**20:,.3g} MiB read and written",
        ]
        lines += [f"not      {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def attend(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention: for every query, the mean of the values weighted by how its scores with the keys normalise.

    Args:
        q: queries.
        k: keys; ``h`` must be a multiple of ``hkv``: query head i uses key head i // (h // hkv).
        v: values.
        mask: **True where a query may attend**: a mask of `qkv.masks` or a boolean tensor that broadcasts to
            (b, h, nq, nk). With nq ≠ nk the last query stands at the last key. A query that sees nothing gives zeros.
        bias: what happens to a score before the mask: one of `qkv.biases`, or several in a tuple.
        score: how a query and a key are compared; `Dot`, scaled by 1/√d, if None.
        normalizer: how scores become weights; `Softmax()` if None.
        dropout_p: probability with which each weight is dropped. Pass 0 when not training.
        kernel: ``"auto"``, or a name to insist on: ``"flash"``, ``"tiled"``, ``"eager"``, ``"reference"``.
        return_lse: also return the log-sum-exp of the scores, (b, h, nq), natural, float32 or better; differentiable.
        return_weights: also return the weights, (b, h, nq, nk); this alone forms them.

    Returns:
        ``out`` (b, h, nq, dv), or ``(out, lse)``, ``(out, weights)``, ``(out, lse, weights)``.

    Raises:
        InputError: for arguments that do not fit together, or a kernel that cannot serve them.

    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; for kernels see their modules.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> out, lse = qkv.attend(q, k, v, mask=qkv.masks.Causal(), return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 4, 100, 16]), torch.Size([1, 4, 100]))
    """
    call = _call(q, k, v, mask, bias, score, normalizer, dropout_p, dropout_seed)
    if return_lse and not call.normalizer.has_lse:
        raise InputError(
            f"return_lse: {type(call.normalizer).__name__} makes weights without a log-sum-exp; only Softmax has one"
        )
    name, _, _ = choose(call, kernel, weights=return_weights)
    result = KERNELS[name].run(call)
    if not (return_lse or return_weights):
        return result.out
    wanted = [result.out]
    if return_lse:
        assert result.lse is not None
        wanted.append(result.lse)
    if return_weights:
        assert result.weights is not None
        wanted.append(result.weights)
    return tuple(wanted)


def plan(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    v: Float[Tensor, "b hkv nk dv"],
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    return_weights: bool = False,
) -> Plan:
    """What `attend` will do with the same arguments: which kernel and why, why not the others, and the cost.

    >>> import torch, qkv
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> print(qkv.plan(q, k, v, return_weights=True).kernel)
    eager
    """
    call = _call(q, k, v, mask, bias, score, normalizer, dropout_p)
    name, reason, rejected = choose(call, kernel, weights=return_weights)
    b, h, nq, d = q.shape
    nk, dv = v.shape[2:]
    pairs = b * h * nq * nk if name in ("eager", "reference") else _pairs(call)
    size = q.element_size()
    moved = size * (q.numel() + k.numel() + v.numel() + b * h * nq * dv)
    moved += b * h * nq * at_least_float32(q.dtype).itemsize
    if name in ("eager", "reference"):
        moved += size * b * h * nq * nk
    return Plan(name, reason, rejected, 2 * pairs * (d + dv), moved)


def _pairs(call: Call, tile: int = 256) -> int:
    """Pairs of query and key in tiles that are not empty; half of those in partial tiles."""
    grid = call.grid
    tiles = Tiles.of(grid, tile, tile)
    kinds = classes(call.mask, tiles, grid).expand(grid.batch, grid.heads, -1, -1)
    area = (tiles.q_last - tiles.q_first + 1)[:, None] * (tiles.k_last - tiles.k_first + 1)
    share = torch.where(kinds == FULL, 1.0, torch.where(kinds == EMPTY, 0.0, 0.5))
    return int((share.double() * area).sum())


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Bias | Sequence[Bias] | None,
    score: Score | None, normalizer: Normalizer | None, dropout_p: float, seed: int | None = None,
) -> Call:  # fmt: skip
    return Call.of(q, k, v, as_mask(mask), as_biases(bias), score, normalizer, dropout_p, seed)


@dataclass(frozen=True, eq=False)
class Attention:
    """A composition, frozen: everything of `attend` but the tensors.

    >>> import torch, qkv
    >>> local = qkv.Attention(mask=qkv.masks.Window(64))
    >>> q = k = v = torch.randn(1, 4, 100, 16)
    >>> local(q, k, v).shape
    torch.Size([1, 4, 100, 16])
    >>> local.plan(q, k, v).kernel
    'flash'
    """

    mask: Mask | Bool[Tensor, "..."] | None = None
    bias: Bias | Sequence[Bias] | None = None
    score: Score | None = None
    normalizer: Normalizer | None = None
    dropout_p: float = 0.0

    def _parts(self) -> dict[str, object]:
        return {"mask": self.mask, "bias": self.bias, "score": self.score, "normalizer": self.normalizer}

    def __call__(
        self,
        q: Float[Tensor, "b h nq d"],
        k: Float[Tensor, "b hkv nk d"],
        v: Float[Tensor, "b hkv nk dv"],
        *,
        kernel: str = "auto",
        return_lse: bool = False,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """`attend` with this composition."""
        asked = {"kernel": kernel, "return_lse": return_lse, "return_weights": return_weights}
        return attend(q, k, v, dropout_p=self.dropout_p, **self._parts(), **asked)  # type: ignore[arg-type]

    def plan(self, q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto", return_weights: bool = False) -> Plan:
        """`plan` with this composition."""
        asked = {"kernel": kernel, "return_weights": return_weights}
        return plan(q, k, v, dropout_p=self.dropout_p, **self._parts(), **asked)  # type: ignore[arg-type]

    def measure(self, q: Tensor, k: Tensor, v: Tensor | None = None, **asked: object) -> Statistics:
        """`measure` with this composition; `asked` are its `mass`, `first` and `queries`."""
        return measure(q, k, v, **self._parts(), **asked)  # type: ignore[arg-type]
