"""Checks of exercises on attention since 2024: softpick, forget gates, the delta rule, attention over depth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn import functional as F

import qkv
from qkv import biases, masks
from qkv_lab.check.hints import draw, exercise, expect, trial


@exercise
def softpick(answer: Callable[[Float64[Tensor, "*rows n"]], Float64[Tensor, "*rows n"]]) -> None:
    """Exercise of the lab on attention since 2024: max(eˢ − 1, 0) / Σ |eˢ − 1|.

    Args:
        answer: ``answer(scores)`` for float64 scores (..., n), of which −inf stands for a masked key: it has no part in
            the sum. Returns weights (..., n); a row without a score above 0 is a row of zeros.
    """
    scores = draw(2, 3, 6).double()
    trials = {"weights": scores, "scores near a thousand": 500 * scores + 1000, "no score above 0": -scores.abs()}
    masked = scores.clone()
    masked[0, :, 3:] = -torch.inf
    for name, s in {**trials, "masked keys": masked}.items():
        top = s.amax(-1, keepdim=True).clamp(min=0)
        powers, one = (s - top).exp() - (-top).exp(), (s - top).exp()
        size = powers.abs().masked_fill(s.isinf(), 0)
        mistakes = {
            "masked keys are in the sum: |e^−∞ − 1| is 1": powers.relu() / powers.abs().sum(-1, keepdim=True),
            "only positive terms are in the sum: it needs |eˢ − 1| of all visible keys": (
                powers.relu() / powers.relu().sum(-1, keepdim=True)
            ),
            "the weights are divided by Σ eˢ, expected Σ |eˢ − 1|": powers.relu() / one.sum(-1, keepdim=True),
            "weights are negative: max(eˢ − 1, 0) is the numerator": powers / size.sum(-1, keepdim=True),
            "this is the softmax": s.softmax(-1),
        }
        hint = "weights are not finite: subtract the largest score, or 0 if that is larger, from s and from the 0 of e⁰"
        with trial(name):
            right = powers.relu() / size.sum(-1, keepdim=True)
            expect(answer(s.clone()), right, "weights", mistakes, 1e-6, finite=hint)


@exercise
def forget_gates(answer: Callable[..., Float64[Tensor, "b n d"]]) -> None:
    """Exercise of the lab on attention since 2024: causal attention with forget gates.

    Args:
        answer: ``answer(q, k, v, log_f)`` for float64 q, k, v (b, n, d) and logarithms of gates (b, n). The score of
            query i and key j, q · k / √d, is raised by the sum of log_f of the tokens j + 1 … i. Returns (b, n, d).
    """
    for name, n in {"6 tokens": 6, "one token": 1}.items():
        q, k, v = (draw(2, n, 4, seed=i).double() for i in range(3))
        log_f = F.logsigmoid(draw(2, n, seed=3).double())
        total = log_f.cumsum(-1)
        rows, columns = total[..., None], total[:, None]

        def attended(bias: Tensor, causal: bool = True, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            parts, mask = [x[:, None] for x in (q, k, v)], masks.Causal() if causal else None
            return qkv.attend(*parts, mask=mask, bias=biases.TensorBias(bias[:, None]))[:, 0]

        mistakes = {
            "the gate of the key's own token counts, too: begin at j + 1": attended(rows - columns + log_f[:, None]),
            "the gate of the query's token does not count: the sum ends at i": (
                attended(rows - log_f[..., None] - columns)
            ),
            "the gates have the wrong sign: older keys must lose": attended(columns - rows),
            "the gates themselves are added, expected their logarithms": (
                attended(log_f.exp().cumsum(-1)[..., None] - log_f.exp().cumsum(-1)[:, None])
            ),
            "each key has its own gate only: sum over all tokens after it": attended(log_f[:, None].expand(2, n, n)),
            "there are no gates": attended(torch.zeros(2, n, n).double()),
            "later keys are visible: the attention is causal": attended(rows - columns, causal=False),
        }
        with trial(name):
            got = answer(q.clone(), k.clone(), v.clone(), log_f.clone())
            expect(got, attended(rows - columns), "the answer", mistakes, 1e-9)


@exercise
def delta_rule(answer: Callable[..., Float64[Tensor, "b n e"]]) -> None:
    """Exercise of the lab on attention since 2024: a state that decays, and is written by the delta rule.

    Args:
        answer: ``answer(q, k, v, log_a, beta)`` for float64 q and k (b, n, d), k of length 1, v (b, n, e), and
            logarithms of decays and rates (b, n). For each token the state (b, d, e), 0 at first, is multiplied by
            exp(log_a); then β k (v − old)ᵀ is added, where old is what the state has at k. Returns what each q then
            reads, (b, n, e).
    """
    for name, n in {"5 tokens": 5, "40 tokens": 40}.items():
        q, k, v = (draw(2, n, size, seed=i).double() for i, size in enumerate((4, 4, 3)))
        k = F.normalize(k, dim=-1)
        log_a, beta = -draw(2, n, seed=3).double().abs(), draw(2, n, seed=4).double().sigmoid()

        def read(log_a: Tensor | None, beta: Tensor | None, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            decay, rate = (None if x is None else x[:, None] for x in (log_a, beta))
            inputs = [x[:, None] for x in (q, k, v)]
            return qkv.linear_attend(*inputs, features=lambda x: x, normalize=False, decay=decay, beta=rate)[:, 0]

        one = torch.ones_like(beta)
        late = F.pad(log_a, (1, -1))
        mistakes = {
            "the old value is not subtracted: β k vᵀ is added": read(log_a, None, v=beta[..., None] * v),
            "the state does not decay": read(None, beta),
            "the state decays after the token is added, expected before": read(late, beta),
            "the rate is 1 for all tokens": read(log_a, one),
            "the query reads before the token is added": F.pad(
                read(log_a, beta, q=F.pad(q[:, 1:], (0, 0, 0, 1)))[:, :-1], (0, 0, 1, 0)
            ),
        }
        with trial(name):
            got = answer(*(x.clone() for x in (q, k, v, log_a, beta)))
            expect(got, read(log_a, beta), "the answer", mistakes, 1e-9)


@exercise
def attention_over_depth(answer: Callable[..., Float64[Tensor, "b n d"]]) -> None:
    """Exercise of the lab on attention since 2024: a layer's input, by attention over the outputs of earlier layers.

    Args:
        answer: ``answer(query, outputs)`` for a float64 query (d,) and outputs (layers, b, n, d). For each token, the
            score of a layer is query · key without a scale; its key is its output divided by the root of the mean of
            its squares. Returns (b, n, d): the outputs, weighted by the softmax of the scores over layers.
    """
    outputs, query = draw(4, 2, 3, 6, seed=1).double() * torch.tensor([0.5, 1, 2, 4])[:, None, None, None], draw(6)
    for name, q in {"weights of layers": query.double(), "a query of zeros": torch.zeros(6).double()}.items():
        keys = F.rms_norm(outputs, (6,), eps=0.0)
        scores = keys @ q

        def mixed(scores: Tensor, values: Tensor = outputs, dim: int = 0) -> Tensor:
            return (scores.softmax(dim)[..., None] * values).sum(0)

        mistakes = {
            "the outputs are added with equal weights, as residual connections do": outputs.sum(0),
            "the keys are not normalised: large outputs get all the weight": mixed(outputs @ q),
            "the values are normalised, too: only the keys are": mixed(scores, keys),
            "the scores are divided by √d; here they have no scale": mixed(scores / 6**0.5),
            "the softmax is over tokens, expected over layers": mixed(scores, dim=2),
        }
        with trial(name):
            expect(answer(q.clone(), outputs.clone()), mixed(scores), "the answer", mistakes, 1e-5)
