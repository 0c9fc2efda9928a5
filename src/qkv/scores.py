"""Score functions: the similarity of a query and a key, before biases, masks and normalizers.

A score first projects queries and keys (`project`). A `Product` score is then their dot product, which every kernel
supports; a `Pairwise` score is any other function of a query and a key, such as a distance, computed for a tile of
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qkv._contract import Definition, check_by_head, learned_tensors, overrides, require
from qkv.errors import InputError, finite, kind_of

__all__ = ["Additive", "Concat", "Cosine", "Dot", "Features", "General", "Pairwise", "Product", "SSMax", "Score"]
__dir__ = __all__.copy


class Score(Definition):
    """Base of all scores. Your own score inherits from `Product` or from `Pairwise`.

    >>> Dot().factor(64), Dot(1.0).factor(64)
    (0.125, 1.0)
    """

    rotation_invariant = False
    """Whether the score is unchanged when query and key are rotated alike, which some caches require."""
    by_head = False
    """Whether `scores` depends on the head. It then always gets tiles of all query heads."""

    def check(self) -> None:
        """Raise `InputError` if the score is incomplete."""
        raise InputError(
            f"{type(self).__name__}: a Score alone defines no scores; inherit from qkv.scores.Product and define "
            "project(q, k), or from Pairwise and define scores(q, k)"
        )

    def project(
        self, q: Float[Tensor, "b h nq dq"], k: Float[Tensor, "b hkv nk dk"]
    ) -> tuple[Float[Tensor, "b h nq d"], Float[Tensor, "b hkv nk d"]]:
        """Project queries and keys into the space where they are compared; differentiable, and token by token."""
        if q.shape[3] != k.shape[3]:
            raise InputError(f"q and k differ in head dimension: q {tuple(q.shape)}, k {tuple(k.shape)}")
        return q, k

    def factor(self, head_dim: int) -> float:
        """Return the factor of the dot product of two projected vectors of `head_dim` entries."""
        return 1.0

    def row_factor(
        self, visible: Callable[[], Float[Tensor, "#b #h nq"]], like: Float[Tensor, "..."]
    ) -> Float[Tensor, "#b #h nq"] | None:
        """Return a factor of the scores of each query, which multiplies the projected query, or None.

        `visible()` returns the number of visible keys per query, at least 1; the result has the device of `like`.
        """
        return None


class Product(Score):
    """Base of the scores that are ``factor · q · k`` after `project`. One method is required: `project`.

    >>> class Doubled(Product):
    ...     def project(self, q, k):
    ...         return 2 * q, k
    >>> from qkv import attend
    >>> q = k = torch.ones(1, 1, 1, 4)
    >>> attend(q, k, k, score=Doubled(), return_lse=True)[1].item()
    8.0
    """

    definitions: ClassVar = {"project": ("rotation_invariant", "row_factor")}

    def check(self) -> None:
        if not (overrides(self, Product, "project") or overrides(self, Product, "factor")):
            require(self, Product, "project", "q, k", "queries and keys to be multiplied")

    @property
    def projects(self) -> bool:
        """Whether queries or keys are changed before the dot product."""
        return overrides(self, Score, "project") or overrides(self, Score, "row_factor")


class Pairwise(Score):
    """Base of the scores that are any function of a query and a key. One method is required: `scores`, for a tile.

    `project`, if defined, is applied to all queries and keys first. Gradients come from autograd on the tile, also
    for every `nn.Parameter` among the object's attributes. `qkv.testing.check_score` checks an object.

    >>> class Manhattan(Pairwise):
    ...     def scores(self, q, k):
    ...         return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)
    >>> from qkv import attend
    >>> q, k = torch.zeros(1, 1, 1, 1), torch.tensor([[[[1.0], [2.0]]]])
    >>> attend(q, k, k, score=Manhattan(), return_weights=True)[1].flatten().tolist()
    [0.7310585975646973, 0.2689414322376251]
    """

    definitions: ClassVar = {"scores": ("tensors", "by_head", "rotation_invariant")}
    by_head = True

    def check(self) -> None:
        require(self, Pairwise, "scores", "q, k", "the score of each pair, (…, nq, nk)")

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Project queries and keys before `scores`; differentiable, and token by token."""
        return q, k

    def scores(self, q: Float[Tensor, "b h nq dq"], k: Float[Tensor, "b h nk dk"]) -> Float[Tensor, "b h nq nk"]:
        """Return the score of each pair of a tile.

        A tile holds any part of the batch, the queries and the keys, but always all query heads (keys of grouped heads
        are repeated), so a per-head parameter has shape (heads, 1, 1). Inputs are float32 or better and must not be
        changed in place.
        """
        raise InputError(f"{type(self).__name__}: no method scores(q, k)")

    def tensors(self) -> dict[str, Tensor]:
        """Return learned tensors that `scores` uses, by name."""
        return learned_tensors(self)


