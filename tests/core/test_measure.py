"""Exact statistics: against materialised weights, against identities that do not use the sweep, and invariants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import qkv
from conftest import MASKS, close, fits, largest_tensor, oracle, rand, refusals, set_sizes, set_tile, triple
from qkv import attend, biases, masks, normalizers, reference
from qkv.kernels import serving
from qkv.masks import Causal, Dense, Mask, Padding, Window
from qkv.normalizers import Softmax
from qkv.results import Thumbnail, field_of
from qkv.scores import Dot
from qkv.statistics import BUILT_IN, Extremes, Local, Mass, PrefixSinkScores, Streaming, measure_weights
from qkv.statistics.gradients import DIFFERENTIABLE
from qkv.statistics.measure import Statistics

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}
TESTED_SEPARATELY = {
    "mass", "own", "sink_mass", "visible", "visible_queries", "prefix_sink_scores", "thumbnail", "first_contribution",
    "min_logit", "argmax",
}  # fmt: skip
TENSORS = [f.name for f in dataclasses.fields(Statistics) if f.name not in TESTED_SEPARATELY]


def expected_statistics(weights: Tensor, lse: Tensor | None, first: int = 0) -> dict[str, Tensor]:
    """Every statistic of materialised weights (b, h, nq, nk); of the lse only if there is one."""
    a = weights.double().numpy()
    nq, nk = a.shape[2:]
    out = vars(reference.statistics(a)) | {"row_sum": a.sum(-1), "sink": a[..., first]}
    for name, shift in (("self_", 0), ("previous", -1), ("next_", 1)):
        out[name] = np.zeros(a.shape[:3])
        for i in range(nq):
            if 0 <= (j := i + nk - nq + shift) < nk:
                out[name][:, :, i] = a[:, :, i, j]
    if lse is not None:
        out["lse"] = lse.double().numpy()
        out["max_logit"] = (lse.double() + weights.double().amax(-1).log()).numpy()
    assert {*out} | {"lse", "max_logit"} == {*TENSORS}
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in out.items()}


def compare(got: Statistics, want: dict[str, Tensor], *, eps: float = 64) -> None:
    """Every statistic, to a tolerance relative to 1 or to the number; the spread is compared squared."""
    tokens = want["received"].shape[-1]
    for name, value in want.items():
        x = getattr(got, name)
        assert x.shape == value.shape, name
        if name == "spread":
            close(x.square(), value.square(), eps=eps * tokens**2, dtype=x.dtype)
        else:
            close(x, value, eps=eps * (tokens if name in ("distance", "received") else 1))


def tensors_of(result: Statistics) -> dict[str, Tensor]:
    return {name: getattr(result, name) for name in TENSORS}


# --- against materialised weights -------------------------------------------------------------------------------------

SIZES = [(11, 13), (13, 7), (1, 13)]
CASES = [  # another size and grouping for each mask
    (name, [*HEADS.values()][i % len(HEADS)], *sizes[i // 3 % len(sizes)])
    for i, name in enumerate(MASKS)
    if (sizes := [size for size in SIZES if fits(name, *size)])
]


@pytest.mark.parametrize(("name", "heads", "nq", "nk"), CASES)
def test_statistics_match_dense_weights_for_every_mask(
    name: str, heads: tuple[int, int], nq: int, nk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, hkv = heads
    q, k, v = triple(h=h, hkv=hkv, nq=nq, nk=nk)
    mask = MASKS[name](nq, nk, 2, h)
    _, lse, weights = oracle(q, k, v, mask=mask)
    visible = torch.ones(1, 1, nq, nk) if mask is None else mask.dense(nq, nk, batch=2, heads=h)
    for tile, together in ((None, 1), (4, 1), (8, 4)):
        if tile is not None:
            set_tile(monkeypatch, tile)
            set_sizes(monkeypatch, heads=together)
        got = qkv.measure(q, k, mask=mask)
        compare(got, expected_statistics(weights, lse))
        assert torch.equal(got.visible, visible.sum(-1).to(got.visible).expand_as(got.visible))


RETURNED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "padding and a sink": {"mask": Padding([9, 11]), "normalizer": Softmax(1.5, sink=0.7)},
    "bias and score": {"bias": biases.SoftCap(0.8), "score": Dot(0.3)},
    "sigmoid": {"mask": Window(5), "normalizer": normalizers.Sigmoid()},
    "sparsemax": {"mask": Causal(), "normalizer": normalizers.Sparsemax()},
    "draws": {"normalizer": normalizers.Hard(sample=True)},
    "dropout": {"dropout_p": 0.5},
    "eager": {"mask": Causal(), "kernel": "eager"},
    "tiled": {"mask": Causal(), "kernel": "tiled"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RETURNED)
def test_statistics_that_attend_returns_differ_from_those_of_measure(name: str, dtype: torch.dtype) -> None:
    """With and without gradients of the output, whose values do not depend on the statistics."""
    asked = RETURNED[name]
    composed = {key: x for key, x in asked.items() if key not in ("kernel", "dropout_p")}
    tensors = triple(nq=11, nk=13, dtype=dtype)
    torch.manual_seed(3)
    want = attend(*tensors, **asked)
    for grad in (False, True):
        q, k, v = (x.clone().requires_grad_(grad) for x in tensors)
        torch.manual_seed(3)
        out, found = attend(q, k, v, **asked, return_statistics=True)
        close(out, want)
        assert out.requires_grad == grad
        expected = qkv.measure(q, k, **composed) if name != "draws" else found  # of other draws
        for field, x in tensors_of(expected).items():
            if x is not None:
                assert not x.requires_grad or name == "draws", "detached by default"
                close(getattr(found, field).detach(), x.detach(), eps=1024)
                assert getattr(found, field).requires_grad == (grad and name != "draws" and field in DIFFERENTIABLE)
    weights, found = attend(*tensors, **{**asked, "kernel": "auto"}, return_weights=True, return_statistics=True)[1:]
    if name != "dropout":
        close(found.received, weights.sum(-2), eps=1024)


def test_returned_statistics_are_those_of_the_edited_call() -> None:
    q, k, v = triple(nq=11, nk=13)
    seen: list[Any] = []

    def edit(call: Any, compute: Any, fused: bool) -> Any:
        seen.append(dataclasses.replace(call, mask=Window(3)))
        return compute(seen[-1])

    with serving(edit):
        out, found = attend(q, k, v, mask=Causal(), return_statistics=True)
    want, expected = attend(q, k, v, mask=Window(3), return_statistics=True)
    close(out, want)
    close(found.received, expected.received)
    assert [type(call.mask) for call in seen] == [Window]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("tile4")
def test_dtypes(dtype: torch.dtype) -> None:
    """Statistics of half-precision inputs are float32; the lse of torch's half kernels is exact to about 4e-5."""
    q, k, v = triple(nq=37, nk=41, h=2, hkv=1, dtype=dtype)
    for name in ("none", "causal", "padding, window"):
        mask = MASKS[name](37, 41, 2, 2)
        _, lse, weights = oracle(q, k, v, mask=mask)
        got = qkv.measure(q, k, mask=mask)
        assert {x.dtype for x in tensors_of(got).values()} == {torch.float32}
        compare(got, expected_statistics(weights, lse), eps=64 if dtype == torch.float32 else 1024)


