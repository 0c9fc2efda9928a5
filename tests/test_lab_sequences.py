"""The tasks on random symbols: reversal, copy, recall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.lab import heads
from qkv.lab.task import Training
from qkv.lab.tasks.copy import Copy
from qkv.lab.tasks.recall import Recall
from qkv.lab.tasks.reversal import Reversal
from qkv.models.decoder import DecoderConfig, DecoderLM

TASKS: tuple[Any, ...] = (
    Reversal(length=5),
    Copy(min_length=4, max_length=7, longest=9),
    Recall(min_length=4, max_length=9),
)
SMALL = DecoderConfig(d_model=8, layers=2, heads=2)


def of(task: Any) -> str:
    return str(task.name)


def blocks(task: Any, ids: Tensor) -> Tensor:
    """What the hash that splits the data is of: all that comes before it repeats."""
    return ids[:, : ids.shape[1] // 2]


def held(task: Any) -> Tensor:
    return task.unseen() if task.name == "reversal" else task.unseen(task.max_length)


# --- data -------------------------------------------------------------------------------------------------------------


def test_sequences_are_reversed_copied_and_repeated() -> None:
    ids = Reversal(length=6).batch(0, 50, 0)["ids"]
    assert ids.shape == (50, 13)
    assert (ids[:, 6] == 1).all()
    assert torch.equal(ids[:, 7:], ids[:, :6].flip(1))
    ids = Copy(min_length=6, max_length=6).batch(0, 50, 0)["ids"]
    assert ids.shape == (50, 13)
    assert (ids[:, 6] == 1).all()
    assert torch.equal(ids[:, 7:], ids[:, :6])
    ids = Recall(min_length=6, max_length=6).batch(0, 50, 0)["ids"]
    assert ids.shape == (50, 12)
    assert torch.equal(ids[:, 6:], ids[:, :6])
    assert all(len(set(row)) == 6 for row in ids[:, :6].tolist()), "symbols of a block differ"


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_symbols_are_all_drawn_and_reserved_tokens_never(task: Any) -> None:
    drawn = torch.cat([blocks(task, task.batch(step, 64, 0)["ids"]).flatten() for step in range(20)])
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == set(range(2, 2 + task.symbols))
    assert set(blocks(task, held(task)).flatten().tolist()) == set(range(2, 2 + task.symbols))
    assert task.build().vocabulary == 2 + task.symbols


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_a_batch_depends_on_its_arguments_only(task: Any) -> None:
    first = task.batch(3, 8, 1)["ids"]
    task.batch(0, 8, 1)
    assert torch.equal(task.batch(3, 8, 1)["ids"], first)
    for other in (task.batch(4, 8, 1)["ids"], task.batch(3, 8, 2)["ids"]):
        assert other.shape != first.shape or not torch.equal(other, first)


@pytest.mark.parametrize("task", [Copy(min_length=4, max_length=7), Recall(min_length=4, max_length=7)], ids=of)
def test_batches_have_all_lengths(task: Any) -> None:
    assert {task.batch(step, 1, 0)["ids"].shape[1] // 2 for step in range(60)} == {4, 5, 6, 7}


def test_unseen_sequences_are_never_trained_on() -> None:
    task = Reversal(length=3, symbols=10)  # so few that training sees them all
    trained = {tuple(row) for step in range(100) for row in task.batch(step, 256, 0)["ids"].tolist()}
    unseen = {tuple(row) for row in task.unseen().tolist()}
    assert unseen
    assert not trained & unseen
    assert len(trained) + len(unseen) >= 0.99 * 10**3
    assert 0.05 * 10**3 < len(unseen) < 0.15 * 10**3


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_what_is_held_out_is_so_by_the_sequence_alone(task: Any) -> None:
    for step in range(5):
        assert not heads.held_out(blocks(task, task.batch(step, 64, 7)["ids"]).numpy()).any()
    assert heads.held_out(blocks(task, held(task)).numpy()).all()
    assert torch.equal(held(task), held(replace(task))), "fixed"


def test_a_tenth_is_held_out_however_sequences_differ() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(2, 34)] * 3, indexing="ij"), -1).reshape(-1, 3)
    held_out = heads.held_out(grid).reshape(32, 32, 32)
    for axes in ((1, 2), (0, 2), (0, 1)):  # whatever one of the symbols is
        shares = held_out.mean(axes)
        assert 0.05 < shares.min() < shares.max() < 0.15
    longer = heads.held_out(np.concatenate([grid, grid[:, :1]], 1))
    assert np.corrcoef(held_out.ravel(), longer)[0, 1] < 0.05


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_the_loss_is_the_mean_over_what_can_be_known(task: Any) -> None:
    model, batch = task.build().double(), task.batch(0, 3, 0)
    ids = batch["ids"]
    n = ids.shape[1] // 2
    logits, total, count = model(ids).log_softmax(-1), 0.0, 0
    for row in range(3):
        for place in range(n + 1, ids.shape[1]):
            total -= logits[row, place - 1, ids[row, place]].item()
            count += 1
    assert task.count(batch) == count
    assert task.loss(model, batch).item() == pytest.approx(total / count)


# --- where heads look -------------------------------------------------------------------------------------------------


def looking(pairs: heads.Pairs, n: int, *, weight: float = 1.0) -> np.ndarray:
    """Weights of one head in one sequence: each query on its key with `weight`, the rest on itself; others on key 0."""
    w = np.zeros((n, n))
    w[:, 0] = 1
    for query, key in zip(*pairs, strict=True):
        w[query] = 0
        w[query, query] += 1 - weight
        w[query, key] += weight
    return w


def test_scores_of_heads_that_look_right_half_right_and_wrong() -> None:
    pairs = Reversal(length=4).mirror()
    half = (pairs[0], np.where(np.arange(4) < 2, pairs[1], pairs[1] + 1))
    weights = np.stack([looking(pairs, 8, weight=0.75), looking(half, 8), looking((pairs[0], pairs[1] + 1), 8)])
    weights = weights.reshape(1, 3, 1, 8, 8)
    assert heads.share_of_strongest(weights, pairs).tolist() == [[1.0], [0.5], [0.0]]
    assert heads.mean_weight(weights, pairs).tolist() == [[0.75], [0.5], [0.0]]
    both = np.concatenate([weights, weights[:, [2, 2, 1]]])
    assert heads.share_of_strongest(both, pairs).tolist() == [[0.5], [0.25], [0.25]]


@pytest.mark.parametrize("n", [4, 5])
def test_the_pairs_are_where_the_predicted_token_is_or_what_it_followed(n: int) -> None:
    reversal = Reversal(length=n).batch(0, 9, 0)["ids"]
    queries, keys = Reversal(length=n).mirror()
    assert torch.equal(reversal[:, queries + 1], reversal[:, keys])
    assert set(queries + keys) == {2 * n - 1}
    assert queries.tolist() == list(range(n, 2 * n))
    copied = Copy(min_length=n, max_length=n).batch(0, 9, 0)["ids"]
    queries, keys = Copy().sources(n)
    assert torch.equal(copied[:, queries + 1], copied[:, keys])
    assert set(queries - keys) == {n}
    recalled = Recall(min_length=n, max_length=n).batch(0, 9, 0)["ids"]
    kinds = Recall().pairs(n)
    queries, keys = kinds["induction"]
    assert torch.equal(recalled[:, queries + 1], recalled[:, keys])
    assert set(queries - keys) == {n - 1}
    queries, keys = kinds["duplicate"]
    assert torch.equal(recalled[:, queries], recalled[:, keys])
    assert kinds["previous"][0].tolist() == [1 + key for key in kinds["previous"][1]] == list(range(1, 2 * n - 1))


def test_the_best_head_is_the_first_of_equals_or_the_one_with_more_weight() -> None:
    scores = np.array([[0.1, 1.0, 0.2], [1.0, 0.0, 1.0]])
    assert heads.best(scores) == (0, 1)
    assert heads.best(scores, np.array([[9, 0.3, 9], [0.4, 9, 0.6]])) == (1, 2)


def test_recall_names_heads_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Recall(min_length=4, max_length=5)
    kinds = task.pairs(5)
    weights = np.stack([looking(kinds[kind], 9) for kind in ("previous", "duplicate", "induction", "previous")])
    monkeypatch.setattr(heads, "maps", lambda model, ids: weights.reshape(1, 2, 2, 9, 9))
    found = task.check(None)
    assert found["duplicate"] == [[0, 1], [0, 0]]
    assert found["induction"] == [[0, 0], [1, 0]]
    assert [round(x, 9) for x in np.ravel(found["previous"])] == [1, 0.125, 0.125, 1]  # query 1 on key 0 in each
    assert (found["induction_layer"], found["induction_head"], found["best"]) == (1, 0, 1)


def test_maps_are_the_weights_of_the_model() -> None:
    """The output of a head whose values are the positions, one-hot, are its weights."""
    model = mirror_model(Reversal(length=3, symbols=10))
    ids = Reversal(length=3, symbols=10).unseen()[:4, :-1]
    weights = heads.maps(model, ids)
    assert weights.shape == (4, 1, 1, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert (weights[..., 0, 1:] == 0).all()
    np.testing.assert_array_equal(weights[..., 3:, :].argmax(-1), np.broadcast_to([2, 1, 0], (4, 1, 1, 3)))


# --- a model made by hand ---------------------------------------------------------------------------------------------


@torch.no_grad()
def mirror_model(task: Reversal) -> DecoderLM:
    """One head that sends query 2n − 1 − k to key k and brings back its token: tokens and positions are one-hot."""
    kinds, places = 2 + task.symbols, 2 * task.length + 1
    width = kinds + places
    model = replace(task, model=DecoderConfig(d_model=width, layers=1, heads=1)).build().eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    model.embedding.weight[:, :kinds] = torch.eye(kinds)
    model.positions.weight[:, kinds:] = torch.eye(places)
    attention = model.blocks[0].attention
    query, key, value = attention.in_proj.weight.chunk(3)
    for place in range(2 * task.length):
        query[kinds + 2 * task.length - 1 - place, kinds + place] = 9
        key[kinds + place, kinds + place] = 9
    value[:kinds, :kinds] = torch.eye(kinds)
    attention.out_proj.weight[:kinds, :kinds] = 9 * torch.eye(kinds)
    return model


def test_a_model_that_mirrors_is_found_to_and_fails_without_its_head() -> None:
    task = Reversal(length=3, symbols=10)
    model = mirror_model(task)
    with torch.no_grad():
        measured, found = task.evaluate(model), task.check(model)
    assert (measured["token_accuracy"], measured["sequence_accuracy"]) == (1, 1)
    assert found["mirrored"] == [[1]]
    assert found["weight"][0][0] > 0.95
    assert (found["best_layer"], found["best_head"], found["best"]) == (0, 0, 1)
    assert found["without_best"] == found["without_mirrors"] < 0.2
    assert task.evaluate(model)["token_accuracy"] == 1, "the model itself keeps its head"


def test_accuracy_is_of_what_the_model_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Reversal(length=3, symbols=10)
    said = task.unseen()[:, 4:].clone()  # 500 sequences
    said[:, 2] = 0
    said[:100, 1] = 0
    monkeypatch.setattr(heads, "continued", lambda model, prompt, new: said)
    measured = task.evaluate(task.build())
    assert measured["token_accuracy"] == pytest.approx(900 / 1500)
    assert measured["sequence_accuracy"] == 0


def test_continuations_are_greedy_and_feed_on_themselves() -> None:
    torch.manual_seed(0)
    model = Copy().build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    prompt = Copy().unseen(4)[:7, :5]
    ids = prompt
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(heads.continued(model, prompt, 6), ids[:, 5:])


@torch.no_grad()
def test_without_heads_only_those_are_gone() -> None:
    torch.manual_seed(0)
    task = Reversal(model=DecoderConfig(d_model=12, layers=2, heads=3))
    model, ids = task.build(), task.unseen()[:5]
    assert torch.equal(heads.without_heads(model, [])(ids), model(ids))
    cut = heads.without_heads(model, [(1, 2), (0, 0)])
    for layer, gone in enumerate(([0], [2])):
        before = model.blocks[layer].attention.out_proj.weight.view(12, 3, 4)
        after = cut.blocks[layer].attention.out_proj.weight.view(12, 3, 4)
        for head in range(3):
            assert torch.equal(after[:, head], torch.zeros(12, 4) if head in gone else before[:, head])


# --- figures, bad settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [replace(task, model=SMALL) for task in TASKS], ids=of)
def test_figures_of_a_model_that_has_learnt_nothing(task: Any) -> None:
    with torch.no_grad():
        figures = task.figures(task.build().eval())
    assert figures
    for figure in figures.values():
        figure.canvas.draw()
        assert figure.texts[0].get_text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reversal(length=0), "length is 0"),
        (lambda: Reversal(length=2), "symbols is 14 and length 2, which makes 196 different sequences"),
        (lambda: Reversal(symbols=1), "symbols is 1 and length 6, which makes 1 different"),
        (lambda: Copy(min_length=5, max_length=4), "min_length is 5, max_length 4, longest 16"),
        (lambda: Copy(longest=9), "longest 9, expected 1 ≤ min_length ≤ max_length ≤ longest"),
        (lambda: Copy(min_length=1), "symbols is 14 and min_length 1"),
        (lambda: Recall(max_length=17), "max_length 17, symbols 16, expected 2"),
        (lambda: Recall(min_length=2), "symbols is 16 and min_length 2, which makes 240 different"),
        (lambda: Reversal(model=DecoderConfig(vocab_size=99)).build(), "model.vocab_size is 99"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# --- they are learnt --------------------------------------------------------------------------------------------------


def learnt(task: Any, training: Training) -> DecoderLM:
    """A loop of few lines."""
    torch.manual_seed(training.seed)
    model: DecoderLM = task.build()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(training.beta1, training.beta2), weight_decay=training.weight_decay
    )
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        optimizer.zero_grad()
        task.loss(model, task.batch(step, training.batch, training.seed)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
    return model.eval()


@pytest.mark.slow
@torch.no_grad()
def test_reversal_is_learnt_by_heads_that_mirror() -> None:
    task = Reversal()
    with torch.enable_grad():
        model = learnt(task, task.training())
    measured, found = task.evaluate(model), task.check(model)
    assert measured["token_accuracy"] >= 0.99
    assert found["best"] >= 0.95
    assert found["without_mirrors"] < 0.3, "no other way was learnt"


@pytest.mark.slow
@torch.no_grad()
def test_recall_is_learnt_by_an_induction_head_of_the_second_layer() -> None:
    task = Recall()
    with torch.enable_grad():
        model = learnt(task, task.training())
    found = task.check(model)
    assert task.evaluate(model)["accuracy"] >= 0.98
    assert found["best"] > 0.5
    assert found["induction_layer"] == 1
    assert max(found["induction"][0]) < 0.2, "the first layer cannot: nothing is noted down yet"
    layer, head = found["induction_layer"], found["induction_head"]
    strong = [tuple(at) for at in np.argwhere(np.asarray(found["induction"]) > 0.2).tolist()]
    assert (layer, head) in strong
    assert task.evaluate(heads.without_heads(model, strong))["accuracy"] < 0.5


@pytest.mark.slow
@torch.no_grad()
def test_copying_is_learnt_by_a_head_that_looks_at_the_source() -> None:
    task = replace(Copy(), min_length=4, max_length=6, longest=6)
    with torch.enable_grad():
        model = learnt(task, replace(task.training(), steps=800))
    assert task.evaluate(model)["token_accuracy"] >= 0.9
    assert task.check(model)["best"] >= 0.6
