"""Modules with attention in linear time: feature maps (a recurrence when causal) and Linformer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.attention import Attention
from qkv.errors import InputError, at_least_one
from qkv.features import elu_plus_one
from qkv.linear import LinearState, linear_attend, linformer
from qkv.masks import Causal
from qkv.nn.multi_head import MultiHeadAttention
from qkv.normalizers import Identity
from qkv.scores import Features


class LinearAttention(MultiHeadAttention):
    """Multi-head attention whose weights are φ(q)·φ(k) (Katharopoulos et al. 2020, arXiv:2006.16236).

    A causal layer is a recurrence: `step` takes tokens and the state after all earlier tokens, of constant size.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        kv_heads: key and value heads; `heads` if None.
        features: φ, one of `qkv.features`.
        causal: whether a token attends only to itself and earlier tokens.
        bias: whether projections have biases.

    >>> import torch
    >>> layer = LinearAttention(64, 4)
    >>> x = torch.randn(1, 10, 64)
    >>> first, state = layer.step(x[:, :9])
    >>> last, _ = layer.step(x[:, 9:], state)
    >>> torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        features: Callable[[Tensor], Tensor] = elu_plus_one,
        causal: bool = True,
        bias: bool = True,
    ) -> None:
        mask = Causal() if causal else None
        attention = Attention(mask=mask, score=Features(features), normalizer=Identity(divide="sum"))
        super().__init__(d_model, heads, kv_heads=kv_heads, attention=attention, bias=bias)
        self.causal = causal

    def step(
        self, x: Float[Tensor, "b n d_model"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b n d_model"], LinearState]:
        """The outputs of `forward` for tokens that follow those in `state`, and the state after them."""
        if not self.causal:
            raise InputError(
                "causal is False: later tokens would change the outputs of earlier steps; expected causal=True"
            )
        q, k, v = self._project(x)
        score = self.composition.attention.score
        assert isinstance(score, Features)
        out, state = linear_attend(q, k, v, features=score.map, state=state, return_state=True)
        return self._merged(out, x), state


class LinformerAttention(MultiHeadAttention):
    """Attention to `rank` learned mixtures of the keys (Wang et al. 2020, arXiv:2006.04768, eq. 7).

    Every token attends to the whole sequence of at most `length` tokens; there is no causal form. Shorter sequences use
    the first rows of the projections, which start normal with standard deviation 1/√rank, as in the paper's proof.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        length: largest number of tokens.
        rank: number of mixtures.
        shared: whether keys and values share one projection.
        bias: whether projections of the heads have biases.

    >>> import torch
    >>> LinformerAttention(64, 4, length=100, rank=8)(torch.randn(1, 90, 64)).shape
    torch.Size([1, 90, 64])
    """

    def __init__(
        self, d_model: int, heads: int, *, length: int, rank: int, shared: bool = False, bias: bool = True
    ) -> None:
        super().__init__(d_model, heads, bias=bias)
        at_least_one(length=length, rank=rank)
        self.e = nn.Parameter(torch.empty(length, rank))
        self.f = None if shared else nn.Parameter(torch.empty(length, rank))
        for projection in (self.e, self.f):
            if projection is not None:
                nn.init.normal_(projection, std=1 / math.sqrt(rank))

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b n d_model"], *, lengths: Tensor | None = None
    ) -> Float[Tensor, "b n d_model"]:
        """Every token attends to the mixtures; `lengths` (b,) are the numbers of real tokens, the rest is padding."""
        n = x.shape[1]
        if n > len(self.e):
            raise InputError(f"x has {n} tokens, expected at most length = {len(self.e)}")
        q, k, v = self._project(x)
        out = linformer(q, k, v, self.e[:n], None if self.f is None else self.f[:n], lengths=lengths)
        return self._merged(out, x)
