"""An HTTP connection that is closed if no complete request head arrives in time."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10  # for a request's head to arrive: a silent client occupies a connection no longer than this


class Connection(H11Protocol):
    """Uvicorn's protocol with a timer for every request head.

    Uvicorn itself has a timer between two requests, but none before the first and none while a head arrives slowly.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_idle(self) -> None:
        # While a request is being answered there is nothing to do: the end of its response starts the timer again.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
