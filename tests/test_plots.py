"""Figures: they show the numbers of the profile, keep their text on the page, and need no pyplot."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

import profile_fixture as made
from qkv.errors import InputError
from qkv.profiler import tables
from qkv.profiler.data import Profile


@pytest.fixture(autouse=True)
def no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing pyplot fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def all_text_is_on_the_page(figure: Figure) -> None:
    """No text that is drawn is cut off by the edge of the figure."""
    figure.savefig(io.BytesIO(), format="png", dpi=72)  # settles every position
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            unseen |= {tick.label1 for tick in ticks if not axes.axison or not low <= tick.get_loc() <= high}
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in unseen:
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, f"{text.get_text()!r} at {box}"


FIGURES = {
    "overview": lambda p: p.plot.overview(),
    "one statistic": lambda p: p.plot.overview("entropy_ratio"),
    "received": lambda p: p.plot.received(),
    "entropy": lambda p: p.plot.entropy(),
    "sink": lambda p: p.plot.sink(),
    "head": lambda p: p.plot.head(1, 1),
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("make", [made.gpt, made.encoder_decoder, lambda: made.gpt(61, True)])
def test_figures_draw_with_all_text_on_the_page(name: str, make: object) -> None:
    figure = FIGURES[name](make())  # type: ignore[operator]
    assert isinstance(figure, Figure)
    all_text_is_on_the_page(figure)


@pytest.mark.parametrize("name", FIGURES)
def test_a_long_text_draws(name: str) -> None:
    all_text_is_on_the_page(FIGURES[name](made.long(2048)))


@pytest.mark.parametrize("ending", ["pdf", "svg"])
def test_vector_files_are_written(ending: str) -> None:
    buffer = io.BytesIO()
    made.gpt().plot.head(0, 0).savefig(buffer, format=ending)
    assert len(buffer.getvalue()) > 5000


def test_overview_shows_the_table() -> None:
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


def test_statistics_that_do_not_exist_between_two_texts_are_left_out() -> None:
    figure = made.encoder_decoder().plot.overview(group="cross")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert titles == ["First token, %", "Entropy ratio"]


def test_titles_state_what_was_found() -> None:
    profile = made.gpt()
    said = " ".join(text.get_text() for text in profile.plot.sink().texts)
    assert "3 of 15 heads put more than 30 % of their weight on the first token" in said.replace("\n", " ")
    said = " ".join(text.get_text() for text in profile.plot.received().texts)
    assert "“Once” at position 0 receives 23 % of all attention" in said
    assert profile.plot.head(0, 1).texts[0].get_text() == "Layer 0, head 1: previous 100 %"


def test_the_head_card_stacks_the_destinations() -> None:
    profile = made.gpt()
    bar = profile.plot.head(2, 3).axes[0]
    widths = [patch.get_width() for patch in bar.patches]
    shares = [part[0, 2, 3] for part in tables.destinations(profile.data).values() if part[0, 2, 3] > 0]
    assert sum(widths) == pytest.approx(1)
    np.testing.assert_allclose(sorted(widths), sorted(shares), rtol=1e-5)


def test_map_shows_the_weights_or_says_why_not() -> None:
    profile = made.encoder_decoder()
    figure = profile.plot.map(1, 2, text=1, group="cross")
    all_text_is_on_the_page(figure)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_array_equal(shown, profile.groups["cross"]["weights"].values[1, 1, 2, :4, :5])
    with pytest.raises(
        InputError, match="no dense maps of text 0, which has 2048 tokens; profile it with map_tokens=2048"
    ):
        made.long(2048).plot.map(0, 0)


def test_wrong_places_are_named() -> None:
    plot = made.gpt().plot
    with pytest.raises(InputError, match="layer: got 9; this group has layers 0 to 2"):
        plot.head(9, 0)
    with pytest.raises(InputError, match="head: got -1; this group has heads 0 to 4"):
        plot.map(0, -1)
    with pytest.raises(InputError, match="text: got 3; this profile has texts 0 to 0"):
        plot.received(3)
    with pytest.raises(InputError, match="statistic: got 'magic'; expected one of sink"):
        plot.overview("magic")


def test_tokens_are_not_read_as_mathematics() -> None:
    tokens = ["$x^2$", "_{", "$", "\\frac", "b", "c"]
    weights = made.softmax(np.random.default_rng(0).normal(size=(1, 1, 6, 6)))
    profile = Profile({"self": made.dataset_from_weights([weights], [tokens])}, {"model": "a $ b"})
    labels = [label.get_text() for label in profile.plot.map(0, 0).axes[0].get_xticklabels()]
    assert labels[:3] == [r"\$x^2\$", "“_{”", r"“\$”"]
    for figure in (profile.plot.received(), profile.plot.map(0, 0), profile.plot.head(0, 0)):
        all_text_is_on_the_page(figure)
