"""The native library: its statistics against the tiles of tensor operations, what it refuses, and its build.

Output, log-sum-exp and gradients are those of autograd through the weights in float64.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import os
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import covering
from qkv import native
from qkv.biases import ALiBi, Bias, ByDistance, Forget, RelativePosition, SoftCap, T5Bias, TensorBias
from qkv.engine import Call
from qkv.kernels import native as native_kernel
from qkv.kernels import native_call
from qkv.masks import Blockwise, Causal, Dense, Grid, Mask, Prefix, Shifted, Window
from qkv.normalizers import EluPlusOne, Entmax, Hard, Identity, Normalizer, ReLU, Sigmoid, Softmax, Softpick, Sparsemax
from qkv.results import Statistics
from qkv.statistics import measure
from qkv.statistics import native as of_library
from qkv.statistics.base import Extremes, Local, PrefixSinkScores, Streaming
from qkv.statistics.gradients import DIFFERENTIABLE

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "qkv" / "native"
SHAPES = {  # batch, query heads, key heads, queries, keys, head size, size of values
    "tiny": (1, 2, 2, 2, 5, 8, 8),
    "grouped heads": (2, 4, 2, 70, 70, 16, 24),
    "few queries": (1, 2, 1, 33, 130, 40, 32),
    "more queries than keys": (2, 2, 2, 130, 33, 8, 20),
    "several tiles": (1, 3, 3, 130, 1030, 64, 80),
    "one query": (2, 2, 2, 1, 1100, 20, 7),
    "one query of a group": (1, 8, 1, 1, 1300, 64, 72),
    "three queries of a group": (1, 4, 2, 3, 1700, 40, 36),
    "sixteen queries": (1, 3, 3, 16, 530, 4, 96),
    "odd sizes": (2, 4, 2, 67, 131, 33, 5),
}


class Later(Mask):
    """Together with `Causal` a band of negative width."""

    band = (-float("inf"), -501.0)

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return k - q > 500


MASKS: dict[str, Callable[[Tensor], Mask | None]] = {
    "none": lambda keep: None,
    "causal": lambda keep: Causal(),
    "window ahead": lambda keep: Window(5, ahead=3),
    "nothing visible": lambda keep: Causal() & Later(),
    "causal, padded": lambda keep: Causal() & Dense(keep[:, None, None]),
    "empty and full cells": lambda keep: Blockwise(Causal(), 64) & (Window(9) | Prefix(70) | Shifted(Prefix(3), 80)),
    "window or prefix, padded": lambda keep: (Window(3) | Prefix(2)) & Dense(keep[:, None, None]),
}


def dropped(x: Tensor) -> Tensor:
    return x.masked_fill_(torch.rand_like(x) > 0.8, -torch.inf)


BIASES: dict[str, Callable[[int, int, int, int], tuple[Bias, ...]]] = {
    "none": lambda b, h, nq, nk: (),
    "alibi": lambda b, h, nq, nk: (ALiBi(),),
    "t5": lambda b, h, nq, nk: (T5Bias(torch.randn(32, h)),),
    "forget": lambda b, h, nq, nk: (Forget(-torch.rand(b, h, nk)),) if nq <= nk else (),
    "dense, masked": lambda b, h, nq, nk: (TensorBias(dropped(torch.randn(b, h, nq, nk))),),
    "of rows, cap, of keys": lambda b, h, nq, nk: (
        TensorBias(torch.randn(nq, 1)), SoftCap(3.0), TensorBias(torch.randn(1, nk)),
    ),
}  # fmt: skip


NORMALIZERS: dict[str, Callable[[Tensor], Normalizer]] = {  # by a number for each head
    "sigmoid": lambda x: Sigmoid(),
    "sigmoid, learned bias, by keys": lambda x: Sigmoid(bias=x, divide="keys"),
    "sigmoid by sum": lambda x: Sigmoid(bias=x, divide="sum").with_temperature(1.3),
    "relu": lambda x: ReLU(),
    "relu by sum": lambda x: ReLU(divide="sum").with_temperature(1.3),
    "elu + 1": lambda x: EluPlusOne(),
    "elu + 1 by sum": lambda x: EluPlusOne(divide="sum").with_temperature(1.3),
    "entmax": lambda x: Entmax(),
    "entmax, sink": lambda x: Entmax(1.5, 1.3, sink=x),
    "sparsemax": lambda x: Sparsemax(1.3),
    "sparsemax, sink": lambda x: Entmax(2.0, sink=x),
    "entmax 1.2, sink": lambda x: Entmax(1.2, sink=x),
    "softpick": lambda x: Softpick(0.8),
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    if isinstance(found := native.library.compiled(), str):
        assert shutil.which("cc") is None, found
        pytest.skip(found)


@pytest.fixture(scope="session")
def emulation(pytestconfig: pytest.Config) -> Callable[[str], Any]:
    """Compile attention by instructions that multiply a dtype, in plain C where a macro alone is defined: once."""
    sources = sorted(NATIVE.rglob("*.[ch]"))
    flags = [*shlex.split(os.environ.get("CFLAGS", "-O1")), "-std=gnu11", "-fPIC", "-fopenmp", "-shared", "-Wno-psabi"]
    content = hashlib.sha256(" ".join(flags).encode() + b"".join(file.read_bytes() for file in sources)).hexdigest()
    folder = pytestconfig.cache.mkdir("native")

    @functools.cache
    def compiled(macro: str) -> Any:
        path = folder / f"{macro}-{content[:16]}.so"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the tests may compile it
            if not path.exists():
                for old in folder.glob(f"{macro}-*"):
                    old.unlink()
                new = path.with_suffix(".new")
                subprocess.run(["cc", *flags, f"-D{macro}", NATIVE / "library.c", "-o", new, "-lm"], check=True)
                new.rename(path)
        library = ctypes.CDLL(str(path))
        library.qkv_attend.argtypes = [ctypes.POINTER(native.library.Arguments)]
        if macro != "BFLOAT16":
            library.qkv_gradients.argtypes = [ctypes.POINTER(native.library.Gradients)]
        return library

    return compiled


PRODUCTS, TILES = 5, 6


@pytest.fixture
def level(request: pytest.FixtureRequest, emulation: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """The library as on a processor of a level, whose products are those of the processor here or emulated."""
    number: int = request.param
    found: Any = native.library.compiled()
    if found.qkv_level() != number:
        functions = {name: getattr(found, name) for name in ("qkv_attend", "qkv_decode", "qkv_gradients")}
        if number == PRODUCTS:
            functions["qkv_attend_bfloat16"] = emulation("BFLOAT16").qkv_attend
        elif number == TILES:
            for name, parts in (("_bfloat16", 1), ("_float16", 2), ("", 3)):
                tiles = emulation(f"PARTS={parts}")
                functions |= {f"{x}{name}": getattr(tiles, x) for x in ("qkv_attend", "qkv_gradients")}
        found = SimpleNamespace(**functions, qkv_level=lambda: number)
    monkeypatch.setattr(native.library, "compiled", lambda: found)
    return number


def inputs(shape: str, factor: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a name in SHAPES; the keys are multiplied by `factor`."""
    b, h, key_heads, n_queries, n_keys, d, dv = SHAPES[shape]
    made = (
        torch.randn(b, n_queries, h, d),
        torch.randn(b, n_keys, key_heads, d) * factor,
        torch.randn(b, n_keys, key_heads, dv),
    )
    q, k, v = (x.transpose(1, 2) for x in made)  # strides as in a model
    return q, k, v


