"""Which keys are patches of an image, and where they are in it: read from a model's configuration and its inputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import InputError

PLACE = ("image", "view", "top", "left", "bottom", "right")
"""Of a patch: the number of its image, from 0; 1 in a thumbnail, else 0; its edges as fractions of what is seen."""
IMAGE, VIEW, EDGES = 0, 1, slice(2, 6)
CLASS_TOKEN, ROW_MARK = "[CLS]", "image newline"
ALIKE = 0.9
"""Tiles lie as they fit the thumbnail: the best arrangement must leave less than this part of the next one's error."""


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches among the keys of one kind of attention."""

    place: Float[np.ndarray, "b n 6"]
    """`PLACE` of each key; NaN for those that are no patches."""
    names: list[dict[int, str]]
    """For each batch item, names of its patches and of other tokens of its images, by position."""
    seen: list[float] | None
    """What the model sees of an image: the middle part, of so many times the height and the width of the image, or of
    its shorter (``[h, w, 0]``) or longer (``[h, w, 1]``) side; None if only the processor knows."""


@dataclass(frozen=True)
class _Cell:
    """One token of an image: a patch, or another one that has a name only."""

    row: int = -1
    column: int = -1
    edges: tuple[float, float, float, float] = (np.nan,) * 4
    view: int = 0
    name: str = ""


Images = Iterator[list[list[_Cell]]]
"""For each batch item, the tokens of its images in the order of their placeholders, image by image."""


def _cells(rows: int, columns: int, view: int = 0) -> list[_Cell]:
    """A grid that covers the image, row by row."""
    return _tile(rows, columns, (0, 0), (1, 1), view)


def _tile(rows: int, columns: int, at: tuple[int, int], of: tuple[int, int], view: int = 0) -> list[_Cell]:
    """The cells of the tile in row and column `at`, of as many rows and columns of tiles as `of` says."""
    down, across = rows * of[0], columns * of[1]
    return [
        _Cell(i, j, (i / down, j / across, (i + 1) / down, (j + 1) / across), view)
        for i, j in itertools.product(
            range(at[0] * rows, (at[0] + 1) * rows), range(at[1] * columns, (at[1] + 1) * columns)
        )
    ]


def patches_of(model: nn.Module, batch: Mapping[str, Any], processor: Any = None) -> dict[str, Patches]:
    """The patches among the keys, by kind of attention; empty if the inputs have no image.

    Args:
        model: of Hugging Face.
        batch: the arguments of its forward.
        processor: of the model; its tokenizer names the marks between the tiles of Idefics 3 and SmolVLM, and its image
            processor tells how images were cut for models that see squares.

    Raises:
        InputError: if the places are not known, with the reason.
    """
    config: Any = getattr(model, "config", None)
    pixels = batch.get("pixel_values")
    if not isinstance(pixels, Tensor) or config is None:
        return {}
    kind = str(getattr(config, "model_type", ""))
    if kind in ENCODERS:
        of, before = ENCODERS[kind]
        tower = getattr(config, "vision_config", config)
        names = before(tower)
        cells = [_Cell(name=name) for name in names] + _cells(*(n // tower.patch_size for n in pixels.shape[2:]))
        positions = np.tile(np.arange(len(cells)), (len(pixels), 1))
        return {of: _patches([*positions], iter([[cells]] * len(pixels)), len(cells), _seen(processor))}
    if kind not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *ENCODERS}))
        raise InputError(f"model is a {kind or type(model).__name__}, expected one of {known}")
    ids, image_token = batch.get("input_ids"), getattr(config, "image_token_id", None)
    if not isinstance(ids, Tensor) or image_token is None:
        raise InputError("inputs has pixel_values but no input_ids, in which the tokens of images are")
    placeholders = [np.flatnonzero(row) for row in (ids == image_token).cpu().numpy()]
    find, square = FAMILIES[kind]
    images = find(config, batch, placeholders, getattr(processor, "tokenizer", processor))
    return {"text": _patches(placeholders, images, ids.shape[1], _seen(processor) if square else [1.0, 1.0])}


def _patches(placeholders: list[np.ndarray], images: Images, n: int, seen: list[float] | None) -> Patches:
    place = np.full((len(placeholders), n, len(PLACE)), np.nan, np.float32)
    names = [dict[int, str]() for _ in placeholders]
    for item, (positions, own) in enumerate(zip(placeholders, images, strict=True)):
        cells = [(number, cell) for number, image in enumerate(own) for cell in image]
        if len(cells) != len(positions):
            raise InputError(
                f"inputs[{item}] has {len(positions)} tokens of images, expected {len(cells)} by the configuration"
            )
        for at, (number, cell) in zip(positions.tolist(), cells, strict=True):
            of = f"image {number + 1} " if len(own) > 1 else ""
            names[item][at] = cell.name or f"{of}{'thumbnail' if cell.view else 'patch'} {cell.row},{cell.column}"
            if not cell.name:
                place[item, at] = (number, cell.view, *cell.edges)
    return Patches(place, names, seen)


# --- language models: the tokens of the images of a text --------------------------------------------------------------


def _merged(config: Any, batch: Mapping[str, Any], placeholders: list[np.ndarray], tokenizer: Any) -> Images:
    """Qwen-VL: a grid of any size, of which squares of patches are merged."""
    merged = config.vision_config.spatial_merge_size
    grids = iter(batch["image_grid_thw"].tolist())
    for positions in placeholders:
        left, images = len(positions), list[list[_Cell]]()
        while left > 0 and (grid := next(grids, None)) is not None:
            images.append(_cells(grid[1] // merged, grid[2] // merged) * grid[0])
            left -= len(images[-1])
        yield images


def _fixed(config: Any, batch: Mapping[str, Any], placeholders: list[np.ndarray], tokenizer: Any) -> Images:
    """LLaVA, PaliGemma, Gemma 3: every image is a square grid; LLaVA's has a class token before it if it is kept."""
    tower = config.vision_config
    if not isinstance(getattr(tower, "image_size", None), int) or tower.model_type == "pixtral":
        raise InputError(f"model has a vision tower {tower.model_type}, expected one that sees squares")
    side = isqrt(getattr(config, "mm_tokens_per_image", None) or (tower.image_size // tower.patch_size) ** 2)
    keeps_class = (
        tower.model_type.startswith("clip") and getattr(config, "vision_feature_select_strategy", "") == "full"
    )
    image = [_Cell(name=CLASS_TOKEN)] * keeps_class + _cells(side, side)
    for positions in placeholders:
        yield [image] * (len(positions) // len(image))


def _any_resolution(config: Any, batch: Mapping[str, Any], placeholders: list[np.ndarray], tokenizer: Any) -> Images:
    """LLaVA-NeXT: a thumbnail, then a grid over tiles, without the padding of the image, and a mark after each row."""
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    if config.vision_feature_select_strategy != "default":
        raise InputError("model keeps the class tokens of its tiles, expected vision_feature_select_strategy 'default'")
    sizes, side = iter(batch["image_sizes"].tolist()), size // patch
    for positions in placeholders:
        left, images = len(positions), list[list[_Cell]]()
        while left > 0 and (shape := next(sizes, None)) is not None:
            tiles = get_anyres_image_grid_shape(shape, config.image_grid_pinpoints, size)
            down, across = (n * side for n in tiles)
            kept = unpad_image(torch.arange(down * across).reshape(1, down, across), shape)[0]
            # The image keeps its aspect ratio in the middle of the tiles: its height and width there, in cells.
            scale = min(down / shape[0], across / shape[1])
            extent = np.array([shape[0] * scale, shape[1] * scale])
            edge = (np.array([down, across]) - extent) / 2
            image = _cells(side, side, view=1)
            for row, numbers in enumerate(kept.tolist()):
                for column, number in enumerate(numbers):
                    corner = (np.array(divmod(number, across)) - edge) / extent
                    edges = *corner.tolist(), *(corner + 1 / extent).tolist()
                    image.append(_Cell(row, column, edges))
                image.append(_Cell(name=ROW_MARK))
            images.append(image)
            left -= len(image)
        yield images


def _marked_tiles(config: Any, batch: Mapping[str, Any], placeholders: list[np.ndarray], tokenizer: Any) -> Images:
    """Idefics 3, SmolVLM: a mark names the row and column of each tile; the whole image comes last."""
    tower = config.vision_config
    side = tower.image_size // tower.patch_size // config.scale_factor
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError("the rows and columns of tiles are in the names of tokens; pass tokenizer=processor")
    for ids, positions in zip(batch["input_ids"], placeholders, strict=True):
        images, tiles = list[list[_Cell]](), list[tuple[int, int]]()
        for first in positions[:: side * side].tolist():
            mark = str(tokenizer.convert_ids_to_tokens(int(ids[first - 1]))) if first else ""
            if tile := re.fullmatch(r"<row_(\d+)_col_(\d+)>", mark):
                tiles.append((int(tile[1]) - 1, int(tile[2]) - 1))
                continue
            of = max([0, *(row for row, _ in tiles)]) + 1, max([0, *(column for _, column in tiles)]) + 1
            split = [cell for at in tiles for cell in _tile(side, side, at, of)]
            images.append(split + _cells(side, side, view=int(bool(tiles))))
            tiles = []
        yield images


def _fitted_tiles(config: Any, batch: Mapping[str, Any], placeholders: list[np.ndarray], tokenizer: Any) -> Images:
    """InternVL: tiles row by row, then a thumbnail; nothing names their rows, so they are fitted to the thumbnail."""
    tower = config.vision_config
    down, across = (
        int(n // p * config.downsample_ratio) for n, p in zip(tower.image_size, tower.patch_size, strict=True)
    )
    pixels = iter(batch["pixel_values"])
    for positions in placeholders:
        images = list[list[_Cell]]()
        for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1) if len(positions) else ():
            tiles = list(itertools.islice(pixels, len(run) // (down * across)))
            if len(tiles) == 1:
                images.append(_cells(down, across))
                continue
            of = _arrangement(torch.stack(tiles[:-1]), tiles[-1])
            places = itertools.product(range(of[0]), range(of[1]))
            split = [cell for at in places for cell in _tile(down, across, at, of)]
            images.append(split + _cells(down, across, view=1))
        yield images


def _arrangement(tiles: Float[Tensor, "tiles c h w"], thumbnail: Float[Tensor, "c h w"]) -> tuple[int, int]:
    """Rows and columns of the tiles: as the smaller image that they make together is nearest to the thumbnail."""
    n, errors = len(tiles), list[tuple[float, tuple[int, int]]]()
    for rows in (r for r in range(1, n + 1) if n % r == 0):
        whole = tiles.reshape(rows, n // rows, *tiles.shape[1:]).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        small = nn.functional.adaptive_avg_pool2d(whole[None].float(), 32)
        seen = nn.functional.adaptive_avg_pool2d(thumbnail[None].float(), 32)
        errors.append((float((small - seen).square().mean()), (rows, n // rows)))
    errors.sort()
    if len(errors) > 1 and not errors[0][0] < ALIKE * errors[1][0]:
        raise InputError(f"the {n} tiles of an image look alike, so their rows and columns cannot be told")
    return errors[0][1]


Find = Callable[[Any, Mapping[str, Any], list[np.ndarray], Any], Images]
FAMILIES: dict[str, tuple[Find, bool]] = {
    "qwen2_vl": (_merged, False), "qwen2_5_vl": (_merged, False), "qwen3_vl": (_merged, False),
    "llava": (_fixed, True), "paligemma": (_fixed, True), "gemma3": (_fixed, True),
    "llava_next": (_any_resolution, False), "idefics3": (_marked_tiles, False), "smolvlm": (_marked_tiles, False),
    "internvl": (_fitted_tiles, False),
}  # fmt: skip
"""By model type: how to find the patches, and whether the model sees a square that the processor cuts."""

Before = Callable[[Any], list[str]]
ENCODERS: dict[str, tuple[str, Before]] = {
    "vit": ("self", lambda config: [CLASS_TOKEN]),
    "dinov2": ("self", lambda config: [CLASS_TOKEN]),
    "dinov2_with_registers": (
        "self", lambda config: [CLASS_TOKEN, *(f"register {i + 1}" for i in range(config.num_register_tokens))]
    ),
    "clip_vision_model": ("self", lambda config: [CLASS_TOKEN]),
    "clip": ("vision", lambda config: [CLASS_TOKEN]),
    "siglip_vision_model": ("self", lambda config: []),
    "siglip": ("vision", lambda config: []),
}  # fmt: skip
"""By model type: the kind of attention, and the names of the tokens before the patches."""


def _seen(processor: Any) -> list[float] | None:
    """What an image processor leaves of an image: see `Patches.seen`."""
    cut = getattr(processor, "image_processor", processor)
    size, crop = (_sizes(getattr(cut, name, None)) for name in ("size", "crop_size"))
    if not size or not getattr(cut, "do_resize", False):
        return None
    pads = type(cut).__name__.startswith("LlavaImageProcessor") and bool(getattr(cut, "do_pad", False))
    whole = [size["height"], size["width"]] if "height" in size else [size.get("shortest_edge", 0)] * 2
    crops = bool(getattr(cut, "do_center_crop", False)) and "height" in crop
    if not all(whole):
        return None
    part = [crop[name] / n for name, n in zip(("height", "width"), whole, strict=True)] if crops else [1.0, 1.0]
    if pads:  # to a square, first
        return [*part, 1.0]
    return [*part, 0.0] if crops and "height" not in size else part


def _sizes(size: Any) -> dict[str, int]:
    sizes = dict(size) if isinstance(size, Mapping) else vars(size) if hasattr(size, "__dict__") else {}
    return {str(name): int(n) for name, n in sizes.items() if isinstance(n, int | float) and n}


def window(seen: list[float], height: int, width: int) -> tuple[float, float, float, float]:
    """Top, left, height and width, in pixels of an image, of what a model sees of it; it may go beyond the image.

    >>> window([1.0, 1.0], 30, 40), window([1.0, 1.0, 0], 30, 40), window([1.0, 1.0, 1], 30, 40)
    ((0.0, 0.0, 30.0, 40.0), (0.0, 5.0, 30.0, 30.0), (-5.0, 0.0, 40.0, 40.0))
    """
    side = [None, min(height, width), max(height, width)][0 if len(seen) == 2 else 1 + int(seen[2])]
    tall, wide = seen[0] * (side or height), seen[1] * (side or width)
    return (height - tall) / 2, (width - wide) / 2, tall, wide
