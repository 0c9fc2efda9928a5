"""Checks of the labs' exercises: correct answers pass, and each typical mistake fails with its own hint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import refused
from qkv_lab import check

Answer = Callable[..., Any]
RIGHT: dict[str, list[Answer]] = {}
WRONG: list[tuple[str, str, Answer]] = []


def right(name: str) -> Callable[[Answer], Answer]:
    def register(answer: Answer) -> Answer:
        RIGHT.setdefault(name, []).append(answer)
        return answer

    return register


def wrong(name: str, hint: str) -> Callable[[Answer], Answer]:
    """An answer to the exercise `name` whose ✗ must say `hint`."""

    def register(answer: Answer) -> Answer:
        WRONG.append((name, hint, answer))
        return answer

    return register


# --- attention --------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *,
    scale: float | None = None, dim: int = -1, fill: float = -math.inf, flip: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(mask if flip else ~mask, fill)
    weights = scores.softmax(dim)
    return weights @ v, weights


@right("attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    weights = _attend(q, k, v, mask)[1]
    weights = weights if mask is None else weights.masked_fill(~mask.any(-1, keepdim=True), 0)
    return weights @ v, weights


@right("attention")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """By hand: the largest score of a row, powers, their sum."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
        powers = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=1e-30)
    return weights @ v, weights


wrong("attention", "expected a pair")(lambda q, k, v, mask=None: _attend(q, k, v)[0])
wrong("attention", "weights has shape .* a row for each query")(
    lambda q, k, v, mask=None: (_attend(q, k, v)[0], _attend(q, k, v)[1].mT)
)
wrong("attention", "each column .* sums to 1")(lambda q, k, v, mask=None: _attend(q, k, v, mask, dim=1))
wrong("attention", "the rows of weights do not sum to 1")(lambda q, k, v, mask=None: (q @ k.mT @ v, q @ k.mT))
wrong("attention", "not scaled")(lambda q, k, v, mask=None: _attend(q, k, v, mask, scale=1.0))
wrong("attention", "divided by d, expected by its square root")(
    lambda q, k, v, mask=None: _attend(q, k, v, mask, scale=1 / q.shape[-1])
)
wrong("attention", "size of the values")(lambda q, k, v, mask=None: _attend(q, k, v, mask, scale=v.shape[-1] ** -0.5))
wrong("attention", "number of keys")(lambda q, k, v, mask=None: _attend(q, k, v, mask, scale=k.shape[-2] ** -0.5))
wrong("attention", "out, which is weights @ v")(
    lambda q, k, v, mask=None: (2 * _attend(q, k, v)[0], _attend(q, k, v)[1])
)
wrong("attention", "the mask is ignored")(lambda q, k, v, mask=None: _attend(q, k, v))
wrong("attention", "wrong way round")(lambda q, k, v, mask=None: _attend(q, k, v, mask, flip=True))
wrong("attention", "score 0, whose weight is not 0")(lambda q, k, v, mask=None: _attend(q, k, v, mask, fill=0.0))
wrong("attention", "attends to all keys equally")(lambda q, k, v, mask=None: _attend(q, k, v, mask, fill=-1e9))
wrong("attention", "weights of a query with no visible key is NaN")(lambda q, k, v, mask=None: _attend(q, k, v, mask))


@wrong("attention", "comes after the softmax")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    weights = _attend(q, k, v)[1]
    weights = weights if mask is None else weights * mask
    return weights @ v, weights


@wrong("attention", "overflow")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    powers = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    powers = powers if mask is None else powers * mask
    weights = powers / powers.sum(-1, keepdim=True)
    return weights @ v, weights