def by_tiles(call: Call, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(native.library, "compiled", lambda: "not compiled")
        return measure.measured(call, output=True, **options)


def fields(statistics: Statistics) -> dict[str, Tensor]:
    every = vars(dataclasses.replace(statistics)) | dict(statistics.mass)  # also those that were not read yet
    found = {name: x for name, x in every.items() if isinstance(x, Tensor)}
    found["spread"] = found["spread"].square()  # the tiles resolve the square of the spread to 0.002
    if statistics.thumbnail is not None:
        found |= {"largest": statistics.thumbnail.maximum, "mean": statistics.thumbnail.mean}
    return found


def check(
    shape: str, mask: str, bias: str, monkeypatch: pytest.MonkeyPatch,
    *, sink: float | None, padded: bool, dtype: torch.dtype = torch.float32, exact: bool = False, name: str = "softmax",
) -> None:  # fmt: skip
    """Output, state of rows and statistics are those of the tiles, or of the tiles in float64 if these are `exact`."""
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    q, k, v = (x.to(dtype) for x in inputs(shape))
    first = torch.randint(0, n_keys - 3, (b,))
    options = {
        "mass": {"local": Local(2).mask, "streaming": Streaming(first, n_keys).mask, "prefix": Prefix(3)},
        "first": first,
        "queries": torch.rand(b, n_queries) > 0.3 if padded else None,
        "statistics": [PrefixSinkScores(min(20, n_keys)), Extremes()],
        "bins": 16 if len(mask) % 2 else max(n_queries, n_keys),  # pooled, or all weights
        "value_norms": torch.rand(b, h, n_keys),
    }
    numbers = torch.linspace(-2, 2, h)
    softmax = Softmax(sink=sink, temperature=1.0 if sink is None else 1.3)
    normalizer = softmax if name == "softmax" else NORMALIZERS[name](numbers)
    seen = MASKS[mask](torch.rand(b, n_keys) > 0.3)
    added = BIASES[bias](b, h, n_queries, n_keys)
    call = Call.of(q, k, v, seen, added, None, normalizer)
    oracle = Call.of(q.double(), k.double(), v.double(), seen, added, None, normalizer) if exact else call
    assert native_call.unsupported_reason(call) is None
    result, rows, got = measure.measured(call, output=True, **options)
    slow, slow_rows, want = by_tiles(oracle, monkeypatch, **options)
    assert result is not None
    assert result.out.dtype == dtype
    atol, rtol = (2e-5, 2e-4) if dtype == torch.float32 else (torch.finfo(dtype).eps,) * 2
    size = 1.0 if name == "softmax" else max(1.0, float(slow.out.abs().max()))  # other rows may sum to more than 1
    torch.testing.assert_close(result.out, slow.out.to(dtype), atol=atol * size, rtol=rtol)
    plain = native_call.forward(call)
    assert plain is not None or added  # a bias may mask a row
    if plain is not None:
        assert torch.equal(plain[0], result.out)
    for state in (rows, measure.row_state(call)) if plain is not None else (rows,):
        for found, wanted in ((state.level, slow_rows.level), (state.total, slow_rows.total)):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(found, wanted.float(), atol=atol, rtol=rtol)
    atol, rtol = (1e-5, 1e-5) if exact else (2e-5, 2e-4)
    assert fields(got).keys() == fields(want).keys()
    for field, x in fields(want).items():
        limit, share = 2e-3 + 2e-6 * n_keys if field == "spread" else atol, rtol
        if field in ("spread", "distance") and name.startswith(("entmax", "sparsemax")):
            limit, share = 30 * limit, 3 * rtol  # by distance, tiny weights count with their larger relative errors
        found, wanted = fields(got)[field], x
        if field == "argmax" and not torch.equal(found, wanted):  # of scores that are nearly equal
            eye = torch.eye(n_keys, dtype=torch.float64).expand(*k.shape[:2], -1, -1)
            scores = qkv.attend(q.double(), k.double(), eye, mask=seen, bias=added, normalizer=Identity())
            assert torch.equal(found < 0, wanted < 0)
            found, wanted = (scores.gather(-1, i.clamp(min=0)[..., None]) for i in (found, wanted))
        torch.testing.assert_close(found.float(), wanted.float(), atol=limit, rtol=share, msg=field)


@pytest.mark.parametrize(("name", "mask", "shape", "bias", "dtype"), covering(
    NORMALIZERS, MASKS, SHAPES, BIASES, [torch.float32, torch.bfloat16],
))  # fmt: skip
def test_output_and_statistics_of_other_normalizers_differ_from_those_of_the_tiles(
    name: str, mask: str, shape: str, bias: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(mask) % 2)
    check(shape, mask, bias, monkeypatch, sink=None, padded=len(name) % 2 == 0, dtype=dtype, name=name)


@pytest.mark.parametrize(("shape", "mask", "bias", "sink", "dtype"), covering(
    SHAPES, MASKS, BIASES, [None, 0.5], [torch.float32, torch.bfloat16],
))  # fmt: skip
def test_output_and_statistics_differ_from_those_of_the_tiles(
    shape: str, mask: str, bias: str, sink: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if sink is None else 2)
    check(shape, mask, bias, monkeypatch, sink=sink, padded=sink is not None, dtype=dtype)


BF16, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
MULTIPLIED = [(PRODUCTS, BF16), (TILES, BF16), (TILES, HALF), (TILES, SINGLE)]


@pytest.mark.parametrize(("shape", "mask", "bias", "sink", "name", "level", "dtype"), [(*x, *y) for *x, y in covering(
    ["few queries", "more queries than keys", "several tiles", "odd sizes"], MASKS, BIASES, [None, 0.5],
    ["softmax", "sigmoid", "relu by sum", "entmax, sink", "softpick"], MULTIPLIED,
)], indirect=["level"])  # fmt: skip
def test_products_of_a_processor_differ_from_float64(
    shape: str, mask: str, bias: str, sink: float | None, name: str, level: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    q, k, v = (x.to(dtype) for x in inputs(shape))
    assert native_call.products(q, k, v) == dtype
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if sink is None else 2)
    check(shape, mask, bias, monkeypatch, sink=sink, padded=sink is not None, dtype=dtype, exact=True, name=name)


@pytest.mark.parametrize(
    ("level", "dtypes"), [(PRODUCTS, {BF16}), (TILES, {BF16, HALF}), (7, set())], indirect=["level"]
)
def test_a_processor_multiplies_other_dtypes_or_plan_does_not_say_by_what(level: int, dtypes: set[torch.dtype]) -> None:
    tensors = inputs("few queries")
    for dtype in (BF16, HALF, SINGLE):
        q, k, v = (x.to(dtype) for x in tensors)
        assert native_call.products(q, k, v) == (dtype if dtype in dtypes else SINGLE)
        assert native_call.products(q, k, v.double()) == SINGLE
        assert native.INSTRUCTIONS[level] in str(qkv.plan(q, k, v))


@pytest.mark.parametrize(("level", "dtype"), MULTIPLIED[:3], indirect=["level"])
def test_products_without_statistics_or_their_gradients_differ_from_the_call_with_all(
    level: int, dtype: torch.dtype
) -> None:
    for shape in ("few queries", "odd sizes", "three queries of a group", "several tiles"):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs(shape))
        out, whole = qkv.attend(q, k, v, mask=Causal()), qkv.attend(q, k, v, mask=Causal(), return_lse=True)[0]
        exact = qkv.attend(q.double(), k.double(), v.double(), mask=Causal())
        assert out.dtype == dtype
        assert torch.equal(out, whole)
        slope = torch.randn_like(exact)
        wanted = torch.autograd.grad((exact * slope).sum(), (q, k, v))
        for found in (out, whole):
            for x, y in zip(torch.autograd.grad((found * slope).sum(), (q, k, v)), wanted, strict=True):
                torch.testing.assert_close(x, y, atol=0.02 * float(y.abs().max()), rtol=0.02)


