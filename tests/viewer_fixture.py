"""A pytest plugin for the tests of the viewer: servers with profiles, and browser tabs.

Every tab records its requests and console messages. An error in the console or a request to another machine fails the
test. The browser lives for one module and not for the session, because Playwright's blocking interface keeps an event
loop running in its thread, in which no other test could use asyncio.

Test modules say pytest_plugins = ["viewer_fixture"], and import from it before that: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import profile_fixture as made
from qkv.profiler import Profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request

    from qkv.server.session import Session

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # requests to other hosts fail
PATIENCE = 60  # seconds that a condition may take on a busy machine
DESKTOP, PHONE = {"width": 1280, "height": 720}, {"width": 390, "height": 844}
PAGES = ("overview", "wall", "map", "text", "sinks", "live", "compare", "align")
PROFILE_PAGES = ("overview", "wall", "map", "text", "sinks", "compare")  # the other pages run models
LIVE_TEXT = "import os\n\nclass Stack:\n    def __init__(self"

SVG = "{http://www.w3.org/2000/svg}"

PWNED = "document.documentElement.dataset.pwned='1'"
HOSTILE = [
    f"<script>{PWNED}</script>",
    f"</script><script>{PWNED}</script>",
    f'<img src=x onerror="{PWNED}">',
    f"javascript:{PWNED}",
    "\u202eevil",  # reverses the direction of the text after it
    "שלום",
    "سلام",
    "👩‍👩‍👧‍👦",  # one pictograph of seven characters
    "\u200b",
    "\x00\x07\x1b[31m",
    "\u2028\u2029",
    "x" * 500,
    "{{script}}",
    "${1+1}`'\"",
    "&lt;b&gt;&amp;",
    "<!--",
    "end",
]
VISIBLE_PARTS = [  # parts of the hostile tokens that must appear literally wherever tokens are listed
    f"<script>{PWNED}</script>",
    '<img src=x onerror="',
    "שלום",
    "سلام",
    "👩‍👩‍👧‍👦",
    "‹U+202E›evil",
    "‹U+200B›",
    "{{script}}",
    "&lt;b&gt;&amp;",
    "<!--",
]


# ---- profiles and servers -------------------------------------------------------------------------------------


def weights(layers: int, heads: int, n: int, *, seed: int, causal: bool = False, sharp: float = 2) -> np.ndarray:
    """(layers, heads, n, n) random weights."""
    scores = np.random.default_rng(seed).normal(size=(layers, heads, n, n)) * sharp
    return made.softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf) if causal else scores)


def words(n: int, seed: int = 0) -> list[str]:
    """n different tokens."""
    stems = np.random.default_rng(seed).choice(["river", "stone", "lamp", "ship", "gull", "letter"], n)
    return [f"{stem}{i}" for i, stem in enumerate(stems)]


@cache
def two_texts() -> Profile:
    """2 layers × 4 heads over texts of 23 and 37 tokens: the first is padded."""
    tokens = [words(23), words(37, seed=1)]
    data = made.dataset_from_weights([weights(2, 4, len(x), seed=len(x)) for x in tokens], tokens)
    return Profile({"self": data}, {"model": "two texts", "text_preview": "river stone"})


@cache
def hostile() -> Profile:
    """Every string is an attack, or hard to display."""
    attention = weights(2, 3, len(HOSTILE), seed=0)
    data = made.dataset_from_weights([attention], [HOSTILE], modules=HOSTILE[:2], special=tuple(HOSTILE[:2]))
    attrs = {"model": HOSTILE[2], "text_preview": HOSTILE[0], "command": HOSTILE[1], "versions": {"x": HOSTILE[0]}}
    return Profile({"self": data}, attrs)


@cache
def wide() -> Profile:
    """Causal, 1 layer × 2 heads, 600 tokens: more than one tile."""
    tokens = words(600)
    data = made.dataset_from_weights([weights(1, 2, 600, seed=5, causal=True)], [tokens], causal=True)
    return Profile({"self": data}, {"model": "wide", "text_preview": "river stone"})


SOURCES: dict[str, Callable[[], Profile]] = {
    "gpt": made.gpt,
    "two": two_texts,
    "cross": made.encoder_decoder,
    "hostile": hostile,
    "wide": wide,
    "long": lambda: made.long(20_000, 2, 2),
}


@dataclass
class Served:
    """A running server and the ids of its sources by name."""

    url: str
    session: Session
    ids: dict[str, int]

    def profile(self, name: str) -> Profile:
        profile = self.session.sources[self.ids[name]].profile
        assert profile is not None
        return profile


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server with saved profiles of every kind."""
    pytest.importorskip("uvicorn", reason="the viewer needs uvicorn")
    pytest.importorskip("fastapi", reason="the viewer needs fastapi")
    from qkv.server.run import serve_in_thread
    from qkv.server.session import Session

    session = Session("test")
    ids = {name: session.add_profile(make(), name).id for name, make in SOURCES.items()}
    session.prepare()
    assert [x.error for x in session.sources if x.state != "ready"] == []
    with serve_in_thread(session) as url:
        yield Served(url, session, ids)


