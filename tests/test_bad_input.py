"""Wrong input raises `InputError` with one sentence: the argument, what came, what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

import qkv
from conftest import rand, triple, unchecked
from qkv import InputError, attend, biases
from qkv.masks import Causal, Dense, Document, Padding, Window
from qkv.normalizers import Softmax
from qkv.scores import Dot


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    """Users do not run with the checks of signatures that the tests have."""
    with unchecked():
        yield


Q, K, V = triple(2, 6, 2, 11, 13, 3, 5)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


TENSORS = [
    (Q.tolist(), K, V, r"q is list, expected a float tensor \(batch, heads, length, head_dim\)"),
    (Q, K.long(), V, r"k is torch.int64, expected a float tensor"),
    (Q, K, V > 0, r"v is torch.bool, expected a float tensor"),
    (Q[0], K, V, r"q has shape \(6, 11, 3\), expected \(batch, heads, length, head_dim\)"),
    (Q, K, V[None], r"v has shape \(1, 2, 2, 13, 5\), expected \(batch, heads"),
    (Q[:, :, :0], K, V, r"q has shape \(2, 6, 0, 3\), expected at least 1 in every dimension"),
    (Q, K[:, :, :0], V[:, :, :0], r"k has shape \(2, 2, 0, 3\), expected at least 1 in every dimension"),
    (Q[:1], K, V, r"q, k and v differ in batch size: q \(1, 6, 11, 3\), k \(2, 2, 13, 3\), v \(2, 2, 13, 5\)"),
    (Q, K, V[:1], r"q, k and v differ in batch size"),
    (Q[..., :2], K, V, r"q and k differ in head_dim: q \(2, 6, 11, 2\)"),
    (Q, K, V[:, :1], r"k and v differ in heads or length"),
    (Q, K, V[:, :, 1:], r"k and v differ in heads or length: .*v \(2, 2, 12, 5\)"),
    (Q[:, :5], K, V, r"5 query heads cannot share 2 key heads evenly"),
    (Q[:, :1], K, V, r"1 query heads cannot share 2 key heads evenly"),
    (Q.float(), K, V, r"q, k and v differ in dtype or device: q torch.float32 on cpu, k torch.float64 on cpu"),
    (Q, K, V.half(), r"differ in dtype or device: .*v torch.float16 on cpu"),
    (Q, K, V.to("meta"), r"differ in dtype or device: .*v torch.float64 on meta"),
]


@pytest.mark.parametrize(("q", "k", "v", "message"), TENSORS)
def test_tensors(q: object, k: object, v: object, message: str) -> None:
    for function in (attend, qkv.plan, qkv.measure, qkv.Attention()):
        with pytest.raises(InputError, match=message) as raised:
            function(q, k, v)  # type: ignore[operator]
        assert "\n" not in str(raised.value)


CALLS = [
    # masks: every library means something else by 1, 0 and −inf
    ({"mask": ones(11, 13)}, r"mask: got torch.float64, expected a boolean tensor that is True where a query may att"),
    ({"mask": ones(11, 13, dtype=torch.int64)}, r"got torch.int64.*compare an integer mask with == \(for exam"),
    ({"mask": torch.zeros(11, 13)}, r"pass an additive 0 / −inf mask as bias=qkv.biases.Dense\(tensor\)"),
    ({"mask": "causal"}, r"mask: got str, expected a boolean tensor"),
    ({"mask": [[True] * 13] * 11}, r"mask: got list, expected a boolean tensor"),
    ({"mask": Causal}, r"mask is the class Causal, expected an instance such as Causal\(...\)"),
    ({"mask": ones(13, dtype=torch.bool)}, r"mask: a tensor of 1 dimensions, expected \(nq, nk\)"),
    ({"mask": ones(13, 11, dtype=torch.bool)}, r"mask: shape \(1, 1, 13, 11\) does not broadcast.*\(2, 6, 11, 13\)"),
    ({"mask": ones(2, 1, 1, 12, dtype=torch.bool)}, r"mask: shape \(2, 1, 1, 12\) does not broadcast"),
    ({"mask": ones(2, 2, 11, 13, dtype=torch.bool)}, r"shape \(2, 2, 11, 13\) does not broadcast"),
    ({"mask": Padding([1, 2, 3])}, r"Padding: 3 lengths for a batch of 2"),
    ({"mask": Padding([14])}, r"Padding: lengths lie in 14..14, expected 0..13 \(the number of keys\)"),
    ({"mask": Causal() & Document([0] * 12)}, r"Document: ids has shape \(1, 12\), expected \(1 or 2, 13\)"),
    # biases
    (
        {"bias": ones(11, 13)},
        r"bias is Tensor, expected one of qkv.biases or several in a tuple; wrap a float tensor in",
    ),
    ({"bias": biases.SoftCap}, r"bias is (ABCMeta|type), expected one of qkv.biases"),
    ({"bias": (biases.SoftCap(1.0), 3.0)}, r"bias is tuple, expected one of qkv.biases or several"),
    ({"bias": biases.Dense(ones(13, 11))}, r"bias: shape \(1, 1, 13, 11\) does not broadcast to .*\(2, 6, 11, 13\)"),
    ({"bias": (biases.SoftCap(1.0), biases.Dense(ones(5, 11, 13)))}, r"bias: shape \(1, 5, 11, 13\) does not"),
    # normalizers and scores
    ({"normalizer": Softmax(sink=rand(5))}, r"Softmax: sink has 5 logits for 6 query heads"),
    ({"normalizer": Softmax}, r"normalizer is .*Softmax.*expected an instance from qkv.normalizers such as Softmax"),
    ({"normalizer": "softmax"}, r"normalizer is 'softmax', expected an instance from qkv.normalizers such as Softmax"),
    ({"score": 0.5}, r"score is 0.5, expected an instance from qkv.scores such as Dot"),
    ({"score": 0}, r"score is 0, expected an instance from qkv.scores such as Dot"),
    ({"score": Dot}, r"score is .*Dot.*, expected an instance from qkv.scores such as Dot"),
]


@pytest.mark.parametrize(("asked", "message"), CALLS)
def test_calls(asked: dict, message: str) -> None:
    for function in (attend, qkv.plan, qkv.measure):
        with pytest.raises(InputError, match=message) as raised:
            function(Q, K, V, **asked)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_dropout(p: float) -> None:
    with pytest.raises(InputError, match=r"dropout_p is .*, expected a probability in \[0, 1\)"):
        attend(Q, K, V, dropout_p=p)


@pytest.mark.parametrize("kernel", ["fast", "", "Flash"])
def test_kernels(kernel: str) -> None:
    for function in (attend, qkv.plan, qkv.Attention()):
        with pytest.raises(
            InputError, match=r"kernel is .*, expected 'auto' or one of 'linear', 'flash', 'flex', 'tiled', 'eager'"
        ):
            function(Q, K, V, kernel=kernel)


MAKERS: list[tuple[Callable[[], object], str]] = [
    (lambda: biases.SoftCap(0.0), "SoftCap: cap is 0.0, expected a positive number"),
    (lambda: biases.SoftCap(-1.0), "SoftCap: cap is -1.0, expected a positive number"),
    (lambda: biases.SoftCap(math.nan), "SoftCap: cap is nan, expected a positive number"),
    (lambda: biases.SoftCap(math.inf), "SoftCap: cap is inf, expected a positive number"),
    (lambda: biases.Dense(ones(2, 3) > 0), "bias: got torch.bool, expected a float tensor.*mask=qkv.masks.Dense"),
    (lambda: biases.Dense([[0.0]]), "bias: got list, expected a float tensor to add to the scores"),
    (lambda: biases.Dense(ones(3)), r"bias: a tensor of 1 dimensions, expected \(nq, nk\)"),
    (lambda: biases.Dense(ones(1, 1, 1, 1, 1)), "bias: a tensor of 5 dimensions"),
    (lambda: Softmax(temperature=0.0), "Softmax: temperature is 0.0, expected a positive number"),
    (lambda: Softmax(temperature=-1.0), "Softmax: temperature is -1.0, expected a positive number"),
    (lambda: Softmax(temperature=math.nan), "Softmax: temperature is nan, expected a positive number"),
    (lambda: Softmax(temperature=math.inf), "Softmax: temperature is inf, expected a positive number"),
    (lambda: Softmax(sink=ones(2, 3)), r"Softmax: sink is torch.float64 of shape \(2, 3\), expected one float logit a"),
    (
        lambda: Softmax(sink=torch.tensor(0.0)),
        r"Softmax: sink is torch.float32 of shape \(\), expected one float logit",
    ),
    (lambda: Softmax(sink=torch.arange(6)), r"Softmax: sink is torch.int64 of shape \(6,\)"),
    (lambda: Dot(math.nan), "Dot: scale is nan, expected a finite number or None for 1/√d"),
    (lambda: Dot(math.inf), "Dot: scale is inf, expected a finite number"),
    (lambda: Causal() & Window, "mask: cannot combine a mask with (ABCMeta|type)"),
    (lambda: Window(2) | (ones(2, 2) > 0), "mask: cannot combine a mask with Tensor; wrap a boolean tensor"),
    (lambda: Dense(ones(11, 13) - 1), "mask: got torch.float64, expected a boolean tensor"),
]


@pytest.mark.parametrize(("make", "message"), MAKERS)
def test_parts(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_an_input_error_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)
    with pytest.raises(ValueError, match="expected"):
        Window(0)
