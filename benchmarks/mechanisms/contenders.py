"""The mechanisms that are measured, and for each the implementations one would use without qkv."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize, scaled_dot_product_attention

import qkv
from qkv import biases, features, masks, normalizers, scores
from qkv.engine import Call
from qkv.statistics.measure import measured

LARGEST = 3 * 2**30  # bytes; rivals that materialise a larger score matrix are skipped

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One cell of the table: the shape and dtype of the tensors, and whether to run the backward pass."""

    n: int
    heads: int
    dtype: torch.dtype
    backward: bool
    dim: int = 64
    queries: int | None = None
    """How many of the last tokens are queries; all if None, and 1 while decoding."""
    device: str = "cpu"

    @property
    def n_queries(self) -> int:
        return self.n if self.queries is None else self.queries

    def tensors(self) -> list[Tensor]:
        """q, k and v, the same for every contender."""
        generator = torch.Generator().manual_seed(0)
        made = [
            torch.randn(1, self.heads, rows, self.dim, generator=generator).to(self.device, self.dtype)
            for rows in (self.n_queries, self.n, self.n)
        ]
        return [x.requires_grad_(self.backward) for x in made]

    def table(self, *shape: int) -> Tensor:
        """Learned numbers of a mechanism."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(self.device) / 8

    def visible(self, mask: masks.Mask) -> Tensor:
        """A mask as a tensor."""
        return mask.dense(self.n_queries, self.n).to(self.device)

    @property
    def scores(self) -> int:
        """Size in bytes of the score matrices of all heads."""
        return self.heads * self.n_queries * self.n * self.dtype.itemsize


Contender = Callable[[Case, Tensor, Tensor, Tensor], Run | None]  # None if it cannot or should not run


@dataclass(frozen=True)
class Goal:
    """A target for the ratio of times, qkv / rival: at most `at_most` at lengths of `n` or more."""

    rival: str
    at_most: float
    n: int = 512
    backward: bool = False


@dataclass(frozen=True)
class Mechanism:
    """A composition of `attend` (or another call), its rivals, and its goals."""

    what: str
    arguments: Callable[[Case], dict[str, Any]]
    rivals: Mapping[str, Contender] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    call: Callable[..., Tensor] | None = None
    trains: bool = True
    """Whether it has a backward."""

    def ours(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
        """The call of qkv."""
        arguments = self.arguments(case)
        call: Callable[..., Any] = qkv.attend if self.call is None else self.call
        return lambda: call(q, k, v, **arguments)

    def flops(self, case: Case) -> int | None:
        """Floating-point operations of a forward pass, from `qkv.plan`; None for calls other than `attend`."""
        if self.call is not None:
            return None
        q, k, v = replace(case, backward=False).tensors()
        return qkv.plan(q, k, v, **self.arguments(case)).flops


# --- rivals -----------------------------------------------------------------------------------------------------------


def causal_sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
    """torch's fused attention, causal; one query may attend to all keys."""
    if case.n_queries not in (1, case.n):
        return masked_sdpa(lambda case: masks.Causal())(case, q, k, v)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=case.n_queries == case.n)


