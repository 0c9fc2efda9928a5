"""Linear maps, on the faster of the ways torch has for them on CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

MANY = 64  # rows; with fewer, starting oneDNN costs more than it saves
LARGE = 2**15  # weights; with fewer, one thread is as fast as several


def project(
    x: Float[Tensor, "*n d"], weight: Float[Tensor, "out d"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*n out"]:
    """x·weightᵀ + bias, as `torch.nn.functional.linear`.

    Torch sends float32 products on CPU to MKL, which is slow on processors that are not Intel's, and runs the product
    with one row, of which decoding is made, in one thread. So many rows go to oneDNN, as a convolution with a kernel of
    one pixel over an image of one line whose channels come last; and one row goes as a batch of as many products as
    there are threads, each with its share of the weights. Nothing is copied. (``python -m benchmarks projection`` has
    the ratios on your machine.)

    >>> x, weight = torch.randn(2, 100, 8), torch.randn(5, 8)
    >>> torch.allclose(project(x, weight), torch.nn.functional.linear(x, weight), atol=1e-5)
    True
    """
    rows = x.numel() // x.shape[-1]
    if 1 < rows < MANY or weight.numel() < LARGE or not _suits(x, weight):
        return F.linear(x, weight, bias)
    if rows > 1:
        image = x.reshape(1, 1, rows, -1).permute(0, 3, 1, 2)
        out = F.conv2d(image, weight[:, :, None, None], bias)
        return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))
    threads = torch.get_num_threads()
    shared = len(weight) // threads * threads
    column = x.reshape(1, -1, 1).expand(threads, -1, -1)
    row = torch.bmm(weight[:shared].view(threads, -1, x.shape[-1]), column).view(-1)
    if shared < len(weight):
        row = torch.cat([row, weight[shared:] @ x.reshape(-1)])
    return (row if bias is None else row + bias).view(*x.shape[:-1], len(weight))


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
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
