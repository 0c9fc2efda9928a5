"""Processes for tests, forked from the one that runs them: it has imported what they need, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("fork")


class Forked:
    """A process that calls a function of a module; its output goes to files in `folder`.

    Args:
        function: what it calls.
        args: its arguments.
        folder: gets the files ``out`` and ``errors``.
        environment: variables that it has besides those of this process.
    """

    def __init__(self, function: Callable[..., object], *args: Any, folder: Path, **environment: str) -> None:
        self._out, self._errors = folder / "out", folder / "errors"
        given = (function, args, str(self._out), str(self._errors), environment)
        self._process = CONTEXT.Process(target=_call, args=given, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads: theirs here only wait
            self._process.start()

    @property
    def pid(self) -> int:
        """For signals."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    @property
    def out(self) -> str:
        """What it has written to standard output so far."""
        return self._out.read_text() if self._out.exists() else ""

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    def has_said(self, text: str, seconds: float = 120) -> None:
        """Wait until this text stands in standard output."""
        end = time.monotonic() + seconds
        while text not in self.out:
            assert self.running, f"the process ended without {text!r}: {self.out}{self.errors}"
            assert time.monotonic() < end, f"the process did not say {text!r} within {seconds} seconds: {self.out}"
            time.sleep(0.02)

    def wait(self, seconds: float = 120) -> int:
        """Wait for the end; returns the exit status, or minus the number of the signal that ended it."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"the process did not end within {seconds} seconds: {self.out}{self.errors}")
        return code


def view_without_end(*words: object) -> None:
    """`qkv view` with these words, of a model whose profile is never ready."""
    import torch

    from qkv.cli import main
    from qkv.server.session import Session

    def compute(session: Session) -> None:
        while True:
            torch.ones(300, 300) @ torch.ones(300, 300)

    Session.prepare = compute  # type: ignore[method-assign]
    sys.exit(main(["view", *map(str, words)]))


def _call(
    function: Callable[..., object], args: tuple[Any, ...], out: str, errors: str, environment: dict[str, str]
) -> None:
    """As in a new process: with its own output, and interrupts that the process of the tests may ignore."""
    for number, (stream, name) in enumerate((("stdout", out), ("stderr", errors)), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        setattr(sys, stream, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    function(*args)
