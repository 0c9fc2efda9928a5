"""The viewer's server under load: many clients with cold maps, clients that send slowly, and clients that leave.

python -m benchmarks.server_load [SECONDS]    of each phase, 60 unless given; writes results/server_load.json

The server runs in a process of its own, on the attention maps of a random model at 16,384 tokens. Clients are
connections of this process, on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.timing import THREADS, save
from qkv.models.loading import Loaded, random_gpt2
from qkv.server.run import serve
from qkv.server.session import Session

TOKENS, LAYERS, HEADS = 16_384, 8, 4
FRESH = 2
"""The last layers, of which no tile is asked for before clients leave."""
CLIENTS, SLOW, LEAVING, SECONDS = 200, 300, 200, 60.0
STATE = "/api/session"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    """A running server: its address, what its maps are like, and its process as the system sees it."""

    url: str
    process: int
    version: str = ""
    deepest: int = 0
    began: float = field(default_factory=time.monotonic)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and resident megabytes."""

    @property
    def seconds(self) -> float:
        """The processor time that it has used."""
        parts = Path(f"/proc/{self.process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / TICKS

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process}/status").read_text(encoding="ascii")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def tile(self, layer: int, zoom: int) -> str:
        """The address of a random tile on or below the diagonal."""
        last = (TOKENS - 1) // (256 * 2 ** (self.deepest - zoom))
        i = random.randint(0, last)
        head, j = random.randrange(HEADS), random.randint(0, i)
        return f"/api/sources/0/tiles/{self.version}/0/0/{layer}/{head}/max/{zoom}/{i}/{j}"


def server_load(seconds: float = SECONDS) -> dict[str, Any]:
    """All three phases against one server."""
    with _served() as server:
        quiet = asyncio.run(_cheap(server, 3))
        cold, answers = asyncio.run(_watched(server, _cold(server, seconds)))
        warm = list(server.memory)
        ends = [time.monotonic() - server.began]
        slow, closed = asyncio.run(_watched(server, _slow(server, seconds)))
        ends.append(time.monotonic() - server.began)
        whole, left = asyncio.run(_watched(server, _leaving(server)))
        memory = server.memory
    middle, end = (warm[len(warm) // 3 : 2 * len(warm) // 3], warm[2 * len(warm) // 3 :])
    return {
        f"cheap request among {CLIENTS} clients with cold maps: median ms / 100": _median(cold) / 100,
        f"cheap request beside {SLOW} slow clients: median ms / 100": _median(slow) / 100,
        "memory: most in the last third / most in the second third": max(m for _, m in end) / max(m for _, m in middle),
        "milliseconds of a cheap request": {
            "alone": _spread(quiet),
            f"among {CLIENTS} clients with cold maps": _spread(cold),
            f"beside {SLOW} slow clients": _spread(slow),
        },
        "answers": dict(answers),
        "slow connections that the server closed": closed,
        "seconds of a whole map, zoom 0": whole,
        f"seconds of work after {LEAVING} clients left": left,
        "ends of the phases, seconds": [round(end, 1) for end in ends],
        "memory, seconds and megabytes": [[round(t, 1), round(m)] for t, m in memory],
    }


# ---- the phases -------------------------------------------------------------------------------------------------


async def _cheap(server: Server, seconds: float, clients: int = 4) -> list[float]:
    """Milliseconds of cheap requests of clients that do nothing else."""
    found: list[float] = []

    async def client(until: float) -> None:
        connection = Connection(server.url)
        while time.monotonic() < until:
            found.append(await connection.timed(STATE))
            await asyncio.sleep(0.05)
        connection.close()

    await asyncio.gather(*(client(time.monotonic() + seconds) for _ in range(clients)))
    return found


async def _cold(server: Server, seconds: float) -> tuple[list[float], Counter[str]]:
    """Clients that ask for a tile, then for something cheap, and so on; the milliseconds of what is cheap."""
    found: list[float] = []
    answers: Counter[str] = Counter()

    async def client(until: float) -> None:
        connection = Connection(server.url)
        while time.monotonic() < until:
            with suppress(OSError, asyncio.IncompleteReadError):
                layer, zoom = random.randrange(LAYERS - FRESH), random.randint(0, server.deepest)
                status = await connection.get(server.tile(layer, zoom))
                answers[f"tile: {status}"] += 1
                found.append(await connection.timed(STATE))
                answers["cheap"] += 1
                if status == 503:  # as the page does
                    await asyncio.sleep(0.5)
        connection.close()

    await asyncio.gather(*(client(time.monotonic() + seconds) for _ in range(CLIENTS)))
    return found, answers


async def _slow(server: Server, seconds: float) -> tuple[list[float], int]:
    """Cheap requests while other clients send one byte of their request each second; how many of them were closed."""
    closed = 0
    until = time.monotonic() + seconds

    async def client() -> None:
        nonlocal closed
        at = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        with suppress(OSError):
            for byte in _request(at.netloc, STATE) * 9:
                if time.monotonic() > until:
                    break
                writer.write(bytes([byte]))
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), 1)
                    closed += 1
                    break
        writer.close()

    slow = [asyncio.ensure_future(client()) for _ in range(SLOW)]
    found = await _cheap(server, seconds)
    await asyncio.gather(*slow)
    return found, closed