@pytest.mark.parametrize(
    ("threads", "level", "dtype"), [(1, PRODUCTS, SINGLE), *((2, *x) for x in MULTIPLIED)], indirect=["level"]
)
@pytest.mark.parametrize("shape", ["few queries", "three queries of a group", "one query of a group"])
def test_nan_leaks_or_an_overflow_gives_numbers(
    shape: str, threads: int, level: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.to(dtype) for x in inputs(shape))
    keep = (torch.arange(k.shape[2]) != 3)[None]
    hole = torch.where(keep, 1.0, torch.nan)[0, :, None].to(dtype)
    last = torch.where(torch.arange(k.shape[2]) == k.shape[2] - 1, torch.inf, 1.0)[:, None].to(dtype)
    no_key = TensorBias(torch.full((q.shape[2], 1), -torch.inf))
    calls = {
        "masked": Call.of(q, k * hole, v * hole, Dense(keep)),
        "outside of a window": Call.of(q, k * hole, v * hole, Window(k.shape[2] - 3 - q.shape[2])),
        "visible to some": Call.of(q, k, v * last, Causal()),
        "key": Call.of(q, k * hole, v),
        "query": Call.of(q * torch.nan, k, v),
        "value": Call.of(q, k, v * hole, Causal()),
        "overflow": Call.of(q * 1e20, k * 1e20, v),
        "bias": Call.of(q, k, v, None, (no_key,)),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name, call in calls.items():
        norms = torch.ones(*call.q.shape[:2], k.shape[2])
        result, _, got = measure.measured(call, output=True, value_norms=norms)
        slow, _, want = by_tiles(call, monkeypatch, value_norms=norms)
        assert result is not None
        atol, rtol = (2e-5, 2e-4) if dtype == torch.float32 else (torch.finfo(dtype).eps,) * 2
        torch.testing.assert_close(result.out, slow.out, atol=atol, rtol=rtol, equal_nan=True, msg=name)
        for field, x in fields(want).items():
            limit = 2e-3 + 2e-6 * k.shape[2] if field == "spread" else 2e-5
            torch.testing.assert_close(
                fields(got)[field], x, atol=limit, rtol=2e-4, equal_nan=True, msg=f"{name}: {field}"
            )
    assert native_call.forward(calls["masked"]) is not None
    assert native_call.forward(calls["value"]) is None


def test_a_call_that_it_cannot_serve_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs("grouped heads")
    wide = torch.zeros(1, 1, 4, 300)
    calls = {
        "sink logit": Call.of(q, k, v, None, (), None, Softmax(sink=torch.full((4,), torch.nan))),
        "NaN in a bias": Call.of(q, k, v, None, (TensorBias(torch.full((1, 1), torch.nan)),)),
        "a bias below all scores": Call.of(q, k, v, None, (TensorBias(torch.full((70, 70), -3e38)),)),
        "vectors by distance": Call.of(q, k, v, None, (RelativePosition(torch.randn(5, 16)),)),
        "float64": Call.of(q.double(), k.double(), v.double()),
        "more than 256": Call.of(wide, wide, wide),
        "softmax": Call.of(q, k, v, None, (), None, Hard()),
        "softpick with a sink": Call.of(q, k, v, None, (), None, Softpick(sink=0.5)),
        "bias of sigmoid": Call.of(q, k, v, None, (), None, Sigmoid(bias=torch.full((4,), torch.inf))),
    }
    assert [name for name, call in calls.items() if native_call.unsupported_reason(call) is None] == []
    assert {qkv.plan(q[:, :, -1:], k, v, normalizer=x).kernel for x in (Entmax(), Softpick())} == {"eager"}
    part = {"scattered": Dense((torch.arange(70) % 3 == 0)[None, :])}
    call = Call.of(q, k, v)
    assert of_library.attend_and_measure(call, measure.checked(call, call.grid, mass=part), output=False) is None
    assert native_call.unsupported_reason(call) is None
    monkeypatch.setattr(native_call, "LARGEST_MASK", 2**10)
    assert native_call.unsupported_reason(Call.of(q, k, v, Dense(torch.rand(70, 70) > 0.5))) is not None
    monkeypatch.setattr(native.library, "LIBRARY", Path("nowhere.so"))
    native.library.compiled.cache_clear()
    assert native_call.unsupported_reason(Call.of(q, k, v)) is not None
    native.library.compiled.cache_clear()


def test_nan_in_keys_masked_for_all_queries_reaches_gradients() -> None:
    q, k, v = inputs("few queries")
    leaves = [x.requires_grad_() for x in (q, k.index_fill(2, torch.tensor([0]), torch.nan), v)]
    assert all(x.isfinite().all() for x in torch.autograd.grad(qkv.attend(*leaves, mask=Window(3)).sum(), leaves))


def test_weights_whose_squares_underflow_have_effective_keys() -> None:
    q, k = torch.zeros(1, 1, 70, 8), torch.zeros(1, 1, 40, 8)
    for few in (q, q[:, :, :3]):
        found = qkv.measure(few, k, normalizer=EluPlusOne(None), bias=TensorBias(torch.full((1, 40), -60.0)))
        torch.testing.assert_close(found.effective_keys, torch.full_like(found.effective_keys, 40.0))


def test_a_row_whose_weights_underflow_beside_a_sink_has_statistics() -> None:
    q, k, _ = inputs("grouped heads")
    for few in (q, q[:, :, -2:]):
        low = TensorBias(torch.linspace(0, -200, few.shape[2])[:, None])  # of the last query
        scores = PrefixSinkScores(k.shape[2])
        sums = qkv.measure(few, k, mask=Causal(), bias=low, normalizer=Softmax(sink=0.5), statistics=[scores])
        assert sums.prefix_sink_scores is not None
        mean = sums.received / sums.visible_queries
        torch.testing.assert_close(sums.prefix_sink_scores[..., -1], mean[..., -1])
        torch.testing.assert_close(sums.prefix_sink_scores, mean, atol=1e-6, rtol=1e-5)
    found = qkv.measure(q, k, normalizer=Softmax(sink=300.0))
    assert found.sink_mass is not None
    assert (float(found.entropy.max()), float(found.spread.max()), float(found.sink_mass.min())) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["tiny", "grouped heads", "few queries", "one query", "more queries than keys"])
