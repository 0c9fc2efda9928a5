"""The tasks on relations between tokens: coreference, look-ups, hops; recall over a gap; sequences without a mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import refused
from qkv.models.decoder import DecoderConfig
from qkv_lab import Training, heads, train
from qkv_lab.settings import from_toml
from qkv_lab.tasks.relations import ADJECTIVES, IT, Coreference, Hops, Lookups
from qkv_lab.tasks.sequences import Copy, Recall, Reversal

TINY = DecoderConfig(d_model=8, layers=2, heads=2, tied=False)
TASKS: tuple[Any, ...] = (
    Coreference(length=7, nouns=5, model=TINY),
    Lookups(first=2, second=3, length=7, longest=11, symbols=5, model=TINY),
    Hops(places=7, hops=3, model=TINY),
    Recall(min_length=3, max_length=5, gap=4, symbols=13, model=TINY),
)


def of(task: Any) -> str:
    return str(task.name)


def maps_of(monkeypatch: pytest.MonkeyPatch, keys: torch.Tensor, *, layers: int, at: tuple[int, int]) -> None:
    """Replace the model's weights: the head `at` attends to `keys` (b, n), every other head to its own token."""
    n = keys.shape[1]
    weights = np.broadcast_to(np.eye(n), (len(keys), layers, 2, n, n)).copy()
    weights[:, at[0], at[1]] = np.eye(n)[keys.numpy()]
    monkeypatch.setattr(heads, "maps", lambda model, ids: weights)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_batches_depend_on_their_arguments_only_and_are_not_held_out(task: Any) -> None:
    first = task.batch(3, 8, 1)["ids"]
    task.batch(0, 8, 1)
    assert torch.equal(task.batch(3, 8, 1)["ids"], first)
    for other in (task.batch(4, 8, 1)["ids"], task.batch(3, 8, 2)["ids"]):
        assert other.shape != first.shape or not torch.equal(other, first)
    unseen = task.unseen(5) if task.name == "recall" else task.unseen()
    whole = slice(None) if task.name != "recall" else slice(5)
    assert heads.held_out(unseen[:, whole].numpy()).all()
    whole = slice(None) if task.name != "recall" else slice((first.shape[1] - 4) // 2)
    assert not heads.held_out(first[:, whole].numpy()).any()


def test_antecedent_is_the_noun_that_the_adjective_fits() -> None:
    task = Coreference(length=9, nouns=5)
    ids = task.batch(0, 300, 0)["ids"]
    words = [[task.word(token) for token in row] for row in ids.tolist()]
    antecedent, other = task.nouns_of(ids)
    both = set()
    for row, right, wrong in zip(words, antecedent.tolist(), other.tolist(), strict=True):
        assert sum(word.startswith("animal") for word in row) == sum(word.startswith("place") for word in row) == 1
        assert row[-3] == "it"
        kind = "animal" if row[-1].startswith("tired") else "place"
        assert row[right].startswith(kind)
        assert not row[wrong].startswith((kind, "word"))
        assert max(right, wrong) < 6
        both.add((kind, right < wrong))
    assert len(both) == 4, "either noun fits, in either order"
    assert int((ids == IT).sum()) == 300
    assert task.build().vocabulary == 2 + 2 * 5 + 2 * ADJECTIVES + 16


def test_lookup_answers_are_the_symbols_before() -> None:
    task = Lookups(first=2, second=3, length=7, symbols=5)
    ids = task.batch(0, 4, 0)["ids"]
    answers = task.answers(ids)
    for row in range(4):
        for place in range(3, 7):
            assert answers[row, place - 3].tolist() == [ids[row, place - 2] - 2, ids[row, place - 3] - 2]
    assert task.count({"ids": ids}) == answers.numel() == 4 * 4 * 2


def test_hops_follow_the_pointers() -> None:
    task = Hops(places=7, hops=4)
    ids = task.batch(0, 5, 0)["ids"]
    after = task.after(ids)
    for row in range(5):
        assert sorted(ids[row].tolist()) == list(range(2, 9)), "a permutation"
        for place in range(7):
            at = place
            for hop in range(4):
                at = int(ids[row, at]) - 2
                assert after[row, place, hop] == at
    assert task.count({"ids": ids}) == 5 * 7 * 3


def test_recall_repeats_the_block_after_a_gap_of_other_tokens() -> None:
    task = Recall(min_length=4, max_length=4, gap=5, symbols=9)
    ids = task.batch(0, 30, 0)["ids"]
    assert ids.shape == (30, 13)
    assert torch.equal(ids[:, :4], ids[:, 9:])
    assert set(ids[:, 4:9].flatten().tolist()) == set(range(11, 20)), "noise"
    assert ids[:, :4].max() < 11
    queries, keys = task.pairs(4)["induction"]
    assert torch.equal(ids[:, queries + 1], ids[:, keys])
    assert task.count({"ids": ids}) == 30 * 3
    assert torch.equal(replace(task, gap=0).batch(0, 30, 0)["ids"][:, :4], ids[:, :4]), "the gap leaves blocks alone"


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_loss_averages_over_all_answers(task: Any) -> None:
    """The expected loss is computed answer by answer."""
    torch.manual_seed(0)
    model, batch = task.build().double().eval(), task.batch(0, 3, 0)
    ids = batch["ids"]
    logits = model(ids)
    losses = []
    for row in range(3):
        if task.name == "coreference":
            found = [(logits[row, -3], int(ids[row, task.nouns_of(ids)[0][row]]))]
        elif task.name == "lookups":
            found = [
                (logits[row, place, 2 + 5 * k : 7 + 5 * k], int(ids[row, place - back]) - 2)
                for place in range(3, 7)
                for k, back in enumerate((2, 3))
            ]
        elif task.name == "hops":
            found = [
                (logits[row, place, 2 + 7 * k : 9 + 7 * k], int(task.after(ids)[row, place, k + 1]))
                for place in range(7)
                for k in range(2)
            ]
        else:
            n = (ids.shape[1] - 4) // 2
            found = [(logits[row, place - 1], int(ids[row, place])) for place in range(n + 5, ids.shape[1])]
        losses += [-scores.log_softmax(-1)[answer].item() for scores, answer in found]
    assert len(losses) == task.count(batch)
    assert task.loss(model, batch).item() == pytest.approx(np.mean(losses))


# --- attention --------------------------------------------------------------------------------------------------------


def test_coreference_check_finds_the_head_that_attends_to_the_antecedent(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Coreference(model=TINY)
    ids = task.unseen()[:200]
    keys = torch.arange(12).repeat(200, 1)
    keys[:, -3] = torch.where(torch.arange(200) < 150, *task.nouns_of(ids))
    maps_of(monkeypatch, keys, layers=2, at=(1, 0))
    found = task.check(task.build().eval())
    assert (found["best_layer"], found["best_head"], found["best"]) == (1, 0, 0.75)
    assert found["antecedent"] == [[0, 0], [0.75, 0]]
    assert found["other"] == [[0, 0], [0.25, 0]]
    assert found["picks"] == [[0, 0], [0.75, 0]]


@pytest.mark.parametrize(("back", "expected"), [(1, (1.0, 0.0)), (4, (0.0, 1.0))])
def test_lookup_check_finds_the_head_of_each_offset(
    back: int, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Lookups(model=replace(TINY, layers=1))
    keys = (torch.arange(12) - back).clamp(min=0).repeat(100, 1)
    maps_of(monkeypatch, keys, layers=1, at=(0, 1))
    found = task.check(task.build())
    assert (found["best_first"], found["best_second"]) == expected
    assert found["first_head" if back == 1 else "second_head"] == [0, 1]
    assert found["heads"] == 2, "the other look-up has no head, so that the first of equals is named"


def test_hops_check_finds_the_hop_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Hops(places=7, hops=4, model=TINY)
    keys = task.after(task.unseen()[:100])[..., 1]  # two hops ahead
    maps_of(monkeypatch, keys, layers=2, at=(1, 1))
    found = task.check(task.build())
    assert (found["best_layer"], found["best_head"], found["best_hop"], found["best"]) == (1, 1, 2, 1.0)
    assert found["best_by_hop"][1] == 1.0
    assert max(found["best_by_hop"][0], found["best_by_hop"][2]) < 0.5


def test_scores_of_keys_that_differ_between_sequences() -> None:
    weights = np.full((2, 1, 1, 3, 3), 0.1)
    weights[0, ..., 2, 0] = weights[1, ..., 2, 1] = 0.8
    pairs = (np.array([2]), np.array([[0], [1]]))
    assert heads.share_of_strongest(weights, pairs).tolist() == [[1.0]]
    assert heads.mean_weight(weights, pairs).tolist() == [[pytest.approx(0.8)]]
    assert heads.mean_weight(weights, (np.array([2]), np.array([0]))).tolist() == [[pytest.approx(0.45)]]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_short_run_writes_figures_and_finite_metrics(task: Any, tmp_path: Path) -> None:
    trained = train(task, Training(steps=2, batch=4, warmup=1), tmp_path, progress=False)
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2, "the loss and the task's own"
    assert np.isfinite(trained.evaluation["loss"])
    assert all(np.isfinite(np.ravel(x)).all() for x in trained.check.values())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("task", "steps", "least"),
    [(Coreference(), 350, 0.95), (Lookups(longest=12), 250, 0.95), (Hops(places=7, hops=3), 400, 0.9)],
    ids=("coreference", "lookups", "hops"),
)
def test_default_models_learn_and_a_head_attends_as_it_should(task: Any, steps: int, least: float) -> None:
    from test_lab_sequences import learnt

    with torch.enable_grad():
        model = learnt(task, replace(task.training(), steps=steps))
    found = task.check(model)
    assert task.evaluate(model)["accuracy"] >= least
    if task.name == "lookups":
        assert found["heads"] == 2
        assert min(found["best_first"], found["best_second"]) > 0.5
    elif task.name == "hops":
        assert found["best_by_hop"][0] > 0.8


# --- without a causal mask --------------------------------------------------------------------------------------------


def test_prefix_of_the_whole_sequence_lets_every_query_see_every_key() -> None:
    task = Copy(model=replace(TINY, prefix=33))
    weights = heads.maps(task.build().eval(), task.unseen(5)[:2, :-1])
    assert (weights > 0).all()


def test_generation_without_a_mask_computes_the_whole_sequence_at_each_step() -> None:
    torch.manual_seed(0)
    task = Copy(model=replace(TINY, prefix=33))
    model = task.build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    prompt = task.unseen(4)[:7, :5]
    ids = prompt
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        assert torch.equal(heads.continued(model, prompt, 4), ids[:, 5:])


# --- configurations and refusals --------------------------------------------------------------------------------------


def test_lesson_configuration_has_the_parameters_of_the_lesson() -> None:
    task, training = from_toml(Path("lesson"))
    assert isinstance(task, Reversal)
    assert sum(p.numel() for p in task.build().parameters()) == 26_672
    assert (training.steps, training.batch, training.lr) == (4000, 128, 3e-4)
    assert training.lr_at(0) == training.lr_at(3999) == 3e-4


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Coreference(length=4), "length"),
        (lambda: Coreference(nouns=1), "nouns"),
        (lambda: Coreference(model=replace(TINY, prefix=3)).build(), "model.prefix"),
        (lambda: Lookups(first=5), "first"),
        (lambda: Lookups(longest=11), "first"),
        (lambda: Hops(hops=1), "hops"),
        (lambda: Hops(places=6), "places"),
        (lambda: Recall(gap=-1), "gap"),
        (lambda: DecoderConfig(output_bias=True), "output_bias"),
    ],
)
def test_settings_out_of_range_are_rejected(make: Any, argument: str) -> None:
    with refused(argument):
        make()
