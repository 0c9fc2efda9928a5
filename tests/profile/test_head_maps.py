"""Attention maps of heads: they equal the model's own weights, as tiles of a pyramid, in figures and on the CLI."""

from __future__ import annotations

import doctest
import importlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from test_maps import by_loops, edges

from conftest import largest_tensor, refused, set_sizes
from drawn import all_text_is_on_the_page
from hf_models import build, inputs
from qkv.cli import main
from qkv.profiler.explore import attention_map as maps
from qkv.profiler.explore import pyramid
from qkv.profiler.explore.attention_map import AttentionMap
from qkv.statistics import maps as core

TEXT = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""


@pytest.fixture(scope="module")
def program() -> AttentionMap:
    return maps.attention_map("qkv-mini", TEXT, layer=2, head=3)


def compare(got: core.Picture, want: tuple[np.ndarray, ...]) -> None:
    for name, value in zip(("maximum", "mean", "visible"), want, strict=True):
        np.testing.assert_allclose(getattr(got, name).numpy(), value, rtol=1e-5, atol=1e-6, err_msg=name)


# --- of models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_oss", "bert"])
def test_picture_equals_eager_weights(name: str, padding: str | None) -> None:
    batch = inputs(name, padding)
    with torch.no_grad():
        weights = build(name, "eager")(**batch, output_attentions=True).attentions[1][1, 3]
    found = maps.attention_map(build(name), batch, layer=1, head=3)
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


def test_groups_of_an_encoder_decoder() -> None:
    batch = inputs("bart")
    with torch.no_grad():
        out = build("bart", "eager")(**batch, output_attentions=True)
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    for group, name in names.items():
        found = maps.attention_map(build("bart"), batch, layer=1, head=2, group=group)
        np.testing.assert_allclose(found.picture(item=1).mean, out[name][1][1, 2], rtol=1e-5, atol=1e-6)
    main_one = maps.attention_map(build("bart"), batch, layer=1, head=2)
    assert main_one.group == "decoder"


def test_forward_stops_after_the_layer() -> None:
    heard: list[str] = []
    maps.attention_map(build("gpt2"), inputs("gpt2"), layer=0, head=0, on_call=heard.append)
    assert len(heard) == 1


@pytest.mark.parametrize("module", ["qkv.profiler.explore.attention_map", "qkv.figures.map"])
def test_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0 == result.failed


def test_tokens_of_a_part(program: AttentionMap) -> None:
    every = program.query_tokens()
    assert len(every) == program.n_queries
    assert every[:2] == ["<s>", "def"]
    assert program.key_tokens(slice(3, 9)) == every[3:9]
    ids = maps.attention_map(build("gpt2"), inputs("gpt2"), layer=0, head=0)
    assert ids.key_tokens(slice(0, 3), item=1) == [str(int(i)) for i in inputs("gpt2")["input_ids"][1, :3]]


@pytest.mark.parametrize(
    ("changed", "argument", "match"),
    [
        ({"layer": 99}, "layers", "has 99"),
        ({"layer": -1}, "layers", "has -1"),
        ({"head": 99}, "head", None),
        ({"group": "cross"}, "layers", "'cross'"),
        ({"inputs": ["a", "b"]}, "inputs", None),
    ],
)
def test_attention_map_rejects_invalid_arguments(changed: dict[str, Any], argument: str, match: str | None) -> None:
    arguments: dict[str, Any] = {"inputs": TEXT, "layer": 2, "head": 3} | changed
    with refused(argument, match):
        maps.attention_map("qkv-mini", arguments.pop("inputs"), **arguments)


def test_nan_weights_are_rejected() -> None:
    model = build("gpt2")
    with torch.no_grad():
        model.h[1].attn.c_attn.bias[0] = torch.nan
    found = maps.attention_map(model, inputs("gpt2"), layer=1, head=0)
    with refused("model", match=r"NaN in h\.1"):
        found.picture()


# --- the pyramid ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> AttentionMap:
    """Tiles of 4 × 4 pixels over 37 tokens, made of smaller tiles of weights."""
    monkeypatch.setattr(pyramid, "TILE", 4)
    set_sizes(monkeypatch, picture=(3, 5))
    return maps.attention_map(build("llama"), inputs("llama"), layer=1, head=2)


