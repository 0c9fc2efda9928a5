"""The matrix mask × bias × score × normalizer × kernel: every cell agrees with the specification or says why not.

Eager is compared with `qkv.reference`, and the other kernels with eager, outputs and gradients; eager's gradients are
compared with finite differences. Any two choices occur together on every kernel: see `test_every_pair_is_covered`.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from conftest import close, oracle, rand, refused, set_tile, triple, unchecked
from qkv import InputError, attend, biases, masks, normalizers, scores
from qkv.kernels import KERNELS
from qkv.reference import parts

pytestmark = pytest.mark.slow  # all together half a minute
B, H, HKV, NQ, NK, D, DV = 2, 2, 1, 5, 7, 3, 2
SIZES = (B, H, HKV, NQ, NK, D, DV)
FAST = [name for name in KERNELS if name not in ("eager", "reference", "fused")]  # fused: in test_fused.py

Made = tuple[Any, list[Tensor]]  # an object and its learned tensors


def learned(make: Callable[..., Any], *shapes: tuple[int, ...], size: float = 1.0) -> Callable[[], Made]:
    """A constructor of objects from tensors of these shapes, all of which require gradients."""

    def made() -> Made:
        tensors = [(size * rand(*shape, seed=31 + i)).requires_grad_() for i, shape in enumerate(shapes)]
        return make(*tensors), tensors

    return made


def fixed(make: Callable[[], Any]) -> Callable[[], Made]:
    return lambda: (make(), [])


MASKS = {
    "none": fixed(lambda: None),
    "causal": fixed(masks.Causal),
    "window": fixed(lambda: masks.Window(2, ahead=1)),
    "padding": fixed(lambda: masks.Padding([4, 7])),
    "bigbird": fixed(lambda: masks.bigbird(1, random=1)),
    "documents": fixed(lambda: masks.Document([[0, 0, 0, 1, 1, -1, 1], [0, 1, 1, 1, 1, 2, 2]])),
}
BIASES = {
    "none": fixed(lambda: None),
    "soft cap": fixed(lambda: biases.SoftCap(1.5)),
    "dense": learned(biases.Dense, (1, H, NQ, NK)),
    "dense that hides": fixed(lambda: biases.Dense(torch.where(rand(NQ, NK, seed=5) > 0.5, -torch.inf, 0.3).double())),
    "alibi": learned(biases.ALiBi, (H,)),
    "alibi of the paper": fixed(biases.ALiBi),
    "t5": learned(lambda table: biases.T5Bias(table, max_distance=5), (8, H)),
    "relative": learned(biases.RelativePosition, (5, D), (H, 5, DV)),
    "cap, then dense": learned(lambda x: (biases.SoftCap(1.5), biases.Dense(x)), (1, NK)),
    "alibi, then relative": learned(lambda m, x: (biases.ALiBi(m), biases.RelativePosition(x)), (H,), (H, 3, D)),
}
SCORES = {
    "dot": fixed(lambda: None),
    "general": learned(scores.General, (H, D, D)),
    "cosine": learned(scores.Cosine, (H,)),
    "additive": learned(scores.Additive, (H, D), (H, D, D), (HKV, D, D), (D,)),
    "features": fixed(lambda: scores.Features(lambda x: torch.relu(x) + 0.1)),
}
NORMALIZERS = {
    "softmax": fixed(lambda: normalizers.Softmax(0.7)),
    "sink": learned(lambda sink: normalizers.Softmax(1.3, sink=sink), (H,)),
    "off by one": fixed(lambda: normalizers.Softmax(sink=0.0)),
    "key": learned(lambda key: normalizers.Softmax(0.7, key=key), (H, D)),
    "sigmoid": fixed(normalizers.Sigmoid),
    "sigmoid, learned": learned(normalizers.Sigmoid, (H,)),
    "elu + 1": fixed(normalizers.EluPlusOne),
    "elu + 1 by sum": fixed(lambda: normalizers.EluPlusOne("sum")),
    "relu": fixed(normalizers.ReLU),
    "identity": fixed(normalizers.Identity),
    "identity by sum": fixed(lambda: normalizers.Identity("sum")),
    "identity by keys": fixed(lambda: normalizers.Identity("keys")),
    "entmax": fixed(lambda: normalizers.Entmax(1.5, temperature=0.6)),
    "entmax 1.3": fixed(lambda: normalizers.Entmax(1.3)),
    "sparsemax": fixed(lambda: normalizers.Sparsemax(0.6)),
    "hard": fixed(normalizers.Hard),
}
AXES = (MASKS, BIASES, SCORES, NORMALIZERS)


def cells() -> list[tuple[str, str, str, str]]:
    """A pairwise covering design: greedily picks the cell that covers most pairs of choices not yet covered."""
    left = {
        (i, x, j, y)
        for (i, xs), (j, ys) in itertools.combinations(enumerate(AXES), 2)
        for x, y in itertools.product(xs, ys)
    }

    def pairs(cell: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, x, j, y) for (i, x), (j, y) in itertools.combinations(enumerate(cell), 2)}

    found = []
    for seed in itertools.product(range(len(BIASES)), range(len(NORMALIZERS))):  # these alone need all of their product
        start = (1, list(BIASES)[seed[0]], 3, list(NORMALIZERS)[seed[1]])
        best = max(
            ((m, start[1], s, start[3]) for m, s in itertools.product(MASKS, SCORES)),
            key=lambda c: len(pairs(c) & left),
        )
        left -= pairs(best)
        found.append(best)
    assert not left
    return found


MORE = itertools.product(  # all masks, for compositions that flash, flex and linear support, which are rare above
    MASKS, ("none", "dense that hides", "alibi of the paper"), ("dot", "features"), ("off by one", "identity by sum")
)
CELLS = list(dict.fromkeys([*cells(), *MORE]))


@dataclass(frozen=True)
class Cell:
    """One composition, made anew, and everything in it that learns."""

    tensors: tuple[Tensor, Tensor, Tensor]
    asked: dict[str, Any]
    leaves: list[Tensor]
    has_lse: bool


def made(mask: str, bias: str, score: str, normalizer: str) -> Cell:
    tensors = triple(*SIZES, seed=1, grad=True)
    parts = [axis[name]() for axis, name in zip(AXES, (mask, bias, score, normalizer), strict=True)]
    asked = dict(zip(("mask", "bias", "score", "normalizer"), (part for part, _ in parts), strict=True))
    leaves = [*tensors, *(leaf for _, more in parts for leaf in more)]
    return Cell(tensors, asked, leaves, asked["normalizer"].has_lse)


def run(cell: Cell, kernel: str) -> tuple[Tensor, ...]:
    """out, and lse where there is one."""
    got = attend(*cell.tensors, kernel=kernel, return_lse=cell.has_lse, **cell.asked)
    return got if cell.has_lse else (got,)


def gradients(cell: Cell, got: tuple[Tensor, ...]) -> list[Tensor]:
    """Of one number that depends on all of out and of lse, in every leaf."""
    total = (got[0] * rand(*got[0].shape, seed=7)).sum()
    if len(got) > 1:
        lse = torch.where(got[1] == -torch.inf, 0.0, got[1])
        total = total + (lse.sin() * rand(*lse.shape, seed=8)).sum()
    grads = torch.autograd.grad(total, cell.leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(cell.leaves, grads, strict=True)]


def refusal(cell: Cell, kernel: str) -> str | None:
    """Why a kernel does not serve a cell; the message must name it and give a reason."""
    try:
        run(cell, kernel)
    except InputError as error:
        message = str(error)
    else:
        return None
    found = re.fullmatch(rf"kernel='{kernel}' cannot serve this call: (.{{10,}})", message)
    assert found, message
    return found[1]


@pytest.fixture(autouse=True)
def _small_tiles_and_no_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles so small that there are several, and FlexAttention's formula without a trace of each cell.

    Shapes in signatures are checked by other tests; test_flex.py and test_flex_normalizers.py trace and compile.
    """
    set_tile(monkeypatch, 2)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with unchecked():
        yield


