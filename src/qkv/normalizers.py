"""Normalizers: functions from the scores of one query to its attention weights, such as softmax.

Each is defined by one method, `weight`. A `Pointwise` weight depends on its own score alone. `SumToOne` weights also
depend on the row's *level*, a number chosen so that the weights sum to one: the log-sum-exp of a softmax, the threshold
of a sparsemax. Gradients, tiles, kernels, statistics and sinks follow from the definition. Your own normalizer inherits
from one of the two: see docs/howto/your-own.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv._contract import Definition, check_by_head, learned_tensors, require, with_attributes
from qkv.errors import InputError, finite, kind_of, one_of

__all__ = [
    "EluPlusOne", "Entmax", "Hard", "Identity", "Normalizer", "Pointwise", "ReLU", "Sigmoid", "Softmax", "Softpick",
    "Sparsemax", "SumToOne",
]  # fmt: skip
__dir__ = __all__.copy

N = TypeVar("N", bound="Normalizer")
S = TypeVar("S", bound="SumToOne")
LOG2_E = math.log2(math.e)

Scores = Float[Tensor, "*n k"]
Level = Float[Tensor, "*n #k"]
Form = Literal["sigmoid", "relu", "elu + 1", "identity", "entmax", "softpick"]
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
    form: Form | None = None
    """What the native library computes without calling a method: one of this module's functions; None for others."""
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

    # --- an optional shortcut of `SumToOne`: the same numbers, faster -------------------------------------------------

    def level_of(self, scores: Scores) -> Float[Tensor, "*n"]:
        """Return the level of whole rows, −inf where masked, in closed form; 0 for fully masked rows."""
        raise InputError(f"{type(self).__name__}: no method level_of(scores)")

    def tensors(self) -> dict[str, Tensor]:
        """Return learned tensors that `weight` uses, by name."""
        return learned_tensors(self)

    def with_temperature(self: N, temperature: float) -> N:
        """Return the same normalizer with another temperature."""
        return with_attributes(self, temperature=temperature)

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
        "weight": ("log_weight", "is_identity", "nonnegative", "by_head", "zero_at_minus_infinity", "tensors", "form")
    }
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

    # --- optional parts of a definition -------------------------------------------------------------------------------

    def log_weight(self, scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
        """Return the logarithm of `weight`, for ``divide="sum"``: avoids underflow in rows of tiny weights."""
        raise InputError(f"{type(self).__name__}: no method log_weight(scores)")

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
        "weight": ("term", "level_of", "has_lse", "by_head", "zero_at_minus_infinity", "tensors", "form")
    }

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

    def term(
        self, scores: Float[Tensor, "b h nq nk"], level: Float[Tensor, "b h nq #nk"]
    ) -> Float[Tensor, "b h nq nk"]:
        """Return what the level makes sum to one over a row: the weights, unless they are divided by another sum.

        At least 0, and non-increasing in the level, as `weight`; see `Softpick`.
        """
        return self.weight(scores, level)

    def weigh(self, scores: Scores, level: Level | None) -> Scores:
        return self.weight(scores, level)  # type: ignore[arg-type]  # such a normalizer always has one

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in learned_tensors(self).items() if x is not self.sink and x is not self.key}

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
        return with_attributes(self, sink=sink, key=key)

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


def weights_of(
    normalizer: Normalizer, scores: Scores, level: Level | None, weigh: Callable[..., Scores] | None = None
) -> Scores:
    """Return weights of final scores, 0 for scores of −inf; for a `Pointwise` normalizer, not yet divided.

    This is the definition that every kernel computes; the faster ones use a normalizer's shortcuts. `weigh` is the
    method to call: `weigh` of the normalizer, or `term`.
    """
    weigh = normalizer.weigh if weigh is None else weigh
    if normalizer.zero_at_minus_infinity:
        return checked_shape(normalizer, weigh(scores, level), scores)
    masked = scores == -torch.inf  # the function and its derivative never get −inf or NaN
    finite = scores.masked_fill(masked, 0) if level is None else torch.where(masked, level.detach(), scores)
    return checked_shape(normalizer, weigh(finite, level), scores).masked_fill(masked, 0)


def checked_shape(thing: object, result: Tensor, scores: Tensor, method: str = "weight") -> Tensor:
    """Return the result of a user's method in the dtype of `scores`; `InputError` if its shape differs."""
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        raise InputError(
            f"{type(thing).__name__}: {method} returned {kind_of(result)} for scores of shape {tuple(scores.shape)}, "
            "expected the same shape from an elementwise function; a per-head parameter has shape (heads, 1, 1)"
        )
    return result if result.dtype == scores.dtype else result.to(scores.dtype)


