"""Renders scenes of coloured shapes with captions and their ground truth: the object and pixels of each word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch.nn.functional import avg_pool2d

from qkv.errors import InputError

__all__ = ["END", "START", "VOCABULARY", "draw", "on_grid", "text"]
__dir__ = __all__.copy

COLOURS = {
    "red": (0.95, 0.1, 0.1),
    "yellow": (1.0, 0.9, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.3, 1.0),
    "purple": (0.8, 0.2, 0.9),
    "white": (1.0, 1.0, 1.0),
}
"""The colours, in the order in which a caption names its objects."""
GROUND, PATCH, NOISE = 0.5, 8, 0.03
"""The background: its largest colour value, its patch size in pixels, and the standard deviation of the pixel noise."""
SHAPES = ("circle", "square", "triangle", "cross")
RADIUS = 4
"""The radius of an object in pixels: it is 2 · 4 + 1 high and wide."""
SPECIAL = ("<pad>", "<start>", "<end>")
VOCABULARY = (*SPECIAL, *COLOURS, *SHAPES)
TOKEN = {word: token for token, word in enumerate(VOCABULARY)}
PAD, START, END = range(3)
MOST = len(SHAPES)
"""The largest number of objects in a scene, because no two have the same shape."""
PLACES = 3
"""A scene is a grid of 3 × 3 places with at most one object each."""
LEAST_SIZE = PLACES * (2 * RADIUS + 2)
"""The smallest image size in pixels: three objects side by side, with a gap of one pixel."""
ONE_IN = 8
"""One in this many descriptions is held out."""


class Descriptions(NamedTuple):
    """The contents of n scenes, ordered by colour, as captions name them. Unused entries are 0."""

    number: Int[np.ndarray, " n"]
    """The number of objects."""
    colours: Int[np.ndarray, "n 4"]
    shapes: Int[np.ndarray, "n 4"]


@dataclass(frozen=True, eq=False)
class Scenes:
    """n images with captions of t tokens and their ground truth.

    >>> scenes = draw(np.random.default_rng(4), 1, held_out=True)
    >>> text(scenes.captions[0])
    'green triangle blue square purple cross'
    >>> scenes.images.shape, scenes.objects[0].tolist()
    ((1, 3, 40, 40), [-1, 0, 0, 1, 1, 2, 2, -1, -1, -1])
    """

    images: Float32[np.ndarray, "n 3 size size"]
    """Red, green and blue values from 0 to 1."""
    captions: Int[np.ndarray, "n t"]
    """Token numbers: start, words, end, then padding."""
    objects: Int[np.ndarray, "n t"]
    """The number of the object that each token names (by its colour or shape), or −1."""
    masks: Bool[np.ndarray, "n 4 size size"]
    """The pixels that each object covers; all False for unused entries."""


def draw(rng: np.random.Generator, n: int, *, held_out: bool, size: int = 40, most: int = MOST) -> Scenes:
    """Draw n scenes of one to `most` objects, of different colours and shapes, on a background of dark patches.

    A caption names all objects in the order of `COLOURS`. The set of colours and shapes therefore determines the order
    of the colours, but not which shape has which colour: the model has to attend to the object to know. The patches are
    random, so that the mean over the image tells little. Captions have no filler words, because a model could attend to
    the next object while it predicts one, and would then not need to attend when it names the object.

    Args:
        rng: the only source of randomness.
        n: the number of scenes.
        held_out: if True, only scenes whose descriptions are held out (a fixed eighth); else only the others.
        size: height and width in pixels.
        most: the largest number of objects, 1 to 4; all numbers from 1 on are equally frequent.
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
    """The number of tokens of a caption of so many objects, start and end included."""
    return 2 * objects + 2


def held(what: Descriptions) -> Bool[np.ndarray, " n"]:
    """True for the descriptions that are held out, by a hash."""
    code = what.number.astype(np.uint64)
    for values, base in ((what.colours, len(COLOURS)), (what.shapes, len(SHAPES))):
        for column in values.T.astype(np.uint64):
            code = code * np.uint64(base) + column
    code = code * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
    return (code ^ (code >> np.uint64(31))) % np.uint64(ONE_IN) == 0


def caption(what: Descriptions) -> tuple[Int[np.ndarray, "n t"], Int[np.ndarray, "n t"]]:
    """The captions of descriptions, and the object that each token names (−1 for none)."""
    n = len(what.number)
    tokens, objects = np.full((n, longest(MOST)), PAD), np.full((n, longest(MOST)), -1)
    tokens[:, 0] = START
    for i in range(MOST):
        exists = what.number > i
        for j, word in enumerate((what.colours + TOKEN["red"], what.shapes + TOKEN["circle"]), start=2 * i + 1):
            tokens[exists, j], objects[exists, j] = word[exists, i], i
    tokens[np.arange(n), 2 * what.number + 1] = END
    return tokens, objects


def text(tokens: Int[np.ndarray, " t"]) -> str:
    """The words of a caption, up to the end token."""
    words = [VOCABULARY[token] for token in tokens]
    return " ".join(word for word in words[: words.index("<end>") if "<end>" in words else None] if word[0] != "<")


def on_grid(masks: Bool[np.ndarray, "*n height width"], stride: int) -> Float[np.ndarray, "*n gh gw"]:
    """The share of each cell of a feature grid that a mask covers.

    A cell of k convolutions (3 × 3, stride 2, padding 1) is centred on the pixel 2ᵏ · its index. The cell is the square
    of 2ᵏ + 1 pixels around this centre, clipped to the image.

    >>> on_grid(np.arange(6)[None] < np.array([[2], [2], [0], [0], [0], [0]]), 4).round(2).tolist()
    [[0.44, 0.0], [0.0, 0.0]]
    """
    pixels = torch.from_numpy(masks.reshape(-1, 1, *masks.shape[-2:]).astype(float))
    cells = avg_pool2d(pixels, stride + 1, stride, stride // 2, count_include_pad=False)
    return cells.numpy().reshape(*masks.shape[:-2], *cells.shape[-2:])


def _described(rng: np.random.Generator, number: Int[np.ndarray, " n"]) -> Descriptions:
    n, exists = len(number), np.arange(MOST) < number[:, None]
    colours, shapes = (rng.random((n, len(x))).argsort(1)[:, :MOST] for x in (COLOURS, SHAPES))
    colours = np.sort(np.where(exists, colours, len(COLOURS)), 1)  # unused entries last
    return Descriptions(number, colours * exists, shapes * exists)


def _drawn(rng: np.random.Generator, what: Descriptions, size: int) -> Bool[np.ndarray, "n 4 size size"]:
    """The pixels of every object. Each object has its own place of the grid, at a random position inside it."""
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
