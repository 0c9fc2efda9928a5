"""The weights that a call of `qkv.plot` gets, in any form, as arrays of layers; their tokens; and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from qkv._packages import user_frame
from qkv.errors import InputError
from qkv.figures.map import Stored
from qkv.masks import Mask
from qkv.profiler.profiles import Profile

if TYPE_CHECKING:
    import xarray as xr

ROUNDING = 1.01  # weights in half precision may exceed 1 by a little


@dataclass(frozen=True)
class Layers:
    """Weights of some layers. Each layer is converted and checked when it is drawn, since all of them may be large."""

    views: list[Tensor | np.ndarray]
    """For each layer (heads, queries, keys), or its bins if `bins` is not (1, 1)."""
    names: list[str]
    """The name of each layer in errors."""
    layer_ids: list[int]
    head_ids: list[list[int]]
    sizes: list[tuple[int, int]]
    """Numbers of queries and keys of each layer, which its bins cover."""
    bins: tuple[int, int] = (1, 1)
    keys: list[str] | None = None
    queries: list[str] | None = None

    def layer(self, layer: int | None) -> Layers:
        """One layer by its id; `layer` may be None if there is only one."""
        at = _index("layer", layer, self.layer_ids)
        pick = slice(at, at + 1)
        return replace(
            self,
            views=self.views[pick],
            names=self.names[pick],
            layer_ids=self.layer_ids[pick],
            head_ids=self.head_ids[pick],
            sizes=self.sizes[pick],
        )

    def names_of(
        self, tokens: Sequence[Any] | None, queries: Sequence[Any] | None
    ) -> tuple[list[str] | None, list[str] | None]:
        """Names of the queries and of the keys of the only layer: those that are given, else those of a profile."""
        if tokens is None and queries is None:
            return self.queries, self.keys
        return token_lists(tokens, queries, *self.sizes[0])

    def maps(self) -> Iterator[np.ndarray]:
        """The weights of each layer, (heads, queries, keys), float64."""
        for view, name in zip(self.views, self.names, strict=True):
            yield checked_weights(array(view, name), name, whole=self.bins == (1, 1))

    def head(self, head: int | None) -> np.ndarray:
        """The map of one head, by its id, of the only layer."""
        at = _index("head", head, self.head_ids[0])
        return checked_weights(array(self.views[0][at], self.names[0]), self.names[0], whole=self.bins == (1, 1))

    def mean(self, layer: int | None, head: int | None) -> tuple[str, np.ndarray]:
        """The weights (nq, nk) of one head, or the mean of a layer or of all layers, 0 at masked pairs; and its name.

        The name is empty for weights of a single head.
        """
        if self.bins != (1, 1):
            raise InputError("w is a Profile with bins of a long text, expected all weights: map_tokens= was less")
        found = self if layer is None and head is None else self.layer(layer)
        heads = sum(map(len, found.head_ids))
        if head is not None:
            return f"Layer {found.layer_ids[0]}, head {head}", np.nan_to_num(found.head(head))
        if len(set(found.sizes)) > 1:
            raise InputError("w has layers of different sizes, expected one size; pass layer=")
        of = f"Mean of {heads} heads" if layer is None else f"Layer {layer}, mean of {heads} heads"
        return "" if heads == 1 else of, np.mean([np.nan_to_num(x).mean(0) for x in found.maps()], axis=0)


def _index(name: str, chosen: int | None, ids: Sequence[int]) -> int:
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


def layers(w: Any, item: int | None = None, *, stacked: bool = False) -> Layers:
    """The weights of some layers and, for a profile, their tokens.

    Args:
        w: a `Profile`; a tuple or list of layers (b, h, nq, nk) or (h, nq, nk), as `output_attentions` gives; or one
            tensor or array (nq, nk), (h, nq, nk), (b, h, nq, nk) or (layers, b, h, nq, nk).
        item: batch item, or text of a profile; None if there is only one.
        stacked: whether four dimensions are (layers, h, nq, nk).
    """
    if isinstance(w, Profile):
        return _of_profile(w, item)
    if isinstance(w, (tuple, list)) and w and (any(x is None for x in w) or any(getattr(x, "ndim", 0) > 2 for x in w)):
        names = [f"w[{n}]" for n in range(len(w))]
        made = [_layer(x, item, name) for x, name in zip(w, names, strict=True)]
    else:
        whole = _as_given(w, "w")
        parts = list(whole) if whole.ndim == 5 or (stacked and whole.ndim == 4) else [whole]
        made, names = [_layer(x, item, "w") for x in parts], ["w"] * len(parts)
    return Layers(
        made,
        names,
        list(range(len(made))),
        [list(range(len(x))) for x in made],
        [(x.shape[1], x.shape[2]) for x in made],
    )


def _layer(x: Any, item: int | None, name: str) -> Tensor | np.ndarray:
    """One layer as (h, nq, nk), a view of it if it is a tensor or an array."""
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
        found = found[_index("item", item, range(items))]
    elif item not in (None, 0):
        raise InputError(f"item is {item}, expected None: {name} has no batch dimension")
    return found[None] if found.ndim == 2 else found


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


def _of_profile(profile: Profile, item: int | None) -> Layers:
    texts = profile.data.sizes["text"]
    if item is None and texts > 1:
        raise InputError(f"item is None with {texts} texts, expected the text to draw")
    return of_text(profile.data.isel(text=[at := _index("item", item, range(texts))]), at)


def of_text(one: xr.Dataset, text: int) -> Layers:
    """What a data set of one text of a profile, with the number `text`, stores of its weights."""
    n_queries, n_keys = int(one["n_queries"][0]), int(one["n_keys"][0])
    stored = Stored.of(one)
    if stored is None:
        raise InputError(
            f"w is a Profile without maps of text {text}, expected one made with map_tokens={max(n_queries, n_keys)} "
            "or more"
        )
    values = np.where(stored.visible, stored.largest.astype(np.float64), np.nan)
    count = len(values)
    return Layers(
        list(values),
        ["w"] * count,
        [int(x) for x in one["layer"].values],
        [[int(x) for x in one["head"].values]] * count,
        [(n_queries, n_keys)] * count,
        stored.bins,
        [str(x) for x in one["key_token"].values[0, :n_keys]],
        [str(x) for x in one["query_token"].values[0, :n_queries]],
    )


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
