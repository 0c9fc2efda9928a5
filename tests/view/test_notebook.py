"""Profiles in notebooks: the card is safe, shows the numbers of the profile, and needs no anywidget."""

from __future__ import annotations

import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import profile_fixture as made
from qkv.profiler import Profile
from qkv.profiler.data.findings import headline
from qkv.report import html as report
from qkv.report.notebook import text
from viewer_fixture import HOSTILE, PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest_plugins = ["viewer_fixture"]


class Parsed(HTMLParser):
    """The elements, text and attributes of parsed HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile() -> Profile:
    """A profile in which every string is an injection attack and every head has a sink at one of them."""
    n = len(HOSTILE)
    weights = np.full((2, 3, n, n), 0.1 / n)
    weights[..., 2] += 0.9
    data = made.dataset_from_weights([weights], [HOSTILE], modules=HOSTILE[:2], special=tuple(HOSTILE[:3]))
    return Profile({"self": data}, {"model": HOSTILE[0] + HOSTILE[4] + HOSTILE[9], "text_preview": HOSTILE[1]})


def test_the_card_shows_the_numbers_of_the_profile_and_names_every_kind_of_attention() -> None:
    profile = made.gpt()
    html = profile._repr_html_()
    parsed = Parsed(html)
    for said in ("gpt-by-hand", headline(profile.data), "3 layers × 5 heads, 61 tokens", "profile.heads()"):
        assert said in parsed.text
    opacity = [float(value) for name, value in parsed.attributes if name == "fill-opacity" and value != ".75"]
    heads = profile.heads()
    sink = heads["sink"].to_numpy()
    np.testing.assert_allclose(opacity, 0.08 + 0.92 * sink / sink.max(), atol=1e-3)
    assert re.findall(r"<title>(.*?)</title>", html)[6] == f"L1 · H1: {100 * sink[6]:.0f} %; {heads['goes_to'][6]}"
    shown = Parsed(made.encoder_decoder()._repr_html_()).text
    for name, size in (("encoder", "8 tokens"), ("decoder", "6 tokens"), ("cross", "6 × 8 tokens")):
        assert f"{name} 2 layers × 3 heads, {size}, 2 texts" in shown


def test_hostile_strings_are_text() -> None:
    html = hostile()._repr_html_()
    parsed = Parsed(html)
    assert set(parsed.tags) <= {"div", "b", "bdi", "span", "code", "svg", "g", "rect", "text", "title"}
    assert not any(name.startswith("on") or "javascript:" in value for name, value in parsed.attributes)
    assert HOSTILE[0] in parsed.text
    assert "‹U+202E›evil" in parsed.text
    assert HOSTILE[2] in parsed.text, "the tooltips name the target of the heads"
    assert not set("\u202e\x00\x07\x1b") & set(html)
    assert text("<a b='c' d=\"e\">&") == "&lt;a b=&#x27;c&#x27; d=&quot;e&quot;&gt;&amp;"
    assert text("א\u200f\n\u2028") == "א‹U+200F›‹U+000A›‹U+2028›"
    assert text("👩\u200d🔬") == "👩\u200d🔬"


def test_a_page_shows_card_and_report(browser: Browser, tmp_path: Path) -> None:
    profile = hostile()
    file = tmp_path / "notebook.html"
    frame_code = (
        '<iframe sandbox="allow-scripts" style="width:100%;height:600px" '
        f'srcdoc="{escape(report.render(profile), quote=True)}"></iframe>'
    )
    file.write_text(f'<!doctype html><meta charset="utf-8">{profile._repr_html_()}{frame_code}', "utf-8")
    troubles: list[str] = []
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.set_default_timeout(PATIENCE * 1000)
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(file.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".grid button").first.wait_for()  # a frame that is out of view need not come to rest
    assert frame.locator(".grid button").count() == 6
    frame.locator(".grid button").nth(4).click()
    frame.locator("#card h3", has_text="Layer 1, head 1").wait_for()
    assert page.locator("rect").count() == 6
    assert page.locator("rect").nth(5).bounding_box()["width"] > 15  # type: ignore[index]
    assert page.evaluate("document.documentElement.dataset.pwned ?? null") is None
    assert page.frames[1].evaluate("document.documentElement.dataset.pwned ?? null") is None
    assert page.frames[1].evaluate("origin") == "null", "the frame has an opaque origin"
    page.close()
    assert troubles == []
