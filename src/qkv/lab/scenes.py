"""Rendered scenes of shapes, with captions, and with the truth: which words name which object, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from qkv.errors import InputError

COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.75, 0.2),
    "blue": (0.15, 0.3, 1.0),
    "yellow": (1.0, 0.9, 0.1),
    "purple": (0.75, 0.2, 0.9),
    "white": (1.0, 1.0, 1.0),
}
GROUND, NOISE = 0.4, 0.03
"""Grey of the ground, and the deviation of the noise on every pixel."""
SHAPES = ("circle", "square", "triangle", "cross")
RADII = {"small": 4, "large": 7}
"""Pixels from the middle of an object to where it ends: it is 2 r + 1 high."""
SPECIAL = ("<pad>", "<start>", "<end>")
VOCABULARY = (*SPECIAL, "a", "above", "left", "of", "and", *RADII, *COLOURS, *SHAPES)
TOKEN = {word: token for token, word in enumerate(VOCABULARY)}
PAD, START, END = range(3)
LONGEST = (6, 12, 16)
"""Tokens of the longest caption of one, two and three objects, with start and end."""
MOST = len(LONGEST)
"""Objects in a scene, at most."""
LEAST_SIZE = 36
"""Pixels that two large objects need beside each other."""
ONE_IN = 8
"""Of this many descriptions one is held out."""
MARGIN, GAP, LEVEL = 1, 2, 3
"""Pixels to the image's edge, between objects, and by which what stands above or beside may be out of line."""


class Descriptions(NamedTuple):
    """What is in n scenes, and in what order: all that a caption says. Entries of objects that are not there are 0."""

    number: Int[np.ndarray, " n"]
    """Of objects."""
    beside: Bool[np.ndarray, " n"]
    """Of two objects, whether the first is left of the second; else it is above."""
    sizes: Int[np.ndarray, "n 3"]
    colours: Int[np.ndarray, "n 3"]
    shapes: Int[np.ndarray, "n 3"]


@dataclass(frozen=True, eq=False)
class Scenes:
    """n images with captions of t tokens, and the truth about them.

    >>> scenes = draw(np.random.default_rng(0), 1, held_out=True)
    >>> text(scenes.captions[0])
    'a large purple square above a large green cross and a large yellow circle'
    >>> scenes.images.shape, scenes.objects[0, :6].tolist()
    ((1, 3, 48, 48), [-1, -1, 0, 0, 0, -1])
    """

    images: Float32[np.ndarray, "n 3 size size"]
    """Red, green and blue from 0 to 1."""
    captions: Int[np.ndarray, "n t"]
    """Start, words, end, then padding."""
    objects: Int[np.ndarray, "n t"]
    """Which object each token of the caption names, by its size, colour or shape; −1 for none."""
    masks: Bool[np.ndarray, "n 3 size size"]
    """Which pixels each object covers; none, if it is not there."""


def draw(rng: np.random.Generator, n: int, *, held_out: bool, size: int = 48, most: int = MOST) -> Scenes:
    """n scenes of one to `most` objects, all of different colours and shapes.

    A caption names one object; or the one above, or left of, the other; or one that is above two, and these from left
    to right. Every word follows from the image. The `light` depends on the place: without that no cell of a grid
    of convolutions could tell where it is.

    Args:
        rng: what is drawn depends on nothing else.
        n: how many.
        held_out: scenes with descriptions (so with captions) of a fixed eighth of all, or of the rest.
        size: pixels, in height and width.
        most: objects in a scene, from 1 to 3; each number is as frequent.
    """
    if size < LEAST_SIZE:
        raise InputError(f"size is {size}, expected at least {LEAST_SIZE} pixels")
    if not 1 <= most <= MOST:
        raise InputError(f"most is {most}, expected 1 to {MOST} objects")
    what = _described(rng, rng.integers(1, most + 1, n))
    while len(wrong := np.flatnonzero(held(what) != held_out)):
        for old, new in zip(what, _described(rng, what.number[wrong]), strict=True):
            old[wrong] = new
    captions, objects = (x[:, : LONGEST[most - 1]] for x in caption(what))
    masks = _drawn(what, _placed(rng, what, size), size)
    return Scenes(_painted(rng, what, masks), captions, objects, masks)


