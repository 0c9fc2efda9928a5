"""Laws that all teaching models keep: steps equal the whole, padding and the future are unseen, gradients, learning."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import check_slopes, close, refusals, refused
from qkv_lab import models
from qkv_lab.models import CaptionerConfig
from teaching_models import CAPTIONER, CLASSIFIER, DECODERS, RECURRENT, SOURCE, TARGET, TRANSFORMER, build, given

decoders = pytest.mark.parametrize("name", DECODERS)


@decoders
def test_steps_equal_the_whole(name: str) -> None:
    """Token by token, in pieces, and in a state that was reordered as beam search needs."""
    model, (source, target) = build(DECODERS[name]), given(DECODERS[name])
    logits = model(source, target)
    assert logits.shape == (3, 4, model.vocabulary)
    for cuts in ((1, 1, 1, 1), (1, 3)):
        state, at = model.start(source), 0
        for n in cuts:
            got = model.step(target[:, at : at + n], state)
            at += n
            close(got, logits[:, at - 1], eps=2**10)
    rows = torch.tensor([2, 0, 2, 1])
    for seen in (0, 2):
        state = model.start(source)
        if seen:
            model.step(target[:, :seen], state)
        state.reorder(rows)
        close(model.step(target[rows, seen : seen + 1], state), logits[rows, seen], eps=2**10)


@decoders
def test_the_future_is_unseen(name: str) -> None:
    model, (source, target) = build(DECODERS[name]), given(DECODERS[name])
    logits = model(source, target)
    for t in range(1, 4):
        other = torch.cat([target[:, :t], (target[:, t:] + 3) % 11], 1)
        changed = model(source, other)
        close(changed[:, :t], logits[:, :t], eps=1)
        assert not torch.isclose(changed[:, t], logits[:, t]).all(-1).any()


@decoders
def test_padding_and_other_items_change_nothing(name: str) -> None:
    config, model, (source, target) = DECODERS[name], build(DECODERS[name]), given(DECODERS[name])
    logits, loss = model(source, target), model.loss(source, target)
    close(model.loss(source, F.pad(target, (0, 2))), loss, eps=2**10)
    for i, length in enumerate((5, 3, 1)):
        alone = source[i : i + 1, ...] if isinstance(config, CaptionerConfig) else source[i : i + 1, :length]
        close(model(alone, target[i : i + 1]), logits[i : i + 1], eps=2**10)
    if isinstance(config, CaptionerConfig):
        return
    close(model(F.pad(source, (0, 2)), target), logits, eps=2**10)
    each = [F.cross_entropy(logits[i, :n], target[i, 1 : n + 1], reduction="sum") for i, n in enumerate((3, 3, 2))]
    close(loss, sum(each) / 8, eps=2**10)
    changed = source.clone()
    changed[0, -1] = 6
    found = model(changed, target)
    assert not torch.isclose(found[0], logits[0]).all(-1).any()
    close(found[1:], logits[1:], eps=2**10)


SLOPES: dict[str, Any] = {
    **{name: DECODERS[name] for name in ("bahdanau", "multihead, one way", "luong-concat local-p", "soft", "hard")},
    "all tied": replace(
        DECODERS["rotary, all tied"], layers=1, decoder_layers=1, activation="swiglu", kv_heads=1, norm="rmsnorm"
    ),
    "classifier": replace(CLASSIFIER, layers=1),
}


@pytest.mark.parametrize("name", SLOPES)
def test_loss_against_finite_differences(name: str) -> None:
    """In evaluation mode the hard loss is that of the best cells, which a small step of the scores does not change."""
    model, (source, target) = build(SLOPES[name]), given(SLOPES[name])
    if isinstance(model, models.Captioner):
        source = source.abs()
        for parameter in model.features.parameters():
            parameter.data.abs_()  # away from the kink of the ReLU
    check_slopes(model, lambda: model.loss(source, target), unused=("attention.",) if name == "hard" else ())


@pytest.mark.parametrize("config", [
    replace(RECURRENT, attention="luong-general", layers=2), TRANSFORMER, CAPTIONER, CLASSIFIER,
], ids=lambda config: type(config).__name__)  # fmt: skip
def test_dropout_acts_only_in_training(config: Any) -> None:
    """In training, each place of it alone changes the loss."""
    (source, target), model = given(config), build(replace(config, dropout=0.5))
    close(model.loss(source, target), build(config).loss(source, target), eps=1)
    model.train()
    places = [(m, "p") for m in model.modules() if isinstance(m, nn.Dropout)]
    places += [(m, "dropout") for m in model.modules() if getattr(m, "dropout", None) == 0.5]
    assert (
        len(places)
        == {"RNNSeq2Seq": 3, "EncoderDecoder": 2 + 5, "Captioner": 1, "Classifier": 1 + 2}[type(model).__name__]
    )
    for acting in places:
        for module, name in places:
            setattr(module, name, 0.5 if (module, name) == acting else 0.0)
        found = [model.loss(source, target).item() for _ in range(3)]
        assert len(set(found)) > 1, acting


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Any, str, dict[str, object]]] = [
    (RECURRENT, "layers", {"layers": 0}), (RECURRENT, "attention", {"attention": "luong"}),
    (RECURRENT, "cell", {"cell": "elman"}), (RECURRENT, "input_feeding", {"input_feeding": True}),
    (RECURRENT, "kind", {"attention": "luong-dot", "kind": "local"}),
    (RECURRENT, "kind", {"attention": "bahdanau", "kind": "local-m"}),
    (RECURRENT, "d_hidden", {"attention": "multihead", "heads": 4}), (RECURRENT, "d_hidden", {"d_hidden": 9}),
    (RECURRENT, "dropout", {"dropout": 1.0}), (RECURRENT, "end", {"end": 11}), (RECURRENT, "pad", {"pad": 9}),
    (TRANSFORMER, "layers", {"layers": 0}), (TRANSFORMER, "decoder_layers", {"decoder_layers": 0}),
    (TRANSFORMER, "positions", {"positions": "sinus"}), (TRANSFORMER, "dropout", {"dropout": 1.0}),
    (TRANSFORMER, "start", {"start": 0}), (TRANSFORMER, "vocabulary", {"source_vocab": 0}),
    (TRANSFORMER, "pad", {"pad": 11}), (CAPTIONER, "channels", {"channels": 2}),
    (CAPTIONER, "convolutions", {"convolutions": 4}), (CAPTIONER, "attention", {"attention": "both"}),
    (CAPTIONER, "d_attention", {"d_attention": 0}), (CAPTIONER, "penalty", {"entropy": -1.0}),
    (CAPTIONER, "dropout", {"dropout": 1.0}), (CAPTIONER, "end", {"end": 11}),
    (CLASSIFIER, "classes", {"classes": 0}), (CLASSIFIER, "pool", {"pool": "last"}), (CLASSIFIER, "pad", {"pad": 11}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "argument", "change"), WRONG)
def test_configurations_reject_invalid_values(config: Any, argument: str, change: dict[str, object]) -> None:
    assert type(config)(**asdict(config)) == config
    with refused(argument):
        replace(config, **change)


BAD: list[tuple[Any, object, object, str, str | None]] = [  # what a model reads, and its target
    (RECURRENT, [[0, 3, 4]], [[1, 2]], "source", "before a real"),
    (RECURRENT, [[3, 4], [0, 0]], [[1, 2], [1, 2]], "source", "padding only"),
    (RECURRENT, [[3, 9]], [[1, 2]], "source", r"3\.\.9"),
    (RECURRENT, [[3, 4]], [[1, 11]], "tokens", r"1\.\.11"),
    (RECURRENT, [[3, 4]], [[1, 2], [1, 2]], "tokens", "2 items"),
    (RECURRENT, [[3.0, 4.0]], [[1, 2]], "source", "float32"),
    (TRANSFORMER, [[11, 3]], [[1, 2]], "source", r"3\.\.11"),
    (TRANSFORMER, [[3, 4]], [[1, 13]], "target", r"1\.\.13"),
    (TRANSFORMER, [[3, 4]], [[1, 2], [1, 2]], "target", "2 items"),
    (TRANSFORMER, [[1] * 10], [[1, 2]], "tokens", "context"),
    (CAPTIONER, torch.zeros(1, 1, 8, 8).tolist(), [[1, 2]], "images", None),
    (CAPTIONER, torch.zeros(1, 3, 8, 8).tolist(), [[1, 11]], "captions", r"1\.\.11"),
    (CAPTIONER, torch.zeros(1, 3, 8, 8).tolist(), [[1, 2], [1, 2]], "captions", "2 items"),
]

test_models_reject_bad_sources_and_targets = refusals([
    (argument, match, lambda given=given: build(given[0])(*map(torch.tensor, given[1:])))
    for *given, argument, match in BAD
])  # fmt: skip


def test_a_loss_needs_something_to_predict_and_a_state_has_room() -> None:
    for config, argument in ((RECURRENT, "target"), (TRANSFORMER, "target"), (CAPTIONER, "captions")):
        with refused(argument):
            build(config).loss(given(config)[0], TARGET[:, :1])
    with refused("captions"):
        build(CAPTIONER).loss(given(CAPTIONER)[0], torch.tensor([[1, 0]] * 3))
    model = build(CLASSIFIER)
    for wrong, argument in ((torch.tensor([[3, 11]]), "ids"), (torch.ones(1, 10, dtype=torch.int64), "tokens")):
        with refused(argument):
            model(wrong)
    with refused("labels"):
        model.loss(SOURCE, torch.tensor([1, 5, 0]))
    model = build(TRANSFORMER)
    state = model.start(SOURCE)
    model.step(TARGET.repeat(1, 2), state)
    with refused("tokens"):
        model.step(TARGET, state)
    with refused("attention"):
        build(RECURRENT).alignments(SOURCE, TARGET)