@pytest.fixture(scope="session")
def mini() -> Iterator[Served]:
    """A server with the model qkv-mini: exact maps, live answers, interventions."""
    pytest.importorskip("uvicorn", reason="the viewer needs uvicorn")
    pytest.importorskip("fastapi", reason="the viewer needs fastapi")
    from qkv.models.loading import load_model
    from qkv.server.run import serve_in_thread
    from qkv.server.session import Session

    session = Session("qkv-mini")
    ids = {"mini": session.add_model(load_model("qkv-mini"), LIVE_TEXT).id}
    session.prepare()
    assert [x.error for x in session.sources if x.state != "ready"] == []
    with serve_in_thread(session) as url:
        yield Served(url, session, ids)


# ---- the browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="driving a browser needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        api.expect.set_options(timeout=PATIENCE * 1000)
        arguments = ["--no-sandbox", "--process-per-site", OFFLINE]  # one process renders all tabs of a server
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@dataclass
class Tab:
    """A tab with the viewer, its requests, and the problems that occurred in it."""

    page: Page
    context: BrowserContext
    served: Served
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _pending: int = 0

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._on_request)
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, self._on_answer)

    def open(self, page: str = "overview", source: str | None = None, **state: int | float | str) -> Tab:
        """Open a page of the viewer, as from a link."""
        if source is not None:
            state["source"] = self.served.ids[source]
        return self.follow(f"{self.served.url}#/{page}?{urlencode(state)}")

    def follow(self, url: str) -> Tab:
        self.page.goto(url)
        return self.settled()

    def settled(self) -> Tab:
        """Wait until a page is mounted and no request is pending."""
        self.page.wait_for_selector("main > section:not([aria-busy])")
        for _ in range(PATIENCE * 20):
            before = self._pending, len(self.requests)
            self.pause(75)
            if before == (0, len(self.requests)):
                return self
        raise AssertionError(f"requests are still pending after {PATIENCE} s: {self.requests[-5:]}")

    @property
    def state(self) -> dict[str, str]:
        """The keys of the address."""
        return dict(parse_qsl(urlsplit(self.page.url).fragment.partition("?")[2]))

    @property
    def at(self) -> str:
        """The page of the address."""
        return urlsplit(self.page.url).fragment.partition("?")[0].strip("/")

    @property
    def root(self) -> Locator:
        return self.page.locator("main > section")

    def press(self, *keys: str) -> Tab:
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def pause(self, milliseconds: int) -> Tab:
        """Wait by the page's own clock, so that shorter timers of the page that started before have fired."""
        self.page.evaluate(
            "(ms) => new Promise((done) => setTimeout(() => requestAnimationFrame(done), ms))", milliseconds
        )
        return self

    def until(self, condition: str) -> Tab:
        """Wait until a JavaScript condition holds. The page's security policy forbids `wait_for_function`."""
        for _ in range(PATIENCE * 40):
            if self.page.evaluate(condition):
                return self
            self.pause(25)
        raise AssertionError(f"after {PATIENCE} s it is still false that {condition}")

    def eventually(self, read: Callable[[], Any], expected: Any = True) -> Tab:
        """Wait until `read` returns the expected value: a busy machine may draw or answer late."""
        for _ in range(PATIENCE * 40):
            if (found := read()) == expected:
                return self
            self.pause(25)
        raise AssertionError(f"after {PATIENCE} s it is still {found!r}, expected {expected!r}")

    def arrives(self, page: str | None = None, **state: int | str) -> Tab:
        """Wait until the address shows this page and contains these keys."""
        wanted = {key: str(value) for key, value in state.items()}
        return self.eventually(
            lambda: (page in (None, self.at), {key: self.state.get(key) for key in wanted}), (True, wanted)
        )

    def text(self) -> str:
        """The text of the page and of its input fields."""
        return self.page.evaluate(
            """() => [document.querySelector("main").innerText,
                ...Array.from(document.querySelectorAll("main textarea, main input"), (x) => x.value)].join("\\n")"""
        )

    def tiles(self, since: int = 0) -> list[str]:
        """The requested tiles, as group/text/layer/head/pool/zoom/i/j."""
        found = (re.search(r"/api/sources/\d+/tiles/[^/]+/(.+)$", url) for url in self.requests[since:])
        return [one[1] for one in found if one]

    def saved(self, kind: str) -> bytes:
        """The file that the menu "Export" downloads: "png", "svg" or "csv"."""
        self.page.click("#export")
        with self.page.expect_download() as download:
            self.page.click(f"#export-menu [data-kind={kind}]")
        assert download.value.suggested_filename.endswith(f".{kind}")
        return Path(download.value.path()).read_bytes()

    def table(self) -> list[dict[str, str]]:
        """The rows of the exported CSV."""
        return list(csv.DictReader(io.StringIO(self.saved("csv").decode(), newline="")))

    def expect(self, pattern: str) -> None:
        """Wait for a problem that the test has provoked, and do not fail because of it."""
        for _ in range(PATIENCE * 40):
            found = [problem for problem in self.problems if re.search(pattern, problem)]
            if found:
                break
            self.pause(25)
        assert found, f"no problem matches {pattern} among {self.problems}"
        self.problems = [problem for problem in self.problems if problem not in found]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # the viewer also logs every error that it shows
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self._pending += 1
        self.requests.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and not request.url.startswith(self.served.url):
            self.problems.append(f"a request left the host: {request.url[:200]}")

    def _on_answer(self, request: Request) -> None:
        self._pending -= 1


