"""A normalizer whose weights sum to one and grow quadratically in large scores."""

from torch import Tensor
from torch.nn.functional import softplus

import qkv


class SoftplusSquared(qkv.normalizers.SumToOne):
    """softplus(s − level)²; qkv finds the level of each row."""

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return softplus(scores - level) ** 2
