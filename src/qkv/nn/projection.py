"""Linear layers that are fast for few rows, and learned sink tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import at_least_one

FEW, SOME, MANY = 4, 32, 128  # rows: up to `FEW` (`SOME` if out > in) one bmm over threads, from `MANY` on oneDNN
LARGE = 2**15  # with fewer weights, one thread is as fast as several


def project(
    x: Float[Tensor, "*n d"], weight: Float[Tensor, "out d"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "*n out"]:
    """x·weightᵀ + bias, as `torch.nn.functional.linear`.

    Torch computes float32 products on CPU with MKL, which is slow on processors other than Intel's, and uses one thread
    for one or two rows, as in decoding. Therefore many rows go to oneDNN, as a 1 × 1 convolution over an image of one
    line with channels last; and few rows go as one batched product, in which each thread takes its share of the
    weights. No weight is copied. (``python -m benchmarks projection`` prints the speedups on your machine.)

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
    """weight·columns + bias as one batched product, with a share of the weights for each thread.

    A single column must be the transpose of a row: with both strides 1, torch takes several times as long.
    """
    out, threads = weight.shape[0], torch.get_num_threads()
    shared = out // threads * threads
    parts, repeated = weight[:shared].view(threads, -1, weight.shape[1]), columns.expand(threads, -1, -1)
    if bias is None:
        product = torch.bmm(parts, repeated).flatten(0, 1)
    else:
        product = torch.baddbmm(bias[:shared].view(threads, -1, 1), parts, repeated).flatten(0, 1)
    if shared == out:
        return product
    rest = weight[shared:] @ columns
    return torch.cat([product, rest if bias is None else rest + bias[shared:, None]])


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
