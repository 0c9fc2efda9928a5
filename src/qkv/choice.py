"""`qkv.choose_keys`, hard attention: one key for each query, with the log-probability that REINFORCE needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.biases import Bias
from qkv.engine.call import Call, as_biases, as_mask, detached
from qkv.errors import InputError
from qkv.kernels import attention, eager, opaque, pick, serve, tiled
from qkv.masks import Mask, Predicate
from qkv.normalizers import Hard, Softmax
from qkv.scores import Score


@dataclass(frozen=True, eq=False)
class Choice:
    """One key per query, and the log-probability of the choice.

    >>> from qkv import choose_keys
    >>> q = k = torch.eye(3)[None, None] * 9
    >>> choice = choose_keys(q, k, sample=False)
    >>> choice.index[0, 0].tolist(), choice.take(k)[0, 0].argmax(-1).tolist()
    ([0, 1, 2], [0, 1, 2])
    """

    index: Int[Tensor, "b h nq"]
    """The chosen key; −1 where all keys are masked."""
    log_prob: Float[Tensor, "b h nq"]
    """Natural logarithm of its softmax weight, differentiable; 0 where all keys are masked."""

    def take(self, v: Float[Tensor, "b hkv nk dv"]) -> Float[Tensor, "b h nq dv"]:
        """The values of the chosen keys; 0 where all keys are masked."""
        b, h, n_queries = self.index.shape
        folded = self.index.clamp(min=0).view(b, v.shape[1], -1, 1).expand(-1, -1, -1, v.shape[3])
        taken = v.gather(2, folded).view(b, h, n_queries, -1)
        return taken.masked_fill((self.index < 0)[..., None], 0)


@opaque
def choose_keys(
    q: Float[Tensor, "b h nq dq"],
    k: Float[Tensor, "b hkv nk dk"],
    *,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    bias: Bias | Sequence[Bias] | None = None,
    score: Score | None = None,
    temperature: float = 1.0,
    sample: bool = True,
    seed: int | None = None,
) -> Choice:
    """One key for every query: drawn with its softmax weight, or the key with the highest score; in linear memory.

    Values are not differentiable through a choice, but ``(reward − baseline) · log_prob`` has the gradient of the
    expected reward (REINFORCE, Williams 1992; "hard" attention of Xu et al. 2015, arXiv:1502.03044, §4.1).

    Args:
        q: queries.
        k: keys; ``h`` must be a multiple of ``hkv``.
        mask: True where a query may attend.
        bias: as in `attend`.
        score: as in `attend`.
        temperature: final scores are divided by it.
        sample: draw a key; False takes the key with the highest score, and the first one on ties.
        seed: seed of the draw; from torch's generator if None.

    Raises:
        InputError: for arguments that do not fit together.

    >>> import torch, qkv
    >>> q, k = torch.ones(1, 1, 1, 4), torch.tensor([0.0, 9.0])[None, None, :, None].expand(1, 1, 2, 4)
    >>> choice = qkv.choose_keys(q, k, sample=False)
    >>> choice.index.item(), round(choice.log_prob.exp().item(), 4), choice.take(k)[0, 0, 0, 0].item()
    (1, 1.0, 9.0)
    """
    mask, biases = as_mask(mask), as_biases(bias)
    chosen = _chosen(Call.of(q, k, k, mask, biases, score, Hard(sample, temperature), seed=seed))
    call = Call.of(q, k, k, mask, biases, score, Softmax(temperature))
    if call.values is not None:
        raise InputError(
            "choose_keys: bias is RelativePosition with values, which have no effect on the choice; pass "
            "RelativePosition(keys)"
        )
    lse, none, grid = serve(call).lse, chosen < 0, call.grid
    # The log-sum-exp over the chosen key alone is its score.
    key = chosen.clamp(min=0)
    alone = Predicate(lambda b, h, q, k: key[b, h, q - grid.offset] == k)
    score_of_key = attention(Call.of(q, k, k, alone, biases, score, Softmax(temperature))).lse
    assert lse is not None
    assert score_of_key is not None
    log_prob = torch.where(none, 0.0, score_of_key.masked_fill(none, 0) - lse.masked_fill(none, 0))
    return Choice(chosen, log_prob)


def _chosen(call: Call) -> Int[Tensor, "b h nq"]:
    """The key that each query takes; −1 if all are masked. The same on any kernel."""
    if pick(call, "auto") == "eager":  # for so few scores, tiles (of one batch item each) would be slower
        weights = eager.forward(detached(call)).weights
        assert weights is not None
        most, key = weights.max(-1)
        return key.masked_fill(most == 0, -1)
    chosen = tiled.row_state(call).chosen
    assert chosen is not None
    return chosen
