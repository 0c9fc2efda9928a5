"""The command line as a user types it: subprocesses for the main job, `main` itself for the many ways to go wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.cli import main
from qkv.cli.shared import folder
from qkv.errors import InputError
from qkv.models import loading

pytest.importorskip("transformers", reason="profiling models needs transformers")
ROOT = Path(__file__).parents[2]


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-m", "qkv.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random-weight GPT-2 and no tokenizer."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    config = GPT2Config(vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2Model(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_profile_writes_all_files(tmp_path: Path) -> None:
    done = run("profile", "--out", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<s>" in done.stdout
    assert "report.html" in done.stdout
    written = {p.name for p in (tmp_path / "found").iterdir()}
    figures = {f"{name}.png" for name in ("overview", "received", "entropy", "sink", "sinks", "types")}
    assert written == {"profile.qkv.zip", "report.html", "heads.csv", *figures}
    result = qkv.Profile.load(tmp_path / "found" / "profile.qkv.zip")
    config = loading.load_model("qkv-mini").model.config
    assert (result.data.sizes["layer"], result.data.sizes["head"]) == (config.layers, config.heads)
    assert result.attrs["command"] == "qkv profile --out found"
    np.testing.assert_allclose(result.data["received"].sum("key"), result.data.sizes["query"], rtol=1e-5)


@pytest.mark.slow
def test_profile_tokens_layers_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = "profile random-gpt2 --tokens 700 --layers 0,4-5 --dtype bfloat16 --out long"
    assert main(command.split()) == 0
    result = qkv.Profile.load(tmp_path / "long" / "profile.qkv.zip")
    assert result.data["layer"].values.tolist() == [0, 4, 5]
    assert result.data.sizes["query"] == 700
    assert result.attrs["dtype"] == "bfloat16"
    assert result.data.attrs["causal"]
    assert "weights" not in result.data  # longer than --map-tokens


@pytest.mark.parametrize("command", [["--help"], ["profile", "--help"], ["--version"], []])
def test_help_lists_commands_and_options(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command)
    except SystemExit as done:
        code = done.code
    said = capsys.readouterr().out
    assert code in (0, None)
    expected = {"--help": "profile", "--version": qkv.__version__}.get(command[-1] if command else "--help", "")
    assert expected in said
    if command[:1] == ["profile"]:
        assert "--tokens" in said
        assert "minilm" in said


BAD = {
    "unknown model": (["no-such-model", "hi"], "model is 'no-such-model', which is not in the cache"),
    "no such folder": (["./nowhere", "hi"], "no folder ./nowhere"),
    "empty text": (["minilm", ""], "the text is empty"),
    "blank text": (["minilm", "  \n "], "the text is empty"),
    "longer than the model": (["minilm", "--tokens", "513"], "513 tokens, expected at most 512"),
    "no tokens": (["minilm", "--tokens", "0"], "--tokens is 0, expected at least 1"),
    "fewer tokens than asked": (["minilm", "hi", "--tokens", "99"], "--tokens is 99, but the text has 3"),
    "layers beyond": (["minilm", "hi", "--layers", "6"], r"layers is \[6\], but the model has attention layers 0..5"),
    "layers not numbers": (["minilm", "hi", "--layers", "a-b"], "--layers is 'a-b', expected numbers"),
    "layers backwards": (["minilm", "hi", "--layers", "5-2"], "--layers is '5-2', expected numbers"),
    "two texts": (["minilm", "hi", "--file", "x.txt"], "text and --file are both given"),
    "no such preset": (["minilm", "--preset", "wolf"], "--preset is 'wolf', expected one of fox, car"),
    "preset and text": (["minilm", "hi", "--preset", "fox"], "--preset .* and text are both given"),
    "no file": (["minilm", "--file", "none.txt"], "cannot read none.txt"),
    "not text": (["minilm", "--file", "bytes.bin"], "bytes.bin is not UTF-8 text"),
    "no decoder": (["minilm", "hi", "--target", "ho"], "BertModel has no decoder"),
    "window of nothing": (["minilm", "hi", "--local-window", "0"], "local_window is 0"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    Path("bytes.bin").write_bytes(b"\xff\xfe\x00\x80")
    assert main(["profile", *arguments, "--out", "out"]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"qkv: [^\n]*{sentence}[^\n]*\n", said.err), said.err
    assert said.out == ""
    assert not Path("out").exists(), "a folder was left behind"


@pytest.mark.slow
def test_bad_input_from_a_subprocess_has_no_traceback(tmp_path: Path) -> None:
    done = run("profile", "qkv-mini", "", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_output_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["profile", "minilm", "hi", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("resumes", [False, True])
def test_full_disk_is_one_sentence_and_leaves_only_files_to_continue_from(tmp_path: Path, resumes: bool) -> None:
    def work() -> None:
        with folder(tmp_path, resumes=resumes):
            (tmp_path / "first.png").write_text("whole")
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "second.png"))

    (tmp_path / "old.txt").write_text("mine")
    with pytest.raises(InputError, match="--out") as error:
        work()
    assert "No space left" in str(error.value)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["first.png"] * resumes + ["old.txt"]


def test_lost_output_folder_is_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with folder(out):
            out.rmdir()
            out.write_text("not a folder")
            (out / "x").write_text("")

    with pytest.raises(InputError, match="--out"):
        work()
    assert out.read_text() == "not a folder"


def test_files_that_cannot_be_read_end_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "weights.bin")

    monkeypatch.setattr("qkv.cli.tyro.cli", fails)
    assert main(["profile"]) == 2
    assert "weights.bin (Permission denied)" in capsys.readouterr().err


def test_folder_without_tokenizer_refuses_text(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tiny_folder), "hi", "--out", str(tmp_path / "o")]) == 2
    assert "there is no tokenizer" in capsys.readouterr().err


def test_nan_weights_are_reported_with_their_module(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_folder / "model.safetensors")
    weights["h.1.attn.c_attn.weight"][0, 0] = torch.nan
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_folder / "config.json").read_text())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(qkv.InputError, match=r"computes scores that are NaN in h\.1\.attn"):
        qkv.profile(str(broken), torch.arange(7), progress=False)


def test_damaged_weights_file_is_rejected(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(qkv.InputError, match="cannot load"):
        qkv.profile(str(tmp_path), torch.arange(7), progress=False)


def test_readme_commands_exist(tmp_path: Path) -> None:
    """Every `make` target and `qkv` subcommand the README shows is real."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = set(re.findall(r"^ {4}make ([a-z]+)|`make ([a-z]+)`", readme, re.MULTILINE))
    named = {a or b for a, b in shown}
    assert {"demo", "test"} <= named <= targets
    from qkv.cli import commands

    assert set(re.findall(r"\bqkv (?!profile)([a-z]+) --", readme)) <= set(commands())


def test_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qkv.profiler import run as runner

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "profile", interrupted)
    assert main(["profile", "minilm", "hi", "--out", str(tmp_path / "o")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_profile_attributes_are_json(tmp_path: Path) -> None:
    result = qkv.profile("minilm", "Two logbooks.", progress=False)
    assert json.loads(json.dumps(result.attrs)) == result.attrs
    assert set(result.attrs["versions"]) == {"qkv", "torch", "transformers", "python"}


def test_text_in_place_of_the_model_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["profile", "The cat sat on the mat. " * 20, "--out", str(tmp_path / "o")]) == 2
    assert "a text comes after the model" in capsys.readouterr().err


def test_weights_in_pickles_are_not_read(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    torch.save(load_file(tiny_folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(qkv.InputError, match=r"no file named model\.safetensors"):
        loading.load_model(str(tmp_path))


def test_code_of_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('ran')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 8))  # what transformers would take for a yes
    with pytest.raises(qkv.InputError, match="custom code"):
        loading.load_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()