@wrong("attention", "gradient of q is NaN.*finite scores before the softmax")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """−inf is added, and NaN weights are replaced after the softmax."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return weights @ v, weights


@wrong("attention", "gradient of v is NaN.*replace NaN in the weights")
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """NaN is replaced in the output and in the returned weights, not before the product."""
    out, weights = _attend(q, k, v, mask)
    return out.nan_to_num(0), weights.nan_to_num(0)


# --- entropy, temperature ---------------------------------------------------------------------------------------------

right("entropy")(lambda w: torch.special.entr(w).sum(-1))
right("entropy")(lambda w: -(w * w.clamp(min=1e-30).log()).sum(-1))
wrong("entropy", "makes NaN")(lambda w: -(w * w.log()).sum(-1))
wrong("entropy", "runs over queries")(lambda w: -(w * w.log()).sum(-2))
wrong("entropy", "it is one number")(lambda w: -(w * w.log()).sum(-1).mean())
wrong("entropy", "sum over keys is missing")(lambda w: -(w * w.log()))
wrong("entropy", "negative")(lambda w: (w * w.log()).sum(-1))
wrong("entropy", "in bits")(lambda w: -(w * w.log2()).sum(-1))
wrong("entropy", "divided by ln n")(lambda w: torch.special.entr(w).sum(-1) / math.log(w.shape[-1]))
wrong("entropy", "the mean over keys, expected the sum")(lambda w: torch.special.entr(w).mean(-1))
wrong("entropy", "off by")(lambda w: -(w * (w + 0.01).log()).sum(-1))


def _tempered(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, scale=scale)


right("temperature")(lambda q, k, v, temperature=1.0: _tempered(q, k, v, q.shape[-1] ** -0.5 / temperature))
wrong("temperature", "multiplied by it, expected divided")(
    lambda q, k, v, temperature=1.0: _tempered(q, k, v, q.shape[-1] ** -0.5 * temperature)
)
wrong("temperature", "changes nothing")(lambda q, k, v, temperature=1.0: _attend(q, k, v))
wrong("temperature", "1/√d stays")(lambda q, k, v, temperature=1.0: _tempered(q, k, v, 1 / temperature))
wrong("temperature", "under the root")(
    lambda q, k, v, temperature=1.0: _tempered(q, k, v, (q.shape[-1] * temperature) ** -0.5)
)


@wrong("temperature", "weights are divided by the temperature")
def _(q: Tensor, k: Tensor, v: Tensor, temperature: float = 1.0) -> Any:
    weights = _attend(q, k, v)[1] / temperature
    return weights @ v, weights


@wrong("temperature", "overflows")
def _(q: Tensor, k: Tensor, v: Tensor, temperature: float = 1.0) -> Any:
    powers = (q @ k.mT / (q.shape[-1] ** 0.5 * temperature)).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    return weights @ v, weights


# --- heads ------------------------------------------------------------------------------------------------------------

right("causal_mask")(lambda n: torch.arange(n)[:, None] >= torch.arange(n))
wrong("causal_mask", "is torch.float32, expected torch.bool")(lambda n: torch.ones(n, n).tril())
wrong("causal_mask", "has shape")(lambda n: torch.ones(1, 1, n, n).tril().bool())
wrong("causal_mask", "the lower triangle")(lambda n: torch.ones(n, n).triu().bool())
wrong("causal_mask", "must see itself")(lambda n: torch.ones(n, n).tril(-1).bool())
wrong("causal_mask", "True marks masked keys")(lambda n: torch.ones(n, n).triu(1).bool())
wrong("causal_mask", "one key too many")(lambda n: torch.ones(n, n).tril(1).bool())
wrong("causal_mask", "expected a tensor")(lambda n: None)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _multi(
    split: Callable[[Tensor, int], Tensor] = _split, merge: Callable[[Tensor], Tensor] = _merge, *,
    cut: bool = True, last: bool = True, masked: bool = True, flip: bool = False, whole: bool = False,
) -> Answer:  # fmt: skip
    def answer(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, mask: Tensor | None = None) -> Any:
        queries, keys, values = (split(x @ w, heads) for w in (q, k, v))
        scale = (x.shape[-1] if whole else x.shape[-1] // heads) ** -0.5 if cut else 1.0
        out, weights = _attend(queries, keys, values, mask if masked else None, scale=scale, flip=flip)
        return (merge(out) @ o if last else merge(out)), weights

    return answer


def _interleaved(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


right("multi_head")(_multi())
wrong("multi_head", "output matrix is missing")(_multi(last=False))
wrong("multi_head", "divided by √d_model")(_multi(whole=True))
wrong("multi_head", "mixes tokens")(
    _multi(lambda x, h: x.reshape(len(x), h, x.shape[1], -1), lambda x: x.reshape(len(x), x.shape[2], -1))
)
wrong("multi_head", "interleaved")(_multi(_interleaved))
wrong("multi_head", "heads attend to heads")(
    _multi(lambda x, h: x.unflatten(-1, (h, -1)) if h > 1 else _split(x, 1), lambda x: x.reshape(len(x), 5, -1))
)
wrong("multi_head", "without moving them back")(_multi(merge=lambda x: x.reshape(len(x), x.shape[2], -1)))
wrong("multi_head", "the mask is ignored")(_multi(masked=False))
wrong("multi_head", "wrong way round")(_multi(flip=True))


@wrong("multi_head", "matrices are transposed")
def _(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, mask: Tensor | None = None) -> Any:
    return _multi()(x, q.T, k.T, v.T, o.T, heads, mask)


@wrong("multi_head", "averaged over the heads")
def _(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, mask: Tensor | None = None) -> Any:
    out, weights = _multi()(x, q, k, v, o, heads, mask)
    return out, weights if heads == 1 else weights.mean(1)


@wrong("multi_head", "no dimension for the heads")
def _(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int, mask: Tensor | None = None) -> Any:
    out, weights = _multi()(x, q, k, v, o, heads, mask)
    return out, weights.mean(1)


def _dropped(drop: Callable[[Tensor, float, bool], Tensor]) -> Answer:
    def answer(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
        weights = drop(_attend(q, k, v)[1], p, training)
        return weights @ v, weights

    return answer


def _bernoulli(w: Tensor, p: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return torch.rand(shape or w.shape) >= p


right("dropout")(_dropped(F.dropout))
right("dropout")(_dropped(lambda w, p, t: w * _bernoulli(w, p) / (1 - p) if t else w))
wrong("dropout", "dropped in evaluation, too")(_dropped(lambda w, p, t: F.dropout(w, p)))
wrong("dropout", "dropped in evaluation, too")(_dropped(lambda w, p, t: w * _bernoulli(w, p) if t else w * (1 - p)))
wrong("dropout", "not scaled up")(_dropped(lambda w, p, t: w * _bernoulli(w, p) if t else w))
wrong("dropout", "p is the share that is dropped")(_dropped(lambda w, p, t: F.dropout(w, 1 - p, t)))
wrong("dropout", "whole keys are dropped")(
    _dropped(lambda w, p, t: w * _bernoulli(w, p, (2, 1, 50)) / (1 - p) if t else w)
)
wrong("dropout", "whole queries are dropped")(
    _dropped(lambda w, p, t: w * _bernoulli(w, p, (2, 40, 1)) / (1 - p) if t else w)
)
wrong("dropout", "50% of the weights are dropped, expected 30%")(_dropped(lambda w, p, t: F.dropout(w, 0.5, t)))


@wrong("dropout", "rows still sum to 1")
def _(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
    weights = F.dropout(q @ k.mT / q.shape[-1] ** 0.5, p, training).softmax(-1)
    return weights @ v, weights


@wrong("dropout", "rows still sum to 1")
def _(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
    weights = F.dropout(_attend(q, k, v)[1], p, training)
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ v, weights


@wrong("dropout", "no weight is dropped in training")
def _(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
    out, weights = _attend(q, k, v)
    return F.dropout(out, p, training), weights


@wrong("dropout", "out uses the plain weights")
def _(q: Tensor, k: Tensor, v: Tensor, p: float, training: bool) -> Any:
    out, weights = _attend(q, k, v)
    return out, F.dropout(weights, p, training)


def _crossed(queries: str = "x", keys: str = "c", values: str = "c", *, causal: bool = False) -> Answer:
    def answer(x: Tensor, context: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int) -> Any:
        made = {"x": x, "c": context}
        parts = (_split(made[s] @ w, heads) for s, w in ((queries, q), (keys, k), (values, v)))
        mask = torch.ones(x.shape[1], context.shape[1]).tril().bool() if causal else None
        out, weights = _attend(*parts, mask)
        return _merge(out) @ o, weights

    return answer


right("cross_attention")(_crossed())
wrong("cross_attention", "this is self-attention")(_crossed("x", "x", "x"))
wrong("cross_attention", "keys come from x")(_crossed("x", "x", "c"))
wrong("cross_attention", "values come from x")(_crossed("x", "c", "x"))
wrong("cross_attention", "the sequences are swapped")(_crossed("c", "x", "x"))
wrong("cross_attention", "queries come from the context")(_crossed("c", "c", "c"))
wrong("cross_attention", "a causal mask masks part")(_crossed(causal=True))


@wrong("cross_attention", "7 tokens and 5 queries")
def _(x: Tensor, context: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int) -> Any:
    return _crossed()(x, context.view(x.shape[0], x.shape[1], -1), q, k, v, o, heads)


@wrong("cross_attention", "a context 10 wide")
def _(x: Tensor, context: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, heads: int) -> Any:
    return _crossed()(x, context.view(x.shape[0], -1, x.shape[2]), q, k, v, o, heads)


# --- sinks ------------------------------------------------------------------------------------------------------------

right("first_token")(lambda w: w[..., 1:, 0].mean((1, 2)))
right("first_token")(lambda w: torch.stack([layer[:, 1:, 0].mean() for layer in w]))
wrong("first_token", "the first query is included")(lambda w: w[..., 0].mean((1, 2)))
wrong("first_token", "the first row, the weights of the first query")(lambda w: w[..., 0, :].mean((1, 2)))
wrong("first_token", "the first row without")(lambda w: w[..., 0, 1:].mean((1, 2)))
wrong("first_token", "the largest weight")(lambda w: w[..., 1:, 0].amax((1, 2)))
wrong("first_token", "expected one for each layer")(lambda w: w[..., 1:, 0].mean())
wrong("first_token", "one number for each head")(lambda w: w[..., 1:, 0].mean(-1))
wrong("first_token", "a sum grows")(lambda w: w[..., 1:, 0].sum(-1).mean(1))

right("sink_rate")(lambda w, threshold=0.3: (w[..., 0].mean(-1) > threshold).float().mean())
right("sink_rate")(
    lambda w, threshold=0.3: sum(x > threshold for x in w[..., 0].mean(-1).flatten()) / w[..., 0, 0].numel()
)
wrong("sink_rate", "chapter's measure")(lambda w, t=0.3: (w[..., 1:, 0] > t).float().mean().item())
wrong("sink_rate", "chapter's measure")(lambda w, t=0.3: (w[..., 0] > t).float().mean().item())
wrong("sink_rate", "first query is left out")(lambda w, t=0.3: (w[..., 1:, 0].mean(-1) > t).float().mean().item())
wrong("sink_rate", "averaged before the threshold")(lambda w, t=0.3: (w[..., 0].mean((1, 2)) > t).float().mean().item())
wrong("sink_rate", "compare each head's")(lambda w, t=0.3: w[..., 0].mean().item())
wrong("sink_rate", "first row")(lambda w, t=0.3: (w[..., 0, :].mean(-1) > t).float().mean().item())
wrong("sink_rate", "counts heads")(lambda w, t=0.3: (w[..., 0].mean(-1) > t).sum().item())
wrong("sink_rate", "threshold that was passed is ignored")(lambda w, t=0.3: (w[..., 0].mean(-1) > 0.3).float().mean())
wrong("sink_rate", "expected one number for the model")(lambda w, t=0.3: (w[..., 0].mean(-1) > t).float().mean(1))
wrong("sink_rate", "expected a number")(lambda w, t=0.3: None)


def _keyed(
    *, scaled: bool = True, cut: bool = True, renormalised: bool = False,
    value: Callable[[Tensor], Tensor] | None = None,
    key_masked: bool = False, detached: bool = False, zero: bool = False, masked: bool = True,
) -> Answer:  # fmt: skip
    def answer(q: Tensor, k: Tensor, v: Tensor, key: Tensor, mask: Tensor | None = None) -> Any:
        key = key.detach() if detached else key
        scores = q @ k.mT / q.shape[-1] ** 0.5
        extra = (q @ key)[..., None] / (q.shape[-1] ** 0.5 if scaled else 1)
        extra = torch.zeros_like(extra) if zero else extra
        if mask is not None and masked:
            scores = scores.masked_fill(~mask, -torch.inf)
            extra = torch.full_like(extra, -torch.inf) if key_masked else extra
        whole = torch.cat([scores, extra], -1).softmax(-1)
        weights = whole[..., :-1]
        out = weights @ v if value is None else weights @ v + whole[..., -1:] * value(key)
        if renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return out, weights if cut else whole

    return answer


right("key_bias")(_keyed())
wrong("key_bias", "takes no weight")(lambda q, k, v, key, mask=None: _attend(q, k, v, mask))
wrong("key_bias", "takes no weight")(_keyed(renormalised=True))
wrong("key_bias", "still have the column")(_keyed(cut=False))
wrong("key_bias", "not divided by √d")(_keyed(scaled=False))
wrong("key_bias", "softmax off by one")(_keyed(zero=True))
wrong("key_bias", "value is the key itself")(_keyed(value=lambda key: key))
wrong("key_bias", "a value of ones")(_keyed(value=torch.ones_like))
wrong("key_bias", "the mask is ignored")(_keyed(masked=False))
wrong("key_bias", "is masked: it must be visible")(_keyed(key_masked=True))
wrong("key_bias", "does not depend on the key for autograd")(_keyed(detached=True))
wrong("key_bias", "takes no weight")(lambda q, k, v, key, mask=None: _attend(q, k + key, v, mask))

right("off_by_one")(lambda s: F.pad(s, (0, 1)).softmax(-1)[..., :-1])


@right("off_by_one")
def _(s: Tensor) -> Tensor:
    top = s.amax(-1, keepdim=True).clamp(min=0)
    powers = (s - top).exp()
    return powers / ((-top).exp() + powers.sum(-1, keepdim=True))


wrong("off_by_one", "plain softmax")(lambda s: s.softmax(-1))
wrong("off_by_one", "column of zeros is still there")(lambda s: F.pad(s, (0, 1)).softmax(-1))
wrong("off_by_one", "overflows")(lambda s: s.exp() / (1 + s.exp().sum(-1, keepdim=True)))
wrong("off_by_one", "after they are normalised")(lambda s: s.softmax(-1) / (1 + s.softmax(-1).sum(-1, keepdim=True)))
wrong("off_by_one", "the additional score is 1")(lambda s: F.pad(s, (0, 1), value=1.0).softmax(-1)[..., :-1])


@wrong("off_by_one", "the 1 is not: 1 becomes")
def _(s: Tensor) -> Tensor:
    powers = (s - s.amax(-1, keepdim=True)).exp()
    return powers / (1 + powers.sum(-1, keepdim=True))


@wrong("off_by_one", "a row of −inf gives NaN")
def _(s: Tensor) -> Tensor:
    """Right but for rows whose largest score is −inf."""
    top = s.amax(-1, keepdim=True)
    powers = (s - top).exp()
    return powers / ((-top).clamp(max=80).exp() + powers.sum(-1, keepdim=True))


@wrong("off_by_one", "scores near −50 are large")
def _(s: Tensor) -> Tensor:
    """The 1 is forgotten where all scores are low."""
    return s.softmax(-1) if s.amax() < -10 else F.pad(s, (0, 1)).softmax(-1)[..., :-1]


# --- transformer ------------------------------------------------------------------------------------------------------


def _counted(
    *, attention: int = 4, attention_bias: int = 0, ff_bias: bool = True, norms: int = 2, gain_only: bool = False,
    last: bool = True, context: bool = True, own: int = 0, times: bool = True, four: bool = False,
) -> Answer:  # fmt: skip
    def answer(vocab: int, d: int, layers: int, d_ff: int, n: int, tied: bool = True) -> int:
        d_ff = 4 * d if four else d_ff
        norm = d if gain_only else 2 * d
        block = attention * d * d + attention_bias * d + 2 * d * d_ff + (d_ff + d) * ff_bias + norms * norm
        output = own * vocab * d if tied else vocab * d
        return vocab * d + n * d * context + (layers if times else 1) * block + norm * last + output

    return answer


right("parameter_count")(_counted())
wrong("parameter_count", "biases of the feed-forward layers are missing")(_counted(ff_bias=False))
wrong("parameter_count", "the last layer norm is missing")(_counted(last=False))
wrong("parameter_count", "a gain and a bias")(_counted(gain_only=True))
wrong("parameter_count", "although it is the table of tokens")(_counted(own=1))
wrong("parameter_count", "table of positions is missing")(_counted(context=False))
wrong("parameter_count", "four matrices, not three")(_counted(attention=3))
wrong("parameter_count", "attention's matrices have no biases")(_counted(attention_bias=4))
wrong("parameter_count", "two layer norms, not one")(_counted(norms=1))
wrong("parameter_count", "layer norms are missing: two a block")(_counted(norms=0, last=False))
wrong("parameter_count", "layer norms of the blocks are missing")(_counted(norms=0))
wrong("parameter_count", "times layers")(_counted(times=False))
wrong("parameter_count", "taken to be 4")(_counted(four=True))
wrong("parameter_count", "too many")(lambda *a: _counted()(*a) + 1)
wrong("parameter_count", "expected a whole number")(lambda *a: float(_counted()(*a)))
wrong("parameter_count", "it is not the table of tokens here")(
    lambda vocab, d, layers, d_ff, n, tied=True: _counted()(vocab, d, layers, d_ff, n)
)


class _Token(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((d_model,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), 1, -1), x], 1)


right("sink_token")(_Token)


@right("sink_token")
class _Drawn(nn.Module):
    """Its vector is drawn, and has dimensions for the text and the place."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.repeat(len(x), 1, 1), x], 1)


