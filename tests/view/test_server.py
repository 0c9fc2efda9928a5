"""The server of `qkv view`: its numbers equal the data set, and it handles bad requests, load and disconnects."""

from __future__ import annotations

import asyncio
import base64
import doctest
import importlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
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
import qkv_lab.align
from conftest import refused
from qkv.errors import InputError
from qkv.models import loading
from qkv.profiler import run
from qkv.profiler.explore.explorer import Explorer
from qkv.profiler.explore.pyramid import Cancelled
from qkv.report.payload import payload, trimmed
from qkv.server import routes
from qkv.server.app import create_app
from qkv.server.guard import MAX_BODY, SECURITY, Connection, Guard
from qkv.server.jobs import ClientDisconnected, JobQueue, JobQueues, QueueFull
from qkv.server.routes import _top_weights
from qkv.server.run import _socket, serve_in_thread
from qkv.server.session import Session, ViewerPage, copy_sharing_weights
from qkv_lab.models import EncoderDecoder, EncoderDecoderConfig

pytest.importorskip("transformers", reason="the tokenizer of qkv-mini needs transformers")

TEXT = "def mean(values):\n    total = sum(values)\n    return total / len(values)\n"
LONG = "def mean(values):\n    return sum(values) / len(values)\n\n" * 20
HERE = "http://127.0.0.1:8765"
HOSTILE = ["<script>alert(1)</script>", "\u202eabc", "🦄", "\u200b", "\x00\x07", "\ud83d"]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """0: qkv-mini on two texts; 1: its profile, saved and loaded; 2: of a text too long for weights; 3: a model with
    encoder and decoder and a padded text; 4: qkv-mini with an intervention."""
    mini = loading.load_model("qkv-mini")
    session = Session("tests")
    session.add_model(mini, [TEXT, "import os"])
    profile = run.profile(mini.model, [TEXT, "import os"], tokenizer=mini.tokenizer, progress=False, name="qkv-mini")
    path = profile.save(tmp_path_factory.mktemp("profile") / "profile.qkv.zip")
    session.add_profile(qkv.Profile.load(path))
    session.add_profile(
        run.profile(mini.model, LONG, tokenizer=mini.tokenizer, map_tokens=16, progress=False, name="qkv-mini")
    )
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


@pytest.fixture(scope="module")
def app(session: Session) -> Guard:
    return create_app(session)


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop, "the condition never became true"
        time.sleep(0.01)


