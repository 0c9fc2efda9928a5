"""Shares of a row: weights divided by the sum of their row, so that all normalizers compare.

The sum of a row counts every key, and also a sink logit or a learned key, which is a key with value 0: the rows of a
softmax, of softmax off by one and of entmax sum to 1, and their shares are their weights. Rows of sigmoid, ELU + 1 and
ReLU attention have any sum, and are divided by it. A row that sums to 0 gives no key a share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._engine.call import Call
from qkv._engine.row_state import RowState
from qkv.normalizers import Normalizer, Pointwise
from qkv.statistics.measure import sweep
from qkv.statistics.sums import Statistics

WEIGHTS = ("sink", "self_", "previous", "next_", "received", "prefix_sink_scores", "mass")
"""The fields of `Statistics` that are weights, or sums or means of weights."""


def sums_to_one(normalizer: Normalizer) -> bool:
    """Whether the weights of a row, with that of a sink logit, sum to 1.

    >>> from qkv.normalizers import EluPlusOne, Sigmoid, Softmax
    >>> [sums_to_one(x) for x in (Softmax(sink=0.0), EluPlusOne(divide="sum"), EluPlusOne(), Sigmoid())]
    [True, True, False, False]
    """
    return not isinstance(normalizer, Pointwise) or normalizer.divide == "sum"


def in_shares(call: Call, measured: Statistics, **options: Any) -> Statistics:
    """The statistics `measured` of a call with shares in place of weights, from a second sweep over the scores.

    `row_sum`, `thumbnail` and `own` stay those of the weights. No sweep is needed if the rows sum to one.

    Args:
        call: the attention call.
        measured: its statistics.
        options: `mass`, `first`, `queries` and `prefix_keys`, as in `qkv.measure`.
    """
    if sums_to_one(call.normalizer):
        return measured
    assert measured.row_sum is not None
    total = torch.where(measured.row_sum > 0, measured.row_sum, 1.0)
    shares = sweep(call, RowState(total=total), **options)
    return replace(measured, **{name: getattr(shares, name) for name in WEIGHTS})


def rows_in_shares(weights: Float[Tensor, "*b nq nk"], normalizer: Normalizer) -> Float[Tensor, "*b nq nk"]:
    """A matrix of weights with the rows of `in_shares`."""
    if sums_to_one(normalizer):
        return weights
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