@wrong("sink_token", "comes after the text")
class _Behind(_Token):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.token.expand(len(x), 1, -1)], 1)


@wrong("sink_token", "not added to its tokens")
class _Added(_Token):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.token


@wrong("sink_token", "the last token of the text is lost")
class _Shortened(_Token):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :-1]


@wrong("sink_token", "0 parameters.*a plain tensor, or a buffer")
class _Buffer(_Token):
    def __init__(self, d_model: int) -> None:
        nn.Module.__init__(self)
        self.register_buffer("token", torch.zeros(d_model))


@wrong("sink_token", "24 parameters")
class _OneEach(_Token):
    def __init__(self, d_model: int) -> None:
        nn.Module.__init__(self)
        self.token = nn.Parameter(torch.zeros(3, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token[:, None], x], 1)


@wrong("sink_token", "different tokens before them")
class _Different(_Token):
    def __init__(self, d_model: int) -> None:
        nn.Module.__init__(self)
        self.token = nn.Parameter(torch.arange(3.0 * d_model).view(3, 1, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token, x], 1)


@wrong("sink_token", "drawn again at every call")
class _Drawn(_Token):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.randn(self.token.shape).expand(len(x), 1, -1), x], 1)


@wrong("sink_token", "gets no gradient")
class _Detached(_Token):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.data.expand(len(x), 1, -1), x.requires_grad_()], 1)


