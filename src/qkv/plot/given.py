"""The weights that a call of `qkv.plot` gets, in any form, as arrays of layers; their tokens; and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from qkv._packages import user_frame
from qkv.errors import InputError
from qkv.masks import Mask
from qkv.plot.map import Stored
from qkv.profiler.data.profile import ProfileData

if TYPE_CHECKING:
    import xarray as xr

ROUNDING = 1.01  # weights in half precision may exceed 1 by a little


@dataclass(frozen=True)
class Matrix:
    """Numbers to draw, NaN where they are masked, and the names of both sides."""

    values: np.ndarray
    """(queries, keys), or the largest number of each bin."""
    queries: list[str] | None = None
    keys: list[str] | None = None
    bins: tuple[int, int] = (1, 1)
    of: tuple[int, int] | None = None
    """The numbers of queries and keys if these are bins, which the last ones may exceed."""

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.of or (self.values.shape[0], self.values.shape[1])


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. They are converted and checked when they are drawn, since those of all may be large."""

    view: Tensor | np.ndarray
    """(heads, queries, keys), or the bins of a profile."""
    name: str
    """Its name in errors."""
    number: int
    heads: list[int]
    size: tuple[int, int]
    """The numbers of queries and keys."""
    bins: tuple[int, int] = (1, 1)
    """The numbers of queries and keys in a bin."""
    queries: list[str] | None = None
    keys: list[str] | None = None

    def weights(self) -> np.ndarray:
        """Convert all heads to (heads, queries, keys), float64."""
        return self._checked(self.view)

    def head(self, head: int | None) -> np.ndarray:
        """Convert the map of one head, by its number; None stands for the only one."""
        return self._checked(self.view[index_of("head", head, self.heads)])

    def _checked(self, view: Tensor | np.ndarray) -> np.ndarray:
        return checked_weights(array(view, self.name), self.name, whole=self.bins == (1, 1))

    def names(
        self, tokens: Sequence[Any] | None, queries: Sequence[Any] | None
    ) -> tuple[list[str] | None, list[str] | None]:
        """The names of queries and keys that are given, else those of a profile."""
        given = tokens is not None or queries is not None
        return token_lists(tokens, queries, *self.size) if given else (self.queries, self.keys)

    def matrix(
        self, values: np.ndarray, tokens: Sequence[Any] | None, queries: Sequence[Any] | None, mask: Any
    ) -> Matrix:
        """A map of this layer, with names as of `names`."""
        return Matrix(masked(values, mask), *self.names(tokens, queries), self.bins, self.size)


def select_layer(found: list[Layer], layer: int | None) -> Layer:
    """Select a layer by its number; None stands for the only one."""
    return found[index_of("layer", layer, [one.number for one in found])]


def mean_weights(found: list[Layer], layer: int | None, head: int | None) -> tuple[str, np.ndarray]:
    """Return the weights (nq, nk) of a head, or the mean of a layer or of all, 0 at masked pairs; and their name.

    The name is empty for weights of a single head.
    """
    if found[0].bins != (1, 1):
        raise InputError("w is a Profile with bins of a long text, expected all weights: map_tokens= was less")
    found = found if layer is None and head is None else [select_layer(found, layer)]
    if head is not None:
        return f"Layer {found[0].number}, head {head}", np.nan_to_num(found[0].head(head))
    if len({one.size for one in found}) > 1:
        raise InputError("w has layers of different sizes, expected one size; pass layer=")
    heads = sum(len(one.heads) for one in found)
    of = f"Mean of {heads} heads" if layer is None else f"Layer {layer}, mean of {heads} heads"
    return "" if heads == 1 else of, np.mean([np.nan_to_num(one.weights()).mean(0) for one in found], axis=0)


def index_of(name: str, chosen: int | None, ids: Sequence[int] | np.ndarray) -> int:
    """The index of an id; None stands for the only one."""
    if chosen is None and len(ids) == 1:
        return 0
    if chosen is None:
        raise InputError(
            f"{name} is None with {len(ids)} {name}s, expected the {name} to draw, from {ids[0]} to {ids[-1]}"
        )
    if chosen not in ids:
        raise InputError(f"{name} is {chosen}, expected one of {ids[0]} to {ids[-1]}")
    return list(ids).index(chosen)


