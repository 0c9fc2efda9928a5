"""Find attention that a model writes out by hand: by what is computed, not by the names of its classes.

Attention is a matrix product of queries and keys, a function such as a softmax of it, and a matrix product with values.
`Tracer` follows the tensors of a forward through torch's functions. It knows for each dimension of a tensor whether it
comes from features, that is from the output of a linear layer or from a parameter: heads do, and batch items, tokens
and windows do not. It also knows which dimensions are the rows and the columns of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

FEATURES, PLAIN, UNKNOWN = "features", "plain", "unknown"
ROWS, COLUMNS = "rows", "columns"
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "addmm", "einsum", "linear", "cdist"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
VIEWS = {
    "view", "reshape", "flatten", "unflatten", "ravel", "transpose", "transpose_", "permute", "movedim", "moveaxis",
    "swapaxes", "swapdims", "t", "T", "mT", "H", "mH", "unsqueeze", "squeeze", "unbind", "select", "narrow", "chunk",
    "split", "tensor_split", "expand", "expand_as", "view_as", "reshape_as", "__getitem__", "diagonal", "unfold",
    "as_strided",
}  # fmt: skip
CASTS = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout", "dropout_",
    "feature_dropout", "alpha_dropout", "detach",
}  # fmt: skip
FUNCTIONS = {
    "softmax", "softmin", "gumbel_softmax", "log_softmax", "sigmoid", "sigmoid_", "hardsigmoid", "exp", "exp_", "exp2",
    "relu", "relu_", "leaky_relu", "square", "pow", "__pow__", "softplus", "gelu", "elu", "silu", "clamp", "clamp_min",
    "threshold", "scatter", "scatter_", "reciprocal",
}  # fmt: skip
"""What makes weights of scores, in some attention or other. Without any of these, a product is no attention."""


@dataclass(frozen=True)
class Factor:
    """A factor of the size of a dimension. A reshape merges and splits dimensions, and with them their factors."""

    size: int
    origin: str = PLAIN
    part: str | None = None
    """ROWS or COLUMNS of the newest product."""


Dims = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product; `activations` if neither side is a parameter."""

    activations: bool
    module: nn.Module | None
    over_tokens: bool = False
    """Whether the sum of the product is over tokens, so that rows and columns may be channels."""
    formed: bool = True
    """False for scores that are no product, such as additive ones."""


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax over all rows or all columns of a product."""

    scores: Tensor
    dims: Dims
    part: str
    """Whether the weights add up to 1 along rows or along columns."""
    output: Tensor
    version: int | None
    """Of the output, which operations in place raise."""
    module: nn.Module | None


@dataclass(frozen=True, eq=False)
class Note:
    """What is known of a tensor."""

    dims: Dims
    parameter: bool = False
    product: Product | None = None
    weighted: str = ""
    """The newest of `FUNCTIONS` that was applied since the product."""
    softmax: Softmax | None = None
    """That has these numbers, if nothing but casts, dropout and changes of shape came after it."""


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """Weights that are multiplied with values."""

    weights: Tensor
    note: Note
    keys: str
    """Whether the keys are ROWS or COLUMNS of the product."""
    values: Tensor
    values_keys: int
    """The dimension of the values that is summed over."""


class Tracer:
    """Follows the tensors of a forward.

    Args:
        on_weighted_sum: called with weights that are multiplied with values.
        unreadable: called with the reason why weights of a product cannot be read.
        module: gives the innermost running module, or None where nothing is to be found.
    """

    def __init__(
        self,
        on_weighted_sum: Callable[[WeightedSum], None],
        unreadable: Callable[[str], None],
        module: Callable[[], nn.Module | None],
    ) -> None:
        self.on_weighted_sum, self.unreadable, self.module = on_weighted_sum, unreadable, module
        self.notes: Any = WeakIdKeyDictionary()
        self.unused: dict[int, Product] = {}
        """Products with a softmax that were not multiplied with values so far."""

    def begins(self, inputs: Iterable[Tensor]) -> None:
        """The model reads tensors; the last dimension of vectors is one of features."""
        for x in inputs:
            last = (Factor(x.shape[-1], FEATURES),) if x.ndim == 3 and x.is_floating_point() else None
            dims = tuple((Factor(n),) for n in x.shape)
            self.notes[x] = Note(dims if last is None else (*dims[:-1], last))

    def of(self, x: Tensor) -> Note:
        known: Note | None = self.notes.get(x)
        if known is not None and len(known.dims) == x.ndim:
            return known
        if not isinstance(x, nn.Parameter):
            return Note(tuple((Factor(n, UNKNOWN),) for n in x.shape))
        return Note((*((Factor(n),) for n in x.shape[:-1]), *((Factor(n, FEATURES),) for n in x.shape[-1:])), True)

    def saw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A function of torch was called."""
        results = [result] if isinstance(result, Tensor) else result if isinstance(result, tuple | list) else ()
        results = [x for x in results if isinstance(x, Tensor) and not x.is_nested]
        if not results:
            return
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        tensors = [x for argument in (*args, *kwargs.values()) for x in _tensors(argument)]
        if not tensors:
            for x in results:
                self.notes[x] = Note(tuple((Factor(n),) for n in x.shape))
            return
        with torch._C.DisableTorchFunction():
            if name in PRODUCTS and (len(tensors) >= 2 or name == "einsum") and len(results) == 1:
                notes = [self._multiplied(name, args, kwargs, tensors, results[0])]
            else:
                notes = self._noted(func, name, args, kwargs, tensors, results)
        self.notes.update(zip(results, notes, strict=True))

    # --- functions that keep, move or broadcast dimensions ------------------------------------------------------------

    def _noted(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor],
        results: list[Tensor],
    ) -> list[Note]:  # fmt: skip
        first = self.of(tensors[0])
        if name in VIEWS:
            dims = _viewed(func, args, kwargs, tensors[0], first.dims, results)
            if dims is not None:
                same = sum(x.numel() for x in results) >= tensors[0].numel() and len(results) == 1
                return [_checked(replace(first, dims=d, softmax=first.softmax if same else None)) for d in dims]
        if name in CONVOLUTIONS:
            return [
                Note(((Factor(x.shape[0]),), (Factor(x.shape[1], FEATURES),), *((Factor(n),) for n in x.shape[2:])))
                if first.product is None or not first.product.activations  # 1 × 1 over heads: talking heads
                else replace(self._spread(x, [tensors[0]]), softmax=None)
                for x in results
            ]
        if name == "embedding":
            ids = self.of(next((x for x in tensors if not x.is_floating_point()), tensors[0]))
            return [_checked(Note((*ids.dims, (Factor(x.shape[-1], FEATURES),)))) for x in results]
        if name in ("cat", "concat", "concatenate", "stack", "hstack", "vstack"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return [self._joined(x, tensors, dim, name == "stack") for x in results]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if results[0].ndim < tensors[0].ndim and isinstance(dim, int | tuple | list):  # a sum, a maximum
            gone = {d % tensors[0].ndim for d in ([dim] if isinstance(dim, int) else dim) if isinstance(d, int)}
            left = tuple(own for i, own in enumerate(first.dims) if i not in gone)
            if all([*map(size_of, left)] == [*x.shape] for x in results):
                return [_checked(replace(first, dims=left, softmax=None)) for _ in results]
        notes = [self._spread(x, tensors) for x in results]
        if name in FUNCTIONS:
            notes = [replace(note, weighted=name if note.product is not None else "") for note in notes]
        if name == "softmax":
            notes = [
                self._softmaxed(args, kwargs, tensors[0], first, x, note)
                for x, note in zip(results, notes, strict=True)
            ]
        elif name in CASTS:
            notes = [replace(note, softmax=first.softmax) for note in notes]
        return notes

    def _spread(self, out: Tensor, tensors: Sequence[Tensor]) -> Note:
        """The result of a function of each number, or of one that keeps the number of dimensions."""
        notes = sorted((self.of(x) for x in tensors), key=lambda note: note.parameter)
        chains = [note for note in notes if note.product is not None]
        chain = max(chains, key=_clarity, default=None)
        dims: list[tuple[Factor, ...]] = []
        for i, size in enumerate(out.shape):
            best: tuple[int, tuple[Factor, ...]] | None = None
            for note in notes:
                at = i - out.ndim + len(note.dims)
                if at < 0 or len(note.dims) > out.ndim or (best is not None and note.parameter):
                    continue
                own = note.dims[at]
                n = size_of(own)
                if n != size and len(note.dims) != out.ndim:
                    continue
                if n != size:
                    if n == 1:
                        continue
                    factor = own[0] if len({(f.origin, f.part) for f in own}) == 1 else Factor(1, UNKNOWN)
                    own = (replace(factor, size=size),)
                own = own if note is chain else _unmarked(own)
                rank = max(
                    4 - (f.origin == FEATURES) if f.part else 2 * (f.origin == FEATURES) + (f.origin == UNKNOWN)
                    for f in own
                )
                if best is None or rank > best[0]:
                    best = rank, own
            dims.append((Factor(size, UNKNOWN if size > 1 else PLAIN),) if best is None else best[1])
        weighted = next((note.weighted for note in chains if note.weighted), "")
        for other in chains:
            if chain is not None and other.product is not chain.product:
                self.unused.pop(id(other.product), None)  # its weights are a part of these
        parameter = bool(notes) and all(note.parameter for note in notes)
        return _checked(Note(tuple(dims), parameter, None if chain is None else chain.product, weighted))

    def _softmaxed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], scores: Tensor, before: Note, out: Tensor, note: Note
    ) -> Note:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        parts = {f.part for f in before.dims[dim]} - {None}
        product = before.product
        if (product is None or not parts) and out.ndim >= 3 and not self.over_features(scores, dim):  # additive
            product = Product(True, self.module(), formed=False)
            dims = [_unmarked(own) for own in before.dims]
            dims[dim] = tuple(replace(f, part=COLUMNS) for f in dims[dim])
            parts, before = {COLUMNS}, replace(before, dims=tuple(dims), product=product)
        if product is None or len(parts) != 1:
            return note
        features = all(f.origin == FEATURES for f in before.dims[dim])
        if product.activations and out.ndim >= 3 and not (product.over_tokens and features):
            self.unused[id(product)] = product
        [part] = parts
        dims = list(before.dims)
        dims[dim] = tuple(replace(f, part=part) for f in dims[dim])
        version = None if out.is_inference() else out._version
        softmax = Softmax(scores, tuple(dims), part, out, version, self.module())
        return Note(tuple(dims), product=product, weighted="softmax", softmax=softmax)

    def over_features(self, x: Tensor, dim: int) -> bool:
        """Whether a dimension is one of features, and not the rows or columns of a product of activations."""
        note = self.of(x)
        attends = note.product is not None and note.product.activations
        return not attends and all(f.origin == FEATURES for f in note.dims[dim])

    def _joined(self, out: Tensor, tensors: list[Tensor], dim: int, stacked: bool) -> Note:
        parts = [self.of(x) for x in tensors if x.ndim == out.ndim - stacked]  # an empty tensor may have one dimension
        first = next((p for p in parts if not p.parameter), parts[0])
        if stacked:
            at = dim % out.ndim
            dims = (*first.dims[:at], (Factor(len(parts), UNKNOWN),), *first.dims[at:])
        else:
            at, size = dim % out.ndim, out.shape[dim]
            along = [p.dims[at] for p in parts if len(p.dims) == out.ndim]
            kinds = {(f.origin, f.part) for own in along for f in own}
            marked = {f.part for own in along for f in own} - {None}
            if len(parts) == 1:
                joined = first.dims[at]
            elif at == 0 and len(set(along)) == 1 and len(along) == len(parts):  # heads, one after another
                joined = (Factor(len(parts), UNKNOWN), *along[0])
            elif len(kinds) == 1:
                joined = (Factor(size, *next(iter(kinds))),)
            else:
                features = all(f.origin == FEATURES for own in along for f in own)
                joined = (Factor(size, FEATURES if features else PLAIN, next(iter(marked), None)),)
            dims = (*first.dims[:at], joined, *first.dims[at + 1 :])
        chain = next((p for p in parts if p.product is not None and p.product.activations), first)
        if len(dims) != out.ndim:
            return self._spread(out, [])
        weighted = next((p.weighted for p in parts if p.weighted), "")
        return _checked(Note(dims, all(p.parameter for p in parts), chain.product, weighted))

    # --- products -----------------------------------------------------------------------------------------------------

    def _multiplied(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor], out: Tensor
    ) -> Note:
        if name == "einsum":
            equation = args[0] if args and isinstance(args[0], str) else kwargs.get("equation")
            sides = _letters(equation, tensors) if isinstance(equation, str) else None
        else:
            if name in ("baddbmm", "addmm"):
                tensors = tensors[1:]
            a, b = (tensors[1], tensors[0]) if name == "__rmatmul__" else (tensors[0], tensors[1])
            if name in ("linear", "cdist"):
                if name == "linear" and (self.of(b).parameter or b.ndim != 2):
                    before = self.of(a)
                    dims = (*before.dims[:-1], (Factor(out.shape[-1], FEATURES),))
                    mixed = before.product is not None and _are_heads(before.dims[-1])  # as talking heads do
                    return replace(before, dims=dims, softmax=None) if mixed else _checked(Note(dims))
                turned, b = self.of(b), b.mT
                self.notes[b] = replace(turned, dims=(*turned.dims[:-2], *turned.dims[:-3:-1]), softmax=None)
            tensors, sides = [a, b], _matmul_letters(a.ndim, b.ndim)
        if sides is None:
            return self._spread(out, [])
        left, note = sides[0], self.of(tensors[0])
        for i, side in enumerate(sides[1:-1], start=1):  # one operand after another
            later = set("".join(sides[i + 1 :]))
            right = sides[-1] if i == len(sides) - 2 else "".join(x for x in dict.fromkeys(left + side) if x in later)
            note = self._product(
                (left, side, right), (note, self.of(tensors[i])), tensors[i], tensors[0] if i == 1 else None
            )
            left = right
        if len(sides) == 2:
            by_letter = dict(zip(left, note.dims, strict=True))
            note = _checked(replace(note, dims=tuple(by_letter[x] for x in sides[-1]), softmax=None))
        return note if [*map(size_of, note.dims)] == [*out.shape] else self._spread(out, [])

    def _product(
        self, letters: tuple[str, str, str], notes: tuple[Note, Note], b: Tensor, a: Tensor | None
    ) -> Note:  # fmt: skip
        sides = letters[:2]
        summed = (set(sides[0]) & set(sides[1])) - set(letters[2])
        by_letter = [dict(zip(side, note.dims, strict=True)) for side, note in zip(sides, notes, strict=True)]
        attends = False
        for i, (mine, tensor, other) in enumerate(((0, a, b), (1, b, a))):
            note, values = notes[i], notes[1 - i]
            product = note.product
            if product is None or not note.weighted or not summed or tensor is None or other is None:
                continue
            over = [f for x in summed for f in by_letter[mine][x] if f.size > 1 or len(summed) == 1]
            parts = {f.part for f in over} - {None}
            if len(parts) != 1:
                continue
            [keys] = parts
            assert keys is not None
            formed = product.formed
            queries = [
                x for x in sides[i]
                if x in letters[2] and x not in sides[1 - i]
                and any(f.part not in (None, keys) if formed else f.origin != FEATURES for f in by_letter[mine][x])
            ]  # fmt: skip
            if not queries:
                continue
            marked = tuple(
                tuple(replace(f, part=keys) if x in summed else f for f in own)
                for x, own in zip(sides[i], note.dims, strict=True)
            )
            softmax = note.softmax if note.softmax is not None and note.softmax.part == keys else None
            note = replace(note, dims=marked, softmax=softmax)
            if not formed:
                marked = tuple(
                    tuple(replace(f, part=ROWS) if x in queries and f.origin != FEATURES else f for f in own)
                    for x, own in zip(sides[i], note.dims, strict=True)
                )
                note = replace(note, dims=marked, softmax=None)
            if all(f.origin == FEATURES for f in over):
                if not product.activations or values.parameter:
                    continue
                if product.over_tokens:
                    self.unused.pop(id(product), None)
                    self.unreadable("its weights are over channels, not over tokens")
                    continue
            if values.product is not None and values.product.activations and values.weighted:
                self.unused.pop(id(values.product), None)
                self.unused.pop(id(product), None)
                self.unreadable("it multiplies weights with weights")
                continue
            if not product.activations and softmax is None:
                continue
            attends = True
            self.unused.pop(id(product), None)
            at = next(n for n, x in enumerate(sides[1 - i]) if x in summed)
            self.on_weighted_sum(WeightedSum(tensor, note, keys, other, at))
        shape = {x: max(size_of(side[x]) for side in by_letter if x in side) for x in letters[2]}
        dims = {x: self._dim(x, shape[x], by_letter, notes) for x in letters[2]}
        if attends:
            return Note(tuple(_unmarked(dims[x]) for x in letters[2]))
        only = [set(letters[2]) & set(sides[0]) - set(sides[1]), set(letters[2]) & set(sides[1]) - set(sides[0])]
        only = [{x for x in axes if x < "\u0100"} or axes for axes in only]  # not those that are broadcast
        for axes, part in zip(only, (ROWS, COLUMNS), strict=True):
            tokens = [f for x in axes for f in dims[x] if f.origin != FEATURES]
            plain = any(f.size > 1 for f in tokens) or all(f.size == 1 or f in tokens for x in axes for f in dims[x])
            for x in axes:  # heads may be beside tokens
                dims[x] = tuple(f if plain and f.origin == FEATURES else replace(f, part=part) for f in dims[x])
        for scores, own_dims, mixing in zip(notes, by_letter, reversed(notes), strict=True):
            if scores.product is not None and scores.product.activations and mixing.parameter and summed and all(
                _are_heads(own_dims[x]) for x in summed
            ):  # fmt: skip
                mixed = {x: own_dims[x] if x in own_dims else (Factor(shape[x], FEATURES),) for x in letters[2]}
                return _checked(replace(scores, dims=tuple(mixed[x] for x in letters[2]), softmax=None))
        origins = [f.origin for x in summed for f in by_letter[0][x]]
        activations, over_tokens = not any(note.parameter for note in notes), FEATURES not in origins and bool(origins)
        made = Product(activations, self.module(), over_tokens)
        return _checked(Note(tuple(dims[x] for x in letters[2]), product=made))

    def _dim(
        self, letter: str, size: int, by_letter: list[dict[str, tuple[Factor, ...]]], notes: tuple[Note, Note]
    ) -> tuple[Factor, ...]:
        """The factors of a dimension of a product."""
        candidates = [
            (note.parameter, own)
            for side, note in zip(by_letter, notes, strict=True)
            if (own := side.get(letter)) is not None and size_of(own) == size
        ]
        if not candidates:
            return (Factor(size, UNKNOWN),)

        def heads(own: tuple[Factor, ...]) -> int:  # those of the keys may be fewer, and repeated
            return size_of(f for f in own if f.origin == FEATURES)

        if len(candidates) == 1 and candidates[0][0] and not all(note.parameter for note in notes):
            return (Factor(size, FEATURES),)
        _, likeliest = min(
            candidates, key=lambda x: (x[0], all(f.origin == UNKNOWN for f in x[1]), -heads(x[1]), -len(x[1]))
        )
        return _unmarked(likeliest)


