"""`check_experiment`: each broken experiment fails with a message that names the fault, and built-in ones pass."""

from __future__ import annotations

from typing import Any

import pytest

from broken_experiments import BROKEN, Computed, Trained
from qkv.testing import CheckFailed
from qkv_lab.experiments import experiment
from qkv_lab.tasks import backcopy
from qkv_lab.testing import check_experiment


@pytest.mark.parametrize("made", [Computed(), Trained()], ids=lambda made: made.name)
def test_check_experiment_accepts_correct_experiments(made: Any) -> None:
    check_experiment(made)


@pytest.mark.parametrize("name", ["random_scores", "norm_place", "score_functions"])
def test_built_in_experiments_fulfil_the_contract(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for held_out in ("EVALUATED", "CHECKED"):
        monkeypatch.setattr(backcopy, held_out, 8)
    check_experiment(experiment(name))


@pytest.mark.parametrize(("made", "message"), BROKEN, ids=[message.partition(":")[0] for _, message in BROKEN])
def test_check_experiment_rejects_broken_experiments(made: Any, message: str) -> None:
    with pytest.raises(CheckFailed, match=f"^{message}"):
        check_experiment(made)
