"""Every code block of the documentation runs, and every `qkv` command in it is valid."""

from __future__ import annotations

import functools
import re
import shlex
import socket
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist

import pages
from qkv import cli
from qkv.profiler.capture import probes
from qkv.testing import laws, parts, weights
from qkv_lab.cli import train
from qkv_lab.tasks.symbols import Symbols

pytest.importorskip("transformers", reason="the pages profile models")
STYLE = mpl.rc_params_from_file(pages.DOCS / "matplotlibrc", use_default_template=False)
WITH_PYTHON = [page for page in pages.pages() if pages.python(page)]
SHORTER = {
    "README.md": {"torch.randn(3, 1, 8, 4096, 64": "torch.randn(3, 1, 8, 512, 64"},
    "docs/howto/train-a-statistic.md": {"200": "10", "2048": "256"},
    "docs/lab.md": {"steps=20": "steps=2"},
    "docs/labs/bahdanau.md": {"steps=250": "steps=4", "range(40)": "range(4)", "(n, 200, draw)": "(n, 20, draw)"},
    "docs/labs/reversal.md": {"steps, peak = 250": "steps, peak = 26"},
    "docs/labs/sinks.md": {"steps=200, every=20": "steps=4, every=2"},
    "docs/labs/transformer.md": {"steps=120, lr=6e-3, warmup=40, every=20": "steps=4, lr=6e-3, warmup=2, every=2"},
    "docs/mechanisms/random-keys.md": {"4096": "1024"},
    "docs/tutorial/07-a-model.md": {"in range(120)": "in range(12)"},
    "docs/tutorial/08-seeing.md": {"program + second,": "second,", '"sink"]]': '"sink"]][::6]'},
}
"""Of pages, what takes long, and what runs instead: fewer steps and tokens, checks that other pages make as well."""
WITH_COMMANDS = [page for page in pages.pages() if pages.commands(page)]


class Shell:
    """Runs a notebook's `!qkv …` in this process."""

    def system(self, line: str) -> None:
        words = shlex.split(line)
        assert words[0] == "qkv", f"a cell runs {words[0]!r}, expected qkv"
        assert cli.main(words[1:]) == 0, f"`{line}` failed"


@pytest.fixture
def reader_environment(
    tmp_path: Path, undrawn: None, untraced: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An empty folder, a process group of one, and the site's figure style.

    The checks of `qkv.testing` run at one size and without FlexAttention, which is slow on a CPU, and the lab's tasks
    with few held-out sequences: other tests run both in full. Probes read short texts, and figures are not drawn.
    """
    monkeypatch.setattr(laws, "kernels_for", lambda size: ["auto", "eager", "tiled"])
    monkeypatch.setattr(parts, "SIZES", laws.SIZES[:1])
    monkeypatch.setattr(weights, "MASK_SIZES", weights.MASK_SIZES[:2])
    monkeypatch.setattr(Symbols, "UNSEEN", 20)
    monkeypatch.setattr(Symbols, "CHECKED", 20)
    monkeypatch.setattr(probes, "TOKENS", 16)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun says
    for name, value in {"HF_HUB_OFFLINE": "1", **alone}.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    with mpl.rc_context(STYLE):
        yield
    plt.close("all")
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.random.set_rng_state(state)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_of_a_page_runs(page: str, reader_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks run in order, those of the README each alone; a cell tagged raises-exception raises."""

    def as_script() -> dict[str, Any]:
        main = types.ModuleType("__main__")  # so that what it defines can be pickled
        monkeypatch.setitem(sys.modules, "__main__", main)
        vars(main)["get_ipython"] = Shell
        return vars(main)

    namespace, changes = as_script(), SHORTER.get(page, {})
    whole = "".join(block.code for block in pages.python(page))
    assert all(before in whole for before in changes), f"{page} no longer says {list(changes)}"
    for block in pages.python(page):
        namespace = as_script() if page == "README.md" else namespace
        text = functools.reduce(lambda code, change: code.replace(*change), changes.items(), block.code)
        code = compile(_magics(text), f"{page}:{block.line}", "exec", dont_inherit=True)
        if "raises-exception" in block.tags:
            with pytest.raises(Exception):  # noqa: B017, PT011  # the page shows which one
                exec(code, namespace)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # plt.show() without a screen
                exec(code, namespace)


def _magics(code: str) -> str:
    """`!command` as IPython reads it."""
    lines = (
        f"get_ipython().system({line[1:].strip()!r})" if line.startswith("!") else line for line in code.split("\n")
    )
    return "\n".join(lines)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_a_page_are_valid(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line accepts every `qkv …` line with its flags and values."""
    ran: list[str] = []
    for table, commands in ((cli.COMMANDS, cli.commands()), (cli.SUBCOMMANDS, dict(cli.SUBCOMMANDS))):
        for name, command in commands.items():
            monkeypatch.setitem(table, name, _recorded(name, command, ran))
    monkeypatch.setitem(cli.COMMANDS, "train", lambda *words: train._read(words) if words else None)
    monkeypatch.chdir(pages.ROOT)
    for words in pages.commands(page):
        try:
            code = cli.main(words)
        except SystemExit as done:
            code = int(done.code or 0)
        assert code == 0, f"qkv {shlex.join(words)}: {capsys.readouterr().err}"


def _recorded(name: str, command: Any, ran: list[str]) -> Any:
    @functools.wraps(command)
    def record(*args: object, **kwargs: object) -> None:
        ran.append(name)

    return record


THING = r"(?:code|cells?|listing|figures?|pictures?|plots?|maps?|heatmaps?|tables?|diagrams?)"
PLACED = re.compile(rf"\b{THING} (above|below)\b|\b(above|below) {THING}\b")
SHOWN = re.compile(r"^(?:`{3,}(?:\{code-cell\}|python|console|sh|text)|!\[|\| |\$ | {4}\S|```\{)", re.MULTILINE)


def missing_things(text: str) -> list[str]:
    """The phrases "code below", "the table above" and the like without code, a figure or a table within 40 lines."""
    found = []
    for match in PLACED.finditer(text):
        lines = text[match.end() :].split("\n")[:40] if "below" in match[0] else text[: match.start()].split("\n")[-40:]
        if not SHOWN.search("\n".join(lines[1:] if "below" in match[0] else lines[:-1])):
            found.append(match[0])
    return found


def test_code_and_figures_above_and_below_are_there() -> None:
    assert missing_things("The code below.\n\nNo code.\n\nThe figure above.") == ["code below", "figure above"]
    assert missing_things("The code below.\n\n```python\nx\n```\n\nThe figure above.") == []
    texts = {page: (pages.ROOT / page).read_text(encoding="utf-8") for page in pages.pages()}
    assert {page: lost for page, text in texts.items() if (lost := missing_things(text))} == {}
