"""Figures of profiles: they show the right numbers, keep all text inside the figure, and do not import pyplot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import profile_fixture as made
from conftest import refused
from drawn import all_text_is_on_the_page
from qkv.errors import InputError
from qkv.profiler import Profile


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make imports of pyplot fail."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


FIGURES = {
    "overview": lambda p: p.plot.overview(),
    "one statistic": lambda p: p.plot.overview("entropy_ratio"),
    "received": lambda p: p.plot.received(),
    "entropy": lambda p: p.plot.entropy(),
    "head": lambda p: p.plot.head(1, 1),
}
MORE = {
    "similarity": lambda p: p.plot.similarity(),
    "map": lambda p: p.plot.map(0, 0),
    "alignment": lambda p: p.plot.alignment(group=p.main),
    "overlay": lambda p: p.plot.overlay(np.zeros((6, 10, 3)), (1, 4), [0, 1]),
    "types": lambda p: p.plot.types(),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_a_long_text_draw_with_all_text_on_the_page(name: str) -> None:
    all_text_is_on_the_page(FIGURES[name](made.long(2048)))


@pytest.mark.parametrize("name", ["overview", "head"])
def test_figures_of_learned_sinks_draw_with_all_text_on_the_page(name: str) -> None:
    all_text_is_on_the_page(FIGURES[name](made.gpt(61, True)))


@pytest.mark.parametrize("name", FIGURES | MORE)
def test_vector_files_store_text_as_text(name: str) -> None:
    figure = (FIGURES | MORE)[name](made.encoder_decoder())
    assert isinstance(figure, Figure)
    svg = ElementTree.fromstring(all_text_is_on_the_page(figure, "svg"))
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert figure.texts[0].get_text().splitlines()[0] in texts
    assert matplotlib.rcParams["svg.fonttype"] == "path", "the global setting is restored"


def test_states_figure_draws_a_line_for_each_stack_and_text() -> None:
    stacks = {
        "encoder": xr.Dataset(
            {"cosine": (("text", "depth"), [[0.1, 0.6, 0.2], [0.3, 0.8, 0.4]])}, {"n_tokens": ("text", [5, 7])}
        ),
        "decoder": xr.Dataset(
            {"cosine": (("text", "depth"), [[0.1, 0.2], [0.1, 0.2]])}, {"n_tokens": ("text", [3, 3])}
        ),
    }
    profile = made.encoder_decoder()
    profile.residual = stacks
    figure = profile.plot.states()
    all_text_is_on_the_page(figure)
    assert "at depth 1: cosine 0.70, against 0.20 at the input and 0.30" in " ".join(figure.texts[0].get_text().split())
    lines = [line.get_ydata() for line in figure.axes[0].lines[1:]]
    assert [len(line) for line in lines] == [3, 3, 3, 2, 2, 2]
    np.testing.assert_allclose(lines[2], [0.2, 0.7, 0.3])
    profile.residual = {"encoder": stacks["encoder"].drop_vars("cosine")}
    with refused("profile", match="again"):
        profile.plot.states()


def test_figures_show_the_numbers_of_the_table_and_titles_the_finding() -> None:
    profile = made.gpt()
    heads = profile.heads()
    figure = profile.plot.overview()
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == [
        "First token, %", "Previous token, %", "Self, %", "Local window, %", "Distance, tokens", "Entropy ratio",
    ]  # fmt: skip
    shown = np.asarray(panels[0].images[0].get_array())
    np.testing.assert_allclose(shown.ravel(), heads["sink"])
    shares = [axes.images[0].norm.vmax for axes in panels[:4]]
    assert shares == [heads[["sink", "previous", "self", "local"]].max().max()] * 4, "shares have one scale"
    assert panels[5].images[0].norm.vmax == 1
    figure = made.encoder_decoder().plot.overview(group="cross")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert titles == ["First token, %", "Entropy ratio"], "the others are undefined"
    title = " ".join(text.get_text() for text in profile.plot.received().texts)
    assert "“Once” at position 0 receives 23 % of all attention" in title
    assert profile.plot.head(0, 1).texts[0].get_text() == "Layer 0, head 1: previous 100 %"


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


def test_map_of_a_long_text_shows_its_bins() -> None:
    profile = made.gpt()
    figure = pooled(profile, 8).plot.map(1, 2)
    all_text_is_on_the_page(figure)
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


def grid_profile() -> tuple[Profile, np.ndarray]:
    """Three queries over a class token and a grid of 2 × 3 cells; each attends mostly to one cell."""
    weights = np.full((1, 1, 3, 7), 0.02)
    for query, cell in enumerate((0, 4, 5)):
        weights[0, 0, query, 1 + cell] = 0.86
    names = [["<s>", "red", "cross"]], [["[CLS]", *"012345"]]
    data = made.dataset_from_weights([weights], *names, name="cross", special=("[CLS]",))
    return Profile({"cross": data}, {"model": "captioner"}), weights


def test_overlay_is_brightest_at_the_attended_cell() -> None:
    profile, _ = grid_profile()
    image = np.full((20, 30, 3), 200, np.uint8)
    figure = profile.plot.overlay(image, (2, 3))
    all_text_is_on_the_page(figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["the image", "red", "cross", "(next)"]
    pictures = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    np.testing.assert_allclose(pictures[0], 200 / 255)
    for picture, (row, column) in zip(pictures[1:], ((0, 0), (1, 1), (1, 2)), strict=True):
        cells = picture[..., 0].reshape(2, 10, 3, 10).mean((1, 3))
        assert np.unravel_index(cells.argmax(), cells.shape) == (row, column)
        assert picture.max() == pytest.approx(200 / 255, rel=0.05)
        assert 0.15 < picture.min() / picture.max() < 0.3, "cells without weight are dark, but not black"
    assert "86 % on one of 6 cells" in figure.axes[1].get_xlabel()
    assert "1 keys outside the grid" in figure.texts[1].get_text()
    one = profile.plot.overlay(image / 255, (2, 3), 1, corners=True)
    assert [axes.get_title(loc="left") for axes in one.axes] == ["the image", "cross"]
    brightest = np.asarray(one.axes[1].images[0].get_array())[..., 0]
    assert np.unravel_index(brightest.argmax(), brightest.shape) == (10, 10), "cell (1, 1) is centred on its corner"


GRID = grid_profile()[0]
IMAGE = np.zeros((4, 6, 3))
REFUSALS: list[tuple[str, str | None, Callable[[], object]]] = [
    ("layer", "got 9", lambda: made.gpt().plot.head(9, 0)),
    ("head", None, lambda: made.gpt().plot.map(0, -1)),
    ("text", None, lambda: made.gpt().plot.received(3)),
    ("statistic", None, lambda: made.gpt().plot.overview("magic")),
    ("group", None, lambda: made.gpt().plot.alignment(0)),
    ("layer", "head 1", lambda: made.encoder_decoder().plot.alignment(head=1)),
    ("layer", "got 5", lambda: made.encoder_decoder().plot.alignment(5)),
    ("grid", None, lambda: GRID.plot.overlay(IMAGE, (3, 3))),
    ("query", None, lambda: GRID.plot.overlay(IMAGE, (2, 3), 3)),
    ("image", "shape", lambda: GRID.plot.overlay(IMAGE[..., 0], (2, 3))),
    ("image", "0 to 2", lambda: GRID.plot.overlay(IMAGE + np.arange(3.0), (2, 3))),
]


@pytest.mark.parametrize(("argument", "match", "call"), REFUSALS)
def test_figures_refuse_what_the_profile_lacks(argument: str, match: str | None, call: Callable[[], object]) -> None:
    with refused(argument, match):
        call()


def test_figures_refuse_maps_that_are_not_stored_and_more_pictures_than_fit() -> None:
    for call in (lambda: made.long(2048).plot.map(0, 0), lambda: made.long(2048).plot.alignment(group="self")):
        with pytest.raises(InputError, match="no dense maps of text 0, which has 2048 tokens"):
            call()
    with pytest.raises(InputError, match="61 queries; expected at most 35"):
        made.gpt().plot.overlay(IMAGE, (2, 3))


def test_tokens_are_not_rendered_as_math() -> None:
    tokens = ["$x^2$", "_{", "$", "\\frac", "b", "c"]
    weights = made.softmax(np.random.default_rng(0).normal(size=(1, 1, 6, 6)))
    profile = Profile({"self": made.dataset_from_weights([weights], [tokens])}, {"model": "a $ b"})
    labels = [label.get_text() for label in profile.plot.map(0, 0).axes[0].get_xticklabels()]
    assert labels[:3] == [r"\$x^2\$", "“_{”", r"“\$”"]
    for figure in (profile.plot.received(), profile.plot.map(0, 0), profile.plot.head(0, 0)):
        all_text_is_on_the_page(figure)