def test_tiles_equal_the_picture(small: AttentionMap) -> None:
    assert small.deepest == 4  # 4 · 2⁴ = 64 ≥ 37
    whole = small.picture(item=1)
    weights, seen = whole.mean, whole.visible.bool()
    n = small.n_queries
    assert whole.mean.shape == (37, 37)
    for zoom in range(5):
        step = 2 ** (4 - zoom)
        tiles = -(-n // (4 * step))
        bins = [*range(0, n, step), n]
        want = by_loops(weights, seen, bins, bins)
        for i in range(tiles):
            for j in range(tiles):
                got = small.tile(zoom, i, j, item=1)
                inside = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
                if got is None:
                    assert not want[2][inside].any()
                    continue
                compare(got, tuple(x[inside] for x in want))
                assert got.row_edges.tolist() == bins[4 * i : 4 * i + 5]
    short = maps.attention_map("qkv-mini", "def f():", layer=0, head=0)
    assert short.deepest in (0, 1)


@pytest.mark.parametrize(
    ("at", "argument"), [((5, 0, 0), "zoom"), ((-1, 0, 0), "zoom"), ((0, 1, 0), "i"), ((4, 0, 10), "j")]
)
def test_tile_rejects_indices_out_of_range(small: AttentionMap, at: tuple[int, int, int], argument: str) -> None:
    with refused(argument):
        small.tile(*at)


def test_tiles_are_cached_within_a_bound(small: AttentionMap) -> None:
    first = small.tile(4, 0, 0)
    assert first is not None
    assert small.tile(4, 0, 0) is first
    assert small.tile(4, 0, 0, item=1) is not first
    small._tiles = cache = pyramid.new_tile_cache(4 * (first.bytes + 512))
    first = small.tile(4, 0, 0)
    for j in range(1, 9):
        small.tile(4, 0, 0)  # used most recently, so it is not evicted
        small.tile(4, 9 - j, j)
        assert cache.bytes <= cache.max_bytes
    assert small.tile(4, 0, 0) is first
    small._tiles = cache = pyramid.new_tile_cache(1)  # smaller than any tile: the newest tile is kept
    small.tile(4, 0, 0)
    last = small.tile(4, 7, 3)
    assert len(cache) == 1
    assert small.tile(4, 7, 3) is last


def test_concurrent_requests_give_the_right_tiles(small: AttentionMap) -> None:
    places = [(4, i, j) for i in range(5) for j in range(5)]
    made: dict[tuple[int, int, int], core.Picture | None] = {}
    threads = [threading.Thread(target=lambda p=p: made.update({p: small.tile(*p)})) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = small.picture()
    for _, i, j in places:
        want, got = whole.mean[4 * i : 4 * i + 4, 4 * j : 4 * j + 4], made[4, i, j]
        assert (got is None) == (j > i)
        np.testing.assert_allclose(torch.zeros(4, 4) if got is None else got.mean, want, rtol=1e-6)


def test_tile_needs_no_more_memory_than_the_call() -> None:
    found = maps.attention_map("random-gpt2", torch.arange(1024) % 256, layer=0, head=1)
    largest = largest_tensor(lambda: found.tile(2, 3, 0))
    assert largest <= 3 * 1024 * 384, largest  # queries, keys and values of all heads, which the model made as one


# --- drawn ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "size", "pool", "panels"),
    [
        (slice(None), slice(None), 1024, "both", 1),  # every pair a bin: both are the same
        (slice(None), slice(None), 7, "both", 2),
        (slice(None), slice(None), 7, "max", 1),
        (slice(3, 6), slice(None), 9, "both", 2),  # one above the other
        (slice(3, 4), slice(2, 3), 9, "mean", 1),
        (slice(0, 2), slice(5, 9), 9, "mean", 1),  # all pairs are masked
    ],
)
def test_figure_has_the_right_panels(
    program: AttentionMap, rows: slice, columns: slice, size: int, pool: str, panels: int
) -> None:
    from qkv.figures.map import map_figure

    figure = map_figure(program, program.picture(rows, columns, size), pool=pool)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 2 * panels  # each with its colour bar
    all_text_is_on_the_page(figure)


def test_every_bin_is_a_whole_number_of_pixels(program: AttentionMap) -> None:
    """Else a sink one bin wide might fall between two pixels."""
    from qkv.figures.layout import DPI
    from qkv.figures.map import map_figure

    for size in (3, 7, 19, 31):
        picture = program.picture(size=size)
        figure = map_figure(program, picture)
        for axes in figure.axes[::2]:
            corners = axes.get_position().get_points() * figure.get_size_inches() * DPI
            np.testing.assert_allclose(corners, corners.round(), atol=1e-6)
            wide, tall = (corners[1] - corners[0]).round()
            assert wide % picture.mean.shape[1] == tall % picture.mean.shape[0] == 0


def test_titles_name_the_strongest_pair(program: AttentionMap) -> None:
    from qkv.figures.map import map_figure, sentence

    picture = program.picture()
    mass = picture.mean.sum(0)
    most = int(mass.argmax())
    said = sentence(program, picture)
    assert said.startswith("Layer 2, head 3: ")
    assert f"{100 * float(mass[most] / mass.sum()):.0f} %" in said
    assert f"key {most}" in said
    assert sentence(program, program.picture(slice(0, 2), slice(5, 9))).endswith("no weight at all here")
    subtitle = map_figure(program, program.picture(slice(2, 9))).texts[-1].get_text()
    assert subtitle.startswith(f"qkv-mini · queries 2–8 of {program.n_queries} × {program.n_keys} keys · grey")
    with refused("pool"):
        map_figure(program, picture, pool="min")


def test_colours_are_logarithmic_if_weights_differ_much(program: AttentionMap) -> None:
    from matplotlib.colors import LogNorm

    from qkv.figures.map import map_figure

    picture = program.picture()
    flat = core.Picture(
        picture.visible * 0.25, picture.visible * 0.25, picture.visible, picture.row_edges, picture.column_edges
    )
    for shown, logarithmic in ((picture, True), (flat, False)):
        axes, bar = map_figure(program, shown).axes
        assert isinstance(axes.images[0].norm, LogNorm) == logarithmic
        assert ("log scale" in bar.get_title(loc="left")) == logarithmic


# --- from the command line --------------------------------------------------------------------------------------------


def test_command_draws_and_writes_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: AttentionMap
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(TEXT)
    command = "map qkv-mini a.py --layer 2 --head 3 --rows 5: --cols :20 --size 6 --data --out out/part.png"
    assert main(command.split()) == 0
    assert {p.name for p in Path("out").iterdir()} == {"part.png", "part.npz"}
    assert Path("out/part.png").read_bytes().startswith(b"\x89PNG")
    want = program.picture(slice(5, None), slice(0, 20), 6)
    with np.load("out/part.npz") as found:
        for name in ("maximum", "mean", "visible", "row_edges", "column_edges"):
            np.testing.assert_array_equal(found[name], getattr(want, name).numpy())
        assert (str(found["model"]), int(found["layer"]), int(found["head"])) == ("qkv-mini", 2, 3)
    said = capsys.readouterr().out
    assert "Layer 2, head 3" in said
    assert "out/part.png" in said


BAD = {
    "layer beyond": (["--layer", "99"], "--layer has 99, expected 0 to "),
    "head beyond": (["--head", "99"], "head is 99, but layer 0 has heads 0.."),
    "rows beyond": (["--rows", "5:3000"], "--rows is 5:3000, expected a:b with 0 ≤ a < b ≤"),
    "columns backwards": (["--cols", "9:5"], "--cols is 9:5, expected a:b with"),
    "no colon": (["--rows", "5"], "--rows is '5', expected a range of tokens, such as 100:200"),
    "three parts": (["--cols", "1:5:2"], "--cols is '1:5:2', expected a range of tokens"),
    "no pixels": (["--size", "0"], "--size is 0, expected at least 1"),
    "no tokens": (["--tokens", "0"], "--tokens is 0, expected at least 1"),
    "no such file": (["qkv-mini", "none.txt"], "FILE: cannot read none.txt"),
    "not a picture": (["--out", "map.jpg"], "--out is map.jpg, expected a file name that ends in .png"),
    "too long": (["minilm", "--tokens", "600"], "600 tokens"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_command_reports_bad_input_in_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["map", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["map", "--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("--rows", "--cols", "--layer", "qkv map minilm", "--tokens 100000"))
