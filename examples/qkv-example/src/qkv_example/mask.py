"""A mask that lets a query attend to ever sparser keys the further back they are."""

from dataclasses import dataclass

from torch import Tensor

import qkv


@dataclass(frozen=True)
class Triangle(qkv.masks.Mask):
    """Causal; keys `step`, 3 · step, 6 · step … back (triangular numbers), and the query's own key."""

    step: int = 1

    def sees(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, grid: qkv.masks.Grid) -> Tensor:
        back = (q - k).clamp(min=0)
        root = ((8 * (back // self.step) + 1).double().sqrt() + 0.5).long()
        return (q >= k) & (back % self.step == 0) & (root * root == 8 * (back // self.step) + 1)