def ask(app: Any, path: str, method: str = "GET", base: str = HERE, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
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


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_session_lists_all_sources_and_models(app: Guard, session: Session) -> None:
    said = ask(app, "/api/session").json()
    config = loading.load_model("qkv-mini").model.config
    assert [(x["kind"], x["state"], x["error"]) for x in said["sources"]] == [
        ("model", "ready", None), ("profile", "ready", None), ("profile", "ready", None), ("model", "ready", None),
        ("intervention", "ready", None),
    ]  # fmt: skip
    assert [x["id"] for x in said["sources"]] == [0, 1, 2, 3, 4]
    assert all(x["done"] == x["total"] for x in said["sources"])
    assert [x["total"] for x in said["sources"]][:4:3] == [
        config.layers * 2 + 1,
        6 * 1 + 1,
    ]  # layers × runs, and the page
    assert said["computing"] is None
    assert said["sources"][4]["name"] == "qkv-mini with off-by-one"
    assert said["version"] == session.version != Session("other").version
    assert (said["live"]["layers"], said["live"]["heads"]) == (config.layers, config.heads)
    (align,) = said["pages"]
    assert (align["id"], align["missing"]) == ("align", None)
    assert [x["kind"] for x in align["data"]["models"]] == ["translation", "reversal"]


def test_page_equals_the_payload(app: Guard, session: Session) -> None:
    for source in session.sources:
        assert source.profile is not None
        page, _ = payload(source.profile)
        said = ask(app, f"/api/sources/{source.id}/page").json()
        assert said == json.loads(json.dumps(page)) | {"effects": source.effects}


def test_curves_equal_those_of_a_report(app: Guard, session: Session) -> None:
    import zlib

    profile = session.sources[3].profile
    assert profile is not None
    _, blobs = payload(profile)
    for g in range(len(profile.groups)):
        for t in range(2):
            found = ask(app, f"/api/sources/3/curves/{g}/{t}").content
            assert found == zlib.decompress(base64.b64decode(blobs[f"curves-{g}-{t}"]))


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


def test_tiles_rows_columns_and_pairs_equal_the_weights_of_the_data_set(app: Guard, session: Session) -> None:
    shapes = set()
    for s, g, t, weights in places(session):
        _, heads, n_queries, n_keys = weights.shape
        shapes.add((n_queries, n_keys))
        for layer, head in ((0, 0), (1, heads - 1)):
            known, place = weights[layer, head], f"{g}/{t}/{layer}/{head}"
            shape = ask(app, f"/api/sources/{s}/map/{place}").json()
            kind = "stored" if s == 1 else "exact"
            assert shape == {
                "kind": kind, "n_queries": n_queries, "n_keys": n_keys, "tile": 256, "deepest": 0, "pixel_queries": 1,
                "pixel_keys": 1, "why": None,
            }  # fmt: skip
            for pool in ("max", "mean"):
                tile = ask(app, f"/api/sources/{s}/tiles/{session.version}/{place}/{pool}/0/0/0")
                assert (tile.headers["x-rows"], tile.headers["x-columns"]) == (str(n_queries), str(n_keys))
                assert tile.headers["cache-control"] == "private, max-age=31536000, immutable"
                np.testing.assert_allclose(floats(tile).reshape(known.shape), known, rtol=2e-5, atol=1e-7)
            query, key = n_queries - 1, n_keys // 2
            row = floats(ask(app, f"/api/sources/{s}/row-weights/{place}?query={query}"))
            np.testing.assert_allclose(row, known[query], rtol=2e-5, atol=1e-7)
            column = floats(ask(app, f"/api/sources/{s}/column-weights/{place}?key={key}"))
            np.testing.assert_allclose(column, known[:, key], rtol=2e-5, atol=1e-7)
            pair = ask(app, f"/api/sources/{s}/pair/{place}?query={query}&key={key}").json()
            assert pair["weight"] == pytest.approx(known[query, key], rel=2e-5, abs=1e-7)
    assert len(shapes) >= 5  # texts of several lengths, and groups with more keys than queries


def test_head_mean_averages_over_heads(app: Guard, session: Session) -> None:
    for s, g, t, weights in places(session):
        mean = weights[1].mean(0, dtype=np.float64)
        place = f"{g}/{t}/1/mean"
        row = floats(ask(app, f"/api/sources/{s}/row-weights/{place}?query=1"))
        np.testing.assert_allclose(row, mean[1], rtol=2e-5, atol=1e-7)
        column = floats(ask(app, f"/api/sources/{s}/column-weights/{place}?key=0"))
        np.testing.assert_allclose(column, mean[:, 0], rtol=2e-5, atol=1e-7)
        pair = ask(app, f"/api/sources/{s}/pair/{place}?query=1&key=0").json()["weight"]
        assert pair == pytest.approx(mean[1, 0], rel=2e-5)
    assert "head" in sentence(ask(app, "/api/sources/0/map/0/0/0/mean"), 422)


def test_rows_and_columns_list_the_largest_weights_and_sum_the_rest(app: Guard, session: Session) -> None:
    for s, g, t, weights in places(session):
        source = session.sources[s]
        view = source.groups[g]["texts"][t]
        keys, queries = view["keys"], view["queries"] or view["keys"]
        for name, line, others, tokens in (
            ("row", weights[0, 1, 1], keys, queries), ("column", weights[0, 1, :, 1], queries, keys),
        ):  # fmt: skip
            said = ask(app, f"/api/sources/{s}/{name}/{g}/{t}/0/1?{'query' if name == 'row' else 'key'}=1&k=2").json()
            assert (said["position"], said["token"]) == (1, tokens[1])
            assert len(said["top"]) == min(2, len(line))
            listed = [x["weight"] for x in said["top"]]
            np.testing.assert_allclose(listed, np.sort(line)[::-1][:2], rtol=2e-5, atol=1e-7)
            for one in said["top"]:
                assert line[one["position"]] == pytest.approx(one["weight"], rel=2e-5, abs=1e-7)
                assert one["token"] == others[one["position"]]
            assert sum(listed) + said["rest"] == pytest.approx(line.sum(), rel=1e-4)


def test_weights_are_sorted_in_the_compute_thread(app: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting a long row must not block the event loop."""
    seen: list[str] = []
    find = np.lexsort
    monkeypatch.setattr(np, "lexsort", lambda keys: (seen.append(threading.current_thread().name), find(keys))[-1])
    assert ask(app, "/api/sources/0/row/0/0/0/0?query=5&k=3").status_code == 200
    assert ask(app, "/api/sources/0/column/0/0/0/0?key=5&k=3").status_code == 200
    assert seen == ["qkv compute"] * 2


def test_equal_weights_are_listed_by_position() -> None:
    weights = np.array([0.1, 0.4, 0.1, 0.4, 0.0], np.float32)
    names = list("abcde")
    for k, places in ((2, [1, 3]), (4, [1, 3, 0, 2]), (5, [1, 3, 0, 2, 4]), (9, [1, 3, 0, 2, 4])):
        line = _top_weights(lambda stopped: weights, 0, names, names, k)(lambda: False)
        assert [x.position for x in line.top] == places
        assert line.rest == pytest.approx(float(np.delete(weights, places).sum()), abs=1e-8)


def test_stored_maps_share_memory_with_the_profile(session: Session) -> None:
    profile, stored = session.sources[1].profile, session.sources[1].maps["self"]
    assert profile is not None
    weights = profile.data["weights"].values
    for text in range(2):
        assert np.shares_memory(trimmed(profile.data, text)["weights"].values, weights)
        row = stored.row("self", text, 0, 0, 1)
        assert np.shares_memory(row, weights)


@pytest.mark.parametrize("missing", ["largest", "norm", "massive", "massive_above", "stack"])
def test_payload_omits_incomplete_hidden_states(missing: str) -> None:
    profile = qkv.profile("qkv-mini", "import os", progress=False, probe=False)
    assert "residual" in payload(profile)[0]["groups"][0]
    (name, stack), *_ = profile.residual.items()
    without = stack.drop_vars(missing, errors="ignore")
    without.attrs.pop(missing, None)
    profile.residual = {name: without}
    assert "residual" not in payload(profile)[0]["groups"][0]


def test_links_are_the_strongest_key_of_each_head(app: Guard, session: Session) -> None:
    for s, g, t, weights in places(session):
        said = ask(app, f"/api/sources/{s}/links/{g}/{t}/1?query=1").json()["heads"]
        assert [x["head"] for x in said] == list(range(weights.shape[1]))
        for x in said:
            row = weights[1, x["head"], 1]
            assert x["weight"] == pytest.approx(row.max(), rel=2e-5)
            assert row[x["position"]] == pytest.approx(row.max(), rel=2e-5)
            assert x["token"] == session.sources[s].groups[g]["texts"][t]["keys"][x["position"]]


def test_similar_heads_are_a_row_of_the_similarity_of_the_profile(app: Guard, session: Session) -> None:
    for s, g, t, _ in places(session):
        source = session.sources[s]
        assert source.profile is not None
        expected = source.profile.similarity(t, source.groups[g]["name"])
        said = ask(app, f"/api/sources/{s}/similar/{g}/{t}/1/0").json()
        assert said["maps"] == expected.attrs["maps"]
        np.testing.assert_allclose(np.array(said["values"], float), expected.loc[(1, 0)], atol=1e-5)


def test_profiles_are_received_shares_and_entropies(app: Guard, session: Session) -> None:
    for s, g, t, weights in places(session):
        found = floats(ask(app, f"/api/sources/{s}/profiles/{g}/{t}/1/0"))
        n_queries, n_keys = weights.shape[2:]
        assert len(found) == n_keys + n_queries
        known = weights[1, 0].astype(np.float64)
        np.testing.assert_allclose(found[:n_keys], known.sum(0) / n_queries, rtol=1e-4, atol=1e-6)
        if s != 4:  # weights that add up to less than 1 have another entropy: of their shares
            terms = np.where(known > 0, -known * np.log(np.where(known > 0, known, 1)), 0)
            np.testing.assert_allclose(found[n_keys:], terms.sum(1), rtol=1e-4, atol=1e-5)


def test_intervention_changes_a_copy_and_not_the_model(app: Guard, session: Session) -> None:
    row = floats(ask(app, "/api/sources/4/row-weights/0/0/0/0?query=5"))
    assert 0 < row.sum() < 0.9999
    assert floats(ask(app, "/api/sources/0/row-weights/0/0/0/0?query=5")).sum() == pytest.approx(1, abs=1e-5)
    assert post(app, "/api/interventions", {"source": 0, "normalizer": "off-by-one"}).json() == {"id": 4}
    assert "expected a model" in sentence(post(app, "/api/interventions", {"source": 1, "normalizer": "sigmoid"}), 400)
    assert "cannot be edited" in sentence(post(app, "/api/interventions", {"source": 3, "normalizer": "sigmoid"}), 400)


def failing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the profiling of models fail."""

    def fails(*_: Any, **options: Any) -> Any:
        raise InputError("no profile today")

    monkeypatch.setattr("qkv.server.session.run.profile", fails)


def test_failed_intervention_is_prepared_again_with_the_same_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session("retried")
    session.add_model(loading.load_model("qkv-mini"), "import os")
    app = create_app(session)
    asked = {"source": 0, "normalizer": "sigmoid"}
    assert "not ready" in sentence(post(app, "/api/interventions", asked), 404)
    session.prepare()
    with monkeypatch.context() as patched, caplog.at_level(logging.CRITICAL, "qkv"):
        failing(session, patched)
        for _ in range(3):
            assert post(app, "/api/interventions", asked).json() == {"id": 1}
            until(lambda: session.sources[1].state == "failed")
            assert session.sources[1].error == "no profile today"
    assert post(app, "/api/interventions", asked).json() == {"id": 1}
    until(lambda: session.sources[1].state == "ready")
    assert session.sources[1].error is None
    assert len(session.sources) == 2


def test_interventions_and_live_do_not_trigger_hooks_of_the_model() -> None:
    """The model may run with hooks in another thread while copies of it are made."""
    session, calls = Session("hooked"), list[int]()
    loaded = loading.load_model("qkv-mini")
    session.add_model(loaded, "import os")
    hook = next(loaded.model.children()).register_forward_hook(lambda *_: calls.append(1))
    session.prepare()
    assert calls
    calls.clear()
    session.add_intervention(0, "sigmoid")
    until(lambda: session.sources[1].state != "running")
    assert session.sources[1].state == "ready"
    assert session.live is not None
    assert post(create_app(session), "/api/live", ASKED).status_code == 200
    assert not calls
    hook.remove()


def test_explorers_of_a_session_share_one_cache(session: Session) -> None:
    one, other, both = (next(iter(session.sources[s].maps.values())) for s in (0, 4, 3))
    assert isinstance(one, Explorer)
    assert isinstance(other, Explorer)
    assert isinstance(both, Explorer)
    assert one._calls is other._calls is both._calls
    assert one._tiles is other._tiles is both._tiles


def test_long_profile_serves_small_maps_and_explains_missing_weights(app: Guard, session: Session) -> None:
    source = session.sources[2]
    assert source.profile is not None
    data = source.profile.data
    shape = ask(app, "/api/sources/2/map/0/0/1/2").json()
    assert (shape["kind"], shape["deepest"]) == ("small", 0)
    assert (shape["pixel_queries"], shape["pixel_keys"]) == (int(data["bin_queries"][0]), int(data["bin_keys"][0]))
    assert "qkv view MODEL --file TEXT" in shape["why"]
    for pool in ("max", "mean"):
        tile = ask(app, f"/api/sources/2/tiles/{session.version}/0/0/1/2/{pool}/0/0/0")
        known = data[f"map_{pool}"].values[0, 1, 2]
        assert (int(tile.headers["x-rows"]), int(tile.headers["x-columns"])) == known.shape
        np.testing.assert_array_equal(floats(tile).reshape(known.shape), known)
    assert "qkv view" in sentence(ask(app, "/api/sources/2/row-weights/0/0/1/2?query=3"), 400)
    assert "expected 0/0" in sentence(ask(app, f"/api/sources/2/tiles/{session.version}/0/0/1/2/max/0/1/0"), 400)


def test_profile_without_maps_says_so() -> None:
    mini = loading.load_model("qkv-mini")
    session = Session("bare")
    session.add_profile(
        run.profile(mini.model, TEXT, tokenizer=mini.tokenizer, map_tokens=0, map_bins=0, probe=False, progress=False)
    )
    session.prepare()
    app = create_app(session)
    shape = ask(app, "/api/sources/0/map/0/0/0/0").json()
    assert shape["kind"] == "none"
    assert "no maps" in shape["why"]
    assert "no maps" in sentence(ask(app, f"/api/sources/0/tiles/{session.version}/0/0/0/0/max/0/0/0"), 400)


def blocks(part: np.ndarray, step: int, pooled: Any) -> np.ndarray:
    """Largest or mean of each step × step block; blocks at the edges are smaller."""
    whole = np.full([-(-n // step) * step for n in part.shape], np.nan)
    whole[: part.shape[0], : part.shape[1]] = part
    return pooled(whole.reshape(whole.shape[0] // step, step, -1, step), (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_tiles_of_a_long_text_pool_the_weights(stored: bool) -> None:
    """600 tokens: zoom 0 pools 4 × 4 pairs, zoom 2 is exact; a tile that causality masks is empty."""
    tiny = loading.Loaded("tiny", loading.random_gpt2(1024, layers=1, heads=2), None)
    ids = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
    profile = run.profile(tiny.model, ids, map_tokens=600, probe=False, progress=False)
    session = Session("long")
    if stored:
        session.add_profile(profile)
    else:
        session.add_model(tiny, ids)
    session.prepare()
    app = create_app(session)
    assert ask(app, "/api/sources/0/map/0/0/0/1").json()["deepest"] == 2
    known = profile.data["weights"].values[0, 0, 1]
    for zoom, step in ((0, 4), (1, 2), (2, 1)):
        across = -(-600 // step)
        for i in range(-(-across // 256)):
            for j in range(-(-across // 256)):
                rows, columns = (slice(x * 256 * step, min(600, (x + 1) * 256 * step)) for x in (i, j))
                for pool, pooled in (("max", np.nanmax), ("mean", np.nanmean)):
                    tile = ask(app, f"/api/sources/0/tiles/{session.version}/0/0/0/1/{pool}/{zoom}/{i}/{j}")
                    if columns.start >= rows.stop:
                        assert (tile.status_code, tile.content) == (204, b"")
                        continue
                    part = known[rows, columns]
                    want = blocks(part, step, pooled)
                    picture = session.sources[0].maps["self"].tile("self", 0, 0, 1, zoom, i, j)
                    assert picture is not None
                    np.testing.assert_allclose(picture.visible, blocks(np.tri(600)[rows, columns], step, np.nanmean))
                    assert (int(tile.headers["x-rows"]), int(tile.headers["x-columns"])) == want.shape
                    np.testing.assert_allclose(floats(tile).reshape(want.shape), want, rtol=5e-5, atol=1e-8)
    assert "expected 0..2" in sentence(ask(app, f"/api/sources/0/tiles/{session.version}/0/0/0/1/max/2/3/0"), 400)
    assert "expected 0..2" in sentence(ask(app, f"/api/sources/0/tiles/{session.version}/0/0/0/1/max/3/0/0"), 400)


# --- invalid requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "word"),
    [
        ("/api/sources/9/page", 404, "source is 9, expected 0..4"),
        ("/api/sources/0/curves/1/0", 404, "group is 1, expected 0"),
        ("/api/sources/0/curves/0/2", 404, "text is 2"),
        ("/api/sources/0/map/0/0/99/0", 404, "layer is 99, expected 0.."),
        ("/api/sources/0/map/0/0/0/99", 404, "head is 99"),
        ("/api/sources/0/row/0/1/0/0?query=5000", 404, "query is 5000"),
        ("/api/sources/0/column/0/1/0/0?key=100000", 404, "key is 100000"),
        ("/api/sources/0/pair/0/1/0/0?query=0&key=99", 404, "key is 99"),
        ("/api/sources/0/links/0/1/0?query=99", 404, "query is 99"),
        ("/api/sources/0/row/0/1/0/0?query=-1", 422, "query"),
        ("/api/sources/0/row/0/1/0/0", 422, "query"),
        ("/api/sources/0/row/0/1/0/0?query=0&k=0", 422, "k"),
        ("/api/sources/0/row/0/1/0/0?query=0&k=5000", 422, "k"),
        ("/api/sources/0/row/0/1/0/0?query=1e3", 422, "query"),
        ("/api/sources/0/row/0/1/0/0?query=nan", 422, "query"),
        ("/api/sources/0/row/0/1/0/first?query=0", 422, "head"),
        ("/api/sources/-1/page", 422, "s"),
        ("/api/sources/zero/page", 422, "s"),
        (f"/api/sources/{'9' * 4000}/page", 422, "s"),
        ("/api/sources/99999999999999/page", 422, "s"),
        ("/api/sources/0/tiles/x/0/0/0/0/max/0/0/0", 404, "reload"),
        ("/api/sources/0/tiles/x/0/0/0/0/median/0/0/0", 422, "pool"),
        ("/api/sources/0/tiles/x/0/0/0/0/max/33/0/0", 422, "zoom"),
        ("/nothing", 404, "nothing"),
        ("/api/live", 405, "does not support the method"),
    ],
)
def test_invalid_requests_get_a_sentence(app: Guard, path: str, status: int, word: str) -> None:
    assert word in sentence(ask(app, path), status)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../viewer.html", "/static/..%2f..%2fpayload.py", "/static/%2e%2e/report.py", "/static//etc/passwd",
        "/static/%2fetc%2fpasswd", "/static/..\\report.py", "/static/report.html", "/static/", "/static/app.js%00",
        "/static/viewer.html/", "/../../etc/passwd", "/static/.", "/static/...js",
    ],
)  # fmt: skip
def test_paths_outside_of_static_files_are_not_found(app: Guard, path: str) -> None:
    assert ask(app, path).status_code == 404


def test_viewer_html_and_its_files_are_served(app: Guard) -> None:
    page = ask(app, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(/?static/[\w.]+)"', page.text)
    folders = Path(qkv.__file__).parent / "page", Path(qkv_lab.align.__file__).parent / "page"
    files = {path.name: path for folder in folders for path in folder.iterdir()}
    styles = {f"/static/{name}" for name in files if name.startswith("page_") and name.endswith(".css")}
    assert styles < set(named)  # a new page needs no change of the HTML
    for link in re.findall(r'<a [^>]*href="(/[^"]*)"', page.text):
        assert ask(app, link).status_code == 200, link
    for name in [*named, "/static/charts.js"]:
        found = ask(app, "/" + name.lstrip("/"))
        assert found.status_code == 200, name
        assert found.content == files[Path(name).name].read_bytes()
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        assert found.headers["content-type"].startswith(kind)


def test_every_answer_carries_the_security_headers(app: Guard) -> None:
    for path in ("/", "/api/session", "/static/charts.js", "/openapi.json", "/nothing", "/api/sources/0/curves/0/0"):
        response = ask(app, path)
        for name, value in SECURITY.items():
            assert response.headers.get_list(name) == [value], path
        assert "server" not in response.headers


def test_the_description_has_every_route(app: Guard) -> None:
    description = ask(app, "/openapi.json").json()
    every: list[Any] = [*routes.data_router.routes, *routes.model_router.routes, *qkv_lab.align.router.routes]
    assert set(description["paths"]) == {"/api/session", *(route.path for route in every)}
    assert {"SessionState", "MapShape", "LiveAnswer", "ErrorAnswer"} <= set(description["components"]["schemas"])
    assert "HTTPValidationError" not in str(description)  # errors are sentences


def test_a_page_of_another_package_that_fails_does_not_take_the_viewer_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
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
    session = Session("pages")
    assert [one.id for one in session.pages] == ["mine"]
    assert [record.args[0] for record in caplog.records if record.args] == ["gone", "other", "bare"]
    before = session.missing(page)
    session.prepare()
    assert session.missing(page) != before
    app = create_app(session)
    assert ask(app, "/static/page_mine.js").status_code == 200
    (said,) = ask(app, "/api/session").json()["pages"]
    assert said["data"] is None
    assert "ValueError" in said["missing"]


def test_sources_that_are_not_ready_or_failed_say_so(caplog: pytest.LogCaptureFixture) -> None:
    mini = loading.load_model("qkv-mini")
    session = Session("failing")
    session.add_model(mini, "   ")

    def breaks(source: Any) -> None:
        raise RuntimeError("secret of the machine")

    session._add("broken", "model", breaks)
    app = create_app(session)
    assert "still waiting" in sentence(ask(app, "/api/sources/0/page"), 404)
    with caplog.at_level(logging.CRITICAL, "qkv"):
        session.prepare()
    said = ask(app, "/api/session").json()["sources"]
    assert [x["state"] for x in said] == ["failed", "failed"]
    assert "empty" in said[0]["error"]
    assert "RuntimeError" in said[1]["error"]
    assert "secret" not in said[1]["error"]
    assert "empty" in sentence(ask(app, "/api/sources/0/page"), 404)


def test_unexpected_error_does_not_leak_its_message(session: Session) -> None:
    app = create_app(session)
    inner: Any = app.app

    @inner.get("/breaks")
    async def breaks() -> None:
        raise RuntimeError("secret of the machine")

    said = sentence(ask(app, "/breaks"), 500)
    assert "RuntimeError" in said
    assert "secret" not in said


# --- running models ---------------------------------------------------------------------------------------------------

ASKED = {"text": "import os", "edits": [], "layer": 1, "head": 2, "k": 3}
STEP = ASKED | {"sampling_temperature": 1.0, "seed": 0, "step": 0}


def test_live_answer_holds_weights_before_and_after(app: Guard, session: Session) -> None:
    edit = {"layer": 1, "head": 2, "normalizer": "off-by-one", "temperature": 2}
    said = post(app, "/api/live", ASKED | {"edits": [edit]}).json()
    assert said["tokens"] == ["<s>", "import", " os"]
    assert said["divergence"] > 0
    before, after = (np.frombuffer(base64.b64decode(said[x]), "<f4").reshape(3, 3) for x in ("map_before", "map"))
    source = session.sources[0].profile
    assert source is not None
    np.testing.assert_allclose(before, source.data["weights"].values[1, 1, 2, :3, :3], rtol=1e-4, atol=1e-6)
    assert after.sum(1).max() < 1
    config = loading.load_model("qkv-mini").model.config
    assert np.array(said["rows"]).shape == (config.layers, config.heads, 3)


def test_step_is_deterministic(app: Guard) -> None:
    first, again = (post(app, "/api/live/step", STEP).json() for _ in range(2))
    assert first == again
    assert first["text"].startswith("import os")
    assert len(first["row"]) == len(first["tokens"]) == 3


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_live_accepts_hostile_texts(app: Guard, text: str) -> None:
    said = post(app, "/api/live", ASKED | {"text": text})
    assert said.status_code == 200, said.text
    assert "".join(said.json()["tokens"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"text": "a" * 2001}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"text": None}, "text"),
        ({"edits": [{"layer": 0, "head": 0, "normalizer": "softmax", "temperature": 1}] * 257}, "edits"),
        ({"edits": [{"layer": 0, "head": 0, "normalizer": "hardmax", "temperature": 1}]}, "normalizer"),
        ({"edits": [{"layer": 0, "head": 0, "normalizer": "softmax", "temperature": 0.01}]}, "temperature"),
        ({"edits": [{"layer": 0, "head": 0, "normalizer": "softmax", "temperature": 21}]}, "temperature"),
        ({"edits": "all"}, "edits"),
        ({"layer": -1}, "layer"),
        ({"layer": "1"}, "layer"),
        ({"layer": 1.5}, "layer"),
        ({"head": 2**40}, "head"),
        ({"k": 51}, "k"),
        ({"k": 0}, "k"),
        ({"other": 1}, "other"),
    ],
)
def test_live_rejects_fields_out_of_bounds(app: Guard, change: dict[str, Any], word: str) -> None:
    assert word in sentence(post(app, "/api/live", ASKED | change), 422)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000, b'{"text":"\\ud83d","layer":0,"head":0}',
        b'{"text":"a","layer":NaN,"head":0}', b'{"text":"a","layer":0,"head":1e400}',
    ],
)  # fmt: skip
def test_live_rejects_invalid_json(app: Guard, body: bytes) -> None:
    response = ask(app, "/api/live", "POST", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422), response.text
    sentence(response, response.status_code)


def test_step_rejects_infinite_temperature_and_too_many_steps(app: Guard) -> None:
    content = json.dumps(STEP | {"sampling_temperature": float("inf")})
    response = ask(app, "/api/live/step", "POST", content=content, headers={"content-type": "application/json"})
    assert "temperature" in sentence(response, 422)
    assert "step" in sentence(post(app, "/api/live/step", STEP | {"step": 2**30}), 422)


def test_step_continues_from_ids(app: Guard) -> None:
    first = post(app, "/api/live/step", STEP).json()
    following = post(app, "/api/live/step", STEP | {"text": first["text"], "ids": first["ids"], "step": 1}).json()
    assert following["ids"][:-1] == first["ids"]
    assert post(app, "/api/live/step", STEP | {"ids": [2**31 - 1]}).status_code == 400
    assert "ids" in sentence(post(app, "/api/live/step", STEP | {"ids": [1] * 2001}), 422)


def test_live_rejects_a_layer_out_of_range(app: Guard) -> None:
    assert "layer is 7" in sentence(post(app, "/api/live", ASKED | {"layer": 7}), 400)


def test_body_without_json_content_type_is_rejected(app: Guard) -> None:
    """A form of another site can send text/plain without a CORS preflight request."""
    body = json.dumps(ASKED).encode()
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        assert ask(app, "/api/live", "POST", content=body, headers=headers).status_code == 422


def test_align_and_caption_answers(app: Guard) -> None:
    said = post(app, "/api/align", {"model": "qkv-translation", "text": "the black cat"}).json()
    assert said["target"] == ["le", "chat", "noir"]
    assert np.array(said["weights"]).shape == (said["layers"], said["heads"], 3, 3)
    assert "qkv-translation" in sentence(post(app, "/api/align", {"model": "gpt", "text": "a"}), 400)
    said = post(app, "/api/caption", {"scene": 3}).json()
    assert len(base64.b64decode(said["image"])) == said["size"] ** 2 * 3
    assert np.array(said["weights"]).shape == (len(said["words"]), said["gh"], said["gw"])
    assert "scene" in sentence(post(app, "/api/caption", {"scene": 10**6}), 400)


def test_session_without_models_uses_the_bundled_live_model(session: Session) -> None:
    other = Session("saved")
    profile = session.sources[1].profile
    assert profile is not None
    other.add_profile(profile)
    other.prepare()
    assert other.live_description is not None
    assert other.live_description["model"] == "qkv-mini"


def test_copy_shares_weights_but_not_hooks() -> None:
    model = loading.load_model("qkv-mini").model
    other = copy_sharing_weights(model)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert a is b, name
    calls: list[int] = []
    next(iter(other.children())).register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
        assert not calls
        other(torch.tensor([[1, 2]]))
    assert calls == [1]


# --- security checks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8765", True), ("localhost:8765", True), ("LOCALHOST:8765", True), ("[::1]:8765", True),
        ("127.0.0.1:8766", False), ("127.0.0.1", False), ("localhost", False), ("evil.example:8765", False),
        ("localhost.evil.example:8765", False), ("127.0.0.1.evil.example:8765", False), ("192.168.0.7:8765", False),
        ("127.0.0.1:8765@evil.example", False), ("evil.example#127.0.0.1:8765", False), ("", False),
        ("127.0.0.1:8765, evil.example", False), ("0.0.0.0:8765", False), ("[::1]evil:8765", False),
    ],
)  # fmt: skip
def test_host_header_must_be_this_server(app: Guard, host: str, allowed: bool) -> None:
    response = ask(app, "/api/session", headers={"host": host})
    if allowed:
        assert response.status_code == 200
    else:
        assert "Host" in sentence(response, 403)


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403), ("", 403)]
)
def test_requests_from_other_sites_are_rejected(app: Guard, site: str, status: int) -> None:
    assert ask(app, "/api/session", headers={"sec-fetch-site": site}).status_code == status
    assert post(app, "/api/live", ASKED, headers={"sec-fetch-site": site}).status_code == status
    assert ask(app, "/", headers={"sec-fetch-site": site}).status_code == 200  # a link may lead here


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (HERE, True), ("http://localhost:8765", False), ("https://127.0.0.1:8765", False), ("null", False),
        ("http://evil.example", False), ("http://127.0.0.1:8766", False), ("", False),
    ],
)  # fmt: skip
def test_origin_header_must_be_this_server(app: Guard, origin: str, allowed: bool) -> None:
    for method in ("GET", "POST"):
        path, body = ("/api/session", None) if method == "GET" else ("/api/live", ASKED)
        response = ask(app, path, method, json=body, headers={"origin": origin})
        assert response.status_code == (200 if allowed else 403)


