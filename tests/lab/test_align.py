"""Alignments and captions for the page: words, weights and probabilities equal those of the models."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from qkv.models import checkpoint, load
from qkv_lab import scenes
from qkv_lab.align import models as aligners
from qkv_lab.align.models import SENTENCE
from qkv_lab.tasks.caption import Caption
from qkv_lab.translation import START, read_vocabulary, translate


def test_examples_and_vocabularies_work() -> None:
    said = aligners.description()
    assert {m["name"] for m in said["models"]} == {"qkv-translation", "qkv-reversal"}
    for model in said["models"]:
        assert set(model["example"].split()) <= set(model["words"])
        found = aligners.align(model["name"], model["example"])
        assert len(found["target"]) == len(found["probability"]) > 0
    assert said["captioner"] == {"name": "qkv-caption", "scenes": 256}


@torch.no_grad()
def test_translations_have_the_weights_of_the_lab_and_the_probabilities_of_the_model() -> None:
    found = aligners.align("qkv-translation", SENTENCE.capitalize() + ".")
    source, target, weights = translate("qkv-translation", SENTENCE)
    assert weights is not None
    assert (found["source"], found["target"]) == (source, target)
    np.testing.assert_allclose(found["weights"], weights[None, None], atol=1e-6)
    folder = checkpoint.folder_of("qkv-translation")
    assert folder is not None
    model, (english, french) = load(folder), read_vocabulary(folder)
    said, at = [START], torch.tensor([english.numbers(source)])
    for word, probability in zip(target, found["probability"], strict=True):  # one step at a time
        chances = model(at, torch.tensor([said]))[0, -1].softmax(-1)
        [number] = french.numbers([word])
        assert int(chances.argmax()) == number
        assert probability == pytest.approx(float(chances[number]), rel=1e-4)
        said.append(number)


@torch.no_grad()
def test_captions_are_of_the_scenes_of_the_evaluation() -> None:
    model, task = load("qkv-caption"), Caption()
    held, (images, captions) = task._held_out(model)
    right = 0
    for scene in (0, 7, 255):
        found = aligners.caption(scene)
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
