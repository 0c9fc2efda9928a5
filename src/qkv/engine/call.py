"""An attention call, checked and prepared: `Call`, and what is known of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv._contract import overrides, unlisted_tensor
from qkv.biases import Bias, Form, TensorBias
from qkv.engine.modes import dense, readable
from qkv.errors import InputError, finite, kind_of, refusing
from qkv.masks import Dense, Grid, Mask, Region
from qkv.masks.base import mask_of_part
from qkv.masks.convert import block_visibility
from qkv.normalizers import Normalizer, Pointwise, Softmax, SumToOne
from qkv.scores import Dot, Pairwise, Product, Score


@dataclass(frozen=True, eq=False)
class UserArguments:
    """The arguments as the user passed them, for the reference and for error messages."""

    q: Float[Tensor, "b h nq dq"]
    k: Float[Tensor, "b hkv nk dk"]
    v: Float[Tensor, "b hkv nk dv"]
    mask: Mask | None
    biases: tuple[Bias, ...]
    score: Score
    normalizer: Normalizer


@dataclass(frozen=True, eq=False)
class Call:
    """Input of a kernel: projected queries and keys, biases bound to the call, and all parameters as plain tensors.

    The final score of a pair is bias(factor · q·k) / temperature, or bias(pairwise score) / temperature.
    """

    q: Float[Tensor, "b h nq d"]
    k: Float[Tensor, "b hkv nk d"]
    v: Float[Tensor, "b hkv nk dv"]
    mask: Mask | None
    biases: tuple[Bias, ...]
    """Biases, bound to this call."""
    factor: float
    pairwise: Pairwise | None
    """The score function, if it is not a product."""
    normalizer: Normalizer
    sink: Float[Tensor, "#b h #nq"] | None
    """Logit of the attention sink: a term of the normalizer's sum that belongs to no key."""
    shift: Float[Tensor, "#b #h #nq"] | None
    """Added to final scores before a pointwise normalizer."""
    divisor: Float[Tensor, "#b #h nq"] | None
    """Divisor of pointwise weights that does not depend on the scores: the number of visible keys."""
    values: Float[Tensor, "#h distances dv"] | None
    """Vectors added to the values by clipped distance (`RelativePosition`)."""
    dropout_p: float
    seed: int
    """Seed of dropout and of the draws of `Hard`."""
    user: UserArguments
    learned: dict[str, Tensor] = field(default_factory=dict)
    """Learned tensors inside the score and normalizer objects, by name."""

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None = None,
        bias: Bias | Sequence[Bias] | None = None, score: Score | None = None, normalizer: Normalizer | None = None,
        dropout_p: float = 0.0, seed: int | None = None,
    ) -> Call:  # fmt: skip
        """Check the arguments, project queries and keys, and bind the biases."""
        mask = as_mask(mask)
        score, normalizer = DOT if score is None else score, SOFTMAX if normalizer is None else normalizer
        user = UserArguments(q, k, v, mask, as_biases(bias), score, normalizer)
        _check_tensors(q, k, v)
        _check_kinds(user, dropout_p)
        grid = Grid.of(q.shape[2], k.shape[2], q.shape[0], q.shape[1], q.device)
        if mask is not None:
            mask.check(grid)
        for one in user.biases:
            one.check(grid)
        if mask is not None and torch.is_grad_enabled():
            if isinstance(score, Pairwise) or overrides(score, Score, "project"):
                q, k = zero_masked_nonfinite(q, k, mask, grid, normalizer)
            elif mask.band is None and (q.requires_grad or k.requires_grad):
                q, _ = zero_masked_nonfinite(q, k[:, :, :0], mask, grid, normalizer)
        projected, keys = score.project(q, k)
        if (by_row := score.row_factor(lambda: _visible(mask, grid, q), projected)) is not None:
            projected = projected * by_row[..., None].to(projected)
        if seed is None:
            random = dropout_p > 0 or (normalizer.one_key and normalizer.sample)
            seed = int(torch.randint(2**31, ())) if random else 0
        factor = score.factor(projected.shape[3])
        biases = tuple(one.bind(projected, grid, factor) for one in user.biases)
        for one in biases:
            one.require()
        shift = divisor = None
        if isinstance(normalizer, Pointwise):
            shift, divisor = _shift_and_divisor(normalizer, mask, grid, q)
            if normalizer.divide == "sum" and overrides(normalizer, Pointwise, "log_weight"):
                # Weights divided by their sum are the softmax of their logarithms, which do not underflow.
                if shift is not None:
                    biases = (*biases, TensorBias(shift[..., None] * normalizer.temperature))
                kind = LogWeight if normalizer.by_head else LogWeightOfScore
                biases, normalizer, shift = (*biases, kind(normalizer)), Softmax(), None
        learned = {f"normalizer {name}": x for name, x in normalizer.tensors().items()}
        pairwise = score if isinstance(score, Pairwise) else None
        if pairwise is not None:
            learned |= {f"score {name}": x for name, x in pairwise.tensors().items()}
        call = Call(
            projected, keys, v, mask, biases, factor, pairwise, normalizer, _sink(user, projected), shift, divisor,
            _values(user), dropout_p, seed, user, learned,
        )  # fmt: skip
        vars(call)["grid"] = grid
        return call

    @cached_property
    def grid(self) -> Grid:
        return Grid.of(self.q.shape[2], self.k.shape[2], self.q.shape[0], self.q.shape[1], self.q.device)

    @property
    def scale(self) -> float:
        """Factor of q·k before any bias; it includes the temperature if there are no biases."""
        return self.factor if self.biases else self.factor / self.normalizer.temperature

    @property
    def by_head(self) -> bool:
        """Whether a user-defined method may have per-head parameters, so that its tiles need all query heads."""
        scores = self.pairwise is not None and self.pairwise.by_head
        return scores or self.normalizer.by_head or any(bias.by_head for bias in self.biases)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that may require gradients, by name."""
        named: dict[str, Tensor] = {name: x for name in PLAIN if (x := getattr(self, name)) is not None}
        for i, bias in enumerate(self.biases):
            named |= {f"bias {i} {name}": x for name, x in bias.tensors().items()}
        return named | self.learned if self.learned else named

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Call:
        """Return the same call with other tensors; tensors inside user-defined objects are not replaced."""
        biases = []
        for i, bias in enumerate(self.biases):
            start = f"bias {i} "
            inside = {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}
            biases.append(bias.with_tensors(inside) if inside else bias)
        plain = {name: x for name, x in tensors.items() if name in PLAIN}
        return replace(self, biases=tuple(biases), **plain)  # type: ignore[arg-type]

    def part(self, queries: slice, keys: slice, place: Region | None = None, grid: Grid | None = None) -> Call:
        """Return the call of some queries and keys, a rectangle of the score matrix. No query or key is copied.

        If this call is a shard of a longer sequence, its mask and its biases are those of the whole matrix, `grid`, in
        which `place` is the rectangle.
        """
        assert self.values is None, "a part counts distances from its own first token"
        grid = self.grid if grid is None else grid
        place = Region(queries, keys, offset=grid.offset) if place is None else place
        return replace(
            self, q=self.q[:, :, queries], k=self.k[:, :, keys], v=self.v[:, :, keys],
            mask=None if self.mask is None else mask_of_part(self.mask, grid, place),
            biases=tuple(bias.part(place) for bias in self.biases), sink=along(self.sink, queries),
            shift=along(self.shift, queries), divisor=along(self.divisor, queries),
        )  # fmt: skip

    @cached_property
    def untracked(self) -> str | None:
        """Why only autograd through all scores finds every gradient: a learned tensor in a closure. Else None."""
        own = [x for x in (self.normalizer, self.pairwise, *self.biases) if x is not None and user_defined(x)]
        if not own or not torch.is_grad_enabled():
            return None
        like = torch.zeros(1, self.q.shape[1], 1, 1, dtype=at_least_float32(self.q.dtype), device=self.q.device)
        one, heads = slice(0, 1), slice(0, self.q.shape[1])
        for thing in own:
            if isinstance(thing, Normalizer):
                result = thing.weigh(like, like)
                if isinstance(thing, SumToOne):
                    result = result + thing.term(like, like)
            elif isinstance(thing, Pairwise):
                q, k = (x[:1, :, :1].detach().to(like) for x in (self.q, self.k))
                result = thing.scores(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
            else:
                result = thing.apply(like, Region(one, one, one, heads, self.grid.offset, self.q.device))
            if unlisted_tensor(result, thing.tensors()):
                return (
                    f"{type(_definer(thing)).__name__} uses a tensor that requires a gradient and is not among its "
                    "attributes; only autograd through all scores (kernel='eager') differentiates it"
                )
        return None

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors().values())


DOT, SOFTMAX = Dot(), Softmax()
PLAIN = ("q", "k", "v", "sink", "shift", "values")
"""Fields of a call that are tensors and may want a gradient."""


def detached(call: Call, *, learned: bool = False) -> Call:
    """Return the call with detached tensors; `learned` keeps those of user-defined objects attached."""
    if not call.learned and not any(x.requires_grad for x in call.tensors().values()):
        return call
    plain = call.with_tensors({name: x.detach() for name, x in call.tensors().items()})
    return plain if learned else replace(plain, learned={})


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores, weights and statistics of `dtype` inputs are kept."""
    return torch.promote_types(dtype, torch.float32)


