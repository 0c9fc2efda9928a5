"""`Composition`: an `Attention` as a module, whose learned tensors are registered."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv._contract import Definition, learned_tensors, with_attributes
from qkv.attention import Attention, compute
from qkv.biases import Bias, Forget
from qkv.engine import as_biases, as_mask
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.positions import Rotary

if TYPE_CHECKING:
    from qkv.cache import Cache

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
        held = set(map(id, self.parameters()))
        for name, x in learned_tensors(attention).items():
            if id(x) not in held and (isinstance(x, nn.Parameter) or not x.is_leaf):
                raise InputError(
                    f"attention has the learned tensor {name}, which a module cannot register: it is computed from "
                    "another, or held in a dictionary or an object; expected an nn.Parameter that is an attribute of a "
                    "part of the composition, and the parts of a concatenated weight as Additive(vector, w_q, w_k)"
                )

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
        bias: Bias | None = None, return_weights: Literal[False] = False, return_statistics: Literal[False] = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | Bool[Tensor, "..."] | None = None,
        bias: Bias | None = None, return_weights: bool = False, return_statistics: bool = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        q: Float[Tensor, "b h nq dq"],
        k: Float[Tensor, "b hkv nk dk"],
        v: Float[Tensor, "b hkv nk dv"],
        *,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        bias: Bias | None = None,
        return_weights: bool = False,
        return_statistics: bool = False,
        queries: Bool[Tensor, "b nq"] | None = None,
    ) -> Tensor | tuple[Any, ...]:
        """`attend` with this composition and an optional additional mask and last bias; dropout acts in training mode.

        `queries` are those that count in the statistics, as in `qkv.measure`.
        """
        attention = self.attention
        if (further := as_mask(mask)) is not None:
            own = as_mask(attention.mask)
            attention = replace(attention, mask=further if own is None else own & further)
        if bias is not None:
            attention = replace(attention, bias=(*as_biases(attention.bias), bias))
        if not return_statistics:
            return attention(q, k, v, training=self.training, return_weights=return_weights)
        options: dict[str, Any] = {"dropout_p": attention.dropout_p if self.training else 0.0}
        return compute(attention, q, k, v, weights=return_weights, statistics=True, queries=queries, **options)

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def of_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotary: Rotary | None, positions: Tensor | None, cache: Cache | None,
        mask: Mask | Bool[Tensor, "..."] | None, log_f: Tensor | None = None, queries: Tensor | None = None,
        **returned: bool,
    ) -> Any:  # fmt: skip
        """Attention of tokens to themselves, and to those of a cache; q and k are not yet rotated by `positions`.

        `returned` are `return_weights` and `return_statistics`.
        """
        if cache is not None:
            for name in (name for name, yes in returned.items() if yes):
                raise InputError(f"{name} is True with a cache, which returns the output alone; expected False")
            return cache.attend(
                self.attention, q, k, v, rotary=rotary, positions=positions, mask=as_mask(mask), log_f=log_f
            )
        if rotary is not None:
            rotate = rotary.span if positions is None else functools.partial(rotary, positions=positions)
            q, k = rotate(q), rotate(k)
        return self(q, k, v, mask=mask, bias=None if log_f is None else Forget(log_f), queries=queries, **returned)

    def extra_repr(self) -> str:
        parts = ((f.name, getattr(self._initial, f.name)) for f in fields(Attention))
        return ", ".join(f"{name}={type(x).__name__}" for name, x in parts if x is not None and name != "dropout_p")


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
        return with_attributes(x, **{first: _with(getattr(x, first), rest, value)})
    return (*x[:first], _with(x[first], rest, value), *x[first + 1 :])