def test_the_way_without_a_call_gives_other_bits(shape: str, dtype: torch.dtype) -> None:
    (_, h, _, n_queries, n_keys, *_), (q, k, v) = SHAPES[shape], (x.to(dtype) for x in inputs(shape))
    by_distance = ByDistance(dropped(torch.randn(h, n_queries + n_keys - 1)))
    for mask in (None, Causal(), Window(3), Window(2, ahead=4)):
        for bias in ((), (ALiBi(),), (ALiBi(torch.rand(h)),), (T5Bias(torch.randn(32, h)),), (by_distance,)):
            want: Any = measure.measured(Call.of(q, k, v, mask, bias), output=True)
            one: dict[str, Any] = {"mask": mask, "bias": bias[0] if bias else None}
            out, got = qkv.attend(q, k, v, return_statistics=True, **one)
            assert all(torch.equal(x, want[0].out) for x in (out, qkv.attend(q, k, v, **one)))
            for found in (got, qkv.measure(q, k, **one)):
                assert [n for n, x in fields(want[2]).items() if not torch.equal(fields(found)[n], x)] == []


def test_a_window_without_a_call_gives_other_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in inputs("few queries"))
    for mask in (Window(4), Window(k.shape[2]), Window(3, ahead=2)):
        outs = (qkv.attend(q, k, v, mask=mask, kernel=kernel).square().sum() for kernel in ("auto", "native"))
        assert all(map(torch.equal, *(torch.autograd.grad(out, (q, k, v)) for out in outs)))


