"""The server of `qkv view`: its numbers equal the data set, and it handles bad requests, load and disconnects."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import APIRouter

import qkv
from conftest import refused
from qkv.errors import InputError
from qkv.models import DecoderConfig, DecoderLM, loading
from qkv.profiler.explore.pyramid import Cancelled
from qkv.runs import run
from qkv.server import guard
from qkv.server.guard import MAX_BODY, SECURITY, Connection, Guard
from qkv.server.jobs import JobQueue, JobQueues
from qkv.server.run import create_app, serve_in_thread
from qkv.server.schemas import MAX_CHARACTERS, MAX_EDITS, LiveRequest
from qkv.server.session import Session, ViewerPage
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig

pytest.importorskip("transformers", reason="the tokenizer of qkv-mini needs transformers")

TEXT = "def mean(values):\n    total = sum(values)\n    return total / len(values)\n"
LONG = "def mean(values):\n    return sum(values) / len(values)\n\n" * 4
HERE = "http://127.0.0.1:8765"
JSON = {"content-type": "application/json"}
TABLES = tomllib.loads((Path(__file__).parent / "requests.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """0: qkv-mini on two texts; 1: its profile, saved and loaded; 2: of a text too long for weights; 3: a model with
    encoder and decoder and a padded text; 4: qkv-mini with an intervention."""
    mini = loading.load_model("qkv-mini")
    session = Session("tests")
    session.add_model(mini, [TEXT, "import os"])
    profile = run.profile(mini.model, [TEXT, "import os"], tokenizer=mini.tokenizer, probe=False, progress=False)
    path = profile.save(tmp_path_factory.mktemp("profile") / "profile.qkv.zip", exact=True)
    session.add_profile(qkv.Profile.load(path))
    long = run.profile(mini.model, LONG, tokenizer=mini.tokenizer, map_tokens=16, probe=False, progress=False)
    session.add_profile(long)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        both = EncoderDecoder(EncoderDecoderConfig(19, 17, d_model=16, heads=2, layers=2, tied=False)).eval()
    inputs = {
        "source": torch.tensor([[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]),
        "target": torch.tensor([[1, 4, 6], [1, 7, 8]]),
    }
    session.add_model(loading.Loaded("both", both, None), inputs)
    session.prepare()
    session.add_intervention(0, "off-by-one")
    until(lambda: all(x.state != "running" for x in session.sources))
    assert [x.state for x in session.sources] == ["ready"] * 5, [x.error for x in session.sources]
    return session


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to read a request: no connection is closed because of that."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(guard, name, 600)


@pytest.fixture(scope="module")
def app(session: Session) -> Guard:
    return create_app(session)


def until(holds: Callable[[], bool]) -> None:
    stop = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < stop, "the condition never became true"
        time.sleep(0.005)


def ask(app: Any, path: str, method: str = "GET", **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=HERE) as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


def post(app: Any, path: str, body: Any, **options: Any) -> httpx.Response:
    return ask(app, path, "POST", json=body, **options)


def sentence(response: httpx.Response, status: int) -> str:
    """The error of an answer, after checking that it is one sentence."""
    assert response.status_code == status, response.text
    said = response.json()
    assert list(said) == ["error"]
    assert re.fullmatch(r"[^\n]+\.", said["error"]), said
    for name, value in SECURITY.items():
        assert response.headers[name] == value
    return str(said["error"])


def floats(response: httpx.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/octet-stream"
    return np.frombuffer(response.content, "<f4")


def near(found: Any, known: Any, rtol: float = 2e-5, atol: float = 1e-7) -> None:
    np.testing.assert_allclose(found, known, rtol=rtol, atol=atol)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_session_lists_all_sources_and_models(app: Guard, session: Session) -> None:
    said = ask(app, "/api/session").json()
    config = loading.load_model("qkv-mini").model.config
    kinds = ["model", "profile", "profile", "model", "intervention"]
    assert [(x["id"], x["kind"], x["state"], x["error"]) for x in said["sources"]] == [
        (at, kind, "ready", None) for at, kind in enumerate(kinds)
    ]
    assert all(x["done"] == x["total"] for x in said["sources"])
    totals = [x["total"] for x in said["sources"]]
    assert (totals[0], totals[3]) == (config.layers * 2 + 1, 6 * 1 + 1)  # layers × runs, and the page
    assert said["computing"] is None
    assert said["sources"][4]["name"] == "qkv-mini with off-by-one"
    assert said["version"] == session.version != Session("other").version
    assert (said["live"]["layers"], said["live"]["heads"]) == (config.layers, config.heads)
    (align,) = said["pages"]
    assert (align["id"], align["missing"]) == ("align", None)
    assert [x["kind"] for x in align["data"]["models"]] == ["translation", "reversal"]


def places(session: Session) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Source, group, text and unpadded weights (layer, head, query, key) of all texts with weights."""
    for source in session.sources:
        if source.id == 2:
            continue
        assert source.profile is not None
        for g, data in enumerate(source.profile.groups.values()):
            for t in range(data.sizes["text"]):
                n_queries, n_keys = int(data["n_queries"][t]), int(data["n_keys"][t])
                yield source.id, g, t, data["weights"].values[t, :, :, :n_queries, :n_keys]