@dataclass(frozen=True)
class Dot(Product):
    """Dot product times `scale`; 1/√d when None (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    ``Dot(scale=1.0)`` is the plain dot product (Luong et al. 2015, arXiv:1508.04025, §3.1).

    >>> Dot().factor(64)
    0.125
    >>> Dot(scale=1.0).factor(64)
    1.0
    """

    scale: float | None = None
    rotation_invariant = True

    def __post_init__(self) -> None:
        if self.scale is not None and not finite(self.scale):
            raise InputError(f"Dot: scale is {self.scale!r}, expected a finite number or None for 1/√d")

    def factor(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


@dataclass(frozen=True, eq=False)
class SSMax(Product):
    """Scalable softmax: scale · ln n · q · k / √d, where n is the number of keys that the query sees.

    The weight of one key whose score stands out then does not fade in a long text: its e^s becomes n^s (Nakanishi 2025,
    arXiv:2501.19399). `scale` is a number, or (heads,), which may be learned.

    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 0.0, 0.0, 2.0]).view(1, 1, 4, 1)
    >>> from qkv import attend
    >>> round(attend(q, k, k, score=SSMax(), return_weights=True)[1][0, 0, 0, 3].item(), 4) == round(16 / 19, 4)
    True
    """

    scale: float | Float[Tensor, " heads"] = 1.0
    rotation_invariant = True

    def __post_init__(self) -> None:
        check_by_head("SSMax: scale", self.scale)

    def factor(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim)

    def row_factor(self, visible: Callable[[], Tensor], like: Tensor) -> Tensor:
        logs = torch.log(visible())
        if not isinstance(self.scale, Tensor):
            return logs * self.scale
        check_by_head("SSMax: scale", self.scale, like.shape[1])
        return logs * self.scale.to(logs)[:, None]


@dataclass(frozen=True, eq=False)
class General(Product):
    """Bilinear: q · W k (Luong et al. 2015, arXiv:1508.04025, §3.1). Queries and keys may differ in size.

    `weight` is W, (dq, dk), or (heads, dq, dk) for one matrix per query head; `scale` multiplies the score. W = I is
    the plain dot product.

    >>> q = k = torch.eye(2)[None, None]
    >>> General(torch.tensor([[0.0, 1.0], [2.0, 0.0]])).project(q, k)[0][0, 0].tolist()
    [[0.0, 1.0], [2.0, 0.0]]
    """

    weight: Float[Tensor, "dq dk"] | Float[Tensor, "heads dq dk"]
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_weight("General", "weight", self.weight)
        if not math.isfinite(self.scale):
            raise InputError(f"General: scale is {self.scale}, expected a finite number")

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _check_size("General", "weight", self.weight, -2, q, "q")
        _check_size("General", "weight", self.weight, -1, k, "k")
        return q @ self.weight.to(q), k

    def factor(self, head_dim: int) -> float:
        return self.scale


@dataclass(frozen=True, eq=False)
class Cosine(Product):
    """`scale` times the cosine of query and key: query-key normalisation (Henry et al. 2020, arXiv:2010.04245, eq. 4).

    `scale` is a number, or a tensor (heads,) with one scale per query head, which may be learned. A zero vector has
    cosine 0 with every vector.

    >>> q, k = torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[6.0, 8.0]]]])
    >>> round(float((Cosine(2.0).project(q, k)[0] * Cosine(2.0).project(q, k)[1]).sum()), 4)
    2.0
    """

    scale: float | Float[Tensor, " heads"] = 10.0
    rotation_invariant = True

    def __post_init__(self) -> None:
        check_by_head("Cosine: scale", self.scale)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().project(q, k)
        check_by_head("Cosine: scale", self.scale, q.shape[1])
        scale = self.scale[:, None, None].to(q) if isinstance(self.scale, Tensor) else self.scale
        return _unit(q) * scale, _unit(k)


def _unit(x: Tensor) -> Tensor:
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.normalize(exact, dim=-1, eps=torch.finfo(exact.dtype).tiny ** 0.5).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Additive(Pairwise):
    """v · tanh(W q + U k) (Bahdanau et al. 2015, arXiv:1409.0473, app. A.1.2).

    `vector` is v, (a,), or (heads, a) for one vector per query head. `w_q` is W, (a, dq), or (heads, a, dq); `w_k` is
    U, (a, dk), or (key heads, a, dk). Without them, queries and keys must already be projected to size a. `bias` (a,)
    is added inside the tanh. All of these may be learned.

    >>> q, k = torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 2, 3)
    >>> from qkv import attend
    >>> attend(q, k, torch.tensor([[[[0.0], [1.0]]]]), score=Additive(torch.ones(3))).item()
    0.5
    """

    vector: Float[Tensor, " a"] | Float[Tensor, "heads a"]
    w_q: Float[Tensor, "a dq"] | Float[Tensor, "heads a dq"] | None = None
    w_k: Float[Tensor, "a dk"] | Float[Tensor, "hkv a dk"] | None = None
    bias: Float[Tensor, " a"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.vector, Tensor) or self.vector.ndim not in (1, 2):
            raise InputError(f"Additive: vector is {kind_of(self.vector)}, expected a float tensor (a,) or (heads, a)")
        for name, weight in (("w_q", self.w_q), ("w_k", self.w_k)):
            if weight is not None:
                _check_weight("Additive", name, weight)

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        for name, weight, x, of in (("w_q", self.w_q, q, "q"), ("w_k", self.w_k, k, "k")):
            if weight is not None:
                _check_size("Additive", name, weight, -1, x, of)
        q = q if self.w_q is None else q @ self.w_q.to(q).transpose(-1, -2)
        k = k if self.w_k is None else k @ self.w_k.to(k).transpose(-1, -2)
        a = self.vector.shape[-1]
        if not q.shape[3] == k.shape[3] == a:
            raise InputError(
                f"Additive: vector has {a} entries, but queries have {q.shape[3]} and keys {k.shape[3]} after "
                "projection; expected all equal"
            )
        if self.vector.ndim == 2 and len(self.vector) != q.shape[1]:
            raise InputError(f"Additive: vector has {len(self.vector)} rows for {q.shape[1]} query heads")
        return (q if self.bias is None else q + self.bias.to(q)), k

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        vector = self.vector.to(q)
        squashed = torch.tanh(q[:, :, :, None] + k[:, :, None])
        return (squashed @ vector.reshape(-1, 1, vector.shape[-1], 1))[..., 0]

    def tensors(self) -> dict[str, Tensor]:
        return {"vector": self.vector} if self.vector.requires_grad else {}  # `project` applies the other tensors


def Concat(  # noqa: N802  (named like a class because it constructs a score)
    weight: Float[Tensor, "a dq_dk"], vector: Float[Tensor, " a"], query_size: int
) -> Additive:
    """v · tanh(W [q; k]) (Luong et al. 2015, arXiv:1508.04025, §3.1): `Additive`, W split after `query_size` columns.

    >>> Concat(torch.ones(3, 5), torch.ones(3), query_size=2).w_k.shape
    torch.Size([3, 3])
    """
    if weight.ndim != 2 or not 0 < query_size < weight.shape[1]:
        raise InputError(
            f"Concat: weight has shape {tuple(weight.shape)} and query_size is {query_size}, "
            "expected (a, dq + dk) and 0 < dq < dq + dk"
        )
    return Additive(vector, weight[:, :query_size], weight[:, query_size:])


@dataclass(frozen=True, eq=False)
class Features(Product):
    """φ(q) · φ(k) for a feature map φ with values ≥ 0: the score of linear attention.

    With ``normalizer=Identity(divide="sum")`` this is linear attention (Katharopoulos et al. 2020, arXiv:2006.16236,
    eq. 5), in O(n) where the mask allows. Feature maps are in `qkv.features`.

    >>> from qkv import attend, features, normalizers
    >>> q = k = v = torch.randn(1, 2, 9, 4)
    >>> attend(q, k, v, score=Features(features.elu_plus_one), normalizer=normalizers.Identity("sum")).shape
    torch.Size([1, 2, 9, 4])
    """

    map: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.map):
            raise InputError(f"Features: map is {kind_of(self.map)}, expected a function such as features.elu_plus_one")

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().project(q, k)
        of_queries = getattr(self.map, "of_queries", self.map)  # random features are stabilised per query
        return of_queries(q), self.map(k)


def _check_weight(score: str, name: str, weight: object) -> None:
    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point or weight.ndim not in (2, 3):
        raise InputError(f"{score}: {name} is {kind_of(weight)}, expected a float matrix, or one per head")


def _check_size(score: str, name: str, weight: Tensor, dim: int, x: Tensor, of: str) -> None:
    each = weight.ndim == 3 and (dim != -1 or score == "Additive")  # General has no matrix for each key head
    if weight.shape[dim] != x.shape[3] or (each and len(weight) != x.shape[1]):
        raise InputError(f"{score}: {name} has shape {tuple(weight.shape)}, which does not fit {of} {tuple(x.shape)}")