@wrong("sink_token", "expected a torch.nn.Module")
def _(d_model: int) -> Tensor:
    return torch.zeros(d_model)


# --- the tests --------------------------------------------------------------------------------------------------------

NAMES = (
    "attention", "causal_mask", "cross_attention", "dropout", "entropy", "first_token", "key_bias", "multi_head",
    "off_by_one", "parameter_count", "sink_rate", "sink_token", "temperature",
)  # fmt: skip


def run_check(name: str, answer: Answer, capsys: pytest.CaptureFixture[str]) -> tuple[bool, list[str]]:
    """The verdict, and what was printed, line by line."""
    verdict = getattr(check, name)(answer)
    return verdict, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_correct_answers_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert RIGHT[name]
    for answer in RIGHT[name]:
        verdict, lines = run_check(name, answer, capsys)
        assert verdict is True, lines
        assert len(lines) >= 2
        assert all(line.startswith("✓ ") for line in lines)


@pytest.mark.parametrize(("name", "hint", "answer"), WRONG, ids=[f"{name}: {hint}" for name, hint, _ in WRONG])
def test_each_mistake_fails_with_its_own_hint(
    name: str, hint: str, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, lines = run_check(name, answer, capsys)
    assert verdict is False
    assert lines[-1].startswith("✗ ")
    assert re.search(hint, lines[-1]), lines[-1]
    assert all(line.startswith("✓ ") for line in lines[:-1])  # it stops at the first failing trial


@pytest.mark.parametrize("name", NAMES)
def test_every_check_is_tested_with_at_least_three_mistakes(name: str) -> None:
    assert len({hint for exercise, hint, _ in WRONG if exercise == name}) >= 3
    assert name in check.__all__


@pytest.mark.parametrize("name", NAMES)
def test_answers_that_return_none_or_raise_fail_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def unfinished(*_: object) -> None:
        return None

    def breaks(*_: object) -> None:
        raise KeyError("no such thing")

    verdict, lines = run_check(name, unfinished, capsys)
    assert verdict is False
    assert "NoneType" in lines[0]
    verdict, lines = run_check(name, breaks, capsys)
    assert verdict is False
    assert "raises KeyError: 'no such thing'" in lines[0]
    with refused("answer"):
        getattr(check, name)(torch.zeros(3))


@pytest.mark.parametrize("name", NAMES)
def test_checks_do_not_change_the_global_random_state(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the code of a page would print other numbers after an exercise."""
    torch.manual_seed(5)
    want = torch.rand(1)
    for answer in RIGHT[name]:
        torch.manual_seed(5)
        run_check(name, answer, capsys)
        assert torch.equal(torch.rand(1), want)