def held(what: Descriptions) -> Bool[np.ndarray, " n"]:
    """Whether each description is among those kept for evaluation, by its hash."""
    code = what.number.astype(np.uint64) * 2 + what.beside
    for values, base in ((what.sizes, len(RADII)), (what.colours, len(COLOURS)), (what.shapes, len(SHAPES))):
        for column in values.T.astype(np.uint64):
            code = code * np.uint64(base) + column
    code = code * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
    return (code ^ (code >> np.uint64(31))) % np.uint64(ONE_IN) == 0


def light(size: int) -> Float32[np.ndarray, "3 size size"]:
    """What a colour is multiplied by: half as bright at the bottom, less blue at the left, less red at the right."""
    down, across = (np.linspace(0, 1, size, dtype=np.float32) for _ in range(2))
    tint = np.stack([1 - 0.4 * across, np.full_like(across, 0.8), 0.6 + 0.4 * across])
    return (1 - 0.5 * down)[:, None] * tint[:, None]


def caption(what: Descriptions) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n t"]]:
    """Tokens, and which object each names."""
    n = len(what.number)
    tokens, objects = np.full((n, LONGEST[-1] + 1), PAD), np.full((n, LONGEST[-1] + 1), -1)
    tokens[:, 0], tokens[:, -1] = START, END
    for i, at in enumerate((1, 7, 12)):
        there = what.number > i
        tokens[there, at] = TOKEN["a"]
        words = (what.sizes + TOKEN["small"], what.colours + TOKEN["red"], what.shapes + TOKEN["circle"])
        for j, word in enumerate(words, start=at + 1):
            tokens[there, j], objects[there, j] = word[there, i], i
    tokens[:, 5] = np.where(what.number > 1, np.where(what.beside, TOKEN["left"], TOKEN["above"]), PAD)
    tokens[:, 6] = np.where(what.beside, TOKEN["of"], PAD)
    tokens[:, 11] = np.where(what.number > 2, TOKEN["and"], PAD)
    order = np.argsort(tokens == PAD, axis=1, kind="stable")[:, :-1]  # padding to the end
    return np.take_along_axis(tokens, order, 1), np.take_along_axis(objects, order, 1)


def text(tokens: Int[np.ndarray, " t"]) -> str:
    """The words of a caption, up to its end."""
    words = [VOCABULARY[token] for token in tokens]
    return " ".join(word for word in words[: words.index("<end>") if "<end>" in words else None] if word[0] != "<")


def on_grid(masks: Bool[np.ndarray, "*n height width"], stride: int) -> Float[np.ndarray, "*n gh gw"]:
    """The share of each cell of a grid that a mask covers.

    A cell of k convolutions (3 × 3, stride 2, padding 1) is centred on the pixel 2ᵏ · its index, so the cell taken here
    is the square of 2ᵏ + 1 pixels around that, without what is outside the image.

    >>> on_grid(np.arange(6)[None] < np.array([[2], [2], [0], [0], [0], [0]]), 4).round(2).tolist()
    [[0.44, 0.0], [0.0, 0.0]]
    """
    covered = masks.astype(float)
    for axis in (-2, -1):
        length, half = masks.shape[axis], stride // 2
        middle = np.arange(0, length, stride)
        start, stop = np.maximum(middle - half, 0), np.minimum(middle + half + 1, length)
        zero = np.zeros_like(np.take(covered, [0], axis))
        total = np.concatenate([zero, covered.cumsum(axis)], axis)
        shape = (-1, 1) if axis == -2 else (-1,)
        covered = (np.take(total, stop, axis) - np.take(total, start, axis)) / (stop - start).reshape(shape)
    return covered


