"""One random case: what is asked of the kernels, made from the seed and the number of the case alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import masking, parts
from fuzz.draw import Draw
from fuzz.parts import Part, Shape
from fuzz.statistics import Asked
from fuzz.visible import dense
from qkv import masks

DTYPES = {torch.float64: 3.0, torch.float32: 5.0, torch.bfloat16: 2.0}
HUGE = 1e4
LARGE = 50.0
"""How large scores get in hard cases; those that square a query, and those of bounded queries, only so far."""


@dataclass(frozen=True, eq=False)
class Case:
    seed: int
    number: int
    shape: Shape
    dtype: torch.dtype
    mask: Any
    allowed: Tensor
    """The mask, dense."""
    score: Part
    biases: list[Part]
    normalizer: Part
    inputs: dict[str, Tensor]
    """q, k and v, in their dtype and as they lie in memory."""
    learn: set[str]
    """Names of the tensors that want a gradient."""
    tile: int | None
    """Size of the kernels' tiles; None for the usual one."""
    threads: int
    flex: bool
    """Whether FlexAttention is tried, which traces every composition anew: half a second."""
    asked: Asked
    named: dict[str, Any]
    """Arguments of `measure` that go with `asked`."""
    text: str
    grad: Tensor
    """Gradient of the output, in its dtype, and of the log-sum-exp."""
    grad_lse: Tensor
    parts: dict[str, Part] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that may want a gradient: inputs, and what parts are made of, in their dtypes."""
        found = dict(self.inputs)
        for of, part in self.parts.items():
            for name, x in part.tensors.items():
                # A learned key is one more key, in the dtype of the others.
                wide = part.wide and name != "key"
                found[f"{of} {name}"] = x.to(torch.promote_types(self.dtype, torch.float32) if wide else self.dtype)
        return found

    def leaves(self) -> dict[str, Tensor]:
        """The tensors; those that want a gradient are leaves, and of parts parameters."""
        found = {}
        for name, x in self.tensors().items():
            learned = name in self.learn
            if learned and name not in self.inputs:
                found[name] = nn.Parameter(x.clone())
            else:
                found[name] = x.detach().requires_grad_(learned)
        return found

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Score, biases and normalizer of these tensors."""

        def of(name: str) -> Any:
            part = self.parts[name]
            return part.make({n: tensors[f"{name} {n}"] for n in part.tensors})

        bias = [of(f"bias {i}") for i in range(len(self.biases))]
        return {"score": of("score"), "bias": tuple(bias), "normalizer": of("normalizer")}


def case(seed: int, number: int) -> Case:
    """Case `number` of `seed`.

    >>> case(0, 5).text == case(0, 5).text
    True
    """
    draw = Draw(seed, number)
    dtype = draw.weighted(DTYPES)
    shape = _shape(draw)
    score, d = parts.score(draw, shape)
    trouble = draw.weighted({"none": 6.0, "far": 1.0, "very far": 1.0, "large": 1.0, "tiny mass": 1.0})
    bias = parts.bias_list(draw, shape, d)
    if trouble in ("far", "very far"):
        bias.append(parts.far(draw, shape, -60.0 if trouble == "far" else -200.0))
    above = draw.choice([30.0, 70.0, 150.0]) if trouble == "tiny mass" else None
    normalizer = parts.normalizer(draw, shape, above, large=trouble == "large")
    mask_text, mask = masking.mask(draw, shape)
    if draw.chance(0.15):
        text, padding = masking.padding(draw, shape)
        mask = padding if mask is None else padding & (_masked(mask))
        mask_text = f"{text} & ({mask_text})"
    allowed = dense(mask, shape.b, shape.h, shape.nq, shape.nk)
    inputs, layout = _inputs(draw, shape, dtype, score, allowed, large=trouble == "large")
    named = {"score": score, "normalizer": normalizer} | {f"bias {i}": part for i, part in enumerate(bias)}
    longest = max(shape.nq, shape.nk)
    tile = draw.choice([None, 4, 4] if longest <= 12 else [None, 8, 16] if longest <= 40 else [None, None, 64])
    asked, words, inner = _asked(draw, shape)
    made = Case(
        seed, number, shape, dtype, mask, allowed, score, bias, normalizer, inputs, set(), tile,
        2 if draw.chance(0.05) else 1, draw.chance(0.1), asked, words, "",
        draw.normal(shape.b, shape.h, shape.nq, shape.dv).to(dtype),
        draw.normal(shape.b, shape.h, shape.nq).bfloat16().to(torch.promote_types(dtype, torch.float32)), named,
    )  # fmt: skip
    learn = _learn(draw, list(made.tensors()))
    shown = words | ({"mass": inner} if inner else {})
    text = "\n".join([
        f"case {number} of seed {seed}",
        f"  shape       {shape}",
        f"  dtype       {dtype}, {layout}, trouble: {trouble}",
        f"  mask        {mask_text}",
        f"  biases      {', '.join(part.text for part in bias) or 'none'}",
        f"  score       {score.text}",
        f"  normalizer  {normalizer.text}",
        f"  gradients   {', '.join(sorted(learn)) or 'none'}",
        f"  tiles       {tile or 'as usual'}, {made.threads} thread(s)",
        f"  measure     {', '.join(f'{name}={_short(x)}' for name, x in shown.items()) or 'no more'}",
    ])  # fmt: skip
    return replace(made, learn=learn, text=text)


