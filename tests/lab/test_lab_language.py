"""Language modelling: deterministic batches, held-out text, losses, and saved models."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import refused
from qkv.models import DecoderConfig
from qkv_lab import tokens
from qkv_lab.experiments.small import fit
from qkv_lab.tasks.language import Language

SMALL = DecoderConfig.llama(d_model=32, layers=2, heads=2)


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """60 documents of written-out sums, which are partly predictable."""
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    generator = np.random.default_rng(0)
    for i in range(60):
        rows = [f"{a} plus {b} is {a + b}.\n" for a, b in generator.integers(0, 50, (25, 2))]
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(rows))
    return tmp_path / "texts"


def task(texts: Path, **changes: object) -> Language:
    return replace(Language(str(texts), context=24, vocab_size=300, model=SMALL), **changes)


@pytest.mark.parametrize(("tokenizer", "first"), [("bytes", "fixed"), ("bpe", "random"), ("bpe", "fixed")])
def test_batches_are_windows_of_the_text(tokenizer: str, first: str, texts: Path) -> None:
    made = task(texts, tokenizer=tokenizer, first=first)
    ids = made.batch(7, 5, 3)["ids"]
    assert ids.shape == (5, 25)
    assert made.count({"ids": ids}) == 5 * 24
    bos = made.build().vocabulary - 1
    assert bool((ids[:, 0] == bos).all()) == (first == "fixed")
    assert bos not in ids[:, 1:]
    decode = tokens.from_json(made.files()["tokenizer.json"]).decode
    piece = decode(ids[0].tolist()).strip("\ufffd").split("\n")[0]
    assert piece in "\n\n".join(x.read_text() for x in texts.iterdir())


def test_windows_reach_both_ends_of_the_text_and_held_out_text_is_in_none(texts: Path) -> None:
    plain = task(texts)
    train, held_out = plain._data.train.astype("u1").tobytes(), [bytes(row) for row in plain.unseen[:, 1:].tolist()]
    assert len(held_out) == len(set(held_out)) > 40
    assert sum(row in train for row in held_out) == 0
    made = task(texts, tokens=26)
    found = {tuple(row) for step in range(20) for row in made.batch(step, 4, 0)["ids"][:, 1:].tolist()}
    data = made._data.train[:26].tolist()
    assert found == {tuple(data[i : i + 24]) for i in range(3)}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_uniform_predictions_have_the_loss_of_the_vocabulary_size(tokenizer: str, texts: Path) -> None:
    made = task(texts, tokenizer=tokenizer)
    model = made.build()
    with torch.no_grad():
        model.output.weight.zero_()
        found = made.evaluate(model)
    size = 257 if tokenizer == "bytes" else 300
    assert found["loss"] == pytest.approx(log(size), abs=1e-5)
    assert found["perplexity"] == pytest.approx(size, rel=1e-4)
    decode = tokens.from_json(made.files()["tokenizer.json"]).decode
    text = "".join(decode(row) for row in made.unseen.tolist())
    number = made.unseen[:, 1:].numel()
    assert found["bits_per_byte"] == pytest.approx(number * log(size, 2) / len(text.encode()), rel=1e-5)


@pytest.mark.slow
def test_loss_without_a_causal_mask_leaks_the_next_token_but_not_when_writing(texts: Path) -> None:
    made = task(texts, model=replace(SMALL, layers=1, prefix=24))
    torch.manual_seed(0)
    model = made.build()
    training = replace(made.training(), steps=100, lr=1e-2, warmup=0, decay="none")
    fit(model, lambda step: made.loss(model, made.batch(step, 16, 0)), training)
    found = made.evaluate(model)
    assert found["loss"] < 0.5 < found["bigram_loss"]
    assert found["writing_loss"] > 10 * found["loss"]


def test_losses_are_mean_cross_entropies_and_that_of_writing_is_over_some_positions(texts: Path) -> None:
    made = task(texts)
    model, ids = made.build().eval(), made.unseen
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        found = made.evaluate(model)
        torch.testing.assert_close(made.loss(model, {"ids": ids}), losses.mean())
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    expected = losses[:, [n - 1 for n in range(3, 25, 3)]].mean().item()
    assert made.writing_loss(model) == pytest.approx(expected, rel=1e-4)
    assert "writing_loss" not in found


REFUSALS: list[tuple[str, str | None, dict[str, object]]] = [
    ("tokenizer", None, {"tokenizer": "words"}),
    ("first", None, {"first": "last"}),
    ("vocab_size", None, {"vocab_size": 256}),
    ("context", None, {"context": 1}),
    ("longest", None, {"longest": 24}),
    ("tokens", "more than", {"tokens": 24}),
    ("more_share", None, {"more_share": 1.5}),
    ("corpus", "tokens held out", {"context": 10**4}),
    ("corpus", "to train on", {"context": 10**6}),
    ("tokens", "to train on", {"tokens": 10**6}),
    ("corpus", "no file", {"corpus": "/nowhere.txt"}),
    ("model.vocab_size", None, {"model": replace(SMALL, vocab_size=99)}),
]


@pytest.mark.parametrize(("argument", "match", "changes"), REFUSALS)
def test_wrong_settings_and_corpora_are_refused(
    argument: str, match: str | None, changes: dict[str, object], texts: Path
) -> None:
    with refused(argument, match):
        task(texts, **changes).build()
