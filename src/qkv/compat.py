"""Arguments of every call in the form of other libraries: their names, NumPy arrays, inputs with fewer dimensions.

Inputs are tensors or NumPy arrays of shape (batch, heads, length, head_dim), (batch, length, head_dim) or
(length, head_dim); fewer dimensions mean one head. Under autocast, calls are computed in its dtype, as in torch's SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qkv import masks
from qkv.biases import Bias, TensorBias
from qkv.engine.call import as_biases, as_mask, inverted, tensor_of
from qkv.errors import InputError, kind_of, nearest
from qkv.masks import Mask, from_sdpa
from qkv.results import Result
from qkv.scores import Dot, Score

SIZES = {"embed_dim": "d_model", "num_heads": "heads", "n_heads": "heads"}
INPUTS = {"query": "x", "key": "context"}


def _advice(names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return what to pass instead of each name, given the names for which to pass it."""
    return {name: instead for instead, others in names.items() for name in others}


OTHER_NAMES = _advice({
    "mask=, a boolean tensor that is True where a query may attend, or bias=qkv.biases.TensorBias(tensor) for a float "
    "one": ["attn_mask"],
    "mask=, True where a query may attend; for a tokenizer's: mask=(m == 1)[:, None, None, :]": ["attention_mask"],
    "mask=~key_padding_mask[:, None, None, :], since True means may attend here": ["key_padding_mask"],
    "mask=qkv.masks.Causal()": ["is_causal", "causal"],
    "mask=qkv.masks.Window(size)": ["window_size"],
    "mask=, one of qkv.masks, or qkv.masks.from_flex(block_mask)": ["block_mask"],
    "bias=qkv.biases.ALiBi(slopes)": ["alibi_slopes"],
    "bias=qkv.biases.SoftCap(cap)": ["softcap"],
    "bias=, one of qkv.biases or your own": ["score_mod"],
    "score=qkv.scores.Dot(scale)": ["scale", "softmax_scale"],
    "normalizer=qkv.normalizers.Softmax(sink=logits)": ["sinks"],
    "dropout_p=": ["dropout", "dropout_rate"],
    "return_weights=": ["need_weights", "return_attention", "output_attentions"],
    "nothing: grouped-query attention follows from the number of key heads": ["enable_gqa"],
})  # fmt: skip
OF_MODULES = OTHER_NAMES | _advice({
    "heads=": ["nhead"],
    "d_context=, with fused=False": ["kdim", "vdim"],
    "nothing: inputs are always (batch, length, d_model)": ["batch_first"],
    'sink="key", a learned key without a value': ["add_bias_kv"],
    "attention=qkv.Attention(normalizer=qkv.normalizers.Softmax(sink=0.0))": ["add_zero_attn"],
    "dropout=": ["dropout_p", "attn_dropout", "attention_dropout", "attn_drop"],
    "nothing, and the output to torch.nn.Dropout; TransformerBlock has dropout=": [
        "proj_drop", "resid_dropout", "out_dropout", "output_dropout",
    ],
})  # fmt: skip
OF_MODULE_CALLS = OTHER_NAMES | _advice({
    "mask=~attn_mask, since True means may attend here, and a float one as a bias: "
    "attention=qkv.Attention(bias=qkv.biases.TensorBias(tensor))": ["attn_mask"],
    "context=": ["kv", "memory"],
    "cache=, one of qkv.cache": ["past_key_value"],
})  # fmt: skip


def unknown_argument(function: str, name: str, known: Collection[str], advice: Mapping[str, str]) -> InputError:
    """Return the error for an unknown argument; for a name of another library it says what to pass instead."""
    if name in advice:
        return InputError(f"{function}: {name} is not an argument; pass {advice[name]}")
    hint = f"expected one of {', '.join(known)}{nearest(name, known)}"
    return InputError(f"{function}: {name} is not an argument, {hint}")


def without_name(function: str, known: str, others: Sequence[object]) -> InputError:
    """Return the error for further arguments without a name, such as a mask in its place in torch's call."""
    return InputError(
        f"{function}: others has {len(others)} arguments, expected {known} alone without a name; pass mask=, True "
        "where a query may attend, or another argument by its name"
    )


def renamed(function: str, given: Mapping[str, Any], same: Mapping[str, str], known: Mapping[str, Any]) -> Any:
    """Return the values of `known`, in which names with the same meaning in other libraries (`same`) fill what is None.

    >>> renamed("MultiHeadAttention", {"num_heads": 8}, SIZES, {"d_model": 64, "heads": None})
    [64, 8]
    """
    values = dict(known)
    for name, value in given.items():
        if name not in same or same[name] not in values:
            raise unknown_argument(function, name, known, OF_MODULES if "d_model" in known else OF_MODULE_CALLS)
        if values[same[name]] is not None:
            raise InputError(f"{function}: {name} and {same[name]} are both passed, expected one: they mean the same")
        values[same[name]] = value
    return list(values.values())


TORCH = ("attn_mask", "is_causal", "scale", "blocked")
"""Arguments of torch's scaled_dot_product_attention, which `attend` takes, too; `blocked` is True where masked."""


def refuse_unknown(function: Callable[..., object], unknown: Mapping[str, object]) -> None:
    """Raise `InputError` for unknown arguments of a function of keywords."""
    known = [x.name for x in inspect.signature(function).parameters.values() if x.kind is x.KEYWORD_ONLY]
    for name in unknown:
        raise unknown_argument(function.__name__, name, known, OTHER_NAMES)


