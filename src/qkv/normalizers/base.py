"""Base classes of normalizers, each defined by one method, `weight`.

A `Pointwise` weight depends on its own score alone. `SumToOne` weights also depend on the row's *level*, a number
chosen so that the weights sum to one: the log-sum-exp of a softmax, the threshold of a sparsemax. Gradients, tiles,
kernels, statistics and sinks follow from the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv._contract import Definition, learned_tensors, require
from qkv.errors import InputError, kind_of, one_of

N = TypeVar("N", bound="Normalizer")
S = TypeVar("S", bound="SumToOne")
LOG2_E = math.log2(math.e)

Scores = Float[Tensor, "*n k"]
Level = Float[Tensor, "*n #k"]
SinkLogits = Float[Tensor, " heads"] | Float[Tensor, "b heads nq"] | float | None


class Normalizer(Definition):
    """Base of all normalizers. Your own inherits from `Pointwise` or from `SumToOne`.

    >>> from qkv.normalizers import Sigmoid, Softmax
    >>> Softmax().has_lse, Sigmoid().has_lse
    (True, False)
    """

    temperature: float = 1.0
    """Divisor of the scores, before the weights are computed."""
    has_lse = False
    """Whether the weights are exp(score − level) with the log-sum-exp as level; partial results then merge."""
    by_head = True
    """Whether the normalizer may have per-head parameters. Its methods then always get all query heads."""
    zero_at_minus_infinity = False
    """Whether `weight` returns 0, with derivative 0, for a score of −inf. Otherwise masked scores are replaced by
    finite ones first, and their weights set to 0."""
    divide: str | None = None
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    one_key = False
    """Whether a query takes a single key, and the weights are only used for the gradient (straight-through)."""
    sample = False
    """Whether that key is drawn from the softmax of the scores."""

    def weigh(self, scores: Scores, level: Level | None) -> Scores:
        """Return `weight` of scores at the level of their rows, which a `Pointwise` normalizer does not have."""
        raise NotImplementedError

    def weigh_(self, scores: Scores, level: Level | None) -> Scores:
        """Return `weigh`; it may overwrite `scores`."""
        raise NotImplementedError

    def slope_from_weights(self, weights: Scores) -> Scores:
        """Return ∂ weight / ∂ score as a function of the weights, if they determine it."""
        raise NotImplementedError

    def level_of(self, scores: Scores) -> Float[Tensor, "*n"]:
        """Return the level of whole rows, −inf where masked, in closed form."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return learned tensors that `weight` uses, by name."""
        return learned_tensors(self)

    def with_temperature(self: N, temperature: float) -> N:
        """Return the same normalizer with another temperature."""
        changed = copy(self)
        object.__setattr__(changed, "temperature", temperature)
        return changed

    def check(self, heads: int) -> None:
        """Raise `InputError` if the normalizer is incomplete, or does not fit this number of query heads."""
        raise InputError(
            f"{type(self).__name__}: a Normalizer alone defines no weights; inherit from "
            "qkv.normalizers.Pointwise and define weight(scores), or from SumToOne and define weight(scores, level)"
        )


def check_temperature(normalizer: Normalizer) -> None:
    temperature = normalizer.temperature
    if not isinstance(temperature, float | int) or not (temperature > 0 and math.isfinite(temperature)):
        raise InputError(f"{type(normalizer).__name__}: temperature is {temperature}, expected a positive number")


