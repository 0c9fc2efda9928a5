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
    (Q.tolist(), K, V, "q"),
    (Q, K.long(), V, "k"),
    (Q, K, V > 0, "v"),
    (Q[0], K, V, "q"),
    (Q, K, V[None], "v"),
    (Q[:, :, :0], K, V, "q"),
    (Q, K[:, :, :0], V[:, :, :0], "k"),
    (Q[:1], K, V, "q"),
    (Q, K, V[:1], "q"),
    (Q[..., :2], K, V, "q"),
    (Q, K, V[:, :1], "k"),
    (Q, K, V[:, :, 1:], "k"),
    (Q[:, :5], K, V, "q"),
    (Q[:, :1], K, V, "q"),
    (Q.float(), K, V, "q"),
    (Q, K, V.half(), "q"),
    (Q, K, V.to("meta"), "q"),
]


@pytest.mark.parametrize(("q", "k", "v", "argument"), TENSORS)
def test_wrong_tensors_are_rejected(q: object, k: object, v: object, argument: str) -> None:
    for function in (attend, qkv.plan, qkv.measure, qkv.Attention()):
        with refused(argument):
            function(q, k, v)  # type: ignore[operator]


CALLS = [
    # masks: libraries disagree on the meaning of 1, 0 and −inf
    ({"mask": ones(11, 13)}, "mask"),
    ({"mask": ones(11, 13, dtype=torch.int64)}, "mask"),
    ({"mask": torch.zeros(11, 13)}, "mask"),
    ({"mask": "causal"}, "mask"),
    ({"mask": [[True] * 13] * 11}, "mask"),
    ({"mask": Causal}, "mask"),
    ({"mask": ones(13, dtype=torch.bool)}, "mask"),
    ({"mask": ones(13, 11, dtype=torch.bool)}, "mask"),
    ({"mask": ones(2, 1, 1, 12, dtype=torch.bool)}, "mask"),
    ({"mask": ones(2, 2, 11, 13, dtype=torch.bool)}, "mask"),
    ({"mask": Padding([1, 2, 3])}, "lengths"),
    ({"mask": Padding([14])}, "lengths"),
    ({"mask": Causal() & Document([0] * 12)}, "ids"),
    # biases
    (
        {"bias": ones(11, 13)},
        "bias",
    ),
    ({"bias": biases.SoftCap}, "bias"),
    ({"bias": (biases.SoftCap(1.0), 3.0)}, "bias"),
    ({"bias": biases.Dense(ones(13, 11))}, "bias"),
    ({"bias": (biases.SoftCap(1.0), biases.Dense(ones(5, 11, 13)))}, "bias"),
    # normalizers and scores
    ({"normalizer": Softmax(sink=rand(5))}, "sink"),
    ({"normalizer": Softmax}, "normalizer"),
    ({"normalizer": "softmax"}, "normalizer"),
    ({"score": 0.5}, "score"),
    ({"score": 0}, "score"),
    ({"score": Dot}, "score"),
]


@pytest.mark.parametrize(("arguments", "argument"), CALLS)
def test_wrong_masks_biases_scores_and_normalizers_are_rejected(arguments: dict, argument: str) -> None:
    for function in (attend, qkv.plan, qkv.measure):
        with pytest.raises(InputError) as raised:
            function(Q, K, V, **arguments)
        assert raised.value.argument == argument
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_dropout_outside_zero_to_one_is_rejected(p: float) -> None:
    with refused("dropout_p"):
        attend(Q, K, V, dropout_p=p)


@pytest.mark.parametrize("kernel", ["fast", "", "Flash"])
def test_unknown_kernels_are_rejected(kernel: str) -> None:
    for function in (attend, qkv.plan, qkv.Attention()):
        with refused("kernel"):
            function(Q, K, V, kernel=kernel)


MAKERS: list[tuple[Callable[[], object], str]] = [
    (lambda: biases.SoftCap(0.0), "cap"),
    (lambda: biases.SoftCap(-1.0), "cap"),
    (lambda: biases.SoftCap(math.nan), "cap"),
    (lambda: biases.SoftCap(math.inf), "cap"),
    (lambda: biases.Dense(ones(2, 3) > 0), "bias"),
    (lambda: biases.Dense([[0.0]]), "bias"),
    (lambda: biases.Dense(ones(3)), "bias"),
    (lambda: biases.Dense(ones(1, 1, 1, 1, 1)), "bias"),
    (lambda: Softmax(temperature=0.0), "temperature"),
    (lambda: Softmax(temperature=-1.0), "temperature"),
    (lambda: Softmax(temperature=math.nan), "temperature"),
    (lambda: Softmax(temperature=math.inf), "temperature"),
    (lambda: Softmax(sink=ones(2, 3)), "sink"),
    (
        lambda: Softmax(sink=torch.tensor(0.0)),
        "sink",
    ),
    (lambda: Softmax(sink=torch.arange(6)), "sink"),
    (lambda: Dot(math.nan), "scale"),
    (lambda: Dot(math.inf), "scale"),
    (lambda: Causal() & Window, "mask"),
    (lambda: Window(2) | (ones(2, 2) > 0), "mask"),
    (lambda: Dense(ones(11, 13) - 1), "mask"),
]


@pytest.mark.parametrize(("make", "argument"), MAKERS)
def test_constructors_reject_wrong_parameters(make: Callable[[], object], argument: str) -> None:
    with refused(argument):
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
