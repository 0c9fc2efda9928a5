"""A pytest plugin for the tests of the viewer: servers with profiles, and browser tabs.

No test depends on time. A page says that it is at rest by the attribute `data-state` of its root element (see
src/qkv/page/state.js): `settled` waits for that, and `eventually` for anything else. An error in the console or a
request to another machine fails the test. If the browser itself does not answer in time, the test is repeated, twice at
most.

The browser lives for one module and not for the session, because Playwright's blocking interface keeps an event loop
running in its thread, in which no other test could use asyncio. In a module the tests share the tabs of `view`.

Test modules say pytest_plugins = ["viewer_fixture"], and import from it before that: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from qkv import Profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

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
HOSTILE = [  # among them: a mark that reverses the text after it, and one pictograph of seven characters
    f"<script>{PWNED}</script>", f"</script><script>{PWNED}</script>", f'<img src=x onerror="{PWNED}">',
    f"javascript:{PWNED}", "\u202eevil", "שלום", "سلام", "👩‍👩‍👧‍👦", "\u200b", "\x00\x07\x1b[31m", "\u2028\u2029",
    "x" * 500, "{{script}}", "${1+1}`'\"", "&lt;b&gt;&amp;", "<!--", "\u00a0", "end",
]  # fmt: skip
VISIBLE_PARTS = [  # parts of the hostile tokens that must appear literally wherever tokens are listed
    f"<script>{PWNED}</script>", '<img src=x onerror="', "שלום", "سلام", "👩‍👩‍👧‍👦", "‹U+202E›evil", "‹U+200B›",
    "{{script}}", "&lt;b&gt;&amp;", "<!--",
]  # fmt: skip


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
    "long": lambda: made.long(8_000, 2, 2),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in a browser are slow. If it did not answer in time, they are repeated, which the summary counts."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            if item.config.pluginmanager.hasplugin("rerunfailures"):
                item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["TimeoutError"]))


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


@contextmanager
def serving(title: str, add: Callable[[Session], dict[str, int]]) -> Iterator[Served]:
    """A server of a session to which `add` adds sources; it returns their ids by name."""
    for name in ("uvicorn", "fastapi"):
        pytest.importorskip(name, reason=f"the viewer needs {name}")
    from qkv.server.run import serve_in_thread
    from qkv.server.session import Session

    session = Session(title)
    ids = add(session)
    session.prepare()
    assert [x.error for x in session.sources if x.state != "ready"] == []
    with serve_in_thread(session) as url:
        yield Served(url, session, ids)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A server with saved profiles of every kind."""
    with serving("test", lambda s: {name: s.add_profile(make(), name).id for name, make in SOURCES.items()}) as server:
        yield server


@pytest.fixture(scope="session")
def mini() -> Iterator[Served]:
    """A server with the model qkv-mini: exact maps, live answers, interventions."""
    from qkv.models.loading import load_model

    with serving("qkv-mini", lambda s: {"mini": s.add_model(load_model("qkv-mini"), LIVE_TEXT).id}) as server:
        yield server


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


CHECKS = (Path(__file__).parent / "view" / "checks.js").read_text("utf-8").strip()


def js(page: Page, name: str, argument: Any = None) -> Any:
    """Call a function of tests/view/checks.js in a page."""
    return page.evaluate(f"(argument) => {CHECKS}.{name}(argument)", argument)


def inaccessible(page: Page) -> list[str]:
    """What axe-core finds wrong in a page: the rule, and the first element that breaks it."""
    axe = pytest.importorskip("axe_playwright_python", reason="the rules of accessibility come with axe-core")
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    return page.evaluate("axe.run().then((x) => x.violations.map((one) => `${one.id}: ${one.nodes[0].html}`))")


def rested(page: Page) -> None:
    """Wait until a page of the viewer, or a report, says that nothing is pending."""
    js(page, "frame")
    page.wait_for_selector('html:is([data-state="ready"], [data-state="error"])', state="attached")


def eventually(page: Page, read: Callable[[], Any], expected: Any = True) -> None:
    """Wait until `read` returns the expected value."""
    end = time.monotonic() + PATIENCE
    while (found := read()) != expected:
        assert time.monotonic() < end, f"after {PATIENCE} s it is still {found!r}, expected {expected!r}"
        js(page, "frame")


