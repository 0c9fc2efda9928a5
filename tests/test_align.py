"""Alignments and captions for the page: words, weights and probabilities are the models' own."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from qkv.errors import InputError
from qkv.lab import heads, scenes
from qkv.lab.tasks.caption import Caption
from qkv.lab.translation import START, read_vocabulary, translate
from qkv.models import bundled, load
from qkv.server.align import SENTENCE, Aligners


@dataclass
class Asked:
    model: str = ""
    text: str = ""
    scene: int = 0


@pytest.fixture(scope="module")
def aligners() -> Aligners:
    return Aligners()


def test_examples_and_vocabularies_work(aligners: Aligners) -> None:
    said = aligners.description()
    assert {m["name"] for m in said["models"]} == {"qkv-translation", "qkv-reversal"}
    for model in said["models"]:
        assert set(model["example"].split()) <= set(model["words"])
        found = aligners.align(Asked(model["name"], model["example"]))
        assert len(found["target"]) == len(found["probability"]) > 0
    assert said["captioner"] == {"name": "qkv-caption", "scenes": 256}


@torch.no_grad()
def test_a_translation_has_the_labs_weights_and_the_models_probabilities(aligners: Aligners) -> None:
    found = aligners.align(Asked("qkv-translation", SENTENCE.capitalize() + "."))
    source, target, weights = translate("qkv-translation", SENTENCE)
    assert weights is not None
    assert (found["source"], found["target"]) == (source, target)
    np.testing.assert_allclose(found["weights"], weights[None, None], atol=1e-6)
    folder = bundled.folder_of("qkv-translation")
    assert folder is not None
    model, (english, french) = load(folder), read_vocabulary(folder)
    said, at = [START], torch.tensor([english.numbers(source)])
    for word, probability in zip(target, found["probability"], strict=True):  # one step at a time
        chances = model(at, torch.tensor([said]))[0, -1].softmax(-1)
        [number] = french.numbers([word])
        assert int(chances.argmax()) == number
        assert probability == pytest.approx(float(chances[number]), rel=1e-4)
        said.append(number)


def test_reversal_reverses_with_the_profilers_weights(aligners: Aligners) -> None:
    found = aligners.align(Asked("qkv-reversal", "a b c d e f"))
    assert found["target"] == list("fedcba")
    assert (found["layers"], found["heads"]) == (2, 4)
    assert found["source"][:6] == list("abcdef")
    ids = [*range(2, 8), heads.SEPARATOR, *range(7, 2, -1)]
    maps = heads.maps(load("qkv-reversal"), torch.tensor([ids]))[0]
    np.testing.assert_allclose(found["weights"], maps[:, :, 6:, :7], atol=1e-5)
    mirror = np.asarray(found["weights"])[0, 1]  # head 0.1 mirrors: README.md of the trained models
    assert mirror[:, :6].argmax(1).tolist() == [5, 4, 3, 2, 1, 0]
    assert min(found["probability"]) > 0.9


@torch.no_grad()
def test_captions_are_of_the_scenes_of_the_evaluation(aligners: Aligners) -> None:
    model, task = load("qkv-caption"), Caption()
    held, (images, captions) = task._held_out(model)
    right = 0
    for scene in (0, 7, 255):
        found = aligners.caption(Asked(scene=scene))
        assert found["truth"] == scenes.text(held.captions[scene])
        right += " ".join(found["words"]) == found["truth"]
        pixels = np.frombuffer(base64.b64decode(found["image"]), np.uint8).reshape(40, 40, 3)
        np.testing.assert_allclose(pixels / 255, held.images[scene].transpose(1, 2, 0), atol=0.002)
        if " ".join(found["words"]) == found["truth"]:  # then it read what the truth says
            wanted = model.maps(images[scene : scene + 1], captions[scene : scene + 1])[0, : len(found["words"])]
            np.testing.assert_allclose(found["weights"], wanted, atol=1e-5)
        assert np.sum(found["weights"], (1, 2)) == pytest.approx(1, abs=1e-5)
        assert np.shape(found["weights"])[1:] == (found["gh"], found["gw"]) == (10, 10)
    assert right >= 2


@pytest.mark.parametrize(
    ("model", "text", "why"),
    [
        ("qkv-translation", "the blck cat", "word 'blck' is not in the vocabulary; did you mean 'black'"),
        ("qkv-translation", " . ", "expected at least one word"),
        ("qkv-translation", "the " * 50, "50 words, expected at most 40"),
        ("qkv-reversal", "a b", "2 symbols, expected 6"),
        ("qkv-reversal", "a b c d e z", "text has the symbol 'z', expected a to n"),
        ("../qkv-mini", "a", "model is '../qkv-mini'"),
    ],
)
def test_what_cannot_be_aligned_is_said_in_a_sentence(aligners: Aligners, model: str, text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        aligners.align(Asked(model, text))


@pytest.mark.parametrize("scene", [-1, 256])
def test_scenes_that_are_not_there(aligners: Aligners, scene: int) -> None:
    with pytest.raises(InputError, match="expected 0 to 255"):
        aligners.caption(Asked(scene=scene))
