"""The checks of qkv.testing on every object of the package."""

import pytest
import qkv_example as mine
import torch
from qkv_example.experiment import Temperature
from qkv_example.task import First

import qkv
from qkv import testing
from qkv.models import DecoderConfig
from qkv_lab import experiments, tasks
from qkv_lab.testing import check_experiment, check_task


def test_mask_bias_score_normalizer_and_statistic_keep_the_contract() -> None:
    testing.check_mask(mine.Triangle(2))
    testing.check_bias(mine.Weekly())
    testing.check_score(mine.Gaussian())
    testing.check_normalizer(mine.SoftplusSquared())
    testing.check_statistic(mine.Older())


def test_the_policy_evicts_the_key_of_least_mean_attention() -> None:
    cache, causal = mine.MeanAttention(6, recent=2), qkv.Attention(mask=qkv.masks.Causal())
    for q, k, v in torch.randn(20, 3, 1, 2, 1, 8):
        out = cache.attend(causal, q, k, v)
    assert out.shape == (1, 2, 1, 8)
    assert (cache.seen, cache.length) == (20, 6)


def test_task_and_experiment_keep_the_contract() -> None:
    check_task(First(length=4, model=DecoderConfig(d_model=8, layers=1, heads=2)))
    check_experiment(Temperature())


def test_the_command_line_finds_the_task_and_the_experiment() -> None:
    assert "first" in tasks.names()
    assert tasks.task_class("first")(length=4).batch(0, size=3, seed=0)["ids"].shape == (3, 6)
    assert experiments.experiment("temperature").question.startswith("Does")


@pytest.mark.parametrize(
    "command",
    [
        ["train", "first", "--steps", "3"],
        ["experiment", "temperature", "--quick"],
        ["profile", "qkv-mini", "for x in y:", "--no-probe", "--statistics", "older"],
        ["evict", "--tokens", "24", "--budgets", "8", "--policies", "mean"],
        ["generate", "qkv-mini", "for x", "--tokens", "12", "--cache", "mean:8,4"],
    ],
    ids=lambda command: command[0],
)
def test_commands_run(command: list[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv import cli

    monkeypatch.chdir(str(tmp_path))
    assert not cli.main(command)
