"""Transformer blocks and their feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.cache import Cache
from qkv.compat import with_blocked
from qkv.errors import InputError, at_least_one, one_of
from qkv.masks import Mask
from qkv.nn.multi_head import KeysValues, MultiHeadAttention

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}


class FeedForward(nn.Module):
    """Two linear maps with a nonlinearity between (Vaswani et al. 2017, arXiv:1706.03762, eq. 2).

    ``"swiglu"`` has three: (silu(x W₁) ∘ x W₂) W₃ (Shazeer 2020, arXiv:2002.05202, eq. 6); W₁ and W₂ are stored as one
    matrix, the gate's half first. ``"gelu_tanh"`` is GELU by its tanh formula, as in GPT-2 (Hendrycks & Gimpel 2016,
    arXiv:1606.08415). Weights start Xavier-uniform, biases at 0.

    Args:
        d_model: input and output dimension.
        d_hidden: hidden dimension; if None 4 · d_model, or 8/3 · d_model for ``"swiglu"``, with the same number of
            parameters.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"swiglu"``.
        bias: whether the maps have biases.

    >>> import torch
    >>> FeedForward(64)(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    def __init__(
        self, d_model: int, d_hidden: int | None = None, *, activation: Activation = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        one_of("activation", activation, (*ACTIVATIONS, "swiglu"))
        self.gated = activation == "swiglu"
        if d_hidden is None:
            d_hidden = 8 * d_model // 3 if self.gated else 4 * d_model
        at_least_one(d_model=d_model, d_hidden=d_hidden)
        self.activation = activation
        self.up = nn.Linear(d_model, 2 * d_hidden if self.gated else d_hidden, bias=bias)
        self.down = nn.Linear(d_hidden, d_model, bias=bias)
        for part in (*self.up.weight.chunk(2 if self.gated else 1), self.down.weight):
            nn.init.xavier_uniform_(part)
        for layer in (self.up, self.down):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        hidden: Tensor = self.up(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        out: Tensor = self.down(hidden)
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def make_norm(kind: str, d_model: int, eps: float, *, bias: bool = True) -> nn.Module:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450) or RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) by name."""
    one_of("norm", kind, ("layernorm", "rmsnorm"))
    return nn.LayerNorm(d_model, eps=eps, bias=bias) if kind == "layernorm" else nn.RMSNorm(d_model, eps=eps)


class TransformerBlock(nn.Module):
    """Self-attention, optional cross-attention, and a feed-forward layer, each with a residual connection.

    Pre-norm: x + f(norm(x)) (Xiong et al. 2020, arXiv:2002.04745). Post-norm: norm(x + f(x)), as in Vaswani et al.
    2017 (arXiv:1706.03762, §3.1). The caller passes the modules.

    Args:
        attention: the self-attention.
        feed_forward: any module from (b, n, d_model) to the same shape.
        cross: attention to a memory, as in the decoder of an encoder-decoder.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        place: ``"pre"`` or ``"post"``.
        eps: epsilon of the norms.
        norm_bias: whether layer norms have biases.
        dropout: dropout probability, in training, before each residual addition.

    >>> import torch, qkv
    >>> from qkv.nn import FeedForward, MultiHeadAttention, TransformerBlock
    >>> block = TransformerBlock(MultiHeadAttention(64, 4), FeedForward(64))
    >>> block(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        cross: MultiHeadAttention | None = None,
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        place: Literal["pre", "post"] = "pre",
        eps: float = 1e-5,
        norm_bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        one_of("place", place, ("pre", "post"))
        if cross is not None and cross.d_model != attention.d_model:
            raise InputError(f"cross has d_model {cross.d_model}, expected {attention.d_model} as the self-attention")

        def norms() -> nn.Module:
            return make_norm(norm, attention.d_model, eps, bias=norm_bias)

        self.place = place
        self.attention_norm, self.attention = norms(), attention
        self.cross_norm = None if cross is None else norms()
        self.cross = cross
        self.feed_forward_norm, self.feed_forward = norms(), feed_forward
        self.dropout = dropout

    @overload
    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, keys_values: KeysValues | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, blocked: Bool[Tensor, "..."] | None = None,
        memory_mask: Mask | Bool[Tensor, "..."] | None = None,
        is_causal: bool = False, positions: Int[Tensor, "..."] | None = None, cache: Cache | None = None,
        return_weights: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, keys_values: KeysValues | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, blocked: Bool[Tensor, "..."] | None = None,
        memory_mask: Mask | Bool[Tensor, "..."] | None = None,
        is_causal: bool = False, positions: Int[Tensor, "..."] | None = None, cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        memory: Float[Tensor, "b m d_context"] | None = None,
        *,
        keys_values: KeysValues | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        blocked: Bool[Tensor, "..."] | None = None,
        memory_mask: Mask | Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        positions: Int[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """One layer.

        Args:
            x: the tokens.
            memory: the sequence to which `cross` attends.
            keys_values: the result of ``cross.keys_values(memory)``, instead of the memory.
            mask: True where a token may attend to a token; combined with the mask of the composition by AND.
            blocked: a mask in the other convention, True where a token may *not* attend to a token.
            memory_mask: as `mask`, for the memory.
            is_causal: mask later tokens, too.
            positions: positions of the tokens, for rotary positions.
            cache: keys and values of earlier tokens.
            return_weights: also return the weights of every head; memory is then quadratic in the length. They are
                differentiable, and include dropout in training.

        Returns:
            ``out`` (b, n, d_model); or ``(out, weights)`` with weights (b, h, n, n), which a block with
            cross-attention follows by those on the memory: ``(out, weights, cross_weights)``, (b, h, n, m).

        Raises:
            InputError: for a memory without cross-attention, or cross-attention without a memory.

        >>> import torch
        >>> from qkv.nn import FeedForward, MultiHeadAttention
        >>> block = TransformerBlock(MultiHeadAttention(64, 4), FeedForward(64), cross=MultiHeadAttention(64, 4))
        >>> out, weights, cross_weights = block(torch.randn(1, 10, 64), torch.randn(1, 7, 64), return_weights=True)
        >>> weights.shape, cross_weights.shape
        (torch.Size([1, 4, 10, 10]), torch.Size([1, 4, 10, 7]))
        """
        if self.cross is None and (memory is not None or keys_values is not None):
            argument = "memory" if memory is not None else "keys_values"
            raise InputError(f"{argument} is passed, but this block has no cross-attention; expected None")
        if self.cross is not None and memory is None and keys_values is None:
            raise InputError("memory is None, but this block has cross-attention; expected memory or keys_values")

        weights: list[Tensor] = []
        requests: dict[str, Any] = {"return_weights": True} if return_weights else {}
        own = {"mask": with_blocked(mask, blocked), "positions": positions, "cache": cache, **requests}
        if is_causal:
            own["is_causal"] = True
        x = self._residual(x, self.attention_norm, self.attention, weights, **own)
        if self.cross is not None and self.cross_norm is not None:
            of_memory = {"context": memory, "keys_values": keys_values, "mask": memory_mask}
            x = self._residual(x, self.cross_norm, self.cross, weights, **of_memory, **requests)
        x = self._residual(x, self.feed_forward_norm, self.feed_forward, weights)
        return (x, *weights) if return_weights else x

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def _residual(self, x: Tensor, norm: nn.Module, layer: nn.Module, weights: list[Tensor], **options: Any) -> Tensor:
        """A layer with its norm and residual connection; the weights of an attention are appended to `weights`."""
        output = layer(norm(x) if self.place == "pre" else x, **options)
        if "return_weights" in options:
            output, of_layer = output
            weights.append(of_layer)
        if self.training and self.dropout:
            output = F.dropout(output, self.dropout)
        x = x + output
        return x if self.place == "pre" else norm(x)


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
