"""`qkv map`: draw the attention map of one head, or any part of it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from qkv._files import write_atomically
from qkv._progress import bar, spinner
from qkv.cli.shared import INPUT, Input, folder
from qkv.cli.terminal import print_line, show, sketch
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    from qkv.models.loading import Loaded
    from qkv.profiler.explore.explorer import AttentionMap
    from qkv.statistics.maps import Picture


def head_map(
    given: Annotated[Input, tyro.conf.arg(name="")] = INPUT,
    *,
    layer: Annotated[int | None, tyro.conf.arg(metavar="L", help_behavior_hint="")] = None,
    head: Annotated[int | None, tyro.conf.arg(metavar="H", help_behavior_hint="")] = None,
    rows: Annotated[str, tyro.conf.arg(metavar="A:B")] = ":",
    cols: Annotated[str, tyro.conf.arg(metavar="A:B")] = ":",
    pool: Literal["max", "mean", "both"] = "both",
    size: Annotated[int, tyro.conf.arg(metavar="N")] = 1024,
    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    group: Annotated[str | None, tyro.conf.arg(metavar="KIND", help_behavior_hint="")] = None,
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("map.png"),
    data: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Draw the attention map of one head, queries down and keys across, in a file and as a sketch in the terminal.

    The weights are exact at any zoom, and the command needs memory linear in the length of the text. It runs the model
    up to the layer. A map with more tokens than pixels is pooled: each pixel is a bin of queries × keys and shows the
    largest weight of the bin or the mean over its pairs, where masked pairs count as 0. Use --rows and --cols to draw a
    part of the map; up to 64 tokens a side are labelled. The time is proportional to the number of pairs drawn.

    qkv map                                              (the most telling head of the small model that comes with qkv)

    qkv map minilm "The cat sat." --layer 2              (the most telling head of a layer)

    qkv map minilm --file story.txt --layer 2 --head 5   (a head of a trained BERT on your own text)

    qkv map ./my-model --file book.txt --layer 7 --rows 40000:41000 --cols 0:1000 --out start.png

    qkv map random-gpt2 --tokens 100000 --layer 0 --head 0   (time and memory of a map of a long context)

    Args:
        given: Model and text.
        layer: The layer, counted from 0. Without it or --head, the text is profiled first, and the most telling head
            drawn: one that follows content, with weight on several tokens (docs/view.md).
        head: The head, counted from 0.
        rows: Queries to draw: token positions A to B - 1, counted from 0. You may leave out A or B.
        cols: Keys to draw, in the same form.
        pool: Draw the maximum of each bin, its mean, or both side by side.
        size: Largest number of pixels per side.
        image: Read this image before the text, with a model that reads images; its patches have names.
        target: For an encoder-decoder: the text that the decoder reads. By default it reads the same text.
        group: For a model with several kinds of attention: encoder, decoder or cross; by default the decoder's.
            Layers of linear attention are the kind linear, whose maps are the absolute weights of the hidden map.
        out: Name of the PNG file.
        data: Also write the numbers to a file of the same name that ends in .npz: the arrays maximum, mean, visible
            (the share of unmasked pairs in each bin), row_edges and column_edges (the edges of the bins).
    """
    from qkv.models import loading
    from qkv.plot.layout import save_figure
    from qkv.plot.map import map_figure, sentence
    from qkv.profiler.explore import explorer as maps
    from qkv.statistics.maps import checked_slice

    window = {"--rows": _slice("--rows", rows), "--cols": _slice("--cols", cols)}
    if size < 1:
        raise InputError(f"--size is {size}, expected at least 1 pixel")
    if out.suffix.lower() != ".png" or out.is_dir():
        raise InputError(f"--out is {out}, expected a file name that ends in .png")
    passage = given.passage()
    with renamed(image="--image"):
        picture = None if image is None else loading.read_image(image)
    with folder(out.parent):
        loaded, inputs = given.load(passage, image=picture)
        target = given.target_of(passage, target)
        options = {"layers": "--layer", "head": "--head", "group": "--group", "target": "--target"}
        with renamed(**options), spinner(f"running {loaded.name}"):
            if layer is None or head is None:
                layer, head = _telling(loaded, inputs, target, group, layer, head)
            found = maps.attention_map(
                loaded.model, inputs, layer=layer, head=head, tokenizer=loaded.tokenizer, target=target, group=group,
                name=loaded.name,
            )  # fmt: skip
        queries, keys = (
            checked_slice(name, part, n)
            for (name, part), n in zip(window.items(), (found.n_queries, found.n_keys), strict=True)
        )
        with bar("drawing", "queries", queries.stop - queries.start) as on_rows:
            picture = found.picture(queries, keys, size, on_rows=on_rows)
        save_figure(map_figure(found, picture, pool=pool), out)
        show(sentence(found, picture), "", *sketch(picture.maximum.float().cpu().numpy()), "")
        print_line("Map", out, main=True)
        opener = {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")
        print_line("Open", f"{opener} {shlex.quote(str(out))}")
        if data:
            numbers = out.with_suffix(".npz")
            write_atomically(numbers, _npz(found, picture))
            print_line("Data", numbers)


def _telling(
    loaded: Loaded, inputs: Any, target: str | None, group: str | None, layer: int | None, head: int | None
) -> tuple[int, int]:
    """The most telling head of the model on this text, or of one layer, or of one number in all layers."""
    from qkv.profiler.data.tables import telling_heads
    from qkv.runs import run

    layers = None if layer is None else [layer]
    data = run.profile(
        loaded.model, inputs, tokenizer=loaded.tokenizer, target=target, layers=layers, map_tokens=0, map_bins=0
    ).group(group)
    if head is not None:
        data = data.sel(head=[head]) if head in data["head"] else data.isel(head=[0])
    at, number = telling_heads(data)[0]
    return int(data["layer"][at]), int(data["head"][number]) if head is None else head


def _slice(option: str, text: str) -> slice:
    """Parse a:b, a:, :b or : as a slice."""
    found = re.fullmatch(r"(\d*):(\d*)", text.strip())
    if not found:
        raise InputError(f"{option} is {text!r}, expected a range of tokens, such as 100:200, 100: or :200")
    start, stop = (int(x) if x else None for x in found.groups())
    return slice(start, stop)


def _npz(found: AttentionMap, picture: Picture) -> bytes:
    import io

    import numpy as np

    file = io.BytesIO()
    numbers: dict[str, Any] = {
        name: getattr(picture, name).cpu().numpy()
        for name in ("maximum", "mean", "visible", "row_edges", "column_edges")
    }
    numbers |= {name: np.array(getattr(found, name)) for name in ("model", "module", "group", "layer", "head")}
    np.savez_compressed(file, **numbers)
    return file.getvalue()