LOGS: dict[str | None, Form] = {"sigmoid": "log sigmoid", "elu + 1": "log elu + 1"}
"""By the form of a normalizer, that of the bias which is its logarithm."""


@dataclass(frozen=True, eq=False)
class LogWeight(Bias):
    """ln w(s) of a pointwise normalizer, as a bias: weights divided by their sum are the softmax of ln w(s)."""

    normalizer: Pointwise
    position_free = True

    @property
    def form(self) -> Form | None:  # type: ignore[override]
        return LOGS.get(self.normalizer.form)

    def apply(self, scores: Tensor, region: Region | None) -> Tensor:
        masked = scores == -torch.inf
        logs = self.normalizer.log_weight(scores.masked_fill(masked, 0) / self.normalizer.temperature)
        return logs.masked_fill(masked, -torch.inf)

    def tensors(self) -> dict[str, Tensor]:
        return self.normalizer.tensors()


class LogWeightOfScore(LogWeight):
    """ln w(s) of a normalizer without parameters by head, which can thus be called for a single score."""

    by_head = False

    def at(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.apply(score, None)


def user_defined(thing: object) -> bool:
    """Return whether an object's class is not of this package: its methods may use tensors that it does not list."""
    thing = _definer(thing)
    return thing is not None and not type(thing).__module__.startswith("qkv.")


def _definer(thing: object) -> object:
    """Return the object whose methods compute a thing: the normalizer of its logarithms, else the thing itself."""
    return thing.normalizer if isinstance(thing, LogWeight) else thing


def zero_masked_nonfinite(
    q: Tensor, k: Tensor, mask: Mask, grid: Grid, normalizer: Normalizer
) -> tuple[Tensor, Tensor]:
    """Zero NaN or ∞ in keys that are masked for all queries, and in fully masked queries: 0 · NaN in the backward."""
    if not readable(q):
        return q, k
    keyed = normalizer.key is not None  # a learned key is visible to every query
    clean_q, clean_k = keyed or math.isfinite(q.sum().item()), math.isfinite(k.sum().item())
    if clean_q and clean_k:
        return q, k
    _, queries, keys = block_visibility(mask, grid, 128)
    if not clean_q:
        q = q.masked_fill(~queries.expand(*q.shape[:2], -1)[..., None], 0)
    return q, k if clean_k else k.masked_fill(~keys[:, None, :, None], 0)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.dtype.itemsize < 2:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} is {kind}, expected floats of 16 bits or more (batch, heads, length, head_dim)")
        if not dense(x):
            raise InputError(
                f"{name} is a {'nested tensor' if x.is_nested else x.layout}, expected a dense one; pack texts of "
                "several lengths into one and pass mask=qkv.masks.Document(ids)"
            )
        if x.ndim != 4:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}, expected (batch, heads, length, head_dim), or q, k and v of "
                "(batch, length, head_dim) or (length, head_dim) alike"
            )
        if 0 in x.shape:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected at least 1 in every dimension")
    (b, h, _, _), (k_batch, k_heads, *_) = q.shape, k.shape
    if not (b == k_batch == v.shape[0] and k.shape[:3] == v.shape[:3] and h % k_heads == 0):
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not (b == k_batch == v.shape[0]):
            raise InputError(f"q, k and v differ in batch size: {shapes}")
        if k.shape[1:3] != v.shape[1:3]:
            raise InputError(f"k and v differ in heads or length: {shapes}")
        raise InputError(f"q has {h} heads, expected a multiple of the {k_heads} heads of k: {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        dtypes = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"q, k and v differ in dtype or device: {dtypes}")


def _check_kinds(user: UserArguments, dropout_p: float) -> None:
    if not isinstance(user.score, Score):
        raise InputError(f"score is {user.score!r}, expected an instance from qkv.scores such as Dot()")
    if user.score is not DOT:
        user.score.check()
    if not isinstance(user.normalizer, Normalizer):
        raise InputError(
            f"normalizer is {user.normalizer!r}, expected an instance from qkv.normalizers such as Softmax()"
        )
    if user.normalizer is not SOFTMAX:
        user.normalizer.check(user.q.shape[1])
    if not finite(dropout_p) or not 0 <= dropout_p < 1:
        raise InputError(f"dropout_p is {dropout_p!r}, expected a probability in [0, 1)")
    if dropout_p and user.normalizer.one_key:
        name = type(user.normalizer).__name__
        raise InputError(f"dropout_p is {dropout_p} with normalizer={name}, which has one weight per query; expected 0")


def _sink(user: UserArguments, projected: Tensor) -> Tensor | None:
    normalizer = user.normalizer
    if not isinstance(normalizer, SumToOne) or (normalizer.sink is None and normalizer.key is None):
        return None
    heads, wide = projected.shape[1], at_least_float32(projected.dtype)
    if normalizer.key is None:
        return normalizer.sink_of(projected.new_empty(projected.shape[:3], dtype=wide))
    key = normalizer.key
    if key.shape != (heads, user.k.shape[3]):
        raise InputError(
            f"{type(normalizer).__name__}: key has shape {tuple(key.shape)}, "
            f"expected (heads, head_dim) = {(heads, user.k.shape[3])}"
        )
    # The learned keys of the query heads in a group are projected as several keys of their key head.
    keys = key.to(user.k).unflatten(0, (user.k.shape[1], -1)).expand(len(user.q), -1, -1, -1)
    key = user.score.project(user.q, keys)[1].flatten(1, 2)[:, :, None]
    q, key = projected.to(wide), key.to(wide)
    if isinstance(user.score, Pairwise):
        logit = user.score.scores(q, key)[..., 0]
    else:
        logit = user.score.factor(q.shape[3]) * (q @ key.transpose(-1, -2))[..., 0]
    return logit / normalizer.temperature


def _shift_and_divisor(
    normalizer: Pointwise, mask: Mask | None, grid: Grid, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    def visible() -> Tensor:
        return _visible(mask, grid, q)

    shift = normalizer.shift(visible, q.new_empty(0, dtype=at_least_float32(q.dtype)))
    return shift, visible() if normalizer.divide == "keys" else None


def _visible(mask: Mask | None, grid: Grid, q: Tensor) -> Float[Tensor, "#b #h nq"]:
    """Return how many keys each query sees, at least 1."""
    wide = at_least_float32(q.dtype)
    if mask is None:
        return torch.full((1, 1, grid.n_queries), grid.n_keys, dtype=wide, device=q.device)
    return mask.visible_keys(grid).clamp(min=1).to(wide)


def _values(user: UserArguments) -> Tensor | None:
    values = None
    for bias in user.biases:
        if (table := bias.value_table) is None:
            continue
        if values is not None:
            raise InputError("bias contains several RelativePosition with values, expected at most one")
        if table.shape[-1] != user.v.shape[3]:
            raise InputError(
                f"{type(bias).__name__}: values have {table.shape[-1]} entries, but v has {user.v.shape[3]}"
            )
        values = table.to(user.v.device, at_least_float32(user.v.dtype))
        values = values if values.ndim == 3 else values[None]
    return values


def dot_softmax(
    score: Score | None, normalizer: Normalizer | None, q: Tensor, bias: object
) -> tuple[float | None, Tensor | float | None] | None:
    """Return the factor (None: 1/√d) and sink of a softmax of products, else None; a bias allows no temperature."""
    scale = sink = None
    if score is not None:
        if not isinstance(score, Product) or score.projects:
            return None
        score.check()
        scale = score.factor(q.shape[-1])
    if normalizer is not None:
        if not isinstance(normalizer, SumToOne) or not normalizer.has_lse or normalizer.key is not None:
            return None
        sink = normalizer.sink
        temperature = normalizer.temperature
        if temperature != 1:
            if bias is not None or not isinstance(temperature, float | int) or not temperature > 0:
                return None
            scale = (q.shape[-1] ** -0.5 if scale is None else scale) / temperature
    return (scale, sink) if scale is None or scale > 0 else None


def as_biases(bias: Bias | Sequence[Bias] | None) -> tuple[Bias, ...]:
    """Return the argument `bias` as a tuple of biases."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, Bias) else bias
    if not isinstance(biases, Sequence) or not all(isinstance(b, Bias) for b in biases):
        several = bias if isinstance(bias, Sequence) else (bias,)
        wrong = next(b for b in several if not isinstance(b, Bias))
        raise InputError(
            f"bias is {kind_of(wrong)}, expected one of qkv.biases or several in a tuple; wrap a float tensor in "
            "qkv.biases.TensorBias"
        )
    return tuple(biases)


def tensor_of(name: str, array: np.ndarray) -> Tensor:
    """Return an array as a tensor: on its memory, or a copy if it is read-only, reversed or of another byte order."""
    steps = [step < 0 or step % max(array.itemsize, 1) for step in array.strides]
    if any(steps) or not (array.flags.writeable and array.dtype.isnative):
        array = np.array(array, array.dtype.newbyteorder("="), order="C")
    with refusing(f"{name} is an array of {array.dtype}, expected numbers of a type that torch has", TypeError):
        return torch.from_numpy(array)


METHODS = dict.fromkeys(("visible", "check", "classify", "band")).keys()  # of masks, in the order of their mention


def as_mask(mask: Mask | Bool[Tensor, "..."] | None) -> Mask | None:
    """Return the argument `mask` as a mask object."""
    if mask is None:
        return None
    if isinstance(mask, Mask):
        if not METHODS.isdisjoint(vars(mask)):
            name = next(name for name in METHODS if name in vars(mask))
            raise InputError(
                f"mask is {type(mask).__name__} with an attribute {name}, which hides the method {name}; expected "
                "another name"
            )
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise InputError(f"mask is the class {mask.__name__}, expected an instance such as {mask.__name__}(...)")
    dense = Dense(tensor_of("mask", mask) if isinstance(mask, np.ndarray) else mask)
    if (how := inverted(dense.tensor)) is not None:
        raise InputError(
            f"mask is {how}, as where True means masked, but in qkv True means may attend; expected ~mask, or "
            "blocked=mask of qkv.attend, or qkv.masks.Dense(mask) if this is meant"
        )
    return dense


def inverted(mask: Bool[Tensor, "..."]) -> str | None:
    """Return how a boolean mask looks as one in which True means masked, in words; None if it does not. Only on CPU.

    >>> inverted(torch.ones(3, 3, dtype=torch.bool).triu(1))
    'True everywhere above the diagonal, and False on it'
    """
    if mask.device.type != "cpu" or mask.ndim < 2:
        return None
    n = mask.shape[-1]
    if mask.shape[-2] == n >= 2:
        suspect = mask[..., 0, 1:].all(-1) & ~mask.diagonal(dim1=-2, dim2=-1).all(-1)  # cheap checks first
        if bool(suspect.any()) and bool((mask[suspect] | mask.new_ones(n, n).tril()).all(-1).all(-1).any()):
            return "True everywhere above the diagonal, and False on it"
    texts = mask.view(torch.uint8).flatten(1) if mask.ndim == 4 else mask.view(torch.uint8).reshape(1, -1)
    seen = texts.shape[1] > 0 and bool(texts.amax(1).all())  # `any` of bools takes fifty times as long
    return None if seen else "False for all queries and keys of a text"


@dataclass(eq=False)
class RowState:
    """Per-query normalizer state: log-sum-exp or threshold, sum of the weights, or the chosen key."""

    level: Float[Tensor, "b h nq"] | None = None
    """State of a `SumToOne` normalizer: log-sum-exp for softmax (−inf for fully masked rows), threshold for entmax."""
    total: Float[Tensor, "b h nq"] | None = None
    """Sum of pointwise weights, if they are divided by it; 1 where the sum is 0."""
    chosen: Int[Tensor, "b h nq"] | None = None
    """The key chosen by hard attention; −1 for none."""

    def part(self, queries: slice, keys: slice) -> RowState:
        """Return the state of some rows, over all keys, for the `Call.part` of these queries and keys."""
        chosen = None if self.chosen is None else self.chosen[:, :, queries] - keys.start
        return RowState(along(self.level, queries), along(self.total, queries), chosen)


def along(x: Tensor | None, queries: slice) -> Tensor | None:
    """Return the slice of x (b, h, nq) or (b, h, 1) for some queries."""
    return x if x is None or x.shape[2] == 1 else x[:, :, queries]
