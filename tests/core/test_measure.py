"""Exact statistics: against materialised weights, against identities that do not use the sweep, and invariants."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qkv
from conftest import (
    MASKS,
    close,
    fits,
    largest_tensor,
    mask_trees,
    oracle,
    rand,
    refused,
    set_sizes,
    set_tile,
    triple,
    unchecked,
)
from qkv import attend, biases, masks, normalizers, reference
from qkv._engine.call import Call
from qkv.masks import Causal, Dense, Mask, Padding, Predicate, Window
from qkv.normalizers import Softmax
from qkv.scores import Additive, Dot
from qkv.statistics.measure import Statistics, sweep

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}
TESTED_SEPARATELY = (
    "mass",
    "own",
    "sink_mass",
    "visible",
    "visible_queries",
    "prefix_sink_scores",
    "thumbnail",
    "first_contribution",
)
TENSORS = [f.name for f in dataclasses.fields(Statistics) if f.name not in TESTED_SEPARATELY]


def expected_statistics(weights: Tensor, lse: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Every statistic of materialised weights (b, h, nq, nk)."""
    a = weights.double().numpy()
    nq, nk = a.shape[2:]
    stats = reference.statistics(a)
    out = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}

    def at(shift: int) -> np.ndarray:
        near = np.zeros(a.shape[:3])
        for i in range(nq):
            j = i + nk - nq + shift
            if 0 <= j < nk:
                near[:, :, i] = a[:, :, i, j]
        return near

    out |= {
        "row_sum": a.sum(-1),
        "sink": a[..., first],
        "self_": at(0),
        "previous": at(-1),
        "next_": at(1),
        "lse": lse.double().numpy(),
    }
    assert sorted(out) == sorted(TENSORS)
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


# --- against materialised weights -------------------------------------------------------------------------------------


@functools.cache
def small(name: str, heads: str, nq: int, nk: int) -> tuple:
    h, hkv = HEADS[heads]
    q, k, v = triple(h=h, hkv=hkv, nq=nq, nk=nk)
    mask = MASKS[name](nq, nk, 2, h)
    _, lse, weights = oracle(q, k, v, mask=mask)
    return q, k, mask, expected_statistics(weights, lse)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("name", "nq", "nk"), [(name, *n) for name in MASKS for n in [(11, 13), (13, 7), (1, 13)] if fits(name, *n)]
)
def test_statistics_match_dense_weights_for_every_mask(
    heads: str, name: str, nq: int, nk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, mask, want = small(name, heads, nq, nk)
    got = qkv.measure(q, k, mask=mask)
    compare(got, want)
    visible = torch.ones(1, 1, nq, nk) if mask is None else mask.dense(nq, nk, batch=2, heads=HEADS[heads][0])
    assert torch.equal(got.visible, visible.sum(-1).to(got.visible).expand_as(got.visible))
    for tile, together in ((4, 1), (8, 4)):
        set_tile(monkeypatch, tile)
        set_sizes(monkeypatch, heads=together)
        tiles = qkv.measure(q, k, mask=mask)
        compare(tiles, want)
        assert torch.equal(tiles.visible, got.visible)


@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "nothing", "dense of heads"])
@pytest.mark.parametrize("sink", [None, 0.7, "each head", 1e4])
@pytest.mark.parametrize(
    "bias",
    [
        None,
        biases.SoftCap(0.8),
        biases.Dense(rand(6, 11, 13, seed=8)),
        biases.Dense(torch.where(rand(11, 13, seed=8) > 0, -torch.inf, 0.0)),
        (biases.Dense(rand(1, 13, seed=8)), biases.SoftCap(0.8)),
    ],
    ids=["none", "cap", "dense", "hides", "both"],
)
@pytest.mark.usefixtures("tile4")
def test_statistics_match_dense_weights_with_biases_sinks_and_temperatures(
    name: str, sink: float | str | None, bias: object
) -> None:
    q, k, v = triple()
    sink = rand(6, seed=3) if sink == "each head" else sink
    arguments = {"mask": MASKS[name](11, 13, 2, 6), "bias": bias, "score": Dot(0.9), "normalizer": Softmax(0.7, sink)}
    _, lse, weights = oracle(q, k, v, **arguments)
    got = qkv.measure(q, k, **arguments)
    compare(got, expected_statistics(weights, lse))
    if sink is None:
        assert got.sink_mass is None
    else:
        mass = 1 - weights.sum(-1)
        close(got.sink_mass, torch.where(lse == -torch.inf, 0.0, mass))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "padding, window"])
