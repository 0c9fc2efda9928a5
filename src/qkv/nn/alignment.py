"""Attention of recurrent encoder-decoders: additive (Bahdanau et al. 2015) and Luong et al. 2015.

A decoder state is the query; encoder states are both keys and values. The part of the score that depends only on the
keys is computed once for each source with `project` and passed to every decoder step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv import masks
from qkv.attention import attend
from qkv.biases import TensorBias
from qkv.engine import as_mask, at_least_float32
from qkv.errors import InputError, at_least_one, one_of
from qkv.kernels import serving
from qkv.masks import Mask
from qkv.normalizers import Softmax
from qkv.scores import Additive, Concat, Dot, General, Score


class AdditiveAttention(nn.Module):
    """Additive attention: scores v · tanh(W q + U k), softmax over keys, mean of values (Bahdanau et al. 2015,
    arXiv:1409.0473).

    There are no biases. W and U start Xavier-uniform, v uniform within 1/√d_hidden.

    Shapes: b batch, nq queries, nk keys, dq and dk their dimensions, a = d_hidden.

    Args:
        d_query: dimension of queries.
        d_key: dimension of keys.
        d_hidden: hidden dimension of the score.

    Raises:
        InputError: for sizes below 1.

    Source: eq. 6 and app. A.1.2.

    >>> import torch
    >>> AdditiveAttention(8, 6, 4)(torch.randn(2, 1, 8), torch.randn(2, 5, 6)).shape
    torch.Size([2, 1, 6])
    """

    def __init__(self, d_query: int, d_key: int, d_hidden: int) -> None:
        super().__init__()
        at_least_one("AdditiveAttention", d_query=d_query, d_key=d_key, d_hidden=d_hidden)
        self.d_query, self.d_key, self.d_hidden = d_query, d_key, d_hidden
        self.w_q = nn.Parameter(torch.empty(d_hidden, d_query))
        self.w_k = nn.Parameter(torch.empty(d_hidden, d_key))
        self.vector = nn.Parameter(torch.empty(d_hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform W and U, v uniform within 1/√d_hidden."""
        nn.init.xavier_uniform_(self.w_q)
        nn.init.xavier_uniform_(self.w_k)
        nn.init.uniform_(self.vector, -(self.d_hidden**-0.5), self.d_hidden**-0.5)

    def project(self, keys: Float[Tensor, "b nk dk"]) -> Float[Tensor, "b nk a"]:
        """U k of all keys, computed once for each source and passed to every decoder step as `projected`."""
        _check_last("keys", keys, self.d_key)
        return keys @ self.w_k.T

    @overload
    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor | None = None, *, projected: Tensor | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, return_weights: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor | None = None, *, projected: Tensor | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, return_weights: bool = False,
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        query: Float[Tensor, "b nq dq"],
        keys: Float[Tensor, "b nk dk"],
        values: Float[Tensor, "b nk dv"] | None = None,
        *,
        projected: Float[Tensor, "b nk a"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The context of every query.

        Args:
            query: decoder states.
            keys: encoder states.
            values: values; the keys if None.
            projected: the result of `project` for the keys; computed here if None.
            mask: True where a query may attend, as in `qkv.attend` with one head.
            return_weights: also return the weights.

        Returns:
            The context (b, nq, dv), or ``(context, weights)`` with weights (b, nq, nk). A query without visible keys
            has context 0.
        """
        _check_last("query", query, self.d_query)
        projected = self.project(keys) if projected is None else projected
        result = attend(
            query[:, None],
            projected[:, None],
            (keys if values is None else values)[:, None],
            mask=mask,
            score=Additive(self.vector, self.w_q),  # the keys are projected already
            return_weights=return_weights,
        )
        if isinstance(result, tuple):
            return result[0][:, 0], result[1][:, 0]
        return result[:, 0]

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def extra_repr(self) -> str:
        return f"d_query={self.d_query}, d_key={self.d_key}, d_hidden={self.d_hidden}"


class LuongAttention(nn.Module):
    """Attention after the decoder step: h~ = tanh(W_c [c; h]) (Luong et al. 2015, arXiv:1508.04025).

    `kind` selects the source states, of S, to which the decoder state h_t of step t, counted from 0, attends:

    - ``"global"``: all;
    - ``"local-m"``: positions t − D … t + D, assuming that both sequences run in parallel. If the window lies outside
      the source, the context is 0;
    - ``"local-p"``: positions p_t − D … p_t + D around p_t = S · σ(v_p · tanh(W_p h_t)), with the softmax over them
      multiplied by exp(−(s − p_t)² / (2 σ²)), σ = D / 2. The product is not normalized again: weights sum to at most
      1, and the missing mass is a sink of the softmax. The gradient reaches p_t through the Gaussian.

    There are no biases. Matrices start Xavier-uniform, vectors uniform within 1/√d_query.

    Shapes: b batch, nq queries, nk keys, dq and dk their dimensions.

    Args:
        d_query: dimension of a decoder state, and of h~.
        d_key: dimension of an encoder state.
        score: ``"dot"`` h · s, unscaled; ``"general"`` h · W s; ``"concat"`` v · tanh(W [h; s]) with hidden dimension
            d_query.
        kind: ``"global"``, ``"local-m"`` or ``"local-p"``.
        half_width: D of the local kinds.

    Raises:
        InputError: for an unknown score or kind, or sizes that do not fit.

    Source: §3.1–3.2, eq. 5–10.

    >>> import torch
    >>> LuongAttention(8, 6, "general")(torch.randn(2, 3, 8), torch.randn(2, 5, 6)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        d_query: int,
        d_key: int,
        score: Literal["dot", "general", "concat"] = "dot",
        kind: Literal["global", "local-m", "local-p"] = "global",
        half_width: int = 10,
    ) -> None:
        super().__init__()
        at_least_one("LuongAttention", d_query=d_query, d_key=d_key, half_width=half_width)
        one_of("LuongAttention: score", score, ("dot", "general", "concat"))
        one_of("LuongAttention: kind", kind, ("global", "local-m", "local-p"))
        if score == "dot" and d_query != d_key:
            raise InputError(
                f"LuongAttention: score is 'dot' with d_query {d_query} and d_key {d_key}, expected them equal "
                "(or score='general')"
            )
        self.d_query, self.d_key, self.score, self.kind, self.half_width = d_query, d_key, score, kind, half_width
        if score == "general":
            self.weight = nn.Parameter(torch.empty(d_query, d_key))
        elif score == "concat":
            self.weight = nn.Parameter(torch.empty(d_query, d_query + d_key))
            self.vector = nn.Parameter(torch.empty(d_query))
        if kind == "local-p":
            self.position_weight = nn.Parameter(torch.empty(d_query, d_query))
            self.position_vector = nn.Parameter(torch.empty(d_query))
        self.combine = nn.Linear(d_key + d_query, d_query, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, vectors uniform within 1/√d_query."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.uniform_(parameter, -(self.d_query**-0.5), self.d_query**-0.5)

    def project(self, keys: Float[Tensor, "b nk dk"]) -> Float[Tensor, "b nk d"]:
        """The part of the score that depends only on the keys, computed once for each source and passed to every step.

        Only ``"concat"`` projects keys; the other scores return them unchanged.
        """
        _check_last("keys", keys, self.d_key)
        return keys @ self.weight[:, self.d_query :].T if self.score == "concat" else keys

    @overload
    def forward(
        self, query: Tensor, keys: Tensor, *, projected: Tensor | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, step: int = 0, lengths: Int[Tensor, " b"] | None = None,
        return_weights: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, query: Tensor, keys: Tensor, *, projected: Tensor | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None, step: int = 0, lengths: Int[Tensor, " b"] | None = None,
        return_weights: bool = False,
    ) -> Any: ...  # fmt: skip
    def forward(
        self,
        query: Float[Tensor, "b nq dq"],
        keys: Float[Tensor, "b nk dk"],
        *,
        projected: Float[Tensor, "b nk d"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        step: int = 0,
        lengths: Int[Tensor, " b"] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The attentional vector h~ of every query.

        Args:
            query: decoder states of consecutive steps.
            keys: encoder states.
            projected: the result of `project` for the keys; computed here if None.
            mask: True where a query may attend, as in `qkv.attend` with one head; combined with the window by AND.
            step: t of the first query: the number of target tokens before it.
            lengths: S, the number of real keys of each batch item; later keys are padding and masked. All if None.
            return_weights: also return the weights.

        Returns:
            h~ (b, nq, dq), or ``(h~, weights)`` with weights (b, nq, nk).
        """
        _check_last("query", query, self.d_query)
        if step < 0:
            raise InputError(f"step is {step}, expected at least 0: the number of target tokens before the query")
        projected = self.project(keys) if projected is None else projected
        q, k, v = query[:, None], projected[:, None], keys[:, None]
        visible = None if mask is None else as_mask(mask)
        if lengths is not None:
            visible = _both(visible, masks.Padding(lengths))
        bias, normalizer = None, Softmax()
        if self.kind == "local-m":
            window = masks.Window(self.half_width + 1, ahead=self.half_width)
            visible = _both(visible, masks.Shifted(window, step))
        elif self.kind == "local-p":
            distance = self._distance_from_centre(query, keys, lengths)
            visible = _both(visible, masks.Dense(distance.abs() <= self.half_width))
            spread = 2 * (self.half_width / 2) ** 2
            bias, normalizer = self._gaussian(q, k, distance.square() / spread, visible)
        result = attend(
            q, k, v, mask=visible, bias=bias, score=self._score(), normalizer=normalizer,
            return_weights=return_weights,
        )  # fmt: skip
        context, weights = result if isinstance(result, tuple) else (result, None)
        attentional = torch.tanh(self.combine(torch.cat([context[:, 0], query], -1)))
        return attentional if weights is None else (attentional, weights[:, 0])

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def _score(self) -> Score:
        """The score of a query and a projected key."""
        if self.score == "dot":
            return Dot(1.0)
        if self.score == "general":
            return General(self.weight)
        whole = Concat(self.weight, self.vector, self.d_query)
        return Additive(whole.vector, whole.w_q)  # the keys are projected already

    def _distance_from_centre(self, query: Tensor, keys: Tensor, lengths: Tensor | None) -> Float[Tensor, "b 1 nq nk"]:
        """The signed distance of each key from p_t."""
        dtype = at_least_float32(query.dtype)
        share = torch.sigmoid(torch.tanh(query @ self.position_weight.T) @ self.position_vector).to(dtype)
        length = keys.shape[1] if lengths is None else lengths.to(share)[:, None]
        centre = length * share
        return (torch.arange(keys.shape[1], dtype=dtype, device=keys.device) - centre[..., None])[:, None]

    def _gaussian(
        self, q: Tensor, k: Tensor, exponent: Float[Tensor, "b 1 nq nk"], visible: Mask
    ) -> tuple[TensorBias, Softmax]:
        """A bias and a sink with which the softmax gives g · softmax(s), where g = exp(−exponent).

        Weights exp(s) g / Σ exp(s) are the softmax of s + ln g with a sink of mass Σ exp(s) (1 − g).
        """
        # At p_t, 1 − g is 0 and the gradient of its logarithm infinite. A smallest exponent keeps both finite and
        # changes weights by a factor of e^-69 at most.
        log_missing = torch.log(-torch.expm1(-exponent.clamp(min=1e-30)))
        with serving(None):  # an internal step of the softmax that follows: observers must not see it
            _, sink = attend(
                q, k, k[..., :1], mask=visible, bias=TensorBias(log_missing), score=self._score(),
                return_lse=True,
            )  # fmt: skip
        return TensorBias(-exponent), Softmax(sink=sink)

    def extra_repr(self) -> str:
        width = "" if self.kind == "global" else f", half_width={self.half_width}"
        return f"d_query={self.d_query}, d_key={self.d_key}, score={self.score!r}, kind={self.kind!r}{width}"


def _both(mask: Mask | None, further: Mask) -> Mask:
    return further if mask is None else mask & further


def _check_last(name: str, x: Tensor, size: int) -> None:
    if x.ndim != 3 or x.shape[2] != size:
        raise InputError(f"{name} has shape {tuple(x.shape)}, expected (batch, length, {size})")
