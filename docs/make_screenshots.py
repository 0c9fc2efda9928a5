"""Pictures of the viewer for the documentation: every page in Chromium, over models that come with qkv.

.venv/bin/python docs/make_screenshots.py [NAME …]        all of them unless named; writes docs/figures/view-NAME.png
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image

from qkv.models.loading import load_model
from qkv.profiler.corpora import default_text
from qkv.server.run import serve_in_thread
from qkv.server.session import Session

FIGURES = Path(__file__).parent / "figures"
LARGEST = 250_000  # bytes of a picture: they are in every clone
DESKTOP, PHONE = {"width": 1280, "height": 720}, {"width": 390, "height": 844}
CODE = 'import os\n\n\nclass Stack:\n    """A list that is read from its end."""\n\n    def __init__(self'

# name: page of the viewer, its state, and how the browser is set up. Source 0 is MiniLM, 1 qkv-mini.
SHOTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "overview": ("overview", {"source": 0, "layer": 3, "head": 5}, {}),
    "wall": ("wall", {"source": 0, "layer": 0, "head": 2}, {"device_scale_factor": 1.5}),  # many colours
    "map": ("map", {"source": 0, "layer": 0, "head": 2, "x": 30, "y": 30, "z": 3.6, "cq": 33, "ck": 32}, {}),
    "text": ("text", {"source": 0, "layer": 2, "head": 4, "pins": 40}, {}),
    "sinks": ("sinks", {"source": 1, "after": 2, "layer": 1, "head": 2}, {}),
    "live": ("live", {"prompt": CODE, "edits": "o1-all", "at": "3.0"}, {}),
    "compare": ("compare", {"source": 0, "layer": 0, "head": 2, "bsource": 0, "blayer": 5, "bhead": 7}, {}),
    "align": ("align", {"view": "translation"}, {}),
    "captions": ("align", {"view": "captions", "scene": 9, "word": 1}, {}),
    "dark": ("map", {"source": 0, "layer": 1, "head": 9}, {"color_scheme": "dark"}),
    "phone": ("text", {"source": 0, "layer": 2, "head": 4, "pins": 12}, {"viewport": PHONE, "has_touch": True}),
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
    session.add_model(load_model("minilm"), default_text())
    session.add_model(load_model("qkv-mini"), CODE)
    session.prepare()
    session.add_intervention(1, "off-by-one")
    session.prepare()
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


def small(png: bytes) -> bytes:
    """The same picture in as many colours as its size allows, rare colours such as those of text included."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    choices = (
        picture,
        *(picture.quantize(n, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for n in (256, 128, 64)),
    )
    for choice in choices:
        out = io.BytesIO()
        choice.save(out, "PNG", optimize=True)
        if out.tell() <= LARGEST:
            break
    return out.getvalue()


if __name__ == "__main__":
    screenshots(names=sys.argv[1:])
