"""A stack of Transformer layers, which encodes a sequence, and a classifier on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import masks
from qkv.attention import Attention
from qkv.cache import Cache
from qkv.errors import InputError, at_least_one, one_of
from qkv.masks import Mask
from qkv.models.config import check_dropout, check_ids, check_tokens
from qkv.nn.block import Activation, FeedForward, TransformerBlock, make_norm
from qkv.nn.multi_head import KeysValues, MultiHeadAttention
from qkv.positions import Learned, Rotary, Sinusoidal

POSITIONS = ("sinusoidal", "learned", "rotary", "none")


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Settings that all stacks of a model share."""

    context: int = 512
    """Largest number of tokens in a sequence."""
    d_model: int = 512
    layers: int = 6
    heads: int = 8
    kv_heads: int | None = None
    """Key and value heads; `heads` if None."""
    d_hidden: int | None = 2048
    """Width of the feed-forward layers; if None, the default of `qkv.nn.FeedForward`."""
    activation: Activation = "relu"
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "sinusoidal"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    place: Literal["pre", "post"] = "post"
    norm_eps: float = 1e-5
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    dropout: float = 0.1
    """Dropout of the embeddings and of the output of each sublayer (Vaswani et al. 2017, §5.4)."""
    pad: int = 0
    """The padding token."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        at_least_one(name, context=self.context, d_model=self.d_model, layers=self.layers)
        one_of(f"{name}: positions", self.positions, POSITIONS)
        check_dropout(name, self.dropout)


class Tokens(nn.Embedding):
    """An embedding that can also be the output matrix.

    It is initialised from a normal distribution with standard deviation d_model^-½. As an embedding it is multiplied by
    √d_model, as an output matrix it is not (Vaswani et al. 2017, §3.4), so both uses start with variance 1.

    >>> tokens = Tokens(10, 4)
    >>> tokens.logits(tokens(torch.tensor([[3, 1]]))).shape
    torch.Size([1, 2, 10])
    """

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Int[Tensor, "b n"]) -> Float[Tensor, "b n d_model"]:
        """Embeddings of tokens, multiplied by √d_model."""
        return super().forward(ids) * self.embedding_dim**0.5

    def logits(self, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b vocabulary"]:
        """Logits of all tokens."""
        return F.linear(x, self.weight)


class Stack(nn.Module):
    """Positions, dropout and layers; with pre-norm layers also a final norm.

    Args:
        config: settings of the layers.
        layers: number of layers.
        decoder: whether attention is causal, and every layer also attends to a memory.

    >>> stack = Stack(StackConfig(d_model=32, heads=4), layers=2)
    >>> stack(torch.randn(1, 10, 32)).shape
    torch.Size([1, 10, 32])
    """

    def __init__(self, config: StackConfig, layers: int, *, decoder: bool = False) -> None:
        super().__init__()
        self.config = config
        self.positions: Learned | Sinusoidal | None = None
        if config.positions == "learned":
            self.positions = Learned(config.context, config.d_model)
        elif config.positions == "sinusoidal":
            self.positions = Sinusoidal(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config, decoder) for _ in range(layers))
        self.norm = None
        if config.place == "pre":
            self.norm = make_norm(config.norm, config.d_model, config.norm_eps, bias=config.bias)

    def forward(
        self,
        x: Float[Tensor, "b n d_model"],
        *,
        mask: Mask | None = None,
        memory: Sequence[KeysValues] | None = None,
        memory_mask: Mask | None = None,
        caches: Sequence[Cache] | None = None,
        weights: list[tuple[Tensor, ...]] | None = None,
    ) -> Float[Tensor, "b n d_model"]:
        """Run all layers.

        Args:
            x: embeddings of tokens.
            mask: True where a token may attend to a token.
            memory: keys and values of each layer, from `keys_values`.
            memory_mask: True where a token may attend to the memory.
            caches: the cache of each layer, with the tokens before those of x.
            weights: a list to which the weights of each layer are appended: those on x (b, h, n, n), and of a decoder
                also those on the memory (b, h, n, m). They are formed only if there is a list.
        """
        start, n = (caches[0].seen if caches else 0), x.shape[1]
        if start + n > self.config.context:
            raise InputError(f"tokens: {start + n} in the sequence, expected at most context = {self.config.context}")
        if isinstance(self.positions, Learned):
            x = x + self.positions.span(start, start + n)
        elif self.positions is not None:
            x = x + self.positions(torch.arange(start, start + n, device=x.device)).to(x.dtype)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            found = block(
                x,
                keys_values=memory[i] if memory else None,
                mask=mask,
                memory_mask=memory_mask,
                cache=caches[i] if caches else None,
                return_weights=weights is not None,
            )
            if weights is None:
                x = found
            else:
                x, *of_layer = found
                weights.append(tuple(of_layer))
        return x if self.norm is None else self.norm(x)

    def keys_values(self, memory: Float[Tensor, "b m d_model"]) -> list[KeysValues]:
        """Keys and values of a memory for every layer, computed once for all steps."""
        return [block.cross.keys_values(memory) for block in self.blocks]  # type: ignore[operator, union-attr]


def _block(config: StackConfig, decoder: bool) -> TransformerBlock:
    def attention(composition: Attention, rotary: Rotary | None = None) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.d_model,
            config.heads,
            kv_heads=config.kv_heads,
            attention=composition,
            rotary=rotary,
            bias=config.bias,
        )

    # Rotary positions apply to self-attention only: between two sequences there are no distances.
    rotary = Rotary(config.d_model // config.heads) if config.positions == "rotary" else None
    return TransformerBlock(
        attention(Attention(mask=masks.Causal() if decoder else None), rotary),
        FeedForward(config.d_model, config.d_hidden, activation=config.activation, bias=config.bias),
        cross=attention(Attention()) if decoder else None,
        norm=config.norm,
        place=config.place,
        eps=config.norm_eps,
        norm_bias=config.bias,
        dropout=config.dropout,
    )


def real_keys(real: Bool[Tensor, "b n"]) -> Mask | None:
    """The mask of the padding; None if there is no padding, because attention is faster without a mask."""
    return None if bool(real.all()) else masks.Dense(real[:, None, None, :])


@dataclass(frozen=True)
class ClassifierConfig(StackConfig):
    """Sizes of a `Classifier`.

    >>> ClassifierConfig(1000, classes=4).layers
    2
    """

    vocab_size: int
    classes: int
    _: KW_ONLY
    d_model: int = 128
    layers: int = 2
    heads: int = 4
    d_hidden: int | None = None
    activation: Activation = "gelu"
    positions: Literal["sinusoidal", "learned", "rotary", "none"] = "learned"
    place: Literal["pre", "post"] = "pre"
    pool: Literal["mean", "first"] = "mean"
    """The vector that is classified: the mean over all tokens that are not padding, or the first token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tokens("ClassifierConfig", self.vocab_size, pad=self.pad)
        at_least_one("ClassifierConfig", classes=self.classes)
        one_of("ClassifierConfig: pool", self.pool, ("mean", "first"))


