"""Layers of linear attention whose state decays, or is written by the delta rule."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache import Cache, Recurrent
from qkv.engine import as_mask
from qkv.errors import InputError, at_least_one, kind_of, one_of
from qkv.linear import linear_attend
from qkv.masks import Causal, Grid, Mask
from qkv.positions import Rotary

EPSILON = 1e-6  # of the lengths of queries and keys, and of the norm


class RecurrentAttention(nn.Module):
    """Causal linear attention with decay, the delta rule or both, in several heads: the layer around `linear_attend`.

    | decay | delta | the layer of |
    |---|---|---|
    | ``"head"`` | no | RetNet (Sun et al. 2023, arXiv:2307.08621) |
    | ``"feature"`` | no | GLA (Yang et al. 2023, arXiv:2312.06635) |
    | None | yes | DeltaNet (Yang et al. 2024, arXiv:2406.06484) |
    | ``"token"`` | yes | Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) |
    | ``"feature"`` | yes | Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) |

    The outputs of a head are RMS-normalised and multiplied by a gate of the token, silu(x W). With the delta rule,
    queries, keys and values pass a convolution over the last 4 tokens and silu, queries and keys then get length 1, and
    the rate β is σ(x W). Decay is −exp(A) softplus(x W + b), or log(1 − 2^(−5 − head)) for each ``"head"``.

    With the delta rule and decay of each token, the parameters have the names of Qwen3.5's layers in Hugging Face.

    Args:
        d_model: input and output dimension.
        heads: heads.
        head_dim: dimension of queries and keys, and of values, or a pair; d_model / heads if None.
        decay: whether the state decays: None, or one factor for each head, each token, or each token and feature.
        delta: whether the delta rule writes the state.
        gate: the function of the output's gate, ``"silu"`` or, as in Kimi Linear, ``"sigmoid"``.
        rotary: rotary positions of queries and keys; none if None.

    Raises:
        InputError: for sizes that do not fit.

    >>> import torch, qkv
    >>> layer, x, state = RecurrentAttention(64, heads=4), torch.randn(1, 10, 64), qkv.cache.Recurrent()
    >>> with torch.no_grad():
    ...     steps = torch.cat([layer(x[:, i : i + 1], cache=state) for i in range(10)], 1)
    >>> torch.allclose(steps, layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        head_dim: int | tuple[int, int] | None = None,
        decay: Literal["head", "token", "feature"] | None = "token",
        delta: bool = True,
        gate: Literal["silu", "sigmoid"] = "silu",
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        at_least_one("RecurrentAttention", d_model=d_model, heads=heads)
        one_of("decay", decay, (None, "head", "token", "feature"))
        one_of("gate", gate, ("silu", "sigmoid"))
        if head_dim is None and d_model % heads:
            raise InputError(f"d_model is {d_model}, expected a multiple of heads = {heads} (or pass head_dim)")
        head_dim = d_model // heads if head_dim is None else head_dim
        head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        at_least_one("RecurrentAttention", head_dim=head_dim, v_head_dim=v_head_dim)
        if rotary is not None and rotary.dim > head_dim:
            raise InputError(f"rotary rotates {rotary.dim} dimensions, but heads have {head_dim}")
        self.d_model, self.heads, self.head_dim, self.v_head_dim = d_model, heads, head_dim, v_head_dim
        self.decay, self.delta, self.gate, self.rotary = decay, delta, gate, rotary
        self.widths = heads * head_dim, heads * head_dim, heads * v_head_dim  # of queries, keys, values
        self.in_proj_qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.in_proj_z = nn.Linear(d_model, heads * v_head_dim, bias=False)
        decays = {"token": heads, "feature": heads * head_dim}.get(decay or "", 0)
        self.in_proj_a = nn.Linear(d_model, decays, bias=False) if decays else None
        self.A_log = nn.Parameter(torch.empty(heads)) if decays else None
        self.dt_bias = nn.Parameter(torch.empty(decays)) if decays else None
        self.in_proj_b = nn.Linear(d_model, heads, bias=False) if delta else None
        channels = sum(self.widths)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, bias=False) if delta else None
        self.norm = nn.RMSNorm(v_head_dim, eps=EPSILON)
        self.out_proj = nn.Linear(heads * v_head_dim, d_model, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        if self.A_log is not None and self.dt_bias is not None:  # as Mamba-2: steps from 0.001 to 0.1, rates 1 to 16
            nn.init.uniform_(self.A_log, 1, 16)
            nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1))
            with torch.no_grad():
                self.A_log.log_()
                self.dt_bias.copy_(self.dt_bias.exp().expm1().log())  # the inverse of softplus

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Self-attention over x; each token reads itself and earlier ones.

        Args:
            x: the input.
            mask: True for keys that count, such as `qkv.masks.Padding`; `Causal` changes nothing.
            positions: positions of the tokens for `rotary`, (n,) or (b, n).
            cache: the state after earlier tokens, a `qkv.cache.Recurrent`.
            return_weights: also return the hidden map: the weights (b, heads, n, n) of the values in the output before
                its norm and gate. They have signs, and rows have no fixed sum.

        Returns:
            ``out`` (b, n, d_model), or ``(out, weights)``.

        Raises:
            InputError: for another mask or cache.
        """
        if cache is not None and not isinstance(cache, Recurrent):
            raise InputError(f"cache is {cache!r}, expected a qkv.cache.Recurrent: this layer keeps a state, not keys")
        if cache is not None and return_weights:
            raise InputError("return_weights is True with a cache, which returns the output alone; expected False")
        q, k, v, gates, tail = self.heads_of(x, mask, positions, cache)
        rule: dict[str, Any] = {"features": _same, "normalize": False, **gates}
        out, state = linear_attend(q, k, v, state=None if cache is None else cache.state, return_state=True, **rule)
        if cache is not None:
            cache.update(state, tail, x.shape[1])
        gate = (F.silu if self.gate == "silu" else torch.sigmoid)(self.in_proj_z(x))
        merged = (self.norm(out.transpose(1, 2)) * gate.unflatten(-1, (self.heads, -1))).flatten(2)
        result: Tensor = self.out_proj(merged)
        if not return_weights:
            return result
        unit = torch.eye(x.shape[1], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)
        return result, linear_attend(q, k, unit, **rule)

    def heads_of(
        self,
        x: Float[Tensor, "b n d_model"],
        mask: Mask | Bool[Tensor, "..."] | None = None,
        positions: Int[Tensor, "..."] | None = None,
        cache: Recurrent | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None], Tensor | None]:
        """Queries, keys and values of the heads, the decay and rate of each token, and the convolution's last inputs.

        The arguments are those of `forward`.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.d_model:
            raise InputError(f"x is {kind_of(x)}, expected (batch, length, d_model = {self.d_model})")
        seen = 0 if cache is None else cache.seen
        if (real := self._real(as_mask(mask), x, seen)) is not None:
            x = x.masked_fill(~real[..., None], 0)  # then its key and value are 0, too
        mixed = self.in_proj_qkv(x)
        tail = None
        if self.conv1d is not None:
            before = mixed.new_zeros(len(x), 3, mixed.shape[2]) if cache is None or cache.tail is None else cache.tail
            mixed = torch.cat([before, mixed], 1)
            tail, mixed = mixed[:, -3:], F.silu(self.conv1d(mixed.mT).mT)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in mixed.split(self.widths, -1))
        if self.delta:
            q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + EPSILON) for part in (q, k))
        if self.rotary is not None:
            places = torch.arange(seen, seen + x.shape[1], device=x.device) if positions is None else positions
            q, k = self.rotary(q, places), self.rotary(k, places)
        return q * self.head_dim**-0.5, k, v, {"decay": self._decay(x), "beta": self._beta(x)}, tail

    def _decay(self, x: Tensor) -> Tensor | None:
        """Logarithms of the factors by which the state decays."""
        if self.decay == "head":
            return torch.log1p(-(2.0 ** (-5 - torch.arange(self.heads, dtype=torch.float64, device=x.device)))).to(x)
        if self.in_proj_a is None or self.A_log is None or self.dt_bias is None:
            return None
        dtype = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(self.in_proj_a(x).to(dtype) + self.dt_bias)
        steps = steps.unflatten(-1, (self.heads, -1)).transpose(1, 2) * -self.A_log.to(dtype).exp()[:, None, None]
        return steps if self.decay == "feature" else steps[..., 0]

    def _beta(self, x: Tensor) -> Tensor | None:
        """Rates of the delta rule."""
        return None if self.in_proj_b is None else torch.sigmoid(self.in_proj_b(x)).transpose(1, 2)

    def _real(self, mask: Mask | None, x: Tensor, seen: int) -> Bool[Tensor, "b n"] | None:
        """Which tokens of x no padding masks; None for all."""
        grid = Grid.of(x.shape[1], seen + x.shape[1], len(x), self.heads, x.device)
        found: Tensor | None = None
        for part in () if mask is None else mask.factors():
            part.check(grid)
            keys = part.key_mask(grid)
            if keys is not None:
                found = keys if found is None else found & keys
            elif not isinstance(part, Causal):
                raise InputError(f"mask has the part {type(part).__name__}, expected the padding of keys, or Causal()")
        return None if found is None else found[:, seen:].expand(len(x), -1)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, heads={self.heads}, decay={self.decay!r}, delta={self.delta}"


def _same(x: Tensor) -> Tensor:
    return x
