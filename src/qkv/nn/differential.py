"""Differential attention: the difference of two softmax maps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.attention import Attention
from qkv.errors import InputError, at_least_one, kind_of
from qkv.masks import Mask
from qkv.nn.composition import Composition
from qkv.positions import Rotary

if TYPE_CHECKING:
    from qkv.cache import Cache


class DifferentialAttention(nn.Module):
    """Differential attention (Ye et al. 2025, arXiv:2410.05258, §2.1): head h has the map A₂ₕ − λ A₂ₕ₊₁.

    Two maps of half the head size are subtracted, so that what both put on irrelevant keys cancels; weights may be
    negative, and rows sum to 1 − λ. λ = exp(λq1 · λk1) − exp(λq2 · λk2) + λ_init is one learned number of the layer,
    with λ_init = 0.8 − 0.6 exp(−0.3 layer). Each head's output is RMS-normalised and multiplied by 1 − λ_init.

    Args:
        d_model: input and output dimension, a multiple of 2 · heads.
        heads: heads, each of two maps; queries and keys have d_model / (2 · heads) entries, values twice as many.
        layer: number of the layer from 0, for λ_init.
        attention: the composition that computes each map.
        rotary: rotary positions of queries and keys; none if None.

    Raises:
        InputError: for sizes that do not fit.

    >>> import torch, qkv
    >>> layer = DifferentialAttention(64, heads=4, attention=qkv.Attention(mask=qkv.masks.Causal()))
    >>> out, weights = layer(torch.randn(1, 10, 64), return_weights=True)
    >>> torch.allclose(weights.sum(-1), 1 - layer.factor(), atol=1e-5)
    True
    """

    def __init__(
        self, d_model: int, heads: int, *, layer: int = 0, attention: Attention | None = None,
        rotary: Rotary | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        at_least_one("DifferentialAttention", d_model=d_model, heads=heads)
        if d_model % (2 * heads):
            raise InputError(f"d_model is {d_model}, expected a multiple of 2 · heads = {2 * heads}")
        self.d_model, self.heads, self.rotary = d_model, heads, rotary
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        size = d_model // (2 * heads)
        self.lambdas = nn.Parameter(torch.empty(4, size))
        """λq1, λk1, λq2 and λk2."""
        self.norm = nn.RMSNorm(2 * size, eps=1e-5)
        self.composition = Composition(Attention() if attention is None else attention)
        nn.init.normal_(self.lambdas, std=0.1)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(projection.weight)

    def factor(self) -> Float[Tensor, ""]:
        """Return λ, the share of the second map that is subtracted."""
        first, second = (self.lambdas[::2] * self.lambdas[1::2]).sum(-1).exp()
        return first - second + self.initial

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Self-attention over x.

        Args:
            x: the input.
            mask: True where a query may attend; combined with the mask of the composition by AND.
            positions: positions of the tokens for `rotary`, (n,) or (b, n).
            cache: keys and values of earlier tokens (see `qkv.cache`). Values are stored once for each map.
            return_weights: also return the signed maps A₂ₕ − λ A₂ₕ₊₁, (b, heads, n, n).

        Returns:
            ``out`` (b, n, d_model), or ``(out, weights)``.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.d_model:
            raise InputError(f"x is {kind_of(x)}, expected (batch, length, d_model = {self.d_model})")
        q, k = (  # the first maps of all heads, then their second ones
            part(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 3, 2, 1, 4).flatten(1, 2)
            for part in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).repeat(1, 2, 1, 1)
        result = self.composition.of_tokens(
            q, k, v, rotary=self.rotary, positions=positions, cache=cache, mask=mask, return_weights=return_weights
        )
        out, weights = result if return_weights else (result, None)
        factor = self.factor()
        out = out[:, : self.heads] - factor * out[:, self.heads :]
        out = self.norm(out) * (1 - self.initial)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return out if weights is None else (out, weights[:, : self.heads] - factor * weights[:, self.heads :])

    def extra_repr(self) -> str:
        rotary = "" if self.rotary is None else f", rotary={self.rotary}"
        return f"d_model={self.d_model}, heads={self.heads}{rotary}"
