"""`qkv.nn.projection.project` against `torch.nn.functional.linear`: one row, and many rows with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.mechanisms.timing import alternating, median_ratio
from benchmarks.timing import THREADS
from qkv.nn.projection import project

SHAPES = ((384, 1152), (384, 1536), (1536, 384), (2048, 2048))
COLD = 2**25  # numbers of weights, so many that none stays in the CPU cache, as in a model


def projection(repeats: int = 9) -> dict[str, Any]:
    """Time of `project` / linear."""
    torch.set_num_threads(THREADS)
    one, many = {}, {}
    for d, out in SHAPES:
        row, weights = torch.randn(1, d), [torch.randn(out, d) for _ in range(COLD // (d * out))]
        bias = torch.randn(out)

        def go_through(
            function: Callable[..., Tensor], row: Tensor = row, weights: Any = weights, bias: Any = bias
        ) -> None:
            with torch.inference_mode():
                for weight in weights:
                    function(row, weight, bias)

        seconds = alternating(
            {"project": lambda f=go_through: f(project), "linear": lambda f=go_through: f(F.linear)}, repeats
        )
        one[f"{d} to {out}"] = median_ratio(seconds, "project", "linear")
        x, slope = torch.randn(2048, d, requires_grad=True), torch.randn(2048, out)
        weight = torch.randn(out, d, requires_grad=True)

        def both(
            function: Callable[..., Tensor], x: Tensor = x, weight: Tensor = weight, slope: Tensor = slope
        ) -> None:
            x.grad = weight.grad = None
            function(x, weight).backward(slope)

        seconds = alternating({"project": lambda f=both: f(project), "linear": lambda f=both: f(F.linear)}, repeats)
        many[f"{d} to {out}"] = median_ratio(seconds, "project", "linear")
    return {"time: project / linear, one row": one, "time: project / linear, 2,048 rows, both ways": many}
