"""Linear maps of many rows, on the faster of torch's two CPU libraries."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

MANY = 64  # rows; with fewer, starting oneDNN costs more than it saves


def project(
    x: Float[Tensor, "*n d"], weight: Float[Tensor, "out d"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*n out"]:
    """x·weightᵀ + bias, as `torch.nn.functional.linear`.

    Torch sends float32 products on CPU to MKL, which is slow on processors that are not Intel's, and convolutions to
    oneDNN, which is not. A linear map of many rows is a convolution with a kernel of one pixel over an image of one
    line whose channels come last; nothing is copied. (`make bench`, "projection", has the ratio on your machine.)

    >>> x, weight = torch.randn(2, 100, 8), torch.randn(5, 8)
    >>> torch.allclose(project(x, weight), torch.nn.functional.linear(x, weight), atol=1e-5)
    True
    """
    if not _suits(x, weight):
        return F.linear(x, weight, bias)
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    out = F.conv2d(image, weight[:, :, None, None], bias)
    return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def _suits(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or not (x.dtype == weight.dtype == torch.float32):
        return False
    return (
        x.device.type == weight.device.type == "cpu"
        and x.numel() >= MANY * x.shape[-1]
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


class Projection(nn.Linear):
    """`torch.nn.Linear`, computed by `project`.

    >>> layer = Projection(8, 5)
    >>> layer(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 5])
    """

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n out"]:
        return project(x, self.weight, self.bias)
