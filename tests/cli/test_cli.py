"""`qkv profile`, `qkv view`, and what all commands share: exit codes, one sentence for whatever is wrong, no litter.

What commands refuse is in refusals.toml.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch

import qkv
from conftest import Command, Terminal, refused
from forked import Forked, view_without_end
from fuzz.files.formats import GOLDEN as FORMATS
from qkv._progress import bar, say, spinner
from qkv.cli.profile import _show as show_profile
from qkv.cli.shared import folder
from qkv.cli.terminal import head_grid, show, sketch, table
from qkv.models import DecoderConfig, DecoderLM, checkpoint, loading
from qkv.profiler.data.findings import Findings

pytest.importorskip("transformers", reason="loading models needs transformers")
TABLE = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text("utf-8"))
ROWS = [(name, *row) for name, rows in TABLE.items() for row in rows]
GOLDEN = FORMATS / "profile.qkv.zip"
FILES = {
    "x.txt": b"def one():\n    return 1\n", "bytes.bin": b"\xff\xfe\x00\x80", "bad.toml": b"task = ",
    "x.toml": b'task = "reversal"\n', "y.toml": b'task = "reversal"\n[training]\nstepps = 3\n',
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_profile_measures_what_is_asked_and_writes_all_files(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split("profile --tokens 100 --map-tokens 60 --layers 0,2-3 --dtype bfloat16 --out found")
    monkeypatch.setattr(sys, "argv", ["qkv", *words])
    out = command.succeeds(*words)
    assert "<s>" in out
    assert "report.html" in out
    figures = {f"{name}.png" for name in ("overview", "received", "sinks", "types")}
    written = {p.name for p in (tmp_path / "found").iterdir()}
    assert written == {"profile.qkv.zip", "report.html", "heads.csv", *figures}
    result = qkv.Profile.load(tmp_path / "found" / "profile.qkv.zip")
    assert result.data["layer"].values.tolist() == [0, 2, 3]
    assert result.data.sizes["head"] == loading.load_model("qkv-mini").model.config.heads
    assert result.data.sizes["query"] == 100
    assert result.data.attrs["causal"]
    assert result.attrs["dtype"] == "bfloat16"
    assert result.attrs["command"] == shlex.join(["qkv", *words])
    assert set(result.attrs["versions"]) == {"qkv", "torch", "transformers", "python"}
    assert "weights" not in result.data  # longer than --map-tokens
    np.testing.assert_allclose(result.data["received"].sum("key"), 100, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_next_steps_of_findings_run_as_commands_and_in_python(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def add(a, b):\n    return a + b\n" * 4
    command.succeeds("profile", "qkv-mini", text, "--out", "found")
    steps = {step.command for one in qkv.Profile.load("found/profile.qkv.zip").findings() for step in one.steps}
    assert {shlex.split(step)[1] for step in steps} == {"map", "ablate", "evict"}
    for step in sorted(steps):
        command.succeeds(*shlex.split(step)[1:])
    model, tokenizer = qkv.load("qkv-mini")
    profile = qkv.profile(model, text, tokenizer=tokenizer)
    names = {"qkv": qkv, "model": model, "inputs": text, "tokenizer": tokenizer, "profile": profile}
    for step in sorted({step.command for one in profile.findings() for step in one.steps}):
        exec(step, names)


@pytest.mark.usefixtures("undrawn")
def test_a_text_beyond_the_training_is_read_with_an_option_or_a_warning(tmp_path: Path, command: Command) -> None:
    model = DecoderLM(DecoderConfig.llama(vocab_size=256, d_model=8, layers=1, heads=2, context=16))
    checkpoint.save(model, tmp_path / "short")
    out = command.succeeds("profile", tmp_path / "short", "x" * 20, "--beyond", "--no-probe", "--out", tmp_path / "a")
    assert "20 tokens" in out
    with pytest.warns(UserWarning, match="20 tokens, expected at most 16, for which DecoderLM was trained"):
        found = qkv.profile(model, torch.ones(1, 20, dtype=torch.long), probe=False)
    assert found.data.sizes["query"] == 20
    learned = DecoderLM(DecoderConfig(vocab_size=256, d_model=8, layers=1, heads=2, context=16))
    with refused("inputs", "the positions of DecoderLM"):
        qkv.profile(learned, torch.ones(1, 20, dtype=torch.long))


@pytest.mark.usefixtures("undrawn")
def test_a_bundled_translator_reads_a_text_and_its_translation(tmp_path: Path, command: Command) -> None:
    text = "The black cat sat on the mat."
    command.succeeds("profile", "qkv-translation", text, "--no-probe", "--out", tmp_path / "own")
    words = ("profile", "qkv-translation", text, "--target", "le chat", "--no-probe", "--out", tmp_path / "given")
    command.succeeds(*words)
    for folder_name, target in (("own", "le chat noir était assis sur le tapis"), ("given", "le chat")):
        data = qkv.Profile.load(tmp_path / folder_name / "profile.qkv.zip").group("cross")
        assert data["key_token"].values[0].tolist() == text.lower().rstrip(".").split()
        assert data["query_token"].values[0].tolist() == ["<start>", *target.split()]
    model, tokenizer = qkv.load("qkv-translation")
    source, read = (one.convert_ids_to_tokens(range(9)) for one in (tokenizer, tokenizer.target))
    assert source != read
    weights = qkv.profile(model, text, tokenizer=tokenizer, target="le chat", progress=False).group("cross")["weights"]
    np.testing.assert_allclose(weights.values[0, 0, 0], data["weights"].values[0, 0, 0], atol=2.0**-12)
    ids = {"source": tokenizer(text)["input_ids"], "target": tokenizer.target("le chat")["input_ids"]}
    expected = model.alignments(*ids.values())[0].detach()
    np.testing.assert_allclose(weights.values[0, 0, 0], expected, atol=1e-5)
    with refused("target", "missing"):
        qkv.profile(model, text, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `own`, the profile in `found`, and FILES."""
    path = tmp_path_factory.mktemp("here")
    checkpoint.save(DecoderLM(DecoderConfig.llama(d_model=8, layers=1, heads=2, context=32)), path / "own")
    (path / "found").mkdir()
    shutil.copy(GOLDEN, path / "found")
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    return path


