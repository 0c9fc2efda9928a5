"""Checks for sections 1 and 2: the motivation for attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import qkv
from research.claims import Verdict, claim, holds
from research.claims.chapter.mini import heads_of_mini


@claim("C003", "chapter", "1.3", "Attention handles all positions in parallel; an RNN works through them one by one.")
def c003() -> Verdict:
    def longest_path(layer: Callable[[torch.Tensor], torch.Tensor], n: int) -> int:
        """Steps, each of which needs the one before it, from the input to the output."""
        nodes, depth = [layer(torch.randn(1, n, 8, requires_grad=True)).grad_fn], {}
        for node in nodes:  # in order of discovery
            nodes += [after for after, _ in node.next_functions if after is not None and after not in nodes]

        def of(node: object) -> int:
            if node not in depth:
                depth[node] = 1 + max((of(x) for x, _ in node.next_functions if x is not None), default=0)
            return depth[node]

        return of(nodes[0])

    cell, attention = nn.RNNCell(8, 8), qkv.nn.MultiHeadAttention(8, 2)

    def step_by_step(x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, 8)
        for token in x.unbind(1):
            state = cell(token, state)
        return state

    rnn = [longest_path(step_by_step, n) for n in (8, 16, 32)]
    own = [longest_path(attention, n) for n in (8, 16, 32)]
    return holds(
        rnn[2] - rnn[1] == 2 * (rnn[1] - rnn[0]) > 0 and len(set(own)) == 1,
        f"Operations that must wait for one another at 8, 16 and 32 tokens: RNN {', '.join(map(str, rnn))}, "
        f"attention {', '.join(map(str, own))}. That is of reading a given text, as in training: a decoder that writes "
        "one token after another waits for each with attention, too.",
    )


@claim("C004", "chapter", "1.3", "Any two positions interact within one layer, whatever their distance.")
def c004() -> Verdict:
    torch.manual_seed(0)
    layer, x = qkv.nn.MultiHeadAttention(16, 2), torch.randn(1, 12, 16)

    def reaches(mask: qkv.masks.Mask | None) -> torch.Tensor:
        """Which outputs (rows) change with which inputs (columns)."""
        slopes = torch.autograd.functional.jacobian(lambda x: layer(x, mask=mask)[0], x)
        return slopes.abs().amax((1, 2, 4)) > 0

    every, causal = reaches(None), reaches(qkv.masks.Causal())
    return holds(
        bool(every.all()) and torch.equal(causal, torch.ones(12, 12).tril().bool()),
        "All 144 derivatives of 12 outputs by 12 inputs differ from 0. Under a causal mask those of later inputs "
        "are 0.",
    )


@claim("C005", "chapter", "1.3", "Attention weights show what the model looks at.")
def c005() -> Verdict:
    _, _, v, weights = heads_of_mini()
    out, n = weights @ v, weights.shape[-1]

    def moved_without(key: torch.Tensor) -> torch.Tensor:
        """How far, of its norm, a head's output moves if one key of each query is hidden."""
        a, value = weights.gather(3, key[..., None])[..., 0], v.gather(2, key[..., None].expand(*key.shape, v.shape[3]))
        return (a / (1 - a) * (out - value).norm(dim=-1) / out.norm(dim=-1))[..., 8:]

    top = weights.argmax(-1)
    other = (torch.rand(top.shape, generator=torch.Generator().manual_seed(0)) * torch.arange(n)).long()
    strongest, random = moved_without(top), moved_without(other + (other >= top))
    more = (strongest > random).double().mean().item()
    return holds(
        more > 0.9,
        "In qkv-mini, hiding a query's strongest key moves the head's output more than hiding another key at random "
        f"in {more:.1%} of cases (medians: by {strongest.median():.2f} and {random.median():.2f} of its norm); it "
        "holds above 90 %. That is what a head reads. Why the model says what it says is another question: a weight "
        "on a drained value brings little ([C068](#c068)).",
    )