def _described(rng: np.random.Generator, number: Int[np.ndarray, " n"]) -> Descriptions:
    n, there = len(number), np.arange(MOST) < number[:, None]
    sizes = rng.integers(len(RADII), size=(n, MOST))
    colours, shapes = (rng.random((n, len(x))).argsort(1)[:, :MOST] for x in (COLOURS, SHAPES))
    return Descriptions(number, (rng.random(n) < 0.5) & (number == 2), sizes * there, colours * there, shapes * there)


def _placed(rng: np.random.Generator, what: Descriptions, size: int) -> Int[np.ndarray, "2 n 3"]:
    """Row and column of the middle of every object."""
    radii = np.array(list(RADII.values()))[what.sizes]
    free = rng.integers(MARGIN + radii, size - MARGIN - radii, size=(2, *radii.shape))
    near = free[:, :, :1] + rng.integers(-LEVEL, LEVEL + 1, free.shape)  # in line with the first
    first, second, third = radii.T
    two, three = what.number == 2, what.number == 3
    out = free.copy()
    for axis, chosen, lower in ((0, two & ~what.beside, second), (1, two & what.beside, second),
                                (0, three, np.maximum(second, third))):  # fmt: skip
        one, other = _apart(rng, first, lower, size)
        out[axis, :, 0] = np.where(chosen, one, out[axis, :, 0])
        out[axis, :, 1:] = np.where(chosen[:, None], other[:, None], out[axis, :, 1:])
    out[0, :, 1] = np.where(what.beside, near[0, :, 1], out[0, :, 1])
    out[1, :, 1] = np.where(two & ~what.beside, near[1, :, 1], out[1, :, 1])
    for column, values in enumerate(_apart(rng, second, third, size), start=1):
        out[1, :, column] = np.where(three, values, out[1, :, column])
    return np.clip(out, MARGIN + radii, size - MARGIN - radii - 1)


def _apart(
    rng: np.random.Generator, first: Int[np.ndarray, " n"], second: Int[np.ndarray, " n"], size: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Middles of two objects along one axis, the first before the second, with a gap between them."""
    spare = size - 2 * MARGIN - GAP - 2 * (first + second + 1)
    before, after = np.sort(rng.integers(0, spare + 1, size=(2, len(first))), axis=0)
    return MARGIN + first + before, MARGIN + 2 * first + 1 + GAP + second + after


def _drawn(what: Descriptions, middles: Int[np.ndarray, "2 n 3"], size: int) -> Bool[np.ndarray, "n 3 size size"]:
    """The pixels of every object."""
    radii = np.array(list(RADII.values()))[what.sizes][..., None, None]
    pixel = np.arange(size)
    y, x = pixel[:, None] - middles[0][..., None, None], pixel - middles[1][..., None, None]
    farther = np.maximum(abs(y), abs(x))
    shape = what.shapes[..., None, None]
    inside = np.select(
        [shape == 0, shape == 1, shape == 2],
        [y * y + x * x <= radii * (radii + 0.5), farther < radii, (2 * abs(x) <= y + radii) & (y <= radii)],
        (np.minimum(abs(y), abs(x)) <= radii // 3) & (farther <= radii),
    )
    return inside & (np.arange(MOST) < what.number[:, None])[..., None, None]


def _painted(
    rng: np.random.Generator, what: Descriptions, masks: Bool[np.ndarray, "n 3 size size"]
) -> Float32[np.ndarray, "n 3 size size"]:
    n, _, size, _ = masks.shape
    albedo = np.full((n, 3, size, size), GROUND, dtype=np.float32)
    palette = np.array(list(COLOURS.values()), dtype=np.float32)[what.colours]
    for i in range(MOST):
        albedo = np.where(masks[:, i, None], palette[:, i, :, None, None], albedo)
    return (albedo * light(size) + NOISE * rng.standard_normal(albedo.shape, dtype=np.float32)).clip(0, 1)
