"""Figure of an alignment: the source words to which each target word attends."""

from __future__ import annotations

import re

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qkv.figures.layout import (
    LABELLED_TOKENS,
    Drawing,
    along,
    colour_bar,
    heat,
    place,
    titled,
    token_label,
    write_cells,
)
from qkv.figures.style import MUTED
from qkv.profiler.data.labels import percent

MARKUP = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")  # special tokens that a tokenizer does not list
AFTER = "(next)"  # the unknown word that the last query of a text predicts
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

    The tokens of a word share one row and one column: the mean over the word's queries of the sum over the word's keys,
    which preserves row sums. Weights are printed in cells that are large enough.

    Args:
        subtitle: model, length and texts, for the second line.
        of: the head or heads of the weights, such as "Layer 1, head 2"; empty for a model with one head.
        weights: (queries, keys) of the text.
        queries: tokens of the rows.
        keys: tokens of the columns.
        special: special tokens, which are not part of words.
    """
    special = special | {AFTER} | {token for token in (*queries, *keys) if MARKUP.fullmatch(token)}
    rows, columns = words(queries, special), words(keys, special)
    shown = merged(weights, [len(row) for row in rows], [len(column) for column in columns])
    targets, sources = (["".join(word) for word in side] for side in (rows, columns))
    cell = min(0.46, 8.5 / len(sources), 8.5 / len(targets))
    wide, tall = max(cell * len(sources), 1.6), max(cell * len(targets), 1.0)
    # Names of keys are above the map, names of queries on its left.
    left, top = 0.55 + _label_inches(targets), 1.15 + _label_inches(sources)
    figure = Drawing(figsize=(max(left + wide + 1.0, 6.4), top + tall + 0.35))
    sentence = _sentence(shown, targets, sources, special)
    titled(figure, f"{of}: {sentence}" if of else sentence[0].upper() + sentence[1:], subtitle)
    axes, bar = place(figure, left, top, wide, tall), place(figure, left + wide + 0.12, top, 0.1, tall)
    norm = Normalize(0, max(float(shown.max()), 0.1))
    image = heat(axes, shown, norm)
    along(axes, np.array(sources, object), what="source")
    along(axes, np.array(targets, object), vertical=True, what="target")
    axes.tick_params(top=False, bottom=False, labeltop=True, labelbottom=False, length=0, colors=MUTED)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source: key", fontsize=8, color=MUTED, loc="left", labelpad=6)
    axes.set_ylabel("target: query", fontsize=8, color=MUTED, loc="top", labelpad=6)
    write_cells(axes, image, lambda weight: f"{100 * weight:.0f}", least=PRINTED)
    colour_bar(bar, image, "%")
    bar.set_title("weight, %", fontsize=7.5, color=MUTED, loc="left", pad=5)
    return figure


def words(tokens: list[str], special: frozenset[str] = frozenset()) -> list[list[str]]:
    """Group tokens into words by the marks of tokenizers: "##" inside words, or a space before words.

    Special tokens and punctuation are separate words. If the tokenizer has no marks, every token is a word.

    >>> words([" light", "house", " keeper", ".", "</s>"], frozenset(["</s>"]))
    [[' light', 'house'], [' keeper'], ['.'], ['</s>']]
    >>> words(["[CLS]", "gu", "##lls", "fly"])
    [['[CLS]'], ['gu', 'lls'], ['fly']]
    """
    spaced = any(token[:1] in " ▁Ġ" for token in tokens if token.strip() and token not in special)
    grouped: list[list[str]] = []
    before = ""
    for token in tokens:
        inside = token.startswith("##") or (spaced and token[:1] not in (" ", "▁", "Ġ", ""))
        ordinary = all(x not in special and any(map(str.isalnum, x)) for x in (token, before))
        if grouped and inside and ordinary:
            grouped[-1].append(token.removeprefix("##"))
        else:
            grouped.append([token])
        before = token
    return grouped


def merged(weights: np.ndarray, rows: list[int], columns: list[int]) -> np.ndarray:
    """Weights (queries, keys) of words: means over queries, sums over keys; `rows`, `columns` are tokens per word.

    >>> merged(np.array([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]), [2], [1, 2]).tolist()
    [[0.25, 0.75]]
    """
    starts = [np.cumsum([0, *sizes[:-1]]) for sizes in (rows, columns)]
    summed = np.add.reduceat(np.add.reduceat(weights.astype(np.float64), starts[1], axis=1), starts[0], axis=0)
    result: np.ndarray = summed / np.array(rows)[:, None]
    return result


def _label_inches(names: list[str]) -> float:
    """Inches for the names of words, or for positions if there are too many words to name."""
    return 0.075 * max(len(token_label(name)) for name in names) if len(names) <= LABELLED_TOKENS else 0.3


def _sentence(weights: np.ndarray, targets: list[str], sources: list[str], special: frozenset[str]) -> str:
    """The title: the mean of the largest weights, and the pair of words with the largest weight."""
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
    return f"{sharp}; “{pair[0]}” attends to “{pair[1]}” with {percent(float(among.max()))}"
