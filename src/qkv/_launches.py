"""The number of kernels that the forward pass of a call launches on a CUDA card, for `plan`.

They are expected numbers, of a call whose mask is known from a call before: every torch operation counts as its own
kernels, torch's fused kernels as one, and compiled FlexAttention as two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qkv._engine.call import Call, detached
from qkv._engine.forward import finished, forward_reducer
from qkv._engine.launches import Launches
from qkv._engine.sizes import GPUS, has_triton
from qkv._engine.sweep import Block, Reducer, Tile, Workspace, groups, workspace
from qkv.kernels.flex import kernel as flex
from qkv.kernels.flex.log_space import ScoreMod
from qkv.kernels.fused import kernel as fused
from qkv.normalizers import Pointwise
from qkv.partial import Partial

PAD = FILL = 2  # launches of torch's padding, and of filling in a copy
ATTENTION = 2  # launches of compiled FlexAttention: attention, and the conversion of the log-sum-exp from base 2
SINK = 5  # launches of `Partial.with_sink` in place, in float32


def expected_launches(kernel: str, call: Call) -> int | None:
    """Kernels launched by the forward pass of a call on CUDA; None elsewhere, and where the number is not known.

    It is not known for the search of a level, whose steps depend on the scores, and for kernels that are not counted.
    """
    count = {"fused": _fused, "flex": _flex, "tiled": _tiled}.get(kernel)
    if count is None or call.q.device.type not in GPUS:
        return None
    if not (call.normalizer.has_lse or isinstance(call.normalizer, Pointwise)):
        return None
    return count(call)


def _fused(call: Call) -> int:
    size = fused.padded_size(call)
    found = 1 + PAD * sum(x.shape[3] != size for x in (call.q, call.k, call.v))
    found += call.scale <= 0
    found += 2 * (call.q.dtype == torch.float32 and call.q.shape[1] != call.k.shape[1])  # keys and values are repeated
    return found if call.sink is None else found + (1 if has_triton() else SINK + (call.q.dtype != torch.float32))


def _flex(call: Call) -> int | None:
    """Counted on meta tensors, for all but FlexAttention itself; without the blocks of the mask, which are kept."""
    if call.mask is not None and not flex.keeps_blocks(call.mask):
        return None
    blocked = flex.blocked_mask(call)
    made = call.with_tensors({name: x.to("meta") for name, x in call.tensors().items()})
    made = made if call.divisor is None else replace(made, divisor=call.divisor.to("meta"))
    made = made if call.needs_grad else detached(made)
    found = 0

    def attend(call: Call, score_mod: ScoreMod | None) -> Partial:
        nonlocal found
        found += ATTENTION + PAD * sum(x.shape[3] < flex.SMALLEST_HEAD for x in (call.q, call.k, call.v))
        if blocked is not None:
            found += 2 * FILL * ((blocked.masked_keys is not None) + (blocked.empty_rows is not None))
        return Partial.zero(call.q.new_empty(*call.q.shape[:3], call.v.shape[3]))

    with Launches() as zeros:
        attend(made, None)
    found = 0
    with Launches() as others:
        flex.from_attention(made, attend)
    return found + others.count - zeros.count


def _tiled(call: Call) -> int:
    """Counted by running one tile of each block status and one block of queries: all others launch as many kernels.

    Patterns of masks that a first call computes and keeps are not counted.
    """
    call, device = detached(call), call.q.device.type
    of_tile: dict[int, tuple[int, int]] = {}  # launches of a group's first tile of a block status, and of others
    ends = None  # launches of a block of queries without its tiles
    with torch.no_grad(), workspace() as space:
        with Launches(device) as found:
            forward = forward_reducer(call)
            finished(call, forward)
        reducer: Reducer[Any, Any] = forward
        total, made = found.count, groups(call)
        for number in itertools.count():
            with Launches(device) as found:
                group = next(made, None)
            if group is None:
                break
            blocks = [Block(group, index, rows) for index, rows in enumerate(group.rows)]
            if ends is None:
                ends = _ends(reducer, blocks[0], space)
            total += found.count + ends * len(blocks)
            for status, n in Counter(status for block in blocks for _, status in block.status).items():
                if status not in of_tile:
                    _run(reducer, _tile(call, number, status, space))  # computes and keeps the pattern of its mask
                    fresh = _tile(call, number, status, space)
                    again = Tile(fresh.block, fresh.indices, status, space)
                    of_tile[status] = _run(reducer, fresh), _run(reducer, again)
                first, other = of_tile[status]
                total += first + (n - 1) * other
    return total


def _tile(call: Call, number: int, status: int, space: Workspace) -> Tile:
    """The first tile with this block status of a group, which is made anew: its first tile tests its tensors."""
    group = next(itertools.islice(groups(call), number, None))
    blocks = (Block(group, index, rows) for index, rows in enumerate(group.rows))
    return next(Tile(b, range(c, c + 1), status, space) for b in blocks for c, found in b.status if found == status)


def _ends(reducer: Reducer[Any, Any], block: Block, space: Workspace) -> int:
    return _count(lambda: reducer.end(reducer.begin(None, block), space), block.group.tiles.q.device.type)


def _run(reducer: Reducer[Any, Any], tile: Tile) -> int:
    """Compute a tile, and return the number of its launches."""
    state = reducer.begin(None, tile.block)
    return _count(lambda: reducer.tile(state, tile), tile.group.tiles.q.device.type)


def _count(run: Callable[[], object], device: str) -> int:
    with Launches(device) as found:
        run()
    return found.count
