"""What a cache holds of a text, told from its keys, and which batch items its methods select."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.errors import InputError

ODD = 0x1E3779B97F4A7C15
"""Its multiples have all bits mixed."""
SELECT = ("reorder_cache", "reorder", "batch_select_indices", "batch_repeat_interleave")
CROP = "crop"


NAMES = ("cache", "past_key_values")
"""The argument of a model for its key-value cache, and the field of its output: since transformers 5.24 the first."""


@dataclass(frozen=True, eq=False)
class Stored:
    """The keys of one layer of a cache."""

    tensor: Tensor
    """As the cache has it, with unused rows."""
    keys: Float[Tensor, "b hkv n d"]
    length: int
    """The number of tokens that the layer has read, of which it may hold the last ones only."""
    stays: bool
    """Whether keys stay what they were when they were added; some caches round or rotate them."""
    least: int
    """The number of keys that it holds at least, if it was not pruned."""

    @property
    def state(self) -> tuple[weakref.ref[Tensor], int]:
        """What tells whether the layer was changed."""
        return weakref.ref(self.tensor), 0 if self.tensor.is_inference() else self.tensor._version

    def is_in(self, state: tuple[weakref.ref[Tensor], int]) -> bool:
        return state[0]() is self.tensor and state[1] == self.state[1]


def stored(cache: Any) -> dict[int, Stored]:
    """The layers of a cache of transformers, or of the state of one of qkv's models, that hold keys."""
    layers = {}
    for i, layer in enumerate(getattr(getattr(cache, "self_attention_cache", cache), "layers", ())):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel() and (length := int(layer.get_seq_length())):
            window = getattr(layer, "sliding_window", getattr(layer, "max_cache_len", length + 1))
            layers[i] = Stored(keys, keys[:, :, :length], length, keeps(layer), min(length, window - 1))
    for i, layer in enumerate(getattr(cache, "caches", ())):
        if (keys := layer._buffers.get("keys")) is not None and layer.seen:
            layers[i] = Stored(
                keys, keys[:, :, : layer._stop], layer.seen, keeps(layer), layer.seen if keeps(layer) else 0
            )
    return layers


def is_known(cache: Any) -> bool:
    """Whether a cache is of a kind of which it is known where its keys are."""
    return type(cache).__module__ == "transformers.cache_utils" or hasattr(cache, "caches")


def keeps(layer: Any) -> bool:
    """Whether a layer of a cache keeps its keys as they are."""
    names = [kind.__name__ for kind in type(layer).__mro__]
    if names[0] == "Full":  # of qkv
        return True
    return type(layer).__module__ == "transformers.cache_utils" and "BaseQuantizedLayer" not in names


def keeps_all(cache: Any, index: int | None) -> bool:
    """Whether a layer of a cache of transformers keeps its keys as they are; all layers if the index is None."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if not isinstance(layers, list):
        return False
    return all(keeps(layer) for layer in (layers if index is None else layers[index : index + 1]))


def hashed(keys: Float[Tensor, "b hkv n d"]) -> Int[Tensor, "b hkv n"]:
    """A number for each key, equal for keys with equal bits."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.dtype.itemsize]
    numbers = keys.detach().contiguous().view(kind).long()
    factors = torch.arange(1, keys.shape[3] + 1, device=keys.device) * ODD | 1
    mixed = (numbers ^ (numbers >> 7)) * factors
    return (mixed ^ (mixed >> 29)).sum(-1)


