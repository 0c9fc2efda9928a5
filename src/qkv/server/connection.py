"""One connection, closed if a request that it should bring does not come."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10  # for a request's head to arrive: who says nothing takes no place from others for longer


class Connection(H11Protocol):
    """Uvicorn's, which has a timer between requests, but none before the first or while one arrives drop by drop."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _expect(self) -> None:
        self._forget()
        if not self.transport.is_closing():
            self._late = self.loop.call_later(HEAD_SECONDS, self._close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else one has come, and its answer sets the timer anew
            self.transport.close()
