"""Pictures of a composition: what its mask lets through, what its biases change, and the weights of an example."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from qkv.attention import Attention, attend
from qkv.biases import Bias
from qkv.engine import Call
from qkv.errors import InputError, at_least_one
from qkv.masks import EMPTY, FULL, PARTIAL, Grid, Mask, Region, Tiles
from qkv.masks.base import expression
from qkv.normalizers import Normalizer
from qkv.plot.given import index_of
from qkv.plot.layout import COLOURS, MUTED, WARM, Drawing, chart, colour_bar, heat, place, png_of, titled
from qkv.scores import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS, HEADS, HEAD_DIM = 32, 8, 64
WORDS = 8  # different words of the example
SIDE, GAP = 2.3, 0.95  # inches: a panel, and the room between two
PAIRS = 512  # up to this many tokens, one cell per pair
SHADES = {EMPTY: "#ffffff", PARTIAL: "#f0b64d", FULL: "#2f6f9f"}  # distinguishable with any colour vision
INK = "#1f4e79"


def composition(
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    n: int = TOKENS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    head: int = 0,
    title: str = "",
) -> Drawing:
    """The parts of a composition side by side: mask, biases, the weights of an example, and a row of a normalizer.

    The example is a text of eight different words in random order. A query is like its own word, so without mask and
    bias a token attends to the copies of itself. It is the same in every picture.

    Args:
        mask: as of `qkv.attend`; its panel shows the visible pairs.
        bias: as of `qkv.attend`; its panel shows by how much all biases change the scores of the example.
        score: as of `qkv.attend`.
        normalizer: as of `qkv.attend`; its panel compares the weights of the last query with those of softmax.
        n: the number of tokens of the text.
        heads: the number of heads of queries and keys, for parts that have a number for each head.
        head_dim: the size of a head.
        head: the head that is drawn.
        title: the title; by default the expression of the composition.

    Returns:
        The figure, which a notebook shows. ``.savefig("window.png")`` saves it.

    Raises:
        InputError: for parts that do not fit the sizes, or a head that does not exist.

    >>> import qkv
    >>> figure = qkv.plot.composition(mask=qkv.masks.Causal(), bias=qkv.biases.ALiBi())
    >>> [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes if axes.get_title(loc="left")]
    ['mask', 'bias', 'weights']
    """
    at_least_one("composition", n=n, heads=heads, head_dim=head_dim)
    head = index_of("head", head, range(heads))
    parts = Attention(mask, bias, score, normalizer)
    q, k = _example(n, heads, head_dim)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        call = Call.of(q, k, k, mask, bias, score, normalizer)
        weights = attend(q, k, k, **parts._parts(), return_weights=True)[1][0, head].numpy()
        plain = attend(q, k, k, mask=mask, bias=bias, score=score, return_weights=True)[1][0, head].numpy()
        change = None if bias is None else _change(call, bias)[0, head].numpy()
    visible = None if call.mask is None else call.mask.visible(_whole(n), call.grid).expand(1, heads, -1, -1)
    panels = [visible is not None, bias is not None, True, normalizer is not None]
    width = 0.5 + sum(panels) * (SIDE + GAP) - 0.2
    figure = titled(width, SIDE + 1.35, title or textwrap.shorten(_named(parts), int(8 * width), placeholder=" …"))
    lefts = iter(0.5 + (SIDE + GAP) * at for at in range(4))
    if visible is not None:
        shown = visible[0, head].float().numpy()
        axes = _panel(figure, next(lefts), f"mask: {shown.mean():.0%} of the pairs are visible".replace("%", " %"))
        heat(axes, shown, Normalize(0, 1), ListedColormap(["#ffffff", SHADES[FULL]]))
    if change is not None:
        axes = _panel(figure, next(lefts), f"bias: change of the scores, head {head}")
        hidden = change if visible is None else np.where(visible[0, head], change, np.nan)
        top = float(np.nanmax(np.abs(hidden), initial=0.0)) or 1.0
        colour_bar(heat(axes, hidden, Normalize(-top, top)))
    axes = _panel(figure, next(lefts), f"weights: head {head} of an example")
    hidden = weights if visible is None else np.where(visible[0, head], weights, np.nan)
    low = min(0.0, float(np.nanmin(hidden)))
    top = max(float(np.nanmax(hidden)), -low) or 1.0
    colour_bar(heat(axes, hidden, Normalize(-top if low < 0 else 0, top)))
    if normalizer is not None:
        axes = chart(figure, next(lefts), 0.75, SIDE, SIDE, f"row: query {n - 1}; the line is plain softmax")
        axes.bar(np.arange(n), weights[-1], 0.8, color=COLOURS(0.65))
        axes.step(np.arange(n), plain[-1], where="mid", color=WARM, lw=1.1)
        axes.set_xlabel("key")
    return figure


def picture_of(thing: object) -> bytes | None:
    """The picture of a mask, bias, score, normalizer or `Attention` for a notebook; None if it has none.

    A part with tensors fits only some sizes: those of its tensors are tried.
    """
    kinds = {"mask": Mask, "bias": Bias, "score": Score, "normalizer": Normalizer}
    parts: dict[str, Any] = {name: thing for name, kind in kinds.items() if isinstance(thing, kind)}
    if isinstance(thing, Attention):
        parts = thing._parts()
    for sizes in _sizes(thing):
        try:
            return png_of(composition(**parts, **sizes))
        except (InputError, RuntimeError):  # the part does not fit these sizes, or an own one raises
            continue
    return None


def _sizes(thing: object) -> Iterator[dict[str, Any]]:
    """Sizes of an example that may fit a part: the usual ones, and those that its tensors have."""
    yield {}
    found = [x for x in _tensors(thing) if x.ndim]
    for tokens in dict.fromkeys([TOKENS, *(x.shape[-1] for x in found), *((x.shape[-1] + 1) // 2 for x in found)]):
        for heads in dict.fromkeys([HEADS, 1, *(size for x in found for size in x.shape[:2])]):
            for head_dim in dict.fromkeys([HEAD_DIM, *(x.shape[-1] for x in found)]):
                if 0 < tokens <= 512 and 0 < heads <= 128 and 0 < head_dim <= 512:
                    yield {"n": tokens, "heads": heads, "head_dim": head_dim}


def _tensors(thing: object) -> Iterator[Tensor]:
    """The tensors in a part, and in the parts of a composition."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from _tensors(one)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from _tensors(getattr(thing, field.name, None))