def test_every_pair_is_covered() -> None:
    for (i, xs), (j, ys) in itertools.combinations(enumerate(AXES), 2):
        assert {(cell[i], cell[j]) for cell in CELLS} == set(itertools.product(xs, ys))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("bias", BIASES)
def test_every_cell_agrees_or_gives_a_reason(bias: str, normalizer: str) -> None:
    """Eager is the specification; every other kernel agrees with it, including gradients, or gives a reason."""
    for names in (cell for cell in CELLS if (cell[1], cell[3]) == (bias, normalizer)):
        cell = made(*names)
        want = attend(*cell.tensors, kernel="eager", return_lse=cell.has_lse, return_weights=True, **cell.asked)
        out, lse, weights = oracle(*cell.tensors, **cell.asked)
        # Weights divided by a sum of both signs are as far off as that sum is small.
        far = max(1.0, weights.abs().sum(-1).max().item())
        for x, y in zip(want, (out, lse, weights) if cell.has_lse else (out, weights), strict=True):
            close(x, y, eps=256 * far)
        slopes = gradients(cell, want[:-1])
        assert any(x.abs().max() > 1e-3 for x in slopes)
        assert refusal(cell, "reference") == "it has no gradients; detach the inputs or use torch.no_grad()"
        for kernel in FAST:
            if refusal(cell, kernel) is not None:
                with torch.no_grad():  # a kernel may support the call without gradients
                    if refusal(cell, kernel) is None:
                        compare(kernel, names, run(cell, kernel), want[:-1], far)
                continue
            got = run(cell, kernel)
            compare(kernel, names, got, want[:-1], far)
            compare(kernel, names, gradients(cell, got), slopes, far**2)