async def _leaving(server: Server) -> tuple[float, float]:
    """The seconds of a whole map, and the server's processor seconds after clients that asked for maps have left."""
    connection = Connection(server.url)
    began = time.monotonic()
    await connection.get(server.tile(LAYERS - 1, 0))
    whole = time.monotonic() - began
    connection.close()
    connections = [Connection(server.url) for _ in range(LEAVING)]
    asked = [asyncio.ensure_future(c.get(server.tile(LAYERS - 2, n % 4))) for n, c in enumerate(connections)]
    await asyncio.sleep(0.3)
    for request, one in zip(asked, connections, strict=True):
        request.cancel()
        one.close()
    await asyncio.gather(*asked, return_exceptions=True)
    began, before = server.seconds, time.monotonic()
    last = began
    while time.monotonic() - before < 60:
        await asyncio.sleep(0.25)
        now = server.seconds
        if now - last < 0.02:
            break
        last = now
    return whole, last - began


async def _watched(server: Server, phase: Awaitable[Any]) -> Any:
    """A phase, while the memory of the server is recorded."""

    async def watch() -> None:
        while True:
            server.memory.append((time.monotonic() - server.began, server.megabytes()))
            await asyncio.sleep(0.5)

    watching = asyncio.ensure_future(watch())
    try:
        return await phase
    finally:
        watching.cancel()


# ---- clients ----------------------------------------------------------------------------------------------------


class Connection:
    """One client's connection, which it keeps between requests; a plain one, so that clients cost little."""

    def __init__(self, url: str) -> None:
        self.at = urlsplit(url)
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> int:
        """The status of an answer, which is read whole."""
        if self.reader is None or self.writer is None or self.reader.at_eof():
            self.reader, self.writer = await asyncio.open_connection(self.at.hostname, self.at.port)
        self.writer.write(_request(self.at.netloc, path))
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
        if length:
            await self.reader.readexactly(int(length))
        return int(head.split()[1])

    async def timed(self, path: str) -> float:
        """Milliseconds until an answer is read."""
        began = time.perf_counter()
        status = await self.get(path)
        assert status == 200, f"{path} is answered with {status}"
        return 1000 * (time.perf_counter() - began)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _request(host: str, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": _median(values), "95th percentile": ordered[int(0.95 * len(values))], "most": ordered[-1]}


# ---- the server -------------------------------------------------------------------------------------------------


@contextmanager
def _served() -> Iterator[Server]:
    """A server in a process of its own, once its model is profiled."""
    command = [sys.executable, "-m", "benchmarks.server_load", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            server = Server(process.stdout.readline().strip().rstrip("/"), process.pid)
            _wait(lambda: _json(server, STATE)["sources"][0]["state"] == "ready")
            server.version = _json(server, STATE)["version"]
            server.deepest = _json(server, "/api/sources/0/page")["groups"][0]["texts"][0]["map"]["deepest"]
            server.began = time.monotonic()
            yield server
        finally:
            process.terminate()


def _json(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return json.load(answer)


def _wait(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.2)


def _serve() -> None:
    torch.set_num_threads(THREADS)
    session = Session("load")
    model = Loaded("random", random_gpt2(TOKENS, layers=LAYERS, heads=HEADS), None)
    session.add_model(model, torch.arange(TOKENS)[None] % 251)
    session.prepare()
    serve(session, on_start=lambda url: print(url, flush=True))


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        _serve()
        return
    result = server_load(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
    print(json.dumps({k: v for k, v in result.items() if k != "memory, seconds and megabytes"}, indent=1))
    print(save("server_load", result))


if __name__ == "__main__":
    main()
