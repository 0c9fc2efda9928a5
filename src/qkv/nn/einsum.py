"""Multi-head attention as five einsums: a readable reference for `MultiHeadAttention`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.nn.multi_head import MultiHeadAttention


class EinsumAttention(nn.Module):
    """Multi-head self-attention with every step written as an einsum over named dimensions.

    It materialises the attention weights, so memory is quadratic, and returns them. `MultiHeadAttention` computes the
    same output; `of` copies the parameters of one.

    Dimensions: b batch, q queries, k keys, h heads, e model, d head.

    >>> import torch
    >>> layer = MultiHeadAttention(64, 8)
    >>> x = torch.randn(2, 10, 64)
    >>> torch.allclose(EinsumAttention.of(layer)(x)[0], layer(x), atol=1e-5)
    True
    """

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise InputError(f"d_model is {d_model}, expected a multiple of heads = {heads}")
        d, self.heads = d_model // heads, heads
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.empty(heads, d_model, d)) for _ in range(3))
        self.b_q, self.b_k, self.b_v = (nn.Parameter(torch.zeros(heads, d)) for _ in range(3))
        self.w_o, self.b_o = nn.Parameter(torch.empty(heads, d, d_model)), nn.Parameter(torch.zeros(d_model))
        for weight in (self.w_q, self.w_k, self.w_v, self.w_o):
            nn.init.normal_(weight, std=d_model**-0.5)

    @staticmethod
    def of(layer: MultiHeadAttention) -> EinsumAttention:
        """A copy of `layer` in this form; `InputError` unless the layer is plain multi-head attention."""
        attention = layer.composition.attention
        parts = (attention.mask, attention.bias, attention.score, attention.normalizer)
        same = type(layer) is MultiHeadAttention and layer.heads * layer.head_dim == layer.d_model
        if not same or any(part is not None for part in parts):
            raise InputError(
                f"layer is {type(layer).__name__}(d_model={layer.d_model}, heads={layer.heads}, "
                f"head_dim={layer.head_dim}), expected a MultiHeadAttention with head_dim = d_model / heads whose "
                "composition is Attention()"
            )
        missing = {
            "no fused projection": not layer.fused,
            "grouped heads": layer.kv_heads != layer.heads,
            "a gate": layer.gate is not None,
            "norms of queries and keys": layer.q_norm is not None,
            "rotary positions": layer.rotary is not None,
            f"v_head_dim={layer.v_head_dim}": layer.v_head_dim != layer.head_dim,
            "no biases": layer.fused and layer.in_proj.bias is None,
        }
        if any(missing.values()):
            raise InputError(
                f"layer has {', '.join(what for what, has in missing.items() if has)}; expected a MultiHeadAttention "
                "with its default settings, which is all that EinsumAttention can hold"
            )
        twin = EinsumAttention(layer.heads * layer.head_dim, layer.heads).to(layer.in_proj.weight)
        split = (layer.heads, layer.head_dim)
        with torch.no_grad():
            for to, part in zip((twin.w_q, twin.w_k, twin.w_v), layer.in_proj.weight.chunk(3), strict=True):
                to.copy_(part.unflatten(0, split).transpose(1, 2))
            for to, part in zip((twin.b_q, twin.b_k, twin.b_v), layer.in_proj.bias.chunk(3), strict=True):
                to.copy_(part.unflatten(0, split))
            twin.w_o.copy_(layer.out_proj.weight.T.unflatten(0, split))
            twin.b_o.copy_(layer.out_proj.bias)
        return twin

    def forward(
        self, x: Float[Tensor, "b n e"], mask: Bool[Tensor, "..."] | None = None
    ) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b h n n"]]:
        """Output and weights; mask True where a query may attend. Without visible keys the output is the bias b_o."""
        q = torch.einsum("bqe,hed->bhqd", x, self.w_q) + self.b_q[:, None]
        k = torch.einsum("bke,hed->bhkd", x, self.w_k) + self.b_k[:, None]
        v = torch.einsum("bke,hed->bhkd", x, self.w_v) + self.b_v[:, None]
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # −∞ would give NaN without visible keys
            weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
        else:
            weights = scores.softmax(-1)
        return torch.einsum("bhqk,bhkd,hde->bqe", weights, v, self.w_o) + self.b_o, weights
