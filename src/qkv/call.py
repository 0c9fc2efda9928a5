"""One attention call, checked and made ready for a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.biases import Bias, RelativePosition, SoftCap
from qkv.errors import InputError
from qkv.masks import Dense, Grid, Mask
from qkv.normalizers import Hard, Normalizer, Pointwise, Sigmoid, Softmax
from qkv.scores import Dot, Score


@dataclass(frozen=True, eq=False)
class Given:
    """What the user passed, as definitions speak of it."""

    q: Float[Tensor, "b h nq dq"]
    k: Float[Tensor, "b hkv nk dk"]
    v: Float[Tensor, "b hkv nk dv"]
    mask: Mask | None
    biases: tuple[Bias, ...]
    score: Score
    normalizer: Normalizer


@dataclass(frozen=True, eq=False)
class Call:
    """What a kernel works on: queries and keys where they are compared, and everything else as plain tensors.

    The final score of a pair is bias(factor · q·k) / temperature, or bias(vector · tanh(q + k)) / temperature.
    """

    q: Float[Tensor, "b h nq d"]
    k: Float[Tensor, "b hkv nk d"]
    v: Float[Tensor, "b hkv nk dv"]
    mask: Mask | None
    biases: tuple[Bias, ...]
    """Bound to this call: tensors to add, and caps."""
    factor: float
    vector: Float[Tensor, "h d"] | None
    """Of additive scores, one for each query head."""
    normalizer: Normalizer
    sink: Float[Tensor, "#b h #nq"] | None
    """Logit of the part of the softmax that no key owns."""
    shift: Float[Tensor, "#b #h #nq"] | None
    """Added to final scores before a pointwise normalizer."""
    divisor: Float[Tensor, "#b #h nq"] | None
    """What pointwise weights are divided by, where it is known beforehand."""
    values: Float[Tensor, "#h distances dv"] | None
    """Vectors added to the values by clipped distance."""
    dropout_p: float
    seed: int
    """Of dropout and draws."""
    given: Given

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        biases: Sequence[Bias] = (),
        score: Score | None = None,
        normalizer: Normalizer | None = None,
        dropout_p: float = 0.0,
        seed: int | None = None,
    ) -> Call:
        """Check the arguments and make them ready."""
        score, normalizer = Dot() if score is None else score, Softmax() if normalizer is None else normalizer
        given = Given(q, k, v, mask, tuple(biases), score, normalizer)
        _check_tensors(q, k, v)
        _check_kinds(given, dropout_p)
        batch, heads, n_queries, _ = q.shape
        grid = Grid(batch, heads, n_queries, k.shape[2], k.shape[2] - n_queries, q.device)
        if mask is not None:
            mask.check(grid)
        for bias in given.biases:
            bias.check(grid)
        projected, keys = score.project(q, k)
        if seed is None:
            random = dropout_p > 0 or (isinstance(normalizer, Hard) and normalizer.sample)
            seed = int(torch.randint(2**31, ())) if random else 0
        shift, divisor = _shift_and_divisor(normalizer, mask, grid, q)
        vector = score.vector
        return Call(
            projected,
            keys,
            v,
            mask,
            tuple(bias.bound(projected, grid, score.factor(projected.shape[3])) for bias in given.biases),
            score.factor(projected.shape[3]),
            None if vector is None else vector.to(projected).expand(heads, -1),
            normalizer,
            _sink(given, projected),
            shift,
            divisor,
            _values(given),
            dropout_p,
            seed,
            given,
        )

    @property
    def grid(self) -> Grid:
        batch, heads, n_queries, _ = self.q.shape
        n_keys = self.k.shape[2]
        return Grid(batch, heads, n_queries, n_keys, n_keys - n_queries, self.q.device)

    @property
    def scale(self) -> float:
        """What q·k is multiplied by before any bias; the temperature is in it when no bias comes between."""
        return self.factor if self.biases else self.factor / self.normalizer.temperature

    @property
    def capped(self) -> bool:
        """Whether a bias does more to a score than add to it."""
        return any(isinstance(bias, SoftCap) for bias in self.biases)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that may want a gradient, by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "vector", "sink", "shift", "values")}
        named |= {f"bias {i}": bias.tensor for i, bias in enumerate(self.biases)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Call:
        """The same call made of other tensors."""
        biases = [
            bias.with_tensor(tensors[f"bias {i}"]) if f"bias {i}" in tensors else bias
            for i, bias in enumerate(self.biases)
        ]
        plain = {name: x for name, x in tensors.items() if not name.startswith("bias ")}
        return replace(self, biases=tuple(biases), **plain)  # type: ignore[arg-type]

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors().values())


@dataclass(frozen=True, eq=False)
class Result:
    """What a kernel gives."""

    out: Float[Tensor, "b h nq dv"]
    lse: Float[Tensor, "b h nq"] | None
    """Where the normalizer has one."""
    weights: Float[Tensor, "b h nq nk"] | None = None
    """Where the kernel forms them."""


def detached(call: Call) -> Call:
    """The same call with nothing that wants a gradient."""
    return call.with_tensors({name: x.detach() for name, x in call.tensors().items()})


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, weights and statistics of `dtype` inputs are kept."""
    return torch.promote_types(dtype, torch.float32)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{name} is {kind}, expected a float tensor (batch, heads, length, head_dim)")
        if x.ndim != 4:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected (batch, heads, length, head_dim)")
        if 0 in x.shape:
            raise InputError(f"{name} has shape {tuple(x.shape)}, expected at least 1 in every dimension")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise InputError(f"q, k and v differ in batch size: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise InputError(f"k and v differ in heads or length: {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly: {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"q, k and v differ in dtype or device: {kinds}")


def _check_kinds(given: Given, dropout_p: float) -> None:
    if not isinstance(given.score, Score):
        raise InputError(f"score is {given.score!r}, expected an instance from qkv.scores such as Dot()")
    if not isinstance(given.normalizer, Normalizer):
        raise InputError(
            f"normalizer is {given.normalizer!r}, expected an instance from qkv.normalizers such as Softmax()"
        )
    if not 0 <= dropout_p < 1:
        raise InputError(f"dropout_p is {dropout_p}, expected a probability in [0, 1)")
    if dropout_p and isinstance(given.normalizer, Hard):
        raise InputError(f"dropout_p is {dropout_p} with normalizer=Hard, which has one weight a query; expected 0")
    if sum(isinstance(b, RelativePosition) and b.values is not None for b in given.biases) > 1:
        raise InputError("bias has several RelativePosition with values, expected at most one")


def _sink(given: Given, projected: Tensor) -> Tensor | None:
    if not isinstance(given.normalizer, Softmax):
        return None
    heads, wide = projected.shape[1], at_least_float32(projected.dtype)
    if given.normalizer.key is None:
        return given.normalizer.sink_of(projected[..., 0].to(wide))
    key = given.normalizer.key
    if key.shape != (heads, given.k.shape[3]):
        raise InputError(
            f"Softmax: key has shape {tuple(key.shape)}, expected (heads, head_dim) = {(heads, given.k.shape[3])}"
        )
    # The learned keys of query heads that share a key head are projected as several keys of that head.
    keys = key.to(given.k).unflatten(0, (given.k.shape[1], -1)).expand(len(given.q), -1, -1, -1)
    key = given.score.project(given.q, keys)[1].flatten(1, 2)[:, :, None]
    q, key = projected.to(wide), key.to(wide)
    if given.score.vector is None:
        logit = given.score.factor(q.shape[3]) * (q @ key.transpose(-1, -2))[..., 0]
    else:
        logit = (torch.tanh(q + key) * given.score.vector.to(q).expand(heads, -1)[:, None]).sum(-1)
    return logit / given.normalizer.temperature


def _shift_and_divisor(
    normalizer: Normalizer, mask: Mask | None, grid: Grid, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    wide = at_least_float32(q.dtype)

    def visible() -> Tensor:
        if mask is None:
            return torch.full((1, 1, grid.n_queries), grid.n_keys, dtype=wide, device=q.device)
        return mask.visible_keys(grid).clamp(min=1).to(wide)

    if isinstance(normalizer, Sigmoid):
        if normalizer.bias is None:
            return -torch.log(visible()), None
        if not isinstance(normalizer.bias, Tensor):
            return torch.full((1, 1, 1), float(normalizer.bias), dtype=wide, device=q.device), None
        if len(normalizer.bias) != grid.heads:
            raise InputError(f"Sigmoid: bias has {len(normalizer.bias)} numbers for {grid.heads} query heads")
        return normalizer.bias.to(q.device, wide)[None, :, None], None
    if isinstance(normalizer, Pointwise) and normalizer.divide == "keys":
        return None, visible()
    return None, None


def _values(given: Given) -> Tensor | None:
    for bias in given.biases:
        if isinstance(bias, RelativePosition) and bias.values is not None:
            if bias.values.shape[-1] != given.v.shape[3]:
                raise InputError(
                    f"RelativePosition: values have {bias.values.shape[-1]} entries, but v has {given.v.shape[3]}"
                )
            table = bias.values.to(given.v.device, at_least_float32(given.v.dtype))
            return table if table.ndim == 3 else table[None]
    return None


def as_biases(bias: Bias | Sequence[Bias] | None) -> tuple[Bias, ...]:
    """A tuple of biases of what users pass for `bias`."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, Bias) else bias
    if not isinstance(biases, Sequence) or not all(isinstance(b, Bias) for b in biases):
        raise InputError(
            f"bias is {type(bias).__name__}, expected one of qkv.biases or several in a tuple; "
            "wrap a float tensor in qkv.biases.Dense"
        )
    return tuple(biases)


def as_mask(mask: Mask | Bool[Tensor, "..."] | None) -> Mask | None:
    """A mask object of what users pass for `mask`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise InputError(f"mask is the class {mask.__name__}, expected an instance such as {mask.__name__}(...)")
    return Dense(mask)
