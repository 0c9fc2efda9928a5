"""Which source words each target word attends to: the alignment of two sequences, words by words."""

from __future__ import annotations

import re

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.figures.layout import COLOURS, LABELLED_TOKENS, ROOM, Drawing, along, colour_bar, place, titled, token_label
from qkv.figures.style import HAIRLINE, INK, MUTED, percent

MARKUP = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")  # special tokens that a tokenizer does not tell of
AFTER = "(next)"  # what the last query of a text predicts: it is not known
PRINTED = 0.01  # smaller weights are not printed in their cells


def alignment_figure(
    subtitle: str,
    of: str,
    weights: np.ndarray,
    queries: list[str],
    keys: list[str],
    special: frozenset[str] = frozenset(),
) -> Figure:
    """Target words down, source words across, for one text.

    Pieces of a word are one row and one column: the mean over a word's queries of the sum over a word's keys, so rows
    still add up to what they did. Weights are printed where cells have room.

    Args:
        subtitle: what was measured.
        of: whose weights they are, such as "Layer 1, head 2"; empty where there is but one head.
        weights: (queries, keys) of the text.
        queries: names of the rows' tokens.
        keys: names of the columns' tokens.
        special: tokens that are no words.
    """
    special = special | {AFTER} | {token for token in (*queries, *keys) if MARKUP.fullmatch(token)}
    rows, columns = words(queries, special), words(keys, special)
    shown = merged(weights, [len(row) for row in rows], [len(column) for column in columns])
    targets, sources = (["".join(word) for word in side] for side in (rows, columns))
    cell = min(0.46, 8.5 / len(sources), 8.5 / len(targets))
    wide, tall = max(cell * len(sources), 1.6), max(cell * len(targets), 1.0)
    # Names of keys stand above, where reading begins; those of queries on the left.
    left, top = 0.55 + _room(targets), 1.15 + _room(sources)
    figure = Drawing(figsize=(max(left + wide + 1.0, 6.4), top + tall + 0.35))
    said = _sentence(shown, targets, sources, special)
    titled(figure, f"{of}: {said}" if of else said[0].upper() + said[1:], subtitle)
    axes, bar = place(figure, left, top, wide, tall), place(figure, left + wide + 0.12, top, 0.1, tall)
    norm = Normalize(0, max(float(shown.max()), 0.1))
    image = axes.imshow(shown, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
    along(axes, np.array(sources, object), what="source")
    along(axes, np.array(targets, object), vertical=True, what="target")
    axes.tick_params(top=False, bottom=False, labeltop=True, labelbottom=False, length=0, colors=MUTED)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source: key", fontsize=8, color=MUTED, loc="left", labelpad=6)
    axes.set_ylabel("target: query", fontsize=8, color=MUTED, loc="top", labelpad=6)
    for spine in axes.spines.values():
        spine.set_color(HAIRLINE)
    if min(wide / len(sources), tall / len(targets)) >= ROOM:
        for (row, column), weight in np.ndenumerate(shown):
            if weight >= PRINTED:
                axes.text(
                    column, row, f"{100 * weight:.0f}", ha="center", va="center", fontsize=6.2 if cell < 0.4 else 7.5,
                    color="white" if norm(weight) > 0.55 else INK,
                )  # fmt: skip
    colour_bar(bar, image, "%")
    bar.set_title("weight, %", fontsize=7.5, color=MUTED, loc="left", pad=5)
    return figure


def words(tokens: list[str], special: frozenset[str] = frozenset()) -> list[list[str]]:
    """Tokens by the word that they are pieces of, as tokenizers mark it: "##" inside of words, or a space before them.

    Special tokens and punctuation are words of their own; so is every token where a tokenizer marks nothing.

    >>> words([" light", "house", " keeper", ".", "</s>"], frozenset(["</s>"]))
    [[' light', 'house'], [' keeper'], ['.'], ['</s>']]
    >>> words(["[CLS]", "gu", "##lls", "fly"])
    [['[CLS]'], ['gu', 'lls'], ['fly']]
    """
    spaced = any(token[:1] in " ▁Ġ" for token in tokens if token.strip() and token not in special)
    found: list[list[str]] = []
    before = ""
    for token in tokens:
        inside = token.startswith("##") or (spaced and token[:1] not in (" ", "▁", "Ġ", ""))
        ordinary = all(x not in special and any(map(str.isalnum, x)) for x in (token, before))
        if found and inside and ordinary:
            found[-1].append(token.removeprefix("##"))
        else:
            found.append([token])
        before = token
    return found


def merged(weights: np.ndarray, rows: list[int], columns: list[int]) -> np.ndarray:
    """Weights (queries, keys) of words, of so many tokens each: means over queries, sums over keys.

    >>> merged(np.array([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]), [2], [1, 2]).tolist()
    [[0.25, 0.75]]
    """
    starts = [np.cumsum([0, *sizes[:-1]]) for sizes in (rows, columns)]
    summed = np.add.reduceat(np.add.reduceat(weights.astype(np.float64), starts[1], axis=1), starts[0], axis=0)
    result: np.ndarray = summed / np.array(rows)[:, None]
    return result


def _room(names: list[str]) -> float:
    """Inches for the names of words, or for positions where there are too many words to name."""
    return 0.075 * max(len(token_label(name)) for name in names) if len(names) <= LABELLED_TOKENS else 0.3


def _sentence(weights: np.ndarray, targets: list[str], sources: list[str], special: frozenset[str]) -> str:
    """How sharp it is, and the clearest pair of words."""
    sharp = f"a target word puts {percent(float(weights.max(1).mean()))} of its weight on one source word"
    plain = [
        [i for i, word in enumerate(side) if word not in special and any(map(str.isalnum, word))]
        for side in (targets, sources)
    ]
    if not plain[0] or not plain[1]:
        return sharp
    among = weights[np.ix_(*plain)]
    row, column = np.unravel_index(among.argmax(), among.shape)
    pair = targets[plain[0][row]].strip(" ▁Ġ"), sources[plain[1][column]].strip(" ▁Ġ")
    return f"{sharp}; “{pair[0]}” looks at “{pair[1]}” with {percent(float(among.max()))}"