def test_another_default_dtype_or_device_changes_results() -> None:
    q, k, v = (x.requires_grad_() for x in inputs("grouped heads"))
    bias, found = TensorBias(torch.randn(1, 70, requires_grad=True)), []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                outs = qkv.attend(q, k, v), qkv.attend(q, k, v, mask=Causal(), bias=bias, return_lse=True)[0]
                grads = torch.autograd.grad(sum(x.square().sum() for x in outs), (q, k, v, bias.tensor))
                found.append([*outs, *grads, *fields(qkv.measure(q, k, mask=Window(9), bins=8)).values()])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, x) for others in found[1:] for a, x in zip(found[0], others, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_second_run_gives_other_bits(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = inputs("several tiles")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    first, second = (fields(qkv.measure(q[:, :1], k[:, :1], mask=Causal(), bins=8)) for _ in range(2))
    assert [name for name, x in first.items() if not torch.equal(x, second[name])] == []
    one = fields(qkv.measure(q, k, mask=Causal(), bins=8))  # threads take whole heads
    for name, x in first.items():
        torch.testing.assert_close(x, one[name][:, :1], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 64, 130])
def test_eigenvalues_differ_from_those_of_float64(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices of full and of low rank, some all but diagonal, which no reflection changes; for any threads."""
    keys = torch.randn(29, 40, n) * torch.logspace(0, -6, n)
    keys[:9] = keys[:9, :1] * torch.randn(9, 40, 1)
    matrices = keys.mT @ keys * torch.logspace(-25, 25, 29)[:, None, None]
    matrices[9:12] = torch.diag_embed(torch.rand(3, n))
    matrices[12] = 0
    got = native.library.leading_shares(matrices, 3)
    wanted = native.library.leading_shares(matrices.double(), 3)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6)
    matrices[3, n // 2, n // 2] = torch.nan
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    changed = native.library.leading_shares(matrices, 3)
    assert changed[3].isnan().all()
    assert native.library.leading_shares(matrices.double(), 3)[3].isnan().all()
    assert torch.equal(torch.cat([changed[:3], changed[4:]]), torch.cat([got[:3], got[4:]]))


@pytest.mark.parametrize(("sizes", "bins"), [((128, 128), 64), ((131, 73), 16), ((1, 300), 7), ((70, 5), 5)])
def test_small_maps_differ_from_those_of_float64(sizes: tuple[int, int], bins: int) -> None:
    weights = torch.rand(2, 3, *sizes)
    got, wanted = (of_library.thumbnail(x, bins) for x in (weights, weights.double()))
    assert (got.query_bin, got.key_bin) == (wanted.query_bin, wanted.key_bin)
    assert torch.equal(got.maximum.double(), wanted.maximum)
    torch.testing.assert_close(got.mean.double(), wanted.mean, rtol=1e-6, atol=0)


def test_a_build_without_a_compiler_fails_or_leaves_an_old_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hatchling")
    build = runpy.run_path(str(ROOT / "hatch_build.py"))
    library = tmp_path / "attention.so"
    library.write_bytes(b"old")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in build["compiled"](NATIVE, library)
    assert not library.exists()


# --- gradients --------------------------------------------------------------------------------------------------------

GRADED = ["tiny", "grouped heads", "few queries", "more queries than keys", "several tiles"]
GRADED_MASKS = ["none", "causal, padded", "window ahead", "empty and full cells"]
FIXED: dict[str, tuple[Bias, ...]] = {"none": (), "alibi": (ALiBi(),), "alibi, then cap": (ALiBi(), SoftCap(3.0))}


def results(
    tensors: Sequence[Tensor], sink: Tensor | None, kernel: str, *, learned: Sequence[Tensor] = (), **options: Any
) -> list[Tensor]:
    """Output, log-sum-exp where there is one, and the gradients of a random function of both."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *([] if sink is None else [sink]))]
    normalizer = Softmax(sink=None if sink is None else leaves[3], temperature=1.3)
    out, lse = qkv.attend(*leaves[:3], normalizer=normalizer, kernel=kernel, return_lse=True, **options)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    generator = torch.Generator().manual_seed(0)
    grad, grad_lse = (torch.randn(x.shape, generator=generator).to(x) for x in (out, lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], [*leaves, *learned], [grad, grad_lse])]


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 2e-5) -> None:
    for x, y in zip(got, want, strict=True):
        assert float((x.double() - y).abs().max() / y.abs().max().clamp(min=1)) < tolerance


@pytest.mark.parametrize(("shape", "mask", "bias"), covering(GRADED, GRADED_MASKS, FIXED))
def test_output_or_gradients_differ_from_those_through_the_weights(shape: str, mask: str, bias: str) -> None:
    options: dict[str, Any] = {
        "mask": MASKS[mask](torch.rand(SHAPES[shape][0], SHAPES[shape][4]) > 0.3), "bias": FIXED[bias],
    }  # fmt: skip
    tensors, sink, double = inputs(shape, 1.0), None, None
    if bias == "alibi":
        sink = torch.linspace(-2, 2, SHAPES[shape][1])
        sink[1] = -torch.inf
        double = sink.double()
    want = results([x.double() for x in tensors], double, "eager", **options)
    assert_close(results(tensors, sink, "native", **options), want)


