"""Latency of tiles that the viewer has not cached yet: every zoom, rows, columns and pairs.

python -m benchmarks.viewer [TOKENS …]   16,384 and 100,000 unless given; writes results/viewer.json
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.mechanisms.timing import timed
from benchmarks.timing import THREADS, save
from qkv.models.loading import random_gpt2
from qkv.profiler.explore import explorer as explore
from qkv.profiler.explore.explorer import Explorer
from qkv.profiler.explore.pyramid import TILE, new_tile_cache

LENGTHS, REPEATS, LAYER, HEADS = (16_384, 100_000), 15, 0, 4
WIDE = 16_384  # tiles of more tokens a side take seconds: they are timed less often


def viewer(lengths: tuple[int, ...] = LENGTHS, repeats: int = REPEATS) -> dict[str, Any]:
    """GPT-2's shape with one layer of 4 heads × 64 and random weights, causal, float32.

    Tiles lie at random places on or below the diagonal, and nothing is kept when they are asked for; so do rows,
    columns and pairs. Zoom 0 is the whole map: one pass, from which all far zooms are then known.
    """
    torch.set_num_threads(THREADS)
    found = {f"{tokens:,} tokens": _of_length(tokens, repeats) for tokens in lengths}
    cold = next(iter(found.values()))["cold tiles"]
    return {"milliseconds": found, f"cold tile at {lengths[0]:,} tokens: median over all zooms / 150 ms": cold / 150}


def _of_length(tokens: int, repeats: int) -> dict[str, Any]:
    random.seed(0)
    model = random_gpt2(tokens, layers=1, heads=HEADS)
    found = explore.of(model, torch.arange(tokens) % 251)
    first = timed(lambda: found.info("self", 0))
    deepest = found.info("self", 0).deepest
    found.tile("self", 0, LAYER, 0, deepest, 0, 0)  # warm-up: imports on first use are not measured
    zooms = {}
    for zoom in range(deepest + 1):
        wide = TILE * 2 ** (deepest - zoom) > WIDE
        zooms[zoom] = [_tile(found, tokens, zoom, deepest) for _ in range(3 if wide else repeats)]
    place: Callable[[], int] = lambda: random.randrange(tokens)  # noqa: E731
    asked: dict[str, Callable[[], object]] = {
        "row": lambda: found.row("self", 0, LAYER, random.randrange(HEADS), place()),
        "column": lambda: found.column("self", 0, LAYER, random.randrange(HEADS), place()),
        "row, mean of all heads": lambda: found.row("self", 0, LAYER, None, place()),
        "column, mean of all heads": lambda: found.column("self", 0, LAYER, None, place()),
        "pair": lambda: found.pair("self", 0, LAYER, random.randrange(HEADS), place(), place()),
        "strongest keys of all heads": lambda: found.strongest("self", 0, LAYER, place()),
    }
    return {
        "the model's forward": 1000 * first,
        "cold tiles": statistics.median(x for times in zooms.values() for x in times),
        "cold tiles by zoom: median": {zoom: statistics.median(zooms[zoom]) for zoom in zooms},
        "cold tiles by zoom: most": {zoom: max(zooms[zoom]) for zoom in zooms},
        "a kept tile": 1000 * statistics.median(_kept(found) for _ in range(repeats)),
        "asked": {name: 1000 * statistics.median(timed(ask) for _ in range(repeats)) for name, ask in asked.items()},
    }


def _tile(found: Explorer, tokens: int, zoom: int, deepest: int) -> float:
    """Milliseconds for a tile at a random position of a random head, with an empty cache."""
    found._tiles = new_tile_cache(2**28)  # none
    last = (tokens - 1) // (TILE * 2 ** (deepest - zoom))
    i = random.randint(0, last)
    at = (LAYER, random.randrange(HEADS), zoom, i, random.randint(0, i))
    started = time.perf_counter()
    assert found.tile("self", 0, *at) is not None
    return 1000 * (time.perf_counter() - started)


def _kept(found: Explorer) -> float:
    found.tile("self", 0, LAYER, 0, 3, 0, 0)
    return timed(lambda: found.tile("self", 0, LAYER, 0, 3, 0, 0))


def main() -> None:
    result = viewer(tuple(map(int, sys.argv[1:])) or LENGTHS)
    print(json.dumps(result, indent=1))
    print(save("viewer", result))


if __name__ == "__main__":
    main()
