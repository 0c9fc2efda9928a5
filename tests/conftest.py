"""What all tests share: seeded generators, tolerances from the dtype, small tiles, refusals, commands."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on CPU tensors; read when they are first imported
    for absent in (torch.cuda, torch.xpu, torch.mtia):  # a seed for them would keep the whole call stack: 1.5 ms
        absent.manual_seed_all = lambda seed: None

from fuzz.tiles import small
from qkv import InputError, masks, reference
from qkv.cli import main
from qkv.engine.sizes import BY_DEVICE
from qkv.kernels import linear, watched
from qkv.normalizers import Normalizer
from qkv.scores import Score

torch.set_num_threads(1)  # the tests are many small products: threads would only wait for one another
settings.register_profile("qkv", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("qkv")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make millions of objects, none of them garbage: the collector looks at them at the very end only.

    There it must, or Triton's library prints a list of its objects that are left.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="of each parametrised test only the first case")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures of each test all generators are as at the start, whichever tests ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_teardown() -> None:
    """Figures that a test leaves open would be those of the next."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """After a failure, how to run the tests in the same order again."""
    if terminalreporter.stats.get("failed") and (seed := config.getoption("randomly_seed", None)) is not None:
        terminalreporter.write_line(f"The same order again: pytest --randomly-seed={seed}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--one-case"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [item for item in items if item is first[item.nodeid.partition("[")[0]]]


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """A watch, profile or edit that a test leaves open would change what later tests compute."""
    yield
    assert not watched(), "the test has left a watch, a profile or an edit open"


@pytest.fixture(params=[4, 8, 16])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles so small that a handful of tokens makes many of them."""
    set_tile(monkeypatch, request.param)
    return request.param


@pytest.fixture
def tile4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 × 4."""
    set_tile(monkeypatch, 4)


def set_tile(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Tiles of `size` everywhere, panels of few rows, and chunks of `size`."""
    monkeypatch.setitem(BY_DEVICE, "cpu", small(size))
    monkeypatch.setattr(linear, "attention", functools.partial(linear.attention, chunk=size))


