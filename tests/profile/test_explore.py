"""Weights on demand: they equal the model's own weights, tiles equal weights pooled by loops, and the LRU cache."""

from __future__ import annotations

import doctest
import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_maps import by_loops
from torch import Tensor, nn

import qkv
from conftest import MASKS, largest_tensor, oracle, rand, refused, set_sizes, triple
from hf_models import build, inputs
from qkv import biases, masks, normalizers
from qkv._engine.call import Call, as_biases
from qkv.models import load
from qkv.models.checkpoint import folder_of
from qkv.profiler.explore import explorer as explore
from qkv.profiler.explore import pyramid
from qkv.profiler.explore.explorer import CacheBudget, Cancelled, Explorer
from qkv.profiler.explore.pyramid import Pyramid, SingleFlightCache, new_tile_cache
from qkv.scores import Additive
from qkv.statistics import maps
from qkv.statistics.measure import row_state

SHORT, LONG = "def f(x):", "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 × 4 pixels; zooms with more than 256 pixels are computed from weights, in smaller pieces."""
    monkeypatch.setattr(pyramid, "TILE", 4)
    monkeypatch.setattr(pyramid, "BASE_PIXELS", 256)
    set_sizes(monkeypatch, picture=(3, 5))


def tiles_of(pyramid_: Pyramid, zoom: int) -> Iterator[tuple[int, int, maps.Picture | None]]:
    step = pyramid.TILE * 2 ** (pyramid_.deepest - zoom)
    for i in range(-(-pyramid_.lengths[0] // step)):
        for j in range(-(-pyramid_.lengths[1] // step)):
            yield i, j, pyramid_.tile(zoom, i, j)


def check_pyramid(made: Pyramid, weights: Tensor, seen: Tensor, eps: float = 1e-12) -> None:
    """Every tile of every zoom against dense weights of the rectangle it shows, pooled by loops."""
    for zoom in range(made.deepest + 1):
        step = 2 ** (made.deepest - zoom)
        rows, columns = ([*range(0, n, step), n] for n in made.lengths)
        want = by_loops(weights, seen, rows, columns)
        for i, j, got in tiles_of(made, zoom):
            inside = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
            if got is None:
                assert want[2][inside].max() == 0
                continue
            for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
                np.testing.assert_allclose(getattr(got, name), value[inside], rtol=eps, atol=eps, err_msg=name)
            assert [x - made.starts[0] for x in got.row_edges.tolist()] == rows[4 * i : 4 * i + 5]
            assert [x - made.starts[1] for x in got.column_edges.tolist()] == columns[4 * j : 4 * j + 5]


CALLS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "causal": ({"mask": masks.Causal()}, {"nq": 37, "nk": 37}),
    "window": ({"mask": masks.Window(5)}, {"nq": 41, "nk": 41}),
    "everything": ({}, {"nq": 18, "nk": 67}),
    "cross, padded": ({"mask": masks.Padding([30, 21])}, {"nq": 45, "nk": 34}),
    "more queries": ({"mask": masks.Causal()}, {"nq": 35, "nk": 20}),
    "a batch padded": ({"mask": MASKS["padding, window"](29, 29, 2, 6)}, {"nq": 29, "nk": 29}),
    "of heads": ({"mask": MASKS["dense of heads"](21, 33, 2, 6)}, {"nq": 21, "nk": 33}),
    "pair by pair": ({"mask": MASKS["predicate"](33, 21, 2, 6)}, {"nq": 33, "nk": 21}),
    "a learned sink": (
        {"mask": masks.Causal(), "normalizer": normalizers.Softmax(sink=rand(6, seed=3))},
        {"nq": 31, "nk": 31},
    ),
    "sigmoid": ({"mask": masks.Causal(), "normalizer": normalizers.Sigmoid()}, {"nq": 31, "nk": 31}),
    "divided": ({"mask": masks.Causal(), "normalizer": normalizers.EluPlusOne()}, {"nq": 31, "nk": 31}),
    "negative": ({"mask": masks.Prefix(6), "normalizer": normalizers.Identity()}, {"nq": 19, "nk": 31}),
    "thresholds": ({"normalizer": normalizers.Entmax(1.5)}, {"nq": 19, "nk": 31}),
    "hard": ({"mask": masks.Causal(), "normalizer": normalizers.Hard()}, {"nq": 31, "nk": 31}),
    "biased": ({"mask": masks.Causal(), "bias": (biases.ALiBi(), biases.SoftCap(0.8))}, {"nq": 31, "nk": 37}),
    "dense bias": ({"bias": biases.Dense(rand(2, 6, 23, 29, seed=8))}, {"nq": 23, "nk": 29}),
    "relative": ({"bias": biases.RelativePosition(rand(5, 3, seed=4))}, {"nq": 23, "nk": 29}),
    "additive": ({"score": Additive(rand(7, seed=1), rand(7, 3, seed=2), rand(7, 3, seed=3))}, {"nq": 19, "nk": 23}),
}


def dense_call(name: str) -> tuple[Call, Tensor, Tensor]:
    """A call in float64, its weights by definition, and which pairs are visible."""
    asked, shapes = CALLS[name]
    q, k, v = triple(**shapes)
    _, _, weights = oracle(q, k, v, **asked)
    given = dict(asked)
    given["biases"] = as_biases(given.pop("bias", None))
    mask = asked.get("mask", ~masks.Prefix(0))
    seen = mask.dense(q.shape[2], k.shape[2], batch=2, heads=6).expand(weights.shape)
    return Call.of(q, k, v, **given), weights, seen


# --- the pyramid and rectangles of a call -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_tiles_of_every_zoom_equal_pooled_weights(name: str, small_tiles: None) -> None:
    call, weights, seen = dense_call(name)
    rows, kept = row_state(call), new_tile_cache(10**6)
    check_pyramid(Pyramid(call, rows, 1, 4, kept, "all"), weights[1, 4], seen[1, 4])
    part = (slice(3, 17), slice(2, 19))
    inside = Pyramid(call, rows, 0, 1, kept, "part", queries=part[0], keys=part[1])
    check_pyramid(inside, weights[0, 1][part], seen[0, 1][part])


@pytest.mark.parametrize("name", CALLS)
def test_rectangles_equal_dense_weights(name: str) -> None:
    call, weights, _ = dense_call(name)
    rows, (n_queries, n_keys) = row_state(call), weights.shape[2:]
    for queries, keys in (
        (slice(7, 8), slice(0, n_keys)),
        (slice(0, n_queries), slice(n_keys - 1, n_keys)),
        (slice(3, 9), slice(2, 11)),
        (slice(n_queries - 1, n_queries), slice(0, 1)),
    ):
        want = weights[1][:, queries, keys]
        got = maps.rectangle(call, rows, queries, keys, item=1)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for head in (0, 5):
            got = maps.rectangle(call, rows, queries, keys, item=1, head=head)
            torch.testing.assert_close(got, want[head : head + 1], rtol=1e-12, atol=1e-12)


def test_child_tiles_pool_to_the_parent(small_tiles: None) -> None:
    """For every pair of zooms, below and above the base zoom."""
    call, _, _ = dense_call("causal")
    made = Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "")
    assert 0 < made.base < made.deepest
    for zoom in range(made.deepest):
        whole = [np.zeros((3, 64, 64)) for _ in range(2)]
        for z, x in zip((zoom, zoom + 1), whole, strict=True):
            for i, j, tile in tiles_of(made, z):
                if tile is not None:
                    h, w = tile.mean.shape
                    pairs = tile.row_edges.diff()[:, None] * tile.column_edges.diff()
                    values = (tile.maximum, tile.mean * pairs, tile.visible * pairs)
                    x[:, 4 * i : 4 * i + h, 4 * j : 4 * j + w] = torch.stack(values).numpy()
        far, near = whole[0][:, :32, :32], whole[1].reshape(3, 32, 2, 32, 2)
        np.testing.assert_allclose(far[0], near[0].max((1, 3)), rtol=1e-12)
        np.testing.assert_allclose(far[1:], near[1:].sum((2, 4)), rtol=1e-12)


def test_low_zooms_share_one_pass_over_the_weights(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, _, _ = dense_call("causal")
    pairs: list[int] = []
    fill = maps.WeightTiles.fill

    def counted(self: Any, rows: slice, columns: slice, *others: Any) -> Any:
        pairs.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return fill(self, rows, columns, *others)

    monkeypatch.setattr(maps.WeightTiles, "fill", counted)
    made = Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "")
    pairs.clear()
    assert made.tile(0, 0, 0) is not None
    assert 37 * 38 / 2 <= sum(pairs) <= 37**2
    once = sum(pairs)
    for zoom in range(made.base + 1):
        assert all(True for _ in tiles_of(made, zoom))
    assert sum(pairs) == once
    assert made.tile(made.deepest, 9, 0) is not None
    assert sum(pairs) == once + 1 * 4  # the last row of tiles has one query


def test_masked_tiles_are_not_computed(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, _, _ = dense_call("causal")
    made = Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "")
    monkeypatch.setattr(pyramid, "HeadMap", None)
    assert made.tile(made.deepest, 3, 4) is None
    assert made.tile(made.base, 0, 1) is None


@pytest.mark.parametrize("max_bytes", [1, 700, 3000])
def test_tile_cache_is_bounded_in_bytes(max_bytes: int, small_tiles: None) -> None:
    call, weights, seen = dense_call("causal")
    cache = new_tile_cache(max_bytes)
    made = Pyramid(call, row_state(call), 0, 0, cache, "")
    check_pyramid(made, weights[0, 0], seen[0, 0])
    assert cache.bytes <= max_bytes


def test_cache_evicts_the_least_recently_used_values() -> None:
    cache = SingleFlightCache[str](10, len)
    for value in ("a" * 4, "b" * 4):
        cache.put(value[0], value)
    assert cache.get("a") == "aaaa"  # now "b" is the least recently used
    cache.put_if_it_fits("c", "c" * 3)
    assert "c" not in cache
    cache.put_if_it_fits("c", "cc")
    assert (cache.bytes, len(cache)) == (10, 3)
    cache.put("d", "d" * 3)
    assert [key for key in "abcd" if key in cache] == ["a", "c", "d"]
    cache.put("e", "e" * 99)  # larger than the cache: the only value
    assert (len(cache), cache.get("e")) == (1, "e" * 99)
    cache.put_if_it_fits("f", "f")
    assert "f" not in cache
    cache.put("g", "g")
    assert [key for key in "efg" if key in cache] == ["g"]


def test_progress_rises_from_0_to_1(small_tiles: None) -> None:
    call, _, _ = dense_call("causal")
    shares: list[float] = []
    Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "").tile(0, 0, 0, on_progress=shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1


def test_cancelled_pass_resumes_from_the_cache(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call, weights, seen = dense_call("causal")
    made = Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "")
    shares: list[float] = []
    with pytest.raises(Cancelled):
        made.tile(0, 0, 0, on_progress=shares.append, stopped=lambda: bool(shares) and shares[-1] > 0.6)
    assert 0.6 < shares[-1] < 1
    rest: list[float] = []
    made.tile(0, 0, 0, on_progress=rest.append)
    whole: list[float] = []
    Pyramid(call, row_state(call), 0, 0, new_tile_cache(10**6), "").tile(0, 0, 0, on_progress=whole.append)
    assert len(rest) < len(whole) <= len(rest) + len(shares)
    check_pyramid(made, weights[0, 0], seen[0, 0])


# --- the cache --------------------------------------------------------------------------------------------------------


def test_concurrent_requests_compute_a_value_once() -> None:
    cache, made, found = SingleFlightCache[int](100, lambda x: 1), list[int](), list[int]()
    go = threading.Event()

    def make() -> int:
        go.wait()
        made.append(1)
        return 7

    threads = [threading.Thread(target=lambda: found.append(cache.get_or_compute("x", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join()
    assert (made, found) == ([1], [7] * 8)


def test_a_waiting_thread_can_be_cancelled_or_take_over() -> None:
    cache = SingleFlightCache[int](100, lambda x: 1)
    begun, fail = threading.Event(), threading.Event()
    found: list[object] = []

    def first() -> int:
        begun.set()
        fail.wait()
        raise Cancelled

    def run(make: Any, stopped: Any) -> None:
        try:
            found.append(cache.get_or_compute("x", make, stopped))
        except Cancelled:
            found.append("gone")

    one = threading.Thread(target=run, args=(first, lambda: False))
    one.start()
    begun.wait()
    impatient = threading.Thread(target=run, args=(lambda: 1, lambda: True))
    patient = threading.Thread(target=run, args=(lambda: 2, lambda: False))
    impatient.start(), patient.start()
    impatient.join()
    assert found == ["gone"]
    fail.set()
    one.join(), patient.join()
    assert sorted(map(str, found)) == ["2", "gone", "gone"]


# --- of models --------------------------------------------------------------------------------------------------------


def explorer(name: str, padding: str | None = None, **settings: Any) -> tuple[Explorer, qkv.profiler.Profile]:
    batch = inputs(name, padding)
    found = explore.of(build(name), batch, **settings)
    return found, qkv.profile(build(name), batch, progress=False, probe=False)


def check_model(found: Explorer, profile: qkv.profiler.Profile, tolerance: float = 1e-6) -> None:
    """All requests against the weights that a profile keeps."""
    for group, data in profile.groups.items():
        for text in range(data.sizes["text"]):
            info = found.info(group, text)
            n_queries, n_keys = int(data["n_queries"][text]), int(data["n_keys"][text])
            assert info == (n_queries, n_keys, 0, 0)
            for layer in range(data.sizes["layer"]):
                weights = data["weights"].values[text, layer, :, :n_queries, :n_keys]
                near = {"rtol": 1e-4, "atol": tolerance}
                query, key = n_queries - 2 if n_queries > 1 else 0, min(3, n_keys - 1)
                for head in range(data.sizes["head"]):
                    tile = found.tile(group, text, layer, head, 0, 0, 0)
                    assert tile is not None
                    np.testing.assert_allclose(tile.mean, weights[head], **near)
                    np.testing.assert_allclose(tile.maximum, weights[head], **near)
                    row = found.row(group, text, layer, head, query)
                    column = found.column(group, text, layer, head, key)
                    assert row.dtype == column.dtype == np.float32
                    np.testing.assert_allclose(row, weights[head, query], **near)
                    np.testing.assert_allclose(column, weights[head, :, key], **near)
                    pair = found.pair(group, text, layer, head, query, key)
                    np.testing.assert_allclose([pair, pair], [row[key], column[query]], rtol=1e-5, atol=1e-7)
                mean = weights.mean(0)
                np.testing.assert_allclose(found.row(group, text, layer, None, query), mean[query], **near)
                np.testing.assert_allclose(found.column(group, text, layer, None, key), mean[:, key], **near)
                np.testing.assert_allclose(found.pair(group, text, layer, None, query, key), mean[query, key], **near)
                keys, strongest = found.strongest(group, text, layer, query)
                np.testing.assert_allclose(strongest, weights[:, query].max(1), **near)
                np.testing.assert_allclose(weights[np.arange(len(keys)), query, keys], strongest, **near)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gpt_oss", "bert"])
def test_explorer_equals_the_profile(name: str, padding: str | None) -> None:
    check_model(*explorer(name, padding))


@pytest.mark.parametrize("name", ["bart", "t5", "gemma2"])
def test_explorer_equals_the_profile_for_other_architectures(name: str) -> None:
    check_model(*explorer(name))


def test_explorer_equals_the_profile_for_several_texts() -> None:
    found, profile = explore.of("qkv-mini", [SHORT, LONG]), qkv.profile("qkv-mini", [SHORT, LONG], progress=False)
    assert found.info("self", 0).n_keys < found.info("self", 1).n_keys
    check_model(found, profile, 3e-5)  # scores of some heads are large


def test_step_by_step_decoder_is_one_layer() -> None:
    folder = folder_of("qkv-translation")
    assert folder is not None
    model = load(folder)
    batch = {"source": torch.arange(4, 13)[None], "target": torch.arange(3, 10)[None]}
    profile = qkv.profile(model, batch, progress=False, probe=False)
    found = explore.of(model, batch)
    assert profile.data["weights"].values.shape[1:] == (1, 1, 7, 9)
    check_model(found, profile)
    scarce = explore.of(model, batch, caches=CacheBudget(1))  # the model runs again: all steps are found once more
    check_model(scarce, profile)


class Towers(nn.Module):
    """Two layers of one kind, over texts of different lengths, and one more of the first: a profile splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (qkv.nn.MultiHeadAttention(12, h) for h in (2, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(x) + self.second(x[:, ::2]).sum(1, keepdim=True)


def test_layers_of_different_shapes_are_separate_groups() -> None:
    torch.manual_seed(0)
    model, batch = Towers(), {"x": rand(2, 14, 12, dtype=torch.float32)}
    profile = qkv.profile(model, batch, progress=False, probe=False)
    assert {name: data.sizes["layer"] for name, data in profile.groups.items()} == {"self": 2, "self-2": 1}
    check_model(explore.of(model, batch), profile)
    check_model(explore.of(model, batch, caches=CacheBudget(1)), profile)


def forwards(model: nn.Module) -> list[int]:
    """A list that grows by one at each forward."""
    heard: list[int] = []
    model.register_forward_pre_hook(lambda *_: heard.append(1))
    return heard


def test_model_runs_again_only_if_the_cache_is_too_small() -> None:
    batch, model = inputs("llama"), build("llama")
    heard = forwards(model)
    profile = qkv.profile(model, batch, progress=False, probe=False)
    heard.clear()
    rich = explore.of(model, batch)
    assert not heard
    check_model(rich, profile)
    assert len(heard) == 1
    heard.clear()
    poor = explore.of(model, batch, caches=CacheBudget(1))
    check_model(poor, profile)
    assert len(heard) > 2
    heard.clear()
    a_layer = rich._calls.bytes // 2
    half = explore.of(model, batch, caches=CacheBudget(8 * (a_layer + 100) // 7))
    half.row("self", 0, 1, 0, 0)  # the requested layer is cached in any case
    half.row("self", 1, 1, 3, 5)
    assert len(heard) == 1
    half.row("self", 0, 0, 0, 0)
    half.row("self", 0, 0, 1, 0)
    assert len(heard) == 2
    assert half._calls.bytes <= half._calls.max_bytes


def test_explorers_with_a_shared_cache_do_not_mix() -> None:
    batch, profiles = inputs("llama"), list[qkv.profiler.Profile]()
    models = [build("llama"), build("llama")]
    with torch.no_grad():
        models[1].layers[0].self_attn.q_proj.weight.mul_(3)
    for model in models:
        profiles.append(qkv.profile(model, batch, progress=False, probe=False))
    for budget in (2**31, 1):
        caches = CacheBudget(budget)
        one, other = (explore.of(model, batch, caches=caches) for model in models)
        check_model(one, profiles[0])
        alone = caches.calls.bytes
        check_model(other, profiles[1])
        check_model(one, profiles[0])
        assert caches.calls.bytes == (2 * alone if budget > 1 else alone)


def test_concurrent_requests_run_the_model_and_compute_a_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = build("gpt2"), list[int]()
    heard = forwards(model)
    compute = Pyramid._from_weights
    monkeypatch.setattr(Pyramid, "_from_weights", lambda *a: (made.append(1), time.sleep(0.02), compute(*a))[-1])
    found, tiles = explore.of(model, inputs("gpt2")), list[Any]()
    threads = [threading.Thread(target=lambda: tiles.append(found.tile("self", 0, 1, 2, 0, 0, 0))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(heard), len(made), len(tiles), len(set(map(id, tiles)))) == (1, 1, 6, 1)


def test_cancelled_forward_restores_the_model() -> None:
    model = build("gpt2")
    found = explore.of(model, inputs("gpt2"))
    asked: list[int] = []
    with pytest.raises(Cancelled):
        found.row("self", 0, 2, 0, 4, stopped=lambda: len(asked.append(1) or asked) > 1)  # type: ignore[func-returns-value]
    assert len(asked) == 2
    check_model(found, qkv.profile(model, inputs("gpt2"), progress=False, probe=False))


def test_explorer_needs_linear_memory() -> None:
    found = explore.of("random-gpt2", torch.arange(1024) % 256)
    found.info("self", 0)
    ask = {
        "row": lambda: found.row("self", 0, 3, 1, 777),
        "column": lambda: found.column("self", 0, 3, None, 5),
        "strongest": lambda: found.strongest("self", 0, 3, 1023),
        "tile": lambda: found.tile("self", 0, 3, 1, 2, 3, 1),
    }
    for name, run in ask.items():
        assert largest_tensor(run) <= 1024 * 384, name  # the queries of the layer, of which some are a view


@pytest.mark.parametrize(
    ("request_", "argument"),
    [
        (lambda e: e.info("cross", 0), "group"),
        (lambda e: e.info("self", 2), "text"),
        (lambda e: e.info("self", -1), "text"),
        (lambda e: e.row("self", 0, 99, 0, 0), "layer"),
        (lambda e: e.row("self", 0, 0, 6, 0), "head"),
        (lambda e: e.row("self", 0, 0, -1, 0), "head"),
        (lambda e: e.row("self", 0, 0, 0, 99), "query"),
        (lambda e: e.column("self", 0, 0, None, -1), "key"),
        (lambda e: e.tile("self", 0, 0, 0, 1, 0, 0), "zoom"),
        (lambda e: e.tile("self", 0, 0, 0, 0, 0, 1), "j"),
    ],
)
def test_explorer_rejects_indices_out_of_range(request_: Any, argument: str, mini: Explorer) -> None:
    with refused(argument):
        request_(mini)


@pytest.fixture(scope="module")
def mini() -> Explorer:
    return explore.of("qkv-mini", [SHORT, LONG])


def test_text_out_of_range_of_a_batch_is_rejected() -> None:
    with refused("text", match=r"0\.\.1"):
        explore.of(build("gpt2"), inputs("gpt2")).info("self", 2)


def test_padding_between_tokens_is_rejected() -> None:
    batch = inputs("bert", "right")
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, 7] = 0
    found = explore.of(build("bert"), batch)
    with refused("text", match="padding"):
        found.info("self", 0)
    assert found.info("self", 1).n_keys == 32


def test_nan_weights_are_rejected() -> None:
    model = build("gpt2")
    with torch.no_grad():
        model.h[1].attn.c_attn.bias[0] = torch.nan
    found = explore.of(model, inputs("gpt2"))
    asked = (lambda: found.row("self", 0, 1, 0, 3), lambda: found.tile("self", 0, 1, 0, 0, 0, 0))
    for ask in asked:
        with refused("model", match=r"NaN in h\.1"):
            ask()


@pytest.mark.parametrize("module", ["explore.pyramid", "explore.explorer"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"qkv.profiler.{module}"))
    assert result.attempted > 0 == result.failed
