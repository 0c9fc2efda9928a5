"""`check_task`: each broken task fails with a message that names the fault, and each built-in task passes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broken_tasks import BROKEN
from lab_tasks import Counting
from qkv.models import DecoderConfig
from qkv.testing import CheckFailed
from qkv_lab.tasks import (
    Backcopy,
    Caption,
    Copy,
    Coreference,
    Hops,
    Language,
    Lookups,
    Recall,
    Reversal,
    Translation,
    backcopy,
    copy,
    coreference,
    hops,
    language,
    lookups,
    names,
    recall,
    reversal,
)
from qkv_lab.testing import check_task

SMALL: dict[str, Any] = {"d_model": 8, "layers": 1, "heads": 2}
TASKS: list[Any] = [
    Reversal(length=4, model=DecoderConfig(**SMALL)),
    Copy(min_length=3, max_length=4, longest=5, model=DecoderConfig(**SMALL)),
    Recall(min_length=3, max_length=4, symbols=12, model=DecoderConfig(**SMALL, positions="alibi", tied=False)),
    Lookups(second=2, length=5, longest=7, model=DecoderConfig(**SMALL, tied=False)),
    Hops(places=7, hops=2, model=DecoderConfig(**SMALL, tied=False)),
    Coreference(length=6, model=DecoderConfig(**SMALL, tied=False)),
    Translation(architecture="bahdanau", d_model=8, max_words=7, held_out=2),
    Caption(objects=1, held_out=3),
    Language(context=8, model=DecoderConfig(**SMALL)),
    Backcopy(symbols=16, length=9, model=DecoderConfig(**SMALL)),
]


@pytest.mark.parametrize("task", TASKS, ids=[task.name for task in TASKS])
def test_built_in_tasks_follow_the_protocol(task: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (backcopy, copy, coreference, hops, language, lookups, recall, reversal):
        for held_out in ("UNSEEN", "CHECKED", "EVALUATED"):
            if hasattr(module, held_out):
                monkeypatch.setattr(module, held_out, 60)
    if isinstance(task, Language):
        corpus = tmp_path / "corpus"
        corpus.mkdir()
        for at in range(20):
            (corpus / f"{at}.txt").write_text(f"text {at}: " + "ab" * at + " the quick brown fox" * 9)
        monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
        task = Language(corpus=str(corpus), context=8, model=task.model)
    check_task(task)


def test_every_built_in_task_is_checked() -> None:
    assert {task.name for task in TASKS} == set(names())


@pytest.mark.parametrize(("task", "message"), BROKEN, ids=[message.split(":")[0] for _, message in BROKEN])
def test_check_task_rejects_broken_tasks(task: Any, message: str) -> None:
    with pytest.raises(CheckFailed, match=f"^{message}"):
        check_task(task)


def test_check_task_restores_the_global_generators() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    check_task(Counting())
    assert drawn() == expected
