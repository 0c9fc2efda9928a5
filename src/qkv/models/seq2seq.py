"""Recurrent encoder-decoders: without attention (the baseline), and with that of Bahdanau, of Luong, or in heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv import masks
from qkv.errors import InputError
from qkv.models.checks import check_dropout, check_ids, check_tokens
from qkv.models.config import one_of
from qkv.nn.alignment import AdditiveAttention, LuongAttention
from qkv.nn.multi_head import MultiHeadAttention

LUONG = {"luong-dot": "dot", "luong-general": "general", "luong-concat": "concat"}
ATTENTIONS = ("none", "bahdanau", *LUONG, "multihead")
KINDS = ("global", "local-m", "local-p")

Found = tuple[Float[Tensor, "b n features"], Float[Tensor, "b n s"] | None]
"""What comes after each of n tokens, and weights on the source if they were asked for."""


@dataclass(frozen=True)
class RNNSeq2SeqConfig:
    """Sizes and kinds of an `RNNSeq2Seq`.

    `source_vocab` and `target_vocab` count tokens, of which `pad` fills up sources and targets, `start` begins every
    target and `end` ends it. `d_embedding` is the size of both embeddings, `d_hidden` that of the states, where a
    bidirectional encoder has half for each direction. `layers` are those of encoder and decoder each; `cell` is
    ``"lstm"`` or ``"gru"``. `kind` and `half_width` are those of `LuongAttention`, and with `input_feeding` h~ is an
    input of the next step. `heads` are those of ``"multihead"``. `dropout` acts on embeddings, between layers, and
    before the output.

    >>> RNNSeq2SeqConfig(50, 60, attention="luong-dot", kind="local-m").half_width
    10
    """

    source_vocab: int
    target_vocab: int
    d_embedding: int = 64
    d_hidden: int = 128
    layers: int = 1
    cell: Literal["lstm", "gru"] = "lstm"
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
        for name in ("source_vocab", "target_vocab", "d_embedding", "d_hidden", "layers", "half_width", "heads"):
            if getattr(self, name) < 1:
                raise InputError(f"RNNSeq2SeqConfig: {name} is {getattr(self, name)}, expected at least 1")
        for name, allowed in (("cell", ("lstm", "gru")), ("attention", ATTENTIONS), ("kind", KINDS)):
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
    """Where a decoder stands: its source, and what it has come to after `seen` tokens."""

    memory: Float[Tensor, "b s d"]
    """States of the encoder; 0 at padding."""
    lengths: Int[Tensor, " b"] | None
    """Real tokens of each source; None where no source of the batch has padding."""
    prepared: tuple[Tensor, ...]
    """What the attention needs of the memory at every step, made once."""
    hidden: tuple[Float[Tensor, "layers b d"], ...]
    """Of the decoder: h, and c of an LSTM."""
    fed: Float[Tensor, "b 1 d"] | None
    """h~ of the step before, with input feeding."""
    seen: int = 0

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Gather batch items, in place: what a beam search does when hypotheses die and split."""
        self.memory = self.memory[rows]
        self.lengths = None if self.lengths is None else self.lengths[rows]
        self.prepared = tuple(x[rows] for x in self.prepared)
        self.hidden = tuple(x[:, rows] for x in self.hidden)
        self.fed = None if self.fed is None else self.fed[rows]

    @property
    def mask(self) -> masks.Mask | None:
        """Which of the memory is real."""
        return None if self.lengths is None else masks.Padding(self.lengths)


