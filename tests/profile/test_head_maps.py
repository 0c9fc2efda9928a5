"""Attention maps of heads: they equal the model's own weights, as tiles of a pyramid, in figures and on the CLI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_maps import by_loops, edges

from conftest import Command, refused, set_sizes
from hf_models import build, inputs
from qkv.figures.map import map_figure
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


@pytest.mark.parametrize(
    ("name", "padding"), [("gpt2", "left"), ("llama", "right"), ("gpt_oss", None), ("bert", "left")]
)
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


def test_groups_of_an_encoder_decoder_and_forwards_that_stop_after_the_layer() -> None:
    batch, heard = inputs("bart"), list[str]()
    with torch.no_grad():
        out = build("bart", "eager")(**batch, output_attentions=True)
    for group in ("encoder", "decoder", "cross"):
        found = maps.attention_map(build("bart"), batch, layer=1, head=2, group=group)
        want = out[f"{group}_attentions"][1][1, 2]
        np.testing.assert_allclose(found.picture(item=1).mean, want, rtol=1e-5, atol=1e-6)
    assert maps.attention_map(build("bart"), batch, layer=1, head=2).group == "decoder"
    maps.attention_map(build("gpt2"), inputs("gpt2"), layer=0, head=0, on_call=heard.append)
    assert len(heard) == 1


def test_tokens_of_a_part(program: AttentionMap) -> None:
    every = program.query_tokens()
    assert len(every) == program.n_queries
    assert every[:2] == ["<s>", "def"]
    assert program.key_tokens(slice(3, 9)) == every[3:9]
    ids = maps.attention_map(build("gpt2"), inputs("gpt2"), layer=0, head=0)
    assert ids.key_tokens(slice(0, 3), item=1) == [str(int(i)) for i in inputs("gpt2")["input_ids"][1, :3]]


def of_nan() -> core.Picture:
    model = build("gpt2")
    model.h[1].attn.c_attn.bias.data[0] = torch.nan
    return maps.attention_map(model, inputs("gpt2"), layer=1, head=0).picture()


def of_mini(inputs: Any = TEXT, **settings: Any) -> AttentionMap:
    return maps.attention_map("qkv-mini", inputs, **{"layer": 2, "head": 3} | settings)


REFUSALS: list[tuple[str, str | None, Callable[[AttentionMap], object]]] = [
    ("layers", "has 99", lambda m: of_mini(layer=99)),
    ("layers", "has -1", lambda m: of_mini(layer=-1)),
    ("head", None, lambda m: of_mini(head=99)),
    ("layers", "'cross'", lambda m: of_mini(group="cross")),
    ("inputs", None, lambda m: of_mini(["a", "b"])),
    ("model", r"NaN in h\.1", lambda m: of_nan()),
    ("zoom", None, lambda m: m.tile(9, 0, 0)),
    ("zoom", None, lambda m: m.tile(-1, 0, 0)),
    ("i", None, lambda m: m.tile(0, 1, 0)),
    ("j", None, lambda m: m.tile(0, 0, 1)),
    ("pool", None, lambda m: map_figure(m, m.picture(), pool="min")),
]


@pytest.mark.parametrize(("argument", "match", "call"), REFUSALS)
def test_invalid_arguments_are_rejected(
    argument: str, match: str | None, call: Callable[[AttentionMap], object], program: AttentionMap
) -> None:
    with refused(argument, match):
        call(program)


def test_tiles_equal_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 4 × 4 pixels over 37 tokens, made of smaller tiles of weights."""
    monkeypatch.setattr(pyramid, "TILE", 4)
    set_sizes(monkeypatch, picture=(3, 5))
    small = maps.attention_map(build("llama"), inputs("llama"), layer=1, head=2)
    assert small.deepest == 4  # 4 · 2⁴ = 64 ≥ 37
    whole = small.picture(item=1)
    weights, seen = whole.mean, whole.visible.bool()
    bins = [0, 16, 32, 37]
    compare(small.tile(0, 0, 0, item=1), by_loops(weights, seen, bins, bins))  # type: ignore[arg-type]
    for i, j in np.ndindex(10, 10):
        rows, columns = slice(4 * i, 4 * i + 4), slice(4 * j, 4 * j + 4)
        tile = small.tile(4, i, j, item=1)
        assert (tile is None) == (j > i)
        if tile is not None:
            np.testing.assert_allclose(tile.mean, weights[rows, columns], rtol=1e-5, atol=1e-6)
            assert tile.row_edges.tolist() == [*range(37), 37][4 * i : 4 * i + 5]
    assert small.tile(4, 0, 0) is small.tile(4, 0, 0)  # from the cache
    assert small.tile(4, 0, 0, item=1) is not small.tile(4, 0, 0)


@pytest.mark.usefixtures("undrawn")
def test_command_draws_and_writes_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, program: AttentionMap
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(TEXT)
    words = "map qkv-mini a.py --layer 2 --head 3 --rows 5: --cols :20 --size 6 --data --out out/part.png"
    assert "out/part.png" in command.succeeds(*words.split())
    assert {p.name for p in Path("out").iterdir()} == {"part.png", "part.npz"}
    want = program.picture(slice(5, None), slice(0, 20), 6)
    with np.load("out/part.npz") as found:
        for name in ("maximum", "mean", "visible", "row_edges", "column_edges"):
            np.testing.assert_array_equal(found[name], getattr(want, name).numpy())
        assert (str(found["model"]), int(found["layer"]), int(found["head"])) == ("qkv-mini", 2, 3)
    shown = " ".join(text.get_text() for text in map_figure(program, want).texts)
    assert f"queries 5–{program.n_queries - 1} of {program.n_queries} × keys 0–19 of {program.n_keys}" in shown
