"""`check_normalizer`: a normalizer fulfils the contract of `Pointwise` or `SumToOne`."""

from __future__ import annotations

import torch

from qkv.normalizers import Normalizer, Pointwise, SumToOne
from qkv.testing.agreement import check_half, check_kernels, check_masked, check_measure, check_slopes
from qkv.testing.copies import check_copies
from qkv.testing.definition import Composition
from qkv.testing.inputs import SIZES, Size, Sizes, converted, key_heads_of, normal, padded, sizes_of, with_holes
from qkv.testing.levels import check_level_of, check_levels
from qkv.testing.report import CheckFailed, calling, shape_of
from qkv.testing.weights import check_derivatives, check_pointwise, check_shortcuts, check_tiles


def check_normalizer(normalizer: Normalizer, *, heads: int = 4, sizes: Sizes | None = None, batch: int = 2) -> None:
    """Check that a normalizer fulfils the contract of its base class; for use in your own tests.

    It checks: the shape and dtype of ``weight``; that a weight depends on its own score (and the level of its row)
    alone, so that tiles do not change weights; for `SumToOne`, that it is not negative, decreases in the level and can
    sum to one; each shortcut against ``weight``; output, weights and gradients of `attend` on every kernel against a
    dense definition in float64, with masks, queries without visible keys, sinks and learned keys; finite differences;
    bfloat16 and float16; NaN in masked keys; `measure`; pickle and copy.deepcopy. For a normalizer that selects one
    key (`Hard`), the weights are compared with one-hot weights, and the gradient with that of its soft weights.

    Args:
        normalizer: the object. The parameters of modules in it are converted to each dtype that is checked.
        heads: number of query heads, which must fit parameters of the object that have one entry for each head.
        sizes: pairs (queries, keys), for an object that fits only some sizes, such as one with a sink for each query.
            The default has sizes of one tile and of several, and sizes on both sides of 128 × 128, above which
            `attend` picks other kernels.
        batch: number of batch items; the largest sizes of the default have one.

    Raises:
        CheckFailed: an `AssertionError` whose message says in one sentence what is wrong, and where.

    >>> from qkv.normalizers import Pointwise, Softmax
    >>> check_normalizer(Softmax(sink=0.0), sizes=[(5, 7)])
    >>> class Square(Pointwise):
    ...     def weight(self, scores):
    ...         return scores**2
    ...     def slope_from_weights(self, weights):
    ...         return 2 * weights.sqrt()
    >>> try:
    ...     check_normalizer(Square())
    ... except AssertionError as error:
    ...     print(error)
    Square.slope_from_weights: got 158.6 at score -79.3, expected -158.6, the derivative of weight
    """
    if not isinstance(normalizer, Pointwise | SumToOne):
        raise CheckFailed(
            f"check_normalizer: got {shape_of(normalizer)}, expected an object of a class that inherits from "
            "qkv.normalizers.Pointwise or from SumToOne"
        )
    with calling(normalizer, "weight", f"checked for {heads} heads"):
        normalizer.check(heads)
    exact = converted(normalizer, torch.float64)
    check_tiles(exact, heads)
    if isinstance(exact, SumToOne):
        check_levels(exact, heads)
    slope = check_derivatives(exact, heads)
    check_shortcuts(exact, heads, slope)
    if isinstance(exact, SumToOne):
        check_level_of(exact, heads)
    else:
        check_pointwise(exact, heads, slope)
    _check_attend(normalizer, heads, sizes, batch)


def _check_attend(normalizer: Pointwise | SumToOne, heads: int, sizes: Sizes | None, batch: int) -> None:
    key = normalizer.key if isinstance(normalizer, SumToOne) else None
    dim = 8 if key is None else key.shape[1]
    chosen_sizes = sizes_of(sizes, SIZES, batch, heads, key_heads_of(heads), dim=dim, dim_k=dim)
    first, large = chosen_sizes[0], chosen_sizes[min(1, len(chosen_sizes) - 1)]
    plain = Composition("normalizer", normalizer=normalizer)
    for masked in _masked(plain, first):
        check_kernels(masked, first)
    for number, variant in enumerate(_variants(normalizer, first)):
        check_kernels(_masked(variant, first)[2 - number % 2], first)
    check_slopes(_masked(plain, first)[1], first)
    for size in chosen_sizes[1:]:
        single = torch.float32 if not size.small else torch.float64
        check_kernels(_masked(plain, size)[1 if size.small else 2], size, single)
    check_half(_masked(plain, large)[2], large)
    for size in dict.fromkeys((first, large)):
        for masked in _masked(plain, size)[1:]:
            check_masked(masked, size)
    for size in chosen_sizes[:3]:
        check_measure(_masked(plain, size)[2], size)
    check_copies(plain, first)


def _masked(c: Composition, size: Size) -> list[Composition]:
    """The composition without a mask, with holes and a query without visible keys, and causal with padding."""
    masks = (None, with_holes(size), padded(size))
    labels = ("", "a mask with holes", "a causal mask with padding")
    return [
        Composition(c.subject, mask, c.bias, c.score, c.normalizer, ", ".join(x for x in (c.label, label) if x))
        for mask, label in zip(masks, labels, strict=True)
    ]


def _variants(normalizer: Pointwise | SumToOne, size: Size) -> list[Composition]:
    """The normalizer with another temperature and, for `SumToOne`, with sinks and a learned key."""
    made = [("temperature 0.7 times its own", normalizer.with_temperature(0.7 * normalizer.temperature))]
    if isinstance(normalizer, SumToOne) and not normalizer.one_key:
        sink = normal(size.heads, seed=4).requires_grad_()
        each = normal(size.batch, size.heads, size.queries, seed=5)
        key = normal(size.heads, size.dim, seed=6).requires_grad_()
        made += [
            ("a sink for each head", normalizer.with_sink(sink)),
            ("a sink for each query", normalizer.with_sink(each)),
            ("a learned key", normalizer.with_sink(None, key)),
        ]
    return [Composition("normalizer", normalizer=one, label=f"with {label}") for label, one in made]