class Contexts:
    """Browser contexts that the tests of a module share, because the first page of a context costs a second of CPU.

    In each context an idle page of the server keeps the process alive that renders the site; other pages are closed
    after a test. Two tabs of one test never share a context, and its storage is emptied before the next test.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._free: dict[str, list[BrowserContext]] = {}

    @contextmanager
    def borrowed(self, url: str, **options: Any) -> Iterator[BrowserContext]:
        """A context with these options and no storage, for a page of the server at this address."""
        free = self._free.setdefault(repr(options), [])
        if free:
            context = free.pop()
        else:
            context = self._browser.new_context(**options)
            context.set_default_timeout(PATIENCE * 1000)
            context.new_page().goto(f"{url}static/base.css")
        idle, *_ = context.pages
        stored = {"origin": url.rstrip("/"), "storageTypes": "cookies,local_storage"}
        session = context.new_cdp_session(idle)
        session.send("Storage.clearDataForOrigin", stored)
        session.detach()
        try:
            yield context
        finally:
            for page in context.pages:
                if page is not idle:
                    page.close()
            context.set_offline(False)
            free.append(context)


@pytest.fixture(scope="module")
def contexts(browser: Browser) -> Contexts:
    return Contexts(browser)


@pytest.fixture
def tab(contexts: Contexts, served: Served) -> Iterator[Callable[..., Tab]]:
    """Open tabs: tab(viewport=…, color_scheme=…, reduced_motion=…, server=…), each with separate, empty storage."""
    with ExitStack() as stack:
        tabs: list[Tab] = []

        def opened(server: Served = served, **options: Any) -> Tab:
            options = {"viewport": DESKTOP, "accept_downloads": True, **options}
            context = stack.enter_context(contexts.borrowed(server.url, **options))
            tabs.append(Tab(context.new_page(), context, server))
            return tabs[-1]

        yield opened
        problems = [problem for one in tabs for problem in one.problems]
        assert not problems, "\n".join(problems)


# ---- checks of a page -----------------------------------------------------------------------------------------


def check_pictures(tab: Tab) -> ElementTree.Element:
    """Check that the SVG is self-contained and that the PNG of twice its size is not blank; returns the SVG."""
    drawing = ElementTree.fromstring(tab.saved("svg"))
    assert drawing.tag == f"{SVG}svg"
    assert len(list(drawing.iter())) > 10
    for element in drawing.iter():
        assert element.tag.removeprefix(SVG) not in ("script", "style", "foreignObject", "a"), element.tag
        for name, value in element.attrib.items():
            assert not name.startswith("on"), f"{element.tag} has {name}"
            assert "var(" not in value, f"{name}={value}"
            if name.endswith("href"):
                assert value.startswith(("#", "data:image/")), value[:80]
            assert all(found.startswith("#") for found in re.findall(r"url\(['\"]?([^)]*)", value)), value
    with Image.open(io.BytesIO(tab.saved("png"))) as picture:
        assert picture.size == (round(2 * float(drawing.get("width"))), round(2 * float(drawing.get("height"))))
        counts = picture.convert("RGB").getcolors(picture.width * picture.height)
    assert len(counts) > 10
    assert max(count for count, _ in counts) < 0.995 * picture.width * picture.height
    return drawing


def texts_of(drawing: ElementTree.Element) -> list[str]:
    """The texts of an SVG."""
    return ["".join(element.itertext()) for element in drawing.iter(f"{SVG}text")]


def overflow(page: Page) -> int:
    """The number of pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def nameless(page: Page) -> list[str]:
    """Visible interactive elements without an accessible name."""
    return page.evaluate(NAMELESS)