def test_tiles_rows_columns_pairs_and_profiles_equal_the_data_set(app: Guard, session: Session) -> None:
    shapes = set()
    for s, g, t, weights in places(session):
        _, heads, n_queries, n_keys = weights.shape
        shapes.add((n_queries, n_keys))
        api, place = f"/api/sources/{s}", f"{g}/{t}/1/{heads - 1}"
        assert session.sources[s].groups[g]["texts"][t]["map"] == {
            "kind": "stored" if s == 1 else "exact", "n_queries": n_queries, "n_keys": n_keys, "base": 0,
            "deepest": 0, "pixel_queries": 1, "pixel_keys": 1, "why": None,
        }  # fmt: skip
        for pool in ("max", "mean"):
            tile = ask(app, f"{api}/tiles/{session.version}/{place}/{pool}/0/0/0")
            assert (tile.headers["x-rows"], tile.headers["x-columns"]) == (str(n_queries), str(n_keys))
            assert tile.headers["cache-control"] == "private, max-age=31536000, immutable"
            near(floats(tile).reshape(n_queries, n_keys), weights[1, -1])
        query, key = n_queries - 1, n_keys // 2
        for head, known in ((f"&head={heads - 1}", weights[1, -1]), ("", weights[1].mean(0, dtype=np.float64))):
            at = f"{api}/weights/{g}/{t}/1"
            near(floats(ask(app, f"{at}?query={query}{head}")), known[query])
            near(floats(ask(app, f"{at}?key={key}{head}")), known[:, key])
            near(floats(ask(app, f"{at}?query={query}&key={key}{head}")), known[query, key])
        found, known = floats(ask(app, f"{api}/profiles/{place}")), weights[1, -1].astype(np.float64)
        near(found[:n_keys], known.sum(0) / n_queries, 1e-4, 1e-6)
        if s != 4:  # weights that add up to less than 1 have another entropy: of their shares
            entropy = -(known * np.log(np.where(known > 0, known, 1))).sum(1)
            near(found[n_keys:], entropy, 1e-4, 1e-5)
    assert len(shapes) >= 5  # texts of several lengths, and groups with more keys than queries


def test_links_and_similar_heads_are_those_of_the_data_set(app: Guard, session: Session) -> None:
    for s, g, t, weights in places(session):
        source, api = session.sources[s], f"/api/sources/{s}"
        links = ask(app, f"{api}/links/{g}/{t}/1?query=1").json()
        for row, key, weight in zip(weights[1, :, 1], links["keys"], links["weights"], strict=True):
            near([weight, row[key]], row.max())
        assert source.profile is not None
        expected = source.profile.similarity(t, source.groups[g]["name"])
        said = ask(app, f"{api}/similar/{g}/{t}/1/0").json()
        assert said["maps"] == expected.attrs["maps"]
        near(np.array(said["values"], float), expected.loc[(1, 0)], 0, 1e-5)


def test_intervention_changes_a_copy_and_not_the_model(app: Guard) -> None:
    row = "weights/0/0/0?head=0&query=5"
    assert 0 < floats(ask(app, f"/api/sources/4/{row}")).sum() < 0.9999
    assert floats(ask(app, f"/api/sources/0/{row}")).sum() == pytest.approx(1, abs=1e-5)
    assert post(app, "/api/interventions", {"source": 0, "normalizer": "off-by-one"}).json() == {"id": 4}
    for source, why in ((1, "expected a model"), (3, "cannot be edited")):
        assert why in sentence(post(app, "/api/interventions", {"source": source, "normalizer": "sigmoid"}), 400)


