"""Random biases, scores and normalizers, built-in ones and those of `fuzz.own`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz import own
from fuzz.draw import Draw
from qkv import biases, normalizers, scores

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    b: int
    h: int
    hkv: int
    nq: int
    nk: int
    dq: int
    dk: int
    dv: int


@dataclass(frozen=True, eq=False)
class Part:
    """A score, bias or normalizer: its description, a constructor from tensors, and the float64 tensors."""

    text: str
    make: Callable[[Tensors], Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    wide: bool = False
    """Whether the tensors are at least float32, as parameters of user-defined objects usually are."""


def _head_numbers(draw: Draw, shape: Shape, low: float, high: float) -> Tensor:
    """A parameter of a user-defined object, one number per head."""
    return draw.uniform(low, high, shape.h, 1, 1)


# --- scores -----------------------------------------------------------------------------------------------------------


def score(draw: Draw, shape: Shape) -> tuple[Part, int]:
    """A score, and the number of dimensions after its projection."""
    same = shape.dq == shape.dk
    kinds = {"additive": 1.0, "general": 1.5}
    if same:
        kinds |= {"dot": 7.0, "cosine": 1.0, "features": 1.5, "manhattan": 1.0, "gaussian": 1.0, "squares": 1.0}
        kinds |= {"gained": 1.0, "ssmax": 1.0}
    d, kind = shape.dk, draw.weighted(kinds)
    if kind == "general":
        weight = draw.normal(*draw.choice([(), (shape.h,)]), shape.dq, shape.dk) * shape.dq**-0.5
        scale = draw.choice([1.0, 0.6])
        return Part(f"General(scale={scale})", lambda t: scores.General(t["weight"], scale), {"weight": weight}), d
    if kind == "cosine":
        if draw.chance(0.5):
            return Part("Cosine(5)", lambda t: scores.Cosine(5.0)), d
        return Part("Cosine(learned)", lambda t: scores.Cosine(t["scale"]), {"scale": draw.uniform(1, 8, shape.h)}), d
    if kind == "ssmax":
        if draw.chance(0.5):
            return Part("SSMax()", lambda t: scores.SSMax()), d
        return Part("SSMax(learned)", lambda t: scores.SSMax(t["scale"]), {"scale": draw.uniform(0.3, 1.5, shape.h)}), d
    if kind == "additive":
        return _additive(draw, shape)
    if kind == "features":
        return Part("Features(softplus)", lambda t: scores.Features(torch.nn.functional.softplus)), d
    if kind == "manhattan":
        return Part("own Manhattan", lambda t: own.Manhattan()), d
    if kind == "gaussian":
        rate = _head_numbers(draw, shape, 0.2, 1)
        return Part("own Gaussian", lambda t: own.Gaussian(t["rate"]), {"rate": rate}, wide=True), d
    if kind == "squares":
        return Part("own Squares", lambda t: own.Squares()), 2 * d
    if kind == "gained":
        gain = _head_numbers(draw, shape, -1, 1)
        return Part("own Gained", lambda t: own.Gained(t["gain"]), {"gain": gain}, wide=True), d
    factor = draw.weighted({None: 6.0, 1.0: 1.0, 0.3: 1.0, -0.7: 0.5, 0.0: 0.2})
    return Part(f"Dot({factor})", lambda t: scores.Dot(factor)), d


def _additive(draw: Draw, shape: Shape) -> tuple[Part, int]:
    project = shape.dq != shape.dk or draw.chance(0.6)
    a = draw.integer(1, 5) if project else shape.dk
    tensors = {"vector": 2 * draw.normal(*draw.choice([(), (shape.h,)]), a)}
    if project:
        tensors["w_q"] = draw.normal(*draw.choice([(), (shape.h,)]), a, shape.dq)
        tensors["w_k"] = draw.normal(*draw.choice([(), (shape.hkv,)]), a, shape.dk)
    if draw.chance(0.5):
        tensors["bias"] = draw.normal(a)
    sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    return Part(f"Additive({sizes})", lambda t: scores.Additive(**t), tensors), a


# --- biases -----------------------------------------------------------------------------------------------------------


def bias_list(draw: Draw, shape: Shape, d: int) -> list[Part]:
    """Zero to three biases, for projected queries of `d` entries; biases with −inf come last."""
    found = [_bias(draw, shape, d, values=False) for _ in range(draw.weighted({0: 5.0, 1: 4.0, 2: 1.5, 3: 0.3}))]
    if draw.chance(0.05):
        found.append(_bias(draw, shape, d, values=True))
    if draw.chance(0.1):
        found.append(_masking_bias(draw, shape))
    return found


def _bias(draw: Draw, shape: Shape, d: int, *, values: bool) -> Part:
    kinds = ("cap", "dense", "alibi", "t5", "by distance", "relative", "squash", "faded", "slanted", "ripple", "table")
    kind, h = "relative" if values else draw.choice(kinds), shape.h
    distances = shape.nq + shape.nk - 1
    if kind == "cap":
        cap = draw.choice([0.7, 5.0, 50.0])
        return Part(f"SoftCap({cap})", lambda t: biases.SoftCap(cap))
    if kind == "dense":
        size = _broadcast(draw, shape)
        return Part(f"Dense{size}", lambda t: biases.TensorBias(t["tensor"]), {"tensor": draw.normal(*size)})
    if kind == "alibi":
        if draw.chance(0.5):
            return Part("ALiBi()", lambda t: biases.ALiBi())
        return Part("ALiBi(learned)", lambda t: biases.ALiBi(t["slopes"]), {"slopes": draw.uniform(0, 1, h)})
    if kind == "t5":
        both, buckets, most = draw.chance(0.5), draw.choice([4, 8, 32]), draw.choice([20, 128])
        text = f"T5Bias({buckets}, {both}, {most})"
        return Part(text, lambda t: biases.T5Bias(t["table"], both, most), {"table": draw.normal(buckets, h)})
    if kind == "by distance":
        table = draw.normal(draw.choice([1, h]), distances)
        return Part(f"ByDistance{tuple(table.shape)}", lambda t: biases.ByDistance(t["tensor"]), {"tensor": table})
    if kind == "relative":
        rows = 2 * draw.integer(0, 3) + 1
        tensors = {"keys": draw.normal(*draw.choice([(), (h,)]), rows, d)}
        if values:
            tensors["values"] = draw.normal(*draw.choice([(), (h,)]), rows, shape.dv)
        text = f"RelativePosition({', '.join(f'{n} {tuple(x.shape)}' for n, x in tensors.items())})"
        return Part(text, lambda t: biases.RelativePosition(t["keys"], t.get("values")), tensors)
    if kind == "squash":
        return Part("own Squash(3)", lambda t: own.Squash(3.0))
    if kind == "faded":
        rate = _head_numbers(draw, shape, 0, 0.3)
        return Part("own Faded", lambda t: own.Faded(t["rate"]), {"rate": rate}, wide=True)
    if kind == "slanted":
        rate = _head_numbers(draw, shape, 0, 1)
        return Part("own Slanted", lambda t: own.Slanted(t["rate"]), {"rate": rate}, wide=True)
    if kind == "ripple":
        return Part("own Ripple", lambda t: own.Ripple())
    size = tuple(draw.choice([1, n]) for n in (shape.b, h, shape.nq, shape.nk))
    return Part(f"own Table{size}", lambda t: own.Table(t["table"]), {"table": draw.normal(*size)}, wide=True)


def _broadcast(draw: Draw, shape: Shape) -> tuple[int, ...]:
    """An unambiguous shape that broadcasts to (b, h, nq, nk)."""
    whole = (shape.b, shape.h, shape.nq, shape.nk)
    size = tuple(draw.choice([1, n]) for n in whole)
    return size[2:] if draw.chance(0.2) else size


def _masking_bias(draw: Draw, shape: Shape) -> Part:
    if draw.chance(0.3):
        step = draw.choice([2, 3])
        return Part(f"own Comb({step})", lambda t: own.Comb(step))
    size = _broadcast(draw, shape)
    tensor = draw.normal(*size).masked_fill(draw.booleans(draw.choice([0.2, 0.7, 1.0]), *size), -torch.inf)
    return Part(f"Dense{size} with −inf", lambda t: biases.TensorBias(t["tensor"]), {"tensor": tensor})


def forget(draw: Draw, shape: Shape) -> Part:
    """Forget gates, for a causal mask and no more queries than keys."""
    size = draw.choice([(shape.h, shape.nk), (shape.b, shape.h, shape.nk), (1, shape.nk), (shape.b, 1, shape.nk)])
    gates = torch.nn.functional.logsigmoid(draw.choice([0.0, 3.0]) + 2 * draw.normal(*size))
    return Part(f"Forget{size}", lambda t: biases.Forget(t["log_f"]), {"log_f": gates})


def far(draw: Draw, shape: Shape, below: float) -> Part:
    """A bias that moves all scores, or those of some queries or some keys, far down."""
    size = draw.choice([(1, 1, 1, 1), (1, 1, shape.nq, 1), (1, 1, 1, shape.nk)])
    tensor = below * draw.booleans(0.7, *size).double()
    return Part(f"Dense{size} of {below:g}", lambda t: biases.TensorBias(t["tensor"]), {"tensor": tensor})


# --- normalizers ------------------------------------------------------------------------------------------------------

POINTWISE = ("sigmoid", "elu + 1", "relu", "identity", "square", "cauchy", "slope", "wave")
SUM_TO_ONE = ("softplus²", "heavy tail", "stretched", "sharp", "ratio")


def normalizer(draw: Draw, shape: Shape, tiny_mass: float | None, *, large: bool) -> Part:
    """A normalizer. `tiny_mass` is the height of its sink above the scores; with `large` scores it is not `Wave`.

    Large scores have rounding errors of a few units, of which the sine is random.
    """
    kinds = {"softmax": 8.0, "entmax": 2.0, "sparsemax": 0.8, "hard": 0.8, "softpick": 1.0}
    kinds |= dict.fromkeys(SUM_TO_ONE, 1.0) | dict.fromkeys(POINTWISE, 1.0)
    if large:
        del kinds["wave"]
    kind, temperature = draw.weighted(kinds), draw.choice([1.0, 1.0, 0.6, 1.9])
    if kind == "hard":
        return Part(f"Hard(temperature={temperature})", lambda t: normalizers.Hard(temperature=temperature))
    if kind in POINTWISE:
        return _pointwise(draw, shape, kind, temperature)
    tensors, sink, text = _sink(draw, shape, tiny_mass)

    def named(t: Tensors) -> dict[str, Any]:
        return {"temperature": temperature} | {n: t[n] for n in ("sink", "key") if n in t} | sink

    text = f"temperature={temperature}{text}"
    if kind == "softmax":
        return Part(f"Softmax({text})", lambda t: normalizers.Softmax(**named(t)), tensors)
    if kind == "softpick":
        return Part(f"Softpick({text})", lambda t: normalizers.Softpick(**named(t)), tensors)
    if kind in ("entmax", "sparsemax"):
        alpha = 2.0 if kind == "sparsemax" else draw.choice([1.5, 1.5, 1.2, 1.75])
        return Part(f"Entmax({alpha}, {text})", lambda t: normalizers.Entmax(alpha, **named(t)), tensors)
    if kind == "sharp":
        tensors["rate"] = _head_numbers(draw, shape, 0.5, 2)
        return Part(f"own Sharp({text})", lambda t: own.Sharp(t["rate"], **named(t)), tensors, wide=True)
    if kind == "ratio":
        tensors["floor"] = _head_numbers(draw, shape, 0.1, 1)
        return Part(f"own Ratio({text})", lambda t: own.Ratio(t["floor"], **named(t)), tensors, wide=True)
    made = {"softplus²": own.SoftplusSquared, "heavy tail": own.HeavyTail, "stretched": own.Stretched}[kind]
    return Part(f"own {made.__name__}({text})", lambda t: made(**named(t)), tensors, wide=True)


def _sink(draw: Draw, shape: Shape, tiny_mass: float | None) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    kind = draw.weighted({"none": 5.0, "number": 1.0, "heads": 2.0, "queries": 1.0, "key": 2.0})
    if tiny_mass is not None:
        return {"sink": tiny_mass + draw.normal(shape.h)}, {}, f", sink=(heads,) near {tiny_mass:g}"
    if kind == "number":
        return {}, {"sink": 0.5}, ", sink=0.5"
    if kind == "heads":
        return {"sink": draw.normal(shape.h)}, {}, ", sink=(heads,)"
    if kind == "queries":
        return {"sink": draw.normal(shape.b, shape.h, shape.nq)}, {}, ", sink=(batch, heads, queries)"
    if kind == "key":
        return {"key": draw.normal(shape.h, shape.dk)}, {}, ", key=(heads, d)"
    return {}, {}, ""


def _pointwise(draw: Draw, shape: Shape, kind: str, temperature: float) -> Part:
    divide = draw.choice([None, "sum", "keys"])
    if kind == "sigmoid":
        bias = draw.choice([None, -1.0, "learned"])
        if bias == "learned":
            tensors = {"bias": draw.normal(shape.h)}
            text = f"Sigmoid(learned, {divide}, temperature={temperature})"
            return Part(text, lambda t: normalizers.Sigmoid(t["bias"], divide).with_temperature(temperature), tensors)
        text = f"Sigmoid({bias}, {divide}, temperature={temperature})"
        return Part(text, lambda t: normalizers.Sigmoid(bias, divide).with_temperature(temperature))
    if kind in ("elu + 1", "relu", "identity"):
        of = {"elu + 1": normalizers.EluPlusOne, "relu": normalizers.ReLU, "identity": normalizers.Identity}[kind]
        text = f"{of.__name__}({divide}, temperature={temperature})"
        return Part(text, lambda t: of(divide).with_temperature(temperature))
    text = f"{divide}, temperature={temperature}"
    if kind == "square":
        return Part(f"own Square({text})", lambda t: own.Square(divide, temperature))
    if kind == "cauchy":
        return Part(f"own Cauchy({text})", lambda t: own.Cauchy(divide, temperature))
    if kind == "slope":
        rate = _head_numbers(draw, shape, 0.3, 2)
        return Part(
            f"own Slope({text})", lambda t: own.Slope(t["rate"], divide, temperature), {"rate": rate}, wide=True
        )
    phase = _head_numbers(draw, shape, -2, 2)
    return Part(f"own Wave({text})", lambda t: own.Wave(t["phase"], divide, temperature), {"phase": phase}, wide=True)
