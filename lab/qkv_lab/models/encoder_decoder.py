"""The original Transformer: an encoder of the source, and a decoder of the target that attends to it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qkv.cache import Full
from qkv.errors import InputError, at_least_one
from qkv.models.config import check_ids, check_tokens
from qkv.models.loss import linear_cross_entropy
from qkv.nn.multi_head import KeysValues
from qkv_lab.models.classifier import Stack, StackConfig, Tokens, real_keys


@dataclass(frozen=True)
class EncoderDecoderConfig(StackConfig):
    """Sizes of an `EncoderDecoder`; the defaults are the base model of Vaswani et al. 2017 (table 3).

    >>> EncoderDecoderConfig(8000, 8000).d_model
    512
    """

    source_vocab: int
    target_vocab: int
    _: KW_ONLY
    decoder_layers: int | None = None
    """Number of decoder layers; as many as encoder layers if None."""
    tied: bool = True
    """Whether source embedding, target embedding and output matrix share their weights (§3.4). If the vocabularies
    differ in size, only the target embedding and the output matrix do."""
    start: int = 1
    """The token every target begins with."""
    end: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tokens("EncoderDecoderConfig", self.target_vocab, pad=self.pad, start=self.start, end=self.end)
        check_tokens("EncoderDecoderConfig", self.source_vocab, pad=self.pad)
        if self.decoder_layers is not None:
            at_least_one("EncoderDecoderConfig", decoder_layers=self.decoder_layers)


@dataclass(eq=False)
class EncoderDecoderState:
    """State of the decoder between steps."""

    caches: list[Full]
    """Keys and values of the target so far, for each layer."""
    memory: list[KeysValues]
    """Keys and values of the source, for each layer."""
    real: Bool[Tensor, "b m"]
    """True where the source is not padding."""

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Select batch items in this order, in place."""
        for cache in self.caches:
            cache.reorder(rows)
        self.memory = [(k[rows], v[rows]) for k, v in self.memory]
        self.real = self.real[rows]


class EncoderDecoderWeights(NamedTuple):
    """Attention weights of an `EncoderDecoder`: a tensor for each layer of the half.

    Shapes: b batch, h heads, s source tokens, t target tokens.

    >>> model = EncoderDecoder(EncoderDecoderConfig(11, 13, d_model=32, heads=4, layers=2))
    >>> source, target = torch.randint(3, 11, (2, 7)), torch.randint(3, 13, (2, 5))
    >>> logits, weights = model(source, target, return_weights=True)
    >>> [len(x) for x in weights], weights.cross[-1].shape
    ([2, 2, 2], torch.Size([2, 4, 5, 7]))
    """

    encoder: tuple[Float[Tensor, "b h s s"], ...]
    """Of the source on itself."""
    decoder: tuple[Float[Tensor, "b h t t"], ...]
    """Of the target on itself."""
    cross: tuple[Float[Tensor, "b h t s"], ...]
    """Of the target on the source: the alignments."""