def _masked(mask: Any) -> Any:
    return masks.Dense(mask) if isinstance(mask, Tensor) else mask


def _short(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else str(x)


def _shape(draw: Draw) -> Shape:
    if draw.chance(0.04):  # so long that ``auto`` leaves eager
        b, hkv, group = 1, draw.choice([1, 2]), 1
        nq, nk = draw.integer(129, 200), draw.integer(129, 200)
    else:
        b, hkv, group = draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3])
        nq, nk = (draw.integer(1, draw.weighted({1: 1.0, 12: 8.0, 40: 5.0})) for _ in range(2))
        nk = nq if draw.chance(0.3) else nk
    dk = draw.integer(1, 8)
    dq = dk if draw.chance(0.85) else draw.integer(1, 8)
    dv = dk if draw.chance(0.2) else draw.integer(1, 9)
    return Shape(b, hkv * group, hkv, nq, nk, dq, dk, dv)


def _inputs(
    draw: Draw, shape: Shape, dtype: torch.dtype, score: Part, allowed: Tensor, *, large: bool
) -> tuple[dict[str, Tensor], str]:
    """q, k and v; numbers that no query sees may be NaN or infinite."""
    found, layouts = {}, []
    sizes = {
        "q": (shape.b, shape.h, shape.nq, shape.dq),
        "k": (shape.b, shape.hkv, shape.nk, shape.dk),
        "v": (shape.b, shape.hkv, shape.nk, shape.dv),
    }
    spoilt = not allowed.all() and draw.chance(0.35)
    for name, size in sizes.items():
        layout = draw.weighted({"contiguous": 4.0, "transposed": 1.5, "expanded": 1.0, "strided": 1.0})
        if layout == "expanded" and not spoilt:
            flat = draw.choice([dim for dim in range(4) if dim != 2 or size[2] > 1])
            x = draw.normal(*(1 if dim == flat else n for dim, n in enumerate(size))).to(dtype)
        else:
            x = draw.normal(*size).to(dtype)
        if name == "q" and large:
            simple = score.text.startswith(("Dot", "General", "own Gained"))
            x = x * draw.choice([LARGE, HUGE if simple else LARGE])
        layouts.append(f"{name} {layout}")
        found[name] = x.expand(size)
    text = ", ".join(layouts)
    if spoilt:
        _spoil(draw, shape, allowed, found)
        text += ", NaN and ∞ where no query sees"
    for name, layout in zip(found, layouts, strict=True):
        found[name] = _laid(found[name], layout.split()[1])
    return found, text


def _spoil(draw: Draw, shape: Shape, allowed: Tensor, found: dict[str, Tensor]) -> None:
    """NaN and ±∞ in keys and values that no query of the batch item sees."""
    unseen = ~allowed.any(2).any(1)  # (b, nk)
    for name in ("k", "v"):
        bad = draw.choice([torch.nan, torch.inf, -torch.inf])
        found[name] = found[name].masked_fill(unseen[:, None, :, None], bad)


def _laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers, lying otherwise in memory."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return x


def _learn(draw: Draw, names: list[str]) -> set[str]:
    kind = draw.weighted({"all": 6.0, "some": 1.5, "none": 2.5})
    if kind == "none":
        return set()
    return set(names if kind == "all" else draw.some(names, 1, len(names)))


def _asked(draw: Draw, shape: Shape) -> tuple[Asked, dict[str, Any], str]:
    """What to ask of `measure`, and the mask of a sub-mask's mass as a text."""
    named: dict[str, Any] = {}
    first = [0] * shape.b
    if draw.chance(0.3):
        first = [draw.integer(0, shape.nk - 1) for _ in range(shape.b)]
        named["first"] = torch.tensor(first)
    if draw.chance(0.2):
        named["queries"] = draw.booleans(0.7, shape.b, shape.nq)
    if draw.chance(0.3):
        named["prefix_keys"] = draw.integer(1, 12)
    if draw.chance(0.3):
        named["bins"] = draw.integer(1, 9)
    mass, text = {}, ""
    if draw.chance(0.4):
        text, inner = masking.simple(draw, shape)
        inner = _masked(inner)
        named["mass"] = {"inner": inner}
        mass = {"inner": dense(inner, shape.b, shape.h, shape.nq, shape.nk)}
    return Asked(first, named.get("queries"), named.get("prefix_keys"), named.get("bins"), mass), named, text