def located(
    keys: Float[Tensor, "b hkv m d"],
    known: Float[Tensor, "b0 hkv n d"],
    at: Int[Tensor, "b0 hkv m0"] | None,
    first: int,
    real: Bool[Tensor, "b0 n"] | None,
) -> tuple[Int[Tensor, " b"], Int[Tensor, "b hkv m"]]:
    """The batch item and the positions of a text where these keys come from.

    Args:
        keys: in a cache.
        known: the keys of the whole text.
        at: the positions that the cache held before; all if None.
        first: the position of the first key, if they are the newest of the text.
        real: True at real tokens; padding has equal keys, none of which a query sees.

    Raises:
        InputError: if some of them were not there, or if several keys of the text are equal.
    """
    new, old = hashed(keys), hashed(known.to(keys.device))
    m, order = new.shape[2], torch.arange(old.shape[2], device=old.device).expand_as(old)
    if at is not None:
        old, order, first = old.gather(2, at), at, 0
    sorted_, by = old.sort(-1)
    items, places = [], []
    for i, hashes in enumerate(new):
        likely = sorted(range(len(old)), key=lambda j: j != i)
        place = None
        for j in likely:
            if torch.equal(hashes, old[j, :, first : first + m]):
                place = order[j, :, first : first + m]
                break
        for j in likely if place is None else ():
            nearest = torch.searchsorted(sorted_[j], hashes).clamp(max=old.shape[2] - 1)
            if torch.equal(sorted_[j].gather(-1, nearest), hashes):
                place = order[j].gather(-1, by[j].gather(-1, nearest))
                of_text = [x if real is None else x[real[j].to(x.device)[x]] for x in place]
                if any(len(x.unique()) < len(x) for x in of_text):
                    raise InputError(
                        "the cache was pruned, and some of its keys are equal, so that it is not known which tokens "
                        "they belong to; expected keys that tell tokens apart"
                    )
                break
        if place is None:
            raise InputError(
                "the cache has keys that the model did not compute in a forward that was recorded; expected a cache "
                "that is filled inside of qkv.watch, or a copy of one"
            )
        items.append(j)
        places.append(place)
    return torch.tensor(items), torch.stack(places)


class Installed:
    """What the first of several contexts installs in the process, for all of them, and the last one removes."""

    def __init__(self, install: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.install, self.installed = install, ExitStack()
        self.lock, self.users = threading.RLock(), list[Any]()

    @contextmanager
    def __call__(self, user: Any = None) -> Iterator[None]:
        with self.lock:
            if not self.users:
                self.installed.enter_context(self.install())
            self.users.append(user)
        try:
            yield
        finally:
            with self.lock:
                self.users.remove(user)
                if not self.users:
                    self.installed.close()


@contextmanager
def overridden(owner: object, functions: Mapping[str, object]) -> Iterator[None]:
    """Inside, a model or a module of Python has other functions or values."""
    before = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    vars(owner).update(functions)
    try:
        yield
    finally:
        for name in functions:
            vars(owner).pop(name, None)
        vars(owner).update(before)


class _Listening(Installed):
    """Reports batch items that any cache selects, and None when it is cropped, to functions of both."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.local()

    def to(self, kind: type) -> None:
        """Report the caches of this class, too."""
        with self.lock:
            for name in (*SELECT, CROP):
                method = getattr(kind, name, None)
                if callable(method) and not hasattr(method, "reports"):
                    own = vars(kind).get(name)
                    self.installed.callback(*((delattr, kind, name) if own is None else (setattr, kind, name, own)))
                    setattr(kind, name, self._reporting(name, method))

    def _reporting(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def method(cache: Any, *args: Any, **named: Any) -> Any:
            if getattr(self.inside, "on", False):  # one such method may call another
                return own(cache, *args, **named)
            items = next(iter((*args, *named.values())), None)
            if name == "batch_repeat_interleave" and items is not None:
                held = stored(cache)
                items = torch.arange(len(next(iter(held.values())).keys) if held else 0).repeat_interleave(items)
            self.inside.on = True
            try:
                made = own(cache, *args, **named)
            finally:
                self.inside.on = False
            for listener in list(self.users):
                listener(cache, None if name == CROP or items is None else torch.as_tensor(items).detach().clone())
            return made

        method.reports = True  # type: ignore[attr-defined]
        return method


listening = _Listening()
