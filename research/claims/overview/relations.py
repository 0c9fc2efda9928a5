"""Checks for sections 5 and 6: relations of attention to other methods, and the papers."""

from __future__ import annotations

import torch

import qkv
from qkv.normalizers import Hard
from research.claims import Verdict, claim, false, holds

LUONG = "[Luong et al. 2015](https://arxiv.org/abs/1508.04025)"


@claim("C366", "overview", "5", "Attention is like kernel smoothing, with a kernel that is learnt.")
def c366() -> Verdict:
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 8, dtype=torch.float64)

    def difference(keys: torch.Tensor) -> float:
        """Between a Gaussian kernel's weights and those of softmax, of q · k without a scale."""
        gaussian = torch.exp(-(torch.cdist(q, keys) ** 2) / 2)
        return (gaussian / gaussian.sum(-1, keepdim=True) - (q @ keys.T).softmax(-1)).abs().max().item()

    same, other = difference(torch.nn.functional.normalize(k, dim=-1)), difference(k)
    return holds(
        same < 1e-12 and other > 0.01,
        f"With keys of one length its weights are those of a Gaussian kernel smoother, to {same:.1g}. With other "
        f"lengths long keys gain, and weights differ by up to {other:.2f}; what is learnt are the projections.",
    )


@claim("C367", "overview", "5", "Attention can be seen as a convolution whose kernel depends on the input.")
def c367() -> Verdict:
    torch.manual_seed(0)
    a, b = torch.randn(2, 1, 1, 9, 8, dtype=torch.float64)
    conv = torch.nn.Conv1d(8, 8, 3, padding=1).double()
    near = qkv.masks.Window(2, ahead=1)
    kernels = [qkv.attend(x, x, x, mask=near, return_weights=True)[1][0, 0, 4, 3:6] for x in (a, b)]
    x, y = (z[0].mT for z in (a, b))
    linear = torch.allclose(conv(x + y), conv(x) + conv(y) - conv(torch.zeros_like(x)))
    return holds(
        linear and (kernels[0] - kernels[1]).abs().max() > 0.01,
        "A window of 3 weighs the middle one of 9 tokens and its neighbours by "
        + " and ".join(", ".join(f"{w:.2f}" for w in kernel.tolist()) for kernel in kernels)
        + " for two inputs. A convolution has one kernel for all, but with weights of their own for each channel.",
    )


@claim(
    "C368",
    "overview",
    "5",
    "A 1 × 1 convolution is nearly attention with queries equal to keys, where all positions attend equally.",
)
def c368() -> Verdict:
    torch.manual_seed(0)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    conv = torch.nn.Conv1d(8, 8, 1, bias=False).double()
    w = conv.weight[..., 0]
    itself = qkv.attend(x[None], x[None], (x @ w.T)[None], mask=torch.eye(6, dtype=torch.bool)[None, None])[0]
    _, equal = qkv.attend(x[None], x[None], x[None], return_weights=True)
    return false(
        torch.allclose(conv(x.mT).mT, itself) and equal.max() - equal.min() > 0.5,
        "It is attention in which each position sees *itself* alone: no mixing at all. Equal weights would be the mean "
        f"over all positions, and queries equal to keys do not give equal weights either: here {equal.min():.3f} to "
        f"{equal.max():.2f}.",
    )


@claim("C369", "overview", "5", "Soft attention lets gradients flow through all paths.")
def c369() -> Verdict:
    torch.manual_seed(0)
    counts = {}
    for name, normalizer in (("softmax", None), ("hard, values", Hard())):
        q, k, v = torch.randn(3, 1, 1, 6, 8, dtype=torch.float64).unbind()
        v.requires_grad_()
        qkv.attend(q[:, :, :1], k, v, normalizer=normalizer).sum().backward()
        counts[name] = int((v.grad[0, 0].norm(dim=-1) > 0).sum())
    return holds(
        counts["softmax"] == 6 and counts["hard, values"] == 1,
        "All 6 values get a gradient from one query, by their weights; with hard attention the chosen one does. Where "
        "softmax saturates, the paths are open but narrow.",
    )