@pytest.mark.parametrize(("name", "shape", "mask", "bias"), covering(
    [*NORMALIZERS, "identity", "identity by keys"], GRADED, GRADED_MASKS, FIXED,
))  # fmt: skip
def test_output_or_gradients_of_other_normalizers_differ_from_those_through_the_weights(
    name: str, shape: str, mask: str, bias: str
) -> None:
    b, h, *_, n_keys, _, _ = SHAPES[shape]
    made = MASKS[mask](torch.rand(b, n_keys) > 0.3)
    table = torch.randn(1, sum(SHAPES[shape][3:5]) - 1) / 4
    tensors = [*inputs(shape, 1.0), torch.linspace(-2, 2, h), table]
    of_name: dict[str, Callable[[Tensor], Normalizer]] = {
        "identity": lambda x: Identity(), "identity by keys": lambda x: Identity(divide="keys"),
    }  # fmt: skip

    def found(dtype: torch.dtype, kernel: str) -> list[Tensor]:
        *leaves, numbers, table = (x.detach().to(dtype).requires_grad_() for x in tensors)
        normalizer = (of_name | NORMALIZERS)[name](numbers)
        biases = (ByDistance(table), *FIXED[bias])
        out = qkv.attend(*leaves, mask=made, bias=biases, normalizer=normalizer, kernel=kernel)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        grads = torch.autograd.grad(out, [*leaves, table, numbers], grad, allow_unused=True)
        return [out.detach(), *(x for x in grads if x is not None)]

    assert_close(found(torch.float32, "native"), found(torch.float64, "eager"))


def test_negative_weights_have_statistics_or_scores_below_those_of_masked_pairs_no_weight() -> None:
    q, k, v = inputs("grouped heads")
    for few in (q, q[:, :, -2:]):
        with pytest.raises(qkv.InputError, match="negative weights"):
            qkv.measure(few, k, normalizer=Identity())
        for x in (few, few * 1e30):
            out = qkv.attend(x, k, v, mask=Causal(), normalizer=Identity())
            want = qkv.attend(x.double(), k.double(), v.double(), mask=Causal(), normalizer=Identity(), kernel="eager")
            torch.testing.assert_close(out.double() / want.abs().max(), want / want.abs().max(), atol=1e-6, rtol=1e-5)


MEASURED: dict[str, tuple[str, ...]] = {  # the statistics by bias
    "none": (*(x for x in DIFFERENTIABLE if x != "sink_mass"), "local", "ends"),
    "alibi": (*DIFFERENTIABLE, "ends"),
    "alibi, then cap": ("received", "local", "max_logit"),
}


@pytest.mark.parametrize(("shape", "mask", "bias"), covering(GRADED, GRADED_MASKS, FIXED))
def test_gradients_of_statistics_differ_from_those_of_the_tiles(shape: str, mask: str, bias: str) -> None:
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    made, sinks = MASKS[mask](torch.rand(b, n_keys) > 0.3), [torch.linspace(-2, 2, h)] if bias == "alibi" else []
    options = {
        "mask": made, "mass": {"local": Local(2).mask, "ends": Prefix(2) | Window(3)},
        "first": torch.randint(0, n_keys, (b,)), "queries": torch.rand(b, n_queries) > 0.3,
    }  # fmt: skip
    tensors, table = inputs(shape, 1.0)[:2], torch.randn(1, n_queries + n_keys - 1) / 4

    def found(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).detach().clone().requires_grad_() for x in (*tensors, table, *sinks)]
        normalizer = Softmax(sink=leaves[3] if sinks else None)
        got = qkv.measure(
            *leaves[:2],
            bias=(ByDistance(leaves[2]), *FIXED[bias]),
            normalizer=normalizer,
            differentiable=True,
            **options,
        )
        fields = {name: getattr(got, name) for name in DIFFERENTIABLE} | dict(got.mass)
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=leaves[0].dtype)
        for name in MEASURED[bias]:
            x = fields[name].masked_fill(fields[name] == -torch.inf, 0)
            total = total + (x * torch.randn(x.shape, generator=generator) / x.detach().abs().max().clamp(min=1)).sum()
        return list(torch.autograd.grad(total, leaves))

    assert_close(found(torch.float32), found(torch.float64))