def blocks(part: np.ndarray, step: int, pooled: Any) -> np.ndarray:
    """Largest or mean of each step × step block; blocks at the edges are smaller."""
    whole = np.full([-(-n // step) * step for n in part.shape], np.nan)
    whole[: part.shape[0], : part.shape[1]] = part
    return pooled(whole.reshape(whole.shape[0] // step, step, -1, step), (1, 3))


@pytest.mark.slow
def test_tiles_of_a_long_text_pool_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """520 tokens, of a model and of its profile: zoom 0 pools 4 × 4 pairs, zoom 2 is exact; masked tiles are empty."""
    tiny = loading.Loaded("tiny", DecoderLM(DecoderConfig(context=520, layers=1, heads=2)).eval(), None)
    ids = torch.randint(0, 256, (1, 520), generator=torch.Generator().manual_seed(0))
    profile = run.profile(tiny.model, ids, map_tokens=520, probe=False, progress=False)
    monkeypatch.setattr(Session, "_load_small_models", lambda self: None)
    session = Session("long")
    session.add_model(tiny, ids)
    session.add_profile(profile)
    session.prepare()
    app, known = create_app(session), profile.data["weights"].values[0, 0, 1]
    tiles = "/api/sources/{}/tiles/" + f"{session.version}/0/0/0/1"
    places = [(z, 2 ** (2 - z), i, j) for z in range(3) for i, j in np.ndindex(*[-(-520 // (256 * 2 ** (2 - z)))] * 2)]
    for source, (zoom, step, i, j) in itertools.product(session.sources, places):
        assert source.groups[0]["texts"][0]["map"]["deepest"] == 2
        rows, columns = (slice(x * 256 * step, min(520, (x + 1) * 256 * step)) for x in (i, j))
        for pool, pooled in (("max", np.nanmax), ("mean", np.nanmean)):
            tile = ask(app, f"{tiles.format(source.id)}/{pool}/{zoom}/{i}/{j}")
            if columns.start >= rows.stop:
                assert (tile.status_code, tile.content) == (204, b"")
                continue
            want = blocks(known[rows, columns], step, pooled)
            picture = source.maps["self"].tile("self", 0, 0, 1, zoom, i, j)
            assert picture is not None
            near(picture.visible, blocks(np.tri(520)[rows, columns], step, np.nanmean))
            assert (int(tile.headers["x-rows"]), int(tile.headers["x-columns"])) == want.shape
            near(floats(tile).reshape(want.shape), want, 5e-5, 1e-8)
    for outside in ("2/3/0", "3/0/0"):
        assert "expected 0..2" in sentence(ask(app, f"{tiles.format(0)}/max/{outside}"), 400)


# --- invalid requests -------------------------------------------------------------------------------------------------

ASKED = {"text": "import os", "edits": [], "layer": 1, "head": 2, "k": 3}
STEP = ASKED | {"sampling_temperature": 1.0, "seed": 0, "step": 0}


def edit(**changed: Any) -> dict[str, Any]:
    return {"layer": 0, "head": 0, "normalizer": "softmax", "temperature": 1} | changed


@pytest.mark.parametrize(("path", "status", "word"), TABLES["get"])
def test_invalid_requests_get_a_sentence(app: Guard, path: str, status: int, word: str) -> None:
    assert word in sentence(ask(app, path), status)


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("text", {"text": "a" * 2001}), ("text", {"text": ""}), ("text", {"text": None}),
        ("edits", {"edits": [edit()] * (MAX_EDITS + 1)}), ("normalizer", {"edits": [edit(normalizer="hardmax")]}),
        ("temperature", {"edits": [edit(temperature=0.01)]}), ("temperature", {"edits": [edit(temperature=21)]}),
        ("layer", {"layer": -1}), ("layer", {"layer": "1"}), ("layer", {"layer": 1.5}), ("head", {"head": 2**40}),
        ("k", {"k": 51}), ("k", {"k": 0}), ("other", {"other": 1}), ("step", {"step": 2**30}),
        ("ids", {"ids": [1] * 2001}), ("sampling_temperature", {"sampling_temperature": float("inf")}),
    ],
)  # fmt: skip
def test_live_rejects_fields_out_of_bounds(app: Guard, word: str, change: dict[str, Any]) -> None:
    of_step = word in ("step", "ids", "sampling_temperature")
    path, body = ("/api/live/step", STEP) if of_step else ("/api/live", ASKED)
    content = json.dumps(body | change)  # which writes Infinity
    assert word in sentence(ask(app, path, "POST", content=content, headers=JSON), 422)


def test_all_heads_of_a_model_of_80_layers_of_64_heads_can_be_edited_at_once() -> None:
    body = ASKED | {"edits": [edit(layer=layer, head=head) for layer in range(80) for head in range(64)]}
    assert len(LiveRequest.model_validate(body).edits) == 80 * 64
    assert len(json.dumps(body)) + MAX_CHARACTERS < MAX_BODY


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", JSON), (b"{", JSON), (b"[]", JSON), (b"\xff\xfe", JSON), (b"[" * 60_000, JSON),
        (b'{"text":"\\ud83d","layer":0,"head":0}', JSON), (b'{"text":"a","layer":NaN,"head":0}', JSON),
        (b'{"text":"a","layer":0,"head":1e400}', JSON),
        # A form of another site can send these without a CORS preflight request.
        (json.dumps(ASKED).encode(), {}), (json.dumps(ASKED).encode(), {"content-type": "text/plain"}),
    ],
)  # fmt: skip
def test_live_rejects_what_is_no_json(app: Guard, body: bytes, headers: dict[str, str]) -> None:
    response = ask(app, "/api/live", "POST", content=body, headers=headers)
    assert response.status_code in (400, 422), response.text
    sentence(response, response.status_code)


def test_answers_carry_the_security_headers_and_head_has_no_body(app: Guard) -> None:
    for path in ("/", "/api/session", "/static/charts.js", "/openapi.json", "/nothing", "/api/sources/99/page"):
        got, head = ask(app, path), ask(app, path, "HEAD")
        for name, value in SECURITY.items():
            assert got.headers.get_list(name) == [value], path
        assert "server" not in got.headers
        assert got.content
        assert head.content == b""
        assert (head.status_code, head.headers) == (got.status_code, got.headers)


def test_a_page_of_another_package_that_fails_does_not_take_the_viewer_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("no data")

    (tmp_path / "page_mine.js").write_text("export function mount() {}")
    page = ViewerPage("mine", "Mine", tmp_path, APIRouter(), broken)
    bare = ViewerPage("bare", "Bare", tmp_path / "nothing", APIRouter(), dict)
    entries = [
        SimpleNamespace(name="mine", value="a:b", load=lambda: page),
        EntryPoint("gone", "no_module:x", "qkv.pages"),
        EntryPoint("other", "math:pi", "qkv.pages"),
        SimpleNamespace(name="bare", value="a:c", load=lambda: bare),
    ]
    monkeypatch.setattr("qkv.server.session.entry_points", lambda group: entries)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "handle", lambda logger, record: logged.append(record))
    session = Session("pages")
    assert [one.id for one in session.pages] == ["mine"]
    assert [record.args[0] for record in logged if record.args] == ["gone", "other", "bare"]
    before = session.pages[0].missing
    session.prepare()
    assert session.pages[0].missing != before
    app = create_app(session)
    assert ask(app, "/static/page_mine.js").status_code == 200
    (said,) = ask(app, "/api/session").json()["pages"]
    assert said["data"] is None
    assert "ValueError" in said["missing"]


def test_failures_are_told_without_what_the_machine_keeps_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_load_small_models", lambda self: None)
    session = Session("failing")
    session.add_model(loading.load_model("qkv-mini"), "   ")

    def breaks(source: Any) -> None:
        raise RuntimeError("secret of the machine")

    session._add("broken", "model", breaks)
    app = create_app(session)
    assert "still waiting" in sentence(ask(app, "/api/sources/0/page"), 404)
    session.prepare()
    empty, broken = ask(app, "/api/session").json()["sources"]
    assert (empty["state"], broken["state"]) == ("failed", "failed")
    assert "empty" in empty["error"]
    assert "empty" in sentence(ask(app, "/api/sources/0/page"), 404)
    inner: Any = app.app

    @inner.get("/breaks")
    async def broken_route() -> None:
        breaks(None)

    for said in (broken["error"], sentence(ask(app, "/breaks"), 500)):
        assert "RuntimeError" in said
        assert "secret" not in said


# --- the guard --------------------------------------------------------------------------------------------------------


async def answers_ok(scope: Any, receive: Any, send: Any) -> None:
    """An application behind the guard that answers every request."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


LOCAL = Guard(answers_ok, port=8765)


@pytest.mark.parametrize("row", TABLES["header"], ids=lambda row: row["name"])
def test_headers_must_name_this_server(row: dict[str, Any]) -> None:
    name, allowed = row["name"], row["allowed"]
    for method in ("GET", "POST"):
        for value in [*allowed, *row["rejected"]]:
            response = ask(LOCAL, "/api/session", method, headers={name: value})
            assert response.status_code == (200 if value in allowed else 403), (method, value)
    if name == "sec-fetch-site":
        assert ask(LOCAL, "/", headers={name: "cross-site"}).status_code == 200  # a link may lead here
    else:
        headers = [("host", "127.0.0.1:8765"), *[(name, allowed[0])] * (2 if name == "origin" else 1)]
        assert ask(LOCAL, "/api/session", headers=headers).status_code == 403, "it came twice"


def test_methods_and_addresses_out_of_bounds_are_rejected(app: Guard) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
        sentence(ask(app, "/", method), 405)
    sentence(ask(app, f"/?x={'y' * 5000}"), 414)


def test_large_and_slow_bodies_are_rejected(app: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    async def chunks() -> Any:
        for n in range(10_000):
            sent.append(n)
            yield b" " * 1024

    assert "1024 KiB" in sentence(ask(app, "/api/live", "POST", content=chunks(), headers=JSON), 413)
    assert len(sent) <= MAX_BODY // 1024 + 2  # the rest was not read
    fits = json.dumps(ASKED).encode().ljust(MAX_BODY)
    assert ask(app, "/api/live", "POST", content=fits, headers=JSON).status_code == 200
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.01)

    async def drip() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    sentence(ask(app, "/api/live", "POST", content=drip(), headers=JSON), 408)


# --- the queue of jobs ------------------------------------------------------------------------------------------------


class Script:
    """Clients of a queue, step by step.

    "1:a" is client 1 who asks for job a, "1:a+" for a long job, "1:a!" for one that never looks whether it should stop.
    "-1" leaves, "x1" is cancelled. "ok" and "bad" let the running job end and fail. "stop" closes the queue.
    """

    def __init__(self) -> None:
        self.jobs = JobQueue(max_waiting=3)
        self.begun: list[str] = []
        self.looks: Callable[[], bool] | None = None  # of the running job: whether it should stop and would notice
        self.told = queue.SimpleQueue[str]()
        self.ended = 0

    def work(self, key: str) -> Callable[[Callable[[], bool]], str]:
        def work(stopped: Callable[[], bool]) -> str:
            self.begun.append(key[0])
            self.looks = (lambda: False) if "!" in key else stopped
            try:
                while True:
                    try:
                        if self.told.get(timeout=0.002) == "ok":
                            return key[0]
                        raise InputError("no")
                    except queue.Empty:
                        if self.looks():
                            raise Cancelled from None
            finally:
                self.looks = None
                self.ended += 1

        return work

    def rests(self) -> bool:
        """Whether the thread waits for a step."""
        looks = self.looks
        return not self.jobs._waiting() if looks is None else not looks()

    async def run(self, steps: str) -> list[str]:
        """What each client got: the job's name, or the name of an error."""
        left: dict[str, asyncio.Event] = {}
        clients: dict[str, asyncio.Task[Any]] = {}
        for step in steps.split():
            if ":" in step:
                name, key = step.split(":")
                left[name] = asyncio.Event()
                asks = self.jobs.run(key[0], self.work(key), left[name].wait, long="+" in key)
                clients[name] = asyncio.ensure_future(asks)
            elif step == "stop":
                assert await asyncio.to_thread(self.jobs.close, 60)
            elif step[0] == "-":
                left[step[1]].set()
                await asyncio.wait([clients[step[1]]])
            elif step[0] == "x":
                clients[step[1]].cancel()
            else:
                ended = self.ended
                self.told.put(step)
                await asyncio.to_thread(until, lambda ended=ended: self.ended > ended)
            await asyncio.sleep(0)
            await asyncio.to_thread(until, self.rests)
        found = await asyncio.gather(*clients.values(), return_exceptions=True)
        return [x if isinstance(x, str) else type(x).__name__ for x in found]


@pytest.mark.parametrize(
    ("steps", "begun", "got"),
    [
        ("1:a 2:a 3:a ok 4:a ok", "aa", "a a a a"),
        ("1:a 2:b 3:c 4:d 5:e ok ok ok ok", "abcd", "a b c d QueueFull"),
        ("1:a 2:b 3:c 4:c -2 -3 -1 ok", "ac", "ClientDisconnected ClientDisconnected ClientDisconnected c"),
        ("1:a! -1 2:a ok ok", "aa", "ClientDisconnected a"),
        ("1:a+ 2:b+ 3:c ok ok ok", "acab", "a b c"),
        ("1:a x1 2:b ok", "ab", "CancelledError b"),
        ("1:a 2:a bad 3:b ok", "ab", "InputError InputError b"),
        ("1:a 2:b 3:c stop 4:d", "a", "ClientDisconnected QueueFull QueueFull QueueFull"),
    ],
    ids=[
        "clients share a job, which is not kept", "a full queue rejects", "jobs without clients are dropped",
        "a stopping job is not shared", "a short job interrupts a long one", "a cancelled client has left",
        "a failure is that of all clients", "the end fails what waits",
    ],
)  # fmt: skip
def test_queue_of_jobs(steps: str, begun: str, got: str) -> None:
    script = Script()
    assert asyncio.run(script.run(steps)) == got.split()
    assert "".join(script.begun) == begun
    assert script.jobs.close(60)


def test_close_does_not_wait_for_a_job_that_never_looks_whether_it_should_stop() -> None:
    jobs, go, begun = JobQueues(JobQueue(), JobQueue()), threading.Event(), list[int]()

    async def waits() -> None:
        work = [lambda stopped: (begun.append(1), go.wait(60))] * 2
        asked = [asyncio.ensure_future(q.run(1, w)) for q, w in zip((jobs.quick, jobs.slow), work, strict=True)]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lambda: len(begun) == 2)
        assert not any(await asyncio.gather(*(asyncio.to_thread(queue.close, 0.05) for queue in jobs)))
        go.set()
        await asyncio.gather(*asked)

    asyncio.run(waits())
    assert all(queue.close(60) for queue in jobs)


# --- a server and its connections -------------------------------------------------------------------------------------


class Sluggish:
    """An explorer whose tiles block until `go` is set, so that the queue fills up."""

    def __init__(self, of: Any) -> None:
        self.of, self.go = of, threading.Event()
        self.begun, self.stopped = list[Any](), list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def tile(self, *where: Any, stopped: Callable[[], bool], on_progress: Callable[[float], None]) -> Any:
        on_progress(0.25)
        self.begun.append(where)
        while not self.go.wait(0.005):
            if stopped():
                self.stopped.append(where)
                raise Cancelled
        return self.of.tile(*where)


@pytest.fixture
def crowded(session: Session) -> Iterator[Sluggish]:
    """The explorer of source 0, with tiles that block."""
    source = session.sources[0]
    before, sluggish = source.maps, Sluggish(source.maps["self"])
    source.maps = {"self": sluggish}  # type: ignore[dict-item]
    yield sluggish
    sluggish.go.set()
    source.maps = before


def tile_path(session: Session, *, text: int = 0, layer: int = 0, head: int = 0, at: str = "0/0/0") -> str:
    return f"api/sources/0/tiles/{session.version}/0/{text}/{layer}/{head}/max/{at}"


@pytest.mark.slow
def test_server_answers_under_many_concurrent_requests(session: Session, crowded: Sluggish) -> None:
    tiles = [tile_path(session, text=t, layer=a, head=b) for t, a, b in np.ndindex(2, 4, 6)]
    wrong = [tile_path(session, at=f"{z}/{i}/0") for z, i in np.ndindex(24, 3)]
    small = ["api/session", "", "api/sources/0/page", "api/sources/0/weights/0/0/0?query=1"]

    async def go(url: str) -> tuple[list[httpx.Response], list[httpx.Response]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # the server closes idle ones
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            asked = [asyncio.ensure_future(client.get(path)) for path in [*tiles, *wrong][:120]]
            await asyncio.to_thread(until, lambda: len(crowded.begun) > 0)
            others = [await client.get(path) for path in small]
            crowded.go.set()
            return await asyncio.gather(*asked), others

    with serve_in_thread(session) as url:
        many, others = asyncio.run(go(url))
        assert [x.status_code for x in others] == [200] * 4
        codes = [x.status_code for x in many]
        assert set(codes) <= {200, 400, 503}
        assert codes.count(503) > 50  # many more than the queue holds
        assert codes.count(200) >= 20
        for x in many:
            if x.status_code == 503:
                assert x.headers["retry-after"] == "1"
                assert "try again" in sentence(x, 503)
        again = httpx.get(url + tiles[-1], timeout=60)
        assert len(floats(again)) == int(again.headers["x-rows"]) * int(again.headers["x-columns"])


def connected(url: str, request: str) -> socket.socket:
    """A connection with a small buffer, on which a request was begun. HOST stands for that header."""
    port = httpx.URL(url).port
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.sendall(request.replace("HOST", f"Host: 127.0.0.1:{port}").replace("\n", "\r\n").encode())
    return sock


def test_closed_connections_cancel_their_jobs(session: Session, crowded: Sluggish) -> None:
    """Real connections that are closed: their jobs are dropped or stopped."""
    with serve_in_thread(session) as url:
        calls = []
        for head in range(4):
            calls.append(connected(url, f"GET /{tile_path(session, head=head)} HTTP/1.1\nHOST\n\n"))
            until(lambda: len(crowded.begun) == 1)
        for sock in calls:
            sock.close()
        until(lambda: crowded.begun == crowded.stopped)
        assert httpx.get(f"{url}api/sources/0/weights/0/0/0?head=0&query=1").status_code == 200  # the thread is free


def test_slow_readers_and_writers_do_not_block_others(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[int] = []
    pause = Connection.pause_writing
    monkeypatch.setattr(Connection, "pause_writing", lambda self: (paused.append(1), pause(self))[-1])
    monkeypatch.setattr(session.sources[0], "page", b" " * 2**23)  # more than the socket buffers hold
    never_read = "GET /api/sources/0/page HTTP/1.1\nHOST\n\n"
    never_sent = "POST /api/live HTTP/1.1\nHOST\nContent-Type: application/json\nContent-Length: 100\n\n{"
    with serve_in_thread(session) as url:
        slow = [connected(url, request) for request in [never_read, never_sent] * 8]
        until(lambda: len(paused) == 8)
        assert httpx.get(f"{url}api/session", timeout=60).status_code == 200
        assert httpx.post(f"{url}api/live", json=ASKED, timeout=60).status_code == 200
        for sock in slow:
            sock.close()


def test_silent_connections_are_closed_and_slow_answers_are_not_cut_off(
    session: Session, crowded: Sluggish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent from the start, in the middle of the first request head, and in the middle of the second."""
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.2)
    closed: list[bool] = []
    close = Connection._close_if_idle
    monkeypatch.setattr(Connection, "_close_if_idle", lambda self: (closed.append(True), close(self))[-1])
    with serve_in_thread(session) as url, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(httpx.get, url + tile_path(session), timeout=60)
        until(lambda: len(closed) == 1)  # its timer has gone off during the answer
        crowded.go.set()
        assert waits.result().status_code == 200
        whole, part = "GET /favicon.ico HTTP/1.1\nHOST\n\n", "GET /favicon.ico HTT"
        for sent in ("", part, whole + part):
            with connected(url, sent) as sock:
                got = b"".join(iter(lambda sock=sock: sock.recv(4096), b""))
            assert got[:12] == (b"HTTP/1.1 204" if sent.startswith(whole) else b"")
    monkeypatch.setattr(guard, "HEAD_SECONDS", 600)
    with serve_in_thread(session) as url, httpx.Client(base_url=url) as client:  # regular requests share a connection
        first, second = (client.get("/favicon.ico").extensions["network_stream"] for _ in range(2))
        assert first.get_extra_info("client_addr") == second.get_extra_info("client_addr")


def test_a_port_in_use_is_refused(session: Session) -> None:
    with serve_in_thread(session) as url:
        again = serve_in_thread(session, port=httpx.URL(url).port or 0)
        with refused("--port"), again:
            pass