def faint(page: Page) -> list[str]:
    """Texts whose contrast with their background is less than 4.5, or 3 for large text."""
    return page.evaluate(FAINT)


def spilt(page: Page) -> list[str]:
    """Texts that overflow their box and cover other elements."""
    return page.evaluate(SPILT)


SPILT = """() => {
  const found = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    let box = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !box.checkVisibility() || box.closest("svg, .unseen, option")) continue;
    while (getComputedStyle(box).display.startsWith("inline") && getComputedStyle(box).display !== "inline-block")
      box = box.parentElement;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const [text, room] = [range.getBoundingClientRect(), box.getBoundingClientRect()];
    let clipped = false; // text that an ancestor clips covers nothing
    for (let at = box; at && !clipped; at = at.parentElement) clipped = getComputedStyle(at).overflowX !== "visible";
    if (!clipped && text.right > room.right + 2) found.push(walker.currentNode.data.trim().slice(0, 40));
  }
  return found;
}"""

NAMELESS = """() => {
  const name = (x) => {
    const by = (x.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean);
    const said = by.map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    const labels = Array.from(x.labels ?? [], (label) => label.innerText).join(" ");
    return (x.getAttribute("aria-label") || said || labels || x.innerText || x.title || "").trim();
  };
  const wanted = "a[href], button, input, select, textarea, summary, [tabindex], [role=button], [role=slider]";
  return Array.from(document.querySelectorAll(wanted))
    .filter((x) => x.checkVisibility() && x.id !== "main" && !name(x))
    .map((x) => x.outerHTML.slice(0, 160));
}"""

FAINT = """() => {
  const parsed = (css) => {
    const [r = 0, g = 0, b = 0, a = 1] = (css.match(/[\\d.]+/g) || []).map(Number);
    const most = css.startsWith("color(srgb") ? 255 : 1;
    return css === "none" ? [0, 0, 0, 0] : [r * most, g * most, b * most, a];
  };
  const over = ([r, g, b, a], under) => [...[r, g, b].map((x, at) => x * a + under[at] * (1 - a)), 1];
  const behind = (x) => {
    const layers = [];
    for (let at = x; at && layers.at(-1)?.[3] !== 1; at = at.parentElement) {
      if (getComputedStyle(at).backgroundImage !== "none") return null; // the contrast with a picture is unknown
      layers.push(parsed(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((under, colour) => over(colour, under), [255, 255, 255, 1]);
  };
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const said = walker.currentNode.data.trim(), x = walker.currentNode.parentElement;
    if (!said || !x.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (x.closest("noscript, .unseen, .skip, option, [aria-disabled=true], :disabled")) continue;
    const style = getComputedStyle(x), ground = behind(x);
    if (!ground) continue;
    let [r, g, b, a] = parsed(x.namespaceURI.endsWith("svg") ? style.fill : style.color);
    for (let at = x; at; at = at.parentElement) a *= Number(getComputedStyle(at).opacity);
    const [less, more] = [light(over([r, g, b, a], ground)), light(ground)].sort((one, other) => one - other);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < (size >= 24 || (size >= 18.66 && bold) ? 3 : 4.5))
      found.add(`${ratio.toFixed(2)} ${x.tagName}.${x.getAttribute("class")} ${said.slice(0, 40)}`);
  }
  return [...found].slice(0, 20);
}"""
