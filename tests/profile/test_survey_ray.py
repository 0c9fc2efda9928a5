"""Surveys on Ray, here a cluster of one CPU on this machine: the bytes of one process. `make torture` kills them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from conftest import Command, refused
from qkv.errors import InputError
from qkv.profiler.surveys import on_ray
from qkv.profiler.surveys.corpus import of_addresses
from qkv.profiler.surveys.folder import Folder, Incomplete
from survey_process import own_survey

ray = pytest.importorskip("ray", reason="surveys on Ray need the extra ray")
pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One CPU; its processes import `survey_process`."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_survey_has_the_bytes_of_one_process_and_bad_input_is_one_sentence(tmp_path: Path) -> None:
    """Both on one cluster, whose start takes longest."""
    out, seen = tmp_path / "out", list[tuple[int, int, int]]()
    own_survey(out, shards=4, only_shards="0/4")
    found = own_survey(out, shards=4, engine="ray", on_batch=lambda *new: seen.append(new))
    assert found.packed() == own_survey(tmp_path / "whole", shards=4).packed()
    assert len(seen) == 3, "a shard that was finished was computed again"
    (tmp_path / "one.txt").write_text("import os")
    corpus = of_addresses([tmp_path / "one.txt"])
    (tmp_path / "one.txt").write_text("import os, sys")
    with pytest.raises(InputError, match=r"corpus .* changed") as raised:
        own_survey(tmp_path / "a", corpus, shards=1, engine="ray")
    assert isinstance(raised.value.__cause__, ray.exceptions.RayTaskError), "it was not raised in a process of Ray"


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
    monkeypatch.setattr(on_ray, "carry_out", lambda surveyor, numbers, *rest: sent.append([*numbers]))
    (tmp_path / "one.py").write_text("import os\n" * 9)
    words = ["survey", "qkv-mini", tmp_path / "one.py", "--shards", 2, "--engine", "ray", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit):  # no shard was written
        command(*words)
    assert sent == [[0, 1]]
    assert "--device" in command.refuses(*words, "--device", "cuda:1")


def test_a_model_on_a_gpu_is_not_sent(tmp_path: Path) -> None:
    surveyor: Any = SimpleNamespace(device=torch.device("cuda:0"))
    with refused("model", match="expected it on the CPU"):
        on_ray.carry_out(surveyor, [0], Folder(tmp_path), 1, None, lambda *_: None)


def test_cluster_in_the_documentation_fits_the_schema_of_ray() -> None:
    from jsonschema import validate
    from ray.autoscaler._private.util import fillout_defaults

    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(cluster_name.*?)```", text, re.DOTALL)
    assert found is not None
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    validate(fillout_defaults(yaml.safe_load(found[1])), json.loads(schema.read_text(encoding="utf-8")))
