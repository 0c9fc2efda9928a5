"""Recurrent encoder-decoders without attention, with Bahdanau's or Luong's attention, or with multi-head attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv import masks
from qkv.errors import InputError, at_least_one, one_of
from qkv.models.config import check_dropout, check_ids, check_tokens
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.nn.multi_head import MultiHeadAttention

LUONG = {"luong-dot": "dot", "luong-general": "general", "luong-concat": "concat"}
ATTENTIONS = ("none", "bahdanau", *LUONG, "multihead")
KINDS = ("global", "local-m", "local-p")

CELLS: dict[str, type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}

Found = tuple[Float[Tensor, "b n features"], Float[Tensor, "b h n s"] | None]
"""Input of the output layer at each of n tokens, and the weights on the source if requested."""


@dataclass(frozen=True)
class RNNSeq2SeqConfig:
    """Architecture and sizes of an `RNNSeq2Seq`.

    `source_vocab` and `target_vocab` are numbers of tokens; `pad` is the padding of sources and targets, `start` begins
    every target, and `end` ends it. `d_embedding` is the size of both embeddings and `d_hidden` that of the hidden
    states; a bidirectional encoder uses half of it for each direction. Encoder and decoder have `layers` layers each.
    `cell` is ``"lstm"``, ``"gru"`` or ``"rnn"``, the plain recurrence tanh(W x + U h + b). `kind` and `half_width` are
    settings of `LuongAttention`; with `input_feeding`, h~ is an input of the next step. `heads` is the number of heads
    of ``"multihead"``. `dropout` acts on embeddings, between layers, and before the output.

    >>> RNNSeq2SeqConfig(50, 60, attention="luong-dot", kind="local-m").half_width
    10
    """

    source_vocab: int
    target_vocab: int
    d_embedding: int = 64
    d_hidden: int = 128
    layers: int = 1
    cell: Literal["lstm", "gru", "rnn"] = "lstm"
    bidirectional: bool = True
    attention: Literal["none", "bahdanau", "luong-dot", "luong-general", "luong-concat", "multihead"] = "none"
    kind: Literal["global", "local-m", "local-p"] = "global"
    half_width: int = 10
    input_feeding: bool = False
    heads: int = 4
    dropout: float = 0.0
    pad: int = 0
    start: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        sizes = ("source_vocab", "target_vocab", "d_embedding", "d_hidden", "layers", "half_width", "heads")
        at_least_one("RNNSeq2SeqConfig", **{name: getattr(self, name) for name in sizes})
        for name, allowed in (("cell", CELLS), ("attention", ATTENTIONS), ("kind", KINDS)):
            one_of(f"RNNSeq2SeqConfig: {name}", getattr(self, name), allowed)
        check_dropout("RNNSeq2SeqConfig", self.dropout)
        if self.bidirectional and self.d_hidden % 2:
            raise InputError(
                f"RNNSeq2SeqConfig: d_hidden is {self.d_hidden}, expected an even number, half for each direction of a "
                "bidirectional encoder"
            )
        luong = self.attention in LUONG
        if self.kind != "global" and not luong:
            raise InputError(
                f"RNNSeq2SeqConfig: kind is {self.kind!r} with attention={self.attention!r}, expected a Luong score "
                f"({', '.join(map(repr, LUONG))}) or kind='global'"
            )
        if self.input_feeding and not luong:
            raise InputError(
                f"RNNSeq2SeqConfig: input_feeding is True with attention={self.attention!r}, expected a Luong score "
                f"({', '.join(map(repr, LUONG))})"
            )
        if self.attention == "multihead" and self.d_hidden % self.heads:
            raise InputError(
                f"RNNSeq2SeqConfig: d_hidden is {self.d_hidden}, expected a multiple of heads = {self.heads}"
            )
        check_tokens("RNNSeq2SeqConfig", self.target_vocab, pad=self.pad, start=self.start, end=self.end)
        check_tokens("RNNSeq2SeqConfig", self.source_vocab, pad=self.pad)


@dataclass(eq=False)
class RNNState:
    """State of the decoder after `seen` tokens, with its encoded source."""

    memory: Float[Tensor, "b s d"]
    """Hidden states of the encoder; 0 at padding."""
    lengths: Int[Tensor, " b"] | None
    """Number of tokens of each source, without padding; None if no source of the batch has padding."""
    prepared: tuple[Tensor, ...]
    """Projections of the memory that the attention needs at every step, computed once."""
    hidden: tuple[Float[Tensor, "layers b d"], ...]
    """Hidden state of the decoder: h, and also c for an LSTM."""
    fed: Float[Tensor, "b 1 d"] | None
    """h~ of the previous step, for input feeding."""
    seen: int = 0

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Select batch items in this order, in place, as beam search needs."""
        self.memory = self.memory[rows]
        self.lengths = None if self.lengths is None else self.lengths[rows]
        self.prepared = tuple(x[rows] for x in self.prepared)
        self.hidden = tuple(x[:, rows] for x in self.hidden)
        self.fed = None if self.fed is None else self.fed[rows]

    @property
    def mask(self) -> masks.Mask | None:
        """The mask of the padding in the memory; None if there is none."""
        return None if self.lengths is None else masks.Padding(self.lengths)


