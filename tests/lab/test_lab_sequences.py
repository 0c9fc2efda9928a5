"""The tasks on random symbols: reversal, copy, recall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import refused
from qkv.errors import InputError
from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.task import Training
from qkv_lab.tasks.sequences import Copy, Recall, Reversal

TASKS: tuple[Any, ...] = (
    Reversal(length=5),
    Copy(min_length=4, max_length=7, longest=9),
    Recall(min_length=4, max_length=9),
)
SMALL = DecoderConfig(d_model=8, layers=2, heads=2)


def of(task: Any) -> str:
    return str(task.name)


def blocks(task: Any, ids: Tensor) -> Tensor:
    """The part of a sequence that decides whether it is held out: the symbols before the repetition."""
    return ids[:, : ids.shape[1] // 2]


def held(task: Any) -> Tensor:
    return task.unseen() if task.name == "reversal" else task.unseen(task.max_length)


# --- data -------------------------------------------------------------------------------------------------------------


def test_sequences_are_reversed_copied_or_repeated() -> None:
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
def test_all_symbols_but_no_special_tokens_are_drawn(task: Any) -> None:
    drawn = torch.cat([blocks(task, task.batch(step, 64, 0)["ids"]).flatten() for step in range(20)])
    assert drawn.dtype == torch.int64
    assert set(drawn.tolist()) == set(range(2, 2 + task.symbols))
    assert set(blocks(task, held(task)).flatten().tolist()) == set(range(2, 2 + task.symbols))
    assert task.build().vocabulary == 2 + task.symbols


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_batches_depend_on_their_arguments_only(task: Any) -> None:
    first = task.batch(3, 8, 1)["ids"]
    task.batch(0, 8, 1)
    assert torch.equal(task.batch(3, 8, 1)["ids"], first)
    for other in (task.batch(4, 8, 1)["ids"], task.batch(3, 8, 2)["ids"]):
        assert other.shape != first.shape or not torch.equal(other, first)


@pytest.mark.parametrize("task", [Copy(min_length=4, max_length=7), Recall(min_length=4, max_length=7)], ids=of)
def test_batches_have_all_lengths(task: Any) -> None:
    assert {task.batch(step, 1, 0)["ids"].shape[1] // 2 for step in range(60)} == {4, 5, 6, 7}


def test_unseen_sequences_are_never_trained_on() -> None:
    task = Reversal(length=3, symbols=10)  # so few that training covers them all
    trained = {tuple(row) for step in range(100) for row in task.batch(step, 256, 0)["ids"].tolist()}
    unseen = {tuple(row) for row in task.unseen().tolist()}
    assert unseen
    assert not trained & unseen
    assert len(trained) + len(unseen) >= 0.99 * 10**3
    assert 0.05 * 10**3 < len(unseen) < 0.15 * 10**3


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_held_out_split_depends_on_the_sequence_only(task: Any) -> None:
    for step in range(5):
        assert not heads.held_out(blocks(task, task.batch(step, 64, 7)["ids"]).numpy()).any()
    assert heads.held_out(blocks(task, held(task)).numpy()).all()
    assert torch.equal(held(task), held(replace(task))), "fixed"


def test_a_tenth_is_held_out_for_every_value_of_each_symbol() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(2, 34)] * 3, indexing="ij"), -1).reshape(-1, 3)
    held_out = heads.held_out(grid).reshape(32, 32, 32)
    for axes in ((1, 2), (0, 2), (0, 1)):  # for each value of one symbol
        shares = held_out.mean(axes)
        assert 0.05 < shares.min() < shares.max() < 0.15
    longer = heads.held_out(np.concatenate([grid, grid[:, :1]], 1))
    assert np.corrcoef(held_out.ravel(), longer)[0, 1] < 0.05


# --- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=of)
def test_loss_averages_over_the_predictable_tokens(task: Any) -> None:
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


# --- attention scores -------------------------------------------------------------------------------------------------


def head_weights(pairs: heads.Pairs, n: int, *, weight: float = 1.0) -> np.ndarray:
    """Weights of one head: each query of `pairs` on its key with `weight`, the rest on itself; all others on key 0."""
    w = np.zeros((n, n))
    w[:, 0] = 1
    for query, key in zip(*pairs, strict=True):
        w[query] = 0
        w[query, query] += 1 - weight
        w[query, key] += weight
    return w


def test_scores_of_correct_half_correct_and_wrong_heads() -> None:
    pairs = Reversal(length=4).mirror()
    half = (pairs[0], np.where(np.arange(4) < 2, pairs[1], pairs[1] + 1))
    weights = np.stack(
        [head_weights(pairs, 8, weight=0.75), head_weights(half, 8), head_weights((pairs[0], pairs[1] + 1), 8)]
    )
    weights = weights.reshape(1, 3, 1, 8, 8)
    assert heads.share_of_strongest(weights, pairs).tolist() == [[1.0], [0.5], [0.0]]
    assert heads.mean_weight(weights, pairs).tolist() == [[0.75], [0.5], [0.0]]
    both = np.concatenate([weights, weights[:, [2, 2, 1]]])
    assert heads.share_of_strongest(both, pairs).tolist() == [[0.5], [0.25], [0.25]]


@pytest.mark.parametrize("n", [4, 5])
def test_pairs_point_at_the_token_to_predict_or_its_earlier_occurrence(n: int) -> None:
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


def test_best_head_breaks_ties_by_weight_then_by_order() -> None:
    scores = np.array([[0.1, 1.0, 0.2], [1.0, 0.0, 1.0]])
    assert heads.best(scores) == (0, 1)
    assert heads.best(scores, np.array([[9, 0.3, 9], [0.4, 9, 0.6]])) == (1, 2)


def test_recall_scores_each_kind_of_head(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Recall(min_length=4, max_length=5)
    kinds = task.pairs(5)
    weights = np.stack([head_weights(kinds[kind], 9) for kind in ("previous", "duplicate", "induction", "previous")])
    monkeypatch.setattr(heads, "maps", lambda model, ids: weights.reshape(1, 2, 2, 9, 9))
    found = task.check(None)
    assert found["duplicate"] == [[0, 1], [0, 0]]
    assert found["induction"] == [[0, 0], [1, 0]]
    assert [round(x, 9) for x in np.ravel(found["previous"])] == [1, 0.125, 0.125, 1]  # query 1 on key 0 in each
    assert (found["induction_layer"], found["induction_head"], found["best"]) == (1, 0, 1)


def test_maps_are_the_weights_of_the_model() -> None:
    """The hand-made model attends to the mirrored position."""
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
    """A model whose only head attends from query 2n − 1 − k to key k and copies its token; embeddings are one-hot."""
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


def test_hand_made_mirror_model_is_perfect_and_fails_without_its_head() -> None:
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


def test_accuracy_uses_generated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Reversal(length=3, symbols=10)
    generated = task.unseen()[:, 4:].clone()  # 500 sequences
    generated[:, 2] = 0
    generated[:100, 1] = 0
    monkeypatch.setattr(heads, "continued", lambda model, prompt, new: generated)
    measured = task.evaluate(task.build())
    assert measured["token_accuracy"] == pytest.approx(900 / 1500)
    assert measured["sequence_accuracy"] == 0


def test_continued_generates_greedily() -> None:
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
def test_without_heads_ablates_only_the_given_heads() -> None:
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
def test_figures_of_an_untrained_model(task: Any) -> None:
    with torch.no_grad():
        figures = task.figures(task.build().eval())
    assert figures
    for figure in figures.values():
        figure.canvas.draw()
        assert figure.texts[0].get_text()


@pytest.mark.parametrize(
    ("make", "argument", "match"),
    [
        (lambda: Reversal(length=0), "length", None),
        (lambda: Reversal(symbols=1), "symbols", "makes 1 "),
        (lambda: Copy(min_length=5, max_length=4), "min_length", "max_length 4"),
        (lambda: Copy(longest=9), "min_length", "longest 9"),
        (lambda: Copy(min_length=1), "symbols", "makes 14 "),
        (lambda: Recall(max_length=17), "min_length", "symbols 16"),
        (lambda: Reversal(model=DecoderConfig(vocab_size=99)).build(), "model.vocab_size", None),
    ],
)
def test_settings_out_of_range_are_rejected(make: Any, argument: str, match: str | None) -> None:
    with refused(argument, match):
        make()


@pytest.mark.parametrize(
    ("make", "number"), [(lambda: Reversal(length=2), 196), (lambda: Recall(min_length=2), 16 * 15)]
)
def test_too_few_different_sequences_are_rejected(make: Any, number: int) -> None:
    with pytest.raises(InputError, match=f"makes {number} different sequences"):
        make()


# --- trained models ---------------------------------------------------------------------------------------------------


def learnt(task: Any, training: Training) -> DecoderLM:
    """A minimal training loop."""
    torch.manual_seed(training.seed)
    model: DecoderLM = task.build()
    betas, decay = (training.beta1, training.beta2), training.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=decay, fused=True)
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
def test_reversal_is_learnt_by_mirror_heads() -> None:
    task = Reversal(length=4, symbols=10, model=replace(Reversal().model, d_model=32))
    with torch.enable_grad():
        model = learnt(task, replace(task.training(), steps=200, batch=24, lr=4e-3))
    measured, found = task.evaluate(model), task.check(model)
    assert measured["token_accuracy"] >= 0.99
    assert found["best"] >= 0.95
    assert found["without_mirrors"] < 0.3, "without mirror heads the model must fail"


@pytest.mark.slow
@torch.no_grad()
def test_recall_is_learnt_by_an_induction_head_of_the_second_layer() -> None:
    task = Recall(max_length=6, symbols=10)
    with torch.enable_grad():
        model = learnt(task, replace(task.training(), steps=400))
    found = task.check(model)
    assert task.evaluate(model)["accuracy"] >= 0.98
    assert found["best"] > 0.5
    assert found["induction_layer"] == 1
    assert max(found["induction"][0]) < 0.2, "induction needs an earlier previous-token head"
    layer, head = found["induction_layer"], found["induction_head"]
    strong = [tuple(at) for at in np.argwhere(np.asarray(found["induction"]) > 0.2).tolist()]
    assert (layer, head) in strong
    assert task.evaluate(heads.without_heads(model, strong))["accuracy"] < 0.5


@pytest.mark.slow
@torch.no_grad()
def test_copy_is_learnt_by_a_head_that_attends_to_the_source() -> None:
    """With learned positions, since ALiBi needs many more steps until a head finds tokens a fixed distance away."""
    task = Copy(max_length=5, longest=5, symbols=10, model=replace(Copy().model, positions="learned"))
    with torch.enable_grad():
        model = learnt(task, replace(task.training(), steps=250))
    assert task.evaluate(model)["token_accuracy"] >= 0.9
    assert task.check(model)["best"] >= 0.6