@pytest.mark.parametrize(("nq", "nk", "threads"), [(1, 1, 1), (65, 257, 1), (257, 65, 1), (300, 300, 3)])
def test_default_tile_sizes_and_threads(nq: int, nk: int, threads: int) -> None:
    """Blocks of rows run in parallel; the number of threads is restored afterwards."""
    q, k, v = triple(b=1, h=2, hkv=1, nq=nq, nk=nk)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mask in (None, Causal(), Window(70, ahead=3)):
            _, lse, weights = attend(q, k, v, mask=mask, kernel="eager", return_lse=True, return_weights=True)
            compare(qkv.measure(q, k, mask=mask), expected_statistics(weights, lse), eps=256)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_rows_longer_than_one_batch_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row sums are flushed every 64 tiles."""
    set_tile(monkeypatch, 2)
    q, k, v = triple(b=1, h=1, hkv=1, nq=5, nk=135)
    _, lse, weights = attend(q, k, v, kernel="eager", return_lse=True, return_weights=True)
    got = qkv.measure(q, k, mass={"all": Window(999, ahead=999)})
    compare(got, expected_statistics(weights, lse), eps=256)
    close(got.mass["all"], torch.ones(1, 1, 5))


@pytest.mark.usefixtures("tile4")
def test_nan_in_padding_gives_zeros() -> None:
    q, k, _ = triple()
    k[0, :, :4] = math.nan
    hides = biases.TensorBias(torch.where(torch.arange(13) % 3 == 0, -torch.inf, 0.0).double()[None])
    got = qkv.measure(q, k, mask=Padding([9, 13], "left") & Causal(), bias=hides, mass={"near": Window(2)})
    for name, x in {**tensors_of(got), **got.mass}.items():
        assert not x.isnan().any(), name
        if name not in ("lse", "max_logit", "received"):
            assert (x[got.lse == -torch.inf] == 0).all(), name


# --- arguments of measure ---------------------------------------------------------------------------------------------


def pooled(weights: Tensor, query_bin: int, key_bin: int) -> tuple[Tensor, Tensor]:
    """Maxima and means over bins, bin by bin."""
    blocks = [list(part.split(key_bin, 3)) for part in weights.split(query_bin, 2)]
    top, mean = (
        torch.stack([torch.stack([how(x) for x in row], 2) for row in blocks], 2)
        for how in (lambda x: x.amax((2, 3)), lambda x: x.mean((2, 3)))
    )
    return top, mean


@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "left padding, causal", "dense of heads"])
@pytest.mark.parametrize(("nq", "nk", "bins"), [(11, 13, 3), (13, 7, 40), (13, 7, 3), (13, 13, 1)])
def test_visible_queries_prefix_scores_and_thumbnail(name: str, nq: int, nk: int, bins: int, tile4: None) -> None:
    if not fits(name, nq, nk):
        pytest.skip("no such mask at these lengths")
    q, k, v = triple(nq=nq, nk=nk)
    mask = MASKS[name](nq, nk, 2, 6)
    visible = (masks.Prefix(nk) if mask is None else mask).dense(nq, nk, batch=2, heads=6).expand(2, 6, -1, -1)
    counts = rand(2, nq, seed=5) > -0.5
    first = torch.tensor([2, 0])
    got = qkv.measure(q, k, mask=mask, first=first, queries=counts, statistics=[PrefixSinkScores(5)], bins=bins)
    weights = torch.where(counts[:, None, :, None], oracle(q, k, v, mask=mask)[2], 0.0)
    visible = visible & counts[:, None, :, None]
    close(got.visible_queries, visible.sum(2).double())
    close(got.sink, torch.stack([weights[item, ..., begin] for item, begin in enumerate(first.tolist())]))
    want = torch.zeros(2, 6, 5, dtype=torch.float64)
    for item, begin in enumerate(first.tolist()):
        rows = slice(max(0, begin - nk + nq), max(0, begin + 5 - nk + nq))
        total, visible_queries = (x[item, :, rows, begin : begin + 5].sum(1) for x in (weights, visible))
        want[item] = total / visible_queries.clamp(min=1)
    close(got.prefix_sink_scores, want)
    small = got.thumbnail
    assert small is not None
    assert max(small.mean.shape[2:]) <= bins
    assert {small.query_bin & (small.query_bin - 1), small.key_bin & (small.key_bin - 1)} == {0}, "powers of two"
    assert -(-nk // (small.key_bin // 2 or 1)) > bins or small.key_bin == 1, "the least that does it"
    top, mean = pooled(weights, small.query_bin, small.key_bin)
    close(small.maximum, top)
    close(small.mean, mean)
    whole = Thumbnail.of_weights(weights, bins)
    assert (whole.query_bin, whole.key_bin) == (small.query_bin, small.key_bin)
    close(whole.maximum, top)
    close(whole.mean, mean)


@pytest.mark.usefixtures("tile4")
def test_a_masked_score_that_overflows_changes_no_row_that_cannot_see_it() -> None:
    """Masked scores are removed by a minimum where all products are bounded; the NaN of this one would survive it."""
    q, k, v = triple(nq=11, nk=11, dtype=torch.float32)
    q[:, :, 4] = 1e20
    clean = k.clone()
    k[:, :, 6] = torch.tensor([1e20, -1e20, 0])  # inf − inf for query 4, which may not attend to key 6
    for rows in (
        lambda k: attend(q, k, v, mask=Causal(), kernel="tiled")[:, :, :6],
        lambda k: qkv.measure(q, k, mask=Causal()).entropy[:, :, :6],
    ):
        torch.testing.assert_close(rows(k), rows(clean))


@pytest.mark.usefixtures("tile4")
def test_nan_is_ignored_in_uncounted_queries_and_kept_in_counted_ones() -> None:
    q, k, _ = triple()
    counts = torch.ones(2, 11).bool()
    counts[0, 7:] = False
    clean = qkv.measure(q, k, queries=counts)
    q[0, :, 7:] = math.nan
    compare(qkv.measure(q, k, queries=counts), tensors_of(clean))
    spoilt = qkv.measure(q, k)
    for name in ("entropy", "effective_keys", "distance", "spread", "sink", "lse"):
        assert getattr(spoilt, name)[0, :, 7:].isnan().all(), name
        assert not getattr(spoilt, name)[0, :, :7].isnan().any(), name


Q, K, _ = triple()
WIDE = torch.ones(40, 40, dtype=torch.bool)
REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("mass", None, lambda: qkv.measure(Q, K, mass={"near": torch.ones(11, 13).bool()})),
    ("lengths", None, lambda: qkv.measure(Q, K, mass={"near": Padding([14])})),
    ("queries", None, lambda: qkv.measure(Q, K, queries=torch.ones(2, 11))),
    ("queries", None, lambda: qkv.measure(Q, K, queries=torch.ones(2, 13).bool())),
    ("first", None, lambda: qkv.measure(Q, K, first=13)),
    ("normalizer", None, lambda: qkv.measure(Q, K, normalizer=normalizers.Identity())),  # negative weights
    ("mask", "40", lambda: qkv.measure(Q, K, statistics=[Mass("large", Dense(WIDE))])),
    ("mask", None, lambda: Mass("tensor", WIDE)),  # type: ignore[arg-type]
    ("statistics", "one Local object", lambda: qkv.measure(Q, K, statistics=Local())),  # type: ignore[arg-type]
]

test_measure_rejects_masks_queries_and_statistics_that_do_not_fit = refusals(REFUSALS)


# --- large numbers, memory and resolution -----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0.0, math.nan])
def test_scores_that_rise_from_tile_to_tile_do_not_overflow(tile: int, padding: float) -> None:
    """Each tile is 100 nats or more above the one before: its squares overflow relative to the first."""
    n = 12 * tile
    q, k = torch.ones(1, 1, n, 1), (100.0 * (torch.arange(n) // tile)).view(1, 1, n, 1)
    q[:, :, -1], queries = padding, torch.arange(n)[None] < n - 1
    got = qkv.measure(q, k, score=Dot(1.0), queries=queries)
    for name, want in {"entropy": math.log(tile), "effective_keys": float(tile), "lse": 1100 + math.log(tile)}.items():
        torch.testing.assert_close(getattr(got, name)[..., :-1], torch.full((1, 1, n - 1), want), rtol=1e-5, atol=1e-5)
    assert got.entropy[..., -1] == 0


@pytest.mark.parametrize("mask", [Window(64), Causal()], ids=str)
def test_linear_memory(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, panel=2**17)
    n = 2048
    q, k, _ = triple(1, 2, 1, n, n, 8, 8, dtype=torch.float32)
    largest = largest_tensor(lambda: qkv.measure(q, k, mask=mask, mass={"near": Window(16)}))
    assert largest <= 4 * 2 * 256 * 256 < n * n / 4


def test_spread_has_the_documented_resolution() -> None:
    """In float32 the squared spread is exact to 0.002, plus rounding: of two keys, 5,000 tokens away, and of many."""
    n = 6000
    for gap, share in ((1, 0.5), (1, 1e-2), (200, 0.5), (3000, 0.5), (0, 1.0)):
        scores = torch.full((n,), -1e4)
        scores[5000], scores[5000 - gap] = math.log(share), math.log(1 - share) if gap else 0.0
        got = qkv.measure(torch.ones(1, 1, 1, 1), scores[None, None, :, None], score=Dot(1.0))
        variance = share * (1 - share) * gap**2
        assert abs(got.spread.item() ** 2 - variance) < max(0.002, 8e-7 * gap**2), (gap, share)
    q, k, _ = triple(1, 2, 1, 17, 3000, 8, 8, dtype=torch.float32)
    for sharp in (0.3, 5.0):
        got, want = (qkv.measure(x, y, score=Dot(sharp)) for x, y in ((q, k), (q.double(), k.double())))
        square = want.spread.square()
        rounding = 2 * 1.2e-7 * want.lse.abs().max()  # of a score, and so the relative rounding of its weight
        assert ((got.spread.double().square() - square).abs() < 0.002 + rounding * square).all()


# --- objects of statistics --------------------------------------------------------------------------------------------

OBJECTS = {
    "causal": (13, 13, Causal(), torch.float64),
    "window": (11, 17, Window(4) & Causal(), torch.float32),
    "tiles": (300, 270, None, torch.float32),
    "holes": (17, 19, Dense(rand(2, 1, 17, 19) < -0.3), torch.float64),
}


@pytest.mark.parametrize(("nq", "nk", "mask", "dtype"), OBJECTS.values(), ids=OBJECTS)
def test_measure_agrees_with_the_statistic_objects(nq: int, nk: int, mask: Mask | None, dtype: torch.dtype) -> None:
    q, k = rand(2, 6, nq, 8, dtype=dtype), rand(2, 3, nk, 8, seed=1, dtype=dtype)
    counted = torch.ones(2, nq, dtype=torch.bool)
    counted[1, : nq // 3] = False
    mass = {s.name: s.mask for s in (Local(3), Streaming())}
    statistics, first = (*BUILT_IN.values(), Local(3), Streaming()), torch.tensor([3, 0])
    result = qkv.measure(q, k, mask=mask, first=first, queries=counted, mass=mass, statistics=statistics)
    for name in BUILT_IN:
        fused, by_object = getattr(result, field_of(name)), result.own[name]
        size = 1e-9 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(fused, by_object, rtol=size / 10, atol=size, msg=name)
    for name, inside in result.mass.items():
        torch.testing.assert_close(inside, result.own[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("tile4")
@pytest.mark.parametrize("normalizer", [
    normalizers.Softmax(sink=3.0, temperature=2.0), normalizers.Sigmoid(), normalizers.ReLU(), normalizers.Sparsemax(),
    normalizers.Hard(), normalizers.ReLU(divide="sum"), normalizers.Sigmoid(divide="sum"),
    normalizers.Softmax(sink=1e31),  # beside it all weights are 0
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_extreme_scores_of_each_query(normalizer: Any, dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in triple(nq=11, nk=13)[:2])
    counted = torch.arange(11).expand(2, -1) != 4
    mask, bias = Causal() & ~masks.Prefix(3), biases.ALiBi(torch.rand(q.shape[1]).to(q))
    found = qkv.measure(q, k, mask=mask, bias=bias, normalizer=normalizer, queries=counted, statistics=[Extremes()])
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[3] ** 0.5
    distance = (torch.arange(11)[:, None] + 2 - torch.arange(13)).to(q)
    scores = (scores - bias.slopes.to(q)[:, None, None] * distance) / normalizer.temperature
    scores = scores.masked_fill(~(mask.dense(11, 13) & counted[:, None, :, None]), -torch.inf)
    if normalizer.divide == "sum" and isinstance(normalizer, normalizers.Sigmoid):
        assert found.max_logit is found.min_logit is found.argmax is None  # its weights are the softmax of logarithms
    else:
        extremes_equal(found, scores)


def extremes_equal(found: Statistics, scores: Tensor, *, eps: float = 64) -> None:
    """Compare with final scores, −∞ where masked; of equal scores, the first has to be found."""
    empty = scores.amax(-1) == -torch.inf
    close(found.max_logit, scores.amax(-1), eps=eps)
    close(found.min_logit, scores.masked_fill(scores == -torch.inf, torch.inf).amin(-1), eps=eps)
    first = (scores >= scores.amax(-1, keepdim=True) - 1e-5).int().argmax(-1)  # rounding of equal scores may differ
    assert torch.equal(found.argmax, first.masked_fill(empty, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [
    None, Causal(), Window(5), Padding([900, 400]), Dense(rand(2, 1, 70, 1300)[..., :1300] < -0.3),
], ids=["full", "causal", "window", "padding", "dense"])  # fmt: skip
@pytest.mark.parametrize("step", ["product", "cap", "bias"])
def test_the_first_of_equal_largest_scores_in_many_tiles(step: str, mask: Mask | None, dtype: torch.dtype) -> None:
    """Keys repeat, so each largest score occurs twice; NaN in keys that nobody sees; decoding and blocks of queries."""
    q, k = rand(2, 4, 70, 16).to(dtype), rand(2, 2, 650, 16, seed=1).to(dtype).repeat(1, 1, 2, 1)
    table = rand(1, 1, 70, 650, seed=2).float().repeat(1, 1, 1, 2)
    table[..., ::7] = -torch.inf
    bias = {"product": None, "cap": biases.SoftCap(2.0), "bias": biases.TensorBias(table)}[step]
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    scores = 2 * (scores / 2).tanh() if step == "cap" else scores + table if step == "bias" else scores
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(70, 1300, batch=2, heads=4), -torch.inf)
    if isinstance(mask, Padding):
        k[1, :, 400:] = torch.nan
    for some in (slice(None), slice(68, 70)):
        part = mask.dense(70, 1300, batch=2)[:, :, some] if isinstance(mask, Dense) else mask
        of_bias = biases.TensorBias(table[:, :, some]) if step == "bias" else bias
        found = qkv.measure(q[:, :, some], k, mask=part, bias=of_bias, statistics=[Extremes()])
        extremes_equal(found, scores[:, :, some], eps=2**10)


def test_the_argmax_is_the_choice_of_hard_attention() -> None:
    q, k, _ = triple(nq=40, nk=70)
    found = qkv.measure(q, k, mask=Causal(), bias=biases.ALiBi(), statistics=[Extremes()])
    assert torch.equal(found.argmax, qkv.choose_keys(q, k, mask=Causal(), bias=biases.ALiBi(), sample=False).index)


# --- of weights -------------------------------------------------------------------------------------------------------

UNKNOWN = {"lse", "max_logit", "min_logit", "argmax", "sink_mass"}  # weights alone do not determine them


def same(found: Any, expected: Any) -> None:
    """All fields that weights determine are equal."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif dataclasses.is_dataclass(expected):
        for name in (field.name for field in dataclasses.fields(expected)):
            same(getattr(found, name), None if name in UNKNOWN else getattr(expected, name))
    else:
        assert found == expected