@pytest.mark.parametrize(("name", "shape", "mask", "bias"), covering(NORMALIZERS, GRADED, GRADED_MASKS, FIXED))
def test_gradients_of_statistics_of_other_normalizers_differ_from_those_of_the_tiles(
    name: str, shape: str, mask: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    options = {
        "mask": MASKS[mask](torch.rand(b, n_keys) > 0.3),
        "bias": FIXED[bias],
        "mass": {"local": Local(2).mask, "ends": Prefix(2) | Window(3)},
        "first": torch.randint(0, n_keys, (b,)),
        "queries": torch.rand(b, n_queries) > 0.3,
    }
    tensors = [*inputs(shape, 1.0)[:2], torch.linspace(-2, 2, h)]
    native_gradients, served = native_kernel.gradients_of, list[bool]()
    monkeypatch.setattr(
        "qkv.kernels.native.gradients_of", lambda *x, **y: (served.append(True), native_gradients(*x, **y))[1]
    )

    def found(dtype: torch.dtype) -> list[Tensor]:
        *leaves, numbers = (x.to(dtype).detach().clone().requires_grad_() for x in tensors)
        got = qkv.measure(*leaves, normalizer=NORMALIZERS[name](numbers), differentiable=True, **options)
        fields = {x: getattr(got, x) for x in DIFFERENTIABLE} | dict(got.mass)
        generator, total = torch.Generator().manual_seed(0), torch.zeros((), dtype=dtype)
        for i, x in enumerate(x for x in fields.values() if x is not None):
            if i % 3 == len(shape) % 3 or bias == "none":  # some, or all together
                finite = x.masked_fill(x == -torch.inf, 0)
                part = torch.randn(x.shape, generator=generator) / finite.detach().abs().max().clamp(min=1)
                total = total + (finite * part).sum()
        grads = torch.autograd.grad(total, [*leaves, numbers], allow_unused=True)
        return [x for x in grads if x is not None]

    tolerance = 1e-4 if name.startswith("sparsemax") else 2e-5  # the logarithm of weights that are nearly 0
    assert_close(found(torch.float32), found(torch.float64), tolerance)
    assert served == [True]


@pytest.mark.parametrize(("shape", "mask", "bias"), [*covering(GRADED, GRADED_MASKS, FIXED)][::3])
def test_one_pass_gives_other_gradients_than_the_weights(shape: str, mask: str, bias: str) -> None:
    made = MASKS[mask](torch.rand(SHAPES[shape][0], SHAPES[shape][4]) > 0.3)
    sinks = [torch.linspace(-2, 2, SHAPES[shape][1])] if bias != "none" else []
    tensors, names = inputs(shape, 1.0), [x for x in DIFFERENTIABLE if sinks or x != "sink_mass"]

    def found(dtype: torch.dtype, kernel: str) -> list[Tensor]:
        leaves = [x.to(dtype).detach().clone().requires_grad_() for x in (*tensors, *sinks)]
        normalizer = Softmax(sink=leaves[3] if sinks else None)
        out, *_, got = qkv.attend(
            *leaves[:3], mask=made, bias=FIXED[bias], normalizer=normalizer, kernel=kernel, return_statistics=True
        )
        results = [x.masked_fill(x == -torch.inf, 0) for x in (out, *(getattr(got, name) for name in names))]
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(x.shape, generator=generator) / x.detach().abs().max().clamp(min=1) for x in results]
        loss = sum(((x * grad).sum() for x, grad in zip(results, grads, strict=True)), torch.zeros(()))
        return [*(x.detach() for x in results), *torch.autograd.grad(loss, leaves)]

    assert_close(found(torch.float32, "auto"), found(torch.float64, "eager"))


@pytest.mark.parametrize(("shape", "mask", "bias", "name", "level", "dtype"), [(*x, *y) for *x, y in covering(
    GRADED[1:], GRADED_MASKS, FIXED,
    ["softmax", "sigmoid, learned bias, by keys", "elu + 1 by sum", "entmax, sink", "softpick"], MULTIPLIED[1:],
)], indirect=["level"])  # fmt: skip
def test_gradients_by_products_of_a_processor_differ_from_float64(
    shape: str, mask: str, bias: str, name: str, level: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (b, h, *_, n_queries, n_keys, _, _), run, served = SHAPES[shape], native_call.run, list[str]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(mask) % 2)

    def recorded(function: str, arguments: Any) -> bool:
        served.append(function)
        return run(function, arguments)

    monkeypatch.setattr("qkv.kernels.native.run", recorded)
    made_mask = MASKS[mask](torch.rand(b, n_keys) > 0.3)
    tensors, numbers = [x.to(dtype) for x in inputs(shape, 1.0)], torch.linspace(-2, 2, h)
    table = torch.randn(1, n_queries + n_keys - 1) / 4

    def found(exact: bool) -> list[Tensor]:
        made = [x.detach().to(torch.float64 if exact else x.dtype) for x in (*tensors, numbers, table)]
        *leaves, numbers_of, table_of = (x.requires_grad_() for x in made)
        normalizer = Softmax(sink=numbers_of) if name == "softmax" else NORMALIZERS[name](numbers_of)
        out, got = qkv.attend(
            *leaves, mask=made_mask, bias=(ByDistance(table_of), *FIXED[bias]), normalizer=normalizer,
            kernel="eager" if exact else "auto", return_statistics=True,
        )  # fmt: skip
        fields = {"out": out} | {x: getattr(got, x) for x in DIFFERENTIABLE}
        generator, loss = torch.Generator().manual_seed(0), torch.zeros((), dtype=torch.float64)
        for i, x in enumerate(x for x in fields.values() if x is not None):
            if i == 0 or i % 3 == len(shape) % 3 or bias == "none":  # some, or all together
                y = x.masked_fill(x == -torch.inf, 0)
                part = torch.randn(y.shape, generator=generator).to(dtype) / y.detach().abs().max().clamp(min=1)
                loss = loss + (y * part.to(y)).sum().double()
        grads = torch.autograd.grad(loss, [*leaves, table_of, numbers_of], allow_unused=True)
        return [x for x in grads if x is not None]

    got, want = found(exact=False), found(exact=True)
    assert served == ["qkv_gradients" + {SINGLE: "", HALF: "_float16", BF16: "_bfloat16"}[dtype]]
    tolerance = {SINGLE: 2e-5, HALF: 2e-3, BF16: 3e-2}[dtype]
    assert_close(got, want, tolerance)


