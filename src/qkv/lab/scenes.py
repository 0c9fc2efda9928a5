"""Rendered scenes of shapes, with captions, and with the truth: which words name which object, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from qkv.errors import InputError

__all__ = [
    "COLOURS",
    "END",
    "PAD",
    "SHAPES",
    "START",
    "TOKEN",
    "VOCABULARY",
    "Descriptions",
    "Scenes",
    "caption",
    "draw",
    "held",
    "longest",
    "on_grid",
    "text",
]


def __dir__() -> list[str]:
    return __all__


COLOURS = {
    "red": (0.95, 0.1, 0.1),
    "yellow": (1.0, 0.9, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.3, 1.0),
    "purple": (0.8, 0.2, 0.9),
    "white": (1.0, 1.0, 1.0),
}
"""In the order in which a caption names objects."""
GROUND, PATCH, NOISE = 0.5, 8, 0.03
"""Largest value in a colour of the ground, pixels of a patch of it, and the deviation of the noise on every pixel."""
SHAPES = ("circle", "square", "triangle", "cross")
RADIUS = 4
"""Pixels from the middle of an object to where it ends: it is 2 · 4 + 1 high and wide."""
SPECIAL = ("<pad>", "<start>", "<end>")
VOCABULARY = (*SPECIAL, *COLOURS, *SHAPES)
TOKEN = {word: token for token, word in enumerate(VOCABULARY)}
PAD, START, END = range(3)
MOST = len(SHAPES)
"""Objects in a scene, at most: no two have the same shape."""
PLACES = 3
"""A scene has 3 × 3 places, and in each at most one object."""
LEAST_SIZE = PLACES * (2 * RADIUS + 2)
"""Pixels that three objects need beside each other, with one between them."""
ONE_IN = 8
"""Of this many descriptions one is held out."""


class Descriptions(NamedTuple):
    """What is in n scenes, in the order of the colours: all that a caption says. 0 for objects that are not there."""

    number: Int[np.ndarray, " n"]
    """Of objects."""
    colours: Int[np.ndarray, "n 4"]
    shapes: Int[np.ndarray, "n 4"]


@dataclass(frozen=True, eq=False)
class Scenes:
    """n images with captions of t tokens, and the truth about them.

    >>> scenes = draw(np.random.default_rng(4), 1, held_out=True)
    >>> text(scenes.captions[0])
    'green triangle blue square purple cross'
    >>> scenes.images.shape, scenes.objects[0].tolist()
    ((1, 3, 40, 40), [-1, 0, 0, 1, 1, 2, 2, -1, -1, -1])
    """

    images: Float32[np.ndarray, "n 3 size size"]
    """Red, green and blue from 0 to 1."""
    captions: Int[np.ndarray, "n t"]
    """Start, words, end, then padding."""
    objects: Int[np.ndarray, "n t"]
    """Which object each token of the caption names, by its colour or shape; −1 for none."""
    masks: Bool[np.ndarray, "n 4 size size"]
    """Which pixels each object covers; none, if it is not there."""


def draw(rng: np.random.Generator, n: int, *, held_out: bool, size: int = 40, most: int = MOST) -> Scenes:
    """n scenes of one to `most` objects, all of different colours and shapes, anywhere on a ground of dark patches.

    A caption names all of them, in the order of `COLOURS`. So what is in a scene says which colours and which shapes
    there will be, and in what order the colours, but not which shape has which colour: for that one must look. The
    patches differ, so that a look at all of the image shows little. There is no word between those that name: a model
    may use it to look ahead, and then look at nothing when it names.

    Args:
        rng: what is drawn depends on nothing else.
        n: how many.
        held_out: scenes with descriptions (so with captions) of a fixed eighth of all, or of the rest.
        size: pixels, in height and width.
        most: objects in a scene, from 1 to 4; each number is as frequent.
    """
    if size < LEAST_SIZE:
        raise InputError(f"size is {size}, expected at least {LEAST_SIZE} pixels")
    if not 1 <= most <= MOST:
        raise InputError(f"most is {most}, expected 1 to {MOST} objects")
    what = _described(rng, rng.integers(1, most + 1, n))
    while len(wrong := np.flatnonzero(held(what) != held_out)):
        for old, new in zip(what, _described(rng, what.number[wrong]), strict=True):
            old[wrong] = new
    captions, objects = (x[:, : longest(most)] for x in caption(what))
    masks = _drawn(rng, what, size)
    return Scenes(_painted(rng, what, masks), captions, objects, masks)


def longest(objects: int) -> int:
    """Tokens of a caption of so many objects, with start and end."""
    return 2 * objects + 2


def held(what: Descriptions) -> Bool[np.ndarray, " n"]:
    """Whether each description is among those kept for evaluation, by its hash."""
    code = what.number.astype(np.uint64)
    for values, base in ((what.colours, len(COLOURS)), (what.shapes, len(SHAPES))):
        for column in values.T.astype(np.uint64):
            code = code * np.uint64(base) + column
    code = code * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
    return (code ^ (code >> np.uint64(31))) % np.uint64(ONE_IN) == 0


def caption(what: Descriptions) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n t"]]:
    """Tokens, and which object each names."""
    n = len(what.number)
    tokens, objects = np.full((n, longest(MOST)), PAD), np.full((n, longest(MOST)), -1)
    tokens[:, 0] = START
    for i in range(MOST):
        there = what.number > i
        for j, word in enumerate((what.colours + TOKEN["red"], what.shapes + TOKEN["circle"]), start=2 * i + 1):
            tokens[there, j], objects[there, j] = word[there, i], i
    tokens[np.arange(n), 2 * what.number + 1] = END
    return tokens, objects


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
    colours, shapes = (rng.random((n, len(x))).argsort(1)[:, :MOST] for x in (COLOURS, SHAPES))
    colours = np.sort(np.where(there, colours, len(COLOURS)), 1)  # those that are not there last
    return Descriptions(number, colours * there, shapes * there)


def _drawn(rng: np.random.Generator, what: Descriptions, size: int) -> Bool[np.ndarray, "n 4 size size"]:
    """The pixels of every object: each in a place of its own, and there anywhere."""
    n, width = len(what.number), size // PLACES
    places = rng.random((n, PLACES**2)).argsort(1)[:, :MOST]
    free = rng.integers(RADIUS, width - RADIUS, size=(2, n, MOST))
    rows, columns = width * np.stack([places // PLACES, places % PLACES]) + free
    pixel = np.arange(size)
    y, x = pixel[:, None] - rows[..., None, None], pixel - columns[..., None, None]
    farther = np.maximum(abs(y), abs(x))
    shape = what.shapes[..., None, None]
    inside = np.select(
        [shape == 0, shape == 1, shape == 2],
        [y * y + x * x <= RADIUS * (RADIUS + 0.5), farther < RADIUS, (2 * abs(x) <= y + RADIUS) & (y <= RADIUS)],
        (np.minimum(abs(y), abs(x)) <= RADIUS // 3) & (farther <= RADIUS),
    )
    return inside & (np.arange(MOST) < what.number[:, None])[..., None, None]


def _painted(
    rng: np.random.Generator, what: Descriptions, masks: Bool[np.ndarray, "n 4 size size"]
) -> Float32[np.ndarray, "n 3 size size"]:
    n, _, size, _ = masks.shape
    patches = -(-size // PATCH)
    ground = GROUND * rng.random((n, 3, patches, patches), dtype=np.float32)
    flat = ground.repeat(PATCH, 2).repeat(PATCH, 3)[..., :size, :size]
    palette = np.array(list(COLOURS.values()), dtype=np.float32)[what.colours]
    for i in range(MOST):
        flat = np.where(masks[:, i, None], palette[:, i, :, None, None], flat)
    return (flat + NOISE * rng.standard_normal(flat.shape, dtype=np.float32)).clip(0, 1)
