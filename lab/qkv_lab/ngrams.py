"""Unigram and bigram language models, the baselines that a language model of the lab should beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Integer

from qkv.errors import InputError


@dataclass(frozen=True)
class Baselines:
    """Mean cross-entropies of held-out tokens, in nats per token."""

    unigram: float
    """By the frequency of each token in the training text, with add-one smoothing."""
    bigram: float
    """By the token before, interpolated with the unigram by Witten and Bell's weights."""


def baselines(
    train: Integer[np.ndarray, " tokens"], texts: Int[np.ndarray, "texts width"], vocab_size: int
) -> Baselines:
    """The losses of a unigram and a bigram model on all tokens of some texts but the first of each.

    The unigram has add-one smoothing: P(b) = (c(b) + 1) / (tokens + vocab_size). The bigram is interpolated with it
    (Witten & Bell 1991): P(b | a) = (c(a, b) + t(a) · P(b)) / (c(a) + t(a)), where t(a) is the number of different
    tokens that follow a. After a token that the training text lacks it is the unigram.

    Args:
        train: the training text.
        texts: the texts to predict; the first token of each is context only.
        vocab_size: the number of different tokens.

    Raises:
        InputError: for tokens outside of the vocabulary, or texts of fewer than 2 tokens.

    >>> train = np.array([0, 1, 0, 1, 0, 2])
    >>> found = baselines(train, np.array([[0, 1, 0]]), vocab_size=4)
    >>> round(found.unigram, 3), round(found.bigram, 3)
    (1.06, 0.439)
    """
    if texts.ndim != 2 or texts.shape[1] < 2:
        raise InputError(f"texts has shape {texts.shape}, expected (texts, width) with at least 2 tokens in each")
    for name, ids in (("train", train), ("texts", texts)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise InputError(f"{name} has tokens {ids.min()} to {ids.max()}, expected 0 to {vocab_size - 1}")
    before, after = (x.ravel().astype(np.int64) for x in (texts[:, :-1], texts[:, 1:]))
    unigram = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)
    own = unigram[after]
    return Baselines(float(-np.log(own).mean()), float(-np.log(_bigram(train, before, after, own, vocab_size)).mean()))


def _bigram(
    train: Integer[np.ndarray, " tokens"],
    before: Int[np.ndarray, " n"],
    after: Int[np.ndarray, " n"],
    unigram: Float[np.ndarray, " n"],
    vocab_size: int,
) -> Float[np.ndarray, " n"]:
    """P(after | before) of each pair, given P(after). Only pairs that occur are stored: vocabularies may be large."""
    pairs, counts = np.unique(train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True)
    contexts = pairs // vocab_size
    total = np.bincount(contexts, counts, minlength=vocab_size)
    types = np.bincount(contexts, minlength=vocab_size)
    wanted = before * vocab_size + after
    at = np.minimum(np.searchsorted(pairs, wanted), max(len(pairs) - 1, 0))
    seen = np.where(pairs[at] == wanted, counts[at], 0) if len(pairs) else np.zeros(len(wanted))
    evidence = total[before] + types[before]
    mixed = (seen + types[before] * unigram) / np.maximum(evidence, 1)
    return np.where(evidence > 0, mixed, unigram)
