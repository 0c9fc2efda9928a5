"""Pictures of the viewer for the documentation: every page in Chromium, over SmolLM2 on a question.

.venv/bin/python docs/make_screenshots.py [NAME …]   all unless named; writes docs/figures/view-NAME.png, or sources.png
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import numpy as np
from PIL import Image

import qkv
from qkv.models.loading import chat_tokens, load_model
from qkv.report.html import write_sources
from qkv.server.run import serve_in_thread
from qkv.server.session import Session

FIGURES = Path(__file__).parent / "figures"
LARGEST = 250_000  # bytes of a picture: they are in every clone
DESKTOP, PHONE = {"width": 1280, "height": 720}, {"width": 390, "height": 844}
QUESTION = "Why is the sky blue?"
PASSAGES = (
    "The old town hall was built of red brick. It has a clock from 1871 that still rings every hour.",
    "The ferry across the river ran from 1890 on. It carried twelve horses at a time, and stopped in winter.",
    "The iron bridge was built in 1932 by the engineer Clara Vogel. Before, people had to wait for the ferry.",
    "The market is held on Saturdays beside the church. In summer, farmers sell cherries and honey.",
    "The railway station was closed in 1968. Today it houses a library with a reading room.",
)

# name: page of the viewer, its state, and how the browser is set up. Source 0 is SmolLM2, 1 it with softmax off by one.
SHOTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "overview": ("overview", {}, {}),
    "wall": ("wall", {}, {"device_scale_factor": 1.5}),  # many colours
    "map": ("map", {}, {}),
    "text": ("text", {"pins": 28}, {}),
    "sinks": ("sinks", {"after": 1}, {}),
    "live": ("live", {"edits": "o1-all"}, {"device_scale_factor": 1.5}),
    "compare": ("compare", {}, {}),
    "align": ("align", {"view": "translation"}, {}),
    "captions": ("align", {"view": "captions", "scene": 9, "word": 1}, {}),
    "dark": ("overview", {}, {"color_scheme": "dark", "device_scale_factor": 1.5}),
    "phone": ("text", {"pins": 28}, {"viewport": PHONE, "has_touch": True}),
}


def screenshots(folder: Path = FIGURES, names: list[str] | None = None) -> None:
    """Write view-NAME.png; the pictures stay as they are where there is no browser to make them."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no chromium or no playwright: the screenshots of the viewer stay as they are")
        return
    session = Session("qkv")
    model = load_model("smollm2", head=True)
    session.add_model(model, chat_tokens(model.tokenizer, QUESTION))
    session.prepare()
    edited = session.add_intervention(0, "off-by-one")
    while edited.state == "running":  # in the session's thread
        time.sleep(0.1)
    with serve_in_thread(session) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names or SHOTS:
            page_name, state, options = SHOTS[name]
            context = browser.new_context(**{"viewport": DESKTOP, "device_scale_factor": 2, **options})
            page = context.new_page()
            page.goto(f"{url}#/{page_name}?{urlencode(state)}")
            page.wait_for_selector("html[data-state=ready]", state="attached", timeout=120_000)  # all is drawn
            (folder / f"view-{name}.png").write_bytes(small(page.screenshot()))
            context.close()
        browser.close()


def sources(folder: Path = FIGURES) -> None:
    """Write sources.png: the page of `qkv sources` on an answer of SmolLM2, its third sentence chosen."""
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as kept, sync_playwright() as playwright:
        file = write_sources(qkv.sources("smollm2", PASSAGES, "Who built the iron bridge, and when?"), f"{kept}/x.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1160, "height": 760}, device_scale_factor=2)
        page.goto(file.as_uri())
        page.locator("#answer button").nth(2).click()
        (folder / "sources.png").write_bytes(small(page.screenshot(full_page=True)))
        browser.close()


def small(png: bytes) -> bytes:
    """The same picture in as many colours as its size allows, rare colours such as those of text included."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in (None, 256, 128, 64):
        out = io.BytesIO()
        (picture if colours is None else quantized(picture, colours)).save(out, "PNG", optimize=True)
        if out.tell() <= LARGEST:
            break
    return out.getvalue()


def quantized(picture: Image.Image, colours: int) -> Image.Image:
    """The picture in a palette of some colours, of which that of the paper, the most frequent one, is exact."""
    found = picture.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    paper: Any = max(picture.getcolors(picture.width * picture.height) or [])[1]
    row, column = np.argwhere((np.asarray(picture) == paper).all(-1))[0]
    palette = found.getpalette() or []
    start = 3 * int(np.asarray(found)[row, column])
    palette[start : start + 3] = paper
    found.putpalette(palette)
    return found


if __name__ == "__main__":
    if sys.argv[1:] != ["sources"]:
        screenshots(names=sys.argv[1:])
    if not {*sys.argv[1:]} - {"sources"}:
        sources()
