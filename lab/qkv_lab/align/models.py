"""Outputs of the bundled models for translation, reversal and captions, with the attention weights of each word."""

from __future__ import annotations

import base64
import string
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, nearest
from qkv.models import checkpoint, load
from qkv.runs.run import profile
from qkv_lab import heads, scenes, settings
from qkv_lab.scenes import START, Scenes
from qkv_lab.tasks.caption import greedy_captions, to_input
from qkv_lab.tasks.sequences import Reversal
from qkv_lab.translation import SPECIAL, translate, vocabularies
from qkv_lab.translation import START as BEGIN

TRANSLATION, REVERSAL, CAPTIONER = "qkv-translation", "qkv-reversal", "qkv-caption"
SENTENCE = "the old woman does not eat the red apples"
MAX_WORDS = 40
SEPARATOR = "⇄"
"""The text shown for the separator token after the symbols of `REVERSAL`."""


def description() -> dict[str, Any]:
    """What the page shows at first: models with their vocabularies, and the number of scenes of the captioner."""
    task = _bundled(REVERSAL)[0]
    symbols = _letters(task)
    example = " ".join(symbols[(5 * i + 2) % len(symbols)] for i in range(task.length))
    words = sorted(vocabularies()[0].words[len(SPECIAL) :])
    return {
        "models": [
            {"name": TRANSLATION, "kind": "translation", "example": SENTENCE, "words": words},
            {"name": REVERSAL, "kind": "reversal", "example": example, "words": symbols},
        ],
        "captioner": {"name": CAPTIONER, "scenes": _bundled(CAPTIONER)[0].held_out},
    }


def align(model: str, text: str) -> dict[str, Any]:
    """Run a model on some words. It is loaded on first use.

    Returns:
        The fields of `AlignAnswer`: ``source`` and ``target`` words; ``layers``, ``heads`` and ``weights`` (layers,
        heads, target, source), with which each target word was predicted; the ``probability`` of each target word. The
        reversal model is a decoder: its source ends with the separator, and a row of its weights may sum to less than
        1, because the rest lies on the output symbols before.

    >>> found = align("qkv-translation", "the black cat")
    >>> found["target"], [found["source"][max(range(3), key=row.__getitem__)] for row in found["weights"][0][0]]
    (['le', 'chat', 'noir'], ['the', 'cat', 'black'])
    """
    if model == TRANSLATION:
        return _translate(text)
    if model == REVERSAL:
        return _reverse(text)
    raise InputError(f"model is {model!r}, expected {TRANSLATION!r} or {REVERSAL!r}")


def caption(scene: int) -> dict[str, Any]:
    """Caption a held-out scene.

    Returns:
        The fields of `CaptionAnswer`: ``image``, base64 of its RGB bytes, ``size`` × ``size``; the generated ``words``,
        the ``truth``, and ``weights`` of each word on a grid of ``gh`` × ``gw`` cells. Cell (i, j) is centred on pixel
        (i, j) · size / gh.
    """
    task, model = _bundled(CAPTIONER)
    if not 0 <= scene < task.held_out:
        raise InputError(f"scene is {scene}, expected 0 to {task.held_out - 1}")
    drawn = _scenes()
    image = to_input(drawn)[scene : scene + 1]
    with torch.no_grad():
        [words] = greedy_captions(model, image)
        maps = model.maps(image, torch.tensor([[START, *words]]))[0, : len(words)]
    pixels = (drawn.images[scene].transpose(1, 2, 0) * 255).round().astype(np.uint8)
    return {
        "size": task.size,
        "image": base64.b64encode(np.ascontiguousarray(pixels).tobytes()).decode("ascii"),
        "words": [scenes.VOCABULARY[token] for token in words],
        "truth": scenes.text(drawn.captions[scene]),
        "weights": maps.tolist(),
        "gh": maps.shape[1],
        "gw": maps.shape[2],
    }


def _translate(text: str) -> dict[str, Any]:
    model, vocabulary = _bundled(TRANSLATION)[1], vocabularies()
    if len(text.split()) > MAX_WORDS:
        raise InputError(f"text has {len(text.split())} words, expected at most {MAX_WORDS}")
    source, target, weights = translate(model, text, vocabulary)
    if weights is None:  # the translation is empty
        return _answer(source, target, torch.zeros(1, 1, 0, len(source)), torch.zeros(0))
    numbers = vocabulary[1].numbers(target)
    with torch.no_grad():
        logits = model(torch.tensor([vocabulary[0].numbers(source)]), torch.tensor([[BEGIN, *numbers]]))
    return _answer(source, target, weights[None, None], _probabilities(logits[0, :-1], numbers))


def _reverse(text: str) -> dict[str, Any]:
    task, model = _bundled(REVERSAL)
    letters, words = _letters(task), text.lower().split()
    for word in words:
        if word not in letters:
            raise InputError(
                f"text has the symbol {word!r}, expected {letters[0]} to {letters[-1]}{nearest(word, letters)}"
            )
    n = task.length
    if len(words) != n:
        raise InputError(f"text has {len(words)} symbols, expected {n}: the model was trained on rows of {n}")
    prompt = [*(heads.FIRST_SYMBOL + letters.index(word) for word in words), heads.SEPARATOR]
    output: list[int] = heads.continued(model, torch.tensor([prompt]), n)[0].tolist()
    tokens = torch.tensor([[*prompt, *output[:-1]]])
    with torch.no_grad():
        logits = model(tokens)
    found = profile(model, tokens, probe=False, map_bins=0, progress=False).data["weights"].values[0]
    weights = torch.from_numpy(found[:, :, n:, : n + 1].copy())
    names = {heads.FIRST_SYMBOL + i: letter for i, letter in enumerate(letters)}
    target = [names.get(token, SEPARATOR if token == heads.SEPARATOR else "–") for token in output]
    return _answer([*words, SEPARATOR], target, weights, _probabilities(logits[0, n:], output))


def _answer(
    source: list[str], target: list[str], weights: Float[Tensor, "layer head t s"], probability: Float[Tensor, " t"]
) -> dict[str, Any]:
    return {
        "source": source,
        "target": target,
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "weights": weights.tolist(),
        "probability": probability.tolist(),
    }


def _probabilities(logits: Float[Tensor, "t vocabulary"], tokens: Sequence[int]) -> Float[Tensor, " t"]:
    """The probability of each token."""
    return logits.double().softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]


def _letters(task: Reversal) -> list[str]:
    """The letters that stand for the symbols of the task, which are numbers."""
    return list(string.ascii_lowercase[: task.symbols])


@cache
def _scenes() -> Scenes:
    """The held-out scenes on which the captioner was evaluated."""
    found: Scenes = _bundled(CAPTIONER)[0].unseen()
    return found


@cache
def _bundled(name: str) -> tuple[Any, Any]:
    """The task that a bundled model was trained on, and the model."""
    folder = checkpoint.folder_of(name)
    assert folder is not None
    return settings.from_toml(folder / "run.toml")[0], load(folder)
