"""What commands refuse: one sentence, exit code 2, and nothing left behind; the rows are in refusals.toml."""

from __future__ import annotations

import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from conftest import Command
from fuzz.files.formats import GOLDEN as FORMATS
from qkv.models import DecoderConfig, DecoderLM, checkpoint

pytest.importorskip("transformers", reason="loading models needs transformers")
TABLE = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text("utf-8"))
ROWS = [(name, *row) for name, rows in TABLE.items() for row in rows]
GOLDEN = FORMATS / "profile.qkv.zip"
FILES = {
    "x.txt": b"def one():\n    return 1\n", "bytes.bin": b"\xff\xfe\x00\x80", "bad.toml": b"task = ",
    "x.toml": b'task = "reversal"\n', "y.toml": b'task = "reversal"\n[training]\nstepps = 3\n',
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    name: str, words: str, fragment: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    assert fragment in command.refuses(name, *shlex.split(words))
    assert {path.name for path in folder.iterdir()} == {*FILES, "own", "found"}, "something was left behind"
    assert (folder / "bytes.bin").read_bytes() == FILES["bytes.bin"]
