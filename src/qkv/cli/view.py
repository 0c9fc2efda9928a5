"""`qkv view`: explore the attention of a model or a profile in a browser."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from qkv._packages import require
from qkv.cli.shared import Input, saved_profile
from qkv.cli.terminal import print_line
from qkv.errors import InputError, renamed


@dataclass(frozen=True)
class Source(Input):
    """A profile, or a model and the text that it runs on."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PROFILE|MODEL]")] = "qkv-mini"
    """A profile.qkv.zip, the folder that qkv profile wrote it to, or a model (see qkv profile --help)."""


SOURCE = Source()


def view(
    given: Annotated[Source, tyro.conf.arg(name="")] = SOURCE,
    *,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    against: Annotated[str | None, tyro.conf.arg(metavar="PROFILE|MODEL", help_behavior_hint="")] = None,
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8765,
    no_browser: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Explore the attention of a model or a profile in a browser.

    The pages lead from all heads down to one pair of tokens. The command starts a server on this machine, opens its
    page, and runs until you interrupt it (Ctrl+C). The maps of a model are computed while you look at them and are
    exact at any zoom; of a profile you see the data that was saved.

    qkv view                                         (the small model that comes with qkv, on Python code)

    qkv view minilm "The cat sat on the mat."        (a trained BERT, on your own text)

    qkv view qkv-profile                             (the profile that qkv profile wrote to this folder)

    qkv view ./tuned --file book.txt --against ./base

    Args:
        given: Model or profile, and text.
        target: For an encoder-decoder: the text that the decoder reads. By default it reads the same text.
        image: Read this image before the text, with a model that reads images; of a profile, the image that it read.
            The page of the text shows where each token looks.
        against: A second profile, or a second model on the same text, to compare with the first.
        port: Port of the server; 0 chooses a free port. Only this machine can connect to it.
        no_browser: Print the address without opening a browser.
    """
    source = given.model
    require("qkv view", "fastapi", "uvicorn")
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}, expected 0 (a free port) to 65535")

    from qkv.models import loading
    from qkv.profiler.capture.inputs import batches
    from qkv.server.run import serve
    from qkv.server.session import Session

    found = [(source, saved_profile(source, "PROFILE|MODEL"))]
    if against is not None:
        found.append((against, saved_profile(against, "--against")))
    names = [name for name, profile in found if profile is None]
    if not names and not (given.is_default and target is None):
        raise InputError(f"PROFILE: {source} already has its text, expected no other text, or a model to run on it")
    passage = replace(given, model=names[0]).passage() if names else ""  # one text for both models
    session = Session(Path(source).name or source)
    with renamed(image="--image"):
        picture = None if image is None else loading.read_image(image)
    for name, profile in found:
        if profile is not None:
            session.add_profile(profile, f"{profile.attrs.get('model', 'profile')} ({name})", image=picture)
        else:
            loaded, inputs = given.load(passage, model=name, head=None, image=picture)
            list(batches(loaded.model, inputs, loaded.tokenizer, target))  # raises if the model cannot read them
            arguments = replace(given, model=name).arguments(passage, None, target)
            session.add_model(loaded, inputs, target=target, arguments=arguments, image=picture)

    def started(url: str) -> None:
        print_line("Viewer", url, main=True)
        print_line("", "Ctrl+C ends it.")
        if not no_browser:  # in a thread: a browser in the terminal would keep the server from starting
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    if not serve(session, port=port, on_start=started):
        sys.stdout.flush()
        os._exit(0)  # threads that still compute would make the interpreter abort
