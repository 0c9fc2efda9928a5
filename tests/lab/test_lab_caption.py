"""The caption task: scenes and captions agree, held-out scenes are new, and attention metrics are correct."""

from __future__ import annotations

import numpy as np
import pytest

from qkv_lab import scenes
from qkv_lab.scenes import COLOURS, PAD, RADIUS, SHAPES, VOCABULARY, Scenes
from qkv_lab.tasks.caption import attention_to_objects


def drawn(n: int = 200, seed: int = 0, *, held_out: bool = False) -> Scenes:
    return scenes.draw(np.random.default_rng(seed), n, held_out=held_out)


def named(tokens: np.ndarray) -> list[tuple[str, str]]:
    """The objects (colour, shape) that the text of a caption names."""
    words = scenes.text(tokens).split()
    found = list(zip(words[::2], words[1::2], strict=True))
    assert all(colour in COLOURS and shape in SHAPES for colour, shape in found), words
    return found


@pytest.mark.slow
def test_no_caption_is_both_trained_on_and_held_out() -> None:
    train, held = ({scenes.text(c) for c in drawn(n, held_out=out).captions} for n, out in ((800, False), (300, True)))
    assert not train & held
    assert len(held) > 60


def test_captions_name_every_object_once_in_the_order_of_their_colours() -> None:
    found = drawn()
    assert {len(named(c)) for c in found.captions} == {1, 2, 3, 4}
    for tokens, objects in zip(found.captions, found.objects, strict=True):
        end = list(tokens).index(scenes.END)
        assert tokens[0] == scenes.START
        assert (tokens[end + 1 :] == PAD).all()
        assert (tokens[:end] != PAD).all()
        things = named(tokens)
        words = [[VOCABULARY[t] for t in tokens[objects == i]] for i in range(len(things))]
        assert words == [list(x) for x in things]
        assert (objects < len(things)).all()
        assert len({x[0] for x in things}) == len({x[1] for x in things}) == len(things)
        order = [list(COLOURS).index(colour) for colour, _ in things]
        assert order == sorted(order)


def test_masks_are_the_pixels_of_their_colours_in_the_shapes_of_their_names() -> None:
    found = drawn(50)
    for image, tokens, masks in zip(found.images, found.captions, found.masks, strict=True):
        things = named(tokens)
        assert (masks.sum(0) <= 1).all()
        assert masks.any((1, 2)).sum() == len(things)
        for (colour, shape), mask in zip(things, masks, strict=False):
            like = abs(image.transpose(1, 2, 0) - COLOURS[colour]).max(-1) < 6 * scenes.NOISE
            assert (like == mask).all(), colour
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            cut = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert set(cut.shape) == {2 * (RADIUS - (shape == "square")) + 1}
            corners = [cut[0, 0], cut[0, -1], cut[-1, 0], cut[-1, -1]]
            assert corners == {"square": [1] * 4, "triangle": [0, 0, 1, 1]}.get(shape, [0] * 4)
            assert shape not in ("circle", "cross") or (cut.mean() > 0.7) == (shape == "circle")


@pytest.mark.parametrize(("size", "stride"), [(48, 4), (36, 4), (41, 8)])
def test_on_grid_counts_the_pixels_of_each_cell(size: int, stride: int) -> None:
    mask = drawn(1).masks[0].any(0)[:size, :size]
    mask = np.pad(mask, ((0, size - len(mask)), (0, size - mask.shape[1])))
    got, half = scenes.on_grid(mask, stride), stride // 2
    assert got.shape == (-(-size // stride),) * 2
    for i, j in np.ndindex(got.shape):
        around = [mask[y, x] for y in range(size) for x in range(size)
                  if abs(y - i * stride) <= half and abs(x - j * stride) <= half]  # fmt: skip
        assert got[i, j] == pytest.approx(np.mean(around))


def test_attention_metrics_of_hand_made_weights() -> None:
    """One image of 16 × 16 with one cell of 16 on the object; two words after the start: red circle."""
    tokens = [VOCABULARY.index(w) for w in ("<start>", "red", "circle", "<end>")]
    masks = np.zeros((1, 4, 16, 16), bool)
    masks[0, 0, 3:6, 8:10] = True  # within the two pixels around row 4 and column 8
    held = Scenes(np.zeros((1, 3, 16, 16), np.float32), np.array([tokens]), np.array([[-1, 0, 0, -1]]), masks)
    weights = np.full((1, 3, 4, 4), 1 / 16)
    even = {"mass": 1 / 16, "mass_at_colours": 1 / 16, "mass_at_shapes": 1 / 16, "chance": 1 / 16, "strongest": 0.0}
    assert attention_to_objects(weights, held) == even
    weights[0, :2] = 0
    weights[0, 0, 1, 2], weights[0, 0, 0, 0] = 0.75, 0.25  # predicts "red"
    weights[0, 1, 3, 3], weights[0, 1, 1, 2] = 0.75, 0.25  # predicts "circle"
    right = {"mass": 0.5, "mass_at_colours": 0.75, "mass_at_shapes": 0.25, "chance": 1 / 16, "strongest": 0.5}
    assert attention_to_objects(weights, held) == right
    weights[0, 2] = 0  # predicts the end token
    assert attention_to_objects(weights, held) == right