CALLS: dict[str, tuple[int, int, Mask | None, normalizers.Normalizer]] = {
    "causal, several tiles": (300, 300, Causal(), Softmax()),
    "window with a learned sink": (37, 37, Window(5), Softmax(sink=1.0)),
    "cross-attention": (7, 19, None, Softmax()),
    "rows without keys": (9, 9, Padding([6, 3], "left") & Causal(), Softmax()),
    "sigmoid": (12, 15, None, normalizers.Sigmoid(bias=0.0)),
}


@pytest.mark.parametrize(("nq", "nk", "mask", "normalizer"), CALLS.values(), ids=CALLS)
def test_statistics_of_weights_equal_those_of_the_queries_and_keys(
    nq: int, nk: int, mask: Mask | None, normalizer: normalizers.Normalizer
) -> None:
    q, k, _ = triple(2, 3, 3, nq, nk, 8)
    weights = qkv.attend(q, k, k, return_weights=True, mask=mask, normalizer=normalizer)[1]
    options: dict[str, Any] = {
        "mass": {"near": Window(3)}, "bins": 5,
        "statistics": [BUILT_IN["entropy"], Streaming(2, 3), PrefixSinkScores(4)],
    }  # fmt: skip
    unnormalized = isinstance(normalizer, normalizers.Sigmoid)
    found = measure_weights(weights, mask, unnormalized=unnormalized, **options)
    same(found, qkv.measure(q, k, mask=mask, normalizer=normalizer, **options))


