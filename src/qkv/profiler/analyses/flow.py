"""Attention rollout in linear memory (Abnar & Zuidema 2020, arXiv:2005.00928, section 3).

The rollout estimates how much of a token's final state comes from each input token. Each layer is modelled as
Ã = ρ I + (1 − ρ) Ā with rows divided by their sums, where Ā is the mean of its heads' weights and ρ the share that the
residual connection keeps. The rollout R = Ã_L ⋯ Ã_1 is never formed: a row of R is wᵀ Ã_L ⋯ Ã_1, one vector-matrix
product for each layer, and a column is Ã_L ⋯ Ã_1 c, one matrix-vector product (see `weights_matmul`).

Where most weight is on an attention sink, the rollout says little else: weights can be multiplied by the norms of the
values (Kobayashi et al. 2020, arXiv:2004.10102), or the first token left out. Neither mends that in a deep model whose
tokens see only earlier ones, every product of many layers ends at the first tokens; a larger ρ does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv.engine import RowState
from qkv.errors import InputError, nearest
from qkv.models.loading import load_if_named
from qkv.profiler.capture.datasets import Arrays, calls_of, joined, without_values
from qkv.profiler.capture.inputs import Tokens, batches, sequences_of
from qkv.profiler.capture.record import ObservedCall
from qkv.statistics.measure import row_state
from qkv.statistics.reduce import weights_matmul

Inputs = str | Sequence[str] | Tensor | Mapping[str, Tensor]
DEFINITIONS = {
    "queries": "share of the chosen token's final state that comes from each token's state at this depth",
    "keys": "share of each token's state at this depth that comes from the chosen token's embedding",
}


def rollout(
    model: nn.Module | str,
    inputs: Inputs,
    queries: Sequence[int] = (-1,),
    *,
    keys: Sequence[int] | None = None,
    tokenizer: Any = None,
    target: str | None = None,
    group: str | None = None,
    residual: float = 0.5,
    by: str = "weights",
    name: str = "",
    on_layer: Callable[[], None] = lambda: None,
) -> xr.DataArray:
    """Trace where the final states of chosen tokens come from, or where chosen input tokens go to, layer by layer.

    These are rows, or with `keys` columns, of the attention rollout. Memory is linear in the text: queries and keys of
    every layer, and one vector for each chosen token.

    Args:
        model: as in `qkv.profile`, or a name for `qkv.load`.
        inputs: as in `qkv.profile`. Padding does not count.
        queries: positions of the tokens whose final states are traced, without padding; −1 is the last of a text.
        keys: positions of input tokens, which are traced to all states in place of `queries`.
        tokenizer: converts text to ids, and ids to the names of tokens; if `model` is a name, its tokenizer is loaded.
        target: the text that the decoder of an encoder-decoder reads.
        group: kind of attention, for a model that has several: ``"encoder"`` or ``"decoder"``. A rollout stays within
            one text, so cross-attention is left out.
        residual: ρ, the share of a state that the residual connection keeps; 0.5 in the paper.
        by: ``"weights"``, as in the paper; ``"values"``, weights times the norms of the values, divided by their sum in
            each row of each head; or ``"without-first"``, weights on all but the first token, divided in this way.
        name: name of the model, kept in the attributes; taken from the model if not given.
        on_layer: called after each layer.

    Returns:
        An array (text, chosen, depth, token) in float64: the share of the chosen token's final state that comes from
        each token's state at `depth`, counted in layers. Depth 0 is the embeddings and holds the rollout itself. The
        shares of each (text, chosen, depth) add up to 1 if every token attends to at least one token. With `keys`: the
        share of each token's state after `depth` layers that comes from the chosen token's embedding; the last depth is
        a column of the rollout. Coordinates are ``token_name`` (text, token), ``chosen_position`` and ``chosen_name``
        (text, chosen), ``n_tokens`` (text); values beyond a text's end are NaN.

    Raises:
        InputError: if the model does not accept the inputs, a position is outside of a text, `group` is
            cross-attention, layers have different lengths, or `by` needs values that cannot be seen.

    >>> found = rollout("qkv-mini", "def f(x):\\n    return x", [-1])
    >>> [round(float(found.sel(depth=depth).sum()), 6) for depth in (0, 1)]
    [1.0, 1.0]
    >>> rollout("qkv-mini", "def f(x):\\n    return x", keys=[0]).sel(depth=0).values[0, 0, :3].tolist()
    [1.0, 0.0, 0.0]
    """
    called, chosen = ("queries", queries) if keys is None else ("keys", keys)
    if not 0 <= residual < 1:
        raise InputError(f"residual is {residual}, expected a share from 0 to less than 1")
    if by not in FACTORS:
        raise InputError(f"by is {by!r}, expected one of {', '.join(map(repr, FACTORS))}{nearest(by, FACTORS)}")
    if not chosen:
        raise InputError(f"{called} is empty, expected at least one position")
    loaded = load_if_named(model, tokenizer, name, inputs=inputs)
    model, tokenizer = loaded.model, loaded.tokenizer
    found = []
    for batch in batches(model, inputs, tokenizer, target):
        stack = _one_stack(calls_of(model, batch), group)
        factors = [FACTORS[by](observed) for observed in stack]
        stack = [without_values(observed) for observed in stack]
        real = _real(stack[0])
        names = Tokens(sequences_of(model, batch), tokenizer, stack[0].group)
        places = _places(real, chosen, called)
        start = torch.zeros(*real.shape, len(chosen), dtype=torch.float64, device=real.device)
        start.scatter_(1, places[:, None], 1.0)
        layers = [_Layer.of(observed, factor, residual) for observed, factor in zip(stack, factors, strict=True)]
        steps = _walk(layers, start, on_layer, backward=called == "queries")
        flows, chosen_places = torch.stack(steps, 1).cpu().numpy(), places.cpu().numpy()  # (b, depth, n, m), (b, m)
        for item, keep in enumerate(real.cpu().numpy()):  # without padding
            positions = (np.cumsum(keep) - 1)[chosen_places[item]]
            values = flows[item][:, keep].transpose(2, 0, 1)
            found.append(_of_text(values, names.names(names.queries, item, keep), positions))
    attributes = {"model": loaded.name, "group": stack[0].group, "residual": residual}
    attributes |= {"by": by, "of": called, "definition": DEFINITIONS[called], "units": "1"}
    return joined(found)["flow"].assign_attrs(attributes)


def _one_stack(calls: list[ObservedCall], group: str | None) -> list[ObservedCall]:
    """The layers of one kind of self-attention."""
    kinds = list(dict.fromkeys(observed.group for observed in calls))
    within = [kind for kind in kinds if kind != "cross"]
    if not within:
        raise InputError("model has cross-attention only, expected one with self-attention")
    if group is None and len(within) == 1:
        group = within[0]
    if group not in within:
        expected = f"expected one of {', '.join(map(repr, within))}"
        why = "a rollout stays within one text; " if group == "cross" else ""
        raise InputError(
            f"group is {group!r}, and the model has attention of the kinds {', '.join(kinds)}; {why}{expected}"
        )
    stack = [observed for observed in calls if observed.group == group]
    first = stack[0]
    for observed in stack:
        n_queries, n_keys = observed.call.q.shape[2], observed.call.k.shape[2]
        if len(observed.call.q) != len(first.call.q):  # windows of an image, say
            raise InputError(
                f"model attends to {len(first.call.q)} pieces in {first.module} and to {len(observed.call.q)} in "
                f"{observed.module}; expected layers that all attend to the whole text"
            )
        if n_queries != n_keys or n_keys != first.call.k.shape[2]:
            raise InputError(
                f"model attends from {n_queries} queries to {n_keys} keys in {observed.module}, and to "
                f"{first.call.k.shape[2]} keys in {first.module}; expected layers that all read the same tokens"
            )
    return stack


def _real(observed: ObservedCall) -> Bool[Tensor, "b n"]:
    shape = observed.call.q.shape[0], observed.call.q.shape[2]
    mask = observed.keys if observed.queries is None else observed.queries
    return torch.ones(shape, dtype=torch.bool, device=observed.call.q.device) if mask is None else mask.expand(shape)


def _places(real: Tensor, chosen: Sequence[int], called: str) -> Tensor:
    """Positions of the chosen tokens of each batch item, padding included: (b, m)."""
    rows = []
    for row in real:
        positions = row.nonzero()[:, 0]
        for at in chosen:
            if not -len(positions) <= at < len(positions):
                raise InputError(f"{called} holds {at}, expected positions in a text of {len(positions)} tokens")
        rows.append(positions[list(chosen)])
    return torch.stack(rows)


def _norms(observed: ObservedCall) -> Tensor:
    if (norms := observed.norms) is None:
        raise InputError(f"by is 'values', but the values of {observed.module} cannot be seen; expected 'weights'")
    return norms.double()[..., None]


def _without_first(observed: ObservedCall) -> Tensor:
    b, _, n, _ = observed.call.k.shape
    first = torch.as_tensor(observed.first, device=observed.call.k.device).expand(b)
    return (torch.arange(n, device=first.device) != first[:, None]).double()[:, None, :, None]


FACTORS: dict[str, Callable[[ObservedCall], Tensor | None]] = {
    "weights": lambda observed: None,
    "values": _norms,
    "without-first": _without_first,
}
"""By what the weights on each key are multiplied: (b, h or 1, n, 1), or None; then rows are divided by their sums."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """The matrix Ã of one layer as a linear operator."""

    observed: ObservedCall
    rows: RowState
    queries: Bool[Tensor, "b n"]
    factors: Float[Tensor, "b #h n 1"]  # of the keys
    divided: Float[Tensor, "b #h n 1"]  # 1 by the sum of a row with its factors, 0 for a row without any
    residual: float
    divisor: Float[Tensor, "b n 1"]  # row sums: 1, or less if weights add up to less than 1, as with a learned sink

    @staticmethod
    def of(observed: ObservedCall, factors: Tensor | None, residual: float) -> _Layer:
        call = observed.call
        rows, queries = row_state(call, observed.lse), _real(observed)
        ones = call.q.new_ones(*queries.shape, 1, dtype=torch.float64)[:, None]
        divided = ones
        if factors is not None:
            sums = weights_matmul(call, rows, factors, queries=queries).double()
            mass = (sums != 0).double().mean(1)
            divided = torch.where(sums == 0, 0.0, 1 / sums)
        elif call.normalizer.has_lse and call.sink is None:
            assert rows.level is not None
            mass = ((rows.level != -torch.inf) & queries[:, None]).double().mean(1)[..., None]
        else:
            mass = weights_matmul(call, rows, ones, queries=queries).double().mean(1)
        total = residual + (1 - residual) * mass
        divisor = torch.where(total == 0, 1.0, total)
        return _Layer(observed, rows, queries, ones if factors is None else factors, divided, residual, divisor)

    def before(self, w: Tensor) -> Tensor:
        """Ãᵀ w, (b, n, m)."""
        w = w / self.divisor
        of_heads = w[:, None] * self.divided
        attended = weights_matmul(
            self.observed.call, self.rows, of_heads, transposed=True, queries=self.queries
        ).double()
        return self.residual * w + (1 - self.residual) * (attended * self.factors).mean(1)

    def after(self, c: Tensor) -> Tensor:
        """Ã c, (b, n, m)."""
        of_heads = c[:, None] * self.factors
        attended = weights_matmul(self.observed.call, self.rows, of_heads, queries=self.queries).double()
        return (self.residual * c + (1 - self.residual) * (attended * self.divided).mean(1)) / self.divisor


def _walk(layers: list[_Layer], start: Tensor, on_layer: Callable[[], None], *, backward: bool) -> list[Tensor]:
    """wᵀ down from the last layer, or c up from the first, at every depth, depth 0 first."""
    steps = [start]
    for layer in reversed(layers) if backward else layers:
        steps.append(layer.before(steps[-1]) if backward else layer.after(steps[-1]))
        on_layer()
    return steps[::-1] if backward else steps


def _of_text(values: Float[np.ndarray, "m depth n"], names: list[str], positions: np.ndarray) -> Arrays:
    """The flow of one text from or to the tokens at these positions."""
    tokens = np.array(names, object)
    return Arrays(
        {"flow": (("text", "chosen", "depth", "token"), values[None])},
        {
            "depth": ("depth", np.arange(values.shape[1])),
            "token_name": (("text", "token"), tokens[None]),
            "chosen_position": (("text", "chosen"), positions[None]),
            "chosen_name": (("text", "chosen"), tokens[positions][None]),
            "n_tokens": ("text", [len(names)]),
        },
        {},
    )
