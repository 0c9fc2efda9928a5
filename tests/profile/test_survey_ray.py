"""Surveys on Ray have the bytes of one process. Ray itself runs in `make torture`, which kills its processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import Command, refused
from qkv.errors import InputError
from qkv.profiler.surveys import on_ray
from qkv.profiler.surveys.corpus import of_files
from qkv.profiler.surveys.folder import Folder
from qkv.profiler.surveys.survey import Incomplete
from survey_process import own_survey

ray = pytest.importorskip("ray", reason="surveys on Ray need the extra ray")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's tasks run in this process, whose start takes no time; what they get and return is pickled, as by Ray."""

    def get(stored: bytes) -> Any:
        found = ray.cloudpickle.loads(stored)
        if isinstance(found, InputError):
            raise ray.exceptions.RayTaskError("task", "its traceback", found)
        return found

    def carried_out(task: bytes, *given: Any) -> bytes:
        try:
            return put(get(task)(*get(put(given))))
        except InputError as error:
            return put(error)

    def remote(task: Callable[..., Any]) -> Any:
        stored = put(task)
        task_of = SimpleNamespace(remote=lambda *given: carried_out(stored, *given))
        return SimpleNamespace(options=lambda **_: task_of)

    put = ray.cloudpickle.dumps
    for name, function in {
        "is_initialized": lambda: True, "cluster_resources": dict, "get_gpu_ids": list, "put": put, "get": get,
        "remote": remote, "wait": lambda waiting: (waiting[-1:], waiting[:-1]), "cancel": lambda *_, **__: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(ray, name, function)


@pytest.mark.usefixtures("cluster")
def test_a_survey_on_ray_has_the_bytes_of_one_process(tmp_path: Path) -> None:
    out, seen = tmp_path / "out", list[tuple[int, int, int]]()
    own_survey(out, shards=4, only_shards="0/4")
    found = own_survey(out, shards=4, engine="ray", on_batch=lambda *new: seen.append(new))
    assert found.packed() == own_survey(tmp_path / "whole", shards=4).packed()
    assert len(seen) == 3, "a shard that was finished was computed again"


@pytest.mark.usefixtures("cluster")
def test_bad_input_of_a_task_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("import os")
    corpus = of_files([tmp_path / "one.txt"])
    (tmp_path / "one.txt").unlink()
    with pytest.raises(InputError, match=r"corpus .* changed") as raised:
        own_survey(tmp_path / "a", corpus, shards=1, engine="ray")
    assert isinstance(raised.value.__cause__, ray.exceptions.RayTaskError), "it was not raised in a task"


def test_a_shard_that_ray_gives_up_is_named() -> None:
    def get(_: object) -> None:
        raise ray.exceptions.WorkerCrashedError

    lost = SimpleNamespace(get=get, exceptions=ray.exceptions)
    with pytest.raises(Incomplete, match=rf"shard 3 after at most {on_ray.RETRIES + 1} attempts"):
        on_ray._result(lost, None, 3)


def test_the_command_surveys_on_ray_and_on_no_single_gpu(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(on_ray, "carry_out", lambda work, numbers, *rest: sent.append([*numbers]))
    (tmp_path / "one.py").write_text("import os\n" * 9)
    words = ["survey", "qkv-mini", tmp_path / "one.py", "--shards", 2, "--engine", "ray", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit):  # no shard was written
        command(*words)
    assert sent == [[0, 1]]
    assert "--device" in command.refuses(*words, "--device", "cuda:1")


def test_a_model_on_a_gpu_is_not_sent(tmp_path: Path) -> None:
    work: Any = SimpleNamespace(surveyor=SimpleNamespace(device=torch.device("cuda:0")))
    with refused("model", match="expected it on the CPU"):
        on_ray.carry_out(work, [0], Folder(tmp_path), 1, None, lambda *_: None)