def compare(kernel: str, names: tuple[str, ...], got: Any, want: Any, far: float) -> None:
    for n, (x, y) in enumerate(zip(got, want, strict=True)):
        try:
            close(x, y, eps=256 * far)
        except AssertionError as error:
            raise AssertionError(f"{kernel} of {names}, number {n}: {error}") from None


def test_the_reference_kernel_agrees() -> None:
    for names in CELLS[:: len(CELLS) // 16]:
        cell = made(*names)
        with torch.no_grad():
            assert refusal(cell, "reference") is None
            out = attend(*cell.tensors, kernel="reference", **cell.asked)
        close(out, oracle(*cell.tensors, **cell.asked)[0])


# --- distances beyond a small grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [4, 6, 8, 32, 64])
@pytest.mark.parametrize("max_distance", [20, 64, 100, 128, 1000])
def test_t5_buckets_far_away(bidirectional: bool, buckets: int, max_distance: int) -> None:
    if max_distance <= buckets // (4 if bidirectional else 2):
        with refused("max_distance"):
            biases.T5Bias(torch.zeros(buckets, 1), bidirectional, max_distance)
        return
    back = torch.arange(-1100, 1100)
    got = biases.t5_bucket(back, buckets, max_distance, bidirectional=bidirectional)
    assert got.tolist() == [parts.t5_bucket(x, buckets, max_distance, bidirectional) for x in back.tolist()]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 20, 25, 40])
def test_alibi_slopes_of_any_number_of_heads(heads: int) -> None:
    close(biases.alibi_slopes(heads), torch.tensor(parts.alibi_slopes(heads), dtype=torch.float64), eps=1)


# --- finite differences -----------------------------------------------------------------------------------------------

CHECKED = [
    *(("causal", bias, "dot", "softmax") for bias in BIASES),
    *(("window", "none", score, "softmax") for score in SCORES),
    *(("padding", "none", "dot", normalizer) for normalizer in NORMALIZERS if normalizer != "hard"),
    ("bigbird", "relative", "additive", "key"),
    ("documents", "cap, then dense", "general", "sigmoid, learned"),
]


@pytest.mark.parametrize("names", CHECKED, ids=", ".join)
def test_eagers_gradients_are_finite_differences(names: tuple[str, str, str, str]) -> None:
    cell = made(*names)

    def total(*_: Tensor) -> Tensor:  # the leaves are perturbed in place
        got = run(cell, "eager")
        parts = [got[0]] if len(got) == 1 else [got[0], torch.where(got[1] == -torch.inf, 0.0, got[1])]
        return sum((part * rand(*part.shape, seed=7 + n)).sum() for n, part in enumerate(parts))

    assert torch.autograd.gradcheck(total, cell.leaves)


def test_every_kernel_serves_some_cells() -> None:
    for kernel in FAST:
        with torch.no_grad():
            served = sum(refusal(made(*names), kernel) is None for names in CELLS if names[1] == "none")
        assert served >= 6, kernel


def test_the_published_table_is_up_to_date() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("make_matrix", docs / "make_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    published = (docs / "matrix.md").read_text()
    assert published == module.page(), "run `make figures`"