@pytest.mark.usefixtures("tile4")
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    """Statistics of half-precision inputs are float32; the lse of torch's half kernels is exact to about 4e-5."""
    q, k, v = triple(nq=37, nk=41, h=2, hkv=1, dtype=dtype)
    mask = MASKS[name](37, 41, 2, 2)
    _, lse, weights = oracle(q, k, v, mask=mask)
    got = qkv.measure(q, k, mask=mask)
    assert all(getattr(got, name).dtype == torch.float32 for name in TENSORS)
    compare(got, expected_statistics(weights, lse), eps=64 if dtype == torch.float32 else 1024)


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (63, 63), (65, 65), (65, 257), (257, 65), (300, 300)])
def test_default_tile_sizes(nq: int, nk: int) -> None:
    q, k, v = triple(b=1, h=2, hkv=1, nq=nq, nk=nk)
    for mask in (None, Causal(), Window(70, ahead=3)):
        _, lse, weights = attend(q, k, v, mask=mask, kernel="eager", return_lse=True, return_weights=True)
        compare(qkv.measure(q, k, mask=mask), expected_statistics(weights, lse), eps=256)


def test_rows_longer_than_one_batch_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row sums are flushed every 64 tiles."""
    set_tile(monkeypatch, 2)
    q, k, v = triple(b=1, h=1, hkv=1, nq=5, nk=331)
    _, lse, weights = attend(q, k, v, kernel="eager", return_lse=True, return_weights=True)
    compare(qkv.measure(q, k), expected_statistics(weights, lse), eps=256)
    mass = qkv.measure(q, k, mass={"all": Window(999, ahead=999)}).mass["all"]
    close(mass, torch.ones(1, 1, 5))


@given(st.data())
def test_random_masks_match_dense_weights(data: st.DataObject) -> None:
    b, hkv, group, nq, nk = (data.draw(st.integers(1, n)) for n in (2, 2, 3, 9, 9))
    heads = hkv * group
    q, k, v = triple(b, heads, hkv, nq, nk, seed=data.draw(st.integers(0, 99)))
    tree = mask_trees(nq, nk, b, heads)
    mask, part = data.draw(tree), data.draw(tree)
    sink = data.draw(st.sampled_from([None, 0.3]))
    _, lse, weights = oracle(q, k, v, mask=mask, normalizer=Softmax(sink=sink))
    first = data.draw(st.integers(0, nk - 1))
    with pytest.MonkeyPatch.context() as patch:
        set_tile(patch, data.draw(st.sampled_from([2, 4])))
        set_sizes(patch, heads=data.draw(st.sampled_from([1, 4])))
        got = qkv.measure(q, k, mask=mask, normalizer=Softmax(sink=sink), mass={"part": part}, first=first)
    compare(got, expected_statistics(weights, lse, first))
    inside = part.dense(nq, nk, batch=b, heads=heads)
    close(got.mass["part"], (weights * inside).sum(-1))


@pytest.mark.parametrize("name", ["none", "causal", "window", "padding", "dense of heads"])
@pytest.mark.usefixtures("tile4")
def test_threads_give_the_same_statistics(name: str) -> None:
    """Blocks of rows run in parallel; the number of threads is restored afterwards."""
    q, k, v = triple(nq=29, nk=31)
    mask = MASKS[name](29, 31, 2, 6)
    _, lse, weights = oracle(q, k, v, mask=mask)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for _ in range(3):
            got = qkv.measure(q, k, mask=mask, mass={"near": Window(2)})
            compare(got, expected_statistics(weights, lse))
            close(got.mass["near"], (weights * Window(2).dense(29, 31)).sum(-1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_statistics_computed_by_hand() -> None:
    """Four equal keys, causal."""
    q = k = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    got = qkv.measure(q, k, mask=Causal(), normalizer=Softmax(sink=0.0))

    def row(x: Tensor) -> list[float]:
        return x[0, 0].tolist()

    assert row(got.entropy) == pytest.approx([0, math.log(2), math.log(3), math.log(4)])
    assert row(got.effective_keys) == pytest.approx([1, 2, 3, 4])
    assert row(got.distance) == pytest.approx([0, 1 / 2, 1, 3 / 2])
    assert row(got.spread) == pytest.approx([0, 1 / 2, math.sqrt(2 / 3), math.sqrt(5 / 4)])
    assert row(got.sink) == row(got.self_) == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert row(got.previous) == pytest.approx([0, 1 / 3, 1 / 4, 1 / 5])
    assert row(got.next_) == [0, 0, 0, 0]
    assert row(got.received) == pytest.approx([77 / 60, 47 / 60, 27 / 60, 12 / 60])
    assert row(got.sink_mass) == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert row(got.lse) == pytest.approx([math.log(n) for n in (2, 3, 4, 5)])


@pytest.mark.parametrize("name", ["mask", "bias", "padded nan"])
@pytest.mark.usefixtures("tile4")
def test_masked_rows_and_padding_give_zeros_not_nan(name: str) -> None:
    """Rows without visible keys, biases of −inf, and NaN in padding give zeros."""
    q, k, _ = triple()
    mask, bias = Padding([9, 13], "left") & Causal(), None
    if name == "mask":
        mask = ~masks.Prefix(13) | (masks.Shifted(Causal(), -3) & masks.Prefix(6))
    if name == "bias":
        bias = biases.Dense(torch.where(torch.arange(13) % 3 == 0, -torch.inf, 0.0).double()[None])
    if name == "padded nan":
        k[0, :, :4] = math.nan
    got = qkv.measure(q, k, mask=mask, bias=bias, mass={"near": Window(2)})
    for field in TENSORS:
        x = getattr(got, field)
        assert not x.isnan().any(), field
        if field not in ("lse", "received"):
            assert (x[got.lse == -torch.inf] == 0).all(), field
    assert not got.mass["near"].isnan().any()


# --- arguments of measure ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tile4")
def test_masses_of_sub_masks() -> None:
    q, k, v = triple()
    arguments = {"mask": Causal(), "normalizer": Softmax(sink=rand(6))}
    parts: dict[str, Mask] = {
        "window": Window(3),
        "prefix": masks.Prefix(5),
        "chosen": Dense((torch.arange(13) % 3 == 0)[None]),
        "of heads": Dense(rand(6, 11, 13, seed=3) > 0),
        "of items": Padding([4, 9]),
        "every other": Predicate(lambda b, h, q, k: (q - k) % 2 == 0),
        "outside": ~Causal(),
    }
    weights = oracle(q, k, v, **arguments)[2]
    got = qkv.measure(q, k, **arguments, mass=parts)
    assert set(got.mass) == set(parts)
    for name, part in parts.items():
        close(got.mass[name], (weights * part.dense(11, 13, batch=2, heads=6)).sum(-1))
    assert (got.mass["outside"] == 0).all()


@pytest.mark.usefixtures("tile4")
def test_sink_uses_the_first_token_of_each_text() -> None:
    q, k, v = triple(nq=13, nk=13)
    mask = Padding([8, 13], "left") & Causal()
    weights = oracle(q, k, v, mask=mask)[2]
    got = qkv.measure(q, k, mask=mask, first=torch.tensor([5, 0])).sink
    close(got, torch.stack([weights[0, ..., 5], weights[1, ..., 0]]))
    close(qkv.measure(q, k, mask=mask, first=6).sink, weights[..., 6])


@pytest.mark.usefixtures("tile4")
def test_uncounted_queries_give_zeros() -> None:
    q, k, v = triple()
    arguments = {"mask": Causal(), "normalizer": Softmax(sink=0.4)}
    counts = rand(2, 11, seed=3) > 0
    _, lse, weights = oracle(q, k, v, **arguments)
    got = qkv.measure(q, k, **arguments, queries=counts, mass={"near": Window(2)})
    weights = torch.where(counts[:, None, :, None], weights, 0.0)
    compare(got, expected_statistics(weights, torch.where(counts[:, None], lse, -torch.inf)))
    for x in (got.sink_mass, got.mass["near"]):
        assert (x.masked_select(~counts[:, None]) == 0).all()
        assert (x.masked_select(counts[:, None]) > 0).all()


def pooled(weights: Tensor, query_bin: int, key_bin: int) -> tuple[Tensor, Tensor]:
    """Maxima and means over bins, bin by bin."""
    blocks = [list(part.split(key_bin, 3)) for part in weights.split(query_bin, 2)]
    top, mean = (
        torch.stack([torch.stack([how(x) for x in row], 2) for row in blocks], 2)
        for how in (lambda x: x.amax((2, 3)), lambda x: x.mean((2, 3)))
    )
    return top, mean


@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "left padding, causal", "dense of heads"])
@pytest.mark.parametrize(("nq", "nk"), [(11, 13), (13, 7), (13, 13)])
@pytest.mark.parametrize("bins", [1, 3, 40])
def test_visible_queries_prefix_scores_and_thumbnail(name: str, nq: int, nk: int, bins: int, tile4: None) -> None:
    if not fits(name, nq, nk):
        pytest.skip("no such mask at these lengths")
    h, hkv = HEADS["gqa"]
    q, k, v = triple(h=h, hkv=hkv, nq=nq, nk=nk)
    mask = MASKS[name](nq, nk, 2, h)
    visible = (
        torch.ones(2, h, nq, nk).bool() if mask is None else mask.dense(nq, nk, batch=2, heads=h).expand(2, h, -1, -1)
    )
    counts = rand(2, nq, seed=5) > -0.5
    first = torch.tensor([2, 0])
    got = qkv.measure(q, k, mask=mask, first=first, queries=counts, prefix_keys=5, bins=bins)
    weights = torch.where(counts[:, None, :, None], oracle(q, k, v, mask=mask)[2], 0.0)
    visible = visible & counts[:, None, :, None]
    close(got.visible_queries, visible.sum(2).double())
    want = torch.zeros(2, h, 5, dtype=torch.float64)
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


def test_prefix_sink_scores_equal_those_of_the_prefix_alone() -> None:
    q, k, _ = triple(nq=13, nk=13)
    whole = qkv.measure(q, k, mask=Causal(), prefix_keys=7).prefix_sink_scores
    alone = qkv.measure(q[:, :, :7], k[:, :, :7], mask=Causal())
    assert whole is not None
    close(whole, alone.received / alone.visible_queries)
    assert qkv.measure(q, k).prefix_sink_scores is None
    assert qkv.measure(q, k).thumbnail is None


@pytest.mark.usefixtures("tile4")
@pytest.mark.parametrize("kernel", ["tiled", "measure"])
def test_a_masked_score_that_overflows_changes_no_row_that_cannot_see_it(kernel: str) -> None:
    """Masked scores are removed by a minimum where all products are bounded; the NaN of this one would survive it."""
    q, k, v = triple(nq=11, nk=11, dtype=torch.float32)
    q[:, :, 4] = 1e20
    clean = k.clone()
    k[:, :, 6] = torch.tensor([1e20, -1e20, 0])  # inf − inf for query 4, which may not attend to key 6

    def rows(k: Tensor) -> Tensor:
        if kernel == "tiled":
            return attend(q, k, v, mask=Causal(), kernel="tiled")[:, :, :6]
        return qkv.measure(q, k, mask=Causal()).entropy[:, :, :6]

    torch.testing.assert_close(rows(k), rows(clean))


@pytest.mark.usefixtures("tile4")
def test_nan_is_ignored_in_uncounted_queries_and_kept_in_counted_ones() -> None:
    q, k, _ = triple()
    counts = torch.ones(2, 11).bool()
    counts[0, 7:] = False
    clean = qkv.measure(q, k, queries=counts)
    q[0, :, 7:] = math.nan
    compare(qkv.measure(q, k, queries=counts), {name: getattr(clean, name) for name in TENSORS})
    spoilt = qkv.measure(q, k)
    for name in ("entropy", "effective_keys", "distance", "spread", "sink", "lse"):
        assert getattr(spoilt, name)[0, :, 7:].isnan().all(), name
        assert not getattr(spoilt, name)[0, :, :7].isnan().any(), name


def test_sweep_accepts_a_known_lse() -> None:
    q, k, v = triple()
    call = Call.of(q, k, v, Causal())
    lse = attend(q, k, v, mask=Causal(), return_lse=True)[1]
    compare(sweep(call, lse), {name: getattr(qkv.measure(q, k, mask=Causal()), name) for name in TENSORS})


def test_statistics_ignore_values_and_are_detached_by_default() -> None:
    q, k, v = triple(grad=True)
    sink = rand(6).requires_grad_()
    for bias in (None, biases.SoftCap(1.0), biases.Dense(rand(11, 13).requires_grad_())):
        got = qkv.measure(q, k, v, bias=bias, normalizer=Softmax(sink=sink))
        assert not any(getattr(got, name).requires_grad for name in [*TENSORS, "sink_mass"])
        assert torch.equal(got.entropy, qkv.measure(q, k, bias=bias, normalizer=Softmax(sink=sink)).entropy)


@pytest.mark.usefixtures("tile4")
def test_statistics_do_not_depend_on_other_batch_items() -> None:
    q, k, _ = triple(b=3)
    lengths = [13, 5, 9]
    whole = qkv.measure(q, k, mask=Padding(lengths) & Causal())
    for i in range(3):
        alone = qkv.measure(q[i : i + 1], k[i : i + 1], mask=Padding(lengths[i : i + 1]) & Causal())
        compare(alone, {name: getattr(whole, name)[i : i + 1] for name in TENSORS})


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"mass": {"near": torch.ones(11, 13).bool()}}, "mass"),
        ({"mass": {"near": Padding([14])}}, "lengths"),
        ({"queries": torch.ones(2, 11)}, "queries"),
        ({"queries": torch.ones(2, 13).bool()}, "queries"),
    ],
)
def test_measure_rejects_masks_and_queries_that_do_not_fit(arguments: dict, argument: str) -> None:
    with unchecked(), refused(argument):
        qkv.measure(*triple()[:2], **arguments)


# --- identities: the same numbers without the sweep -------------------------------------------------------------------

IDENTITY_MASKS = ["none", "causal", "window", "padding", "sink and window", "dense of heads"]


@pytest.mark.parametrize("name", IDENTITY_MASKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.usefixtures("tile4")
def test_entropy_is_the_lse_minus_the_mean_score(name: str, heads: str) -> None:
    """E_i[s] = scale · q_i · (A K)_i: one pass with the keys as values."""
    h, hkv = HEADS[heads]
    q, k, _ = triple(h=h, hkv=hkv)
    mask = MASKS[name](11, 13, 2, h)
    mean, lse = attend(q, k, k, mask=mask, kernel="flash", return_lse=True)
    want = torch.where(lse == -torch.inf, 0.0, lse - (q * mean).sum(-1) / math.sqrt(3))
    close(qkv.measure(q, k, mask=mask).entropy, want)


@pytest.mark.parametrize("name", ["none", "causal", "dense of heads"])
@pytest.mark.usefixtures("tile4")
def test_received_is_the_transposed_pass(name: str) -> None:
    """Swap queries and keys and add a bias of −lse: the exponential of the lse of that pass. Time is reversed."""
    n, h = 11, 3
    q, k, v = triple(h=h, hkv=h, nq=n, nk=n)
    mask = MASKS[name](n, n, 2, h)
    lse = attend(q, k, v, mask=mask, return_lse=True)[1]
    bias = biases.Dense(-lse[:, :, None].flip(3))
    if name == "dense of heads":
        mask = Dense(mask.tensor.transpose(2, 3).flip(2, 3))
    _, back = attend(k.flip(2), q.flip(2), q.flip(2), mask=mask, bias=bias, kernel="flash", return_lse=True)
    mask = MASKS[name](n, n, 2, h)
    close(qkv.measure(q, k, mask=mask).received, back.flip(2).exp())


@pytest.mark.parametrize("name", IDENTITY_MASKS)
@pytest.mark.usefixtures("tile4")
def test_effective_keys_from_a_pass_at_half_the_temperature(name: str) -> None:
    """The Rényi-2 entropy is 2·lse(s) − lse(2s)."""
    q, k, v = triple()
    mask = MASKS[name](11, 13, 2, 6)
    lse = attend(q, k, v, mask=mask, return_lse=True)[1]
    twice = attend(q, k, v, mask=mask, normalizer=Softmax(0.5), return_lse=True)[1]
    want = torch.where(lse == -torch.inf, 0.0, (2 * lse - twice).exp())
    close(qkv.measure(q, k, mask=mask).effective_keys, want)


@pytest.mark.parametrize("part", [Window(2), masks.Prefix(4), masks.Prefix(1) | Window(3), ~Window(2)], ids=str)
@pytest.mark.usefixtures("tile4")
def test_a_mass_is_a_ratio_of_two_passes(part: Mask) -> None:
    """exp(lse over M′ − lse over M), for M′ inside M."""
    q, k, v = triple()
    inside, whole = (attend(q, k, v, mask=m, return_lse=True)[1] for m in (part & Causal(), Causal()))
    close(qkv.measure(q, k, mask=Causal(), mass={"part": part}).mass["part"], (inside - whole).exp())


@pytest.mark.usefixtures("tile4")
def test_weights_on_single_keys_from_score_and_lse() -> None:
    """exp(s_ij − lse_i) for the own, previous and first key."""
    q, k, v = triple()
    lse = attend(q, k, v, mask=Causal(), return_lse=True)[1]
    keys = k.repeat_interleave(3, 1)
    got = qkv.measure(q, k, mask=Causal())
    self_ = ((q * keys[:, :, 2:]).sum(-1) / math.sqrt(3) - lse).exp()
    before = ((q * keys[:, :, 1:12]).sum(-1) / math.sqrt(3) - lse).exp()
    first = ((q * keys[:, :, :1]).sum(-1) / math.sqrt(3) - lse).exp()
    close(got.self_, self_)
    close(got.previous, before)
    close(got.sink, first)


@pytest.mark.usefixtures("tile4")
def test_received_sums_to_the_mass_on_keys() -> None:
    q, k, _ = triple()
    got = qkv.measure(q, k, mask=Window(4), normalizer=Softmax(sink=0.3))
    close(got.received.sum(-1), (1 - got.sink_mass).sum(-1), eps=256)
    assert (got.entropy <= math.log(4) + 1e-12).all()
    assert (got.effective_keys <= 4 + 1e-12).all()
    assert (got.effective_keys >= 1 - 1e-12).all()
    assert (got.effective_keys.log() <= got.entropy + 1e-12).all()  # Rényi entropies decrease with their order


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


# --- memory and resolution --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Window(64), Causal()], ids=str)
def test_linear_memory(mask: Mask) -> None:
    n = 4096
    q, k, _ = triple(1, 2, 1, n, n, 8, 8, dtype=torch.float32)
    largest = largest_tensor(lambda: qkv.measure(q, k, mask=mask, mass={"near": Window(16)}))
    assert largest <= 4 * 2 * 256 * 256 < n * n / 16


def test_spread_has_the_documented_resolution() -> None:
    """Two keys share the weight, 5,000 tokens from the start: in float32 the squared spread is exact to 0.002."""
    n = 6000
    for gap, share in ((1, 0.5), (1, 1e-2), (200, 0.5), (3000, 0.5), (0, 1.0)):
        scores = torch.full((n,), -1e4)
        scores[5000], scores[5000 - gap] = math.log(share), math.log(1 - share) if gap else 0.0
        got = qkv.measure(torch.ones(1, 1, 1, 1), scores[None, None, :, None], score=Dot(1.0))
        variance = share * (1 - share) * gap**2
        assert abs(got.spread.item() ** 2 - variance) < max(0.002, 8e-7 * gap**2), (gap, share)


@pytest.mark.parametrize("n", [300, 3000])
def test_spread_in_float32_is_close_to_float64(n: int) -> None:
    """The squared spread differs by at most the documented 0.002, plus rounding."""
    q, k, _ = triple(1, 2, 1, 17, n, 8, 8, dtype=torch.float32)
    for sharp in (0.3, 5.0):
        got, want = (qkv.measure(x, y, score=Dot(sharp)) for x, y in ((q, k), (q.double(), k.double())))
        square = want.spread.square()
        rounding = 2 * 1.2e-7 * want.lse.abs().max()  # of a score, and so the relative rounding of its weight
        assert ((got.spread.double().square() - square).abs() < 0.002 + rounding * square).all()


def test_repr_shows_the_sizes() -> None:
    q, k, _ = triple(2, 6, 3, 5, 7, 8, 8)
    assert repr(qkv.measure(q, k)) == "Statistics(batch=2, heads=6, queries=5, keys=7)"


def test_received_of_many_queries_adds_up() -> None:
    """4096 equal queries and keys: every key receives exactly 1."""
    n = 4096
    q = torch.zeros(1, 1, n, 1)
    got = qkv.measure(q, q)
    close(got.received, torch.ones(1, 1, n), eps=8)
    close(got.entropy, torch.full((1, 1, n), math.log(n)), eps=8)


# --- other normalizers and scores -------------------------------------------------------------------------------------

NORMALIZERS = {
    "sigmoid": normalizers.Sigmoid(),
    "sigmoid of heads": normalizers.Sigmoid(rand(6, seed=3)),
    "sigmoid over the sum": normalizers.Sigmoid(divide="sum"),
    "elu": normalizers.EluPlusOne(),
    "elu over the sum": normalizers.EluPlusOne("sum"),
    "relu": normalizers.ReLU(),
    "relu over the sum": normalizers.ReLU("sum"),
    "entmax": normalizers.Entmax(1.5, temperature=0.7),
    "sparsemax": normalizers.Sparsemax(),
    "hard": normalizers.Hard(),
    "key": Softmax(key=rand(6, 3, seed=4)),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("score", [None, Additive(rand(6, 4), rand(4, 3), rand(4, 3))], ids=["dot", "additive"])
@pytest.mark.parametrize("mask", ["causal", "random bigbird", "padding"])
@pytest.mark.usefixtures("tile4")
def test_statistics_match_dense_weights_for_every_normalizer(name: str, score: Additive | None, mask: str) -> None:
    q, k, v = triple(nq=11, nk=13)
    arguments = {"mask": MASKS[mask](11, 13, 2, 6), "normalizer": NORMALIZERS[name], "score": score}
    _, lse, weights = oracle(q, k, v, **arguments)
    got = qkv.measure(q, k, **arguments, first=2)
    if lse is None:
        assert got.lse is None
    else:
        close(got.lse, lse)
    want = expected_statistics(weights, torch.zeros(2, 6, 11), first=2)
    del want["lse"]
    compare(got, want)


def test_uncounted_queries_give_zeros_with_sigmoid() -> None:
    q, k, _ = triple(nq=11, nk=11)
    counted = torch.arange(11) < torch.tensor([[11], [7]])
    arguments = {"mask": Causal(), "normalizer": normalizers.Sigmoid()}
    got, every = qkv.measure(q, k, **arguments, queries=counted), qkv.measure(q, k, **arguments)
    close(got.entropy[0], every.entropy[0])
    assert (got.entropy[1, :, 7:] == 0).all()
    weights = attend(q, k, k, **arguments, return_weights=True)[1]
    close(got.received, (weights * counted[:, None, :, None]).sum(2), eps=640)


def test_negative_weights_have_no_entropy() -> None:
    q, k, _ = triple()
    with refused("normalizer", match="negative weights"):
        qkv.measure(q, k, normalizer=normalizers.Identity())
