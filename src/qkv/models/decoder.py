"""A decoder-only language model; its configuration covers GPT-2, Llama and many variants between them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.attention import Attention
from qkv.biases import ALiBi, Bias, T5Bias
from qkv.cache import Cache, Full, Latent, Recurrent
from qkv.engine import as_mask
from qkv.errors import InputError, kind_of, one_of
from qkv.masks import Causal, Dense, Mask, Prefix, Window
from qkv.masks.invariance import causal, depends_on_length, depends_on_start
from qkv.models.config import check_dropout, check_ids
from qkv.models.loss import linear_cross_entropy
from qkv.nn.block import FeedForward, TransformerBlock, make_norm
from qkv.nn.differential import DifferentialAttention
from qkv.nn.latent import LatentAttention
from qkv.nn.multi_head import ForgettingAttention, LinearAttention, MultiHeadAttention
from qkv.nn.recurrent import RecurrentAttention
from qkv.normalizers import EluPlusOne, Entmax, Normalizer, ReLU, Sigmoid, Softmax, Softpick
from qkv.positions import NTK, DynamicNTK, Learned, Linear, Llama3, Proportional, Rotary, Scaling, Sinusoidal, YaRN
from qkv.scores import Dot

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")
NORMALIZERS: dict[str, Callable[[], Normalizer]] = {
    "softmax": Softmax,
    "off_by_one": lambda: Softmax(sink=0.0),
    "sigmoid": Sigmoid,
    "elu": EluPlusOne,
    "relu": ReLU,
    "sigmoid_sum": lambda: Sigmoid(divide="sum"),
    "elu_sum": lambda: EluPlusOne(divide="sum"),
    "entmax": Entmax,
    "softpick": Softpick,
}
SCALINGS: dict[str, Callable[[DecoderConfig, int], Scaling]] = {  # of a configuration and the original context length
    "linear": lambda config, original: Linear(config.rotary_factor),
    "proportional": lambda config, original: Proportional(config.rotary_factor),
    "ntk": lambda config, original: NTK(config.rotary_factor),
    "dynamic": lambda config, original: DynamicNTK(config.rotary_factor, original),
    "yarn": lambda config, original: YaRN(config.rotary_factor, original),
    "llama3": lambda config, original: Llama3(config.rotary_factor, config.rotary_low, config.rotary_high, original),
}
RECURRENT: dict[str, dict[str, Any]] = {  # types of layers, and their settings of `RecurrentAttention`
    "retention": {"decay": "head", "delta": False},
    "gated_linear": {"decay": "feature", "delta": False},
    "delta": {"decay": None},
    "gated_delta": {"decay": "token"},
    "kimi_delta": {"decay": "feature", "gate": "sigmoid"},
}
SOFTMAX = ("attention", "forgetting", "differential", "latent")
LAYER_TYPES = (*SOFTMAX, "linear", *RECURRENT)
USED_BY: dict[str, tuple[str, ...]] = {  # settings that not all types of layers have
    **dict.fromkeys(("gate", "qk_norm", "sink", "key_bias"), ("attention", "forgetting")),
    "kv_heads": ("attention", "forgetting", "linear"),
    "head_dim": ("attention", "forgetting", "latent", *RECURRENT),
    "score_scale": ("attention", "forgetting", "differential"),
    "normalizer": SOFTMAX,
    "latent": ("latent",),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture and sizes of a `DecoderLM`. Every entry is a number, a string, a bool, None or several of them, so
    it fits in JSON; `attention` is a composition, which does if all its parts are qkv's own.

    >>> DecoderConfig.llama(d_model=128, heads=4, kv_heads=2).norm
    'rmsnorm'
    """

    vocab_size: int = 256
    context: int = 1024
    """Number of positions in a learned position table and in the default cache."""
    d_model: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int | None = None
    head_dim: int | None = None
    d_hidden: int | None = None
    """Width of the feed-forward layers; by default 4 · d_model, or 8/3 · d_model with swiglu."""
    activation: str = "gelu_tanh"
    positions: str = "learned"
    """``learned``, ``sinusoidal``, ``rotary``, ``alibi``, ``t5`` or ``none``."""
    rotary_base: float = 10_000.0
    rotary_interleaved: bool = False
    rotary_scaling: str | None = None
    """``linear``, ``ntk``, ``dynamic``, ``yarn``, ``llama3``, or for p-RoPE ``proportional``."""
    rotary_factor: float = 1.0
    """The factor of the scaling; of ``proportional`` the share of the pairs that turn."""
    rotary_original: int | None = None
    """Context length of the original training, before the context was extended; `context` if None."""
    rotary_low: float = 1.0
    rotary_high: float = 4.0
    norm: str = "layernorm"
    place: str = "pre"
    norm_eps: float = 1e-5
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    attention_bias: bool | None = None
    """Whether the linear layers of the attention have biases; as `bias` if None."""
    tied: bool = True
    """Whether the embedding is also the output matrix."""
    output_bias: bool | None = None
    """Whether an output matrix that is not tied has a bias; None, as in GPT-2 and Llama, for no."""
    qk_norm: bool = False
    gate: str | None = None
    layer_types: str | tuple[str, ...] | None = None
    """What each layer is; ``attention`` if None. Several repeat over the layers, as those of `window`:
    ``("gated_delta", "gated_delta", "gated_delta", "attention")`` is the order of Qwen3-Next.

    ``attention``, ``forgetting``, ``differential``, ``latent`` and ``linear`` are the layers of these names in
    `qkv.nn`. ``retention`` (RetNet), ``gated_linear`` (GLA), ``delta`` (DeltaNet), ``gated_delta`` (Gated DeltaNet) and
    ``kimi_delta`` (Kimi Linear) are `qkv.nn.RecurrentAttention`. Of those that are linear, only ``retention`` has
    rotary positions. `gate`, `qk_norm`, `sink` and `key_bias` are for ``attention`` and ``forgetting``."""
    latent: int | None = None
    """Dimension of the latents of ``latent`` layers; if None four times that of a head, as in DeepSeek-V2. Half of a
    head's dimension turns with the positions, which are ``rotary``."""
    sink: bool = False
    key_bias: bool = False
    normalizer: str = "softmax"
    window: int | tuple[int | None, ...] | None = None
    """Each token attends to this many tokens, itself included; to all earlier tokens if None. Several numbers are those
    of the layers, and repeat: with ``(512, 512, 512, None)`` every fourth layer attends to all tokens, as in Olmo 3."""
    prefix: int = 0
    """Length of the prefix, whose tokens all attend to one another: a prefix language model (Raffel et al. 2020,
    arXiv:1910.10683, §3.2.1). The prefix contains its own next tokens, so the loss should have no targets in it."""
    score_scale: float | None = None
    """Scale of the dot products of queries and keys; 1/√head_dim if None."""
    dropout: float = 0.0
    """Dropout of embeddings, of attention weights and of the output of each sublayer, in training."""
    attention: Attention | None = None
    """The composition of every layer, in place of `window`, `prefix`, `normalizer`, `score_scale` and the positions
    ``alibi`` and ``t5``. Later tokens are masked, too. Every layer gets a copy of its learned tensors."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "d_model"):
            if not isinstance(value := getattr(self, name), Integral) or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number, at least 1")
        one_of("positions", self.positions, POSITIONS)
        one_of("normalizer", self.normalizer, NORMALIZERS)
        if self.rotary_scaling is not None:
            one_of("rotary_scaling", self.rotary_scaling, SCALINGS)
            if self.positions != "rotary":
                raise InputError(
                    f"rotary_scaling is {self.rotary_scaling!r} with positions {self.positions!r}, expected 'rotary'"
                )
        if self.sink and self.key_bias:
            raise InputError("sink and key_bias are both True, expected at most one of them")
        if self.output_bias and self.tied:
            raise InputError("output_bias is True with tied, expected tied=False: an embedding has no bias")
        if not self.norm_eps > 0:
            raise InputError(f"norm_eps is {self.norm_eps}, expected a positive number")
        check_dropout("DecoderConfig", self.dropout)
        if isinstance(self.window, list):
            object.__setattr__(self, "window", tuple(self.window))
        given = self.window if isinstance(self.window, tuple) else (self.window,)
        if not given or not all(x is None or (type(x) is int and x > 0) for x in given):
            raise InputError(f"window is {self.window!r}, expected at least 1 token or None, or such a number by layer")
        if self.prefix < 0:
            raise InputError(f"prefix is {self.prefix}, expected 0 or more tokens")
        if self.prefix and self.window is not None:
            raise InputError(f"prefix is {self.prefix} with window {self.window}, expected at most one of them")
        if self.score_scale is not None and not 0 < self.score_scale < math.inf:
            raise InputError(f"score_scale is {self.score_scale}, expected a positive number or None for 1/√head_dim")
        if self.attention is not None:
            self._check_composition()
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        """Raise `InputError` for types of layers that are unknown, or do not have the other settings."""
        given = self.layer_types if isinstance(self.layer_types, tuple) else (self.layer_types,)
        if not given:
            raise InputError("layer_types is (), expected the name of a type, or several that repeat over the layers")
        for kind in given:
            one_of("layer_types", kind, (None, *LAYER_TYPES))
        period = min(self.layers, math.lcm(len(given), len(self.window) if isinstance(self.window, tuple) else 1))
        if period > 2**16:  # of a hostile file
            raise InputError(f"layer_types and window repeat after {period:,} layers, expected at most 65,536")
        own = {self._type_of(layer) for layer in range(period)}
        defaults = {f.name: f.default for f in fields(self)}
        for name, kinds in USED_BY.items():
            if (value := getattr(self, name)) != defaults[name] and not own.intersection(kinds):
                raise InputError(
                    f"{name} is {value!r} with layer_types {self.layer_types!r}, which do not have it, expected "
                    f"{defaults[name]!r}"
                )
        if "latent" in own and self.positions != "rotary":
            raise InputError(f"positions is {self.positions!r} with latent layers, expected 'rotary'")
        if "differential" in own and self.positions in ("alibi", "t5"):
            raise InputError(f"positions is {self.positions!r} with differential layers, expected no bias of scores")
        for layer in range(period):
            kind, window = self._type_of(layer), self._window_of(layer)
            if kind not in SOFTMAX and window is not None:
                raise InputError(f"window is {window} in layer {layer}, which is {kind!r}, expected None for it")
        if self.prefix and own - {"attention", "differential", "latent"}:
            raise InputError(
                f"prefix is {self.prefix} with layer_types {self.layer_types!r}, expected 0: they are causal"
            )

    def _check_composition(self) -> None:
        """Raise `InputError` for settings that the composition replaces."""
        if not isinstance(self.attention, Attention):
            raise InputError(f"attention is {type(self.attention).__name__}, expected a qkv.Attention or None")
        as_mask(self.attention.mask)
        replaced = {"window": None, "prefix": 0, "normalizer": "softmax", "score_scale": None}
        for name, default in replaced.items():
            if getattr(self, name) != default:
                raise InputError(
                    f"{name} is {getattr(self, name)!r} with attention, expected {default!r}: the composition "
                    "replaces it"
                )
        if self.positions in ("alibi", "t5"):
            raise InputError(
                f"positions is {self.positions!r} with attention, expected another: give the composition this bias"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer.

        >>> DecoderConfig(layers=3, window=(8, None)).windows
        (8, None, 8)
        """
        return tuple(map(self._window_of, range(self.layers)))

    def _window_of(self, layer: int) -> int | None:
        given = self.window if isinstance(self.window, tuple) else (self.window,)
        return given[layer % len(given)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The type of each layer.

        >>> DecoderConfig(layers=3, layer_types=("gated_delta", "attention")).kinds
        ('gated_delta', 'attention', 'gated_delta')
        """
        return tuple(map(self._type_of, range(self.layers)))

    def _type_of(self, layer: int) -> str:
        given = self.layer_types if isinstance(self.layer_types, tuple) else (self.layer_types,)
        return given[layer % len(given)] or "attention"

    @staticmethod
    def gpt2(**changes: Any) -> DecoderConfig:
        """GPT-2's architecture, which is the default: learned positions, layer norms, GELU, biases, a tied output."""
        return DecoderConfig(**changes)

    @staticmethod
    def llama(**changes: Any) -> DecoderConfig:
        """Llama's architecture: rotary positions, RMS norms, SwiGLU, no biases, an untied output."""
        flavour: dict[str, Any] = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
        return DecoderConfig(**(flavour | {"bias": False, "tied": False} | changes))


@dataclass
class DecoderState:
    """The state of generation: the cache of each layer, and the number of padding tokens at the start of each item.

    >>> model = DecoderLM(DecoderConfig(vocab_size=10, d_model=8, layers=2, heads=2)).eval()
    >>> state = model.start()
    >>> with torch.no_grad():
    ...     _ = model.step(torch.tensor([[1, 2, 3]]), state)
    >>> state.seen, len(state.caches), state.caches[0].length
    (3, 2, 3)
    """

    caches: list[Cache]
    padding: Int[Tensor, " b"] | None
    seen: int = 0

    def reorder(self, rows: Int[Tensor, " b2"]) -> None:
        """Select batch items in this order, in place; an item may occur several times."""
        for cache in self.caches:
            cache.reorder(rows)
        if self.padding is not None:
            self.padding = self.padding[rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of the caches, free places included."""
        return sum(cache.nbytes for cache in self.caches)


class DecoderLM(nn.Module):
    """A causal language model (Radford et al. 2019; Touvron et al. 2023, arXiv:2302.13971).

    As in GPT-2, weights are initialised from a normal distribution with standard deviation 0.02 (the output projections
    of attention and feed-forward layers with 0.02 / √(2 · layers)), and biases with 0. With sinusoidal positions,
    embeddings are multiplied by √d_model.

    Args:
        config: see `DecoderConfig`.

    >>> import torch
    >>> model = DecoderLM(DecoderConfig(vocab_size=100, d_model=64, layers=2, heads=4))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    one_stack: ClassVar[bool] = True
    """All attention is one stack of self-attention layers, so the number of a layer says which it is."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = Learned(config.context, config.d_model) if config.positions == "learned" else None
        self.sinusoid = Sinusoidal(config.d_model) if config.positions == "sinusoidal" else None
        attention = _attention(config)
        self.blocks = nn.ModuleList(
            _block(config, layer, replace(attention, mask=_mask(config, config._window_of(layer))))
            for layer in range(config.layers)  # one after the other: a file may declare any number
        )
        last = config.place == "pre"
        self.norm = make_norm(config.norm, config.d_model, config.norm_eps, bias=config.bias) if last else nn.Identity()
        self.output = (
            None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=bool(config.output_bias))
        )
        self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.config.vocab_size

    def reset_parameters(self) -> None:
        """Initialise linear layers and embeddings as GPT-2 does; the other modules initialise themselves."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and ".composition." not in name:
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, weight in self.blocks.named_parameters():
            if name.endswith(("attention.out_proj.weight", "attention.o_proj.weight", "feed_forward.down.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * self.config.layers))

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
        """Logits of the next token at each position.

        Args:
            ids: the tokens.
            return_weights: also return the attention weights of every layer; memory is then quadratic in the length.
                They are differentiable, and include dropout in training.

        Returns:
            ``logits`` (b, n, vocab), or ``(logits, weights)`` with a tensor (b, heads, n, n) for each layer.

        >>> model = DecoderLM(DecoderConfig(vocab_size=100, d_model=64, layers=2, heads=4))
        >>> logits, weights = model(torch.tensor([[1, 2, 3]]), return_weights=True)
        >>> len(weights), weights[0].shape
        (2, torch.Size([1, 4, 3, 3]))
        """
        weights: list[Tensor] | None = [] if return_weights else None
        logits = F.linear(self.hidden(ids, weights), *self._output())
        return logits if weights is None else (logits, tuple(weights))

    if TYPE_CHECKING:
        __call__ = forward  # calling the module has the types of `forward`

    def hidden(self, ids: Int[Tensor, "b n"], weights: list[Tensor] | None = None) -> Float[Tensor, "b n d_model"]:
        """Final hidden states, the input of the output matrix; a list of `weights` gets those of each layer."""
        self._check(ids, 0)
        x = self._embedded(ids, 0, None)
        for block in self.blocks:
            if weights is None:
                x = block(x)
            else:
                x, of_layer = block(x, return_weights=True)
                weights.append(of_layer)
        out: Tensor = self.norm(x)
        return out

    def loss(self, ids: Int[Tensor, "b n"], targets: Int[Tensor, "b n"] | None = None) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats of `targets` (−100 is ignored), without holding all logits in memory.

        By default the targets are the next tokens of `ids`.
        """
        check_ids("tokens", ids, self.config.vocab_size)  # covers the targets, too; `hidden` checks the length
        if targets is None:
            if ids.shape[1] < 2:
                raise InputError(f"ids has {ids.shape[1]} token, expected at least 2: each is the target of the last")
            ids, targets = ids[:, :-1], ids[:, 1:]
        if targets.shape != ids.shape:
            raise InputError(f"targets has shape {tuple(targets.shape)}, expected that of ids, {tuple(ids.shape)}")
        x, (weight, bias) = self.hidden(ids).flatten(0, 1), self._output()
        if bias is not None:  # a bias is the weight of an input that is always 1
            x, weight = torch.cat([x, x.new_ones(len(x), 1)], 1), torch.cat([weight, bias[:, None]], 1)
        return linear_cross_entropy(x, weight, targets.flatten())

    def start(
        self, batch: int = 1, *, padding: Int[Tensor, " b"] | None = None, cache: Callable[[], Cache] | None = None
    ) -> DecoderState:
        """The state before the first token of a batch.

        Args:
            batch: number of items.
            padding: for each item, how many tokens at the left of the prompt are padding.
            cache: makes the cache of one layer that attends to keys, such as ``lambda: qkv.cache.Sinks(4, 252)``; by
                default `Full` with the size of the context, and `Latent` for latent layers. A model with a prefix needs
                `Full`. Recurrent layers have their state.

        Raises:
            InputError: for wrong padding; for a composition whose mask depends on the length of the text, such as that
                of BigBird, because the cached keys would be those of another text.

        >>> import torch
        >>> model = DecoderLM(DecoderConfig(vocab_size=100, d_model=64, layers=2, heads=4))
        >>> state = model.start()
        >>> model.step(torch.tensor([[1, 2, 3]]), state).shape
        torch.Size([1, 100])
        """
        if padding is not None:
            if not isinstance(padding, Tensor) or padding.shape != (batch,):
                raise InputError(f"padding is {kind_of(padding)}, expected a tensor of shape (batch,) = {(batch,)}")
            if bool((padding < 0).any()):
                raise InputError(f"padding is {padding.tolist()}, expected numbers of at least 0")
        self._check_mask(padding)
        if cache is not None and not callable(cache):
            raise InputError(f"cache is {cache!r}, expected a function such as lambda: qkv.cache.Full(64)")
        return DecoderState([self._cache(block.attention, cache) for block in self.blocks], padding)

    def _cache(self, layer: Tensor | nn.Module, make: Callable[[], Cache] | None) -> Cache:
        """The cache of a layer."""
        if isinstance(layer, RecurrentAttention):
            return Recurrent()
        if make is not None:
            return make()
        return (Latent if isinstance(layer, LatentAttention) else Full)(self.config.context)

    def _check_mask(self, padding: Tensor | None) -> None:
        """Raise `InputError` if the mask would change from one step to the next."""
        mask = _mask(self.config, None)
        if mask.band is not None:  # distances alone never change, of windows either
            return
        if depends_on_length(mask, self.config.context, self.config.heads):
            raise InputError(
                "attention has a mask that changes with the number of tokens, so a cache would hold keys of another "
                "text; expected a mask of positions alone, or logits of the whole text at each step: model(ids)[:, -1]"
            )
        moved = padding is not None and bool((padding > 0).any())
        if moved and depends_on_start(mask, self.config.context, self.config.heads):
            raise InputError(
                f"padding is {padding}, expected none: the mask, such as that of a prefix, depends on positions from "
                "the first token on"
            )

    @torch.no_grad()
    def step(
        self, tokens: Int[Tensor, "b n"], state: DecoderState, *, every: bool = False
    ) -> Float[Tensor, "b *n vocab"]:
        """Logits of the next token after `tokens`, which follow the tokens in `state`; or after `every` one of them.

        If the model has a prefix, the first call must contain all of it.
        """
        self._check(tokens, state.seen)
        if state.seen == 0 and tokens.shape[1] < self.config.prefix:
            raise InputError(
                f"tokens has {tokens.shape[1]} tokens in the first step, expected at least the {self.config.prefix} of "
                "the prefix, which all attend to one another"
            )
        if any(cache.seen != state.seen for cache in state.caches):
            raise InputError("state belongs to a step that failed, expected a new state: model.start()")
        positions = mask = None
        if state.padding is not None:
            if state.padding.shape[0] != len(tokens):
                raise InputError(f"tokens has {len(tokens)} items, but the state has {len(state.padding)}")
            total = state.seen + tokens.shape[1]
            if total <= int(state.padding.max()):
                raise InputError(
                    f"padding is {state.padding.tolist()}, expected fewer than the {total} tokens so far: "
                    "each item needs at least one token that is not padding"
                )
            padding, places = state.padding.to(tokens.device)[:, None], torch.arange(total, device=tokens.device)
            positions = (places[state.seen :] - padding).clamp(min=0)
            mask = Dense((places >= padding)[:, None, None])
        x = self._embedded(tokens, state.seen, positions)
        for block, cache in zip(self.blocks, state.caches, strict=True):
            x = block(x, mask=mask, positions=positions, cache=cache)
        state.seen += tokens.shape[1]
        return F.linear(self.norm(x if every else x[:, -1]), *self._output())

    def _check(self, ids: Tensor, seen: int) -> None:
        check_ids("tokens", ids, self.config.vocab_size)
        total = seen + ids.shape[1]
        if self.positions is not None and total > self.config.context:
            raise InputError(
                f"tokens has {total:,} tokens in all, expected at most {self.config.context:,}, the learned positions"
            )

    def _embedded(self, ids: Tensor, seen: int, positions: Tensor | None) -> Tensor:
        x: Tensor = self.embedding(ids)
        stop = seen + ids.shape[1]
        if self.positions is not None:
            x = x + (self.positions.span(seen, stop) if positions is None else self.positions(positions))
        elif self.sinusoid is not None:
            place = torch.arange(seen, stop, device=ids.device) if positions is None else positions
            x = x * math.sqrt(self.config.d_model) + self.sinusoid(place).to(x)
        dropped: Tensor = self.dropout(x)
        return dropped

    def _output(self) -> tuple[Tensor, Tensor | None]:
        """The output matrix, and its bias or None."""
        return (self.embedding.weight, None) if self.output is None else (self.output.weight, self.output.bias)


def _attention(config: DecoderConfig) -> Attention:
    """The attention of all layers; they share its learned bias, as in T5. A composition of one's own is copied."""
    if config.attention is not None:
        own = config.attention
        return replace(own, dropout_p=own.dropout_p or config.dropout)
    score = None if config.score_scale is None else Dot(config.score_scale)
    bias: Bias | None = None
    if config.positions == "alibi":
        bias = ALiBi()
    elif config.positions == "t5":
        table = nn.Parameter(torch.empty(32, config.heads))
        nn.init.normal_(table, std=0.02)
        bias = T5Bias(table, bidirectional=False)
    normalizer = NORMALIZERS[config.normalizer]()
    return Attention(bias=bias, score=score, normalizer=normalizer, dropout_p=config.dropout)


def _mask(config: DecoderConfig, window: int | None) -> Mask:
    """The mask of a layer with this window."""
    if config.attention is not None:
        return causal(as_mask(config.attention.mask))
    mask: Mask = Causal() if window is None else Window(window)
    return mask | Prefix(config.prefix) if config.prefix else mask


def rotary_of(config: DecoderConfig, dim: int | None = None) -> Rotary | None:
    """The rotary embedding of a model's queries and keys, or of so many of their dimensions."""
    if config.positions != "rotary":
        return None
    scaling = None
    if config.rotary_scaling is not None:
        scaling = SCALINGS[config.rotary_scaling](config, config.rotary_original or config.context)
    dim = config.head_dim or config.d_model // config.heads if dim is None else dim
    return Rotary(dim, config.rotary_base, config.rotary_interleaved, scaling)


def _layer(config: DecoderConfig, layer: int, attention: Attention) -> nn.Module:
    """The attention of a layer."""
    kind, sizes = config._type_of(layer), (config.d_model, config.heads)
    head_dim = config.head_dim or config.d_model // config.heads
    bias = config.bias if config.attention_bias is None else config.attention_bias
    if kind in RECURRENT:
        rotary = rotary_of(config) if kind == "retention" else None
        return RecurrentAttention(*sizes, head_dim=config.head_dim, rotary=rotary, **RECURRENT[kind])
    if kind == "linear":
        return LinearAttention(*sizes, kv_heads=config.kv_heads, bias=bias)
    attention = attention if config.attention is None else copy.deepcopy(attention)
    if kind == "differential":
        rotary = rotary_of(config, config.d_model // (2 * config.heads))
        return DifferentialAttention(*sizes, layer=layer, attention=attention, rotary=rotary)
    if kind == "latent":
        rotary = rotary_of(config, max(1, head_dim // 4) * 2)
        assert rotary is not None
        latent = config.latent or 4 * head_dim
        return LatentAttention(*sizes, latent=latent, head_dim=head_dim, rotary=rotary, attention=attention)
    return (ForgettingAttention if kind == "forgetting" else MultiHeadAttention)(
        *sizes,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        attention=attention,
        rotary=rotary_of(config),
        qk_norm=config.qk_norm,
        gate=config.gate,  # type: ignore[arg-type]  # it checks
        sink="logit" if config.sink else "key" if config.key_bias else None,
        bias=bias,
    )


def _block(config: DecoderConfig, layer: int, attention: Attention) -> TransformerBlock:
    return TransformerBlock(
        _layer(config, layer, attention),  # type: ignore[arg-type]  # all are called alike
        FeedForward(config.d_model, config.d_hidden, activation=config.activation, bias=config.bias),  # type: ignore[arg-type]
        norm=config.norm,  # type: ignore[arg-type]
        place=config.place,  # type: ignore[arg-type]
        eps=config.norm_eps,
        norm_bias=config.bias,
        dropout=config.dropout,
    )
