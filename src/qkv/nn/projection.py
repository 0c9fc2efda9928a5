"""Linear maps, on the faster of the ways torch has for them on CPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

FEW, SOME, MANY = 4, 32, 128  # rows: `FEW` are few for any map, `SOME` for one that widens; from `MANY` on, many
LARGE = 2**15  # weights; with fewer, one thread is as fast as several


def project(
    x: Float[Tensor, "*n d"], weight: Float[Tensor, "out d"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*n out"]:
    """x·weightᵀ + bias, as `torch.nn.functional.linear`.

    Torch sends float32 products on CPU to MKL, which is slow on processors that are not Intel's, and runs those with a
    row or two, of which decoding is made, in one thread. So many rows go to oneDNN, as a convolution with a kernel of
    one pixel over an image of one line whose channels come last; and few rows go as a batch of as many products as
    there are threads, each with its share of the weights. No weight is copied. (``python -m benchmarks projection`` has
    the ratios on your machine.)

    >>> x, weight = torch.randn(2, 100, 8), torch.randn(5, 8)
    >>> torch.allclose(project(x, weight), torch.nn.functional.linear(x, weight), atol=1e-5)
    True
    """
    if not x.numel():
        return F.linear(x, weight, bias)
    rows, few = x.numel() // x.shape[-1], SOME if len(weight) > x.shape[-1] else FEW
    if few < rows < MANY or weight.numel() < LARGE or not _suits(x, weight):
        return F.linear(x, weight, bias)
    if rows >= MANY:
        image = x.reshape(1, 1, rows, -1).permute(0, 3, 1, 2)
        out = F.conv2d(image, weight[:, :, None, None], bias)
        return out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))
    return _by_threads(x.reshape(rows, -1).T, weight, bias).T.reshape(*x.shape[:-1], -1)


def _by_threads(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight·columns + bias, each thread with its share of the weights.

    A single column must be the transpose of a row: with both strides 1 the product takes torch several times as long.
    """
    out, threads = weight.shape[0], torch.get_num_threads()
    shared = out // threads * threads
    parts, same = weight[:shared].view(threads, -1, weight.shape[1]), columns.expand(threads, -1, -1)
    if bias is None:
        made = torch.bmm(parts, same).flatten(0, 1)
    else:
        made = torch.baddbmm(bias[:shared].view(threads, -1, 1), parts, same).flatten(0, 1)
    if shared == out:
        return made
    rest = weight[shared:] @ columns
    return torch.cat([made, rest if bias is None else rest + bias[shared:, None]])


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