def set_sizes(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Other numbers in the table of sizes."""
    monkeypatch.setitem(BY_DEVICE, "cpu", replace(BY_DEVICE["cpu"], **changed))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention by its formula, as torch's own switch has it: no trace, which takes long, and no warning."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and their files written, but nothing is drawn: other tests draw one of each kind."""

    def saved(figure: Figure, file: Any, **options: Any) -> None:
        with open(file, "wb") if isinstance(file, str | Path) else contextlib.nullcontext(file) as opened:
            opened.write(b"\x89PNG")

    monkeypatch.setattr(Figure, "savefig", saved)


# --- tensors ----------------------------------------------------------------------------------------------------------


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed * 7919 + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def triple(
    b: int = 2, h: int = 6, hkv: int = 2, nq: int = 11, nk: int = 13, d: int = 3, dv: int = 5,
    *, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k and v; by default no two dimensions are equal, but for the heads of k and the batch."""
    shapes = ((b, h, nq, d), (b, hkv, nk, d), (b, hkv, nk, dv))
    q, k, v = (rand(*s, seed=3 * seed + i, dtype=dtype) for i, s in enumerate(shapes))
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def close(got: Tensor, want: Tensor | np.ndarray, *, eps: float = 64, dtype: torch.dtype | None = None) -> None:
    """Equal to within `eps` roundings of the dtype of `got`, relative to 1 or to the number, whichever is larger."""
    want = torch.as_tensor(want)
    size = torch.finfo(dtype or got.dtype).eps * eps
    torch.testing.assert_close(got.double(), want.double(), rtol=size, atol=size)


M = TypeVar("M", bound=nn.Module)


def enlarged(model: M, size: float = 0.4) -> M:
    """In float64 and evaluation mode, with parameters so large that every part matters."""
    with torch.no_grad():
        for seed, parameter in enumerate(model.double().eval().parameters()):
            parameter.copy_(size * rand(*parameter.shape, seed=seed))
    return model


def check_slopes(model: nn.Module, loss: Callable[[], Tensor], *, unused: tuple[str, ...] = ()) -> None:
    """The gradient along a random direction of all parameters against central differences in float64.

    Parameters whose names begin as in `unused`, and no others, must have none, and change nothing.
    """
    model.zero_grad()
    loss().backward()
    step, slope, values = 1e-6, 0.0, []
    ways = [rand(*parameter.shape, seed=100 * seed) for seed, parameter in enumerate(model.parameters())]
    for (name, parameter), way in zip(model.named_parameters(), ways, strict=True):
        assert (parameter.grad is None) == name.startswith(unused), name
        slope += 0.0 if parameter.grad is None else (parameter.grad * way).sum().item()
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, way in zip(model.parameters(), ways, strict=True):
                parameter.add_(way, alpha=sign * step)
            values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest_tensor(run: Callable[[], object]) -> int:
    """Numbers in the largest storage that any operation in `run` returns."""
    with _Largest() as seen:
        run()
    return seen.numel


# --- cases ------------------------------------------------------------------------------------------------------------


def covering(*axes: Iterable[Any], possible: Callable[[Any, Any], bool] = lambda x, y: True) -> list[tuple[Any, ...]]:
    """Few cells in which any two choices of different axes occur together, if that is possible.

    Each cell covers greedily the most new pairs.
    """
    every = [list(axis) for axis in axes]

    def pairs(cell: dict[int, Any]) -> Iterator[tuple[int, Any, int, Any]]:
        return ((i, cell[i], j, cell[j]) for i, j in itertools.combinations(sorted(cell), 2))

    left = {}
    for i, j in itertools.combinations(range(len(every)), 2):
        left |= dict.fromkeys((i, x, j, y) for x, y in itertools.product(every[i], every[j]) if possible(x, y))
    found: list[tuple[Any, ...]] = []
    while left:
        i, x, j, y = next(iter(left))
        cell = {i: x, j: y}
        for n, choices in enumerate(every):
            if n not in cell:
                turn = len(found) % len(choices)  # another choice first in each cell
                cell[n] = max(
                    (c for c in [*choices[turn:], *choices[:turn]] if all(possible(c, x) for x in cell.values())),
                    key=lambda c, n=n, cell=cell: sum(pair in left for pair in pairs({**cell, n: c})),
                )
        for pair in pairs(cell):
            left.pop(pair, None)
        found.append(tuple(cell[n] for n in range(len(every))))
    return found


# --- oracles ----------------------------------------------------------------------------------------------------------


def oracle(
    q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask | None = None, bias: Any = None,
    score: Score | None = None, normalizer: Normalizer | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """out, lse and weights by definition, in float64: nothing of `attend` but the arguments."""
    given = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    found = reference.attention(q, k, v, mask=mask, bias=given, score=score, normalizer=normalizer)
    lse = None if found.lse is None else torch.from_numpy(found.lse)
    return torch.from_numpy(found.out), lse, torch.from_numpy(found.weights)


# --- masks ------------------------------------------------------------------------------------------------------------

MaskMaker = Callable[[int, int, int, int], masks.Mask | None]  # of nq, nk, batch and heads


def _ids(nk: int, batch: int) -> Tensor:
    ids = torch.arange(nk) * 3 // nk
    return torch.stack([ids.roll(b) - (torch.arange(nk) % 5 == b).long() * 9 for b in range(batch)])


def _lengths(nk: int, batch: int) -> list[int]:
    return [max(1, nk - 5 * b - 2) for b in range(batch)]


def _chance(*shape: int) -> Tensor:
    return rand(*shape, seed=5) > 0.3


MASKS: dict[str, MaskMaker] = {
    "none": lambda nq, nk, b, h: None,
    "causal": lambda nq, nk, b, h: masks.Causal(),
    "window": lambda nq, nk, b, h: masks.Window(3),
    "window of one": lambda nq, nk, b, h: masks.Window(1),
    "window ahead": lambda nq, nk, b, h: masks.Window(3, ahead=2),
    "window larger than all": lambda nq, nk, b, h: masks.Window(99, ahead=99),
    "causal window": lambda nq, nk, b, h: masks.Causal() & masks.Window(4, ahead=3),
    "prefix": lambda nq, nk, b, h: masks.Prefix(5),
    "prefix language model": lambda nq, nk, b, h: masks.Prefix(5) | masks.Causal(),
    "sink and window": lambda nq, nk, b, h: (masks.Prefix(2) & masks.Causal()) | masks.Window(3),
    "outside the window": lambda nq, nk, b, h: ~masks.Window(2, ahead=2),
    "padding": lambda nq, nk, b, h: masks.Padding(_lengths(nk, b)),
    "left padding, causal": lambda nq, nk, b, h: masks.Padding(_lengths(nk, b), "left") & masks.Causal(),
    "padding, window": lambda nq, nk, b, h: masks.Padding(_lengths(nk, b)) & masks.Window(4),
    "documents": lambda nq, nk, b, h: masks.Document(_ids(nk, b)),
    "documents, causal": lambda nq, nk, b, h: masks.Document(_ids(nk, b)) & masks.Causal(),
    "dense of heads": lambda nq, nk, b, h: masks.Dense(_chance(h, nq, nk)),
    "dense of items": lambda nq, nk, b, h: masks.Dense(_chance(b, 1, nq, nk)),
    "dense columns": lambda nq, nk, b, h: masks.Dense(_chance(1, nk)),
    "dense rows": lambda nq, nk, b, h: masks.Dense(_chance(nq, 1)),
    "predicate": lambda nq, nk, b, h: masks.Predicate(lambda b, h, q, k: (q + 2 * k + h + b) % 3 > 0),
    "shifted": lambda nq, nk, b, h: masks.Shifted(masks.Causal(), 1),
    "global": lambda nq, nk, b, h: masks.Global([0, -1]),
    "global, causal": lambda nq, nk, b, h: masks.Global([nk // 2, 0]) & masks.Causal(),
    "strided": lambda nq, nk, b, h: (masks.Strided(3) | masks.Window(3)) & masks.Causal(),
    "dilated": lambda nq, nk, b, h: masks.Dilated(3, step=2),
    "dilated ahead": lambda nq, nk, b, h: masks.Dilated(2, step=3, ahead=1),
    "random keys": lambda nq, nk, b, h: masks.RandomKeys(3, seed=1),
    "blockwise": lambda nq, nk, b, h: masks.Blockwise(masks.Causal(), 3),
    "longformer": lambda nq, nk, b, h: masks.longformer(4, [0, -1]),
    "longformer, causal": lambda nq, nk, b, h: masks.longformer(2, [0], causal=True),
    "random bigbird": lambda nq, nk, b, h: masks.bigbird(2, random=1),
    "nothing": lambda nq, nk, b, h: ~masks.Prefix(nk),
}


def fits(name: str, nq: int, nk: int) -> bool:
    """Whether the mask of this name can be laid over nq × nk: for some every query must stand at a key."""
    return nq <= nk or not ("document" in name or "random" in name)


@st.composite
def mask_trees(draw: st.DrawFn, nq: int, nk: int, batch: int, heads: int) -> masks.Mask:
    """Random compositions of every mask, for a grid of these sizes."""
    size = st.integers(1, nk + 2)
    bits = st.integers(0, 2**32 - 1)

    def chance(shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6

    shapes = st.sampled_from([
        (nq, nk), (1, nk), (nq, 1), (heads, nq, nk), (batch, 1, nq, nk), (batch, heads, nq, nk), (batch, 1, 1, nk),
    ])  # fmt: skip
    leaves = [
        st.just(masks.Causal()),
        st.builds(masks.Window, size, st.integers(0, nk)),
        st.builds(masks.Prefix, st.integers(0, nk + 2)),
        st.builds(
            masks.Padding,
            st.lists(st.integers(0, nk), min_size=batch, max_size=batch),
            st.sampled_from(["left", "right"]),
        ),
        st.builds(masks.Padding, st.lists(st.integers(0, nk), min_size=1, max_size=1)),
        st.builds(lambda s, seed: masks.Dense(chance(s, seed)), shapes, bits),
        st.builds(
            lambda a, c, m: masks.Predicate(lambda b, h, q, k: (a * q + c * k + h - b) % m != 0),
            st.integers(1, 3), st.integers(0, 3), st.integers(2, 4),
        ),
    ]  # fmt: skip
    step = st.integers(1, 4)
    tokens = st.lists(st.integers(-nk, nk - 1), max_size=3)
    patterns = [
        st.just(masks.Causal()),
        st.builds(masks.Global, st.lists(st.sampled_from([0, -1]), max_size=2)),
        st.builds(masks.Strided, step),
        st.builds(masks.Dilated, step, step, st.integers(0, 2)),
        st.builds(masks.Window, step, step),
    ]
    if nq <= nk:
        drawn = st.builds(masks.RandomKeys, st.integers(0, nk + 1), st.integers(0, 9))
        patterns += [drawn, st.builds(lambda m, r: m | masks.RandomKeys(r, 1, m), st.one_of(patterns), step)]
    leaves += [
        st.builds(masks.Global, tokens),
        *patterns[2:],
        st.builds(lambda a, b, n: masks.Blockwise(a & b, n), st.one_of(patterns), st.one_of(patterns), step),
        st.builds(lambda a, b, n: masks.Blockwise(a | ~b, n), st.one_of(patterns), st.one_of(patterns), step),
    ]
    if nq <= nk:
        ids = st.lists(st.integers(-1, 2), min_size=nk, max_size=nk).map(sorted) | st.lists(
            st.integers(-1, 2), min_size=nk, max_size=nk
        )
        leaves += [st.builds(masks.Document, ids)]
        leaves += [st.builds(lambda x: masks.Document(torch.tensor(x)), st.lists(ids, min_size=batch, max_size=batch))]
        offsets = st.integers(0, nk - nq)  # where documents fit, too
    else:
        offsets = st.integers(-2, 3)

    def compose(inner: st.SearchStrategy[masks.Mask]) -> st.SearchStrategy[masks.Mask]:
        return st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
            st.builds(masks.Shifted, inner, offsets),
        )

    return draw(st.recursive(st.one_of(leaves), compose, max_leaves=4))


@st.composite
def grids(draw: st.DrawFn, most: int = 12) -> masks.Grid:
    """Small score matrices, with fewer and with more queries than keys."""
    sizes = [draw(st.integers(1, n)) for n in (2, 3, most, most)]
    batch, heads, nq, nk = sizes
    return masks.Grid.of(nq, nk, batch, heads)


@contextlib.contextmanager
def refused(argument: str, match: str | None = None) -> Iterator[None]:
    """Inside, an `InputError` of one line is raised that names this argument; `match` tells errors of one apart."""
    with pytest.raises(InputError, match=match) as raised:
        yield
    assert isinstance(raised.value, ValueError)
    assert raised.value.argument == argument, f"the error is about {raised.value.argument!r}: {raised.value}"
    assert "\n" not in str(raised.value)


def refusals(rows: Sequence[tuple[Any, ...]]) -> Callable[..., None]:
    """A test of a table: each row has an argument, a call that is refused because of it, and maybe what is said."""

    @pytest.mark.parametrize("row", rows, ids=[row[0] for row in rows])
    def is_refused(row: tuple[Any, ...]) -> None:
        argument, *others = row
        call = next(x for x in others if callable(x))
        with refused(argument, next((x for x in others if isinstance(x, str)), None)):
            call()

    return is_refused


# --- commands ---------------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


class Command:
    """Runs `qkv` in this process: `command("profile", "--out", path)`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> Ran:
        self._capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *self._capsys.readouterr())

    def succeeds(self, *words: object) -> str:
        """What it printed to standard output; it must end with exit code 0."""
        ran = self(*words)
        assert ran.code == 0, ran.err
        return ran.out

    def refuses(self, *words: object) -> str:
        """Its error, which must be one sentence on one line, with exit code 2."""
        ran = self(*words)
        assert ran.code == 2, ran
        assert ran.err.startswith("qkv: ")
        assert ran.err.count("\n") == 1, ran.err
        return ran.err


class Terminal(io.StringIO):
    """A terminal that remembers how much had been written when it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[int] = []

    def flush(self) -> None:
        self.flushed.append(len(self.getvalue()))

    def isatty(self) -> bool:
        return True


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs commands and returns what they print."""
    return Command(capsys)