class Pointwise(Normalizer):
    """Base of normalizers whose weights depend on their own scores alone. One method is required: `weight`.

    `divide` is the divisor of all weights of a query: None for no division, ``"sum"`` for their sum (unless it is 0),
    ``"keys"`` for the number of visible keys.

    Gradients of the scores, and of every `nn.Parameter` among the object's attributes, come from autograd on `weight`.
    `qkv.testing.check_normalizer` checks an object.

    >>> class Square(Pointwise):
    ...     divide = "sum"
    ...     def weight(self, scores):
    ...         return scores**2
    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [-3.0]]]])
    >>> attend(q, k, k, normalizer=Square(), return_weights=True)[1].flatten().tolist()
    [0.10000000149011612, 0.8999999761581421]
    """

    definitions: ClassVar = {
        "weight": (
            "weight_", "slope_from_weights", "log_weight", "slope_of_log", "is_identity", "nonnegative", "by_head",
            "zero_at_minus_infinity", "tensors",
        )
    }  # fmt: skip
    is_identity = False
    """Whether the weights are the scores themselves: linear attention."""
    nonnegative = False
    """Whether no weight is ever negative. FlexAttention, on CUDA, then computes them by their logarithms."""

    def weight(self, scores: Float[Tensor, "b h nq nk"]) -> Float[Tensor, "b h nq nk"]:
        """Return weights of scores, before any division, by torch operations that act elementwise.

        The scores are a tile: any part of the batch, the queries and the keys, but always all query heads, so that a
        parameter of shape (heads, 1, 1) broadcasts. They must not be changed in place.
        """
        raise InputError(f"{type(self).__name__}: no method weight(scores)")

    def weigh(self, scores: Scores, level: Level | None) -> Scores:
        return self.weight(scores)

    def weigh_(self, scores: Scores, level: Level | None) -> Scores:
        return self.weight_(scores)

    # --- optional shortcuts: the same numbers, faster -----------------------------------------------------------------

    def weight_(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return `weight`; it may overwrite `scores`."""
        return self.weight(scores)

    def slope_from_weights(self, weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return the derivative of `weight`, as a function of the weights; only if they determine it."""
        raise InputError(f"{type(self).__name__}: no method slope_from_weights(weights)")

    def log_weight(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return the logarithm of `weight`, for ``divide="sum"``: avoids underflow in rows of tiny weights."""
        raise InputError(f"{type(self).__name__}: no method log_weight(scores)")

    def slope_of_log(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return the derivative of `log_weight`."""
        raise InputError(f"{type(self).__name__}: no method slope_of_log(scores)")

    # --- optional parts of a definition -------------------------------------------------------------------------------

    def shift(
        self, visible: Callable[[], Float[Tensor, "#b #h nq"]], like: Float[Tensor, "..."]
    ) -> Float[Tensor, "#b #h #nq"] | None:
        """Return a number per query added to the scores before `weight`, or None.

        `visible()` returns the number of visible keys per query; the result has the dtype and device of `like`.
        """
        return None

    def check(self, heads: int) -> None:
        require(self, Pointwise, "weight", "scores", "the weight of each score")
        check_temperature(self)
        one_of(f"{type(self).__name__}: divide", self.divide, (None, "sum", "keys"))


class SumToOne(Normalizer):
    """Base of normalizers whose weights sum to one. One method is required: `weight`, a function of score and level.

    The weight must be non-increasing in the level. The engine finds the level at which the weights of a row sum to
    one, and differentiates it by the implicit function theorem: exp(s − level) is softmax, whose level is the
    log-sum-exp; relu(s − level) is sparsemax (Martins & Astudillo 2016, arXiv:1602.02068), whose level is its
    threshold.

    Every such normalizer can have an attention sink: an additional term, weight(sink, level), in the sum, which takes
    weight and adds nothing to the output. `sink` is its logit: (heads,), or (batch, heads, queries), or a number; the
    temperature does not divide it. `key` (heads, d) is a learned key with value 0: the call's score compares it with
    the query, the temperature divides the result, and mask and biases do not apply.

    Fully masked rows have weights 0. If the weights of a row cannot sum to one (bounded by 0.5, with one visible key),
    an error is raised. Gradients come from autograd on `weight`, also for every `nn.Parameter` among the object's
    attributes. `qkv.testing.check_normalizer` checks an object.

    >>> class SoftplusSquared(SumToOne):
    ...     def weight(self, scores, level):
    ...         return torch.nn.functional.softplus(scores - level) ** 2
    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0]]]])
    >>> weights = attend(q, k, k, normalizer=SoftplusSquared(sink=0.0), return_weights=True)[1]
    >>> [round(x, 4) for x in weights.flatten().tolist()]
    [0.0408, 0.9529]
    """

    definitions: ClassVar = {
        "weight": (
            "weight_", "level_of", "slope_from_weights", "has_lse", "by_head", "zero_at_minus_infinity", "tensors",
        )
    }  # fmt: skip

    def __init__(
        self, *, temperature: float = 1.0, sink: SinkLogits = None, key: Float[Tensor, "heads d"] | None = None
    ) -> None:
        super().__init__()
        self.temperature = temperature
        for name, value in (("sink", sink), ("key", key)):
            object.__setattr__(self, name, value)
            if isinstance(self, nn.Module) and isinstance(value, nn.Parameter):
                self.register_parameter(f"learned_{name}", value)

    def weight(
        self, scores: Float[Tensor, "b h nq nk"], level: Float[Tensor, "b h nq #nk"]
    ) -> Float[Tensor, "b h nq nk"]:
        """Return weights of scores at the level of their rows; at least 0, and non-increasing in the level.

        The scores are a tile: any part of the batch, the queries and the keys, but always all query heads, so that a
        parameter of shape (heads, 1, 1) broadcasts. They must not be changed in place.
        """
        raise InputError(f"{type(self).__name__}: no method weight(scores, level)")

    def weigh(self, scores: Scores, level: Level | None) -> Scores:
        return self.weight(scores, level)  # type: ignore[arg-type]  # such a normalizer always has one

    def weigh_(self, scores: Scores, level: Level | None) -> Scores:
        return self.weight_(scores, level)  # type: ignore[arg-type]

    # --- optional shortcuts: the same numbers, faster -----------------------------------------------------------------

    def weight_(self, scores: Float[Tensor, "*n k"], level: Float[Tensor, "*n #k"]) -> Float[Tensor, "*n k"]:
        """Return `weight`; it may overwrite `scores`."""
        return self.weight(scores, level)

    def level_of(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
        """Return the level of whole rows, −inf where masked, in closed form; 0 for fully masked rows."""
        raise InputError(f"{type(self).__name__}: no method level_of(scores)")

    def slope_from_weights(self, weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return ∂ weight / ∂ score as a function of the weights; only if a weight depends on score − level alone."""
        raise InputError(f"{type(self).__name__}: no method slope_from_weights(weights)")

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in learned_tensors(self).items() if x is not self.sink and x is not self.key}

    # ------------------------------------------------------------------------------------------------------------------

    def check(self, heads: int) -> None:
        require(self, SumToOne, "weight", "scores, level", "the weight of each score at its row's level")
        check_temperature(self)
        name = type(self).__name__
        if isinstance(self.sink, Tensor) and (self.sink.ndim not in (1, 3) or not self.sink.dtype.is_floating_point):
            raise InputError(
                f"{name}: sink is {self.sink.dtype} of shape {tuple(self.sink.shape)}, "
                "expected one float logit per query head, shape (heads,), or per query, shape (batch, heads, queries)"
            )
        if self.key is not None and (not isinstance(self.key, Tensor) or self.key.ndim != 2):
            raise InputError(f"{name}: key is not a float tensor (heads, d), expected one key per query head")
        if self.key is not None and self.sink is not None:
            raise InputError(f"{name}: sink and key were both passed, expected at most one of them")

    def with_sink(self: S, sink: SinkLogits = None, key: Float[Tensor, "heads d"] | None = None) -> S:
        """Return the same normalizer with this sink or learned key, or without one."""
        changed = copy(self)
        object.__setattr__(changed, "sink", sink)
        object.__setattr__(changed, "key", key)
        return changed

    def sink_of(self, like: Float[Tensor, "b heads nq"]) -> Float[Tensor, "#b heads #nq"] | None:
        """Return the sink logits for queries shaped like `like`, with its dtype and device, or None."""
        if self.sink is None:
            return None
        name = type(self).__name__
        if not isinstance(self.sink, Tensor):
            return like.new_full((1, like.shape[1], 1), float(self.sink))
        if self.sink.ndim == 3:
            if self.sink.shape != like.shape:
                raise InputError(
                    f"{name}: sink has shape {tuple(self.sink.shape)}, expected (batch, heads, queries) = "
                    f"{tuple(like.shape)}"
                )
            return self.sink.to(like)
        if len(self.sink) != like.shape[1]:
            raise InputError(f"{name}: sink has {len(self.sink)} logits for {like.shape[1]} query heads")
        return self.sink.to(like)[None, :, None]


def weights_of(normalizer: Normalizer, scores: Scores, level: Float[Tensor, "*n"] | None) -> Scores:
    """Return weights of final scores, 0 for scores of −inf; for a `Pointwise` normalizer, not yet divided.

    This is the definition that every kernel computes; the faster ones use a normalizer's shortcuts.
    """
    row = None if level is None else level[..., None]
    if normalizer.zero_at_minus_infinity:
        return checked_shape(normalizer, normalizer.weigh(scores, row), scores)
    masked = scores == -torch.inf
    weights = normalizer.weigh(unmasked(scores, masked, row), row)
    return checked_shape(normalizer, weights, scores).masked_fill(masked, 0)


def unmasked(scores: Scores, masked: Tensor, level: Level | None) -> Scores:
    """Return scores with a finite number where masked, so that functions and derivatives never get −inf or NaN."""
    return scores.masked_fill(masked, 0) if level is None else torch.where(masked, level.detach(), scores)


def checked_shape(thing: object, result: Tensor, scores: Tensor, method: str = "weight") -> Tensor:
    """Return the result of a user's method in the dtype of `scores`; `InputError` if its shape differs."""
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        raise InputError(
            f"{type(thing).__name__}: {method} returned {kind_of(result)} for scores of shape {tuple(scores.shape)}, "
            "expected the same shape from an elementwise function; a per-head parameter has shape (heads, 1, 1)"
        )
    return result if result.dtype == scores.dtype else result.to(scores.dtype)
