"""Weights on demand and maps of heads equal the model's own weights, tiles equal weights pooled by loops; the cache."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_maps import by_loops, edges
from test_watch import in_threads
from torch import Tensor, nn

import qkv
from conftest import Command, largest_tensor, oracle, rand, refusals, refused, set_sizes, triple
from hf_models import build, inputs
from qkv import masks, normalizers
from qkv.engine import Call
from qkv.models import load
from qkv.models.checkpoint import folder_of
from qkv.plot.map import map_figure
from qkv.profiler.explore import explorer as explore
from qkv.profiler.explore import pyramid
from qkv.profiler.explore.explorer import AttentionMap, CacheBudget, Cancelled, Explorer, attention_map
from qkv.profiler.explore.pyramid import Pyramid, SingleFlightCache, new_tile_cache
from qkv.statistics import maps
from qkv.statistics.measure import row_state

SHORT, LONG = "f(x):", "def mean(values):\n    return sum(values) / len(values)\n"


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


CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {  # others are in test_maps.py
    "causal": (37, 37, {"mask": masks.Causal()}),
    "cross, padded": (29, 22, {"mask": masks.Padding([19, 14])}),
    "more queries": (35, 20, {"mask": masks.Causal(), "normalizer": normalizers.Softmax(sink=rand(6, seed=3))}),
    "few pixels": (18, 67, {"mask": masks.Window(9), "normalizer": normalizers.Sigmoid()}),
    "negative": (19, 31, {"mask": masks.Prefix(6), "normalizer": normalizers.Identity()}),
}


def dense_call(name: str) -> tuple[Call, Tensor, Tensor]:
    """A call in float64, its weights by definition, and which pairs are visible."""
    nq, nk, asked = CALLS[name]
    q, k, v = triple(nq=nq, nk=nk)
    _, _, weights = oracle(q, k, v, **asked)
    return Call.of(q, k, v, **asked), weights, asked["mask"].dense(nq, nk, batch=2, heads=6).expand(weights.shape)


# --- the pyramid of a call ------------------------------------------------------------------------------------------


def causal(cache: Any = None) -> tuple[Pyramid, Tensor, Tensor]:
    """The tiles of the first head of a causal call, with its weights."""
    call, weights, seen = dense_call("causal")
    return Pyramid(call, row_state(call), 0, 0, cache or new_tile_cache(10**6), ""), weights[0, 0], seen[0, 0]


@pytest.mark.parametrize("name", CALLS)
def test_tiles_of_every_zoom_equal_pooled_weights(name: str, small_tiles: None) -> None:
    call, weights, seen = dense_call(name)
    rows, kept = row_state(call), new_tile_cache(3000 if name == "few pixels" else 10**6)  # which evicts tiles
    check_pyramid(Pyramid(call, rows, 1, 4, kept, "all"), weights[1, 4], seen[1, 4])
    part = (slice(3, 17), slice(2, 19))
    inside = Pyramid(call, rows, 0, 1, kept, "part", queries=part[0], keys=part[1])
    check_pyramid(inside, weights[0, 1][part], seen[0, 1][part])
    assert kept.bytes <= kept.max_bytes


def test_low_zooms_share_one_pass_over_the_weights(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[int] = []
    weights = maps.Tile.weights

    def counted(self: Any, *arguments: Any) -> Any:
        pairs.append(math.prod(self.shape[2:]))
        return weights(self, *arguments)

    made, _, _ = causal()
    assert 0 < made.base < made.deepest
    monkeypatch.setattr(maps.Tile, "weights", counted)
    assert made.tile(0, 0, 0) is not None
    once = sum(pairs)
    assert 37 * 38 / 2 <= once <= 37**2
    for zoom in range(made.base + 1):
        assert all(True for _ in tiles_of(made, zoom))
    assert sum(pairs) == once
    assert made.tile(made.deepest, 9, 0) is not None
    assert sum(pairs) == once + 1 * 4  # the last row of tiles has one query


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


def test_cancelled_pass_resumes_from_the_cache_and_progress_rises(small_tiles: None) -> None:
    made, weights, seen = causal()
    shares, rest, whole = list[float](), list[float](), list[float]()
    with pytest.raises(Cancelled):
        made.tile(0, 0, 0, on_progress=shares.append, stopped=lambda: bool(shares) and shares[-1] > 0.6)
    assert 0.6 < shares[-1] < 1
    made.tile(0, 0, 0, on_progress=rest.append)
    causal()[0].tile(0, 0, 0, on_progress=whole.append)
    assert len(rest) < len(whole) <= len(rest) + len(shares)
    assert whole == sorted(whole)
    assert 0 < whole[0] < 0.5
    assert whole[-1] == 1
    check_pyramid(made, weights, seen)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_waiting_thread_can_be_cancelled_or_take_over() -> None:
    cache, found = SingleFlightCache[int](100, lambda x: 1), list[object]()
    begun, fail = threading.Event(), threading.Event()

    def first() -> int:
        begun.set()
        assert fail.wait(60)
        raise Cancelled

    def ask(make: Callable[[], int], stopped: bool) -> threading.Thread:
        def run() -> None:
            try:
                found.append(cache.get_or_compute("x", make, lambda: stopped))
            except Cancelled:
                found.append("gone")

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    one = ask(first, False)
    assert begun.wait(60)
    patient = ask(lambda: 2, False)
    ask(lambda: 1, True).join()
    assert found == ["gone"]
    fail.set()
    one.join()
    patient.join()
    assert sorted(map(str, found)) == ["2", "gone", "gone"]


# --- of models --------------------------------------------------------------------------------------------------------


def check_model(found: Explorer, profile: qkv.Profile, tolerance: float = 1e-6) -> None:
    """All requests against the weights that a profile keeps."""
    near = {"rtol": 1e-4, "atol": tolerance}
    for group, data in profile.groups.items():
        for text, layer in np.ndindex(data.sizes["text"], data.sizes["layer"]):
            n_queries, n_keys = int(data["n_queries"][text]), int(data["n_keys"][text])
            assert found.info(group, text) == explore.Info(n_queries, n_keys, 0, 0)
            weights = data["weights"].values[text, layer, :, :n_queries, :n_keys]
            query, key = n_queries - 2 if n_queries > 1 else 0, min(3, n_keys - 1)
            for head in (0, data.sizes["head"] - 1, None):
                want = weights.mean(0) if head is None else weights[head]
                if head is not None:
                    tile = found.tile(group, text, layer, head, 0, 0, 0)
                    np.testing.assert_allclose(tile.mean, want, **near)  # type: ignore[union-attr]
                    np.testing.assert_allclose(tile.maximum, want, **near)  # type: ignore[union-attr]
                row = found.row(group, text, layer, head, query)
                column = found.column(group, text, layer, head, key)
                assert row.dtype == column.dtype == np.float32
                np.testing.assert_allclose(row, want[query], **near)
                np.testing.assert_allclose(column, want[:, key], **near)
                pair = found.pair(group, text, layer, head, query, key)
                np.testing.assert_allclose([pair, pair], [row[key], column[query]], rtol=1e-5, atol=1e-7)
            keys, strongest = found.strongest(group, text, layer, query)
            np.testing.assert_allclose(strongest, weights[:, query].max(1), **near)
            np.testing.assert_allclose(weights[np.arange(len(keys)), query, keys], strongest, **near)


@pytest.mark.parametrize(("name", "padding"), [("gpt2", "left"), ("gpt_oss", None), ("bert", "right"), ("t5", None)])
def test_explorer_equals_the_profile(name: str, padding: str | None) -> None:
    batch, model = inputs(name, padding), build(name)
    check_model(explore.of(build(name), batch), qkv.profile(model, batch, progress=False, probe=False))


def test_step_by_step_decoder_is_one_layer() -> None:
    model = load(folder_of("qkv-translation"))  # type: ignore[arg-type]
    batch = {"source": torch.arange(4, 13)[None], "target": torch.arange(3, 10)[None]}
    profile = qkv.profile(model, batch, progress=False, probe=False)
    assert profile.data["weights"].values.shape[1:] == (1, 1, 7, 9)
    check_model(explore.of(model, batch), profile)
    scarce = explore.of(model, batch, caches=CacheBudget(1))  # the model runs again: all steps are found once more
    check_model(scarce, profile)


def test_layers_of_different_shapes_are_separate_groups() -> None:
    """Swin attends in windows, of which later layers have fewer, with more heads."""
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4)).eval()
    batch = {"pixel_values": rand(1, 3, 32, 32, dtype=torch.float32)}
    profile = qkv.profile(model, batch, progress=False, probe=False)
    found = {name: (d.sizes["text"], d.sizes["head"], d["layer"].values.tolist()) for name, d in profile.groups.items()}
    assert found == {"self": (4, 2, [0, 1]), "self-2": (1, 4, [2])}
    for budget in (2**31, 1):
        check_model(explore.of(model, batch, caches=CacheBudget(budget)), profile)


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
    batch, models = inputs("llama"), [build("llama", num_hidden_layers=1) for _ in range(2)]
    with torch.no_grad():
        models[1].layers[0].self_attn.q_proj.weight.mul_(3)
    profiles = [qkv.profile(model, batch, progress=False, probe=False) for model in models]
    for budget in (2**31, 1):
        caches = CacheBudget(budget)
        one, other = (explore.of(model, batch, caches=caches) for model in models)
        check_model(one, profiles[0])
        alone = caches.calls.bytes
        check_model(other, profiles[1])
        check_model(one, profiles[0])
        assert caches.calls.bytes == (2 * alone if budget > 1 else alone)


def test_concurrent_requests_run_the_model_and_compute_a_tile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, tiles, rows = build("gpt2"), list[int](), list[Any](), list[Any]()
    heard = forwards(model)
    compute = Pyramid._from_weights
    monkeypatch.setattr(Pyramid, "_from_weights", lambda *a: (made.append(1), compute(*a))[-1])
    found = explore.of(model, inputs("gpt2"))
    in_threads([lambda: tiles.append(found.tile("self", 0, 1, 2, 0, 0, 0))] * 6)
    assert (len(heard), len(made), len(tiles), len(set(map(id, tiles)))) == (1, 1, 6, 1)
    heard.clear()
    found = explore.of(model, inputs("gpt2"))
    in_threads([lambda: rows.append(found.row("self", 0, 1, 2, 5))] * 6)
    assert (len(heard), len(rows)) == (1, 6)


def test_cancelled_forward_restores_the_model() -> None:
    model = build("gpt2")
    found = explore.of(model, inputs("gpt2"))
    asked: list[int] = []
    with pytest.raises(Cancelled):
        found.row("self", 0, 2, 0, 4, stopped=lambda: len(asked.append(1) or asked) > 1)  # type: ignore[func-returns-value]
    assert len(asked) == 2
    check_model(found, qkv.profile(model, inputs("gpt2"), progress=False, probe=False))


def test_explorer_needs_linear_memory() -> None:
    found = explore.of(build("gpt2", n_positions=512), torch.arange(512) % 97)
    found.info("self", 0)
    ask: list[Callable[[], object]] = [
        lambda: found.row("self", 0, 1, 1, 377),
        lambda: found.column("self", 0, 1, None, 5),
        lambda: found.strongest("self", 0, 1, 511),
        lambda: found.tile("self", 0, 1, 1, 1, 1, 0),
    ]
    for run in ask:
        assert largest_tensor(run) <= 512 * 320  # the states inside the feed-forward network


@functools.cache
def mini() -> Explorer:
    return explore.of("qkv-mini", [SHORT, LONG])


REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("group", lambda: mini().info("cross", 0)),
    ("text", lambda: mini().info("self", 2)),
    ("text", lambda: mini().info("self", -1)),
    ("layer", lambda: mini().row("self", 0, 99, 0, 0)),
    ("head", lambda: mini().row("self", 0, 0, 6, 0)),
    ("head", lambda: mini().row("self", 0, 0, -1, 0)),
    ("query", lambda: mini().row("self", 0, 0, 0, 99)),
    ("key", lambda: mini().column("self", 0, 0, None, -1)),
    ("zoom", lambda: mini().tile("self", 0, 0, 0, 1, 0, 0)),
    ("j", lambda: mini().tile("self", 0, 0, 0, 0, 0, 1)),
]

test_indices_out_of_range_are_rejected = refusals(REFUSALS)


def test_padding_between_tokens_and_texts_beyond_a_batch_are_rejected() -> None:
    batch = inputs("bert", "right")
    batch["attention_mask"][0, 7] = 0
    found = explore.of(build("bert"), batch)
    with refused("text", match="padding"):
        found.info("self", 0)
    with refused("text", match=r"0\.\.1"):
        found.info("self", 2)
    assert found.info("self", 1).n_keys == 32


def test_nan_weights_are_rejected() -> None:
    model = build("gpt2")
    model.h[1].attn.c_attn.bias.data[0] = torch.nan
    found = explore.of(model, inputs("gpt2"))
    for ask in (lambda: found.row("self", 0, 1, 0, 3), lambda: found.tile("self", 0, 1, 0, 0, 0, 0)):
        with refused("model", match=r"NaN in h\.1"):
            ask()


# --- maps of a head ---------------------------------------------------------------------------------------------------

TEXT = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""


@pytest.fixture(scope="module")
def program() -> AttentionMap:
    return attention_map("qkv-mini", TEXT, layer=2, head=3)


def compare(got: maps.Picture, want: tuple[np.ndarray, ...]) -> None:
    for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
        np.testing.assert_allclose(getattr(got, name).numpy(), value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("name", "padding"), [("llama", "right"), ("gpt_oss", None), ("bert", "left")])
def test_picture_equals_eager_weights(name: str, padding: str | None) -> None:
    batch = inputs(name, padding)
    with torch.no_grad():
        weights = build(name, "eager")(**batch, output_attentions=True).attentions[1][1, 3]
    found = attention_map(build(name), batch, layer=1, head=3)
    n = weights.shape[0]
    assert (found.n_queries, found.n_keys, found.batch, found.group) == (n, n, 2, "self")
    real = torch.ones(n, dtype=torch.bool) if padding is None else batch["attention_mask"][1].bool()
    weights = weights.masked_fill(~real[:, None], 0)  # queries at padding do not count
    seen = real[:, None] & real
    seen = seen if name == "bert" else seen.tril()
    if name == "gpt_oss":  # its first layer slides, the second does not
        assert torch.equal(seen, (weights > 0) & seen)
    for size in ((5, 7), (99, 99)):
        got = found.picture(size=size, item=1)
        compare(got, by_loops(weights, seen, edges(0, n, size[0]), edges(0, n, size[1])))
    part = found.picture(slice(11, None), slice(3, 29), (4, 3), item=1)
    compare(part, by_loops(weights, seen, edges(11, n, 4), edges(3, 29, 3)))


def test_groups_of_an_encoder_decoder_and_forwards_that_stop_after_the_layer() -> None:
    batch = inputs("bart")
    with torch.no_grad():
        out = build("bart", "eager")(**batch, output_attentions=True)
    for group in ("encoder", "decoder", "cross"):
        found = attention_map(build("bart"), batch, layer=1, head=2, group=group)
        want = out[f"{group}_attentions"][1][1, 2]
        np.testing.assert_allclose(found.picture(item=1).mean, want, rtol=1e-5, atol=1e-6)
    assert attention_map(build("bart"), batch, layer=1, head=2).group == "decoder"
    model = build("gpt2")
    heard = forwards(model.h[1])
    attention_map(model, inputs("gpt2"), layer=0, head=0)
    assert not heard


def test_tokens_of_a_part(program: AttentionMap) -> None:
    every = program.query_tokens()
    assert len(every) == program.n_queries
    assert every[:2] == ["<s>", "def"]
    assert program.key_tokens(slice(3, 9)) == every[3:9]
    ids = attention_map(build("gpt2"), inputs("gpt2"), layer=0, head=0)
    assert ids.key_tokens(slice(0, 3), item=1) == [str(int(i)) for i in inputs("gpt2")["input_ids"][1, :3]]


def of_nan() -> maps.Picture:
    model = build("gpt2")
    model.h[1].attn.c_attn.bias.data[0] = torch.nan
    return attention_map(model, inputs("gpt2"), layer=1, head=0).picture()


@functools.cache
def loaded() -> tuple[Any, Any]:
    return qkv.load("qkv-mini")


def of_mini(inputs: Any = TEXT, **settings: Any) -> AttentionMap:
    model, tokenizer = loaded()
    return attention_map(model, inputs, **{"layer": 2, "head": 3, "tokenizer": tokenizer} | settings)


MAP_REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("layers", "has 99", lambda: of_mini(layer=99)),
    ("layers", "has -1", lambda: of_mini(layer=-1)),
    ("head", None, lambda: of_mini(head=99)),
    ("layers", "'cross'", lambda: of_mini(group="cross")),
    ("inputs", None, lambda: of_mini(["a", "b"])),
    ("model", r"NaN in h\.1", of_nan),
    ("pool", None, lambda: map_figure(of_mini(), of_mini().picture(), pool="min")),
]

test_invalid_arguments_of_a_map_are_rejected = refusals(MAP_REFUSALS)


@pytest.mark.usefixtures("undrawn")
def test_command_draws_and_writes_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, program: AttentionMap
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(TEXT)
    words = "map qkv-mini --file a.py --layer 2 --head 3 --rows 5: --cols :20 --size 6 --data --out out/part.png"
    assert "out/part.png" in command.succeeds(*words.split())
    assert {p.name for p in Path("out").iterdir()} == {"part.png", "part.npz"}
    want = program.picture(slice(5, None), slice(0, 20), 6)
    with np.load("out/part.npz") as found:
        for name in ("maximum", "mean", "visible", "row_edges", "column_edges"):
            np.testing.assert_array_equal(found[name], getattr(want, name).numpy())
        assert (str(found["model"]), int(found["layer"]), int(found["head"])) == ("qkv-mini", 2, 3)
    shown = " ".join(text.get_text() for text in map_figure(program, want).texts)
    assert f"queries 5–{program.n_queries - 1} of {program.n_queries} × keys 0–19 of {program.n_keys}" in shown