class Classifier(nn.Module):
    """Classifies sequences with an encoder in which every token attends to every other token.

    Tokens equal to ``config.pad`` are padding: nothing attends to them, and they are not pooled. Embeddings are
    multiplied by √d_model and initialised from a normal distribution with standard deviation d_model^-½; the output
    matrix is initialised Xavier-uniform, its bias with 0, and the layers as usual.

    Shapes: b batch, n tokens.

    >>> model = Classifier(ClassifierConfig(11, classes=3, d_model=32))
    >>> model(torch.randint(1, 11, (2, 7))).shape
    torch.Size([2, 3])
    """

    one_stack: ClassVar[bool] = True
    """All attention is one stack of self-attention layers, so the number of a layer says which it is."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Tokens(config.vocab_size, config.d_model)
        self.encoder = Stack(config, config.layers)
        self.output = nn.Linear(config.d_model, config.classes)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids: Int[Tensor, "b n"], *, return_weights: bool = False) -> Any:
        """Logits of the classes. For a sequence of padding alone they are the output's bias.

        Args:
            ids: the tokens.
            return_weights: also return the attention weights of every layer; memory is then quadratic in the length.
                They are differentiable.

        Returns:
            ``logits`` (b, classes), or ``(logits, weights)`` with a tensor (b, heads, n, n) for each layer.
        """
        check_ids("ids", ids, self.config.vocab_size)
        real = ids != self.config.pad
        weights: list[tuple[Tensor, ...]] | None = [] if return_weights else None
        x = self.encoder(self.tokens(ids), mask=real_keys(real), weights=weights)
        if self.config.pool == "first":
            pooled = x[:, 0]
        else:
            count = real.sum(1, keepdim=True).clamp(min=1)
            pooled = torch.where(real[..., None], x, 0).sum(1) / count
        logits: Tensor = self.output(pooled)
        return logits if weights is None else (logits, tuple(own for (own,) in weights))

    def loss(self, ids: Int[Tensor, "b n"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
        """Mean cross-entropy of the correct classes, in nats."""
        if labels.shape != ids.shape[:1] or int(labels.min()) < 0 or int(labels.max()) >= self.config.classes:
            raise InputError(
                f"labels is {labels.tolist()}, expected {len(ids)} classes from 0 to {self.config.classes - 1}"
            )
        return F.cross_entropy(self(ids), labels)
