"""Multi-head latent attention: keys and values of all heads from one short vector for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.attention import Attention
from qkv.errors import InputError, at_least_one, kind_of
from qkv.masks import Mask
from qkv.nn.composition import Composition
from qkv.positions import Rotary
from qkv.scores import Dot

if TYPE_CHECKING:
    from qkv.cache import Cache


class LatentAttention(nn.Module):
    """Multi-head latent attention, MLA (DeepSeek-AI 2024, arXiv:2405.04434, §2.1).

    A token's latent c = norm(x W_a) gives the keys and the values of all heads, c W_k and c W_v. Positions rotate
    further entries of the queries and one further key that all heads share. A cache holds c and that key alone: the
    layer then takes the latents as keys and values of one head (multi-query attention) and applies W_k to the queries
    and W_v to the outputs instead, which is the same function: the *absorbed* form.

    Parameters have the names and layouts of DeepSeek-V3 in Hugging Face, so ``load_state_dict`` takes its weights.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        latent: dimension of the latent c.
        head_dim: dimension of queries and keys without positions, and of values; or a pair of them.
        rotary: rotary positions; ``rotary.dim`` is the dimension of the queries and the key that it rotates.
        q_latent: dimension of a latent for the queries; they are projected directly if None.
        attention: the composition that every head computes; its score is the dot product over √(head_dim + rotary.dim).

    Raises:
        InputError: for sizes below 1, and a composition with a score of its own.

    >>> import torch, qkv
    >>> causal, rotary = qkv.Attention(mask=qkv.masks.Causal()), Rotary(8, interleaved=True)
    >>> layer = LatentAttention(64, heads=4, latent=16, head_dim=16, rotary=rotary, attention=causal)
    >>> x = torch.randn(1, 10, 64)
    >>> cache = qkv.cache.Latent(10)
    >>> with torch.no_grad():
    ...     steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(10)], 1)
    >>> torch.allclose(steps, layer(x), atol=1e-5), cache.nbytes // 40  # numbers for each token
    (True, 24)
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        latent: int,
        head_dim: int | tuple[int, int],
        rotary: Rotary,
        q_latent: int | None = None,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        at_least_one("LatentAttention", d_model=d_model, heads=heads, latent=latent, head_dim=head_dim)
        at_least_one("LatentAttention", v_head_dim=v_head_dim, q_latent=1 if q_latent is None else q_latent)
        attention = Attention() if attention is None else attention
        if attention.score is not None:
            raise InputError(
                f"attention has the score {type(attention.score).__name__}, expected None: latent attention is that of "
                "the dot product"
            )
        self.d_model, self.heads, self.latent, self.rotary = d_model, heads, latent, rotary
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        whole = head_dim + rotary.dim
        self.q_proj = nn.Linear(d_model, heads * whole, bias=False) if q_latent is None else None
        self.q_a_proj = None if q_latent is None else nn.Linear(d_model, q_latent, bias=False)
        self.q_a_layernorm = None if q_latent is None else nn.RMSNorm(q_latent, eps=1e-6)
        self.q_b_proj = None if q_latent is None else nn.Linear(q_latent, heads * whole, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, latent + rotary.dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=1e-6)
        self.kv_b_proj = nn.Linear(latent, heads * (head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_head_dim, d_model, bias=False)
        self.composition = Composition(replace(attention, score=Dot(whole**-0.5)))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        absorbed: bool | None = None,
        return_weights: bool = False,
        return_statistics: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Self-attention over x.

        Args:
            x: the input.
            mask: True where a query may attend; combined with the mask of the composition by AND.
            positions: positions of the tokens, (n,) or (b, n); 0 … n − 1, or those after the cache's, if None.
            cache: latents of earlier tokens, such as `qkv.cache.Latent`; any cache of `qkv.cache` works.
            absorbed: whether attention is over the latents, with one key head; if None, with a cache only, since it
                takes more products for whole texts.
            return_weights: also return the weights (b, h, n, n).
            return_statistics: also return the statistics of the weights, as `qkv.attend`.

        Returns:
            ``out`` (b, n, d_model), or a tuple of it and what was requested.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.d_model:
            raise InputError(f"x is {kind_of(x)}, expected (batch, length, d_model = {self.d_model})")
        absorbed = cache is not None if absorbed is None else absorbed
        q, k, v, w_v = self._heads(x, absorbed=absorbed)
        result = self.composition.of_tokens(
            q, k, v, rotary=self.rotary, positions=positions, cache=cache, mask=mask, return_weights=return_weights,
            return_statistics=return_statistics,
        )  # fmt: skip
        out, *more = result if isinstance(result, tuple) else (result,)
        out = out if w_v is None else out @ w_v
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return (out, *more) if more else out

    def _heads(self, x: Tensor, *, absorbed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, of which `rotary` turns the first entries; and what outputs are multiplied by."""
        if self.q_a_proj is None or self.q_a_layernorm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_turned = q.unflatten(-1, (self.heads, -1)).transpose(1, 2).split((self.head_dim, self.rotary.dim), -1)
        latent, turned = self.kv_a_proj_with_mqa(x)[:, None].split((self.latent, self.rotary.dim), -1)
        latent = self.kv_a_layernorm(latent)
        w_k, w_v = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split((self.head_dim, self.v_head_dim), 1)
        if absorbed:
            k = torch.cat([turned, latent], -1)
            return torch.cat([q_turned, q @ w_k], -1), k, k[..., self.rotary.dim :], w_v.mT
        k = torch.cat([turned.expand(-1, self.heads, -1, -1), latent @ w_k.mT], -1)
        return torch.cat([q_turned, q], -1), k, latent @ w_v.mT, None

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, heads={self.heads}, latent={self.latent}, rotary={self.rotary}"