def _example(tokens: int, heads: int, head_dim: int) -> tuple[Float[Tensor, "1 h n d"], Float[Tensor, "1 h n d"]]:
    """Queries and keys of a text of `WORDS` words: a query's score is near 3 with its own word, and about 0 ± 1."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(WORDS, (tokens,), generator=generator)
    size = (3 / head_dim**0.5) ** 0.5
    words = size * torch.randn(WORDS, head_dim, generator=generator)
    noise = 0.3 * size * torch.randn(2, 1, heads, tokens, head_dim, generator=generator)
    return words[text] + noise[0], words[text] + noise[1]


def _whole(tokens: int) -> Region:
    return Region(slice(0, tokens), slice(0, tokens))


def _change(call: Call, bias: Bias | Sequence[Bias]) -> Float[Tensor, "1 h n n"]:
    """By how much the user's biases change the scores; a normalizer may have added others behind them."""
    scores = before = call.factor * call.q @ call.k.mT
    for one in call.biases[: 1 if isinstance(bias, Bias) else len(bias)]:
        scores = one.apply(scores, _whole(call.q.shape[2]))
    return scores - before


def _named(parts: Attention) -> str:
    """The composition as an expression."""
    biases = [parts.bias] if isinstance(parts.bias, Bias) else list(parts.bias or ())
    found = (one for one in (parts.mask, *biases, parts.score, parts.normalizer) if one is not None)
    return " · ".join(map(expression, found)) or "Softmax of the dot products"


def _panel(figure: Drawing, left: float, title: str) -> Axes:
    axes = place(figure, left, 0.75, SIDE, SIDE, title)
    axes.set(xlabel="key", ylabel="query")
    axes.tick_params(labelsize=6.5, colors=MUTED, length=0)
    return axes


def mask_axes(mask: Mask, n_queries: int, n_keys: int, ax: Axes | None, tile: int | None) -> Axes:
    """Draw a mask; see `Mask.plot`."""
    import matplotlib.pyplot as plt

    at_least_one("plot", n_queries=n_queries, n_keys=n_keys, tile=1 if tile is None else tile)
    grid = Grid.of(n_queries, n_keys)
    mask.check(grid)
    if ax is None:
        _, ax = plt.subplots(figsize=(4.2, 4.2 * min(2.0, max(0.5, n_queries / n_keys))), layout="constrained")
    extent = (-0.5, n_keys - 0.5, n_queries - 0.5, -0.5)
    if tile is not None:
        status = mask.classify(Tiles.of(grid, tile, tile), grid)[0, 0].numpy()
        shown: np.ndarray = np.repeat(np.repeat(status, tile, 0), tile, 1)[:n_queries, :n_keys]
        ax.imshow(shown, cmap=ListedColormap(list(SHADES.values())), vmin=0, vmax=2, extent=extent, alpha=0.45)
    share = _shares(mask, grid)
    fade = LinearSegmentedColormap.from_list("visible", [(1, 1, 1, 0), INK])
    ax.imshow(share, cmap=fade, vmin=0, vmax=1, extent=extent, interpolation="nearest")
    title = textwrap.shorten(expression(mask), 48, placeholder=" …")
    ax.set(xlabel="key", ylabel="query")
    ax.set_title(f"{title}\n{1 - share.mean():.0%} of pairs masked", fontsize=9)
    parts = {"may attend": INK, "masked": "white"}
    if tile is not None:
        parts |= {"mixed tile": SHADES[PARTIAL], "visible tile": SHADES[FULL]}
    patches = [Patch(facecolor=colour, edgecolor="0.6", label=name) for name, colour in parts.items()]
    ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=7.5)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    ax.set_aspect("equal" if 0.5 <= n_queries / n_keys <= 2 else "auto")
    ax.tick_params(length=0)
    return ax


def _shares(mask: Mask, grid: Grid) -> np.ndarray:
    """The visible fraction of each cell of the plot (a pair, or a tile of pairs), in linear memory."""
    size = -(-max(grid.n_queries, grid.n_keys) // PAIRS)
    tiles = Tiles.of(grid, size, size)
    out = torch.empty(len(tiles.q_first), len(tiles.k_first))
    for row in range(len(out)):
        rows = slice(row * size, min((row + 1) * size, grid.n_queries))
        visible = mask.visible(Region(rows, slice(0, grid.n_keys)), grid)[0, 0].float()
        out[row] = torch.nn.functional.avg_pool2d(visible[None], size, ceil_mode=True)[0, 0]  # short cells, too
    return out.numpy()
