"""The Triton kernels for statistics: under Triton's interpreter on CPU tensors, compiled on a card where there is one.

test_gpu_static.py compiles them for a card that is not there. What the interpreter cannot show: speed, races between
the warps of a program, and the rounding of tensor cores.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from benchmarks.launches import KERNELS, Card
from qkv import biases, normalizers
from qkv.biases import Bias
from qkv.engine import Call, RowState, sizes
from qkv.kernels import fused
from qkv.masks import Causal, Dense, Document, Mask, Padding, Prefix, Strided, Window
from qkv.normalizers import Normalizer, Softmax
from qkv.profiler.capture.record import tensors_of
from qkv.statistics import Extremes, PrefixSinkScores
from qkv.statistics.base import Request
from qkv.statistics.measure import checked, measured, sweep
from qkv.statistics.triton import host

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = {"near": Window(8, ahead=2), "kept": Prefix(4) | Window(20)}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]  # batch, heads, key heads
    nq: int
    nk: int
    d: int = 16
    dv: int = 16
    mask: Mask | None = None
    dtype: torch.dtype = torch.float32
    sink: bool = False
    mass: Mapping[str, Mask] = dataclasses.field(default_factory=dict)
    first: int | tuple[int, ...] = 0
    queries: bool = False
    prefix_keys: int | None = None
    bins: int | None = None
    factor: float = 1.0
    biases: tuple[Bias, ...] = ()
    temperature: float = 1.0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        b, h, hkv = self.shape
        q, k, v = (
            random(b, heads, n, d, seed=i, dtype=self.dtype)
            for i, (heads, n, d) in enumerate(((h, self.nq, self.d), (hkv, self.nk, self.d), (hkv, self.nk, self.dv)))
        )
        return q * self.factor, k, v

    def options(self) -> dict[str, Any]:
        b = self.shape[0]
        counted = (torch.arange(b * self.nq).view(b, self.nq) % 7 < 5).to(DEVICE) if self.queries else None
        first = self.first if isinstance(self.first, int) else torch.tensor(self.first, device=DEVICE)
        statistics = () if self.prefix_keys is None else (PrefixSinkScores(self.prefix_keys),)
        return {"mass": self.mass, "first": first, "queries": counted, "statistics": statistics, "bins": self.bins}

    def normalizer(self) -> Normalizer:
        return Softmax(self.temperature, random(self.shape[1], seed=9) if self.sink else None)


def hidden(n: int, hide: int = 1000) -> Tensor:
    """A bias by distance, −∞ at each multiple of `hide`."""
    return random(1, n, seed=5).masked_fill((torch.arange(n) % hide == hide - 1).to(DEVICE), -math.inf)


CASES = {
    "one pair": Case((1, 1, 1), 1, 1),
    "causal, no multiple of a tile": Case((1, 2, 1), 65, 65, d=32, mask=Causal(), prefix_keys=8, bins=16),
    "more keys than queries, a sink": Case((1, 3, 1), 17, 97, d=24, dv=40, sink=True, bins=8, prefix_keys=20),
    "more queries than keys, bins of one": Case((1, 1, 1), 129, 40, mask=Causal(), bins=200),
    "a window, masses": Case((1, 1, 1), 81, 81, d=64, dv=64, mask=Window(40), bins=2, sink=True, mass=FULL),
    "padding on the left": Case(
        (2, 2, 1), 45, 45, mask=Causal() & Padding([45, 26], side="left"), first=(0, 19), prefix_keys=16, queries=True,
    ),
    "documents": Case((1, 2, 2), 45, 45, mask=Document(torch.arange(45) // 13 - 1) & Causal(), prefix_keys=9),
    "a dense mask": Case(
        (2, 1, 1), 40, 45, mask=Dense(torch.arange(2 * 40 * 45).view(2, 1, 40, 45) % 3 == 0), queries=True, sink=True,
    ),
    "bfloat16": Case((1, 2, 1), 65, 65, d=32, mask=Causal(), dtype=torch.bfloat16, bins=4, prefix_keys=64),
    "float16": Case((1, 2, 2), 65, 65, mask=Window(9, ahead=3), dtype=torch.float16),
    "large scores": Case((1, 2, 2), 65, 65, mask=Causal(), factor=300.0, bins=4),
    "soft cap, then alibi": Case(
        (1, 2, 1), 33, 70, biases=(biases.SoftCap(2.0), biases.ALiBi()), prefix_keys=20, temperature=1.3, mass=FULL
    ),
    "a bias by distance, then a soft cap": Case(
        (2, 1, 1), 40, 63, mask=Padding([63, 41]), biases=(biases.ByDistance(hidden(102)), biases.SoftCap(1.5)),
    ),
    "a bias that hides distances": Case((1, 1, 1), 40, 70, biases=(biases.ByDistance(hidden(109, hide=7)),), bins=8),
    "a soft cap of large and small scores": Case(
        (1, 1, 1), 65, 65, mask=Causal(), biases=(biases.SoftCap(30.0),), factor=8.0
    ),
    "the largest head": Case((1, 1, 1), 40, 40, d=256, dv=200, mask=Causal()),
}  # fmt: skip
IN_MANY_TILES = [
    name
    for name, case in CASES.items()
    if case.nq > 16 and case.dtype == torch.float32 and case.factor == 1 and name != "the largest head"
]


@pytest.fixture(autouse=True)
def cpu_as_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on a CPU are for the Triton kernels, too."""
    monkeypatch.setattr(sizes, "HOSTS", ())


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 queries and 16 keys, of which short sequences have many that no mask cuts; sums of two at a time."""
    options = host.statistics_options
    monkeypatch.setattr(host, "statistics_options", lambda *args: options(*args) | {"BM": 16, "BN": 16})
    monkeypatch.setattr(host, "STEP_TILES", 2)


@pytest.mark.parametrize(
    ("name", "tiles"), [*((name, "large") for name in CASES), *((name, "small") for name in IN_MANY_TILES)]
)
def test_output_and_statistics_equal_those_in_float64(name: str, tiles: str, request: pytest.FixtureRequest) -> None:
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    case = CASES[name]
    q, k, v = case.tensors()
    call = Call.of(q, k, v, case.mask, case.biases, None, case.normalizer())
    assert host.unsupported_reason(call) is None
    options = case.options()
    if tiles == "small":
        options["statistics"] = (*options["statistics"], Extremes())
    out, lse, got = host.attend_and_measure(call, checked(call, call.grid, **options), output=True)
    normalizer = Softmax(case.temperature, case.normalizer().sink.double() if case.sink else None)
    settings = {"mask": case.mask, "normalizer": normalizer, "bias": case.biases}
    q, k, v = q.double(), k.double(), v.double()
    whole = qkv.attend(q, k, v, **settings, return_lse=True)
    want = measured(Call.of(q, k, v, **settings), **options)[-1]
    scale = max(1.0, float(lse.masked_fill(~lse.isfinite(), 0).abs().max()))  # of the rounding of a score
    close(out, whole[0], "output", {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[case.dtype] * scale)
    close(lse, whole[1], "lse", 1e-6 * scale)
    for field in dataclasses.fields(got):
        mine, other = getattr(got, field.name), getattr(want, field.name)
        if isinstance(other, Tensor):
            size = {"distance": 1e-5 * case.nk, "received": 1e-5, "spread": 0.05, "effective_keys": 1e-5 * case.nk}
            size |= dict.fromkeys((name for name in vars(got) if name.startswith("visible")), 0.0)
            close(mine, other, field.name, scale * size.get(field.name, 3e-6))
        else:
            assert (mine is None) == (other is None), field.name
    # The square of the spread is resolved to 0.002, as on CPU.
    close(got.spread.square(), want.spread.square(), "spread²", 0.002 * scale)
    for key in case.mass:
        close(got.mass[key], want.mass[key], key, 2e-6 * scale)
    if want.thumbnail is not None:
        assert got.thumbnail is not None
        assert (got.thumbnail.query_bin, got.thumbnail.key_bin) == (want.thumbnail.query_bin, want.thumbnail.key_bin)
        close(got.thumbnail.maximum, want.thumbnail.maximum, "maxima of bins", 2e-6 * scale)
        close(got.thumbnail.mean, want.thumbnail.mean, "means of bins", 2e-6 * scale)


def close(got: Tensor | None, want: Tensor, what: str, allowed: float) -> None:
    assert got is not None
    assert got.shape == want.shape, what
    off = torch.where(got.double() == want.double(), 0.0, (got.double() - want.double()).abs())
    assert float(off.max()) <= allowed, f"{what}: {float(off.max()):.2g} off, allowed {allowed:.2g}"


@pytest.mark.parametrize("name", ["a window, masses", "padding on the left", "documents"])
def test_the_order_of_programs_changes_no_bit(name: str, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the last program runs first, in place of programs that run at the same time in any order."""
    case = CASES[name]
    q, k, v = case.tensors()
    norms = v.float().norm(dim=-1).repeat_interleave(case.shape[1] // case.shape[2], 1)
    call = Call.of(q, k, v, case.mask, case.biases, None, case.normalizer())
    request = dataclasses.replace(checked(call, call.grid, **case.options()), value_norms=norms)
    want = host.attend_and_measure(call, request, output=True)
    if DEVICE == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        place = interpreter_builder.set_grid_idx
        monkeypatch.setattr(
            interpreter_builder,
            "set_grid_idx",
            lambda *at: place(*(n - 1 - i for n, i in zip(interpreter_builder.grid_dim, at, strict=True))),
        )
    got = host.attend_and_measure(call, request, output=True)
    pairs = zip(tensors_of(got), tensors_of(want), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert want[2].first_contribution is not None


@pytest.mark.slow
def test_the_spread_of_a_head_that_attends_far_back_keeps_its_digits() -> None:
    """All weight on two neighbouring keys, 1,000 tokens before the query: float32 moments would lose the spread."""
    n = 1000
    k = torch.zeros(1, 1, n, 16, device=DEVICE)
    k[:, :, :2, 0] = 200
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    q[..., 0] = 1
    _, _, got = host.attend_and_measure(Call.of(q, k, k), Request({}, [0]), output=False)
    assert got.spread.item() == pytest.approx(0.5, abs=1e-3)
    assert got.distance.item() == pytest.approx(n - 1.5, rel=1e-6)


@pytest.mark.parametrize("name", ["padding on the left", "a bias that hides distances"])
def test_a_known_log_sum_exp_gives_equal_bits(name: str, small_tiles: None) -> None:
    case = CASES[name]
    call = Call.of(*case.tensors(), case.mask, case.biases)
    found = [measured(call, **case.options())]
    found.append(measured(call, found[0][1], **case.options()))
    for field in dataclasses.fields(found[0][2]):
        mine, other = (getattr(x[2], field.name) for x in found)
        if isinstance(other, Tensor):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, msg=field.name)


@pytest.mark.parametrize("sink", [None, 0.5, 20.0])
def test_the_forward_of_torch_gives_the_same_statistics(sink: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator is replaced by formulas. With a sink of 20, the keys have a weight of 1e-7 together."""
    case = CASES["bfloat16"]
    normalizer = Softmax(sink=None if sink is None else torch.tensor([sink, -1.0], device=DEVICE))
    call = Call.of(*case.tensors(), Causal(), (), None, normalizer)
    of_kernel = measured(call, output=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, band: object) -> tuple[Tensor, Tensor]:
        return tuple(qkv.attend(q.float(), k.float(), v.float(), mask=Causal(), return_lse=True))

    monkeypatch.setattr(fused, "_attend", attend)
    monkeypatch.setattr(fused, "unsupported_reason", lambda call: None)
    kernels = {name: getattr(host._kernels(), name) for name in KERNELS if name != "forward"}
    monkeypatch.setattr(host, "_kernels", lambda: SimpleNamespace(**kernels))
    of_torch = measured(call, output=True)
    close(of_torch[0].out, of_kernel[0].out, "output", 2e-2)
    close(of_torch[1].level, of_kernel[1].level, "lse", 3e-6)
    for name in ("entropy", "received", "distance", "effective_keys", "self_", "sink", "row_sum"):
        close(getattr(of_torch[2], name), getattr(of_kernel[2], name), name, 3e-5)
    assert float(of_kernel[2].entropy.max()) > 1  # of the keys alone, also beside a sink that has nearly all weight


@pytest.mark.slow
def test_nan_and_infinity_in_padding_do_not_spread() -> None:
    q, k, v = Case((1, 2, 2), 70, 70).tensors()
    clean = [x.clone() for x in (k, v)]
    k[:, :, 64:], v[:, :, 64:] = math.nan, math.inf
    mask = Causal() & Padding([64])
    found = [
        host.attend_and_measure(Call.of(q, *x, mask), Request({}, [0], prefix_keys=8, bins=4), output=True)
        for x in ((k, v), clean)
    ]
    for got, want in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(found[0][2].received, found[1][2].received)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], list[object]]]:
    """The grids and arguments of the kernels, which are not run."""
    launched: list[tuple[tuple[int, ...], list[object]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *args, **named: launched.append((grid, [*args, *named.values()]))

    monkeypatch.setattr(host, "_kernels", lambda: SimpleNamespace(**dict.fromkeys(KERNELS, Kernel())))
    return launched


@pytest.mark.parametrize("name", ["padding on the left", "bfloat16"])
def test_row_sums_and_contributions_equal_those_of_dense_weights(name: str) -> None:
    case = CASES[name]
    q, k, v = case.tensors()
    norms = v.float().norm(dim=-1).repeat_interleave(case.shape[1] // case.shape[2], 1)
    options = case.options()
    call = Call.of(q, k, v, case.mask, (), None, case.normalizer())
    _, _, got = measured(call, output=True, value_norms=norms, **options)
    normalizer = Softmax(sink=case.normalizer().sink.double()) if case.sink else Softmax()
    composed = {"mask": case.mask, "normalizer": normalizer, "kernel": "reference", "return_weights": True}
    weights = qkv.attend(q.double(), k.double(), v.double(), **composed)[1]
    if options["queries"] is not None:
        weights = weights * options["queries"][:, None, :, None]
    close(got.row_sum, weights.sum(-1), "row_sum", 3e-6)
    products = weights * norms[:, :, None].double()
    first = torch.as_tensor(options["first"]).expand(len(q))
    want = products[torch.arange(len(q)), :, :, first] / products.sum(-1).clamp(min=1e-30)
    assert got.first_contribution is not None
    close(got.first_contribution, want, "first_contribution", 1e-5)


@pytest.mark.parametrize(("n", "most"), [(128, 7), (5000, 9)])
def test_statistics_of_a_layer_take_few_launches(n: int, most: int) -> None:
    """Five kernels, zeros, and the means of the bins: those of the last ones are other sizes."""
    q, k, v = (torch.empty(2, heads, n, 64, device="meta", dtype=torch.bfloat16) for heads in (32, 8, 8))
    call = Call.of(q, k, v, Causal(), (), None, Softmax(sink=torch.empty(32, device="meta")))
    for _ in range(2):  # small tensors of numbers are kept on the device
        with Card() as card:
            measured(call, mass=FULL, statistics=[PrefixSinkScores(64)], bins=64)
    assert card.names.count("Triton") == len(KERNELS)
    assert card.count <= most, card.names
    assert card.waits == []


@pytest.mark.parametrize("known_lse", [False, True])
def test_a_call_on_a_gpu_makes_no_tensor_on_the_cpu_and_reads_no_number(
    known_lse: bool, recorded: list[tuple[object, list[object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors: an operation with a CPU tensor, or `item()`, raises an error. They cannot show a copy to a card."""
    monkeypatch.setattr(host, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(host, "GPUS", ("meta",))
    q, k, v = (torch.empty(2, heads, 300, 64, device="meta", dtype=torch.bfloat16) for heads in (8, 2, 2))
    call = Call.of(q, k, v, Causal())
    if known_lse:  # of surveys
        rows = RowState(torch.empty(2, 8, 300, device="meta"))
        statistics = sweep(call, rows, mass=FULL, statistics=[PrefixSinkScores(64)])
    else:
        result, _, statistics = measured(call, output=True, mass=FULL, statistics=[PrefixSinkScores(64)], bins=32)
        assert result is not None
        assert (result.out.shape, result.out.dtype) == ((2, 8, 300, 64), torch.bfloat16)
    assert len(recorded) == len(KERNELS) - known_lse
    tensors = [x for _, arguments in recorded for x in arguments if isinstance(x, Tensor)]
    assert {x.device.type for x in (*tensors, statistics.received)} == {"meta"}
    assert statistics.received.shape == (2, 8, 300)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mask": Strided(4)}, "Strided"),
        ({"biases": (biases.TensorBias(torch.zeros(20, 20, device=DEVICE)),)}, "TensorBias"),
        ({"biases": (biases.SoftCap(1.0), biases.ALiBi(), biases.SoftCap(2.0))}, "at most one .* SoftCap"),
        ({"normalizer": normalizers.Sigmoid()}, "Sigmoid"),
        ({"dtype": torch.float64}, "float64"),
        ({"d": 257}, "257"),
    ],
    ids=["mask", "bias", "two caps", "normalizer", "dtype", "head"],
)
def test_what_the_kernels_do_not_compute_has_a_reason(settings: dict[str, object], reason: str) -> None:
    dtype, d = settings.get("dtype", torch.float32), settings.get("d", 8)
    x = torch.zeros(1, 2, 20, d, dtype=dtype, device=DEVICE)
    call = Call.of(x, x, x, settings.get("mask"), settings.get("biases", ()), None, settings.get("normalizer"))
    assert re.search(reason, str(host.unsupported_reason(call)))
