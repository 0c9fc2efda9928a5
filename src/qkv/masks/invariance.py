"""Whether a mask stays as it is while a text grows or is padded, which caches of keys need."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import InputError
from qkv.masks.base import Mask
from qkv.masks.built_in import Causal
from qkv.masks.geometry import Grid

LONGEST, SPREAD, LAST = 8192, 96, 96  # the longest text that is compared, and which of its positions


def causal(mask: Mask | None) -> Mask:
    """The mask without later keys.

    >>> from qkv.masks import Window
    >>> causal(Window(2)), causal(Window(2, ahead=1))
    (Window(size=2, ahead=0), And(left=Window(size=2, ahead=1), right=Causal()))
    """
    if mask is None:
        return Causal()
    return mask if mask.band is not None and mask.band[0] >= 0 else mask & Causal()


def depends_on_length(mask: Mask, longest: int, heads: int) -> bool:
    """Whether a pair of positions that is visible in one text is masked in a longer one, or when it is the last query.

    Then keys that were computed for a prompt are not those of the longer text, and a cache would be wrong. The masks of
    several lengths are compared, up to `longest` tokens.

    >>> from qkv.masks import Global, Window
    >>> [depends_on_length(Window(4) | Global([token]), 64, heads=1) for token in (0, -1)]
    [False, True]
    """
    longest = min(longest, LONGEST)
    whole = Grid.of(longest, longest, heads=heads)
    try:
        for n in {longest - 1, longest // 2 + 1, longest // 3 + 1} & set(range(1, longest)):
            at = _sample(n)
            visible = _pairs(mask, at, at, whole)
            last = _pairs(mask, at[-1:], at, Grid.of(1, n, heads=heads))
            short = _pairs(mask, at, at, Grid.of(n, n, heads=heads))
            if not torch.equal(short, visible) or not torch.equal(visible[:, -1:], last):
                return True
    except InputError:  # a mask of tensors that fits one length only
        return True
    return False


def depends_on_start(mask: Mask, longest: int, heads: int) -> bool:
    """Whether a mask depends on more than the distance of query and key, so that padding on the left would change it.

    >>> from qkv.masks import Prefix, Window
    >>> depends_on_start(Window(4), 64, heads=1), depends_on_start(Prefix(4), 64, heads=1)
    (False, True)
    """
    longest = min(longest, LONGEST)
    grid = Grid.of(longest, longest, heads=heads)
    for move in {1, 2, longest // 2} & set(range(1, longest)):
        at = _sample(longest - move)
        if not torch.equal(_pairs(mask, at, at, grid), _pairs(mask, at + move, at + move, grid)):
            return True
    return False


def _sample(n: int) -> Int[Tensor, " p"]:
    """Positions below n: some over the whole length, and the last ones."""
    return torch.cat([torch.linspace(0, n - 1, SPREAD).long(), torch.arange(max(0, n - LAST), n)]).unique()


def _pairs(mask: Mask, q: Int[Tensor, " q"], k: Int[Tensor, " k"], grid: Grid) -> Bool[Tensor, "h q k"]:
    """Which pairs of these positions are visible in each head."""
    mask.check(grid)
    b, h = torch.zeros(1, 1, 1, dtype=torch.long), torch.arange(grid.heads)[:, None, None]
    return mask.is_visible(b, h, q[:, None], k, grid).expand(grid.heads, len(q), len(k))