@pytest.mark.parametrize(("name", "words", "fragment"), [*ROWS, ("generate", "own \udcff", "not UTF-8")])
def test_bad_input_is_one_sentence_and_code_2(
    name: str, words: str, fragment: str, here: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    assert fragment in command.refuses(name, *shlex.split(words))
    assert {path.name for path in here.iterdir()} == {*FILES, "own", "found"}, "something was left behind"
    assert (here / "bytes.bin").read_bytes() == FILES["bytes.bin"]


@pytest.mark.parametrize("resumes", [False, True])
def test_full_disk_is_one_sentence_and_leaves_only_files_to_continue_from(tmp_path: Path, resumes: bool) -> None:
    (tmp_path / "old.txt").write_text("mine")
    with refused("--out", "No space left"), folder(tmp_path, resumes=resumes):
        (tmp_path / "first.png").write_text("whole")
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "second.png"))
    assert sorted(x.name for x in tmp_path.iterdir()) == ["first.png"] * resumes + ["old.txt"]


@pytest.mark.parametrize(("error", "code", "fragment"), [
    (KeyboardInterrupt(), 130, "interrupted"),
    (PermissionError(errno.EACCES, "Permission denied", "weights.bin"), 2, "weights.bin (Permission denied)"),
], ids=["interrupt", "file"])  # fmt: skip
def test_interrupt_and_files_that_cannot_be_read_leave_nothing(
    error: BaseException, code: int, fragment: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("qkv.runs.run.profile", fails)
    ran = command("profile", "qkv-mini", "hi", "--out", tmp_path / "o")
    assert ran.code == code
    assert re.fullmatch(rf"qkv: .*{re.escape(fragment)}.*\n", ran.err)
    assert not (tmp_path / "o").exists()


def test_folders_without_tokenizer_or_with_damaged_or_pickled_weights_are_refused(
    tmp_path: Path, command: Command
) -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    model.save_pretrained(tmp_path / "m")
    assert "no tokenizer" in command.refuses("profile", tmp_path / "m", "hi", "--out", tmp_path / "o")
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    torch.save(model.state_dict(), tmp_path / "m" / "pytorch_model.bin")
    with refused("model", r"no file named model\.safetensors"):
        loading.load_model(str(tmp_path / "m"))
    weights.write_bytes(whole[:1000])
    with refused("model", "cannot load"):
        loading.load_model(str(tmp_path / "m"))


def test_code_of_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 8))  # what transformers would take for a yes
    with refused("model", "custom code"):
        loading.load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()


# --- `qkv view` -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interrupt_before_the_model_is_ready_ends_the_server_quietly(tmp_path: Path) -> None:
    words = ("qkv-mini", "--port", 0, "--no-browser")
    process = Forked(view_without_end, *words, folder=tmp_path, HF_HUB_OFFLINE="1")
    process.has_said("\n")
    assert process.out.startswith("Viewer"), process.out
    assert httpx.get(process.out.split()[1]).status_code == 200
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 0
    assert "Traceback" not in process.errors


