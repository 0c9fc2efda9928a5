"""Performance of the viewer in a browser: time until the overview is interactive, frame rate of the map, page sizes.

python -m benchmarks.viewer_page [TOKENS]    of the map, 100,000 unless given; writes results/viewer_page.json

In Chromium without a window, and without a graphics card unless the machine has one.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from playwright.sync_api import sync_playwright

from benchmarks.timing import THREADS, save
from qkv.models.loading import Loaded, random_gpt2
from qkv.server.run import serve_in_thread
from qkv.server.session import Session

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import profile_fixture as made

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS, HEADS, LENGTH, REPEATS = 32, 32, 2048, 7
TOKENS, ROUNDS, STEPS = 100_000, 3, 120
VIEWS = ("overview", "map", "text", "sinks", "live", "compare", "align")

# The time when every cell is painted and the page can handle the next key press.
INTERACTIVE = """
new MutationObserver((_, observer) => {
  if (document.querySelectorAll(".overview-grid [data-layer]").length < COUNT) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.interactive = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
""".replace("COUNT", str(LAYERS * HEADS))
ANSWERED = """() => performance.getEntriesByType("resource").find(({ name }) => name.endsWith("/page")).responseEnd"""

# Simulated input, one step per frame: drags in a circle, and zooms in and out with the wheel. It ends where it began,
# so that the next round needs the same tiles. Returns the milliseconds between frames.
TOUR = """async ({ steps }) => {
  const canvas = document.querySelector(".map-canvas"), box = canvas.getBoundingClientRect();
  const middle = [box.left + box.width / 2, box.top + box.height / 2], frames = [];
  const pointer = (kind, [clientX, clientY]) => canvas.dispatchEvent(new PointerEvent(kind,
    { pointerId: 1, pointerType: "mouse", button: 0, buttons: 1, clientX, clientY, bubbles: true }));
  const circle = (at) => [Math.sin(2 * Math.PI * at), 1 - Math.cos(2 * Math.PI * at)];
  const round = (at) => circle(at).map((x, side) => middle[side] + 120 * x);
  const frame = () => new Promise(requestAnimationFrame);
  canvas.setPointerCapture = () => {}; // no real pointer is down
  let before = await frame();
  const timed = async () => { const now = await frame(); frames.push(now - before); before = now; };
  pointer("pointerdown", middle);
  for (let at = 0; at <= steps; at++) { pointer("pointermove", round(at / steps)); await timed(); }
  pointer("pointerup", middle);
  for (let at = 0; at < steps; at++) {
    const deltaY = at < steps / 2 ? -12 : 12; // finer than a notch: each moves the map at once
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY, clientX: middle[0], clientY: middle[1], cancelable: true }));
    await timed();
  }
  return frames;
}"""


def viewer_page(tokens: int = TOKENS, repeats: int = REPEATS) -> dict[str, Any]:
    """Medians over fresh browser contexts with empty caches."""
    torch.set_num_threads(THREADS)
    overview, weights = _overview(repeats)
    moving = _moving(tokens)
    per_second = 1000 / statistics.mean(moving["frames"])
    return {
        "heads": LAYERS * HEADS,
        "tokens of the overview": LENGTH,
        "seconds until the overview is interactive": overview,
        "overview: seconds from the server's answer to interactive": statistics.median(overview["after the answer"]),
        "tokens of the map": tokens,
        "frames a second while moving the map, cached tiles": per_second,
        "milliseconds of a frame": {
            "median": statistics.median(moving["frames"]),
            "95th percentile": sorted(moving["frames"])[int(0.95 * len(moving["frames"]))],
            "most": max(moving["frames"]),
        },
        "tiles that the tour shows": moving["tiles"],
        "tiles asked for in the rounds that count": moving["asked"],
        "heaviest page without data, kB": max(weights["views"].values()) / 1000,
        "all pages together without data, kB": sum(weights["files"].values()) / 1000,
        "bytes by view": weights["views"],
        "bytes by file": weights["files"],
    }


@contextmanager
def _browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def _page(browser: Browser) -> Page:
    return browser.new_context(viewport={"width": 1280, "height": 720}, reduced_motion="no-preference").new_page()


def _overview(repeats: int) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Seconds until interactive, and bytes of the pages and their files."""
    session = Session("benchmark")
    session.add_profile(made.long(LENGTH, LAYERS, HEADS))
    session.prepare()
    seconds: dict[str, list[float]] = {"after the answer": [], "after the click": []}
    files: dict[str, int] = {}
    views = {}
    with serve_in_thread(session) as url, _browser() as browser:
        for _ in range(repeats + 1):
            page = _page(browser)
            page.add_init_script(INTERACTIVE)
            page.goto(f"{url}#/overview")
            page.wait_for_function("() => window.interactive")
            whole, answered = page.evaluate("() => window.interactive"), page.evaluate(ANSWERED)
            seconds["after the answer"].append((whole - answered) / 1000)
            seconds["after the click"].append(whole / 1000)
            page.context.close()
        for view in VIEWS:
            page = _page(browser)
            got: dict[str, int] = {}
            page.on(
                "response",
                lambda answer, got=got: None if "/api/" in answer.url else got.update({answer.url: len(answer.body())}),
            )
            page.goto(f"{url}#/{view}")
            page.wait_for_selector("main > section:not([aria-busy])")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(200)
            page.context.close()
            views[view] = sum(got.values())
            files |= {name.removeprefix(url) or "/": size for name, size in got.items()}
    return {name: found[1:] for name, found in seconds.items()}, {"views": views, "files": dict(sorted(files.items()))}


def _moving(tokens: int) -> dict[str, Any]:
    """Milliseconds between frames of tours whose tiles are all cached."""
    session = Session("benchmark")
    session.add_model(Loaded("random", random_gpt2(tokens, layers=1, heads=1), None), torch.arange(tokens)[None] % 251)
    session.prepare()
    [source] = session.sources
    if source.state != "ready":
        raise RuntimeError(source.error)
    frames: list[float] = []
    with serve_in_thread(session) as url, _browser() as browser:
        page = _page(browser)
        tiles: list[str] = []
        page.on("request", lambda request: tiles.append(request.url) if "/tiles/" in request.url else None)
        page.goto(f"{url}#/map?layer=0&head=0&x={tokens // 2}&y={tokens // 2}&z=-3")
        page.wait_for_selector(".map-canvas")
        known = -1
        while known < len(tiles):  # until a tour requests no new tile
            known = len(tiles)
            page.evaluate(TOUR, {"steps": STEPS})
            page.wait_for_timeout(500)
            page.wait_for_load_state("networkidle", timeout=600_000)
        for _ in range(ROUNDS):
            frames += page.evaluate(TOUR, {"steps": STEPS})
        asked = len(tiles) - known
        page.context.close()
    return {"frames": frames, "tiles": known, "asked": asked}


def main() -> None:
    result = viewer_page(int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS)
    print(json.dumps(result, indent=1))
    print(save("viewer_page", result))


if __name__ == "__main__":
    main()