class RNNSeq2Seq(nn.Module):
    """A recurrent encoder and decoder, alone or with attention between them.

    - ``attention="none"``: the encoder's last state is all the decoder knows of the source (Sutskever et al. 2014,
      arXiv:1409.3215; Cho et al. 2014, arXiv:1406.1078). The baseline.
    - ``"bahdanau"``: the decoder's *last* state asks, and the context is an input of the next step and of the output
      (Bahdanau et al. 2015, arXiv:1409.0473, app. A).
    - ``"luong-…"``: the *new* state asks, and h~ = tanh(W_c [c; h]) goes to the output and, with input feeding, to the
      next step (Luong et al. 2015, arXiv:1508.04025, §3).
    - ``"multihead"``: as Luong, with the context of a `MultiHeadAttention`.

    Sources are padded with ``config.pad`` at their ends; padding changes nothing. Initial states of the decoder are the
    encoder's last, of a bidirectional one through a learned linear layer, the same for all layers.

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
        cell = {"lstm": nn.LSTM, "gru": nn.GRU}[config.cell]
        between = config.dropout if config.layers > 1 else 0.0  # torch warns where there is nothing between
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
        """How many tokens it can emit."""
        return self.config.target_vocab

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, "b t vocab"]:
        """Logits of the token after each of the target, which begins with ``config.start``, given all before."""
        state = self.start(source)
        return self.output(self.dropout(self._advance(target, state)[0]))

    def loss(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Mean cross-entropy, in nats a token, of every token of the target after the first; padding does not count."""
        check_ids("target", target, self.config.target_vocab)
        if not (target[:, 1:] != self.config.pad).any():
            raise InputError("target has no token after the first but padding, expected at least one to predict")
        logits = self(source, target[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=self.config.pad)

    def alignments(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, "b t s"]:
        """Weights on the source with which the token after each of the target is predicted; of heads, their mean."""
        if self.attention is None:
            raise InputError("alignments: the model has attention='none', expected one with attention")
        weights = self._advance(target, self.start(source), return_weights=True)[1]
        assert weights is not None
        return weights

    # --- step by step -----------------------------------------------------------------------------------------------

    def start(self, source: Int[Tensor, "b s"]) -> RNNState:
        """The decoder before its first token, with the source encoded."""
        lengths = self._lengths(source)
        embedded = self.dropout(self.source_embedding(source))
        packed = pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
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
        """Logits after the last of `tokens`, which follow those the state has seen; changes the state."""
        return self.output(self.dropout(self._advance(tokens, state)[0][:, -1]))

    def _prepare(self, memory: Tensor) -> tuple[Tensor, ...]:
        """What the attention needs of the memory at every step."""
        if self.attention is None:
            return ()
        if isinstance(self.attention, MultiHeadAttention):
            return self.attention.keys_values(memory)
        return (self.attention.project(memory),)

    def _advance(self, tokens: Tensor, state: RNNState, *, return_weights: bool = False) -> Found:
        """What the output is made of after each of `tokens`, and weights if asked for; changes the state."""
        check_ids("tokens", tokens, self.config.target_vocab)
        if len(tokens) != len(state.memory):
            raise InputError(f"tokens have batch size {len(tokens)}, but the source has {len(state.memory)}")
        embedded = self.dropout(self.target_embedding(tokens))
        if self.config.attention != "bahdanau" and not self.config.input_feeding:
            return self._attended(self._recur(embedded, state), state, return_weights)
        # What attention gives is an input of the recurrence: one step after another.
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
        return torch.cat(features, 1), torch.cat(rows, 1) if return_weights else None

    def _recur(self, x: Tensor, state: RNNState) -> Float[Tensor, "b n d"]:
        """Run the decoder over inputs; the state keeps its last."""
        out, last = self.decoder(x, state.hidden if self.config.cell == "lstm" else state.hidden[0])
        state.hidden = last if isinstance(last, tuple) else (last,)
        state.seen += x.shape[1]
        return out

    def _context(self, attention: AdditiveAttention, state: RNNState, return_weights: bool) -> Found:
        """What the last state of the decoder, of the top layer, finds in the memory."""
        found = attention(
            state.hidden[0][-1][:, None], state.memory, projected=state.prepared[0], mask=state.mask,
            return_weights=return_weights,
        )  # fmt: skip
        return found if isinstance(found, tuple) else (found, None)

    def _attended(self, h: Float[Tensor, "b n d"], state: RNNState, return_weights: bool) -> Found:
        """h~ of the states h, the last of which is where the decoder stands; h itself without attention."""
        if isinstance(self.attention, LuongAttention):
            found = self.attention(
                h, state.memory, projected=state.prepared[0], step=state.seen - h.shape[1], lengths=state.lengths,
                return_weights=return_weights,
            )  # fmt: skip
            return found if isinstance(found, tuple) else (found, None)
        if isinstance(self.attention, MultiHeadAttention):
            keys, values = state.prepared
            found = self.attention(h, keys_values=(keys, values), mask=state.mask, return_weights=return_weights)
            context, weights = found if isinstance(found, tuple) else (found, None)
            h = torch.tanh(self.combine(torch.cat([context, h], -1)))
            return h, None if weights is None else weights.mean(1)
        return h, None

    def _lengths(self, source: Tensor) -> Int[Tensor, " b"]:
        """Real tokens of each source."""
        check_ids("source", source, self.config.source_vocab)
        real = source != self.config.pad
        lengths = real.sum(1)
        if not (real == (torch.arange(source.shape[1], device=source.device) < lengths[:, None])).all():
            raise InputError(f"source has padding (token {self.config.pad}) before a real token, expected it last")
        if not lengths.all():
            raise InputError("source has an item of nothing but padding, expected at least one real token in each")
        return lengths
