"""The edits of `qkv.edits`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkv import masks, normalizers
from qkv.edits.base import Edit, Head
from qkv.errors import InputError


class Zero(Edit):
    """Removes the head: its output is 0."""

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return torch.zeros_like(head.output)


class Mean(Edit):
    """Replaces the output of the head by its mean over the tokens of each text, padding left out.

    The head then tells the layers above nothing about single tokens, without the shift that `Zero` makes.
    """

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        head.all_keys(self)
        if head.queries is None:
            return head.output.mean(1, keepdim=True).expand_as(head.output)
        real = head.queries[..., None].to(head.output)
        mean = (head.output * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(head.output)


class Scale(Edit):
    """Multiplies the output of the head.

    Args:
        factor: a number, or a tensor (for gradients: which heads matter) that broadcasts with (b, nq, dv).
    """

    def __init__(self, factor: float | Tensor) -> None:
        self.factor = factor

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.output * self.factor


class Steer(Edit):
    """Adds a vector to the output of the head at every token (Turner et al. 2023, arXiv:2308.10248).

    Args:
        vector: (dv,), or what broadcasts with (b, nq, dv).
    """

    def __init__(self, vector: Float[Tensor, "*b dv"]) -> None:
        self.vector = vector

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        if self.vector.ndim == 0 or self.vector.shape[-1] != head.output.shape[-1]:
            raise InputError(
                f"vector has shape {tuple(self.vector.shape)}, expected (…, {head.output.shape[-1]}) for {head.name}"
            )
        return head.output + self.vector.to(head.output)


class Patch(Edit):
    """Replaces the output of the head by that of another run (activation patching).

    Args:
        output: (b, nq, dv), from `qkv.profiler.head_outputs` of a run on a text of the same length.
    """

    def __init__(self, output: Float[Tensor, "b nq dv"]) -> None:
        self.output = output

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return self.output.to(head.output)


class Temperature(Edit):
    """Divides the scores of the head.

    Args:
        temperature: above 1 for more even weights, below 1 for sharper ones.
    """

    def __init__(self, temperature: float) -> None:
        if not temperature > 0:
            raise InputError(f"temperature is {temperature}, expected a positive number")
        self.temperature = temperature

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(temperature=self.temperature)


class Normalizer(Edit):
    """Gives the head another normalizer, such as ``qkv.normalizers.Softmax(sink=0.0)``, softmax off by one.

    Args:
        normalizer: in place of the model's, whose learned sink, if it has one, is dropped.
    """

    def __init__(self, normalizer: normalizers.Normalizer) -> None:
        if not isinstance(normalizer, normalizers.Normalizer):
            raise InputError(f"normalizer is {type(normalizer).__name__}, expected one of qkv.normalizers")
        self.normalizer = normalizer

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(normalizer=self.normalizer)


class Mask(Edit):
    """Restricts the head by a mask besides that of the model, such as ``qkv.masks.Window(64)``.

    Args:
        mask: True where a query may attend.
    """

    def __init__(self, mask: masks.Mask) -> None:
        if not isinstance(mask, masks.Mask):
            raise InputError(f"mask is {type(mask).__name__}, expected one of qkv.masks")
        self.mask = mask

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        return head.recompute(mask=self.mask)


class HideFirst(Edit):
    """Hides the first token of the text from all queries but its own: the head loses its sink there."""

    def apply(self, head: Head) -> Float[Tensor, "b nq dv"]:
        first = torch.as_tensor(head.first, device=head.output.device).view(-1, 1, 1, 1)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            at = first if len(first) == 1 else first[b.flatten()]
            return (k != at) | (q == k)

        return head.recompute(mask=masks.Predicate(sees))


BY_NAME = {"zero": Zero, "mean": Mean}
