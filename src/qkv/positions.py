"""Positional encodings: `Sinusoidal` and `Learned`, added to embeddings, and `Rotary`, applied to queries and keys.

The scalings `Linear`, `NTK`, `DynamicNTK`, `YaRN` and `Llama3` extend `Rotary` beyond the training length. Positional
biases (ALiBi, T5, relative positions) are in `qkv.biases`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv.errors import InputError, at_least_one, finite

__all__ = [
    "NTK",
    "DynamicNTK",
    "Learned",
    "Linear",
    "Llama3",
    "Proportional",
    "Rotary",
    "Scaling",
    "Sinusoidal",
    "YaRN",
]
__dir__ = __all__.copy


class Learned(nn.Module):
    """One learned vector for each position below `length`, initialised with N(0, 0.02²) (Gehring et al. 2017).

    Maps positions (…) to vectors (…, dim), which are added to the embeddings. (arXiv:1705.03122, §3.1.)

    >>> Learned(8, 4)(torch.tensor([0, 7])).shape
    torch.Size([2, 4])
    """

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        at_least_one("Learned", length=length, dim=dim)
        self.weight = nn.Parameter(torch.empty(length, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n dim"]:
        """Return the vectors of `positions`; raises `InputError` for positions out of range."""
        if not torch.compiler.is_compiling() and positions.numel():
            self._check(*(int(x) for x in positions.aminmax()))
        return nn.functional.embedding(positions, self.weight)

    def span(self, start: int, stop: int) -> Float[Tensor, "n dim"]:
        """Return the vectors of positions start … stop − 1, as a view of the table."""
        self._check(start, stop - 1)
        return self.weight[start:stop]

    def _check(self, first: int, last: int) -> None:
        if first < 0 or last >= len(self.weight):
            raise InputError(f"Learned: positions are {first}..{last}, expected 0..{len(self.weight) - 1}")


@dataclass(frozen=True)
class Sinusoidal:
    """sin and cos of the position at geometric wavelengths (Vaswani et al. 2017, arXiv:1706.03762, §3.5).

    Entry 2i is sin(p / base^(2i/dim)), entry 2i + 1 its cosine. Defined for all positions.

    >>> Sinusoidal(4)(torch.tensor([0])).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """

    dim: int
    base: float = 10_000.0

    def __post_init__(self) -> None:
        _check_wavelengths(self)

    def __call__(self, positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n dim"]:
        """Return the encoding of `positions`, to be added to the embeddings; float32."""
        angle = positions.double()[..., None] * _frequencies(self.dim, self.base).to(positions.device)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).float()


def _check_wavelengths(of: Sinusoidal | Rotary) -> None:
    name, dim = type(of).__name__, of.dim
    if not finite(dim) or dim < 2 or dim % 2:
        raise InputError(f"{name}: dim is {dim!r}, expected an even number of dimensions, two per wavelength")
    if not finite(of.base) or of.base <= 1:
        raise InputError(f"{name}: base is {of.base!r}, expected more than 1")


def _frequencies(dim: int, base: float) -> Float[Tensor, " pairs"]:
    """Return the frequency of each pair of dimensions in radians per token, float64."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


class Scaling:
    """Base of the scalings that extend rotary positions beyond the training length.

    >>> Linear(2.0).frequencies(4, base=10_000.0, length=1).tolist()
    [0.5, 0.005]
    """

    def frequencies(self, dim: int, base: float, length: int) -> Float[Tensor, " pairs"]:
        """Return the frequency of each pair of dimensions, radians per token, float64, for `length` tokens."""
        raise TypeError(f"{type(self).__name__} does not implement frequencies(dim, base, length)")

    @property
    def magnitude(self) -> float:
        """Factor of cos and sin."""
        return 1.0


@dataclass(frozen=True)
class _ByFactor(Scaling):
    """A scaling by a factor, and in some from the number of tokens that the model was trained on, `original`."""

    factor: float

    def __post_init__(self) -> None:
        name, original = type(self).__name__, getattr(self, "original", 1)
        if not finite(self.factor) or self.factor < 1:
            raise InputError(f"{name}: factor is {self.factor!r}, expected at least 1")
        if not finite(original) or original < 1:
            raise InputError(f"{name}: original is {original!r}, expected the number of tokens of the training")


