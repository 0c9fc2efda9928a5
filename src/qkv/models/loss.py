"""Cross-entropy without forming all logits, for training and token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qkv.cache import Cache
from qkv.engine import at_least_float32
from qkv.errors import InputError, at_least_one

MAX_LOGITS = 2**26  # logits in memory at a time


@runtime_checkable
class Stepwise(Protocol):
    """A language model that reads texts in steps through caches, as `DecoderLM` does."""

    embedding: Any

    def start(self, batch: int, *, cache: Callable[[], Cache]) -> Any: ...

    def step(self, ids: Int[Tensor, "b n"], state: Any, *, every: bool) -> Float[Tensor, "b n vocab"]: ...


def linear_cross_entropy(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "vocab d"], targets: Int[Tensor, " n"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats of x·weightᵀ against `targets`; targets of −100 are ignored.

    If there are more than `MAX_LOGITS` logits, the rows are processed in pieces, whose logits are computed again for
    the gradient.

    >>> import torch
    >>> x, weight = torch.randn(5, 8), torch.randn(11, 8)
    >>> targets = torch.tensor([1, 2, 3, -100, 10])
    >>> expected = torch.nn.functional.cross_entropy(x @ weight.T, targets)
    >>> torch.allclose(linear_cross_entropy(x, weight, targets), expected)
    True
    """
    count = int((targets != -100).sum())
    if not count:
        raise InputError("targets are all −100, expected at least one token")
    low, high = (int(i) for i in targets[targets != -100].aminmax())
    if low < 0 or high >= len(weight):
        raise InputError(f"targets lie in {low}..{high}, expected 0..{len(weight) - 1} (or −100)")

    def total(part: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(part, weight)
        return F.cross_entropy(logits.to(at_least_float32(logits.dtype)), target, reduction="sum")

    pieces = -(-len(x) * len(weight) // MAX_LOGITS)
    if pieces == 1:
        return total(x, targets) / count
    parts = zip(x.chunk(pieces), targets.chunk(pieces), strict=True)
    return torch.stack([checkpoint(total, *part, use_reentrant=False) for part in parts]).sum() / count


@torch.no_grad()
def token_loss(
    model: Stepwise,
    ids: Int[Tensor, "b n"],
    make_cache: Callable[[], Cache],
    *,
    chunk: int = 64,
    begin: int = 0,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> Float[Tensor, "b positions"]:
    """The token loss −ln p of the next token at each of n − 1 positions, in nats, float64.

    The model reads the texts in chunks through the caches. With the cache `Full` this is the usual loss of the model.

    Args:
        model: a language model. For texts longer than those of its training, it should have rotary positions, ALiBi
            or none.
        ids: texts of at least 2 tokens.
        make_cache: makes the cache of one layer.
        chunk: tokens per step. It changes the memory needed, but not the result, except for `HeavyHitters`, which
            evicts keys only between steps: its definition is that of chunks of 1 token.
        begin: tokens of the first step, if more than `chunk`: as many as the cache keeps without evicting any.
        on_chunk: called with the number of tokens after every chunk.

    >>> from qkv.cache import Sliding
    >>> from qkv.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(vocab_size=9, d_model=8, layers=1, heads=2, positions="rotary")).eval()
    >>> token_loss(model, torch.arange(9)[None], lambda: Sliding(4)).shape
    torch.Size([1, 8])
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids has shape {tuple(ids.shape)}, expected (texts, length) of at least 2 tokens")
    at_least_one(chunk=chunk)
    ids = ids.to(model.embedding.weight.device)
    state, n = model.start(len(ids), cache=make_cache), ids.shape[1] - 1
    stops = [*range(max(begin, chunk), n, chunk), n]
    losses = []
    for start, stop in zip([0, *stops], stops, strict=False):
        part, targets = ids[:, start:stop], ids[:, start + 1 : stop + 1]
        logits = model.step(part, state, every=True).double()
        losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
        on_chunk(part.shape[1])
    return torch.cat(losses, 1)
