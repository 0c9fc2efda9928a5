"""`qkv view`: look around in a model or a profile, in a browser."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from qkv.cli.inputs import given_text, ready
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.profiler.profiles import Profile

PROFILE = "profile.qkv.zip"  # what `qkv profile` calls it in its folder


def view(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PROFILE|MODEL]")] = "qkv-mini",
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")] = None,
    /,
    *,
    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="PROFILE|MODEL", help_behavior_hint="")] = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8765,
    no_browser: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Look around in a model or a profile, in a browser: from all heads down to one pair of tokens.

    Starts a server on this machine, opens its page, and runs until interrupted (Ctrl+C). Of a model, every map is
    computed as it is looked at, exact at any zoom; of a profile there is what was saved.

    qkv view                                         (the small model that comes with qkv, on a program)

    qkv view minilm "The cat sat on the mat."        (a trained BERT, on a text of your own)

    qkv view qkv-profile                             (what qkv profile has written to that folder)

    qkv view ./tuned --file book.txt --against ./base

    Args:
        source: A profile.qkv.zip, the folder that qkv profile has written one to, or a model: see qkv profile.
        text: The text to run the model on; a bundled passage if none is given.
        file: Read the text from this UTF-8 file instead; - is standard input.
        tokens: Use this many tokens: of the text or file if given, else of Python's own standard library.
        target: For an encoder-decoder, what its decoder reads; the text itself if not given.
        against: A second profile, or a second model on the same text, to compare with.
        dtype: Of the weights of models.
        host: Address to listen at. Any but a loopback one can be reached by others, who need the token in the address
            that is printed.
        port: Of the server; 0 is any that is free.
        no_browser: Print the address only.
    """
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise InputError("the viewer needs fastapi and uvicorn: pip install 'qkv[view]'")
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}, expected 0 (any that is free) to 65535")

    from rich.console import Console
    from rich.markup import escape

    from qkv.profiler.capture.inputs import batches
    from qkv.server.guard import WILDCARDS
    from qkv.server.run import serve
    from qkv.server.session import Session

    found = [(source, _saved(source, "PROFILE|MODEL"))]
    if against is not None:
        found.append((against, _saved(against, "--against")))
    names = [name for name, profile in found if profile is None]
    if not names and any(x is not None for x in (text, file, tokens, target)):
        raise InputError(f"PROFILE: {source} has a text of its own; expected no other, or a model to run on it")
    passage = given_text(names[0], text, file, tokens) if names else ""  # one for both, or they could not be compared
    session = Session(Path(source).name or source)
    for name, profile in found:
        if profile is not None:
            session.add_profile(profile, f"{profile.attrs.get('model', 'profile')} ({name})")
        else:
            loaded, inputs = ready(name, passage, tokens, dtype)
            list(batches(loaded.model, inputs, loaded.tokenizer, target))  # what it cannot run on is said here
            session.add_model(loaded, inputs, target=target)

    def started(url: str) -> None:
        console = Console()
        console.print(f"[bold]Viewer[/bold]   {escape(url)}", soft_wrap=True, highlight=False)
        if host in WILDCARDS:
            elsewhere = url.replace("localhost", socket.gethostname(), 1)
            console.print(f"[dim]Or, from elsewhere, {escape(elsewhere)}[/dim]", soft_wrap=True, highlight=False)
        console.print("[dim]Ctrl+C ends it.[/dim]")
        if not no_browser:  # in a thread: a browser in the terminal would keep the server from starting
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    if not serve(session, host=host, port=port, on_start=started):
        sys.stdout.flush()
        os._exit(0)  # what still computes would abort the interpreter, and nobody waits for it


def _saved(name: str, called: str) -> Profile | None:
    """The profile in a file, or in a folder that `qkv profile` has written; None if `name` may be a model."""
    from qkv.profiler.profiles import Profile

    if not os.path.exists(name):
        if name.endswith(".zip"):
            raise InputError(f"{called}: there is no file {name}")
        return None
    path = Path(name)
    if path.is_dir() and (path / PROFILE).is_file():
        path /= PROFILE
    return Profile.load(path) if path.is_file() else None