def array(x: Any, name: str = "w") -> np.ndarray:
    """A tensor or array of numbers as float64; booleans become 0 and 1."""
    found = _as_given(x, name)
    try:
        numbers = found.cpu().double().numpy() if isinstance(found, Tensor) else found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(x, name, error) from error
    result: np.ndarray = numbers
    return result


def _as_given(x: Any, name: str) -> Tensor | np.ndarray:
    """A tensor without its graph, or an array, of the dtype that it has."""
    try:
        found = x.detach() if isinstance(x, Tensor) else np.asarray(_without_tensors(x))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_numbers(x, name, error) from error
    if isinstance(found, np.ndarray) and found.dtype.name == "bfloat16":  # NumPy has no bfloat16 itself
        return found.astype(np.float32)
    if found.is_complex() if isinstance(found, Tensor) else found.dtype.kind == "c":
        raise InputError(f"{name} is {found.dtype}, expected real numbers")
    return found


def _without_tensors(x: Any) -> Any:
    """Nested lists with arrays in place of tensors, which NumPy reads only if they are on the CPU without a graph."""
    if isinstance(x, Tensor):
        return x.detach().cpu().double().numpy()
    return [_without_tensors(part) for part in x] if isinstance(x, (list, tuple)) else x


def _no_numbers(x: Any, name: str, error: Exception) -> InputError:
    return InputError(f"{name} is {type(x).__name__}, expected numbers that form an array ({error})")


def layers(w: Any, item: int | None = None, *, stacked: bool = False) -> list[Layer]:
    """The weights of some layers, at least one, and for a profile their tokens.

    Args:
        w: a `Profile`; a tuple or list of layers (b, h, nq, nk) or (h, nq, nk), as `output_attentions` gives; or one
            tensor or array (nq, nk), (h, nq, nk), (b, h, nq, nk) or (layers, b, h, nq, nk).
        item: batch item, or text of a profile; None if there is only one.
        stacked: whether four dimensions are (layers, h, nq, nk).
    """
    if isinstance(w, ProfileData):
        texts = w.data.sizes["text"]
        if item is None and texts > 1:
            raise InputError(f"item is None with {texts} texts, expected the text to draw")
        return of_text(w.data.isel(text=[at := index_of("item", item, range(texts))]), at)
    if isinstance(w, (tuple, list)) and w and (any(x is None for x in w) or any(getattr(x, "ndim", 0) > 2 for x in w)):
        parts, names = list(w), [f"w[{n}]" for n in range(len(w))]
    else:
        whole = _as_given(w, "w")
        parts = list(whole) if whole.ndim == 5 or (stacked and whole.ndim == 4) else [whole]
        names = ["w"] * len(parts)
    return [_layer(x, item, name, n) for n, (x, name) in enumerate(zip(parts, names, strict=True))]


def _layer(x: Any, item: int | None, name: str, number: int) -> Layer:
    """One layer, whose weights are a view if they are a tensor or an array."""
    if x is None:
        raise InputError(
            f"{name} is None, expected weights: the model did not form them; load it with "
            "attn_implementation='eager', or pass a qkv.Profile"
        )
    if isinstance(x, (tuple, list)) and any(getattr(part, "ndim", 0) > 1 for part in x):
        raise InputError(
            f"{name} is a {type(x).__name__} of tensors, expected the weights of one layer; after generate() pass "
            "the tuple of one step"
        )
    found = _as_given(x, name)
    if found.ndim not in (2, 3, 4) or 0 in found.shape:
        raise InputError(f"{name} has shape {tuple(found.shape)}, expected (nq, nk), (h, nq, nk) or (b, h, nq, nk)")
    if found.ndim == 4:
        items = len(found)
        if item is None and items > 1:
            raise InputError(f"item is None with {items} batch items, expected the one to draw, from 0 to {items - 1}")
        found = found[index_of("item", item, range(items))]
    elif item not in (None, 0):
        raise InputError(f"item is {item}, expected None: {name} has no batch dimension")
    found = found[None] if found.ndim == 2 else found
    return Layer(found, name, number, list(range(len(found))), (found.shape[1], found.shape[2]))