def test_repeated_host_or_origin_is_rejected(app: Guard) -> None:
    for name, value in (("host", "127.0.0.1:8765"), ("origin", HERE)):
        headers = [("host", "127.0.0.1:8765"), *([(name, value)] * (1 if name == "host" else 2))]
        assert ask(app, "/api/session", headers=headers).status_code == 403


def test_head_has_the_headers_of_get_and_no_body(app: Guard) -> None:
    for path in ("/", "/api/session", "/static/charts.js", "/api/sources/99/page"):
        got, head = ask(app, path), ask(app, path, "HEAD")
        assert got.content
        assert head.content == b""
        assert (head.status_code, head.headers) == (got.status_code, got.headers)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_methods_other_than_get_head_and_post_are_rejected(app: Guard, method: str) -> None:
    assert ask(app, "/api/session", method).status_code == 405


def test_large_bodies_and_addresses_are_rejected(app: Guard) -> None:
    sent: list[int] = []

    async def chunks() -> Any:
        for n in range(10_000):
            sent.append(n)
            yield b" " * 1024

    large = b" " * (MAX_BODY + 1)
    for content in (large, chunks()):  # the second has no Content-Length
        response = ask(app, "/api/live", "POST", content=content, headers={"content-type": "application/json"})
        assert "64 KiB" in sentence(response, 413)
    assert len(sent) <= MAX_BODY // 1024 + 2  # the rest was not read
    assert "too long" in sentence(ask(app, f"/api/session?x={'y' * 5000}"), 414)
    fits = json.dumps(ASKED).encode().ljust(MAX_BODY)
    assert ask(app, "/api/live", "POST", content=fits, headers={"content-type": "application/json"}).status_code == 200