def test_queries_that_do_not_count_may_hold_nan() -> None:
    q, queries = rand(2, 1, 6, 4), torch.arange(6) < torch.tensor([[6], [4]])
    weights = qkv.attend(q, q, q, mask=Causal(), return_weights=True)[1]
    weights[1, :, 4:] = float("nan")
    found = measure_weights(weights, Causal(), queries=queries)
    same(found, qkv.measure(q, q, mask=Causal(), queries=queries))


def test_results_have_the_form_of_the_weights() -> None:
    weights = rand(3, 5, 7).softmax(-1)
    assert measure_weights(weights).received.shape == (3, 7)
    assert isinstance(measure_weights(weights[0].numpy()).entropy, np.ndarray)
    assert measure_weights(weights[0].tolist()).entropy.shape == (5,)
    half = measure_weights(weights.bfloat16().requires_grad_())
    assert half.entropy.dtype == torch.float32
    assert not half.entropy.requires_grad


REFUSED: list[tuple[Any, Mask | None]] = [
    (rand(4, 4), None),  # scores
    (rand(4, 4).abs() + 1, None),  # positive scores
    (torch.full((4, 4), float("nan")), None),
    (torch.full((4, 4), 0.25), Causal()),  # weight on masked pairs
    (torch.full((300, 300), 1 / 300), Window(4)),  # in tiles that are empty
    (torch.ones(4), None),
    (torch.eye(4).int(), None),
    (torch.eye(4).to_sparse(), None),
    (torch.eye(4, device="meta"), None),
    ((torch.ones(1, 2, 4, 4),) * 3, None),  # all layers at once
]

test_arguments_that_are_not_weights_are_refused = refusals([
    ("w", lambda w=w, mask=mask: measure_weights(w, mask)) for w, mask in REFUSED
])  # fmt: skip


@pytest.mark.slow
def test_no_copy_of_the_weights_is_made() -> None:
    w = torch.full((1, 4, 1024, 1024), 1 / 1024)  # 16 MiB
    measure_weights(w)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        measure_weights(w)
    assert 0 < max(event.cpu_memory_usage for event in profiled.events()) <= w.nbytes / 8