class RNNSeq2Seq(nn.Module):
    """A recurrent encoder and decoder, alone or with attention between them.

    - ``attention="none"``: the encoder's last state is all that the decoder gets from the source (Sutskever et al.
      2014, arXiv:1409.3215; Cho et al. 2014, arXiv:1406.1078). The baseline.
    - ``"bahdanau"``: the decoder's *previous* state is the query, and the context is an input of the next step and of
      the output (Bahdanau et al. 2015, arXiv:1409.0473, app. A).
    - ``"luong-…"``: the *new* state is the query, and h~ = tanh(W_c [c; h]) goes to the output and, with input feeding,
      to the next step (Luong et al. 2015, arXiv:1508.04025, §3).
    - ``"multihead"``: like Luong, with a `MultiHeadAttention` that computes the context.

    Sources are padded with ``config.pad`` at their ends; padding does not change the result. The decoder starts with
    the last states of the encoder; those of a bidirectional encoder pass through a linear layer that all layers share.

    Shapes: b batch, s tokens of the source, t of the target.

    >>> import torch
    >>> model = RNNSeq2Seq(RNNSeq2SeqConfig(20, 30, d_hidden=16, attention="bahdanau"))
    >>> model(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 4], [1, 3]])).shape
    torch.Size([2, 2, 30])
    """

    def __init__(self, config: RNNSeq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        d = config.d_hidden
        directions = 2 if config.bidirectional else 1
        cell = CELLS[config.cell]
        between = config.dropout if config.layers > 1 else 0.0  # else torch warns
        self.source_embedding = nn.Embedding(config.source_vocab, config.d_embedding)
        self.target_embedding = nn.Embedding(config.target_vocab, config.d_embedding)
        self.encoder = cell(
            config.d_embedding, d // directions, config.layers,
            batch_first=True, dropout=between, bidirectional=config.bidirectional,
        )  # fmt: skip
        self.bridges = nn.ModuleList()
        if config.bidirectional:
            self.bridges.extend(nn.Linear(d, d) for _ in range(2 if config.cell == "lstm" else 1))
        further = d if config.attention == "bahdanau" or config.input_feeding else 0
        self.decoder = cell(config.d_embedding + further, d, config.layers, batch_first=True, dropout=between)
        self.attention: AdditiveAttention | LuongAttention | MultiHeadAttention | None = None
        if config.attention == "bahdanau":
            self.attention = AdditiveAttention(d, d, d)
        elif config.attention in LUONG:
            score = LUONG[config.attention]
            self.attention = LuongAttention(d, d, score, config.kind, config.half_width)  # type: ignore[arg-type]
        elif config.attention == "multihead":
            self.attention = MultiHeadAttention(d, config.heads)
            self.combine = nn.Linear(2 * d, d, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * d if config.attention == "bahdanau" else d, config.target_vocab)

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary of the target."""
        return self.config.target_vocab

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, "b t vocab"]:
        """Logits of the next token at each position of the target, which begins with ``config.start``."""
        state = self.start(source)
        return self.output(self.dropout(self._advance(target, state)[0]))

    def loss(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Mean cross-entropy, in nats per token, of all tokens of the target after the first; padding is ignored."""
        check_ids("target", target, self.config.target_vocab)
        if not (target[:, 1:] != self.config.pad).any():
            raise InputError("target has only padding after its first token, expected at least one token to predict")
        logits = self(source, target[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=self.config.pad)

    def alignments(
        self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"], *, per_head: bool = False
    ) -> Float[Tensor, "b t s"] | Float[Tensor, "b h t s"]:
        """Weights on the source when the token after each token of the target is predicted; differentiable.

        Args:
            source: the source, padded at its end.
            target: the target, beginning with ``config.start``.
            per_head: return the weights of every head, (b, heads, t, s), instead of their mean (b, t, s). Every
                attention but ``"multihead"`` has one head.

        Raises:
            InputError: for a model without attention.

        >>> model = RNNSeq2Seq(RNNSeq2SeqConfig(20, 30, d_hidden=16, attention="multihead", heads=2))
        >>> model.alignments(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 4]]), per_head=True).shape
        torch.Size([1, 2, 2, 3])
        """
        if self.attention is None:
            raise InputError("attention is 'none', expected a model with attention")
        weights = self._advance(target, self.start(source), return_weights=True)[1]
        assert weights is not None
        return weights if per_head else weights.mean(1)

    # --- step by step -----------------------------------------------------------------------------------------------

    def start(self, source: Int[Tensor, "b s"]) -> RNNState:
        """Encode the source; return the state of the decoder before its first token."""
        lengths = self._lengths(source)
        embedded = self.dropout(self.source_embedding(source))
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = _recurrent(self.encoder, packed)
        memory, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        hidden = last if isinstance(last, tuple) else (last,)
        if self.config.bidirectional:
            both = (x.unflatten(0, (self.config.layers, 2)).transpose(1, 2).flatten(2) for x in hidden)
            hidden = tuple(bridge(x) for bridge, x in zip(self.bridges, both, strict=True))
        fed = torch.zeros_like(memory[:, :1]) if self.config.input_feeding else None
        padded = lengths if (lengths < source.shape[1]).any() else None
        return RNNState(memory, padded, self._prepare(memory), hidden, fed)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "b n"], state: RNNState) -> Float[Tensor, "b vocab"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; changes the state."""
        return self.output(self.dropout(self._advance(tokens, state)[0][:, -1]))

    def _prepare(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Projections of the memory that the attention needs at every step."""
        if self.attention is None:
            return ()
        if isinstance(self.attention, MultiHeadAttention):
            return self.attention.keys_values(memory)
        return (self.attention.project(memory),)

    def _advance(self, tokens: Tensor, state: RNNState, *, return_weights: bool = False) -> Found:
        """Input of the output layer after each of `tokens`, and the weights if requested; changes the state."""
        check_ids("tokens", tokens, self.config.target_vocab)
        if len(tokens) != len(state.memory):
            raise InputError(f"tokens has {len(tokens)} items, expected {len(state.memory)}, as the source has")
        embedded = self.dropout(self.target_embedding(tokens))
        if self.config.attention != "bahdanau" and not self.config.input_feeding:
            return self._attended(self._recur(embedded, state), state, return_weights)
        # The output of the attention is an input of the recurrence, so the steps must run one after another.
        found = []
        for x in embedded.split(1, dim=1):
            if isinstance(self.attention, AdditiveAttention):
                context, weights = self._context(self.attention, state, return_weights)
                h = self._recur(torch.cat([x, context], -1), state)
                found.append((torch.cat([h, context], -1), weights))
            else:
                assert state.fed is not None
                h = self._recur(torch.cat([x, state.fed], -1), state)
                state.fed, weights = self._attended(h, state, return_weights)
                found.append((state.fed, weights))
        features, rows = zip(*found, strict=True)
        return torch.cat(features, 1), torch.cat(rows, 2) if return_weights else None

    def _recur(self, x: Tensor, state: RNNState) -> Float[Tensor, "b n d"]:
        """Run the decoder over inputs, and store its last hidden state."""
        out, last = _recurrent(self.decoder, x, *state.hidden)
        state.hidden = last if isinstance(last, tuple) else (last,)
        state.seen += x.shape[1]
        return out

    def _context(self, attention: AdditiveAttention, state: RNNState, return_weights: bool) -> Found:
        """Attention of the decoder's previous top-layer state to the memory."""
        found = attention(
            state.hidden[0][-1][:, None], state.memory, projected=state.prepared[0], mask=state.mask,
            return_weights=return_weights,
        )  # fmt: skip
        return (found[0], found[1][:, None]) if isinstance(found, tuple) else (found, None)

    def _attended(self, h: Float[Tensor, "b n d"], state: RNNState, return_weights: bool) -> Found:
        """h~ of the states h, the last of which belongs to the newest token; h itself without attention."""
        if isinstance(self.attention, LuongAttention):
            found = self.attention(
                h, state.memory, projected=state.prepared[0], step=state.seen - h.shape[1], lengths=state.lengths,
                return_weights=return_weights,
            )  # fmt: skip
            return (found[0], found[1][:, None]) if isinstance(found, tuple) else (found, None)
        if isinstance(self.attention, MultiHeadAttention):
            keys, values = state.prepared
            found = self.attention(h, keys_values=(keys, values), mask=state.mask, return_weights=return_weights)
            context, weights = found if isinstance(found, tuple) else (found, None)
            h = torch.tanh(self.combine(torch.cat([context, h], -1)))
            return h, weights
        return h, None

    def _lengths(self, source: Tensor) -> Int[Tensor, " b"]:
        """Number of tokens of each source, without padding."""
        check_ids("source", source, self.config.source_vocab)
        real = source != self.config.pad
        lengths = real.sum(1)
        if not (real == (torch.arange(source.shape[1], device=source.device) < lengths[:, None])).all():
            raise InputError(
                f"source has padding (token {self.config.pad}) before a real token, expected it at the end"
            )
        if not lengths.all():
            raise InputError("source has an item of padding only, expected at least one token in each")
        return lengths


def _recurrent(layer: nn.RNNBase, x: Any, *hidden: Tensor) -> Any:
    """Apply a recurrent layer. Under autocast on a CPU it runs in float32: few processors have an LSTM in bfloat16."""
    exact = x.data.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if exact:
        x, hidden = x.float(), tuple(h.float() for h in hidden)
    with torch.autocast("cpu", enabled=False) if exact else nullcontext():
        if not hidden:
            return layer(x)
        return layer(x, hidden if isinstance(layer, nn.LSTM) else hidden[0])
