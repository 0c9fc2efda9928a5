"""When each word was spoken: the heads of a speech model that follow the text, and the times of its tokens.

As in Whisper (Radford et al. 2022, arXiv:2212.04356, and the code that OpenAI published with it): the weights of some
cross-attention heads on frames of sound, standardised over tokens and smoothed over frames, are averaged, and dynamic
time warping finds the monotone path with the largest sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from qkv.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

SMOOTHED = 7  # frames of the median filter
MOST_HEADS = 10
HEADS_AT_ONCE = 16
LEAST_SCORE = 0.2
"""A head of a lower score does not follow the text; one that attends evenly has 1 / the number of tokens."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """When each token and each word of a text was spoken."""

    tokens: pd.DataFrame
    """A row for each token after the prompt: position, token, word (its number), start and end, in seconds."""
    words: pd.DataFrame
    """A row for each word: word, start, end. A word begins with a space, or after a special token."""
    heads: pd.DataFrame
    """A row for each head of the decoder that attends to sound, the best first: layer, head, score, used.

    The score is the mean over tokens of the share of the weight inside the frames that the head alone would give the
    token: 1 for a head that follows the sound, little for one that attends to a fixed place or evenly.
    """

    def __repr__(self) -> str:
        used = ", ".join(f"L{row.layer} · H{row.head}" for row in self.heads[self.heads["used"]].itertuples())
        return f"Alignment({len(self.words)} words by {used})"


def alignment(
    data: xr.Dataset, special: Sequence[str], heads: Sequence[tuple[int, int]] | None, prompt: int | None,
    seconds: float | None, frame: float,
) -> Alignment:  # fmt: skip
    """`Profile.alignment` documents the arguments; `data` is one text of cross-attention."""
    import pandas as pd

    if "weights" not in data:
        side = int(np.ceil(np.sqrt(data.sizes["query"] * data.sizes["key"])))
        raise InputError(f"profile: it keeps no weights of {data.sizes['key']} frames; profile with map_tokens={side}")
    n = int(data["n_queries"][0])
    frames = int(data["n_keys"][0])
    frames = frames if seconds is None else min(frames, int(np.ceil(seconds / frame)))
    names = [str(name) for name in data["query_token"].values[0, :n]]
    if prompt is None:
        prompt = next((i for i, name in enumerate(names) if name not in special), n)
    if not 0 <= prompt < n:
        raise InputError(f"prompt is {prompt}, expected 0 to {n - 1}, fewer than the {n} tokens of the text")
    if frames < 1:
        raise InputError(f"seconds is {seconds}, expected more than 0")
    weights = np.nan_to_num(data["weights"].values[0, :, :, prompt:n, :frames]).astype(np.float64)
    flat = weights.reshape(-1, *weights.shape[2:])
    at = [(int(layer), int(head)) for layer in data["layer"].values for head in data["head"].values]
    scores = np.concatenate([_scores(part) for part in np.array_split(flat, -(-len(flat) // HEADS_AT_ONCE))])
    if heads is None:
        order = np.argsort(-scores, kind="stable")[:MOST_HEADS]
        used = [int(i) for i in order if scores[i] >= max(LEAST_SCORE, scores[order[0]] / 2)]
        if not used:
            raise InputError(
                f"heads is None, and no head follows the text: the best score is {scores.max():.2f}, expected at least "
                f"{LEAST_SCORE}; profile what the model itself says about this sound, or pass heads"
            )
    else:
        unknown = [one for one in heads if tuple(one) not in at]
        if unknown or not len(heads):
            raise InputError(f"heads is {list(heads)}, expected pairs (layer, head) of this profile, such as {at[0]}")
        used = [at.index((layer, head)) for layer, head in heads]
    start = _starts(_smoothed(flat[used]).mean(0)[None])[0] * frame
    table = pd.DataFrame({"position": np.arange(prompt, n), "token": names[prompt:], "start": start})
    table["end"] = [*start[1:], frames * frame]
    begins = [
        i == 0 or name.startswith(" ") or name in special or names[prompt + i - 1] in special
        for i, name in enumerate(names[prompt:])
    ]
    table.insert(2, "word", np.cumsum(begins) - 1)
    spoken = table[~table["token"].isin(special)]
    words = spoken.groupby("word").agg({"token": "".join, "start": "first", "end": "last"})
    words = words.rename(columns={"token": "word"}).reset_index(drop=True).assign(word=lambda x: x["word"].str.strip())
    order = np.argsort(-scores, kind="stable")
    of_heads = pd.DataFrame([(*at[i], scores[i], i in used) for i in order], columns=["layer", "head", "score", "used"])
    return Alignment(table, words, of_heads)


def _smoothed(weights: Float[np.ndarray, "h n frames"]) -> Float[np.ndarray, "h n frames"]:
    """Weights standardised over tokens, then the median over `SMOOTHED` frames."""
    deviation = weights.std(1, keepdims=True)
    standard = (weights - weights.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1)
    side = SMOOTHED // 2
    if standard.shape[2] <= side:
        return standard
    padded = np.pad(standard, ((0, 0), (0, 0), (side, side)), mode="reflect")
    found: np.ndarray = np.median(np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED, axis=2), axis=-1)
    return found


def _scores(weights: Float[np.ndarray, "h n frames"]) -> Float[np.ndarray, " h"]:
    """The mean over tokens of the share of the weight on the frames that the head's own path gives the token."""
    starts = _starts(_smoothed(weights))
    frames = np.arange(weights.shape[2])
    stops = np.concatenate([starts[:, 1:], np.full((len(starts), 1), weights.shape[2])], 1)
    own = (frames >= starts[..., None]) & (frames < np.maximum(stops, starts + 1)[..., None])
    total = weights.sum(-1)
    inside = np.where(own, weights, 0).sum(-1)
    return np.asarray((inside / np.where(total > 0, total, 1)).mean(1))


def _starts(matrix: Float[np.ndarray, "h n frames"]) -> Int[np.ndarray, "h n"]:
    """The first frame of each token on the monotone path with the largest sum.

    Dynamic time warping (Sakoe and Chiba 1978): a path begins at the first token and frame, ends at the last, and a
    step goes to the next token, the next frame, or both. All cells of an antidiagonal are computed together.
    """
    heads, n, frames = matrix.shape
    # rounded to float32 and with ties broken like transformers, so that equal weights give equal paths
    cost = np.full((heads, n + 1, frames + 1), np.inf, np.float32)
    step = np.zeros((heads, n + 1, frames + 1), np.int8)
    step[:, 0, :], step[:, :, 0] = 2, 1
    cost[:, 0, 0] = 0
    for total in range(2, n + frames + 1):
        i = np.arange(max(1, total - frames), min(n, total - 1) + 1)
        j = total - i
        both, token, sound = cost[:, i - 1, j - 1], cost[:, i - 1, j], cost[:, i, j - 1]
        is_both, is_token = (both < token) & (both < sound), (token < both) & (token < sound)
        step[:, i, j] = np.where(is_both, 0, np.where(is_token, 1, 2))
        cost[:, i, j] = np.where(is_both, both, np.where(is_token, token, sound)) - matrix[:, i - 1, j - 1]
    starts = np.zeros((heads, n), int)
    for head in range(heads):
        i, j = n, frames
        while i > 0 and j > 0:
            starts[head, i - 1] = j - 1  # at last the first frame
            kind = step[head, i, j]
            i, j = i - (kind != 2), j - (kind != 1)
    return starts