def test_the_address_is_printed_and_opened_in_a_browser_unless_told_not_to(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.set())

    def serve(session: Any, *, on_start: Any, **options: Any) -> bool:
        on_start("http://127.0.0.1:8765/")
        return True

    monkeypatch.setattr("qkv.server.run.serve", serve)
    out = command.succeeds("view", GOLDEN, "--no-browser")
    assert out.count("http://127.0.0.1:8765/\n") == 1
    assert not opened.is_set()
    command.succeeds("view", GOLDEN)
    assert opened.wait(60)


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["qkv", "nonsense"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("qkv", run_name="__main__")
    assert "nonsense" in capsys.readouterr().err


# --- progress ---------------------------------------------------------------------------------------------------------


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error in the test itself, because pytest resets it after the fixtures."""
    for name, value in {"TERM": "xterm", "COLUMNS": "160"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    return made


def test_nothing_is_printed_without_a_terminal_or_by_a_hidden_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bar("training", "steps", 3) as step, spinner("loading"):
        step(1, note="loss 2.0")
        step.say("evaluation")
        say("remark")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("qkv._progress.EVERY", 0.0)
    with bar("training", "steps", 40, done=10) as step:
        step(5, note="loss 2.0")
    line = r"qkv: training: 15 of 40 steps, loss 2\.0, 0\.0 min so far, about 0\.0 min left\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 3, show=False) as step:
        step(1)
        step.say("evaluation")
    assert terminal.getvalue() == ""


def test_bars_and_spinners_show_counts_notes_and_names_that_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with bar("training", "steps", 1000, done=10) as step:
        step(5, note="loss [2.0]")
        step.say("step 15 [evaluated]")
    with bar("profiling", "layers") as step:
        step(1, of=4)
    with spinner("loading ./[bold]"):
        say("skipped [3] files")
    for text in (
        "15 of 1,000 steps", "loss [2.0]", "step 15 [evaluated]", "1 of 4 layers", "loading ./[bold]",
        "skipped [3] files",
    ):  # fmt: skip
        assert text in terminal.getvalue()


# --- what commands print ----------------------------------------------------------------------------------------------


def screen_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns as standard output."""
    monkeypatch.setattr(sys, "stdout", made := Terminal())
    for name, value in {"COLUMNS": "80", "TERM": "xterm-256color", "NO_COLOR": None}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    return made


def test_a_command_is_one_line_in_a_terminal_and_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = screen_of(monkeypatch)
    profile = qkv.profile("qkv-mini", "def add(a, b):\n    return a + b\n" * 2, progress=False)
    profile.attrs |= {"model": "qkv-mini", "arguments": {"model": "qkv-mini", "text": "a long text " * 9}}
    found = Findings(profile.data, profile.attrs)
    steps = {step.command for step in (found.first_step, *(step for one in found.all for step in one.steps))}
    show_profile(profile)
    monkeypatch.undo()
    show_profile(profile)
    piped = capsys.readouterr().out
    for text in (re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue()), piped):
        said = {line.strip() for line in text.splitlines() if line.startswith("  qkv ")}
        assert said
        assert said <= steps
    assert "\x1b[" in screen.getvalue()
    assert "\x1b" not in piped
    assert not re.search(r"[ \t]$", piped, re.MULTILINE)


def test_a_narrow_terminal_leaves_columns_out_and_cuts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = screen_of(monkeypatch)
    rows = table(">head", *(f">column {n}" for n in "abcdefghijkl"))
    rows.add_row("L0 · H0", *("1,234,567.89" for _ in range(12)))
    show(rows)
    text = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert set(re.findall(r"[\d,.…]{4,}", text)) == {"1,234,567.89"}
    shown, left_out = text.split("not shown at this width")
    assert all((f"column {n}" in shown) != (f"column {n}" in left_out) for n in "abcdefghijkl")


def test_grid_of_heads_has_every_head_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    screen_of(monkeypatch)
    kinds = ["self", "induction", "mixed", "first token", "local", "self"]
    types = pd.DataFrame({"layer": [0, 0, 0, 1, 1, 1], "head": [0, 1, 2] * 2, "type": kinds})
    for kind in {*kinds} - {"mixed"}:
        types[kind] = types["type"] == kind
    blocks = head_grid(types)
    assert [str(line) for line in blocks[:2]] == ["  ▀▀▀▀"] * 2
    pairs = [line.spans for line in blocks[:2]]
    assert len({str(span.style) for line in pairs for span in line}) == 4
    weights = np.zeros((96, 48))
    weights[0, 0], weights[95, 47], weights[95, 0] = 1, 0.1, 1e-4  # in bins of 2 × 2, of which the last is too small
    line = sketch(weights)[-1]
    assert (len(line), line.plain.count(" "), line.plain[-1]) == (2 + 24, 2 + 23, "▄")
    monkeypatch.setenv("NO_COLOR", "1")
    assert [str(line) for line in head_grid(types)[:3]] == ["  SF", "  IL", "  ·S"]
    assert [line.plain.rstrip() for line in sketch(weights)] == ["  @", *[""] * 22, f"  {' ' * 23}#"]