def masked_sdpa(mask: Callable[[Case], masks.Mask]) -> Contender:
    """torch's fused attention with the mask as a boolean tensor."""

    def contender(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        if case.n_queries * case.n * 4 > LARGEST:
            return None
        visible = case.visible(mask(case))
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return contender


def biased_sdpa(bias: Callable[[Case], biases.Bias]) -> Contender:
    """torch's fused attention with the causal mask and the bias of all heads as one tensor."""

    def contender(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        if case.scores > LARGEST:
            return None
        n, grid = case.n, masks.Grid(1, case.heads, case.n_queries, case.n, case.n - case.n_queries, q.device)
        whole = masks.Region(slice(0, case.n_queries), slice(0, n), offset=grid.offset, device=q.device)
        bound = bias(case).bind(q.detach(), grid, 0.125)
        assert isinstance(bound, biases.AdditiveBias)
        added = bound.tile(whole).to(q.dtype)
        added = added.masked_fill(~case.visible(masks.Causal()), -torch.inf)
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=added)

    return contender


def flex(
    mask: Callable[[Case], masks.Mask] | None = None, score: Callable[..., Any] | None = None, block: int = 128
) -> Contender:
    """Compiled FlexAttention, which has no backward on CPU; its block mask is built outside the timing."""

    def contender(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        if case.n < 4096 or case.queries is not None:  # every length is compiled again: slow
            return None
        if case.backward and case.device == "cpu":
            return None
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        blocks = (
            None if mask is None else masks.to_flex(mask(case), case.n, case.n, device=case.device, block_size=block)
        )
        return lambda: compiled(q, k, v, block_mask=blocks, score_mod=score)

    return contender


def eager(weigh: Callable[[Tensor], Tensor]) -> Contender:
    """Plain torch operations: scores, a causal mask, weights, values."""

    def contender(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        if case.scores > LARGEST:
            return None
        masked = ~case.visible(masks.Causal())

        def run() -> Tensor:
            s = q @ k.transpose(-1, -2) * case.dim**-0.5
            return weigh(s.masked_fill(masked, -torch.inf)) @ v

        return run

    return contender


def x_transformers(**settings: Any) -> Contender:
    """`Attend` of x-transformers, if it is installed."""

    def contender(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
        if importlib.util.find_spec("x_transformers") is None or (not settings.get("flash") and case.scores > LARGEST):
            return None
        if case.n_queries not in (1, case.n):
            return None
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from x_transformers.attend import Attend

            attend = Attend(causal=True, **settings)
        return lambda: attend(q, k, v)[0]

    return contender


def eager_statistics(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
    """Plain torch operations: the weights of all heads, and the statistics of `qkv.measure` from them."""
    if case.scores > LARGEST or case.backward:
        return None
    masked = ~case.visible(masks.Causal())
    positions = torch.arange(case.n, device=case.device)
    offset = case.n - case.n_queries
    back = positions[offset:, None] - positions

    def run() -> Tensor:
        s = (q @ k.transpose(-1, -2) * case.dim**-0.5).masked_fill(masked, -torch.inf)
        lse = torch.logsumexp(s, -1, keepdim=True)
        a = torch.exp(s - lse)
        s.masked_fill_(masked, 0)
        mean = (a * positions).sum(-1)
        made = [
            (lse[..., 0] - (a * s).sum(-1)), a[..., 0], (a * back.abs()).sum(-1), 1 / a.square().sum(-1),
            (a * positions.square()).sum(-1) - mean.square(), a.sum(-2), (~masked).sum(-1), (~masked).sum(-2),
            *(a.diagonal(offset + shift, -2, -1) for shift in (-1, 0, 1)),
        ]  # fmt: skip
        del made
        return a @ v

    return run


def plain(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run:
    """Causal softmax in qkv, to show what the mechanism costs in addition."""
    return lambda: qkv.attend(q, k, v, mask=masks.Causal())


def output_and_statistics(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """What the profiler computes of each call: the output, and the statistics of `qkv.measure`, in one pass."""
    result, _, _ = measured(Call.of(q, k, v, **arguments), output=True)
    assert result is not None
    return result.out


# --- mechanisms -------------------------------------------------------------------------------------------------------


def _causal(**arguments: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"mask": masks.Causal(), **arguments}


def _alibi_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - torch.exp2(-(h + 1.0)) * (i - j)


def _softmax_off_by_one(s: Tensor) -> Tensor:
    top = s.detach().amax(-1, keepdim=True).clamp(min=0)
    powers = torch.exp(s - top)
    return powers / (powers.sum(-1, keepdim=True) + torch.exp(-top))


def _elu_plus_one(s: Tensor) -> Tensor:
    return torch.where(s == -torch.inf, 0.0, elu(s) + 1)


def eager_additive(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Run | None:
    """Plain torch operations: the hidden layer of every pair of a query and a key, and its product with a vector."""
    if 16 * case.scores > LARGEST:
        return None
    masked = ~case.visible(masks.Causal())
    vector, w_q, w_k = (x.to(case.dtype) for x in (case.table(16), case.table(16, case.dim), case.table(16, case.dim)))

    def run() -> Tensor:
        hidden = torch.tanh((q @ w_q.T)[..., :, None, :] + (k @ w_k.T)[..., None, :, :])
        return (hidden @ vector).masked_fill(masked, -torch.inf).softmax(-1) @ v

    return run


WINDOW, BIGBIRD, LONGFORMER = masks.Window(256), masks.bigbird(), masks.longformer(512)


def _sparse(mask: masks.Mask, what: str, block: int = 128) -> Mechanism:
    return Mechanism(
        what,
        lambda case: {"mask": mask},
        {"sdpa": masked_sdpa(lambda case: mask), "flex": flex(lambda case: mask, block=block)},
        (Goal("flex", 1.0, 8192), Goal("sdpa", 0.2, 8192, backward=True)),
    )


MECHANISMS: dict[str, Mechanism] = {
    "causal": Mechanism(
        "softmax, causal",
        _causal(),
        {
            "sdpa": causal_sdpa,
            "flex": flex(lambda case: masks.Causal()),
            "eager": eager(lambda s: s.softmax(-1)),
            "x-transformers": x_transformers(flash=True),
        },
        (Goal("sdpa", 1.03),),
    ),
    "statistics": Mechanism(
        "softmax, causal, with all statistics (forward only)",
        _causal(),
        {"sdpa": causal_sdpa, "eager": eager_statistics},
        (Goal("eager", 1.0, 32),),
        call=output_and_statistics,
        trains=False,
    ),
    "sink": Mechanism(
        "a learned sink logit for each head",
        lambda case: {"mask": masks.Causal(), "normalizer": normalizers.Softmax(sink=case.table(case.heads))},
        {"plain": plain},
        (Goal("plain", 1.10),),
    ),
    "off-by-one": Mechanism(
        "softmax with 1 added to the denominator",
        _causal(normalizer=normalizers.Softmax(sink=0.0)),
        {"plain": plain, "eager": eager(_softmax_off_by_one)},
        (Goal("plain", 1.10),),
    ),
    "key-bias": Mechanism(
        "a learned key with value 0",
        lambda case: {
            "mask": masks.Causal(),
            "normalizer": normalizers.Softmax(key=case.table(case.heads, case.dim).to(case.dtype)),
        },
        {"plain": plain},
        (Goal("plain", 1.10),),
    ),
    "alibi": Mechanism(
        "ALiBi",
        _causal(bias=biases.ALiBi()),
        {
            "plain": plain,
            "sdpa": biased_sdpa(lambda case: biases.ALiBi()),
            "flex": flex(lambda case: masks.Causal(), _alibi_score),
        },
        (Goal("plain", 1.25), Goal("sdpa", 1.0)),
    ),
    "t5": Mechanism(
        "T5's relative position buckets",
        lambda case: {"mask": masks.Causal(), "bias": biases.T5Bias(case.table(32, case.heads), bidirectional=False)},
        {
            "plain": plain,
            "sdpa": biased_sdpa(lambda case: biases.T5Bias(case.table(32, case.heads), bidirectional=False)),
        },
    ),
    "shaw": Mechanism(
        "Shaw's relative keys and values",
        lambda case: {
            "mask": masks.Causal(),
            "bias": biases.RelativePosition(case.table(33, case.dim), case.table(33, case.dim)),
        },
    ),
    "soft-cap": Mechanism(
        "scores capped at 50",
        _causal(bias=biases.SoftCap(50.0)),
        {"plain": plain, "flex": flex(lambda case: masks.Causal(), lambda s, b, h, i, j: 50 * torch.tanh(s / 50))},
        (Goal("flex", 1.25, 4096),),
    ),
    "window": _sparse(WINDOW, "sliding window of 256"),
    "bigbird": _sparse(BIGBIRD, "BigBird, blocks of 64", block=64),
    "longformer": _sparse(LONGFORMER, "Longformer, window of 512, one global token"),
    "sigmoid": Mechanism(
        "sigmoid, bias −8",
        _causal(normalizer=normalizers.Sigmoid(-8.0)),
        {"eager": eager(lambda s: torch.sigmoid(s - 8))},
        (Goal("eager", 0.5, 4096),),
    ),
    "elu": Mechanism(
        "ELU + 1 on the scores",
        _causal(normalizer=normalizers.EluPlusOne()),
        {"eager": eager(_elu_plus_one)},
        (Goal("eager", 0.5, 4096),),
    ),
    "relu": Mechanism("ReLU over the number of keys", _causal(normalizer=normalizers.ReLU())),
    "entmax": Mechanism("1.5-entmax", _causal(normalizer=normalizers.Entmax())),
    "cosine": Mechanism("cosine scores", _causal(score=scores.Cosine()), {"plain": plain}),
    "additive": Mechanism(
        "Bahdanau's additive score of size 16",
        lambda case: {
            "mask": masks.Causal(),
            "score": scores.Additive(
                case.table(16).to(case.dtype),
                case.table(16, case.dim).to(case.dtype),
                case.table(16, case.dim).to(case.dtype),
            ),
        },
        {"eager": eager_additive, "plain": plain},
    ),
    "linear": Mechanism(
        "linear attention, elu + 1",
        _causal(score=scores.Features(features.elu_plus_one), normalizer=normalizers.Identity("sum")),
        {"sdpa": causal_sdpa},
        (Goal("sdpa", 1.0, 2048),),
    ),
    "delta": Mechanism(
        "gated delta rule",
        lambda case: {
            "features": lambda x: normalize(x, dim=-1),
            "normalize": False,
            "decay": -case.table(1, case.heads, case.n).abs(),
            "beta": case.table(1, case.heads, case.n).sigmoid(),
        },
        {"softmax": lambda case, q, k, v: lambda: qkv.attend(q, k, v, mask=masks.Causal(), kernel="native")},
        (Goal("softmax", 1.0, 4096),),
        call=qkv.linear_attend,
    ),
    "favor": Mechanism(
        "Performer, 256 random features",
        lambda case: {
            "mask": masks.Causal(),
            "score": scores.Features(features.Favor(case.dim, 256)),
            "normalizer": normalizers.Identity("sum"),
        },
        {"sdpa": causal_sdpa},
    ),
    "linformer": Mechanism(
        "Linformer, 256 rows",
        lambda case: {"e": case.table(case.n, 256).to(case.dtype)},
        {"sdpa": lambda case, q, k, v: lambda: scaled_dot_product_attention(q, k, v)},
        call=qkv.linformer,
    ),
}
