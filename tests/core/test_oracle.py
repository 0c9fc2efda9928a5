"""Every kernel against the specification, on a table of compositions in which any two choices occur together.

One test takes each composition through all that is promised of it: eager's output, log-sum-exp and weights are the
oracle's (`conftest.oracle`, float64 NumPy), its gradients are finite differences, the statistics are those of the
weights, every other kernel agrees with eager or refuses the call by name, and what a query does not see, the future
included, changes nothing for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import make_matrix
import pytest
import torch
from torch import Tensor

from conftest import MASKS, close, covering, oracle, rand, refused, set_tile, triple
from own_objects import (
    HEADS,
    Diagonals,
    Exponential,
    HeavyTail,
    Manhattan,
    Ramp,
    Share,
    Slope,
    SoftplusSquared,
    Square,
    Squeeze,
    Tripled,
)  # fmt: skip
from qkv import InputError, attend, biases, masks, measure, normalizers, scores
from qkv import reference as parts
from qkv._contract import learned_tensors
from qkv.kernels import KERNELS

FAST = ("auto", *(name for name in KERNELS if name != "reference"))


class Size(NamedTuple):
    b: int
    h: int
    hkv: int
    nq: int
    nk: int
    d: int
    dv: int


class Cell(NamedTuple):
    """The names of the parts of a composition; `tile` is None for the usual tiles."""

    normalizer: str = "softmax and sink"
    mask: str = "none"
    bias: str = "none"
    score: str = "dot"
    size: str = "grouped heads"
    dtype: torch.dtype = torch.float64
    tile: int | None = 3


class Made:
    """A composition, and everything in it that learns: numbers of the cell's dtype, in `dtype`."""

    def __init__(self, cell: Cell, dtype: torch.dtype) -> None:
        self.cell, self.dtype, self.size = cell, dtype, SIZES[cell.size]
        self.leaves: list[Tensor] = [x.to(dtype).requires_grad_() for x in triple(*self.size, seed=1, dtype=cell.dtype)]
        self.tensors = tuple(self.leaves)
        b, h, _, nq, nk, *_ = self.size
        self.asked: dict[str, Any] = {
            "mask": (MASKS | MORE_MASKS)[cell.mask](nq, nk, b, h),
            "bias": BIASES[cell.bias](self),
            "score": SCORES[cell.score](self),
            "normalizer": NORMALIZERS[cell.normalizer](self),
        }
        learned = learned_tensors(list(self.asked.values())).values()  # of users' objects, too
        self.leaves += [x for x in learned if x.is_leaf and all(x is not y for y in self.leaves)]

    def new(self, *shape: int) -> Tensor:
        """A learned tensor."""
        x = rand(*shape, seed=31 + len(self.leaves), dtype=self.cell.dtype).to(self.dtype).requires_grad_()
        self.leaves.append(x)
        return x

    def run(self, kernel: str, tensors: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """out, and lse where there is one."""
        lse = self.asked["normalizer"].has_lse
        got = attend(*(tensors or self.tensors), kernel=kernel, return_lse=lse, **self.asked)
        return got if lse else (got,)

    def total(self, got: Sequence[Tensor]) -> Tensor:
        """A number that depends on all of out and of lse."""
        finite = [torch.where(x == -torch.inf, 0.0, x).double() for x in got]
        return sum((x * rand(*x.shape, seed=7 + n)).sum() for n, x in enumerate(finite))

    def gradients(self, got: Sequence[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(self.total(got), self.leaves, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(self.leaves, found, strict=True)]


# --- the axes ---------------------------------------------------------------------------------------------------------

Maker = Callable[[Made], Any]
SIZES = {
    "grouped heads": Size(2, HEADS, 2, 5, 7, 3, 2),
    "a key head each": Size(1, HEADS, HEADS, 6, 6, 2, 3),
    "one key head": Size(2, HEADS, 1, 7, 9, 3, 3),
    "one query": Size(2, HEADS, 2, 1, 6, 3, 2),
    "one token": Size(1, HEADS, 1, 1, 1, 2, 2),
    "9 on 5": Size(2, HEADS, 2, 9, 5, 3, 2),
    "11 on 13": Size(2, HEADS, 2, 11, 13, 3, 5),
    "13 on 7": Size(2, HEADS, 1, 13, 7, 3, 2),
    **{f"{nq} on {nk}": Size(1, 2, 1, nq, nk, 2, 3) for nq, nk in ((29, 43), (43, 29))},
    **{f"{nq} on {nk}": Size(1, 2, 1, nq, nk, 3, 5) for nq, nk in ((1, 63), (63, 1), (65, 65), (17, 257), (257, 17))},
}
BIASES: dict[str, Maker] = {
    "none": lambda m: None,
    "dense": lambda m: biases.TensorBias(m.new(1, HEADS, m.size.nq, m.size.nk)),
    "dense that hides": lambda m: biases.TensorBias(
        torch.where(rand(m.size.nq, m.size.nk, seed=5) > 0.5, -torch.inf, 0.3).double()
    ),
    "alibi": lambda m: biases.ALiBi(),
    "alibi that learns": lambda m: biases.ALiBi(m.new(HEADS)),
    "t5": lambda m: biases.T5Bias(m.new(8, HEADS), max_distance=5),
    "by distance": lambda m: biases.ByDistance(m.new(HEADS, m.size.nq + m.size.nk - 1)),
    "forget": lambda m: biases.Forget(m.new(m.size.b, HEADS, m.size.nk)),
    "relative": lambda m: biases.RelativePosition(m.new(5, m.size.d), m.new(HEADS, 5, m.size.dv)),
    "dense, cap, relative": lambda m: (
        biases.TensorBias(m.new(HEADS, m.size.nq, 1)),
        biases.SoftCap(0.8),
        biases.RelativePosition(m.new(HEADS, 3, m.size.d)),
    ),
    "own": lambda m: Squeeze(),
    "own, additive, then alibi": lambda m: (Slope(), biases.ALiBi()),
}  # fmt: skip
SCORES: dict[str, Maker] = {
    "dot": lambda m: None,
    "dot of 0": lambda m: scores.Dot(0.0),
    "negative dot": lambda m: scores.Dot(-0.5),
    "general": lambda m: scores.General(m.new(HEADS, m.size.d, m.size.d)),
    "ssmax": lambda m: scores.SSMax(m.new(HEADS)),
    "cosine": lambda m: scores.Cosine(m.new(HEADS)),
    "additive": lambda m: scores.Additive(
        m.new(HEADS, m.size.d), m.new(HEADS, m.size.d, m.size.d), m.new(m.size.hkv, m.size.d, m.size.d), m.new(m.size.d)
    ),
    "features": lambda m: scores.Features(lambda x: torch.relu(x) + 0.1),
    "own pairwise": lambda m: Manhattan(),
    "own product": lambda m: Tripled(),
}
NORMALIZERS: dict[str, Maker] = {
    "softmax": lambda m: normalizers.Softmax(0.7),
    "softmax and sink": lambda m: normalizers.Softmax(1.3, sink=m.new(m.size.h)),
    "softmax and sink of queries": lambda m: normalizers.Softmax(0.7, sink=m.new(m.size.b, m.size.h, m.size.nq)),
    "softmax off by one": lambda m: normalizers.Softmax(sink=0.0),
    "softmax and key": lambda m: normalizers.Softmax(0.7, key=m.new(HEADS, m.size.d)),
    "sigmoid of a learned bias": lambda m: normalizers.Sigmoid(m.new(HEADS)),
    "elu + 1": lambda m: normalizers.EluPlusOne(),
    "elu + 1 by sum": lambda m: normalizers.EluPlusOne("sum"),
    "relu": lambda m: normalizers.ReLU(),
    "relu by sum": lambda m: normalizers.ReLU("sum"),
    "identity": lambda m: normalizers.Identity(),
    "identity by sum": lambda m: normalizers.Identity("sum"),
    "identity by keys": lambda m: normalizers.Identity("keys").with_temperature(2.5),
    "entmax and sink": lambda m: normalizers.Entmax(1.5, temperature=0.6, sink=m.new(HEADS)),
    "entmax 1.3": lambda m: normalizers.Entmax(1.3),
    "sparsemax": lambda m: normalizers.Sparsemax(0.6),
    "softpick and sink": lambda m: normalizers.Softpick(1.2, sink=m.new(HEADS)),
    "hard": lambda m: normalizers.Hard(),
    "own square": lambda m: Square(),
    "own by sum": lambda m: Share(),
    "own by keys that learns": lambda m: Ramp(),
    "own sum to one and sink": lambda m: SoftplusSquared(sink=m.new(HEADS)),
    "own sum to one that learns, and key": lambda m: HeavyTail(key=m.new(HEADS, m.size.d), temperature=0.7),
    "own softmax": lambda m: Exponential(sink=0.4, temperature=1.7),
}
WINDOWS = [(1, 0), (4, 0), (5, 0), (3, 2), (1, 7), (17, 0)]
MORE_MASKS: dict[str, Any] = {
    "own": lambda nq, nk, b, h: Diagonals(),
    **{f"{x} back, {y} ahead": lambda nq, nk, b, h, x=x, y=y: masks.Window(x, ahead=y) for x, y in WINDOWS},
}
KINDS_OF_MASKS = [  # one of each way in which a kernel may decompose a mask; softmax has all of them
    "none",
    "causal",
    "window ahead",
    "left padding, causal",
    "dense of heads",
    "dense rows",
    "random bigbird",
    "own",
]
SUM_TO_ONE = ("softmax", "elu + 1 by sum", "entmax 1.3", "sparsemax", "hard")


def possible(x: Any, y: Any) -> bool:
    """Whether two choices may occur together: some are refused for fewer keys than queries."""
    fewer = any(str(one).startswith(("9 on", "13 on")) for one in (x, y))
    refused_there = ("document", "random", "forget")
    return not (fewer and any(word in str(one) for one in (x, y) for word in refused_there))


SHORT, BANDS, AWKWARD = list(SIZES)[:6], list(SIZES)[8:10], list(SIZES)[10:]
EXACT = [torch.float64, torch.float32]
BESIDE = (  # those that resemble another; test_linear.py has more of the first three
    "identity", "identity by sum", "identity by keys", "softmax", "softmax off by one", "elu + 1 by sum", "relu",
    "entmax 1.3", "own square", "own by sum", "own softmax", "own sum to one and sink",
)  # fmt: skip
CELLS = [
    Cell(*cell)
    for cell in covering(
        [name for name in NORMALIZERS if name not in BESIDE], KINDS_OF_MASKS,
        [name for name in BIASES if name not in ("alibi", "dense", "by distance")],
        [name for name in SCORES if name not in ("dot of 0", "negative dot")], SHORT, EXACT, [3, 5],
        possible=possible,
    )
] + [
    Cell(*cell)
    for cell in covering(
        BESIDE, KINDS_OF_MASKS[1:4], ["none", "dense", "by distance"], ["dot of 0", "negative dot", "features"],
        SHORT[:3],
    )
]  # fmt: skip
SOFTMAX = [  # every mask, on what the fused kernels and FlexAttention serve, which is rare above
    Cell(normalizer, mask, bias, score, size if possible(mask, size) else "11 on 13", dtype, tile)
    for mask, (normalizer, bias, score, size, dtype, tile) in zip(MASKS, itertools.cycle(covering(
        ["softmax", "softmax and sink"], ["none", "alibi"], ["dot", "negative dot"], ["11 on 13", "13 on 7"], EXACT,
        [4, 8],
    )), strict=False)
]  # fmt: skip
LONG = [
    Cell(mask=f"{x} back, {y} ahead", size=size, tile=tile)
    for (x, y), size, tile in zip(WINDOWS, itertools.cycle(BANDS), itertools.cycle([4, 4, 16, 16]), strict=False)
] + [
    Cell(mask=mask, size=size, dtype=torch.float32, tile=None)
    for mask, size in covering(["causal", "padding, window"], AWKWARD)
]
LOW = [
    Cell(normalizer, mask, bias, size=size, dtype=dtype, tile=4)
    for normalizer, mask, bias, dtype, size in covering(
        ["softmax", "softmax and sink"], ["none", "causal", "window ahead", "padding", "sink and window"],
        ["none", "dense that hides", "alibi"], [torch.bfloat16, torch.float16], ["grouped heads", "one key head"],
    )
]  # fmt: skip


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")  # test_flex.py traces and compiles
@pytest.mark.parametrize("cell", [*CELLS, *SOFTMAX, *LONG, *LOW], ids=str)
def test_every_kernel_computes_what_the_specification_says_or_refuses(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cell.tile is not None:
        set_tile(monkeypatch, cell.tile)
    wide = Made(cell, torch.float64)
    asked = wide.asked
    *want, weights = attend(
        *wide.tensors, kernel="eager", return_lse=asked["normalizer"].has_lse, return_weights=True, **asked
    )
    far = max(1.0, weights.abs().sum(-1).max().item())  # divided by a sum of both signs, which may be small
    if not any("own" in str(name) for name in cell):
        out, lse, of_oracle = oracle(*wide.tensors, **asked)
        for x, y in zip((*want, weights), (out, of_oracle) if lse is None else (out, lse, of_oracle), strict=True):
            assert x.shape == y.shape
            close(x, y, eps=256 * far)
    if cell.normalizer in SUM_TO_ONE:
        total = weights.sum(-1)
        close(total, (total > 0.5).double())  # 0 for a query that sees nothing
    slopes = wide.gradients(want)
    if cell.normalizer != "hard":  # whose gradient is that of softmax
        check_finite_differences(wide, slopes, far)
    check_statistics(wide, weights.detach())
    given = Made(cell, cell.dtype)
    for kernel in FAST:
        if kernel == "flex" and (cell.tile in (3, 8) or searched(cell)):  # it has no tiles, and takes long
            continue
        if kernel == "auto" and not cell.normalizer.startswith(("softmax", "identity")):  # it is tiled
            continue
        check_kernel(given, kernel, [x.detach() for x in want], slopes, far)


def searched(cell: Cell) -> bool:
    """Whether the level of each row is searched, which takes FlexAttention long; test_flex.py has these normalizers."""
    return isinstance(NORMALIZERS[cell.normalizer](Made(Cell(), cell.dtype)), normalizers.SumToOne)


def check_finite_differences(made: Made, slopes: list[Tensor], far: float) -> None:
    """Eager's gradients along one random direction."""
    ways = [rand(*x.shape, seed=50 + n) for n, x in enumerate(made.leaves)]
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for leaf, way in zip(made.leaves, ways, strict=True):
                leaf.add_(way, alpha=sign * step)
            values.append(made.total(made.run("eager")).item())
        for leaf, way in zip(made.leaves, ways, strict=True):
            leaf.add_(way, alpha=step)
    got = sum((x * way).sum().item() for x, way in zip(slopes, ways, strict=True))
    assert got == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6 * far**2)


def check_statistics(made: Made, weights: Tensor) -> None:
    """Sums over queries and the entropy of rows are those of the weights."""
    tensors = [x.detach() for x in made.tensors[:2]]
    if (weights < 0).any():
        with refused("normalizer"):
            measure(*tensors[:2], **made.asked)
        return
    found = measure(*tensors[:2], **made.asked)
    mass = weights.sum(-1, keepdim=True)
    shares = weights / torch.where(mass == 0, 1.0, mass)
    close(found.received, weights.sum(-2), eps=4096 * max(1.0, mass.max().item()))
    close(found.entropy, -torch.xlogy(shares, shares).sum(-1), eps=4096)
    if "softmax" in made.cell.normalizer and "sink" in made.cell.normalizer:
        close(found.sink_mass, 1 - mass[..., 0], eps=512)


def served(made: Made, kernel: str) -> tuple[Tensor, ...] | None:
    """The result, or None if the kernel refuses the call, which the error must say."""
    try:
        return made.run(kernel)
    except InputError as error:
        refusal = error
    assert refusal.argument == "kernel"
    never = {"auto", "eager", "tiled"}
    if made.cell in SOFTMAX:
        never |= set() if torch.is_grad_enabled() else {"flex"}
    assert kernel not in never, refusal
    return None


def check_kernel(made: Made, kernel: str, want: list[Tensor], slopes: list[Tensor], far: float) -> None:
    """Output, lse and gradients are eager's in float64."""
    dtype, low = made.cell.dtype, made.cell.dtype.itemsize < 4
    eps = 4.0 if low else 256 * far
    got = served(made, kernel)
    if got is not None:
        for x, y in zip(made.gradients(got), slopes, strict=True):
            close(x, y, eps=16 if low and x.dtype == dtype else 256 * far**2, dtype=dtype)
    with torch.no_grad():  # some kernels serve a call only without gradients
        if got is None or made.asked["mask"] is None:  # otherwise it runs once more below
            got = served(made, kernel)
        if got is None:
            return
        assert got[0].dtype == dtype
        assert len(got) == 1 or got[1].dtype == torch.promote_types(dtype, torch.float32)
        for n, (x, y) in enumerate(zip(got, want, strict=True)):
            assert x.shape == y.shape
            close(x, y, eps=1024 if n and low else eps)  # torch has a quick exp for halves
        check_that_nothing_leaks(made, kernel, [x.detach() for x in got], eps)


def check_that_nothing_leaks(made: Made, kernel: str, got: Sequence[Tensor], eps: float) -> None:
    """Another key and value, the future of some queries, change no query that does not see them.

    NaN and infinity in keys and values that no query sees change nothing at all.
    """
    (b, h, _, nq, nk, *_), mask = made.size, made.asked["mask"]
    if mask is None:
        return
    seen = mask.dense(nq, nk, batch=b, heads=h).expand(b, h, nq, nk)
    q, k, v = (x.detach().clone() for x in made.tensors)
    one = max(0, nk - 2)
    k[:, :, one] = torch.nan if kernel in ("eager", "tiled") else 30.0  # others may add −∞, and NaN − ∞ is NaN
    v[:, :, one] = 1e3  # in one product with the values that are seen: 0 · NaN would be NaN
    for item, keys in enumerate(~seen.any(1).any(1) if kernel != "native" else ()):  # it refuses NaN and infinity
        k[item, :, keys], v[item, :, keys] = torch.nan, torch.inf
    for x, y in zip(made.run(kernel, (q, k, v)), got, strict=True):
        rows = ~seen[..., one]
        close(x[rows], y[rows], eps=eps)


def test_the_reference_is_a_kernel() -> None:
    for cell in [cell for cell in CELLS if not any("own" in str(name) for name in cell)][::20]:
        made = Made(cell, cell.dtype)
        with refused("kernel", "it has no gradients"):
            made.run("reference")
        with torch.no_grad():
            close(made.run("reference")[0], oracle(*made.tensors, **made.asked)[0], eps=4)


# --- distances beyond a small grid ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_far_away(bidirectional: bool) -> None:
    back = torch.arange(-1100, 1100)
    for buckets, most in itertools.product([4, 6, 8, 32, 64], [33, 100, 128, 1000]):
        got = biases.t5_bucket(back, buckets, most, bidirectional=bidirectional)
        assert got.tolist() == [parts.t5_bucket(x, buckets, most, bidirectional) for x in back.tolist()]
    with refused("max_distance"):
        biases.T5Bias(torch.zeros(64, 1), bidirectional, 64 // (4 if bidirectional else 2))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 20, 25, 40])
def test_alibi_slopes_of_any_number_of_heads(heads: int) -> None:
    close(biases.alibi_slopes(heads), torch.tensor(parts.alibi_slopes(heads), dtype=torch.float64), eps=1)


def test_the_published_table_is_up_to_date() -> None:
    """Which kernel serves which part."""
    published = Path(__file__).parents[2] / "docs" / "matrix.md"
    assert published.read_text() == make_matrix.page(), "run `make figures`"
