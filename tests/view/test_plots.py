"""Figures, of weights by `qkv.plot` and of profiles: the right numbers, all text on the page, and no pyplot."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

import profile_fixture as made
import qkv
from conftest import refusals, refused
from qkv import Profile, masks, plot
from qkv.plot.map import sentence
from qkv.profiler.data.findings import Finding, FindingList
from qkv.statistics.maps import Picture

WORDS = [
    "internationalisation", "Donaudampfschifffahrt", "the", "cat", "sat", "on", "a", "mat", ".", "⏎", "$x$", "שלום",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make imports of pyplot fail."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape).softmax(-1)


def all_text_is_on_the_page(figure: Figure, form: str = "png") -> bytes:
    """No text that is drawn is cut off by the edge of the figure, which is returned as a file of this form."""
    file = io.BytesIO()
    figure.savefig(file, format=form, dpi=72)  # settles every position
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            out = [tick for tick in ticks if not axes.axison or not low <= tick.get_loc() <= high]
            unseen |= {label for tick in out for label in (tick.label1, tick.label2)}
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in unseen:
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, f"{text.get_text()!r} at {box}"
    return file.getvalue()


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
    profile = pooled(profile, 8)
    axes = plot.weights(profile, layer=0, head=0)
    assert axes.get_xlim() == (-0.5, profile.data.sizes["key"] - 0.5)
    np.testing.assert_allclose(shown(axes).compressed().max(), profile.data["map_max"].values[0, 0, 0].max())


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
        first = int(name == "sink")  # the first query sees the first key alone in a causal model
        expected = torch.stack([getattr(x, name)[0][:, first:].mean(-1) for x in found])
        np.testing.assert_allclose(shown(draw(attentions)), expected, rtol=1e-5)
    profile = made.gpt()
    np.testing.assert_allclose(shown(plot.sinks(profile)).ravel(), profile.heads()["sink"])
    np.testing.assert_allclose(shown(plot.by_head(profile.heads(), "previous")).ravel(), profile.heads()["previous"])


DRAWN: dict[str, Callable[[], Any]] = {
    "one token": lambda: plot.weights(weights(1, 1), ["a"], title="A title much longer than the matrix is wide"),
    "long names": lambda: plot.weights(weights(12, 12), WORDS, values=True),
    "scores": lambda: plot.matrix(torch.randn(9, 4), what="score", labels=("row", "column")),
    "heads": lambda: plot.heads(weights(8, 12, 12), WORDS, title="Eight heads"),
    "panels": lambda: plot.panels({"a long name of a matrix": weights(3, 3), "b": weights(3, 6)}),
    "graph": lambda: plot.arcs(weights(12, 12), WORDS, title="Graph"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_all_text_is_on_the_page(name: str) -> None:
    drawn = DRAWN[name]()
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    assert isinstance(figure, Figure)
    all_text_is_on_the_page(figure)


WEIGHTS_REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("w", lambda: plot.weights(torch.randn(4, 4))),
    ("w", lambda: plot.weights(torch.ones(4))),
    ("w", lambda: plot.weights([["a"]])),
    ("w", lambda: plot.model((None, None))),
    ("w", lambda: plot.model(((weights(1, 2, 3, 3),),))),
    ("w", lambda: plot.arcs(weights(60, 60))),
    ("w", lambda: plot.arcs(weights(3, 4))),
    ("w", lambda: plot.weights(torch.eye(3) * 1j)),
    ("item", lambda: plot.weights(weights(2, 1, 3, 3))),
    ("item", lambda: plot.weights(weights(2, 1, 3, 3), item=2)),
    ("head", lambda: plot.weights(weights(1, 2, 3, 3))),
    ("layer", lambda: plot.heads((weights(1, 2, 3, 3),) * 2)),
    ("tokens", lambda: plot.weights(weights(3, 3), ["a"])),
    ("tokens", lambda: plot.weights(weights(3, 3), "abc")),
    ("tokens", lambda: plot.model(weights(2, 1, 3, 3), ["a"])),
    ("source", lambda: plot.alignment(weights(3, 3), ["a"], list("abc"))),
    ("queries", lambda: plot.weights(weights(4, 3), list("abc"))),
    ("tokens", lambda: plot.arcs(masks.Causal())),
    ("mask", lambda: plot.weights(weights(3, 3), mask=torch.zeros(3, 3))),
    ("m", lambda: plot.matrix(weights(1, 3, 3))),
    ("matrices", lambda: plot.panels({})),
    ("matrices", lambda: plot.panels(torch.eye(3))),  # type: ignore[arg-type]
    ("columns", lambda: plot.heads(weights(2, 3, 3), columns=0)),
    ("statistic", lambda: plot.by_head(made.gpt().heads(), "sinc")),
    ("grid", lambda: plot.overlay(np.zeros((4, 4, 3)), weights(1, 4), (2, 3))),
    ("statistic", lambda: plot.by_head(weights(2, 3), ["sink"])),  # type: ignore[arg-type]
    *(
        (name, lambda name=name, x=x: plot.matrix(weights(3, 3), **{name: x}))
        for name, x in (("title", 3), ("vmax", "a"), ("tokens", 5), ("labels", "query"), ("ax", np.array([None, None])))
    ),
]

test_arguments_that_cannot_be_drawn_are_refused = refusals(WEIGHTS_REFUSED)


# --- figures of profiles ----------------------------------------------------------------------------------------------


FIGURES = {
    "overview": lambda p: p.plot.overview(),
    "received": lambda p: p.plot.received(),
    "head": lambda p: p.plot.head(1, 1),
    "similarity": lambda p: p.plot.similarity(),
    "overlay": lambda p: p.plot.overlay(np.zeros((6, 10, 3)), (1, 4), [0, 1]),
    "types": lambda p: p.plot.types(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_vector_files_store_text_as_text(name: str) -> None:
    figure = FIGURES[name](made.encoder_decoder())
    assert isinstance(figure, Figure)
    svg = ElementTree.fromstring(all_text_is_on_the_page(figure, "svg"))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert figure.texts[0].get_text().splitlines()[0] in texts
    assert matplotlib.rcParams["svg.fonttype"] == "path", "the global setting is restored"


def test_map_shows_the_weights() -> None:
    profile = made.encoder_decoder()
    figure = profile.plot.map(1, 2, text=1, group="cross")
    all_text_is_on_the_page(figure)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_array_equal(shown, profile.groups["cross"]["weights"].values[1, 1, 2, :4, :5])
    assert "cross attention" in figure.texts[1].get_text()


def pooled(profile: Profile, size: int) -> Profile:
    """The profile of a long text: with bins of `size` × `size` instead of its weights."""
    data = profile.data
    weights = np.nan_to_num(data["weights"].values)
    n = weights.shape[-1]
    starts = np.arange(0, n, size)
    most, sums = (op.reduceat(op.reduceat(weights, starts, axis=3), starts, axis=4) for op in (np.maximum, np.add))
    tokens = np.minimum(starts + size, n) - starts
    bins = ("text", "layer", "head", "query_bin", "key_bin")
    binned = data.drop_vars("weights").assign(map_max=(bins, most), map_mean=(bins, sums / tokens[:, None] / tokens))
    return Profile({"self": binned.assign_coords(bin_queries=("text", [size]), bin_keys=("text", [size]))})


def test_the_title_of_a_map_calls_a_row_on_one_key_spread() -> None:
    means = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    picture = Picture(means, means, means, torch.arange(3), torch.arange(3))
    head_map: Any = SimpleNamespace(layer=0, head=0, key_tokens=lambda keys: ["a", "b"][keys])
    assert sentence(head_map, picture).endswith(": 85 % of the weight shown goes to “a”, key 0")
    mirrored = (0.8 * torch.eye(4) + 0.05).flip(0)
    picture = Picture(mirrored, mirrored, mirrored, torch.arange(5), torch.arange(5))
    assert sentence(head_map, picture).endswith(": each query looks at its own key, with 85 % of its weight on average")


@pytest.mark.slow
def test_map_of_a_long_text_shows_its_bins() -> None:
    profile = made.gpt()
    figure = pooled(profile, 8).plot.map(1, 2)
    largest, average = (np.ma.asarray(axes.images[0].get_array()) for axes in figure.axes[::2])
    weights = profile.data["weights"].values[0, 1, 2]
    assert largest.shape == (8, 8)
    assert largest[3, 2] == weights[24:32, 16:24].max()
    assert average[7, 0] == pytest.approx(weights[56:, :8].mean(), rel=1e-5), "the last bin is smaller"
    np.testing.assert_array_equal(largest.mask, np.triu(np.ones((8, 8), bool), 1), "masked by the causal mask")
    title = figure.axes[0].get_title(loc="left")
    assert title == "Largest weight in bins of 8 × 8 tokens at most"
    assert figure.axes[0].get_xlim() == (-0.5, 60.5)


def test_alignment_shows_words_by_words() -> None:
    profile = made.encoder_decoder()
    weights = profile.groups["cross"]["weights"].values[0]
    figure = profile.plot.alignment()
    all_text_is_on_the_page(figure)
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), weights.mean((0, 1)), rtol=1e-5)
    rows, columns = ([t.get_text() for t in ticks] for ticks in (
        figure.axes[0].get_yticklabels(), figure.axes[0].get_xticklabels()))  # fmt: skip
    assert rows == ["The", "house", "is", "old", "“.”", "(next)"], "the word that each query predicts"
    assert columns == ["Das", "Haus", "am", "See", "ist", "alt", "“.”", "</s>"]
    printed = {text.get_text() for text in figure.axes[0].texts}
    assert f"{100 * weights.mean((0, 1)).max():.0f}" in printed
    one = profile.plot.alignment(1, 2, text=1)
    np.testing.assert_allclose(
        one.axes[0].images[0].get_array(), profile.groups["cross"]["weights"].values[1, 1, 2, :4, :5], rtol=1e-5
    )
    assert one.texts[0].get_text().startswith("Layer 1, head 2: a target word puts")
    layer = profile.plot.alignment(0).axes[0].images[0].get_array()
    np.testing.assert_allclose(layer, weights[0].mean(0), rtol=1e-5)


@pytest.mark.slow
def test_tokens_are_not_rendered_as_math() -> None:
    tokens = ["$x^2$", "_{", "$", "\\frac", "b", "c"]
    weights = made.softmax(np.random.default_rng(0).normal(size=(1, 1, 6, 6)))
    profile = Profile({"self": made.dataset_from_weights([weights], [tokens])}, {"model": "a $ b"})
    figure = profile.plot.map(0, 0)
    all_text_is_on_the_page(figure)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[:3] == [r"\$x^2\$", "“_{”", r"“\$”"]


# --- compositions -----------------------------------------------------------------------------------------------------


def test_a_composition_shows_its_mask_its_bias_and_the_weights_of_the_example() -> None:
    slopes, normalizer = torch.tensor([0.25, 1.0]), qkv.normalizers.Sigmoid()
    parts = {"mask": masks.Window(3) & masks.Causal(), "bias": qkv.biases.ALiBi(slopes), "normalizer": normalizer}
    before = torch.random.get_rng_state()
    figure = plot.composition(**parts, n=9, heads=2, head_dim=4, head=1)
    assert torch.equal(torch.random.get_rng_state(), before), "a picture must not draw from the user's generator"
    mask, bias, drawn = (shown(axes) for axes in figure.axes if axes.get_title(loc="left") and axes.images)
    seen = masks.Window(3).dense(9, 9)[0, 0].numpy()
    np.testing.assert_array_equal(mask, seen)
    distance = np.arange(9)[:, None] - np.arange(9)
    np.testing.assert_array_equal(np.ma.getmaskarray(np.ma.masked_invalid(bias)), ~seen)
    np.testing.assert_allclose(np.where(seen, bias, 0), np.where(seen, -1.0 * distance, 0), atol=1e-6)
    bars = [bar.get_height() for bar in figure.axes[-1].patches]
    np.testing.assert_allclose(bars, np.nan_to_num(np.ma.filled(drawn[-1], 0.0)), atol=1e-7)
    assert 0 < max(bars) <= 1
    with refused("head"):
        plot.composition(heads=2, head=2)


class Diagonal(masks.Mask):
    def sees(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, grid: Any) -> torch.Tensor:
        return q == k


@pytest.mark.parametrize("part", [
    Diagonal(), masks.Document(torch.arange(40) // 10), qkv.biases.T5Bias(torch.zeros(32, 3)),
    qkv.biases.ByDistance(torch.zeros(5, 31)), qkv.scores.General(torch.eye(6)),
    qkv.normalizers.Softmax(sink=torch.zeros(3)), qkv.Attention(mask=masks.Causal()),
])  # fmt: skip
def test_a_notebook_shows_a_picture_of_every_part_whatever_its_sizes(part: Any) -> None:
    assert part._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_a_plan_and_findings_with_their_text_escaped() -> None:
    x = torch.zeros(1, 1, 4, 8)
    plan = qkv.plan(x, x, x, mask=masks.Predicate(lambda b, h, q, k: q < k))
    assert "&lt;lambda&gt;" in plan._repr_html_()
    found = FindingList([Finding("3 of 4", "heads attend to <s>", "a & b")])
    assert found._repr_html_() == (
        "<table><tr><td>3 of 4</td><td>heads attend to &lt;s&gt;</td><td>a &amp; b</td></tr></table>"
    )
