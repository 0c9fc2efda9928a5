"""`qkv.plot` shows the numbers that it gets, keeps all text on the page, and refuses what are no weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import profile_fixture as made
import qkv
from conftest import refused
from drawn import all_text_is_on_the_page
from qkv import masks, plot

WORDS = [
    "internationalisation", "Donaudampfschifffahrt", "the", "cat", "sat", "on", "a", "mat", ".", "⏎", "$x$", "שלום",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make imports of pyplot fail."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape).softmax(-1)


def shown(axes: Axes, image: int = 0) -> np.ma.MaskedArray:
    return np.ma.asarray(axes.images[image].get_array())


@pytest.mark.parametrize(
    "form",
    [
        lambda w: w,
        lambda w: w[None].requires_grad_(),
        lambda w: w[None, None].numpy(),
        lambda w: w.tolist(),
        lambda w: (w[None, None],),  # output_attentions of a model with one layer
        lambda w: w.to(torch.bfloat16),
        lambda w: list(w.clone().requires_grad_()),  # rows with gradients
    ],
)
def test_weights_of_every_form_are_drawn_with_masked_pairs_empty(form: Any) -> None:
    w = weights(3, 5)
    array = shown(plot.weights(form(w), mask=masks.Causal(), queries=list("abc")))
    expected = np.ma.masked_where(~masks.Causal().dense(3, 5)[0, 0].numpy(), w.numpy())
    np.testing.assert_allclose(array.filled(-1), expected.filled(-1), atol=4e-3)


def test_the_wall_of_a_model_has_each_head_at_its_place() -> None:
    attentions = tuple(weights(2, 3, 4, 4) for _ in range(2))
    for given, item in ((attentions, 1), (torch.stack(attentions), 1), (torch.stack(attentions)[:, 1], None)):
        axes = plot.model(given, item=item).axes[0]
        for image in axes.images:
            left, _, _, top = image.get_extent()
            np.testing.assert_allclose(np.asarray(image.get_array()), attentions[int(top)][1, int(left)], rtol=1e-6)


def test_a_profile_gives_its_weights_or_its_bins() -> None:
    profile = made.gpt()
    data = profile.data
    axes = plot.weights(profile, layer=1, head=1, item=0)
    np.testing.assert_allclose(shown(axes).filled(0), data["weights"].values[0, 1, 1], atol=1e-6)
    assert len(plot.model(profile, item=0).axes[0].images) == data.sizes["layer"] * data.sizes["head"]
    code = "def area(width, height):\n    return 1\n"
    profile = qkv.profile("qkv-mini", code, map_tokens=4, probe=False, progress=False)  # of a long text: its bins
    axes = plot.weights(profile, layer=0, head=0)
    assert axes.get_xlim() == (-0.5, profile.data.sizes["key"] - 0.5)
    pooled = profile.data["map_max"].values[0, 0, 0]
    np.testing.assert_allclose(shown(axes).compressed().max(), np.nanmax(pooled))


def test_the_arrows_of_the_graph_are_the_visible_pairs_of_the_mask() -> None:
    """Arrows point from a query to each of its keys, for bidirectional and causal masks alike."""
    n = 6
    for mask in (~masks.Causal(), masks.Causal() | ~masks.Causal(), masks.Causal() | masks.Prefix(3)):
        drawn = np.zeros((n, n), bool)
        for arrow in plot.arcs(mask, list("abcdef")).patches:
            (start, _), (end, _) = arrow._posA_posB  # type: ignore[attr-defined]
            assert arrow.get_gid() == f"{round(start)}>{round(end)}"
            drawn[round(start), round(end)] = True
        assert (drawn == mask.dense(n, n)[0, 0].numpy()).all()


def test_statistics_of_heads_equal_those_that_are_measured() -> None:
    attentions = tuple(weights(1, 3, 5, 5) for _ in range(2))
    found = [qkv.statistics.measure_weights(w) for w in attentions]
    for draw, name in ((plot.entropy, "entropy"), (plot.sinks, "sink")):
        expected = torch.stack([getattr(x, name)[0].mean(-1) for x in found])
        np.testing.assert_allclose(shown(draw(attentions)), expected, rtol=1e-5)
    profile = made.gpt()
    np.testing.assert_allclose(shown(plot.sinks(profile)).ravel(), profile.heads()["sink"])
    np.testing.assert_allclose(shown(plot.by_head(profile.heads(), "previous")).ravel(), profile.heads()["previous"])


DRAWN: dict[str, Callable[[], Any]] = {
    "one token": lambda: plot.weights(weights(1, 1), ["a"], title="A title much longer than the matrix is wide"),
    "long names": lambda: plot.weights(weights(12, 12), WORDS, values=True),
    "300 tokens": lambda: plot.weights(weights(300, 300), ["name"] * 300, title="300"),
    "scores": lambda: plot.matrix(torch.randn(9, 4), what="score", labels=("row", "column")),
    "heads": lambda: plot.heads(weights(8, 12, 12), WORDS, title="Eight heads"),
    "panels": lambda: plot.panels({"a long name of a matrix": weights(3, 3), "b": weights(3, 6)}),
    "12 × 12 heads": lambda: plot.model(weights(12, 12, 6, 6), title="All"),
    "one head": lambda: plot.model(weights(1, 1, 3, 3), title="A title much longer than the wall is wide"),
    "graph of two texts": lambda: plot.arcs(weights(3, 12), WORDS, queries=WORDS[:3], title="Graph"),
    "received": lambda: plot.received(weights(2, 12, 12), WORDS, title="Received"),
    "received by 300": lambda: plot.received(weights(2, 300, 300), ["name"] * 300),
    "one row of heads": lambda: plot.sinks(weights(6, 9, 9)),
    "alignment": lambda: plot.alignment(weights(4, 12), WORDS, WORDS[:4]),
    "overlay": lambda: plot.overlay(torch.full((6, 9, 3), 255, dtype=torch.uint8), weights(2, 6), (2, 3)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_all_text_is_on_the_page(name: str) -> None:
    drawn = DRAWN[name]()
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    assert isinstance(figure, Figure)
    all_text_is_on_the_page(figure)


def test_notebooks_show_figures_and_axes() -> None:
    for drawn in (plot.weights(weights(2, 2)), plot.heads(weights(2, 3, 3))):
        assert drawn._repr_png_().startswith(b"\x89PNG")


REFUSALS: list[tuple[str, Callable[[], Any]]] = [
    ("w", lambda: plot.weights(torch.randn(4, 4))),
    ("w", lambda: plot.weights(torch.ones(4))),
    ("w", lambda: plot.weights([["a"]])),
    ("w", lambda: plot.model((None, None))),
    ("w", lambda: plot.model(((weights(1, 2, 3, 3),),))),
    ("w", lambda: plot.arcs(weights(60, 60))),
    ("w", lambda: plot.weights(torch.eye(3) * 1j)),
    ("item", lambda: plot.weights(weights(2, 1, 3, 3))),
    ("item", lambda: plot.weights(weights(2, 1, 3, 3), item=2)),
    ("head", lambda: plot.weights(weights(1, 2, 3, 3))),
    ("layer", lambda: plot.heads((weights(1, 2, 3, 3),) * 2)),
    ("tokens", lambda: plot.weights(weights(3, 3), ["a"])),
    ("tokens", lambda: plot.weights(weights(3, 3), "abc")),
    ("queries", lambda: plot.weights(weights(4, 3), list("abc"))),
    ("tokens", lambda: plot.arcs(masks.Causal())),
    ("mask", lambda: plot.weights(weights(3, 3), mask=torch.zeros(3, 3))),
    ("m", lambda: plot.matrix(weights(1, 3, 3))),
    ("matrices", lambda: plot.panels({})),
    ("columns", lambda: plot.heads(weights(2, 3, 3), columns=0)),
    ("statistic", lambda: plot.by_head(made.gpt().heads(), "sinc")),
    ("grid", lambda: plot.overlay(np.zeros((4, 4, 3)), weights(1, 4), (2, 3))),
]


@pytest.mark.parametrize(("argument", "call"), REFUSALS)
def test_arguments_that_cannot_be_drawn_are_refused(argument: str, call: Callable[[], Any]) -> None:
    with refused(argument):
        call()