@dataclass(frozen=True)
class Linear(_ByFactor):
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595).

    >>> Rotary(4, scaling=Linear(2.0))(torch.ones(1, 1, 1, 4), torch.tensor([2])).sum().item() == Rotary(4)(
    ...     torch.ones(1, 1, 1, 4), torch.tensor([1])).sum().item()
    True
    """

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        return _frequencies(dim, base) / self.factor


@dataclass(frozen=True)
class Proportional(Scaling):
    """p-RoPE: a `share` of the pairs is rotated, those of high frequency; the others do not turn.

    The lowest frequencies carry content, which turns away from itself in a long text (Barbero et al. 2025,
    arXiv:2410.06205). 1 is RoPE, 0 no positions. Unlike a smaller `Rotary.dim`, it leaves the
    frequencies of the turning pairs as they are. ``"proportional"`` in Hugging Face.

    >>> Proportional(0.5).frequencies(8, base=10_000.0, length=1).tolist()
    [1.0, 0.1, 0.0, 0.0]
    """

    share: float

    def __post_init__(self) -> None:
        if not finite(self.share) or not 0 <= self.share <= 1:
            raise InputError(f"Proportional: share is {self.share!r}, expected a share of the pairs, 0 to 1")

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        plain = _frequencies(dim, base)
        return plain.masked_fill(torch.arange(len(plain)) >= int(self.share * dim // 2), 0)


@dataclass(frozen=True)
class NTK(_ByFactor):
    """A larger base, base · factor^(d/(d−2)): the longest wavelength grows by `factor`, the shortest stays.

    >>> ratio = NTK(8.0).frequencies(8, 10_000.0, 1) / Linear(1.0).frequencies(8, 10_000.0, 1)
    >>> [round(x, 9) for x in ratio.tolist()[::3]]
    [1.0, 0.125]
    """

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        if dim < 4:
            raise InputError(f"NTK: dim is {dim}, expected at least 4")
        return _frequencies(dim, base * self.factor ** (dim / (dim - 2)))


@dataclass(frozen=True)
class DynamicNTK(_ByFactor):
    """`NTK` whose factor grows with the sequence once it is longer than `original`.

    >>> short, long = (DynamicNTK(2.0, 100).frequencies(8, 10_000.0, n)[-1].item() for n in (50, 200))
    >>> round(short / long, 9)
    3.0
    """

    original: int

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        grown = self.factor * max(length, self.original) / self.original - (self.factor - 1)
        return NTK(grown).frequencies(dim, base, length)


@dataclass(frozen=True)
class YaRN(_ByFactor):
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Peng et al. 2024, arXiv:2309.00071, §3.2).

    The ramp lies between the dimensions that make `slow` and `fast` full turns over `original` tokens; with `whole`
    its ends are rounded to whole dimensions. cos and sin are multiplied by `attention`, or by 0.1 ln(factor) + 1.

    >>> found = YaRN(4.0, 4096).frequencies(64, 10_000.0, 1) / Linear(1.0).frequencies(64, 10_000.0, 1)
    >>> found[0].item(), found[-1].item()
    (1.0, 0.25)
    """

    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole: bool = True

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        def turning(times: float) -> float:
            return dim * math.log(self.original / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = turning(self.fast), turning(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
        plain = _frequencies(dim, base)
        return torch.lerp(plain, plain / self.factor, ramp.clamp(0, 1))

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention is None else self.attention


@dataclass(frozen=True)
class Llama3(_ByFactor):
    """Frequencies of wavelengths above original / low divided by `factor`, below original / high kept, else blended.

    (Grattafiori et al. 2024, arXiv:2407.21783; the constants are those of Llama 3.1's code.)

    >>> found = Llama3().frequencies(128, 500_000.0, 1) / Linear(1.0).frequencies(128, 500_000.0, 1)
    >>> found[0].item(), found[-1].item()
    (1.0, 0.125)
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if not finite(self.low, self.high) or not 0 < self.low < self.high:
            raise InputError(f"Llama3: low is {self.low!r} and high is {self.high!r}, expected 0 < low < high")

    def frequencies(self, dim: int, base: float, length: int) -> Tensor:
        plain = _frequencies(dim, base)
        turns = self.original * plain / (2 * math.pi)  # full turns over the original length
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(plain / self.factor, plain, share)


@dataclass(frozen=True)
class Rotary:
    """RoPE: queries and keys rotated by their position, so that their product depends on the distance alone.

    Pair i of dimensions is rotated by p · base^(−2i/dim) (Su et al. 2021, arXiv:2104.09864, eq. 34). Pairs are
    (i, i + dim/2) as in Llama and Hugging Face, or with `interleaved` (2i, 2i + 1) as in the paper and GPT-J.
    Dimensions beyond `dim` are left unchanged. Tables are float32 or better for models of any dtype: in bfloat16,
    positions beyond 256 would collide.

    >>> x = torch.ones(1, 1, 2, 4)
    >>> Rotary(4)(x, torch.tensor([0, 1]))[0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    dim: int
    base: float = 10_000.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _check_wavelengths(self)

    def tables(
        self, positions: Int[Tensor, "*n"], length: int | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "*n pairs"], Float[Tensor, "*n pairs"]]:
        """Return cos and sin for tokens at `positions`, computed in float64 and returned in `dtype`.

        `length` is the length of the whole sequence, for scalings that depend on it; the last position + 1 if None.
        """
        length = int(positions.max()) + 1 if length is None else length
        plain = _frequencies(self.dim, self.base)
        scaled = plain if self.scaling is None else self.scaling.frequencies(self.dim, self.base, length)
        size = 1.0 if self.scaling is None else self.scaling.magnitude
        angle = positions.double()[..., None] * scaled.to(positions.device)
        return (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)

    def __call__(
        self, x: Float[Tensor, "b h n d"], positions: Int[Tensor, "..."], length: int | None = None
    ) -> Float[Tensor, "b h n d"]:
        """Return x rotated by `positions`, (n,) or (b, n)."""
        self._check_size(x)
        if positions.ndim not in (1, 2) or positions.shape[-1] != x.shape[2]:
            raise InputError(
                f"Rotary: positions is {tuple(positions.shape)} for x {tuple(x.shape)}, expected (n,) or (b, n)"
            )
        cos, sin = self.tables(positions, length, _rotation_dtype(x))
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def span(self, x: Float[Tensor, "b h n d"], start: int = 0, length: int | None = None) -> Float[Tensor, "b h n d"]:
        """Return x rotated by positions start, start + 1, …: the same as a call, with tables cached across layers."""
        self._check_size(x)
        stop = start + x.shape[2]
        ordinary = type(x) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()  # not being traced
        tables = _cached_span_tables if ordinary else _span_tables
        cos, sin = tables(self, start, stop, stop if length is None else length, _rotation_dtype(x), x.device)
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def _check_size(self, x: Tensor) -> None:
        if x.shape[-1] < self.dim:
            raise InputError(f"Rotary: x has head dimension {x.shape[-1]}, expected at least dim = {self.dim}")


def _rotation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is rotated: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _span_tables(
    rotary: Rotary, start: int, stop: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # cached tables must serve training too
        return rotary.tables(torch.arange(start, stop, device=device), length, dtype)


_cached_span_tables = functools.lru_cache(maxsize=8)(_span_tables)  # all layers of a model use the same tables


def rotate(
    x: Float[Tensor, "b h n d"], cos: Float[Tensor, "*n pairs"], sin: Float[Tensor, "*n pairs"], *, interleaved: bool
) -> Float[Tensor, "b h n d"]:
    """Rotate the first 2 · pairs dimensions of x by tables of cos and sin, in float32 or better; same dtype as x."""
    dim = 2 * cos.shape[-1]
    rotated = x[..., :dim].to(_rotation_dtype(x))
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = rotated.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return out.to(x.dtype) if dim == x.shape[-1] else torch.cat([out.to(x.dtype), x[..., dim:]], -1)
