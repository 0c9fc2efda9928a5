"""The position-wise feed-forward layer of a Transformer."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import InputError, at_least_one
from qkv.nn.projection import Projection

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
        if activation != "swiglu" and activation not in ACTIVATIONS:
            expected = ", ".join(map(repr, (*ACTIVATIONS, "swiglu")))
            raise InputError(f"activation is {activation!r}, expected one of {expected}")
        self.gated = activation == "swiglu"
        if d_hidden is None:
            d_hidden = 8 * d_model // 3 if self.gated else 4 * d_model
        at_least_one(d_model=d_model, d_hidden=d_hidden)
        self.activation = activation
        self.up = Projection(d_model, 2 * d_hidden if self.gated else d_hidden, bias=bias)
        self.down = Projection(d_hidden, d_model, bias=bias)
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
