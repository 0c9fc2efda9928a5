"""The calls of courses: attention that returns ``(output, weights)``, with the argument names that lessons use.

A lesson that defines these four names itself runs with an import from here instead. They compute with `qkv.attend` and
`qkv.nn`, and return the weights of every call, so memory is quadratic in the length: for long texts use those.

**A mask is True, or 1, where a query may attend**, as everywhere in qkv. In some courses True hides a key; their causal
mask is refused. `create_causal_mask` of this module fits all calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.attention import attend
from qkv.compat import renamed, with_blocked
from qkv.engine import inverted
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.nn import FeedForward
from qkv.nn import MultiHeadAttention as Layer
from qkv.nn import TransformerBlock as Block

__all__ = [
    "EinsumAttention",
    "MultiHeadAttention",
    "TransformerBlock",
    "create_causal_mask",
    "scaled_dot_product_attention",
]
__dir__ = __all__.copy


A = TypeVar("A", Tensor, np.ndarray)
INPUTS = {"x": "query", "Q": "query", "K": "key", "V": "value"}


def create_causal_mask(seq_len: int, device: torch.device | str | None = None) -> Bool[Tensor, "n n"]:
    """The causal mask as a tensor: True on and below the diagonal, where a query may attend.

    >>> create_causal_mask(3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()


def scaled_dot_product_attention(
    query: A, key: A, value: A, mask: Mask | Tensor | np.ndarray | None = None, dropout_p: float = 0.0, *,
    blocked: Tensor | np.ndarray | None = None,
) -> tuple[A, A]:  # fmt: skip
    """softmax(Q Kᵀ / √d) V and the weights (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    Args:
        query: (b, h, nq, d), (b, nq, d) or (nq, d); a tensor or a NumPy array, like the other two.
        key: (b, h, nk, d), (b, nk, d) or (nk, d).
        value: (b, h, nk, dv), (b, nk, dv) or (nk, dv).
        mask: True or 1 where a query may attend; broadcasts to the weights. A fully masked query gives zeros.
        dropout_p: probability with which each weight is dropped.
        blocked: a mask in the other convention, True or 1 where a query may *not* attend.

    Returns:
        ``(output, weights)``: (…, nq, dv) and (…, nq, nk).

    Raises:
        InputError: for shapes that do not fit, and for a mask in which True hides.

    >>> x = torch.randn(2, 5, 8)
    >>> output, weights = scaled_dot_product_attention(x, x, x, mask=create_causal_mask(5))
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 5]))
    """
    visible = _visible(mask, blocked)
    if isinstance(visible, Tensor) and visible.ndim == query.ndim == 3:
        visible = visible[:, None]  # a mask for each item, and not for each head
    return attend(query, key, value, mask=visible, dropout_p=dropout_p, return_weights=True)


class MultiHeadAttention(nn.Module):
    """Multi-head attention that returns ``(output, weights)``: `qkv.nn.MultiHeadAttention` in the calls of lessons.

    Args:
        d_model: input and output dimension.
        num_heads: number of heads; `n_heads` is accepted, too.
        dropout: dropout of the weights, in training.
        output_dropout: dropout of the output, in training.
        bias: whether projections have biases.

    >>> mha, x = MultiHeadAttention(d_model=64, num_heads=8), torch.randn(2, 5, 64)
    >>> output, weights = mha(query=x, key=x, value=x)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    def __init__(
        self,
        d_model: int | None = None,
        num_heads: int | None = None,
        dropout: float = 0.0,
        *,
        output_dropout: float = 0.0,
        bias: bool = True,
        **other_names: Any,
    ) -> None:
        super().__init__()
        self.layer = Layer(d_model, num_heads, dropout=dropout, bias=bias, **other_names)
        self.dropout = nn.Dropout(output_dropout)
        self.d_model, self.num_heads, self.head_dim = self.layer.d_model, self.layer.heads, self.layer.head_dim

    @overload
    def forward(
        self, query: Tensor | None = None, key: Tensor | Mask | None = None, value: Tensor | None = None,
        mask: Mask | Tensor | None = None, *, blocked: Tensor | None = None,
        return_attention: Literal[True] = True, **other_names: Tensor,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor | None = None, key: Tensor | Mask | None = None, value: Tensor | None = None,
        mask: Mask | Tensor | None = None, *, blocked: Tensor | None = None,
        return_attention: Literal[False], **other_names: Tensor,
    ) -> tuple[Tensor, None]: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor | None = None, key: Tensor | Mask | None = None, value: Tensor | None = None,
        mask: Mask | Tensor | None = None, *, blocked: Tensor | None = None,
        return_attention: bool = True, **other_names: Tensor,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip
    def forward(
        self,
        query: Float[Tensor, "b nq d_model"] | None = None,
        key: Tensor | Mask | None = None,
        value: Float[Tensor, "b nk d_model"] | None = None,
        mask: Mask | Tensor | None = None,
        *,
        return_attention: bool = True,
        blocked: Tensor | np.ndarray | None = None,
        **other_names: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and weights.

        Args:
            query: input for queries, and also for keys and values if they are None. `x` and `Q` are accepted, too.
            key: input for keys (b, nk, d_model), also called `K`. A tensor with two or four dimensions is the mask, for
                lessons that call ``mha(x, mask)``.
            value: input for values, also called `V`; that for keys if None.
            mask: True or 1 where a query may attend; broadcasts to (b, h, nq, nk).
            return_attention: whether to form the weights.
            blocked: a mask in the other convention, True or 1 where a query may *not* attend.
            **other_names: `x`, `Q`, `K` and `V`; every other name raises an error that says what to pass.

        Returns:
            ``(output, weights)``: (b, nq, d_model), and (b, h, nq, nk) or None.

        Raises:
            InputError: for shapes that do not fit, for unknown names, and for a mask in which True hides.
        """
        if query is None or other_names:
            given = {"query": query, "key": key, "value": value}
            query, key, value = renamed("MultiHeadAttention", other_names, INPUTS, given)
        if mask is None and value is None and not (isinstance(key, Tensor) and key.ndim == 3):
            key, mask = None, key
        if isinstance(key, Mask):
            raise InputError(f"key is {key!r}, expected a tensor (batch, length, d_model); pass a mask as mask=")
        options: dict[str, Any] = {"need_weights": return_attention, "average_attn_weights": False}
        output, weights = self.layer(query, key, value, mask=_visible(mask, blocked), **options)
        return self.dropout(output), weights

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`


class TransformerBlock(nn.Module):
    """A pre-norm layer with GELU that returns ``(x, weights)``: `qkv.nn.TransformerBlock` in the calls of lessons.

    Args:
        d_model: input and output dimension.
        num_heads: number of heads; `n_heads` is accepted, too.
        d_ff: hidden dimension of the feed-forward layer; 4 · d_model if None.
        dropout: dropout before each residual addition, in training.

    >>> block, x = TransformerBlock(64, 8, d_ff=256), torch.randn(2, 5, 64)
    >>> x, weights = block(x, create_causal_mask(5))
    >>> x.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 8, 5, 5]))
    """

    def __init__(
        self,
        d_model: int | None = None,
        num_heads: int | None = None,
        d_ff: int | None = None,
        dropout: float = 0.0,
        **other_names: Any,
    ) -> None:
        super().__init__()
        attention = Layer(d_model, num_heads, **other_names)
        self.block = Block(attention, FeedForward(attention.d_model, d_ff), dropout=dropout)

    def forward(
        self, x: Float[Tensor, "b n d_model"], mask: Mask | Tensor | None = None, *, blocked: Tensor | None = None
    ) -> tuple[Float[Tensor, "b n d_model"], Float[Tensor, "b h n n"]]:
        """One layer: its output and the weights. `mask` is True or 1 where a token may attend, `blocked` where not."""
        return self.block(x, mask=_visible(mask, blocked), return_weights=True)

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`


def _visible(
    mask: Mask | Tensor | np.ndarray | None, blocked: Tensor | np.ndarray | None = None
) -> Mask | Tensor | None:
    """The mask as a mask object or a boolean tensor; a mask of 0 and 1 is visible at 1, and `blocked` at 0."""
    if blocked is not None:
        return with_blocked(mask, _boolean(blocked))  # type: ignore[arg-type]
    if mask is None or isinstance(mask, Mask):
        return mask
    tensor = _boolean(mask)
    if (how := inverted(tensor.cpu())) is not None:
        raise InputError(
            f"mask is {how}, as in courses where True hides a key, but here True means may attend; expected ~mask, "
            "blocked=mask, or create_causal_mask(n) of qkv.course"
        )
    return tensor


def _boolean(mask: Tensor | np.ndarray) -> Tensor:
    """The mask as a boolean tensor.

    >>> _boolean(torch.tensor([[1, 0], [1, 1]]))[0].tolist()
    [True, False]
    """
    tensor = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    if not isinstance(tensor, Tensor):
        raise InputError(f"mask is {type(mask).__name__}, expected a tensor that is True where a query may attend")
    if tensor.dtype != torch.bool:
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            raise InputError(
                f"mask is {tensor.dtype} with other numbers than 0 and 1, expected True or 1 where a query may attend; "
                "numbers to be added to the scores are attn_mask= of qkv.attend"
            )
        tensor = tensor == 1
    return tensor


class EinsumAttention(nn.Module):
    """Multi-head self-attention with every step written as an einsum over named dimensions.

    It materialises the attention weights, so memory is quadratic, and returns them. `Layer` computes the
    same output; `of` copies the parameters of one.

    Dimensions: b batch, q queries, k keys, h heads, e model, d head.

    >>> import torch
    >>> layer = Layer(64, 8)
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
    def of(layer: Layer) -> EinsumAttention:
        """A copy of `layer` in this form; `InputError` unless the layer is plain multi-head attention."""
        attention = layer.composition.attention
        parts = (attention.mask, attention.bias, attention.score, attention.normalizer)
        same = type(layer) is Layer and layer.heads * layer.head_dim == layer.d_model
        if not same or any(part is not None for part in parts):
            raise InputError(
                f"layer is {type(layer).__name__}(d_model={layer.d_model}, heads={layer.heads}, "
                f"head_dim={layer.head_dim}), expected a Layer with head_dim = d_model / heads whose "
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
                f"layer has {', '.join(what for what, has in missing.items() if has)}; expected a Layer "
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
        visible = _visible(mask)
        if visible is not None:
            mask = (
                visible
                if isinstance(visible, Tensor)
                else visible.dense(x.shape[1], x.shape[1], batch=len(x), heads=self.heads)
            )
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # −∞ would give NaN without visible keys
            weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0)
        else:
            weights = scores.softmax(-1)
        return torch.einsum("bhqk,bhkd,hde->bqe", weights, v, self.w_o) + self.b_o, weights
