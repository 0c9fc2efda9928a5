"""Masks as courses pass them: tensors of True or 1 where a query may attend; those in which True hides are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward as mha_forward

from qkv.compat import with_blocked
from qkv.engine import inverted
from qkv.errors import InputError
from qkv.masks import Mask

GivenMask = Mask | Tensor | np.ndarray | None


def create_causal_mask(seq_len: int, device: torch.device | str | None = None) -> Bool[Tensor, "n n"]:
    """The causal mask as a tensor: True on and below the diagonal, where a query may attend.

    >>> create_causal_mask(3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril().as_subclass(CausalMask)


class CausalMask(Tensor):
    """The tensor of `create_causal_mask`, which refuses to be used as a mask in which True hides.

    >>> torch.zeros(2, 2).masked_fill(~create_causal_mask(2), -1).tolist()
    [[0.0, -1.0], [0.0, 0.0]]
    """

    HIDING = (Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill, Tensor.__setitem__, mha_forward)
    VIEWS = (Tensor.__getitem__, Tensor.unsqueeze, Tensor.expand, Tensor.repeat, Tensor.view, Tensor.to, Tensor.clone)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in cls.HIDING and any(isinstance(x, cls) for x in (*args[1:2], *kwargs.values())):
            raise InputError(
                f"mask of create_causal_mask is True where a query may attend, but {function.__name__} hides where its "
                "mask is True; expected ~mask"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **kwargs)
        return found.as_subclass(cls) if function in cls.VIEWS and args[0].dtype == found.dtype else found

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # torch.load refuses other classes


def visible(
    mask: GivenMask, blocked: Tensor | np.ndarray | None = None, *, of_items: bool = False
) -> Mask | Tensor | None:
    """The mask as a mask object or a boolean tensor; a mask of 0 and 1 is visible at 1, and `blocked` at 0.

    Three dimensions are those of (heads, queries, keys), or `of_items`.
    """
    if blocked is not None:
        return with_blocked(mask, boolean("blocked", blocked, of_items))  # type: ignore[arg-type]
    if mask is None or isinstance(mask, Mask):
        return mask
    tensor = boolean("mask", mask, of_items)
    if (how := inverted(tensor.cpu())) is not None:
        raise InputError(
            f"mask is {how}, as in courses where True hides a key, but here True means may attend; expected ~mask, "
            "blocked=mask, or create_causal_mask(n) of qkv.course"
        )
    return tensor


def boolean(name: str, mask: Tensor | np.ndarray, of_items: bool = False) -> Tensor:
    """The mask as a boolean tensor.

    >>> boolean("mask", torch.tensor([[1, 0], [1, 1]]))[0].tolist()
    [True, False]
    """
    tensor = torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask
    means = f"True or 1 where a query may {'not ' * (name == 'blocked')}attend"
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is {type(mask).__name__}, expected a tensor that is {means}")
    if tensor.dtype != torch.bool:
        if not bool(((tensor == 0) | (tensor == 1)).all()):
            raise InputError(
                f"{name} is {tensor.dtype} with other numbers than 0 and 1, expected {means}; "
                "numbers to be added to the scores are attn_mask= of qkv.attend"
            )
        tensor = tensor == 1
    tensor = tensor.as_subclass(Tensor)
    return tensor[:, None] if of_items and tensor.ndim == 3 else tensor
