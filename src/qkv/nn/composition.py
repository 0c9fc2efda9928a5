"""`Composition`: an `Attention` as a module, with its learned tensors as parameters."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv._contract import Definition
from qkv.attention import Attention, compute
from qkv.engine import as_mask
from qkv.errors import InputError
from qkv.masks import Mask

Path = tuple[str | int, ...]


class Composition(nn.Module):
    """An `Attention` as a module: every `nn.Parameter` and `nn.Module` in it is registered.

    Parameters are not copied, so modules that receive the same composition share them, as T5 layers share a bias. Their
    names give their place in the composition: ``score_weight``, ``bias_table``, ``normalizer_sink``.

    >>> import torch, qkv
    >>> sink = qkv.normalizers.Softmax(sink=torch.nn.Parameter(torch.zeros(4)))
    >>> [name for name, _ in Composition(qkv.Attention(normalizer=sink)).named_parameters()]
    ['normalizer_sink']
    """

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        if not isinstance(attention, Attention):
            raise InputError(f"attention is {attention!r}, expected a qkv.Attention, such as Attention(mask=Causal())")
        self._initial = attention
        self._places: dict[str, Path] = {}
        for place, learned in _learned(attention, ()):
            name = "_".join(map(str, place))
            if isinstance(learned, nn.Module):  # such as a learned feature map
                self.add_module(name, learned)
            else:
                self._places[name] = place
                self.register_parameter(name, learned)

    @property
    def attention(self) -> Attention:
        """The composition with the current parameters."""
        attention = self._initial
        for name, place in self._places.items():  # functional calls and sharding replace the registered tensors
            attention = _with(attention, place, getattr(self, name))
        return attention

    @overload
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Bool[Tensor, "..."] | None = None,
        return_weights: Literal[False] = False, return_statistics: Literal[False] = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Bool[Tensor, "..."] | None = None,
        return_weights: bool = False, return_statistics: bool = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        q: Float[Tensor, "b h nq dq"],
        k: Float[Tensor, "b hkv nk dk"],
        v: Float[Tensor, "b hkv nk dv"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        return_weights: bool = False,
        return_statistics: bool = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Tensor | tuple[Any, ...]:
        """`attend` with this composition and an optional additional mask; dropout acts in training mode.

        `queries` are those that count in the statistics, as in `qkv.measure`.
        """
        attention = self.attention if mask is None else masked(self.attention, mask)
        if not return_statistics:
            return attention(q, k, v, training=self.training, return_weights=return_weights)
        options: dict[str, Any] = {"dropout_p": attention.dropout_p if self.training else 0.0}
        return compute(attention, q, k, v, weights=return_weights, statistics=True, queries=queries, **options)

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def extra_repr(self) -> str:
        parts = ((f.name, getattr(self._initial, f.name)) for f in fields(Attention))
        return ", ".join(f"{name}={type(x).__name__}" for name, x in parts if x is not None and name != "dropout_p")


def masked(attention: Attention, mask: Mask | Bool[Tensor, "..."]) -> Attention:
    """The composition with its mask combined with `mask` by AND."""
    first, second = as_mask(attention.mask), as_mask(mask)
    assert second is not None
    return replace(attention, mask=second if first is None else first & second)


def _learned(x: Any, place: Path) -> Iterator[tuple[Path, nn.Parameter | nn.Module]]:
    if isinstance(x, nn.Parameter | nn.Module):
        yield place, x
    elif isinstance(x, Definition) or is_dataclass(x):
        for name, value in vars(x).items():
            yield from _learned(value, (*place, name))
    elif isinstance(x, tuple | list):
        for i, one in enumerate(x):
            yield from _learned(one, (*place, i))


def _with(x: Any, place: Path, value: Tensor) -> Any:
    if not place:
        return value
    first, rest = place[0], place[1:]
    if isinstance(first, str):
        changed = copy(x)
        object.__setattr__(changed, first, _with(getattr(x, first), rest, value))
        return changed
    return (*x[:first], _with(x[first], rest, value), *x[first + 1 :])