@dataclass
class Tab:
    """A tab with the viewer, and the problems that occurred in it."""

    page: Page
    context: BrowserContext
    served: Served
    problems: list[str] = field(default_factory=list)
    is_reset: bool = False

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._on_request)

    def open(self, page: str = "overview", source: str | None = None, **state: int | float | str) -> Tab:
        """Open a page of the viewer, as from a link."""
        if source is not None:
            state["source"] = self.served.ids[source]
        return self.follow(f"{self.served.url}#/{page}?{urlencode(state)}")

    def follow(self, url: str) -> Tab:
        if self.page.url.startswith(self.served.url):
            self.js("remount" if self.is_reset else "go", f"#{urlsplit(url).fragment}")
        else:
            self.page.goto(url)
        self.is_reset = False
        return self.settled()

    def reset(self) -> Tab:
        """As new, but for what the viewer keeps in memory of profiles: the next `open` mounts its page anew."""
        self.context.set_offline(False)
        self.page.emulate_media(color_scheme="null", reduced_motion="null")
        if self.page.url != "about:blank":
            self.page.mouse.move(0, 0)
            if not self.js("reusable"):
                self.page.evaluate("localStorage.clear()")
                self.page.goto("about:blank")  # the next `open` loads the viewer again
        self.problems, self.is_reset = [], True
        return self

    def settled(self) -> Tab:
        rested(self.page)
        return self

    def back(self) -> Tab:
        self.js("back")
        return self.settled()

    @property
    def state(self) -> dict[str, str]:
        """The keys of the address."""
        return dict(parse_qsl(urlsplit(self.page.url).fragment.partition("?")[2]))

    @property
    def at(self) -> str:
        """The page of the address."""
        return urlsplit(self.page.url).fragment.partition("?")[0].strip("/")

    def press(self, *keys: str) -> Tab:
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def eventually(self, read: Callable[[], Any], expected: Any = True) -> Tab:
        eventually(self.page, read, expected)
        return self

    def arrives(self, page: str | None = None, **state: int | str) -> Tab:
        """Wait until the address shows this page and contains these keys, and the page has drawn that."""
        wanted = {key: str(value) for key, value in state.items()}
        self.eventually(lambda: (page in (None, self.at), {key: self.state.get(key) for key in wanted}), (True, wanted))
        return self.settled()

    def js(self, name: str, argument: Any = None) -> Any:
        return js(self.page, name, argument)

    def text(self) -> str:
        """The text of the page and of its input fields."""
        return self.js("text")

    def is_safe(self) -> bool:
        """Whether no token was parsed as markup, or reverses the text after it."""
        return self.js("parsed") == [None, 0] and "\u202e" not in self.text()

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
        self.eventually(lambda: any(re.search(pattern, problem) for problem in self.problems))
        self.problems = [problem for problem in self.problems if not re.search(pattern, problem)]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):  # the viewer also logs every error that it shows
            self.problems.append(f"console {message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and not request.url.startswith(self.served.url):
            self.problems.append(f"a request left the host: {request.url[:200]}")


def new_context(browser: Browser, **options: Any) -> BrowserContext:
    """A context with storage of its own, whose pages are in front: those behind another are not drawn."""
    made = browser.new_context(**({"viewport": DESKTOP} | options))
    made.set_default_timeout(PATIENCE * 1000)
    return made


@pytest.fixture(scope="module")
def context(browser: Browser) -> BrowserContext:
    """The pages in files of all tests, and an idle one that keeps their process alive, because its start takes long."""
    made = new_context(browser)
    made.new_page().goto(Path(__file__).as_uri())
    return made


def check_problems(tabs: list[Tab]) -> None:
    problems = [problem for one in tabs for problem in one.problems]
    assert not problems, "\n".join(problems)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Open new tabs without anything stored: tab(server), or tab(server, phone=True)."""
    tabs: list[Tab] = []

    def opened(server: Served, *, phone: bool = False) -> Tab:
        options: dict[str, Any] = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if phone else {}
        context = new_context(browser, **options)
        tabs.append(Tab(context.new_page(), context, server))
        return tabs[-1]

    yield opened
    for one in tabs:
        one.context.close()
    check_problems(tabs)


@pytest.fixture(scope="module")
def shared() -> dict[str, Tab]:
    """The tabs that the tests of a module share, by the address of their server."""
    return {}


@pytest.fixture
def view(browser: Browser, shared: dict[str, Tab], served: Served) -> Iterator[Callable[..., Tab]]:
    """The shared tab of a server, as new: view(), or view(mini)."""
    tabs: list[Tab] = []

    def reset(server: Served = served) -> Tab:
        if server.url not in shared:
            context = new_context(browser)
            shared[server.url] = Tab(context.new_page(), context, server)
        tabs.append(shared[server.url].reset())
        return tabs[-1]

    yield reset
    check_problems(tabs)


# ---- checks of a page -----------------------------------------------------------------------------------------


def check_picture(tab: Tab) -> ElementTree.Element:
    """Check that the SVG is self-contained; returns it."""
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
    return drawing


def check_pictures(tab: Tab) -> None:
    """Check that the SVG is self-contained and that the PNG of twice its size is not blank."""
    drawing = check_picture(tab)
    with Image.open(io.BytesIO(tab.saved("png"))) as picture:
        assert picture.size == (round(2 * float(drawing.get("width"))), round(2 * float(drawing.get("height"))))
        counts = picture.convert("RGB").getcolors(picture.width * picture.height)
    assert len(counts) > 10
    assert max(count for count, _ in counts) < 0.995 * picture.width * picture.height


def texts_of(drawing: ElementTree.Element) -> list[str]:
    """The texts of an SVG."""
    return ["".join(element.itertext()) for element in drawing.iter(f"{SVG}text")]


def overflow(page: Page) -> int:
    """The number of pixels by which the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def unseen(said: str) -> list[str]:
    """The parts of the hostile tokens that a text of the page lacks."""
    return [part for part in VISIBLE_PARTS if part not in said]


SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def share(words: str) -> float:
    """Parse a share of the page: "12.3 %", "4.5 · 10⁻⁶ %"."""
    found = re.search(r"([\d.,]+)\s(?:·\s10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)\s)?%", words)
    assert found, words
    return float(found[1].replace(",", "")) / 100 * 10 ** int((found[2] or "⁰").translate(SUPERSCRIPT))


def percent(share: float) -> str:
    """Format a share as numbers.js does."""
    value = 100 * share
    if 0 < value < 0.00095:
        return "< 0.001 %"
    if 0 < value < 0.095:
        return f"{value:.1g} %"
    return f"{value:.{1 if 0 < value < 0.95 else 0}f} %"


def plain(text: str | None) -> str:
    """Text with ordinary spaces."""
    return (text or "").replace("\u00a0", " ").strip()


def floats(rows: list[dict[str, str]], column: str) -> list[float]:
    """A column of an exported table."""
    return [float(row[column]) for row in rows]
