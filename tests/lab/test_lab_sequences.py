"""The tasks on random symbols: reversal, copy, recall; coreference, look-ups, hops.

What every task promises is in test_testing_kit.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qkv.models.decoder import DecoderConfig, DecoderLM
from qkv_lab import heads
from qkv_lab.tasks.relations import ADJECTIVES, IT, Coreference, Hops, Lookups
from qkv_lab.tasks.sequences import Copy, Recall, Reversal

TINY = DecoderConfig(d_model=8, layers=2, heads=2, tied=False)
REPEATING: tuple[Any, ...] = (
    Reversal(length=5, model=TINY),
    Copy(min_length=4, max_length=7, longest=9, model=TINY),
    Recall(min_length=4, max_length=7, model=TINY),
    Recall(min_length=3, max_length=5, gap=4, symbols=13, model=TINY),
)
RELATIONS: tuple[Any, ...] = (
    Coreference(length=7, nouns=5, model=TINY),
    Lookups(first=2, second=3, length=7, longest=11, symbols=5, model=TINY),
    Hops(places=7, hops=3, model=TINY),
)


def blocks(task: Any, ids: Tensor) -> Tensor:
    """The part of a sequence that decides whether it is held out: the symbols before the repetition, or all."""
    return ids[:, : (ids.shape[1] - getattr(task, "gap", 0)) // 2] if task in REPEATING else ids


def held(task: Any) -> Tensor:
    return task.unseen(task.max_length) if hasattr(task, "max_length") else task.unseen()


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*REPEATING, *RELATIONS], ids=lambda task: task.name)
def test_held_out_sequences_are_fixed_and_in_no_batch(task: Any) -> None:
    drawn = [blocks(task, task.batch(step, 64, 7)["ids"]) for step in range(20)]
    assert not any(heads.held_out(ids.numpy()).any() for ids in drawn)
    assert heads.held_out(blocks(task, held(task)).numpy()).all()
    assert torch.equal(held(task), held(replace(task)))
    if task in REPEATING:
        symbols = set(range(2, 2 + task.symbols))
        assert {x for ids in [*drawn, blocks(task, held(task))] for x in ids.flatten().tolist()} == symbols
    if hasattr(task, "max_length"):
        lengths = {blocks(task, task.batch(step, 1, 0)["ids"]).shape[1] for step in range(60)}
        assert lengths == set(range(task.min_length, task.max_length + 1))


@pytest.mark.parametrize("n", [4, 5])
def test_sequences_are_reversed_copied_or_repeated_and_pairs_point_at_the_token_to_predict(n: int) -> None:
    ids = Reversal(length=n).batch(0, 50, 0)["ids"]
    queries, keys = Reversal(length=n).mirror()
    assert ids.shape == (50, 2 * n + 1)
    assert (ids[:, n] == 1).all()
    assert torch.equal(ids[:, n + 1 :], ids[:, :n].flip(1))
    assert torch.equal(ids[:, queries + 1], ids[:, keys])
    assert queries.tolist() == list(range(n, 2 * n))

    ids = Copy(min_length=n, max_length=n).batch(0, 50, 0)["ids"]
    queries, keys = Copy().sources(n)
    assert (ids[:, n] == 1).all()
    assert torch.equal(ids[:, n + 1 :], ids[:, :n])
    assert torch.equal(ids[:, queries + 1], ids[:, keys])
    assert set(queries - keys) == {n}

    ids = Recall(min_length=n, max_length=n).batch(0, 50, 0)["ids"]
    kinds = Recall().pairs(n)
    assert torch.equal(ids[:, n:], ids[:, :n])
    assert all(len(set(row)) == n for row in ids[:, :n].tolist()), "symbols of a block differ"
    queries, keys = kinds["induction"]
    assert torch.equal(ids[:, queries + 1], ids[:, keys])
    assert set(queries - keys) == {n - 1}
    queries, keys = kinds["duplicate"]
    assert torch.equal(ids[:, queries], ids[:, keys])
    assert kinds["previous"][0].tolist() == [1 + key for key in kinds["previous"][1]] == list(range(1, 2 * n - 1))

    task = Recall(min_length=n, max_length=n, gap=5, symbols=9)
    gapped = task.batch(0, 50, 0)["ids"]
    queries, keys = task.pairs(n)["induction"]
    assert torch.equal(gapped[:, :n], gapped[:, n + 5 :])
    assert set(gapped[:, n : n + 5].flatten().tolist()) == set(range(11, 20)), "noise"
    assert gapped[:, :n].max() < 11
    assert torch.equal(gapped[:, queries + 1], gapped[:, keys])
    assert torch.equal(replace(task, gap=0).batch(0, 50, 0)["ids"][:, :n], gapped[:, :n]), "the gap leaves blocks alone"


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


def test_answers_of_look_ups_are_the_symbols_before_and_hops_follow_the_pointers() -> None:
    task = Lookups(first=2, second=3, length=7, symbols=5)
    ids = task.batch(0, 4, 0)["ids"]
    answers = task.answers(ids)
    for row in range(4):
        for place in range(3, 7):
            assert answers[row, place - 3].tolist() == [ids[row, place - 2] - 2, ids[row, place - 3] - 2]
    hops = Hops(places=7, hops=4)
    ids = hops.batch(0, 5, 0)["ids"]
    after = hops.after(ids)
    for row in range(5):
        assert sorted(ids[row].tolist()) == list(range(2, 9)), "a permutation"
        for place in range(7):
            at = place
            for hop in range(4):
                at = int(ids[row, at]) - 2
                assert after[row, place, hop] == at


def expected(task: Any, ids: Tensor, row: int) -> list[tuple[int, slice, int]]:
    """All predictions in a row: the place whose logits are read, which of them, and the answer among them."""
    n, every = ids.shape[1], slice(None)
    if task.name == "coreference":
        return [(-3, every, int(ids[row, task.nouns_of(ids)[0][row]]))]
    if task.name == "lookups":
        return [(place, slice(2 + 5 * k, 7 + 5 * k), int(ids[row, place - back]) - 2)
                for place in range(3, 7) for k, back in enumerate((2, 3))]  # fmt: skip
    if task.name == "hops":
        return [(place, slice(2 + 7 * k, 9 + 7 * k), int(task.after(ids)[row, place, k + 1]))
                for place in range(7) for k in range(2)]  # fmt: skip
    gap = getattr(task, "gap", 0)
    return [(place - 1, every, int(ids[row, place])) for place in range((n - gap) // 2 + gap + 1, n)]


@pytest.mark.parametrize("task", [*REPEATING, *RELATIONS], ids=lambda task: task.name)
def test_loss_averages_over_all_answers(task: Any) -> None:
    torch.manual_seed(0)
    model, batch = task.build().double().eval(), task.batch(0, 3, 0)
    logits = model(batch["ids"])
    losses = [
        -logits[row, place, which].log_softmax(-1)[answer].item()
        for row in range(3)
        for place, which, answer in expected(task, batch["ids"], row)
    ]
    assert len(losses) == task.count(batch)
    assert task.loss(model, batch).item() == pytest.approx(np.mean(losses))


# --- attention scores -------------------------------------------------------------------------------------------------


def head_weights(pairs: heads.Pairs, n: int, weight: float = 1.0) -> np.ndarray:
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
    weights = np.stack([head_weights(pairs, 8, 0.75), head_weights(half, 8), head_weights((pairs[0], pairs[1] + 1), 8)])
    weights = weights.reshape(1, 3, 1, 8, 8)
    assert heads.share_of_strongest(weights, pairs).tolist() == [[1.0], [0.5], [0.0]]
    assert heads.mean_weight(weights, pairs).tolist() == [[0.75], [0.5], [0.0]]
    both = np.concatenate([weights, weights[:, [2, 2, 1]]])
    assert heads.share_of_strongest(both, pairs).tolist() == [[0.5], [0.25], [0.25]]

    weights = np.full((2, 1, 1, 3, 3), 0.1)  # the keys differ between sequences
    weights[0, ..., 2, 0] = weights[1, ..., 2, 1] = 0.8
    pairs = (np.array([2]), np.array([[0], [1]]))
    assert heads.share_of_strongest(weights, pairs).tolist() == [[1.0]]
    assert heads.mean_weight(weights, pairs).tolist() == [[pytest.approx(0.8)]]
    assert heads.mean_weight(weights, (np.array([2]), np.array([0]))).tolist() == [[pytest.approx(0.45)]]

    scores = np.array([[0.1, 1.0, 0.2], [1.0, 0.0, 1.0]])  # ties are broken by weight, then by order
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
    weights = heads.maps(model, task.unseen()[:4, :-1])
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert (weights[..., 0, 1:] == 0).all()
    np.testing.assert_array_equal(weights[..., 3:, :].argmax(-1), np.broadcast_to([2, 1, 0], (4, 1, 1, 3)))
    with torch.no_grad():
        measured, found = task.evaluate(model), task.check(model)
    assert (measured["token_accuracy"], measured["sequence_accuracy"]) == (1, 1)
    assert found["mirrored"] == [[1]]
    assert found["weight"][0][0] > 0.95
    assert (found["best_layer"], found["best_head"], found["best"]) == (0, 0, 1)
    assert found["without_best"] == found["without_mirrors"] < 0.2
    assert task.evaluate(model)["token_accuracy"] == 1, "the model itself keeps its head"


@pytest.mark.parametrize("prefix", [0, 33], ids=["causal", "without a mask"])
@torch.no_grad()
def test_continued_generates_greedily(prefix: int) -> None:
    """A prefix of the whole sequence lets every query see every key, so that all is computed again at each step."""
    torch.manual_seed(0)
    model = Copy(model=replace(TINY, prefix=prefix)).build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    prompt = Copy().unseen(4)[:7, :5]
    assert (heads.maps(model, prompt) > 0).all() == (prefix > 0)
    ids = prompt
    for _ in range(6):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(heads.continued(model, prompt, 6), ids[:, 5:])


@torch.no_grad()
def test_without_heads_ablates_only_the_given_heads() -> None:
    torch.manual_seed(0)
    task = Reversal(model=DecoderConfig(d_model=12, layers=2, heads=3))
    model, ids = task.build(), task.unseen()[:5]
    assert torch.equal(heads.without_heads(model, [])(ids), model(ids))
    cut = heads.without_heads(model, [(1, 2), (0, 0)])
    for layer, gone in enumerate((0, 2)):
        before, after = (m.blocks[layer].attention.out_proj.weight.view(12, 3, 4) for m in (model, cut))
        for head in range(3):
            assert torch.equal(after[:, head], torch.zeros(12, 4) if head == gone else before[:, head])
