"""Bad input raises `InputError` in one line that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import qkv
from conftest import rand, refused, triple
from qkv import InputError, attend, biases
from qkv.masks import Causal, Dense, Document, Padding, Window
from qkv.normalizers import Softmax
from qkv.scores import Dot

Q, K, V = triple(2, 6, 2, 11, 13, 3, 5)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


TENSORS = [
    (Q.tolist(), K, V, "q", "list"),
    (Q, K.long(), V, "k", "int64"),
    (Q[0], K, V, "q", "alike"),
    (Q, K, V[None], "v", "alike"),
    (Q[:, :, :0], K, V, "q", "at least 1"),
    (Q, K[:, :, :0], V[:, :, :0], "k", "at least 1"),
    (Q[:1], K, V, "q", "batch size"),
    (Q, K, V[:1], "q", "batch size"),
    (Q[..., :2], K, V, "q", "head dimension"),
    (Q, K, V[:, :1], "k", "heads or length"),
    (Q, K, V[:, :, 1:], "k", "heads or length"),
    (Q[:, :5], K, V, "q", "multiple"),
    (Q[:, :1], K, V, "q", "multiple"),
    (Q.float(), K, V, "q", "dtype or device"),
    (Q, K, V.half(), "q", "dtype or device"),
    (Q, K, V.to("meta"), "q", "dtype or device"),
]


@pytest.mark.parametrize(("q", "k", "v", "argument", "match"), TENSORS)
def test_wrong_tensors_are_rejected(q: object, k: object, v: object, argument: str, match: str) -> None:
    of_queries_and_keys = [lambda q, k, v: qkv.measure(q, k)] if v is V else []
    for function in (attend, qkv.plan, qkv.Attention(), *of_queries_and_keys):
        with refused(argument, match):
            function(q, k, v)


CALLS: list[tuple[dict[str, Any], str, str | None]] = [
    # masks: libraries disagree on the meaning of 1, 0 and −inf
    ({"mask": ones(11, 13, dtype=torch.int64)}, "mask", "=="),
    ({"mask": torch.zeros(11, 13)}, "mask", "bias=qkv.biases.TensorBias"),
    ({"mask": "causal"}, "mask", "is str"),
    ({"mask": Causal}, "mask", "the class Causal"),
    ({"mask": ones(13, dtype=torch.bool)}, "mask", "1 dim"),
    ({"mask": ones(13, 11, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": ones(2, 2, 11, 13, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": Padding([1, 2, 3])}, "lengths", "3 numbers"),
    ({"mask": Padding([14])}, "lengths", r"14\.\.14"),
    ({"mask": Causal() & Document([0] * 12)}, "ids", None),
    ({"bias": ones(11, 13)}, "bias", "is Tensor"),
    ({"bias": biases.SoftCap}, "bias", "the class SoftCap"),
    ({"bias": (biases.SoftCap(1.0), 3.0)}, "bias", "is float"),
    ({"bias": (biases.SoftCap(1.0), biases.TensorBias(ones(5, 11, 13)))}, "bias", "broadcast"),
    ({"normalizer": Softmax(sink=rand(5))}, "sink", "5 logits"),
    ({"normalizer": Softmax}, "normalizer", None),
    ({"normalizer": "softmax"}, "normalizer", None),
    ({"score": 0}, "score", None),
    ({"score": Dot}, "score", None),
]


@pytest.mark.parametrize(("arguments", "argument", "match"), CALLS)
def test_wrong_parts_are_rejected(arguments: dict[str, Any], argument: str, match: str | None) -> None:
    for function, tensors in ((attend, (Q, K, V)), (qkv.plan, (Q, K, V)), (qkv.measure, (Q, K))):
        with refused(argument, match):
            function(*tensors, **arguments)  # type: ignore[operator]


REFUSALS: list[tuple[str, Callable[[], object], str | None]] = [
    *(("dropout_p", lambda p=p: attend(Q, K, V, dropout_p=p), None) for p in (-0.1, 1.0, math.nan)),
    *(("kernel", lambda f=f: f(Q, K, V, kernel="Flash"), None) for f in (attend, qkv.plan, qkv.Attention())),
    *(("cap", lambda cap=cap: biases.SoftCap(cap), None) for cap in (0.0, math.nan, math.inf)),
    ("bias", lambda: biases.TensorBias(ones(2, 3) > 0), "bool"),
    ("bias", lambda: biases.TensorBias([[0.0]]), "list"),
    ("bias", lambda: biases.TensorBias(ones(3)), "1 dim"),
    ("bias", lambda: biases.TensorBias(ones(1, 1, 1, 1, 1)), "5 dim"),
    *(("temperature", lambda t=t: Softmax(temperature=t), None) for t in (0.0, -1.0, math.nan, math.inf)),
    *(("sink", lambda sink=sink: Softmax(sink=sink), None) for sink in (ones(2, 3), ones(1)[0], torch.arange(6))),
    *(("scale", lambda scale=scale: Dot(scale), None) for scale in (math.nan, math.inf)),
    ("mask", lambda: Causal() & Window, "the class Window"),
    ("mask", lambda: Window(2) | (ones(2, 2) > 0), "with torch.bool"),
    ("mask", lambda: Dense(ones(11, 13) - 1), "float64"),
]


@pytest.mark.parametrize(("argument", "call", "match"), REFUSALS)
def test_wrong_options_and_parameters_are_rejected(
    argument: str, call: Callable[[], object], match: str | None
) -> None:
    with refused(argument, match):
        call()


def test_an_input_error_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