def size_of(factors: Iterable[Factor]) -> int:
    """The size of a dimension with these factors."""
    return math.prod(f.size for f in factors)


def _unmarked(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """The factors without the rows and columns of a product."""
    return tuple(replace(f, part=None) for f in factors)


def _are_heads(factors: tuple[Factor, ...]) -> bool:
    return all(f.part is None and f.origin == FEATURES for f in factors)


def _clarity(note: Note) -> tuple[bool, bool]:
    """How well it is known which dimensions of a tensor are rows and which are columns."""
    parts = [f.part for own in note.dims for f in own if f.part is not None]
    return note.product is not None and note.product.activations, sorted(parts) == [COLUMNS, ROWS]


def _checked(note: Note) -> Note:
    """Without a product, if its rows and columns are gone; without rows and columns, if there is no product."""
    parts = {f.part for own in note.dims for f in own} - {None}
    if note.product is not None and parts:
        return note
    dims = tuple(_unmarked(own) for own in note.dims) if parts else note.dims
    return replace(note, dims=dims, product=None, weighted="")


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [] if x.is_nested else [x]
    return [y for item in x for y in _tensors(item)] if isinstance(x, tuple | list) else []


def _viewed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor, dims: Dims, results: list[Tensor]
) -> list[Dims] | None:
    """The dimensions of views of a tensor, told from the strides of the same views of a contiguous tensor."""

    def proxy(y: Any) -> Any:
        if isinstance(y, Tensor):
            return torch.empty(y.shape, device="meta")
        return type(y)(map(proxy, y)) if type(y) in (tuple, list) else y

    if (
        any(y is not x for argument in (*args, *kwargs.values()) for y in _tensors(argument))
        and func.__name__ == "__getitem__"
    ):
        return None
    try:
        made = func(*map(proxy, args), **{n: proxy(y) for n, y in kwargs.items()})
    except Exception:  # a view that a contiguous tensor, or one of another dtype, does not have
        return None
    views = [made] if isinstance(made, Tensor) else list(made)
    if [v.shape for v in views] != [r.shape for r in results]:
        return None
    factors = [f for own in dims for f in own]
    strides = [math.prod(f.size for f in factors[i + 1 :]) for i in range(len(factors))]
    return [tuple(_read(n, s, factors, strides) for n, s in zip(v.shape, v.stride(), strict=True)) for v in views]


