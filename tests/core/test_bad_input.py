"""Bad input raises `InputError` in one line that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import qkv
from conftest import rand, refused, triple, unchecked
from qkv import InputError, attend, biases
from qkv.masks import Causal, Dense, Document, Padding, Window
from qkv.normalizers import Softmax
from qkv.scores import Dot


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    """Switch off the shape checks of the tests, which users do not have."""
    with unchecked():
        yield


Q, K, V = triple(2, 6, 2, 11, 13, 3, 5)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


TENSORS = [
    (Q.tolist(), K, V, "q", "list"),
    (Q, K.long(), V, "k", "int64"),
    (Q, K, V > 0, "v", "bool"),
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
    for function in (attend, qkv.plan, qkv.measure, qkv.Attention()):
        with refused(argument, match):
            function(q, k, v)  # type: ignore[operator]


CALLS = [
    # masks: libraries disagree on the meaning of 1, 0 and −inf
    ({"mask": ones(11, 13)}, "mask", "float64"),
    ({"mask": ones(11, 13, dtype=torch.int64)}, "mask", "int64"),
    ({"mask": torch.zeros(11, 13)}, "mask", "float32"),
    ({"mask": "causal"}, "mask", "is str"),
    ({"mask": [[True] * 13] * 11}, "mask", "is list"),
    ({"mask": Causal}, "mask", "the class Causal"),
    ({"mask": ones(13, dtype=torch.bool)}, "mask", "1 dim"),
    ({"mask": ones(13, 11, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": ones(2, 1, 1, 12, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": ones(2, 2, 11, 13, dtype=torch.bool)}, "mask", "broadcast"),
    ({"mask": Padding([1, 2, 3])}, "lengths", "3 numbers"),
    ({"mask": Padding([14])}, "lengths", r"14\.\.14"),
    ({"mask": Causal() & Document([0] * 12)}, "ids", None),
    # biases
    ({"bias": ones(11, 13)}, "bias", "is Tensor"),
    ({"bias": biases.SoftCap}, "bias", "the class SoftCap"),
    ({"bias": (biases.SoftCap(1.0), 3.0)}, "bias", "is float"),
    ({"bias": biases.Dense(ones(13, 11))}, "bias", "broadcast"),
    ({"bias": (biases.SoftCap(1.0), biases.Dense(ones(5, 11, 13)))}, "bias", "broadcast"),
    # normalizers and scores
    ({"normalizer": Softmax(sink=rand(5))}, "sink", "5 logits"),
    ({"normalizer": Softmax}, "normalizer", None),
    ({"normalizer": "softmax"}, "normalizer", None),
    ({"score": 0.5}, "score", None),
    ({"score": 0}, "score", None),
    ({"score": Dot}, "score", None),
]


@pytest.mark.parametrize(("arguments", "argument", "match"), CALLS)
def test_wrong_masks_biases_scores_and_normalizers_are_rejected(
    arguments: dict, argument: str, match: str | None
) -> None:
    for function in (attend, qkv.plan, qkv.measure):
        with refused(argument, match):
            function(Q, K, V, **arguments)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_dropout_outside_zero_to_one_is_rejected(p: float) -> None:
    with refused("dropout_p"):
        attend(Q, K, V, dropout_p=p)


@pytest.mark.parametrize("kernel", ["fast", "", "Flash"])
def test_unknown_kernels_are_rejected(kernel: str) -> None:
    for function in (attend, qkv.plan, qkv.Attention()):
        with refused("kernel"):
            function(Q, K, V, kernel=kernel)


MAKERS: list[tuple[Callable[[], object], str, str | None]] = [
    (lambda: biases.SoftCap(0.0), "cap", None),
    (lambda: biases.SoftCap(-1.0), "cap", None),
    (lambda: biases.SoftCap(math.nan), "cap", None),
    (lambda: biases.SoftCap(math.inf), "cap", None),
    (lambda: biases.Dense(ones(2, 3) > 0), "bias", r"torch\.bool"),
    (lambda: biases.Dense([[0.0]]), "bias", "list"),
    (lambda: biases.Dense(ones(3)), "bias", "1 dim"),
    (lambda: biases.Dense(ones(1, 1, 1, 1, 1)), "bias", "5 dim"),
    (lambda: Softmax(temperature=0.0), "temperature", None),
    (lambda: Softmax(temperature=-1.0), "temperature", None),
    (lambda: Softmax(temperature=math.nan), "temperature", None),
    (lambda: Softmax(temperature=math.inf), "temperature", None),
    (lambda: Softmax(sink=ones(2, 3)), "sink", None),
    (lambda: Softmax(sink=torch.tensor(0.0)), "sink", None),
    (lambda: Softmax(sink=torch.arange(6)), "sink", None),
    (lambda: Dot(math.nan), "scale", None),
    (lambda: Dot(math.inf), "scale", None),
    (lambda: Causal() & Window, "mask", "combined with the class Window"),
    (lambda: Window(2) | (ones(2, 2) > 0), "mask", "combined with Tensor"),
    (lambda: Dense(ones(11, 13) - 1), "mask", "float64"),
]


@pytest.mark.parametrize(("make", "argument", "match"), MAKERS)
def test_constructors_reject_wrong_parameters(make: Callable[[], object], argument: str, match: str | None) -> None:
    with refused(argument, match):
        make()


@pytest.mark.parametrize(
    ("mask", "advice"), [(torch.ones(11, 13, dtype=torch.int64), "=="), (torch.zeros(11, 13), "bias=qkv.biases.Dense")]
)
def test_the_error_of_a_numeric_mask_says_how_to_convert_it(mask: torch.Tensor, advice: str) -> None:
    with pytest.raises(InputError) as raised:
        attend(Q, K, V, mask=mask)
    assert advice in str(raised.value)


def test_an_input_error_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
    with pytest.raises(ValueError, match="expected"):
        Window(0)