def test_threads_change_gradients_or_the_same_number_of_them_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, found = inputs("several tiles", 1.0), []
    for threads in (2, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(results(tensors, torch.zeros(3), "native", mask=Causal()))
    first, second, alone = found
    assert [i for i, x in enumerate(first) if not torch.equal(x, second[i])] == []
    assert_close(first, [x.double() for x in alone], 1e-5)


LEARNED: dict[str, tuple[Callable[..., tuple[Bias, ...]], Callable[..., list[tuple[int, ...]]]]] = {
    "slopes": (lambda slopes: (ALiBi(slopes),), lambda b, h, n_queries, n_keys: [(h,)]),
    "gates": (
        lambda *gates: tuple(map(Forget, gates)),
        lambda b, h, n_queries, n_keys: [(b, h, n_keys), (h, n_keys)] if n_queries <= n_keys else [],
    ),
    "caps between biases": (
        lambda table, pairs, shared: (T5Bias(table), SoftCap(3.0), TensorBias(pairs), ByDistance(shared), SoftCap(2.0)),
        lambda b, h, n_queries, n_keys: [(8, h), (n_queries, n_keys), (1, n_queries + n_keys - 1)],
    ),
    "pairs, by shape": (
        lambda *tensors: tuple(map(TensorBias, tensors)),
        lambda *sizes: list(itertools.product(*((1, size) for size in sizes))),
    ),
}


@pytest.mark.parametrize(("shape", "mask", "learned"), covering(GRADED, GRADED_MASKS, LEARNED))
def test_gradients_of_biases_differ_or_are_not_the_same_bits_again(
    shape: str, mask: str, learned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    b, h, _, n_queries, n_keys, *_ = SHAPES[shape]
    made, (bias, sizes) = MASKS[mask](torch.rand(b, n_keys) > 0.3), LEARNED[learned]
    tensors, parameters = inputs(shape, 1.0), [torch.randn(size) / 4 for size in sizes(b, h, n_queries, n_keys)]

    def found(kernel: str, dtype: torch.dtype) -> list[Tensor]:
        mine = [x.to(dtype).requires_grad_() for x in parameters]
        return results(
            [x.to(dtype) for x in tensors], torch.zeros(h).to(dtype), kernel, learned=mine, bias=bias(*mine), mask=made
        )

    first, second = (found("native", torch.float32) for _ in range(2))
    assert [i for i, x in enumerate(first) if not torch.equal(x, second[i])] == []
    assert_close(first, found("eager", torch.float64))


CALLS = st.fixed_dictionaries(
    {
        "sizes": st.sampled_from([(1, 2, 2, 5, 5), (1, 2, 1, 5, 5), (2, 2, 2, 3, 5), (1, 2, 2, 9, 9), (1, 2, 2, 1, 5)]),
        "d": st.sampled_from([4, 8]),
        "layout": st.sampled_from(["contiguous", "tokens first", "every second number"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        "mask": st.sampled_from([None, Causal(), Window(2), Window(2, ahead=1), Window(3)]),
        "bias": st.sampled_from([None, ALiBi()]),
        "scale": st.sampled_from([None, 0.5, 0.3]),
        "what": st.sampled_from(["output", "measure", "both", "gradient", "autocast", "jvp", "later first key"]),
    }
)
"""Short calls that differ in what the arguments of the library depend on, or in what keeps a call from the library."""


def numbers(
    sizes: tuple[int, ...], d: int, layout: str, dtype: torch.dtype, scale: float | None, what: str, **parts: Any
) -> list[Tensor]:
    """What one of CALLS returns."""
    b, h, key_heads, n_queries, n_keys = sizes
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, n_queries, h, d), *torch.randn(2, b, n_keys, key_heads, d))
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    if layout == "contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    elif layout == "every second number":
        q, k, v = (x.repeat_interleave(2, 3)[..., ::2] for x in (q, k, v))
    parts["score"] = None if scale is None else qkv.scores.Dot(scale)
    if what in ("measure", "later first key"):
        one = qkv.measure(q, k, first=int(what != "measure"), **parts)
        return [one.entropy, one.received, one.sink, one.visible]
    if what == "both":
        out, one = qkv.attend(q, k, v, return_statistics=True, **parts)
        return [out, one.entropy, one.received, one.sink, one.visible_queries]
    if what == "gradient":
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return [*torch.autograd.grad(qkv.attend(*leaves, **parts).sum(), leaves)]
    if what == "jvp":
        return [*torch.func.jvp(lambda q: qkv.attend(q, k, v, **parts), (q,), (q,))]
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        return [qkv.attend(q, k, v, **parts)]


@given(st.lists(CALLS, min_size=2, max_size=5))
def test_an_earlier_call_changes_a_later_one(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        after = numbers(**call)
        with pytest.MonkeyPatch.context() as fresh:  # nothing is kept of earlier calls
            for module, name in ((native_call, "_layout"), (of_library, "_places")):
                fresh.setattr(module, name, getattr(module, name).__wrapped__)
            alone = numbers(**call)
        assert all(torch.equal(x, y) for x, y in zip(after, alone, strict=True))


def test_sums_over_nodes_differ_little_from_those_over_scores() -> None:
    """Not at all for polynomials of degree 5, also of a single score, and of rows with NaN or masked scores."""
    scores = 2 * torch.randn(3, 5, 1237)
    scores[:, :, 700:900] = -torch.inf
    scores[0, 0, 1:] = -torch.inf
    scores[0, 1], scores[0, 2, 5] = 3.0, torch.nan
    visible = torch.where(scores > -torch.inf, scores, 0).double()
    for n in (1237, 7, 1):
        found = native.library.nodes_of_rows(scores[..., :n])
        assert found is not None
        nodes, counts = (x.double() for x in found)
        for power in range(6):
            exact = (visible**power * (scores > -torch.inf))[..., :n].sum(-1)
            scale = (visible.abs() ** power)[..., :n].sum(-1).clamp(min=1)
            assert ((counts * nodes**power).sum(-1) - exact).abs().div(scale).max() < 1e-5, power
        smooth = (torch.nn.functional.softplus(visible) ** 2 * (scores > -torch.inf))[..., :n].sum(-1)
        sums = (torch.nn.functional.softplus(nodes) ** 2 * counts).sum(-1)
        torch.testing.assert_close(sums, smooth, rtol=1e-4, atol=1e-4)
    assert native.library.nodes_of_rows(scores.double()) is None
