"""The eviction policies that `eviction` compares: which keys each retains at a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.cache import Cache, Evicting, HeavyHitters, Sinks, Sliding
from qkv.cache.registry import POLICIES
from qkv.errors import InputError, nearest
from qkv.masks import Mask, Prefix, Window

BUILT_IN = ("window", "sinks", "heavy")


@dataclass(frozen=True)
class Policy:
    """One policy, for caches of any budget."""

    name: str
    cache: Callable[[int], Cache]
    """Makes the cache of one layer that holds a budget of keys."""
    mask: Callable[[int], Mask] | None = None
    """The retained keys as a mask to combine with the causal one; None if they depend on the weights."""
    meaning: str = ""
    """What it keeps, for legends."""

    def worth(self, received: Tensor, budget: int) -> tuple[Tensor, int, int]:
        """The worth of every key (b, hkv, n) at the end of a text, and how many old and recent keys are retained."""
        cache = self.cache(budget)
        assert isinstance(cache, Evicting)
        queries = torch.arange(received.shape[-1], 0, -1, device=received.device).expand(received.shape)
        return cache.checked_worth(received, queries), cache.keys - cache.recent, cache.recent


def policies_of(chosen: Sequence[str | type[Evicting]], first: int) -> tuple[Policy, ...]:
    """The policies of names and of `Evicting` classes. `first` is the number of keys that "sinks" always keeps.

    Raises:
        InputError: for no policy, an unknown name, two policies of one name, or `first` below 1.
    """
    if first < 1:
        raise InputError(f"first is {first}, expected at least 1 key")
    if not chosen:
        raise InputError(f"policies is empty, expected some of {', '.join(BUILT_IN)}")
    built_in = (
        Policy("window", Sliding, Window, "the last keys"),
        Policy(
            "sinks",
            lambda budget: Sinks(first, budget - first),
            lambda budget: Prefix(first) | Window(budget - first),
            f"the first {first} and the last keys",
        ),
        Policy(
            "heavy", lambda budget: HeavyHitters(budget // 2, budget - budget // 2), None,
            "half last keys, half most attended",
        ),
    )  # fmt: skip
    by_name = {policy.name: policy for policy in built_in}
    found = tuple(
        by_name[each] if isinstance(each, str) and each in by_name else _ranked(each, by_name) for each in chosen
    )
    names = [policy.name for policy in found]
    if len(set(names)) < len(names):
        raise InputError(f"policies is {names}, expected each policy once")
    return found


def _ranked(policy: str | type[Evicting], built_in: dict[str, Policy]) -> Policy:
    """An `Evicting` class, or one that an installed package registers: half of its keys are the last ones."""
    made: type[Evicting]
    if isinstance(policy, str):
        known = [*built_in, *(name for name in POLICIES.names() if name not in POLICIES.built_in)]
        if policy not in known:
            raise InputError(f"policies has {policy!r}, expected some of {', '.join(known)}{nearest(policy, known)}")
        made = POLICIES.load(policy)
    elif isinstance(policy, type) and issubclass(policy, Evicting):
        made = policy
    else:
        raise InputError(f"policies has {policy!r}, expected names and subclasses of qkv.cache.Evicting")
    name: str = getattr(made, "name", made.__name__)
    if name in POLICIES.built_in:
        raise InputError(f"policies has a class with the name {name!r}, which is a built-in policy")
    return Policy(
        name, lambda budget: made(budget, budget - budget // 2), None, "half last keys, half the older of most worth"
    )
