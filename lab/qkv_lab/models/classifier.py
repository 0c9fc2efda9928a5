"""A sequence classifier: a bidirectional Transformer encoder with pooling."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import InputError
from qkv.models.config import check_ids, check_tokens, one_of
from qkv.nn.block import Activation
from qkv_lab.models.encoder import Stack, StackConfig, Tokens, real_keys


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
        if self.classes < 1:
            raise InputError(f"ClassifierConfig: classes is {self.classes}, expected at least 1")
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

    @overload
    def forward(self, ids: Tensor, *, return_weights: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, ids: Tensor, *, return_weights: Literal[True]) -> tuple[Tensor, tuple[Tensor, ...]]: ...
    @overload
    def forward(
        self, ids: Tensor, *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]: ...  # fmt: skip
    def forward(
        self, ids: Int[Tensor, "b n"], *, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
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

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def loss(self, ids: Int[Tensor, "b n"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
        """Mean cross-entropy of the correct classes, in nats."""
        if labels.shape != ids.shape[:1] or int(labels.min()) < 0 or int(labels.max()) >= self.config.classes:
            raise InputError(
                f"labels is {labels.tolist()}, expected {len(ids)} classes from 0 to {self.config.classes - 1}"
            )
        return F.cross_entropy(self(ids), labels)