def log_sum_exp(scores: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Return the log-sum-exp over the last dimension. Rows of −inf give −inf, with zero gradients."""
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    total = torch.exp(scores - top).sum(-1)
    visible = total != 0  # True for NaN: it must propagate
    return torch.where(visible, top[..., 0] + torch.log(torch.where(visible, total, 1.0)), -torch.inf)


class Exponential(SumToOne):
    """Base of normalizers with softmax weights exp(s − level), where the level is the log-sum-exp of the scores."""

    by_head = False
    zero_at_minus_infinity = True

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(scores - level)

    def level_of(self, scores: Tensor) -> Tensor:
        lse = log_sum_exp(scores)
        return lse.masked_fill(lse == -torch.inf, 0)


@dataclass(frozen=True, eq=False)
class Softmax(Exponential):
    """exp(s / temperature), divided by its sum over the visible keys and, if given, exp(sink).

    `sink` is the logit of an attention sink: one per query head, shape (heads,), one per query, shape (batch, heads,
    queries), or one number. It takes weight and adds nothing to the output, so the weights of the keys sum to less than
    one (gpt-oss, arXiv:2508.10925; ``sink=0.0`` is Miller's softmax-off-by-one). The temperature does not divide it.

    `key` (heads, d) is a sink whose logit depends on the query: a learned key with value 0. The call's score compares
    it with the query and the temperature divides the result; mask and biases do not apply (the "K biases" of Gu et al.
    2025, arXiv:2410.10781).

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Softmax(sink=0.0))[0, 0, 0, 0].item()
    0.5
    """

    temperature: float = 1.0
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    has_lse = True

    def __post_init__(self) -> None:
        self.check(0)


@dataclass(frozen=True, eq=False)
class Hard(Exponential):
    """Hard attention: all weight on the best key, or with ``sample=True`` on a key drawn from the softmax.

    The gradient is straight-through: the output is the value of the chosen key, and scores get the gradient of softmax
    attention (Xu et al. 2015, arXiv:1502.03044, §4.1, with the estimator of Bengio et al. 2013,
    arXiv:1308.3432). For REINFORCE use `qkv.choose_keys`, which returns the log-probability of each choice. Ties go to
    the first key. A draw takes its seed from torch's generator: ``torch.manual_seed`` makes it reproducible.

    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [3.0], [2.0]]]])
    >>> attend(q, k, k, normalizer=Hard()).item()
    3.0
    """

    sample: bool = False
    temperature: float = 1.0
    one_key = True

    def __post_init__(self) -> None:
        check_temperature(self)


STEPS = 100  # most Newton steps for a threshold


@dataclass(frozen=True, eq=False)
class Entmax(SumToOne):
    """α-entmax: [(α − 1) (s − level)]₊^(1/(α−1)), which sum to one; exact zeros for low scores.

    1 < α ≤ 2; α = 1.5 by default, α = 2 is `Sparsemax`, and α → 1 is softmax (Peters et al. 2019, arXiv:1905.05702,
    eq. 10, whose threshold τ is (α − 1) times the level). `sink` and `key` as in `Softmax`.

    >>> from qkv import attend
    >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0], [0.5], [-1.0]]]])
    >>> attend(q, k, k, normalizer=Entmax(2.0), return_weights=True)[1].flatten().tolist()
    [0.75, 0.25, 0.0]
    """

    form = "entmax"
    alpha: float = 1.5
    temperature: float = 1.0
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    by_head = False
    zero_at_minus_infinity = True

    def __post_init__(self) -> None:
        if not finite(self.alpha) or not 1 < self.alpha <= 2:
            raise InputError(f"Entmax: alpha is {self.alpha!r}, expected 1 < alpha ≤ 2 (for alpha = 1 use Softmax)")
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        return _powers((self.alpha - 1) * (scores - level), 1 / (self.alpha - 1))

    def level_of(self, scores: Tensor) -> Tensor:
        """Solve ‖[z − τ]₊‖_p = 1 with z = (α − 1) s by Newton's method: convex and falling in τ, from τ = max z − 1.

        The norm is at least 1 there, so the steps increase τ and never pass the root. For α = 2 the result is exact
        after finitely many steps (Michelot 1986).
        """
        p = 1 / (self.alpha - 1)
        z = (self.alpha - 1) * scores
        top = z.amax(-1)
        empty = top == -torch.inf
        tau = torch.where(empty, 0.0, top - 1)
        for _ in range(STEPS):
            above = z - tau[..., None]
            total = _powers(above, p).sum(-1)
            slope = _powers(above, p - 1).sum(-1) if p != 1 else (above > 0).to(z).sum(-1)
            step = (1 - total ** (-1 / p)) * total / slope  # NaN for an empty row, which stays where it is
            # Converged rows stop moving, so a row's result does not depend on the others in the batch.
            moving = step > 2 * torch.finfo(z.dtype).eps * (1 + tau.abs())
            if not moving.any():
                break
            tau = torch.where(moving, tau + step, tau)
        return tau / (self.alpha - 1)


def Sparsemax(temperature: float = 1.0) -> Entmax:  # noqa: N802  (named like a class because it constructs a normalizer)
    """The distribution nearest to the scores (Martins & Astudillo 2016, arXiv:1602.02068, eq. 2): `Entmax` with α = 2.

    >>> Sparsemax().alpha
    2.0
    """
    return Entmax(2.0, temperature)


@dataclass(frozen=True, eq=False)
class Softpick(SumToOne):
    """Rectified softmax: ``max(e^s − 1, 0) / Σ |e^s − 1|`` (Zuhri, Fuadi & Aji 2025, arXiv:2504.20966).

    Keys with s ≤ 0 get no weight and count in the divisor, so a row may sum to less than one, or to 0: a query that
    needs no key needs no sink. The paper's ε of the divisor is 0 here; a row of scores that are all 0 has weights 0.

    >>> from qkv import attend
    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([2.0, 3.0, 0.5]).log().view(1, 1, 3, 1)
    >>> [round(x, 4) for x in attend(q, k, k, normalizer=Softpick(), return_weights=True)[1].flatten().tolist()]
    [0.2857, 0.5714, 0.0]
    """

    form = "softpick"
    temperature: float = 1.0
    sink: SinkLogits = None
    key: Float[Tensor, "heads d"] | None = None
    by_head = False

    def __post_init__(self) -> None:
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}

    # |e^s − 1| is e^max(s, 0) · (1 − e^−|s|), which neither overflows nor cancels.

    def weight(self, scores: Tensor, level: Tensor) -> Tensor:
        above = torch.relu(scores)
        return torch.exp(above - level) * -torch.expm1(-above)

    def term(self, scores: Tensor, level: Tensor) -> Tensor:
        return torch.exp(torch.relu(scores) - level) * -torch.expm1(-scores.abs())

    def level_of(self, scores: Tensor) -> Tensor:
        masked = scores == -torch.inf
        logs = torch.relu(scores) + torch.log(-torch.expm1(-scores.abs()))
        level = log_sum_exp(logs.masked_fill(masked, -torch.inf))
        return level.masked_fill(level == -torch.inf, 0)


def _powers(x: Tensor, p: float) -> Tensor:
    """Return [x]₊^p, with derivative 0 at 0 and below."""
    x = torch.relu(x)
    return x if p == 1 else x * x if p == 2 else torch.where(x > 0, x.clamp(min=torch.finfo(x.dtype).tiny) ** p, 0.0)


class _OfScore(Pointwise):
    """A weight that depends on the score alone, the same function for all heads."""

    by_head = False

    def __post_init__(self) -> None:
        self.check(0)

    def tensors(self) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, eq=False)
class Sigmoid(_OfScore):
    """Sigmoid attention, σ(s + b) (Ramapuram et al. 2024, arXiv:2409.04431, eq. 3).

    `bias` b is a number, or a tensor with one number per query head, shape (heads,), which may be learned. If None it
    is −ln n, where n is the number of visible keys of the query. With ``divide="sum"`` the weights of a query are
    divided by their sum (Gu et al. 2025, arXiv:2410.10781, §6.2, compares both).

    >>> from qkv import attend
    >>> q = k = torch.zeros(1, 1, 1, 8)
    >>> attend(q, k, torch.ones(1, 1, 1, 8), normalizer=Sigmoid(bias=0.0))[0, 0, 0, 0].item()
    0.5
    """

    form = "sigmoid"
    bias: Float[Tensor, " heads"] | float | None = None
    divide: str | None = None
    zero_at_minus_infinity = True
    nonnegative = True

    def check(self, heads: int) -> None:
        super().check(heads)
        check_by_head("Sigmoid: bias", 0.0 if self.bias is None else self.bias, heads or None)

    def shift(self, visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        if self.bias is None:
            return -torch.log(visible())
        if isinstance(self.bias, Tensor):
            return self.bias.to(like)[None, :, None]
        return like.new_full((1, 1, 1), float(self.bias))

    def weight(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def log_weight(self, scores: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(scores)


@dataclass(frozen=True, eq=False)
class EluPlusOne(_OfScore):
    """elu(s) + 1: exp(s) below 0, s + 1 above (Gu et al. 2025, arXiv:2410.10781).

    Not the feature map of linear attention, which is `qkv.features.elu_plus_one`.

    >>> EluPlusOne().weight(torch.tensor([0.0, 2.0])).tolist()
    [1.0, 3.0]
    """

    form = "elu + 1"
    divide: str | None = None
    zero_at_minus_infinity = True
    nonnegative = True

    # exp(min(s, 0)) + max(s, 0): the sum elu(s) + 1 would cancel for s ≪ 0.

    def weight(self, scores: Tensor) -> Tensor:
        return torch.exp(scores.clamp(max=0)) + torch.relu(scores)

    def log_weight(self, scores: Tensor) -> Tensor:
        return torch.log1p(torch.relu(scores)) + scores.clamp(max=0)


@dataclass(frozen=True, eq=False)
class ReLU(_OfScore):
    """max(s, 0), divided by the number of visible keys (Wortsman et al. 2023, arXiv:2309.08586).

    >>> ReLU().weight(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """

    form = "relu"
    divide: str | None = "keys"
    zero_at_minus_infinity = True
    nonnegative = True

    def weight(self, scores: Tensor) -> Tensor:
        return torch.relu(scores)


@dataclass(frozen=True, eq=False)
class Identity(_OfScore):
    """The score itself: no normalization, or with ``divide="sum"`` the weights of linear attention.

    >>> Identity().weight(torch.tensor([-1.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    form = "identity"
    divide: str | None = None
    is_identity = True

    def weight(self, scores: Tensor) -> Tensor:
        return scores