def _read(size: int, stride: int, factors: list[Factor], strides: list[int]) -> tuple[Factor, ...]:
    """The factors of a dimension with this size and stride."""
    if size == 1 or stride == 0:
        return (Factor(size),)
    spanned = []
    for factor, own in zip(factors, strides, strict=True):
        low, high = max(stride, own), min(stride * size, own * factor.size)
        if factor.size > 1 and low < high:
            spanned.append((replace(factor, size=high // low), high % low == 0))
    if math.prod(f.size for f, _ in spanned) == size and all(whole for _, whole in spanned):
        return tuple(f for f, _ in spanned)
    kinds = {(f.origin, f.part) for f, _ in spanned}
    return (Factor(size, *next(iter(kinds))),) if len(kinds) == 1 else (Factor(size, UNKNOWN),)


def _letters(equation: str, tensors: Sequence[Tensor]) -> list[str] | None:
    """The letters of the operands and of the result of an einsum, without an ellipsis."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    if len(sides) != len(tensors):
        return None
    free = [c for c in map(chr, range(0x100, 0x140)) if c not in equation]
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." * ("..." in left) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    more = [
        x.ndim - len(side.replace("...", "")) if "..." in side else 0 for side, x in zip(sides, tensors, strict=True)
    ]
    whole = [side.replace("...", "".join(free[max(more) - n : max(more)])) for side, n in zip(sides, more, strict=True)]
    right = right.replace("...", "".join(free[: max(more)]))
    if any(len(set(side)) != len(side) or len(side) != x.ndim for side, x in zip(whole, tensors, strict=True)):
        return None  # a diagonal
    return [*whole, right]


def _matmul_letters(a: int, b: int) -> list[str] | None:
    """The same for a matrix product of tensors with so many dimensions."""
    if a < 2 or b < 2:
        return None
    lead = "".join(map(chr, range(0x100, 0x100 + max(a, b) - 2)))
    return [lead[len(lead) - a + 2 :] + "is", lead[len(lead) - b + 2 :] + "sj", lead + "ij"]