def test_slow_body_times_out(app: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.server.guard.BODY_SECONDS", 0.1)

    async def drip() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    response = ask(app, "/api/live", "POST", content=drip(), headers={"content-type": "application/json"})
    sentence(response, 408)


def test_public_server_requires_its_token(session: Session) -> None:
    app = create_app(session, host="0.0.0.0", token="abc-123")
    for headers in ({}, {"cookie": "qkv-token-8765=wrong"}, {"cookie": "qkv-token-1=abc-123"}, {"cookie": "=;;=\x7f"}):
        for path in (
            "/",
            "/api/session",
            "/static/charts.js",
            "/openapi.json",
            "/?token=",
            "/?token=abc-12",
            "/?token=é",
        ):
            assert "token" in sentence(ask(app, path, headers=headers), 401)
    welcome = ask(app, "/openapi.json?a=1&token=abc-123&b=%26")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/openapi.json?a=1&b=%26")
    assert welcome.headers["set-cookie"] == "qkv-token-8765=abc-123; Path=/; HttpOnly; SameSite=Strict"
    cookie = {"cookie": "other=1; qkv-token-8765=abc-123"}
    assert ask(app, "/api/session", headers=cookie).status_code == 200
    assert ask(app, f"{HERE}//evil.example/?token=abc-123").headers["location"] == "/evil.example/"
    # A Host may be an address or the name of this machine, but not another name that resolves to it.
    for host, status in (
        ("192.168.0.7:8765", 200), (f"{socket.gethostname()}:8765", 200), ("[fe80::1]:8765", 200),
        ("evil.example:8765", 403), ("192.168.0.7", 403),
    ):  # fmt: skip
        assert ask(app, "/api/session", headers=cookie | {"host": host}).status_code == status, host


# --- concurrency ------------------------------------------------------------------------------------------------------


def together(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    async def go() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return asyncio.run(go())


class Slow:
    """Work that records when it begins, and ends when `go` is set."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.stopped: list[Any] = []
        self.go = threading.Event()

    def __call__(self, key: Any) -> Callable[[Callable[[], bool]], Any]:
        def work(stopped: Callable[[], bool]) -> Any:
            self.begun.append(key)
            while not self.go.wait(0.005):
                if stopped():
                    self.stopped.append(key)
                    raise Cancelled
            return key

        return work


def test_requests_with_equal_keys_share_one_job() -> None:
    jobs, slow = JobQueue(), Slow()

    async def go() -> list[Any]:
        asked = [asyncio.ensure_future(jobs.run("tile", slow("tile"))) for _ in range(20)]
        await asyncio.sleep(0.05)
        slow.go.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(go()) == ["tile"] * 20
    assert slow.begun == ["tile"]
    assert asyncio.run(jobs.run("tile", slow("tile"))) == "tile"  # a finished job is not cached
    assert slow.begun == ["tile", "tile"]
    jobs.close()


def test_full_queue_rejects_new_jobs_and_keeps_the_others() -> None:
    jobs, slow = JobQueue(max_waiting=3), Slow()

    async def go() -> list[Any]:
        asked = [asyncio.ensure_future(jobs.run(0, slow(0)))]
        await asyncio.sleep(0.05)
        asked += [asyncio.ensure_future(jobs.run(n, slow(n))) for n in (1, 2, 3, 4)]
        await asyncio.sleep(0.05)
        slow.go.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    *done, rejected = asyncio.run(go())
    assert done == [0, 1, 2, 3]
    assert isinstance(rejected, QueueFull)
    assert slow.begun == [0, 1, 2, 3]
    jobs.close()


def test_jobs_of_disconnected_clients_are_dropped() -> None:
    jobs, slow = JobQueue(), Slow()

    async def go() -> list[Any]:
        left = asyncio.Event()
        first = asyncio.ensure_future(jobs.run("running", slow("running"), left.wait))
        await asyncio.sleep(0.05)
        waits = asyncio.ensure_future(jobs.run("waiting", slow("waiting"), left.wait))
        shared = [asyncio.ensure_future(jobs.run("shared", slow("shared"), gone)) for gone in (left.wait, None)]
        await asyncio.sleep(0.05)
        left.set()
        found = await asyncio.gather(first, waits, shared[0], return_exceptions=True)
        until(lambda: slow.begun[-1] == "shared")
        slow.go.set()
        return [*found, await shared[1]]

    *gone, kept = asyncio.run(go())
    assert [type(x) for x in gone] == [ClientDisconnected] * 3
    assert kept == "shared"
    assert slow.begun == ["running", "shared"]
    assert slow.stopped == ["running"]
    jobs.close()


def test_new_client_does_not_share_a_job_that_is_stopping() -> None:
    jobs, goes, begun = JobQueue(), threading.Event(), []

    def work(stopped: Callable[[], bool]) -> int:
        begun.append(len(begun))
        if len(begun) == 1:
            goes.wait(30)
            raise Cancelled
        return 5

    async def go() -> Any:
        left = asyncio.Event()
        first = asyncio.ensure_future(jobs.run("tile", work, left.wait))
        await asyncio.to_thread(until, lambda: begun == [0])
        left.set()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(jobs.run("tile", work))
        await asyncio.sleep(0)
        goes.set()
        return await second

    assert asyncio.run(go()) == 5
    jobs.close()


def test_short_job_interrupts_a_long_one() -> None:
    jobs, order = JobQueue(), []

    def long(stopped: Callable[[], bool]) -> str:
        order.append("long")
        if order.count("long") == 1:
            until(stopped)
            raise Cancelled
        return "whole map"

    async def go() -> list[Any]:
        first = asyncio.ensure_future(jobs.run("whole map", long, long=True))
        await asyncio.to_thread(until, lambda: order == ["long"])
        second = jobs.run("another", long, long=True)  # waits: it is long, too
        third = jobs.run("tile", lambda stopped: order.append("tile"))
        return await asyncio.gather(first, second, third)

    assert asyncio.run(go()) == ["whole map", "whole map", None]
    assert order == ["long", "tile", "long", "long"]
    jobs.close()


def test_cancelled_task_counts_as_disconnected() -> None:
    jobs, slow = JobQueue(), Slow()

    async def go() -> None:
        task = asyncio.ensure_future(jobs.run("tile", slow("tile")))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        until(lambda: slow.stopped == ["tile"])

    asyncio.run(go())
    jobs.close()


def test_failing_job_fails_for_all_clients_and_the_thread_continues() -> None:
    jobs = JobQueue()

    def breaks(stopped: Callable[[], bool]) -> None:
        time.sleep(0.05)
        raise InputError("no")

    found = together(*(jobs.run("x", breaks) for _ in range(3)))
    assert [type(x) for x in found] == [InputError] * 3
    assert asyncio.run(jobs.run("y", lambda stopped: 5)) == 5
    jobs.close()


def test_shutdown_cancels_queued_requests() -> None:
    jobs, slow = JobQueue(), Slow()

    async def go() -> list[Any]:
        asked = [asyncio.ensure_future(jobs.run(n, slow(n))) for n in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(jobs.close)
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [type(x) for x in asyncio.run(go())] == [ClientDisconnected, QueueFull, QueueFull]
    with pytest.raises(QueueFull):
        asyncio.run(jobs.run("late", slow("late")))


def test_compute_threads_use_all_cores() -> None:
    """Even if another thread has set the number of threads to one while they start."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        jobs, session, found = JobQueue(), Session("threads"), list[int]()
        session._has_small_models = True
        session._add("a source", "profile", lambda source: found.append(torch.get_num_threads()))
        torch.set_num_threads(1)
        assert asyncio.run(jobs.run("x", lambda stopped: torch.get_num_threads())) == 3
        torch.set_num_threads(1)  # the thread of the queue has set another number
        session.start()
        until(lambda: session.sources[0].state != "running")
        assert found == [3]
        jobs.close()
    finally:
        torch.set_num_threads(before)


class Sluggish:
    """An explorer whose tiles block until `slow.go` is set, so that the queue fills up."""

    def __init__(self, of: Any) -> None:
        self.of, self.slow = of, Slow()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def tile(self, *where: Any, stopped: Callable[[], bool], on_progress: Callable[[float], None]) -> Any:
        on_progress(0.25)
        self.slow(where)(stopped)
        return self.of.tile(*where)


@pytest.fixture
def crowded(session: Session) -> Iterator[tuple[Session, Sluggish]]:
    """The session, with tiles of source 0 that block."""
    source = session.sources[0]
    before, sluggish = source.maps, Sluggish(source.maps["self"])
    source.maps = {"self": sluggish}  # type: ignore[dict-item]
    yield session, sluggish
    sluggish.slow.go.set()
    source.maps = before


@pytest.mark.slow
def test_server_answers_under_two_hundred_concurrent_requests(crowded: tuple[Session, Sluggish]) -> None:
    session, sluggish = crowded
    tiles = [
        f"/api/sources/0/tiles/{session.version}/0/{t}/{layer}/{head}/max/0/0/0"
        for t in range(2) for layer in range(4) for head in range(6)
    ]  # fmt: skip
    wrong = [f"/api/sources/0/tiles/{session.version}/0/0/0/0/max/{z}/{i}/0" for z in range(32) for i in range(5)]

    small = ["/api/session", "/", "/api/sources/0/page", "/api/sources/0/row/0/0/0/mean?query=1"]

    async def go(url: str) -> tuple[list[httpx.Response], list[httpx.Response]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            asked = [asyncio.ensure_future(client.get(path)) for path in [*tiles, *wrong][:200]]
            await asyncio.to_thread(until, lambda: len(sluggish.slow.begun) > 0)
            others = [await client.get(path) for path in small * 4]
            sluggish.slow.go.set()
            return await asyncio.gather(*asked), others

    with serve_in_thread(session) as url:
        many, others = asyncio.run(go(url))
        assert [x.status_code for x in others] == [200] * 16
        assert len(many) == 200
        refused = [x for x in many if x.status_code == 503]
        assert len(refused) > 50  # many more than the queue holds
        for x in refused:
            assert x.headers["retry-after"] == "1"
            assert "try again" in sentence(x, 503)
        assert {x.status_code for x in many} <= {200, 400, 503}
        assert sum(x.status_code == 200 for x in many) >= 20
        again = httpx.get(url + tiles[-1].lstrip("/"), timeout=60)
        assert len(floats(again)) == int(again.headers["x-rows"]) * int(again.headers["x-columns"])


def test_session_reports_the_progress_of_a_map(crowded: tuple[Session, Sluggish]) -> None:
    session, sluggish = crowded
    path = f"api/sources/0/tiles/{session.version}/0/0/0/0/max/0/0/0"
    with serve_in_thread(session) as url:
        waits = threading.Thread(target=lambda: httpx.get(url + path, timeout=60))
        waits.start()
        until(lambda: httpx.get(f"{url}api/session").json()["computing"] == 0.25)
        sluggish.slow.go.set()
        waits.join()
        assert httpx.get(f"{url}api/session").json()["computing"] is None


def test_end_of_the_server_stops_running_jobs_and_answers_their_clients(crowded: tuple[Session, Sluggish]) -> None:
    session, sluggish = crowded
    path = f"api/sources/0/tiles/{session.version}/0/0/0/0/max/0/0/0"
    with ThreadPoolExecutor(1) as pool:
        with serve_in_thread(session) as url:
            waits = pool.submit(httpx.get, url + path, timeout=60)
            until(lambda: len(sluggish.slow.begun) == 1)
        assert sluggish.slow.stopped == sluggish.slow.begun
        assert waits.result().status_code == 499


def test_close_does_not_wait_for_a_job_that_never_looks_whether_it_should_stop() -> None:
    jobs, go = JobQueues(), threading.Event()

    async def waits() -> None:
        asked = [asyncio.ensure_future(q.run(1, lambda stopped: go.wait())) for q in (jobs.quick, jobs.slow)]
        await asyncio.sleep(0.05)
        assert not await asyncio.to_thread(jobs.close, 0.1)
        go.set()
        await asyncio.gather(*asked)

    asyncio.run(waits())
    assert jobs.close()


def test_closed_connections_cancel_their_jobs(crowded: tuple[Session, Sluggish]) -> None:
    """Real connections that are closed: their jobs are dropped or stopped."""
    session, sluggish = crowded
    with serve_in_thread(session) as url:
        address = ("127.0.0.1", httpx.URL(url).port)
        calls = []
        for head in range(4):
            sock = socket.create_connection(address)
            path = f"/api/sources/0/tiles/{session.version}/0/0/0/{head}/max/0/0/0"
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n\r\n".encode())
            calls.append(sock)
            until(lambda: len(sluggish.slow.begun) == 1)
        for sock in calls:
            sock.close()
        until(lambda: sluggish.slow.begun == sluggish.slow.stopped)
        assert httpx.get(f"{url}api/sources/0/row/0/0/0/0?query=1").status_code == 200  # the thread is free


def test_slow_readers_and_writers_do_not_block_others(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[int] = []
    pause = Connection.pause_writing
    monkeypatch.setattr(Connection, "pause_writing", lambda self: (paused.append(1), pause(self))[-1])
    monkeypatch.setattr(session.sources[0], "page", b" " * 2**23)  # more than the socket buffers hold
    with serve_in_thread(session) as url:
        port = httpx.URL(url).port
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
        for n, sock in enumerate(slow):
            head = f"Host: 127.0.0.1:{port}\r\n"
            if n % 2:  # requests a large answer and never reads it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                sock.sendall(f"GET /api/sources/0/page HTTP/1.1\r\n{head}\r\n".encode())
            else:  # announces a body and does not send it
                head += "Content-Type: application/json\r\nContent-Length: 100\r\n"
                sock.sendall(f"POST /api/live HTTP/1.1\r\n{head}\r\n{{".encode())
        until(lambda: len(paused) == 8)
        for _ in range(5):
            assert httpx.get(f"{url}api/session", timeout=10).status_code == 200
        assert httpx.post(f"{url}api/live", json=ASKED, timeout=30).status_code == 200
        for sock in slow:
            sock.close()


def test_silent_connections_are_closed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent from the start, in the middle of the first request head, and in the middle of the second."""
    monkeypatch.setattr("qkv.server.guard.HEAD_SECONDS", 0.3)
    with serve_in_thread(session) as url:
        address = ("127.0.0.1", httpx.URL(url).port)
        whole = f"GET /favicon.ico HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n\r\n".encode()
        for sent in ((), (whole[:20],), (whole, whole[:20])):
            with socket.create_connection(address, timeout=20) as sock:
                for part in sent:
                    sock.sendall(part)
                    if part is whole:
                        assert sock.recv(4096).startswith(b"HTTP/1.1 204")
                assert sock.recv(4096) == b""
        with httpx.Client(base_url=url) as client:  # a connection with regular requests stays open
            first, second = (client.get("/favicon.ico").extensions["network_stream"] for _ in range(2))
            assert first.get_extra_info("client_addr") == second.get_extra_info("client_addr")


def test_slow_answer_is_not_cut_off_by_the_head_timeout(
    crowded: tuple[Session, Sluggish], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.server.guard.HEAD_SECONDS", 0.05)
    session, sluggish = crowded
    threading.Timer(0.5, sluggish.slow.go.set).start()
    with serve_in_thread(session) as url:
        path = f"api/sources/0/tiles/{session.version}/0/0/0/0/max/0/0/0"
        assert httpx.get(url + path, timeout=60).status_code == 200


def test_sockets_disable_nagles_algorithm() -> None:
    """Nagle's algorithm would delay the second packet of an answer until the first is acknowledged."""
    found: list[int] = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            sock = transport.get_extra_info("socket")
            found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def go() -> None:
        server = await asyncio.get_running_loop().create_server(Protocol, sock=_socket("127.0.0.1", 0))
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await reader.read()
            writer.close()

    asyncio.run(go())
    assert found == [1]


def test_ipv6_host_in_brackets(session: Session) -> None:
    try:
        _socket("::1", 0).close()
    except InputError:
        pytest.skip("this machine has no IPv6")
    with serve_in_thread(session, host="[::1]") as url:
        assert re.fullmatch(r"http://\[::1\]:\d+/", url)
        assert httpx.get(f"{url}api/session").status_code == 200


def test_port_in_use_is_rejected(session: Session) -> None:
    with serve_in_thread(session) as url:
        again = serve_in_thread(session, port=httpx.URL(url).port or 0)
        with refused("--port"), again:
            pass


def test_server_on_all_interfaces_has_a_token(session: Session) -> None:
    with serve_in_thread(session, host="0.0.0.0") as url:
        found = httpx.URL(url)
        assert len(found.params["token"]) >= 32
        base = f"http://127.0.0.1:{found.port}"
        assert httpx.get(f"{base}/api/session").status_code == 401
        with httpx.Client(base_url=base) as client:
            assert client.get("/", params=found.params, follow_redirects=True).status_code == 200
            assert client.get("/api/session").json()["title"] == "tests"
        assert "server" not in httpx.get(f"{base}/").headers


def test_server_start_prepares_the_session() -> None:
    session = Session("starting")
    session.add_model(loading.load_model("qkv-mini"), "import os")
    with serve_in_thread(session) as url:
        until(lambda: httpx.get(f"{url}api/session").json()["sources"][0]["state"] == "ready")
        made = httpx.post(f"{url}api/interventions", json={"source": 0, "normalizer": "sigmoid"}).json()["id"]
        until(lambda: httpx.get(f"{url}api/session").json()["sources"][made]["state"] == "ready")
        assert httpx.get(f"{url}api/sources/{made}/map/0/0/0/0").json()["kind"] == "exact"


MODULES = ["qkv_lab.align.models", "qkv.server.guard", "qkv.server.live", "qkv.server.session"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
