"""The hidden map of a layer of linear attention as a call, whose statistics are those of the absolute weights.

No step of such a layer computes a weight, but its output is linear in the values: out = W v (Ali et al. 2024,
arXiv:2403.01590). Rows of W are gradients of the output, so any part of W takes memory linear in the text.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.engine import Call, at_least_float32
from qkv.linear import linear_attend
from qkv.masks import Causal
from qkv.normalizers import Pointwise
from qkv.results import bin_size
from qkv.scores import Pairwise

STRIP = 2**22  # weights of the rows that are computed together
STRIPS = 8  # of which so many are kept, because tiles of other keys need the same rows


class HiddenMap(Pairwise):
    """The weights that the values have in the output of `linear_attend`, with their signs.

    Queries and keys of the call are the numbers of batch items and tokens.
    """

    def __init__(self, q: Tensor, k: Tensor, decay: Tensor | None, beta: Tensor | None) -> None:
        with torch.inference_mode(False):  # autograd saves them
            self.inputs = tuple(
                None if x is None else x.detach().to(at_least_float32(x.dtype)).clone() for x in (q, k, decay, beta)
            )
        self.shape = q.shape[:3]
        self.strips: dict[tuple[int, int, int], Tensor] = {}

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        items, rows, keys = q[:, 0, 0, 0].long(), q[0, 0, :, 1].long(), k[0, 0, :, 1].long()
        size = self._size(len(items))
        parts = []
        for strip in range(int(rows.min()) // size, int(rows.max()) // size + 1):
            at = rows[(rows >= strip * size) & (rows < (strip + 1) * size)] - strip * size
            parts.append(self._strip(int(items[0]), int(items[-1]) + 1, strip, size)[:, :, at][..., keys])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _size(self, items: int) -> int:
        """The number of rows that are computed together: a power of two, as bins."""
        return 2 ** int(math.log2(max(1, STRIP // (items * self.shape[1] * self.shape[2]))))

    def _strip(self, first: int, stop: int, strip: int, size: int) -> Float[Tensor, "b h rows n"]:
        """The weights of `size` rows, for these batch items."""
        place = first, stop, strip
        if place not in self.strips:
            if len(self.strips) >= STRIPS:
                self.strips.pop(next(iter(self.strips)))
            self.strips[place] = self.rows(slice(first, stop), slice(strip * size, (strip + 1) * size))
        return self.strips[place]

    def rows(self, items: slice, rows: slice) -> Float[Tensor, "b h rows n"]:
        """The weights of some rows: the gradients of their outputs with respect to the values."""
        n = self.shape[2]
        rows = slice(rows.start, min(rows.stop, n))
        q, k, decay, beta = (None if x is None else x[items, :, : rows.stop] for x in self.inputs)
        assert q is not None
        assert k is not None
        with torch.inference_mode(False), torch.enable_grad():
            v = q.new_zeros(*q.shape[:3], rows.stop - rows.start).requires_grad_()
            out = linear_attend(q, k, v, features=_same, normalize=False, decay=decay, beta=beta)
            unit = torch.eye(v.shape[3], device=v.device).expand(*v.shape[:2], -1, -1)
            (found,) = torch.autograd.grad(out[:, :, rows], v, unit)
        return F.pad(found.mT, (0, n - rows.stop))

    def signed(self, bins: int, *, whole: bool) -> dict[str, Tensor]:
        """What only weights with signs tell, as variables of a profile: ``negative``, the share of a row's absolute
        weight that is negative; ``map_signed``, the means of bins; and of a short text, ``signed``, the whole map.
        """
        b, _, n = self.shape
        side = bin_size(n, max(1, bins))
        size = self._size(b)
        step = max(size, side)
        negative, means, maps = list[Tensor](), list[Tensor](), list[Tensor]()
        for start in range(0, n, step):
            strips = range(start // size, -(-min(start + step, n) // size))
            weights = torch.cat([self._strip(0, b, strip, size) for strip in strips], 2)
            total = weights.abs().sum(-1)
            negative.append((total - weights.sum(-1)) / 2 / torch.where(total > 0, total, 1))
            means.append(F.avg_pool2d(weights, side, ceil_mode=True, count_include_pad=False))
            maps += [weights] if whole else []
        found = {"negative": torch.cat(negative, 2)}
        found |= {"map_signed": torch.cat(means, 2)} if bins else {}
        return found | ({"signed": torch.cat(maps, 2)} if whole else {})


class Absolute(Pointwise):
    """The weight is the absolute score."""

    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        return scores.abs()


def call_of(
    q: Float[Tensor, "b h n m"],
    k: Float[Tensor, "b h n m"],
    v: Float[Tensor, "b h n dv"],
    decay: Float[Tensor, " h"] | Float[Tensor, "b h n"] | Float[Tensor, "b h n m"] | None,
    beta: Float[Tensor, "b h n"] | None,
) -> Call:
    """The call whose scores are the hidden map of `linear_attend` with these features and gates."""
    b, h, n, _ = q.shape
    decay = decay[:, None].expand(b, h, n) if decay is not None and decay.ndim == 1 else decay
    item, token = torch.arange(b, device=q.device), torch.arange(n, device=q.device)
    place = torch.stack(torch.broadcast_tensors(item[:, None, None], token), -1).float().expand(b, h, n, 2)
    return Call.of(place, place, v.to(place), Causal(), score=HiddenMap(q, k, decay, beta), normalizer=Absolute())


def _same(x: Tensor) -> Tensor:
    return x
