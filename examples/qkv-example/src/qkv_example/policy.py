"""A policy of a KV cache: evict the key that received least attention per query."""

from torch import Tensor

from qkv.cache import Evicting


class MeanAttention(Evicting):
    """Like H2O, but a key's attention is divided by the number of queries that could attend to it.

    H2O sums attention, which favours keys that have been in the cache for long.
    """

    name = "mean"

    def worth(self, received: Tensor, queries: Tensor) -> Tensor:
        return received / queries
