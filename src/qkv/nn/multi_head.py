"""Multi-head attention around a composition: projections, positions, gates, caches.

`LinearAttention` and `LinformerAttention` are the same in linear time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.attention import Attention
from qkv.compat import INPUTS, SIZES, renamed, with_blocked, without_name
from qkv.engine import as_mask
from qkv.errors import InputError, at_least_one, kind_of, one_of
from qkv.features import elu_plus_one
from qkv.linear import LinearState, linear_attend, linformer
from qkv.masks import Causal, Dense, Grid, Mask, Padding, convert, from_sdpa
from qkv.nn.composition import Composition
from qkv.normalizers import Identity, Softmax, SumToOne
from qkv.positions import Rotary
from qkv.scores import Features

if TYPE_CHECKING:
    from qkv.cache import Cache

KeysValues = tuple[Float[Tensor, "b hkv m d"], Float[Tensor, "b hkv m dv"]]


class _Options(TypedDict, total=False):
    """The arguments of a layer on which the type of its result does not depend."""

    query: Tensor
    key: Tensor
    keys_values: KeysValues | None
    mask: Mask | Bool[Tensor, "..."] | None
    is_causal: bool
    positions: Int[Tensor, "..."] | None
    cache: Cache | None
    average_attn_weights: bool


class MultiHeadAttention(nn.Module):
    """Attention in several heads over learned projections (Vaswani et al. 2017, arXiv:1706.03762, §3.2.2).

    Shapes: b batch, n queries, m keys, h query heads, hkv key heads, d head size, dv value head size.

    Weights start Xavier-uniform, each projection by itself, and biases at 0; sinks start at 0, key biases normal with
    deviation 0.02, gains of norms at 1.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        kv_heads: key and value heads, a divisor of `heads`; `heads` (MHA) if None, 1 is multi-query (Shazeer 2019,
            arXiv:1911.02150), between is grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245). Query head i
            uses key head i // (heads // kv_heads).
        head_dim: head dimension, or a pair: that of queries and keys, and that of values; d_model / heads if None.
        d_context: dimension of the context of cross-attention; `d_model` if None.
        attention: the composition that every head computes: mask, bias, score, normalizer, dropout of weights.
        rotary: rotary positions of queries and keys; none if None.
        qk_norm: RMS-normalise every head's queries and keys, with a learned gain, before the rotation (Henry et al.
            2020, arXiv:2010.04245; with RMSNorm as in Qwen 3).
        gate: multiply the outputs of the heads by σ(x W) before the output projection: ``"elementwise"``, or one gate
            for each ``"head"`` (Qiu et al. 2025, arXiv:2505.06708).
        sink: a learned sink for each head, which takes weight and has no value: ``"logit"`` (gpt-oss,
            arXiv:2508.10925), or a ``"key"`` (Gu et al. 2025, arXiv:2410.10781).
        bias: whether projections have biases.
        fused: one matrix for queries, keys and values together (``in_proj``), or three (``q_proj``, ``k_proj``,
            ``v_proj``). Both compute the same function.
        **other_names: `embed_dim`, `num_heads` and `n_heads`; and torch's `dropout`, the `dropout_p` of `attention`.

    Raises:
        InputError: for sizes that do not fit together, and for other libraries' names that mean something else.

    >>> import torch, qkv
    >>> layer = MultiHeadAttention(64, heads=8, kv_heads=2, attention=qkv.Attention(mask=qkv.masks.Causal()))
    >>> layer(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        d_model: int | None = None,
        heads: int | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | tuple[int, int] | None = None,
        d_context: int | None = None,
        attention: Attention | None = None,
        rotary: Rotary | None = None,
        qk_norm: bool = False,
        gate: Literal["elementwise", "head"] | None = None,
        sink: Literal["logit", "key"] | None = None,
        bias: bool = True,
        fused: bool = True,
        **other_names: float,
    ) -> None:
        super().__init__()
        dropout = other_names.pop("dropout", 0.0)
        if not 0 <= dropout < 1:
            raise InputError(f"dropout is {dropout}, expected a probability in [0, 1)")
        d_model, heads = renamed("MultiHeadAttention", other_names, SIZES, {"d_model": d_model, "heads": heads})
        at_least_one(d_model=d_model, heads=heads)
        assert d_model is not None
        assert heads is not None
        kv_heads = heads if kv_heads is None else kv_heads
        at_least_one(kv_heads=kv_heads)
        if head_dim is None and d_model % heads:
            raise InputError(f"d_model is {d_model}, expected a multiple of heads = {heads} (or pass head_dim)")
        if heads % kv_heads:
            raise InputError(f"kv_heads is {kv_heads}, expected a divisor of heads = {heads}")
        head_dim = d_model // heads if head_dim is None else head_dim
        head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        d_context = d_model if d_context is None else d_context
        at_least_one(head_dim=head_dim, v_head_dim=v_head_dim, d_context=d_context)
        if rotary is not None and rotary.dim > head_dim:
            raise InputError(f"rotary rotates {rotary.dim} dimensions, but heads have {head_dim}")
        one_of("gate", gate, (None, "elementwise", "head"))
        one_of("sink", sink, (None, "logit", "key"))
        if fused and d_context != d_model:
            raise InputError(f"fused is True with d_model {d_model} and d_context {d_context}, expected them equal")
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads
        self.head_dim, self.v_head_dim, self.d_context = head_dim, v_head_dim, d_context
        self.rotary, self.fused = rotary, fused
        self.widths = heads * head_dim, kv_heads * head_dim, kv_heads * v_head_dim  # of queries, keys, values
        if fused:
            self.in_proj = nn.Linear(d_model, sum(self.widths), bias=bias)
        else:
            self.q_proj = nn.Linear(d_model, self.widths[0], bias=bias)
            self.k_proj = nn.Linear(d_context, self.widths[1], bias=bias)
            self.v_proj = nn.Linear(d_context, self.widths[2], bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else None
        gates = {None: 0, "elementwise": heads * v_head_dim, "head": heads}[gate]
        self.gate = nn.Linear(d_model, gates, bias=bias) if gates else None
        self.forget: nn.Linear | None = None
        attention = attention or Attention()
        if dropout and attention.dropout_p:
            raise InputError(
                f"dropout is {dropout} and the composition has dropout_p {attention.dropout_p}, expected one of them"
            )
        attention = replace(attention, dropout_p=dropout) if dropout else attention
        self.composition = Composition(_with_sink(attention, heads, head_dim, sink))
        self.out_proj = nn.Linear(heads * v_head_dim, d_model, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections, each by itself, and biases 0."""
        linear = [self.in_proj] if self.fused else [self.q_proj, self.k_proj, self.v_proj]
        for layer in (*linear, self.out_proj, *([] if self.gate is None else [self.gate])):
            parts = layer.weight.split(self.widths) if self.fused and layer is linear[0] else (layer.weight,)
            for part in parts:
                nn.init.xavier_uniform_(part)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    @overload
    def forward(
        self, x: Tensor | None = None, context: Tensor | None = None, value: Tensor | None = None, *,
        return_weights: Literal[False] = False, return_statistics: Literal[False] = False, need_weights: None = None,
        **options: Unpack[_Options],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor | None = None, context: Tensor | None = None, value: Tensor | None = None, *,
        return_weights: bool = False, return_statistics: bool = False, need_weights: bool | None = None,
        **options: Unpack[_Options],
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        x: Float[Tensor, "b n d_model"] | None = None,
        context: Float[Tensor, "b m d_context"] | None = None,
        value: Float[Tensor, "b m d_context"] | None = None,
        *others: Any,
        keys_values: KeysValues | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        positions: Int[Tensor, "..."] | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        return_statistics: bool = False,
        need_weights: bool | None = None,
        average_attn_weights: bool = True,
        **other_names: Any,
    ) -> Tensor | tuple[Any, ...]:
        """Self-attention over x, or cross-attention from x to a context.

        Torch's call works, too: ``layer(query, key, value)``, by position or by name. Passing x itself as key and
        value is self-attention.

        Args:
            x: the input for queries, and for keys and values unless there is a context. Also called `query`.
            context: the input for keys and values in cross-attention. Also called `key`.
            value: the input for values, if it is not that of the keys.
            *others: refused: masks and options have names.
            keys_values: the result of `keys_values(context)`, instead of the context.
            mask: True where a query may attend; combined with the mask of the composition by AND.
            is_causal: mask all keys after the query, too. As in torch, the first query is at the first key.
            positions: positions of the tokens of x, (n,) or (b, n), for `rotary`; if None 0 … n − 1, or the positions
                after those in the cache.
            cache: keys and values of earlier tokens (see `qkv.cache`), to which the new ones are added.
            return_weights: also return the weights of every head; only then are they materialised, and memory is
                quadratic in the length. They are differentiable, and include dropout in training.
            return_statistics: also return the statistics of the weights, as `qkv.attend` does. Tokens of x that `mask`
                or the composition pads (`Padding`, or a tensor of keys) do not count as queries in self-attention.
            need_weights: torch's argument: always return a pair, of the output and the weights, or None if False.
            average_attn_weights: whether the weights of `need_weights` are the mean over heads, as in torch.
            **other_names: `query` and `key`, and `blocked`, a boolean mask that is True where a query may *not* attend;
                every other name raises an error that says what to pass.

        Returns:
            ``out`` (b, n, d_model), or ``(out, weights)`` with weights (b, h, n, m), or (b, n, m) if averaged;
            ``(out, statistics)`` or ``(out, weights, statistics)`` with statistics.

        Raises:
            InputError: for shapes that do not fit, for arguments that exclude one another, for unknown names.

        >>> import torch
        >>> layer, (query, key, value) = MultiHeadAttention(64, 8), torch.randn(3, 2, 10, 64)
        >>> layer(query, key, value).shape
        torch.Size([2, 10, 64])
        >>> layer(query, key, value, return_weights=True)[1].shape
        torch.Size([2, 8, 10, 10])
        """
        if others:
            raise without_name("MultiHeadAttention", "x, context and value", others)
        mask = with_blocked(mask, other_names.pop("blocked", None))
        if x is None or other_names:
            x, context = renamed("MultiHeadAttention", other_names, INPUTS, {"x": x, "context": context})
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.d_model:
            raise InputError(f"x is {kind_of(x)}, expected (batch, length, d_model = {self.d_model})")
        if need_weights is not None and (return_weights or return_statistics):
            raise InputError("need_weights is passed with return_weights or return_statistics, expected only these")
        if need_weights is None and not average_attn_weights:
            raise InputError("average_attn_weights is False without need_weights, expected need_weights=True")
        if context is x and (value is None or value is x):
            context = value = None
        if (context is not None or value is not None) and keys_values is not None:
            raise InputError("context and keys_values are both passed, expected one of them")
        cross = context is not None or value is not None or keys_values is not None
        if cross and (cache is not None or self.rotary is not None):
            raise InputError("context is passed, but a cache and rotary positions are for self-attention only")
        if cross and self.forget is not None:
            raise InputError(
                "context is passed, but forget gates are those of the tokens of x; expected a MultiHeadAttention"
            )
        given = (as_mask(self.composition.attention.mask), as_mask(mask)) if self.forget is not None else ()
        if self.forget is not None and x.shape[1] > 1 and not (is_causal or any(map(convert.is_causal, given))):
            raise InputError(
                "mask lets queries see later keys, which forget gates would favour; expected a causal one, such as "
                "attention=qkv.Attention(mask=qkv.masks.Causal())"
            )
        q, k, v = self._project(x, context, value, keys_values)
        if is_causal:
            if cache is not None:
                raise InputError("is_causal is True with a cache, expected attention=qkv.Attention(mask=Causal())")
            causal, own = from_sdpa(is_causal=True, n_queries=q.shape[2], n_keys=k.shape[2]), as_mask(mask)
            mask = causal if own is None else causal & own
        if cache is not None and need_weights:
            raise InputError("need_weights is True with a cache, which returns the output alone; expected False")
        result = self.composition.of_tokens(
            q, k, v, rotary=self.rotary, positions=positions, cache=cache, mask=mask,
            log_f=None if self.forget is None else F.logsigmoid(self.forget(x)).transpose(1, 2),
            queries=self._counted(as_mask(mask), q) if return_statistics and not cross and cache is None else None,
            return_weights=return_weights or bool(need_weights), return_statistics=return_statistics,
        )  # fmt: skip
        out, *more = result if isinstance(result, tuple) else (result,)
        out = self._merged(out, x)
        if need_weights is None:
            return (out, *more) if more else out
        return out, (more[0].mean(1) if average_attn_weights else more[0]) if more else None

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def _counted(self, mask: Mask | None, q: Tensor) -> Bool[Tensor, "b n"] | None:
        """The tokens that no mask of keys pads; None for all."""
        b, h, n, _ = q.shape
        grid, counted = Grid(b, h, n, n, 0, q.device), None
        for whole in (as_mask(self.composition.attention.mask), mask):
            if whole is not None:
                whole.check(grid)
            for part in () if whole is None else whole.factors():
                keys = part.key_mask(grid) if isinstance(part, Padding | Dense) else None
                if keys is not None:
                    counted = keys if counted is None else counted & keys
        return None if counted is None else counted.expand(b, n)

    def keys_values(
        self, context: Float[Tensor, "b m d_context"], value: Float[Tensor, "b m d_context"] | None = None
    ) -> KeysValues:
        """Keys of a context, and values of `value` or else of the context, computed once for every step of a decoder.

        >>> import torch
        >>> layer, x, context = MultiHeadAttention(64, 8), torch.randn(2, 10, 64), torch.randn(2, 13, 64)
        >>> torch.equal(layer(x, keys_values=layer.keys_values(context)), layer(x, context))
        True
        """
        for name, source in (("context", context), ("value", value)):
            if source is not None and (source.ndim != 3 or source.shape[2] != self.d_context):
                a_mask = source.dtype == torch.bool or source.shape[-1] == source.shape[-2]
                raise InputError(
                    f"{name} has shape {tuple(source.shape)}, expected (batch, length, d_context = {self.d_context})"
                    f"{'; pass a mask by name: mask=' if a_mask else ''}"
                )
        k, v = self._parts(context, 1, 3) if value is None else (*self._parts(context, 1, 2), *self._parts(value, 2, 3))
        return k if self.k_norm is None else self.k_norm(k), v

    def _parts(self, x: Tensor, first: int, stop: int) -> tuple[Tensor, ...]:
        """Projections of x by heads: of queries (0), keys (1) and values (2), those from `first` to before `stop`."""
        if self.fused:
            rows = slice(sum(self.widths[:first]), sum(self.widths[:stop]))
            bias = None if self.in_proj.bias is None else self.in_proj.bias[rows]
            projected = F.linear(x, self.in_proj.weight[rows], bias).split(self.widths[first:stop], -1)
        else:
            projected = tuple(layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj)[first:stop])
        heads = (self.heads, self.kv_heads, self.kv_heads)[first:stop]
        return tuple(self._heads(part, n) for part, n in zip(projected, heads, strict=True))

    def _project(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        keys_values: KeysValues | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if context is None and value is None and keys_values is None and self.fused:
            projected, groups = self.in_proj(x), (self.heads, self.kv_heads, self.kv_heads)
            if self.head_dim == self.v_head_dim:  # all heads at once: fewer operations for one token
                q, k, v = projected.view(*x.shape[:2], sum(groups), self.head_dim).transpose(1, 2).split(groups, 1)
            else:
                q, k, v = map(self._heads, projected.split(self.widths, -1), groups)
            return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)
        (q,) = self._parts(x, 0, 1)
        k, v = self.keys_values(x if context is None else context, value) if keys_values is None else keys_values
        return q if self.q_norm is None else self.q_norm(q), k, v

    @staticmethod
    def _heads(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def _merged(self, out: Tensor, x: Tensor) -> Tensor:
        """Apply gates, concatenate heads and project: (b, h, n, dv) to (b, n, d_model)."""
        out = out.transpose(1, 2)
        if self.gate is not None:
            gate = torch.sigmoid(self.gate(x))
            out = out * gate.unflatten(-1, (self.heads, -1))
        merged: Tensor = self.out_proj(out.flatten(2))
        return merged

    def extra_repr(self) -> str:
        rotary = "" if self.rotary is None else f", rotary={self.rotary}"
        return f"d_model={self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}{rotary}"


class ForgettingAttention(MultiHeadAttention):
    """`MultiHeadAttention` with a forget gate for each head and token, σ(x W + b) (Lin et al. 2025, arXiv:2503.02130).

    The gates lower the scores of earlier keys (`qkv.biases.Forget`), so no other positions are needed. For
    self-attention with a causal mask; the cache `Full` keeps the gates.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        **options: those of `MultiHeadAttention`.

    >>> import torch, qkv
    >>> layer = ForgettingAttention(64, 8, attention=qkv.Attention(mask=qkv.masks.Causal()))
    >>> layer(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    def __init__(self, d_model: int, heads: int, **options: Any) -> None:
        super().__init__(d_model, heads, **options)
        self.forget = nn.Linear(d_model, heads)
        nn.init.xavier_uniform_(self.forget.weight)
        nn.init.zeros_(self.forget.bias)


def _with_sink(attention: Attention, heads: int, head_dim: int, sink: Literal["logit", "key"] | None) -> Attention:
    """The composition with a learned sink logit or key in its softmax."""
    if sink is None:
        return attention
    normalizer = attention.normalizer or Softmax()
    if not isinstance(normalizer, SumToOne) or normalizer.one_key:
        raise InputError(
            f"sink is {sink!r}, but it belongs to normalizers that sum to one, and this is {type(normalizer).__name__}"
        )
    if sink == "logit":
        return replace(attention, normalizer=normalizer.with_sink(sink=nn.Parameter(torch.zeros(heads))))
    key = nn.Parameter(torch.empty(heads, head_dim))
    nn.init.normal_(key, std=0.02)
    return replace(attention, normalizer=normalizer.with_sink(key=key))


class LinearAttention(MultiHeadAttention):
    """Multi-head attention whose weights are φ(q)·φ(k) (Katharopoulos et al. 2020, arXiv:2006.16236).

    A causal layer is a recurrence: `step` takes tokens and the state after all earlier tokens, of constant size.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        kv_heads: key and value heads; `heads` if None.
        features: φ, one of `qkv.features`.
        causal: whether a token attends only to itself and earlier tokens.
        bias: whether projections have biases.

    >>> import torch
    >>> layer = LinearAttention(64, 4)
    >>> x = torch.randn(1, 10, 64)
    >>> first, state = layer.step(x[:, :9])
    >>> last, _ = layer.step(x[:, 9:], state)
    >>> torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        features: Callable[[Tensor], Tensor] = elu_plus_one,
        causal: bool = True,
        bias: bool = True,
    ) -> None:
        mask = Causal() if causal else None
        attention = Attention(mask=mask, score=Features(features), normalizer=Identity(divide="sum"))
        super().__init__(d_model, heads, kv_heads=kv_heads, attention=attention, bias=bias)
        self.causal = causal

    def step(
        self, x: Float[Tensor, "b n d_model"], state: LinearState | None = None
    ) -> tuple[Float[Tensor, "b n d_model"], LinearState]:
        """The outputs of `forward` for tokens that follow those in `state`, and the state after them."""
        if not self.causal:
            raise InputError(
                "causal is False: later tokens would change the outputs of earlier steps; expected causal=True"
            )
        q, k, v = self._project(x)
        score = self.composition.attention.score
        assert isinstance(score, Features)
        out, state = linear_attend(q, k, v, features=score.map, state=state, return_state=True)
        return self._merged(out, x), state


class LinformerAttention(MultiHeadAttention):
    """Attention to `rank` learned mixtures of the keys (Wang et al. 2020, arXiv:2006.04768, eq. 7).

    Every token attends to the whole sequence of at most `length` tokens; there is no causal form. Shorter sequences use
    the first rows of the projections, which start normal with standard deviation 1/√rank, as in the paper's proof.

    Args:
        d_model: input and output dimension.
        heads: query heads.
        length: largest number of tokens.
        rank: number of mixtures.
        shared: whether keys and values share one projection.
        bias: whether projections of the heads have biases.

    >>> import torch
    >>> LinformerAttention(64, 4, length=100, rank=8)(torch.randn(1, 90, 64)).shape
    torch.Size([1, 90, 64])
    """

    def __init__(
        self, d_model: int, heads: int, *, length: int, rank: int, shared: bool = False, bias: bool = True
    ) -> None:
        super().__init__(d_model, heads, bias=bias)
        at_least_one(length=length, rank=rank)
        self.e = nn.Parameter(torch.empty(length, rank))
        self.f = None if shared else nn.Parameter(torch.empty(length, rank))
        for projection in (self.e, self.f):
            if projection is not None:
                nn.init.normal_(projection, std=1 / math.sqrt(rank))

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b n d_model"], *, lengths: Tensor | None = None
    ) -> Float[Tensor, "b n d_model"]:
        """Every token attends to the mixtures; `lengths` (b,) are the numbers of real tokens, the rest is padding."""
        n = x.shape[1]
        if n > len(self.e):
            raise InputError(f"x has {n} tokens, expected at most length = {len(self.e)}")
        q, k, v = self._project(x)
        out = linformer(q, k, v, self.e[:n], None if self.f is None else self.f[:n], lengths=lengths)
        return self._merged(out, x)
