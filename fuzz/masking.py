"""Random masks: built-in masks, their compositions by `&`, `|` and `~`, and the masks of `fuzz.own`."""

from __future__ import annotations

from typing import Any

import torch

from fuzz import own
from fuzz.draw import Draw
from fuzz.parts import Shape
from qkv import masks
from qkv.engine import inverted


def mask(draw: Draw, shape: Shape) -> tuple[str, Any]:
    """The description of a random mask, and the mask."""
    kind = draw.weighted({"none": 3.0, "causal": 3.0, "one": 6.0, "and": 2.0, "or": 1.5, "not": 0.7, "causal and": 2.0})
    if kind == "none":
        return "None", None
    if kind == "causal":
        return "Causal()", masks.Causal()
    one, made = simple(draw, shape)
    if kind == "one":
        return one, made
    if isinstance(made, torch.Tensor):
        made = masks.Dense(made)
    if kind == "not":
        return f"~{one}", ~made
    if kind == "causal and":
        return f"Causal() & {one}", masks.Causal() & made
    other, more = simple(draw, shape)
    more = masks.Dense(more) if isinstance(more, torch.Tensor) else more
    return (f"({one}) & ({other})", made & more) if kind == "and" else (f"({one}) | ({other})", made | more)


def simple(draw: Draw, shape: Shape) -> tuple[str, Any]:
    kinds = [
        "window", "ahead", "strided", "dilated", "prefix", "prefix or causal", "global", "padding", "dense", "tensor",
        "predicate", "blockwise", "shifted", "longformer", "bigbird", "stripes", "by head",
        "top keys",
    ]  # fmt: skip
    if shape.nq <= shape.nk:
        kinds.append("document")
    kind, nk = draw.choice(kinds), shape.nk
    if kind == "window":
        size = draw.choice([1, 2, 5, nk])
        return f"Window({size})", masks.Window(size)
    if kind == "ahead":
        size, ahead = draw.integer(1, 6), draw.integer(1, 6)
        return f"Window({size}, ahead={ahead})", masks.Window(size, ahead)
    if kind == "strided":
        step = draw.integer(1, 5)
        return f"Strided({step})", masks.Strided(step)
    if kind == "dilated":
        size, step, ahead = draw.integer(1, 4), draw.integer(1, 4), draw.integer(0, 2)
        return f"Dilated({size}, {step}, {ahead})", masks.Dilated(size, step, ahead)
    if kind == "prefix":
        length = draw.integer(0, nk)
        return f"Prefix({length})", masks.Prefix(length)
    if kind == "prefix or causal":
        length = draw.integer(0, nk)
        return f"Prefix({length}) | Causal()", masks.Prefix(length) | masks.Causal()
    if kind == "global":
        indices = draw.some(range(-nk, nk), 0, 3)
        return f"Global({indices})", masks.Global(indices)
    if kind == "padding":
        return padding(draw, shape)
    if kind in ("dense", "tensor"):
        size = tuple(draw.choice([1, n]) for n in (shape.b, shape.h, shape.nq, nk))
        size = size[2:] if draw.chance(0.2) else size
        tensor = draw.booleans(draw.choice([0.1, 0.5, 0.9]), *size)
        return f"{kind} {size}", masks.Dense(tensor) if kind == "dense" or inverted(tensor) else tensor
    if kind == "predicate":
        return "Predicate((q + b) * 3 + k + h) % 4 > 0", masks.Predicate(_predicate)
    if kind == "blockwise":
        size = draw.integer(1, 7)
        return f"Blockwise(Causal(), {size})", masks.Blockwise(masks.Causal(), size)
    if kind == "shifted":
        offset = draw.integer(-3, nk)
        return f"Shifted(Causal(), {offset})", masks.Shifted(masks.Causal(), offset)
    if kind == "longformer":
        window, causal = 2 * draw.integer(1, 4), draw.chance(0.5)
        return f"longformer({window}, causal={causal})", masks.longformer(window, (0, -1), causal=causal)
    if kind == "bigbird":
        block = draw.integer(1, 8)
        return f"bigbird({block}, random=0)", masks.bigbird(block, 0)
    if kind == "document":
        ids = (draw.uniform(-1, 3, shape.b, nk)).floor().long()
        ids = ids.sort(-1).values if draw.chance(0.5) else ids
        return "Document(random ids)", masks.Document(ids)
    if kind == "top keys":
        block = draw.choice([1, 1, 3])
        size = (draw.choice([1, shape.b]), draw.choice([1, shape.h]), shape.nq, -(-nk // block))
        k, scores, among = draw.integer(1, 4), draw.normal(*size), draw.choice([None, masks.Causal()])
        selection = masks.TopKeys(scores, k, among=among, block=block, n_keys=nk)
        selection.drawn = scores, among  # type: ignore[attr-defined]  # for the formula
        return f"TopKeys{size}({k}, among={'Causal()' if among else None}, block={block})", selection
    if kind == "stripes":
        step = draw.integer(2, 4)
        return f"own Stripes({step})", own.Stripes(step)
    return "own ByHead()", own.ByHead()


def padding(draw: Draw, shape: Shape) -> tuple[str, Any]:
    lengths, side = [draw.integer(0, shape.nk) for _ in range(shape.b)], draw.choice(["left", "right"])
    return f"Padding({lengths}, {side!r})", masks.Padding(lengths, side)


def _predicate(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return ((q + b) * 3 + k + h) % 4 > 0
