"""Processes for tests, forked from a server that has imported what they need: imports take seconds, a fork none."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "qkv_lab.loop", "qkv_lab.experiments.run", "qkv_lab.draw",
     "qkv_lab.tokens", "qkv.profiler.surveys.survey", "torch.distributed.tensor", "torch._dynamo"]
)  # fmt: skip


class Forked:
    """A process that calls a function of a module; its output goes to files in `folder`.

    Args:
        function: a function of a module that tests can import; better not of a test module, which imports more.
        args: its arguments, which can be pickled.
        folder: gets the files ``out`` and ``errors``.
        environment: variables that it has besides those of this process.
    """

    def __init__(self, function: Callable[..., object], *args: Any, folder: Path, **environment: str) -> None:
        self._out, self._errors = folder / "out", folder / "errors"
        given = (function, args, str(self._out), str(self._errors), {**os.environ, **environment})
        self._process = CONTEXT.Process(target=_call, args=given, daemon=True)
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


def run_command(*words: object) -> None:
    """`qkv` with these words; its exit code is that of the process."""
    from qkv.cli import main

    sys.exit(main([str(word) for word in words]))


def view_without_end(*words: object) -> None:
    """`qkv view` with these words, of a model whose profile is never ready."""
    import torch

    from qkv.server.session import Session

    def compute(session: Session) -> None:
        while True:
            torch.ones(300, 300) @ torch.ones(300, 300)

    Session.prepare = compute  # type: ignore[method-assign]
    run_command("view", *words)


def _call(
    function: Callable[..., object], args: tuple[Any, ...], out: str, errors: str, environment: dict[str, str]
) -> None:
    import torch

    for name, stream in ((out, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    os.environ.clear()  # those of the server when it started
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*args)
