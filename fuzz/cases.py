"""One random case: composition, shapes, inputs and settings, which depend only on the seed and the case number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import masking, parts
from fuzz.draw import Draw
from fuzz.parts import Part, Shape
from fuzz.statistics import Request
from fuzz.visible import dense
from qkv import masks
from qkv.statistics import Extremes, PrefixSinkScores

DTYPES = {torch.float64: 3.0, torch.float32: 5.0, torch.bfloat16: 2.0}
HUGE = 1e4
LARGE = 50.0
"""Factors of the queries in cases with large scores; `LARGE` for scores that square a query or bound it."""


@dataclass(frozen=True, eq=False)
class Case:
    """The composition, inputs and settings of one case."""

    seed: int
    number: int
    shape: Shape
    dtype: torch.dtype
    mask: Any
    visible: Tensor
    """The mask, dense."""
    score: Part
    biases: list[Part]
    normalizer: Part
    inputs: dict[str, Tensor]
    """q, k and v, in their dtype and memory layout."""
    learn: set[str]
    """Names of the tensors that require gradients."""
    tile: int | None
    """Size of the kernels' tiles; None for the usual one."""
    threads: int
    flex: bool
    """Whether FlexAttention is run; it traces every composition, which takes half a second."""
    request: Request
    named: dict[str, Any]
    """The arguments of `measure` for `request`."""
    text: str
    grad: Tensor
    """Gradient of the output, in its dtype, and of the log-sum-exp."""
    grad_lse: Tensor
    parts: dict[str, Part] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that may require a gradient: inputs and parameters of parts, in their dtypes."""
        found = dict(self.inputs)
        for of, part in self.parts.items():
            for name, x in part.tensors.items():
                # A learned key has the dtype of the keys.
                wide = part.wide and name != "key"
                found[f"{of} {name}"] = x.to(torch.promote_types(self.dtype, torch.float32) if wide else self.dtype)
        return found

    def leaves(self) -> dict[str, Tensor]:
        """The tensors as leaves of autograd; learned tensors of parts are parameters."""
        found = {}
        for name, x in self.tensors().items():
            learned = name in self.learn
            if learned and name not in self.inputs:
                found[name] = nn.Parameter(x.clone())
            else:
                found[name] = x.detach().requires_grad_(learned)
        return found

    def made(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Score, biases and normalizer with these tensors."""

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
    stress = draw.weighted({"none": 6.0, "far": 1.0, "very far": 1.0, "large": 1.0, "tiny mass": 1.0})
    bias = parts.bias_list(draw, shape, d)
    if stress in ("far", "very far"):
        bias.append(parts.far(draw, shape, -60.0 if stress == "far" else -200.0))
    above = draw.choice([30.0, 70.0, 150.0]) if stress == "tiny mass" else None
    normalizer = parts.normalizer(draw, shape, above, large=stress == "large")
    mask_text, mask = masking.mask(draw, shape)
    if draw.chance(0.15):
        text, padding = masking.padding(draw, shape)
        mask = padding if mask is None else padding & (_masked(mask))
        mask_text = f"{text} & ({mask_text})"
    if shape.nq <= shape.nk and draw.chance(0.07):
        bias.append(parts.forget(draw, shape))
        mask_text, mask = (
            ("Causal()", masks.Causal())
            if mask is None
            else (f"Causal() & ({mask_text})", masks.Causal() & _masked(mask))
        )
    visible = dense(mask, shape.b, shape.h, shape.nq, shape.nk)
    inputs, layout = _inputs(draw, shape, dtype, score, visible, large=stress == "large")
    named = {"score": score, "normalizer": normalizer} | {f"bias {i}": part for i, part in enumerate(bias)}
    longest = max(shape.nq, shape.nk)
    tile = draw.choice([None, 4, 4] if longest <= 12 else [None, 8, 16] if longest <= 40 else [None, None, 64])
    request, words, inner = _random_request(draw, shape)
    made = Case(
        seed, number, shape, dtype, mask, visible, score, bias, normalizer, inputs, set(), tile,
        2 if draw.chance(0.05) else 1, draw.chance(0.1), request, words, "",
        draw.normal(shape.b, shape.h, shape.nq, shape.dv).to(dtype),
        draw.normal(shape.b, shape.h, shape.nq).bfloat16().to(torch.promote_types(dtype, torch.float32)), named,
    )  # fmt: skip
    learn = _learn(draw, list(made.tensors()))
    shown = words | ({"mass": inner} if inner else {})
    text = "\n".join([
        f"case {number} of seed {seed}",
        f"  shape       {shape}",
        f"  dtype       {dtype}, {layout}, stress: {stress}",
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
    if draw.chance(0.04):  # long enough that ``auto`` does not choose eager
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
    draw: Draw, shape: Shape, dtype: torch.dtype, score: Part, visible: Tensor, *, large: bool
) -> tuple[dict[str, Tensor], str]:
    """q, k and v; keys and values that are masked for all queries may be NaN or infinite."""
    found, layouts = {}, []
    sizes = {
        "q": (shape.b, shape.h, shape.nq, shape.dq),
        "k": (shape.b, shape.hkv, shape.nk, shape.dk),
        "v": (shape.b, shape.hkv, shape.nk, shape.dv),
    }
    with_nan = not visible.all() and draw.chance(0.35)
    for name, size in sizes.items():
        layout = draw.weighted({"contiguous": 4.0, "transposed": 1.5, "expanded": 1.0, "strided": 1.0})
        if layout == "expanded" and not with_nan:
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
    if with_nan:
        _add_nan(draw, shape, visible, found)
        text += ", NaN and ∞ where masked for all queries"
    for name, layout in zip(found, layouts, strict=True):
        found[name] = _with_layout(found[name], layout.split()[1])
    return found, text


def _add_nan(draw: Draw, shape: Shape, visible: Tensor, found: dict[str, Tensor]) -> None:
    """Put NaN or ±∞ into keys and values that are masked for all queries of the batch item."""
    masked = ~visible.any(2).any(1)  # (b, nk)
    for name in ("k", "v"):
        bad = draw.choice([torch.nan, torch.inf, -torch.inf])
        found[name] = found[name].masked_fill(masked[:, None, :, None], bad)


def _with_layout(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory layout."""
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


def _random_request(draw: Draw, shape: Shape) -> tuple[Request, dict[str, Any], str]:
    """Random arguments of `measure`, and the description of the mask in `mass`."""
    named: dict[str, Any] = {}
    first, prefix = [0] * shape.b, None
    if draw.chance(0.3):
        first = [draw.integer(0, shape.nk - 1) for _ in range(shape.b)]
        named["first"] = torch.tensor(first)
    if draw.chance(0.2):
        named["queries"] = draw.booleans(0.7, shape.b, shape.nq)
    if draw.chance(0.3):
        prefix = draw.integer(1, 12)
        named["statistics"] = [PrefixSinkScores(prefix)]
    if draw.chance(0.3):
        named["bins"] = draw.choice([1, 2, 3, 5, 9, max(shape.nq, shape.nk)])
    mass, text = {}, ""
    if draw.chance(0.4):
        text, inner = masking.simple(draw, shape)
        inner = _masked(inner)
        named["mass"] = {"inner": inner}
        mass = {"inner": dense(inner, shape.b, shape.h, shape.nq, shape.nk)}
    if draw.chance(0.3):
        named["statistics"] = [*named.get("statistics", ()), Extremes()]
    return Request(first, named.get("queries"), prefix, named.get("bins"), mass), named, text