class EncoderDecoder(nn.Module):
    """A Transformer that maps one sequence to another (Vaswani et al. 2017, arXiv:1706.03762).

    Tokens equal to ``config.pad`` are padding: nothing attends to them in the source, and in the target, where they
    must be at the end, the loss ignores them. Embeddings and output matrix are initialised from a normal distribution
    with standard deviation d_model^-½, the layers as usual. With ``place="pre"`` each half ends with a norm. The output
    has no bias.

    Shapes: b batch, s source tokens, t target tokens.

    >>> model = EncoderDecoder(EncoderDecoderConfig(11, 13, d_model=32, heads=4, layers=2))
    >>> source, target = torch.randint(3, 11, (2, 7)), torch.randint(3, 13, (2, 5))
    >>> model(source, target).shape
    torch.Size([2, 5, 13])
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = config.target_vocab
        shared = config.tied and config.source_vocab == config.target_vocab
        self.source_tokens = Tokens(config.source_vocab, config.d_model)
        self.own_target_tokens = None if shared else Tokens(config.target_vocab, config.d_model)
        self.own_output = None if config.tied else Tokens(config.target_vocab, config.d_model)
        self.encoder = Stack(config, config.layers)
        self.decoder = Stack(config, config.decoder_layers or config.layers, decoder=True)

    @property
    def target_tokens(self) -> Tokens:
        """The target embedding; the same object as the source embedding if they are tied."""
        return self.source_tokens if self.own_target_tokens is None else self.own_target_tokens

    @property
    def output(self) -> Tokens:
        """The output matrix; the same object as the target embedding if they are tied."""
        return self.target_tokens if self.own_output is None else self.own_output

    def encode(self, source: Int[Tensor, "b s"]) -> Float[Tensor, "b s d_model"]:
        """The memory: a vector for each token of the source. Ignore the vectors of padding."""
        return self._encoded(source)

    def _encoded(self, source: Tensor, weights: list[tuple[Tensor, ...]] | None = None) -> Tensor:
        check_ids("source", source, self.config.source_vocab)
        mask = real_keys(source != self.config.pad)
        memory: Tensor = self.encoder(self.source_tokens(source), mask=mask, weights=weights)
        return memory

    def forward(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"], *, return_weights: bool = False) -> Any:
        """Logits of the next token at each position of the target (teacher forcing).

        Args:
            source: the tokens to encode.
            target: the tokens so far, beginning with ``config.start``.
            return_weights: also return the attention weights of every layer and head; memory is then quadratic in the
                lengths. They are differentiable. Rows of padding in the source have no meaning.

        Returns:
            ``logits`` (b, t, vocabulary), or ``(logits, weights)`` with `EncoderDecoderWeights`.
        """
        if not return_weights:
            return self.output.logits(self._decoded(source, target))
        encoder: list[tuple[Tensor, ...]] = []
        decoder: list[tuple[Tensor, ...]] = []
        logits = self.output.logits(self._decoded(source, target, encoder, decoder))
        (own,), (of_target, cross) = zip(*encoder, strict=True), zip(*decoder, strict=True)
        return logits, EncoderDecoderWeights(own, of_target, cross)

    def loss(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
        """Mean cross-entropy, in nats per token, of all tokens of the target after the first; padding is ignored.

        It never holds all logits in memory.
        """
        decoded, following = self._decoded(source, target[:, :-1]), target[:, 1:]
        following = following.masked_fill(following == self.config.pad, -100)
        return linear_cross_entropy(decoded.flatten(0, 1), self.output.weight, following.flatten())

    def _decoded(
        self,
        source: Tensor,
        target: Tensor,
        encoder_weights: list[tuple[Tensor, ...]] | None = None,
        decoder_weights: list[tuple[Tensor, ...]] | None = None,
    ) -> Float[Tensor, "b t d_model"]:
        """Final hidden states, the input of the output matrix; weights are appended to the lists."""
        check_ids("target", target, self.config.target_vocab)
        if len(source) != len(target):
            raise InputError(f"target has {len(target)} items, expected {len(source)}, as the source has")
        decoded: Tensor = self.decoder(
            self.target_tokens(target),
            memory=self.decoder.keys_values(self._encoded(source, encoder_weights)),
            memory_mask=real_keys(source != self.config.pad),
            weights=decoder_weights,
        )
        return decoded

    @torch.no_grad()
    def start(self, source: Int[Tensor, "b s"]) -> EncoderDecoderState:
        """The state before the first token of the target. No gradient passes through steps."""
        memory = self.decoder.keys_values(self.encode(source))
        caches = [Full(self.config.context) for _ in self.decoder.blocks]
        return EncoderDecoderState(caches, memory, source != self.config.pad)

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "b n"], state: EncoderDecoderState) -> Float[Tensor, "b vocabulary"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; changes the state."""
        check_ids("tokens", tokens, self.config.target_vocab)
        decoded = self.decoder(
            self.target_tokens(tokens), memory=state.memory, memory_mask=real_keys(state.real), caches=state.caches
        )
        return self.output.logits(decoded[:, -1])
