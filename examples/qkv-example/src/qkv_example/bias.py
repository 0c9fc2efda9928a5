"""A bias that prefers keys a whole number of weeks back."""

from torch import Tensor

import qkv


class Weekly(qkv.biases.AdditiveBias):
    """Adds `bonus` to the scores of keys that are a multiple of seven tokens back."""

    def __init__(self, bonus: float = 1.0) -> None:
        self.bonus = bonus

    def tile(self, region: qkv.masks.Region) -> Tensor:
        return self.bonus * ((region.queries - region.keys) % 7 == 0).float()[None, None]