def checked_weights(values: np.ndarray, name: str = "w", *, whole: bool = True) -> np.ndarray:
    """The numbers, refused if any is negative; NaN stands for masked pairs.

    Rows that sum to more than 1, such as those of sigmoid attention, are divided by their sums if they are `whole`.
    """
    low, high = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)  # NaN if all numbers are
    if low < 0 or high == np.inf:
        raise InputError(f"{name} holds {low:.3g} to {high:.3g}, expected weights; qkv.plot.matrix draws scores")
    sums = np.nansum(values, -1, keepdims=True)
    if not whole or not (sums > ROUNDING).any():
        return values
    warnings.warn(f"rows of {name} sum to up to {sums.max():.3g}: each is divided by its sum", stacklevel=user_frame())
    divided: np.ndarray = values / np.where(sums > 0, sums, 1)
    return divided


def of_text(one: xr.Dataset, text: int) -> list[Layer]:
    """What a data set of one text of a profile, with the number `text`, stores of its weights."""
    n_queries, n_keys = int(one["n_queries"][0]), int(one["n_keys"][0])
    stored = Stored.of(one)
    if stored is None:
        raise InputError(
            f"w is a Profile without maps of text {text}, expected one made with map_tokens={max(n_queries, n_keys)} "
            "or more"
        )
    values = np.where(stored.visible, stored.largest.astype(np.float64), np.nan)
    heads, size = [int(x) for x in one["head"].values], (n_queries, n_keys)
    queries, keys = (
        [str(x) for x in one[f"{side}_token"].values[0, :n]] for side, n in zip(("query", "key"), size, strict=True)
    )
    numbers = [int(x) for x in one["layer"].values]
    return [Layer(x, "w", n, heads, size, stored.bins, queries, keys) for x, n in zip(values, numbers, strict=True)]


def masked(values: np.ndarray, mask: Any) -> np.ndarray:
    """The values with NaN where a mask, of booleans or from `qkv.masks`, is False."""
    if mask is None:
        return values
    visible = visible_pairs(mask, *values.shape[-2:])
    result: np.ndarray = np.where(visible, values, np.nan)
    return result


def visible_pairs(mask: Any, n_queries: int, n_keys: int, name: str = "mask") -> np.ndarray:
    """A mask of `qkv.masks` or a matrix of booleans as an array (nq, nk)."""
    found = mask.dense(n_queries, n_keys) if isinstance(mask, Mask) else mask
    pairs = found.detach().cpu().numpy() if isinstance(found, Tensor) else np.asarray(found)
    if pairs.dtype != bool:
        raise InputError(f"{name} is {pairs.dtype}, expected booleans, True where a query may attend")
    while pairs.ndim > 2 and len(pairs) == 1:
        pairs = pairs[0]
    if pairs.shape != (n_queries, n_keys):
        raise InputError(
            f"{name} has shape {pairs.shape}, expected ({n_queries}, {n_keys}), the same for all items and heads"
        )
    result: np.ndarray = pairs
    return result


def token_lists(
    tokens: Sequence[Any] | None, queries: Sequence[Any] | None, n_queries: int, n_keys: int
) -> tuple[list[str] | None, list[str] | None]:
    """Labels of the queries and of the keys. Without `queries`, the last keys are the queries, as with a cache."""
    keys = None if tokens is None else _labels("tokens", tokens, n_keys, "keys")
    if queries is not None:
        return _labels("queries", queries, n_queries, "queries"), keys
    if keys is None:
        return None, None
    if n_queries > n_keys:
        raise InputError(
            f"queries is None with {n_queries} queries and {n_keys} keys, expected the names of the queries"
        )
    return keys[n_keys - n_queries :], keys


def _labels(name: str, given: Sequence[Any], n: int, what: str) -> list[str]:
    if isinstance(given, str):
        raise InputError(f"{name} is one string, expected a list of {n} strings, such as tokenizer.tokenize(text)")
    found = [str(x) for x in given]
    if len(found) != n:
        raise InputError(f"{name} has {len(found)} names, expected {n}, one for each of the {what}")
    return found
