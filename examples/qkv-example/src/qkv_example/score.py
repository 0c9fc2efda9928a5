"""A score that compares a query and a key by their distance."""

import torch
from torch import Tensor, nn

import qkv


class Gaussian(qkv.scores.Pairwise):
    """−|q − k|² / width, with a learned width."""

    def __init__(self) -> None:
        self.width = nn.Parameter(torch.tensor(8.0))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / self.width
