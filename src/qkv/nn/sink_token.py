"""Learned sink tokens (registers) that are prepended to every sequence."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import at_least_one


class SinkToken(nn.Module):
    """`count` learned vectors prepended to every sequence (Xiao et al. 2024, arXiv:2309.17453, §3.3; the registers of
    Darcet et al. 2023, arXiv:2309.16588).

    Unlike a sink logit, they have values and are also queries. `strip` removes them again.

    >>> import torch
    >>> sink = SinkToken(64)
    >>> x = torch.randn(2, 10, 64)
    >>> sink(x).shape, torch.equal(sink.strip(sink(x)), x)
    (torch.Size([2, 11, 64]), True)
    """

    def __init__(self, d_model: int, count: int = 1) -> None:
        super().__init__()
        at_least_one(d_model=d_model, count=count)
        self.tokens = nn.Parameter(torch.empty(count, d_model))
        nn.init.normal_(self.tokens, std=0.02)

    def forward(self, x: Float[Tensor, "b n d_model"]) -> Float[Tensor, "b longer d_model"]:
        """The sink tokens followed by x."""
        return torch.cat([self.tokens.to(x).expand(len(x), -1, -1), x], 1)

    def strip(self, x: Float[Tensor, "b longer d"]) -> Float[Tensor, "b n d"]:
        """The sequence without the sink tokens."""
        return x[:, len(self.tokens) :]
