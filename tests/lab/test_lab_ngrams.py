"""Baselines of language modelling: unigram and bigram losses, by definition and in special cases."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest

from conftest import refused
from qkv_lab.tokens import baselines


def test_losses_are_those_of_the_formulas_token_by_token() -> None:
    generator = np.random.default_rng(0)
    train, texts = generator.integers(0, 5, 200).astype(np.uint16), generator.integers(0, 7, (3, 11))
    single, pairs = Counter(train.tolist()), Counter(pairwise(train.tolist()))
    unigram, bigram = [], []
    for row in texts.tolist():
        for a, b in pairwise(row):
            p = (single[b] + 1) / (200 + 7)
            followers = [pair for pair in pairs if pair[0] == a]
            count = sum(pairs[pair] for pair in followers)
            q = (pairs[a, b] + len(followers) * p) / (count + len(followers)) if followers else p
            unigram.append(-log(p))
            bigram.append(-log(q))
    found = baselines(train, texts, 7)
    assert found.unigram == pytest.approx(np.mean(unigram))
    assert found.bigram == pytest.approx(np.mean(bigram))


def test_both_models_are_distributions() -> None:
    train = np.array([0, 1, 1, 2, 0, 1])
    for before in range(4):
        sums = [np.exp([-getattr(baselines(train, np.array([[before, b]]), 4), kind) for b in range(4)]).sum()
                for kind in ("unigram", "bigram")]  # fmt: skip
        assert sums == pytest.approx([1, 1])


def test_bigram_of_a_deterministic_text_is_near_zero_and_below_the_unigram() -> None:
    train = np.tile([3, 1, 4, 0], 500)
    found = baselines(train, train[None, :40], 5)
    assert found.bigram < 0.01 < found.unigram == pytest.approx(log(4), abs=0.01)


def test_tokens_outside_of_the_vocabulary_are_rejected() -> None:
    with refused("texts"):
        baselines(np.array([0, 1]), np.array([[0, 4]]), 4)
    with refused("train"):
        baselines(np.array([0, 5]), np.array([[0, 1]]), 4)
    with refused("texts", match="at least 2"):
        baselines(np.array([0, 1]), np.array([[0]]), 4)
