"""A policy of a KV cache: evict the key that received least attention per query."""

from torch import Tensor

from qkv.cache import Evicting, Held


class MeanAttention(Evicting):
    """Like H2O, but a key's attention is divided by the number of queries that could attend to it.

    H2O sums attention, which favours keys that have been in the cache for long.
    """

    name = "mean"

    def worth(self, held: Held) -> Tensor:
        return held.received / held.queries
