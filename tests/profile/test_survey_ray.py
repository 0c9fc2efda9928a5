"""Surveys on Ray, here a cluster of two processes on this machine: the same bytes as one process, also after a kill."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from conftest import refused
from qkv.cli import main
from qkv.errors import InputError
from qkv.models.tokenizers import ByteTokenizer
from qkv.profiler.surveys import on_ray
from qkv.profiler.surveys.corpus import Corpus, Document, of_files, of_texts
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.survey import Incomplete, survey
from survey_process import TEXTS, own, own_survey

ray = pytest.importorskip("ray", reason="surveys on Ray need the extra ray")
pytestmark = pytest.mark.slow
SHARDS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two CPUs; its processes import the test's modules."""
    paths = os.pathsep.join(
        p for p in (str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if p
    )
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a survey by one process."""
    out = tmp_path_factory.mktemp("whole")
    own_survey(out, shards=SHARDS)
    return (out / "survey.qkv.zip").read_bytes()


@dataclass(frozen=True, slots=True)
class Deadly(Document):
    """A text that kills the process that reads it: the first `times` times."""

    folder: Path = Path()
    times: int = 0

    def read(self) -> str:
        for n in range(self.times):
            try:
                (self.folder / f"{n}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)
        return Document.read(self)


def deadly(folder: Path, times: int) -> Corpus:
    """The corpus of `own_survey`, with a deadly text."""
    folder.mkdir()
    found = of_texts(TEXTS)
    documents = [
        Deadly(**{f.name: getattr(d, f.name) for f in fields(d)}, folder=folder, times=times) if i == 4 else d
        for i, d in enumerate(found.documents)
    ]
    return replace(found, documents=tuple(documents))


def test_shards_of_ray_have_the_bytes_of_one_process_after_two_kills(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "out"
    own_survey(out, shards=SHARDS, only_shards="0/4")
    texts, seen = deadly(tmp_path / "kills", times=2), list[tuple[int, int, int]]()
    survey(
        own(), texts, tokenizer=ByteTokenizer(), out=out, shards=SHARDS, batch_tokens=90, engine="ray",
        on_batch=lambda *new: seen.append(new),
    )  # fmt: skip
    assert len(list((tmp_path / "kills").iterdir())) == 2
    assert (out / "survey.qkv.zip").read_bytes() == whole
    assert len(seen) == SHARDS - 1, "a shard that was finished was computed again"


def test_a_shard_that_ray_gives_up_is_named() -> None:
    def get(_: object) -> None:
        raise ray.exceptions.WorkerCrashedError

    lost = SimpleNamespace(get=get, exceptions=ray.exceptions)
    with pytest.raises(Incomplete, match=rf"shard 3 after at most {on_ray.RETRIES + 1} attempts"):
        on_ray._result(lost, None, 3)


def test_a_model_on_a_gpu_is_not_sent(tmp_path: Path) -> None:
    work: Any = SimpleNamespace(surveyor=SimpleNamespace(device=torch.device("cuda:0")))
    with refused("model", match="expected it on the CPU"):
        on_ray.carry_out(work, [0], Folder(tmp_path), 1, None, lambda *_: None)


def test_bad_input_in_a_process_of_ray_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("import os")
    corpus = of_files([tmp_path / "one.txt"])
    (tmp_path / "one.txt").unlink()
    with pytest.raises(InputError, match=r"corpus .* changed") as raised:
        survey(own(), corpus, tokenizer=ByteTokenizer(), out=tmp_path / "a", shards=1, engine="ray")
    assert isinstance(raised.value.__cause__, ray.exceptions.RayTaskError), "it was not raised in a process of Ray"
    with refused("engine"):
        survey(own(), TEXTS, tokenizer=ByteTokenizer(), out=tmp_path / "b", engine="slurm")  # type: ignore[arg-type]


def test_command_surveys_on_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text("import os\n" * 9)
    arguments = ["survey", "qkv-mini", str(tmp_path / "one.py"), "--shards", "2", "--threads", "1", "--engine"]
    for engine in ("processes", "ray"):
        assert main([*arguments, engine, "--out", str(tmp_path / engine)]) == 0, capsys.readouterr().err
    one, other = ((tmp_path / engine / "survey.qkv.zip").read_bytes() for engine in ("processes", "ray"))
    assert one == other
    capsys.readouterr()
    assert main([*arguments, "ray", "--device", "cuda:1", "--out", str(tmp_path / "gpu")]) == 2
    assert "--device" in capsys.readouterr().err


def test_cluster_in_the_documentation_fits_the_schema_of_ray() -> None:
    from jsonschema import validate
    from ray.autoscaler._private.util import fillout_defaults

    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(cluster_name.*?)```", text, re.DOTALL)
    assert found is not None
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    validate(fillout_defaults(yaml.safe_load(found[1])), json.loads(schema.read_text(encoding="utf-8")))