def with_blocked(mask: Mask | Tensor | None, blocked: Tensor | None) -> Mask | Tensor | None:
    """Return the mask with `blocked`, a boolean mask that is True where a query may *not* attend, as in courses.

    >>> import torch
    >>> with_blocked(None, torch.ones(2, 2, dtype=torch.bool).triu(1)).dense(2, 2)[0, 0].int().tolist()
    [[1, 0], [1, 1]]
    """
    if blocked is None:
        return mask
    if mask is not None:
        raise InputError("mask and blocked are both passed, expected one of them: True means masked in blocked alone")
    if isinstance(blocked, Mask):
        raise InputError(f"blocked is {blocked!r}, expected a boolean tensor that is True where masked; pass mask=")
    if not isinstance(blocked, Tensor) or blocked.dtype != torch.bool:
        raise InputError(f"blocked is {kind_of(blocked)}, expected a boolean tensor that is True where masked")
    if (how := inverted(~blocked)) is not None:
        raise InputError(
            f"blocked leaves a mask that is {how}, as if True meant may attend, but in blocked True means masked; "
            "expected mask=blocked, or mask=qkv.masks.Dense(~blocked) if this is meant"
        )
    return masks.Dense(~blocked)


def composition_of(
    function: Callable[..., object], names: Mapping[str, Any], q: Tensor, k: Tensor, mask: Mask | Tensor | None,
    bias: Bias | Sequence[Bias] | None, score: Score | None,
) -> dict[str, Any]:  # fmt: skip
    """Return mask, bias and score with torch's arguments of attention added; other names are refused."""
    refuse_unknown(function, {name: x for name, x in names.items() if name not in TORCH})
    given: Iterator[Any] = (tensor_of(name, x) if isinstance(x := names.get(name), np.ndarray) else x for name in TORCH)
    attn_mask, is_causal, scale, blocked = given
    mask = with_blocked(mask, blocked)
    if scale is not None:
        if score is not None:
            raise InputError(f"scale is {scale} with score={type(score).__name__}, expected one of them")
        score = Dot(scale)
    if isinstance(attn_mask, Tensor) and attn_mask.dtype.is_floating_point:
        bias = (*as_biases(bias), TensorBias(attn_mask))
        attn_mask = None
    if attn_mask is not None or is_causal:
        if attn_mask is not None and mask is not None:
            raise InputError("attn_mask is passed with a mask, expected one of them: True means may attend in both")
        if attn_mask is not None and is_causal:
            raise InputError("attn_mask is passed with is_causal=True, expected one of them, as in torch")
        lengths = {"n_queries": q.shape[-2], "n_keys": k.shape[-2]}
        visible = from_sdpa(attn_mask, is_causal=bool(is_causal), **lengths)
        own = as_mask(mask)
        mask = visible if own is None else own & visible
    return {"mask": mask, "bias": bias, "score": score}


T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """Form of the inputs of a call: the place of their head in tensors of four dimensions, and whether they are NumPy
    arrays."""

    at: tuple[slice | int, ...] = ()
    array: bool = False

    @staticmethod
    def of(*given: Any) -> tuple[Form, list[Tensor], AbstractContextManager[object]]:
        """Return the form of inputs; them as tensors (batch, heads, length, head_dim); and a context without autocast.

        The tensors have the dtype of autocast, if it is on.
        """
        form, tensors = Form(), list(given)
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in given):
            arrays = [isinstance(x, np.ndarray) for x in given]
            if any(arrays) and not all(arrays):
                raise InputError("q, k and v mix tensors and NumPy arrays, expected all of one type")
            tensors = [tensor_of(name, x) for name, x in zip("qkv", given, strict=False)] if all(arrays) else [*given]
            sizes = {x.ndim if isinstance(x, Tensor) else 4 for x in tensors}
            ndim = sizes.pop() if len(sizes) == 1 else 4  # `Call.of` rejects mixed shapes
            if ndim in (2, 3):
                tensors = [x[:, None] if ndim == 3 else x[None, None] for x in tensors]
            form = Form((slice(None), 0) if ndim == 3 else (0, 0) if ndim == 2 else (), arrays[0])
        dtype = autocast_dtype(tensors[0])
        if dtype is None:
            return form, tensors, nullcontext()
        return form, [x.to(dtype) for x in tensors], torch.autocast(tensors[0].device.type, enabled=False)

    def back(self, x: Tensor) -> Any:
        """Return a result (batch, heads, …) in the form of the inputs."""
        x = x[self.at] if self.at else x
        if not self.array:
            return x
        return (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()  # NumPy has no bfloat16

    def result(self, result: Result[Tensor], *, lse: bool, weights: bool) -> Result[Any]:
        """Return the requested parts of a result in the form of the inputs."""
        log_sums = self.back(result.lse) if lse and result.lse is not None else None
        formed = self.back(result.weights) if weights and result.weights is not None else None
        statistics = None if result.statistics is None else self.all_back(result.statistics)
        return Result(self.back(result.out), log_sums, formed, statistics)

    def all_back(self, record: T) -> T:
        """Return a dataclass with all tensors in it, including nested ones, in the form of the inputs."""
        if not (self.at or self.array):
            return record
        converted = copy(record)
        for one in fields(record):  # type: ignore[arg-type]
            value = getattr(record, one.name)
            if isinstance(value, Tensor):
                value = self.back(value)
            elif isinstance(value, Mapping):
                value = {name: self.back(x) for name, x in value.items()}
            elif is_dataclass(value):
                value = self.all_back(value)
            object.__setattr__(converted, one.name, value)
        return converted


def autocast_dtype(q: Any) -> torch.dtype | None:
    """Return the dtype of autocast on the device of q, or None if autocast is off or q is float64."""
    if (
        not isinstance(q, Tensor)
        or q.dtype == torch.float64
        or q.is_meta
        or not torch.is_autocast_enabled(q.device.type)
    ):
        return None
    return torch.get_autocast_dtype(q.device.type)
