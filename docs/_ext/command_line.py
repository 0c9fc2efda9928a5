"""Writes command-line.md: the output of `--help` for every command."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sphinx.application import Sphinx

from qkv import cli
from qkv_lab.tasks import names


def help_output(*words: str) -> str:
    """The output of a command's `--help` on a terminal of 100 columns without colours."""
    out = io.StringIO()
    with (
        patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        cli.main([*words, "--help"])
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def page() -> str:
    lines = [
        "# The command line",
        "",
        "The output of `--help` for every command. Invalid input prints one sentence and exits with code 2.",
    ]
    lines += ["Ctrl-C leaves no partly written files and exits with code 130.", ""]
    commands = [name.split() for name in (*cli.commands(), *cli.SUBCOMMANDS)]
    for words in [*commands, *(["train", name] for name in names())]:
        lines += [f"## qkv {' '.join(words)}", "", "```text", help_output(*words), "```", ""]
    return "\n".join(lines)


def write(app: Sphinx) -> None:
    path = Path(app.srcdir) / "command-line.md"
    text = page()
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
