"""Convert attention layers and blocks from and to torch.nn, with the same weights and outputs."""

from __future__ import annotations

import re
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.nn import functional as F

from qkv.attention import Attention
from qkv.errors import InputError
from qkv.nn.block import FeedForward, TransformerBlock
from qkv.nn.multi_head import MultiHeadAttention
from qkv.normalizers import Softmax, SumToOne
from qkv.scores import Dot

M = TypeVar("M", bound=nn.Module)
ACTIVATIONS: dict[Any, str] = {F.relu: "relu", F.gelu: "gelu"}
BLOCK = {
    "feed_forward.up": "linear1", "feed_forward.down": "linear2", "attention_norm": "norm1",
    "feed_forward_norm": "norm2",
}  # fmt: skip
"""Layers of a `TransformerBlock`, and of torch's, with the same weights."""


@overload
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer) -> TransformerBlock: ...
def from_torch(module: nn.MultiheadAttention | nn.TransformerEncoderLayer) -> MultiHeadAttention | TransformerBlock:
    """Convert a torch module to `MultiHeadAttention` or `TransformerBlock`, with copies of its weights.

    The result is batch-first, regardless of `batch_first`. Masks are True where a query may attend; torch's boolean
    masks have the opposite meaning (`qkv.masks.from_multihead`). ``add_zero_attn`` becomes a softmax off by one.
    Outputs are equal in evaluation mode; in training, qkv has no dropout inside the feed-forward layer.

    Raises:
        InputError: for what qkv does not support: ``add_bias_kv``, kdim ≠ vdim, other activations, an own forward.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True).eval()
    >>> x = torch.randn(2, 10, 64)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x, need_weights=False)[0], atol=1e-5)
    True
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        return _block_from_torch(module)
    if isinstance(module, nn.MultiheadAttention):
        return _attention_from_torch(module)
    raise InputError(
        f"module is {type(module).__name__}, expected torch.nn.MultiheadAttention or torch.nn.TransformerEncoderLayer"
    )


@overload
def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention: ...
@overload
def to_torch(module: TransformerBlock) -> nn.TransformerEncoderLayer: ...
def to_torch(module: MultiHeadAttention | TransformerBlock) -> nn.MultiheadAttention | nn.TransformerEncoderLayer:
    """Convert a qkv module to its torch.nn counterpart, batch-first, with copies of its weights.

    The mask of the composition is not converted: torch takes a mask with each call (`qkv.masks.to_multihead`).

    Raises:
        InputError: for settings that the torch module does not support, by name.

    >>> ours = MultiHeadAttention(64, 8)
    >>> type(to_torch(ours)).__name__
    'MultiheadAttention'
    """
    if isinstance(module, TransformerBlock):
        return _block_to_torch(module)
    if isinstance(module, MultiHeadAttention):
        return _attention_to_torch(module)
    raise InputError(f"module is {type(module).__name__}, expected qkv's MultiHeadAttention or TransformerBlock")


def _check_own(module: nn.Module, base: type[nn.Module], *methods: str) -> None:
    """Refuse a subclass, or an object, that computes something else than `base`."""
    for name in ("forward", *methods):
        if name in vars(module) or getattr(type(module), name) is not getattr(base, name):
            raise InputError(f"module is {type(module).__name__} with its own {name}, expected that of {base.__name__}")


def _attention_from_torch(theirs: nn.MultiheadAttention) -> MultiHeadAttention:
    _check_own(theirs, nn.MultiheadAttention)
    if theirs.bias_k is not None:
        raise InputError(
            "module has add_bias_kv, a learned key with a learned value, which MultiHeadAttention does not support"
        )
    if theirs.kdim != theirs.vdim:
        raise InputError(
            f"module has kdim {theirs.kdim} and vdim {theirs.vdim}, expected the same dimension for keys and values"
        )
    fused = theirs.in_proj_weight is not None
    normalizer = Softmax(sink=0.0) if theirs.add_zero_attn else None
    ours = MultiHeadAttention(
        theirs.embed_dim,
        theirs.num_heads,
        d_context=theirs.kdim,
        attention=Attention(normalizer=normalizer, dropout_p=theirs.dropout),
        bias=theirs.in_proj_bias is not None,
        fused=fused,
    )
    weights = {re.sub(r"proj_(weight|bias)", r"proj.\1", name): x for name, x in theirs.state_dict().items()}
    if not fused and "in_proj.bias" in weights:
        biases = weights.pop("in_proj.bias").chunk(3)
        weights |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    return _like(ours, theirs, weights)


def _attention_to_torch(ours: MultiHeadAttention) -> nn.MultiheadAttention:
    if type(ours) is not MultiHeadAttention:
        raise InputError(f"module is {type(ours).__name__}, which has no counterpart in torch.nn")
    attention = ours.composition.attention
    normalizer = attention.normalizer or Softmax()
    plain = isinstance(normalizer, SumToOne) and normalizer.has_lse and normalizer.temperature == 1
    sink = normalizer.sink if isinstance(normalizer, SumToOne) else None
    off_by_one = not isinstance(sink, torch.Tensor) and sink == 0.0
    plain = plain and (sink is None or off_by_one) and getattr(normalizer, "key", None) is None
    for feature, present in {
        "grouped heads": ours.kv_heads != ours.heads,
        "a gate": ours.gate is not None,
        "rotary positions": ours.rotary is not None,
        "norms of queries and keys": ours.q_norm is not None,
        "a head dimension other than d_model / heads": {ours.head_dim, ours.v_head_dim} != {ours.d_model // ours.heads},
        "biases of scores": attention.bias is not None,
        "another score than Dot()": attention.score not in (None, Dot()),
        "another normalizer than softmax, plain or off by one": not plain,
    }.items():
        if present:
            raise InputError(f"module has {feature}, which torch.nn.MultiheadAttention does not support")
    context = {} if ours.fused else {"kdim": ours.d_context, "vdim": ours.d_context}
    theirs = nn.MultiheadAttention(
        ours.d_model,
        ours.heads,
        dropout=attention.dropout_p,
        bias=ours.out_proj.bias is not None,
        add_zero_attn=off_by_one,
        batch_first=True,
        **context,
    )
    weights = {re.sub(r"^(in|q|k|v)_proj\.", r"\1_proj_", name): x for name, x in ours.state_dict().items()}
    for end in ("weight", "bias"):
        separate = [f"{name}_proj_{end}" for name in "qkv"]
        if separate[0] in weights and (end == "bias" or theirs.in_proj_weight is not None):  # torch fuses equal widths
            weights[f"in_proj_{end}"] = torch.cat([weights.pop(name) for name in separate])
    return _like(theirs, ours, weights)


def _block_from_torch(theirs: nn.TransformerEncoderLayer) -> TransformerBlock:
    _check_own(theirs, nn.TransformerEncoderLayer, "_sa_block", "_ff_block")
    if theirs.dropout1.p != theirs.dropout2.p:
        found = f"dropout1 {theirs.dropout1.p} and dropout2 {theirs.dropout2.p}"
        raise InputError(f"module has {found}, expected equal: TransformerBlock has one dropout")
    activation = _activation(theirs.activation)
    bias = theirs.linear1.bias is not None
    d_model, d_hidden = theirs.linear1.in_features, theirs.linear1.out_features
    feed_forward = FeedForward(d_model, d_hidden, activation=activation, bias=bias)  # type: ignore[arg-type]
    ours = TransformerBlock(
        _attention_from_torch(theirs.self_attn),
        feed_forward,
        place="pre" if theirs.norm_first else "post",
        eps=theirs.norm1.eps,
        norm_bias=bias,
        dropout=theirs.dropout1.p,
    )
    _like(ours, theirs)
    for own, other in BLOCK.items():
        _copy(theirs.get_submodule(other), ours.get_submodule(own))
    return ours


def _block_to_torch(ours: TransformerBlock) -> nn.TransformerEncoderLayer:
    _check_own(ours, TransformerBlock)
    layer = ours.feed_forward
    if ours.cross is not None:
        raise InputError("module has cross-attention, expected an encoder block without it")
    if not isinstance(layer, FeedForward) or layer.activation not in ACTIVATIONS.values():
        raise InputError("module has a feed-forward layer that is not FeedForward with 'relu' or 'gelu'")
    norm = ours.attention_norm
    if not isinstance(norm, nn.LayerNorm):
        raise InputError(f"module has {type(norm).__name__}, but torch.nn.TransformerEncoderLayer has LayerNorm")
    bias = layer.up.bias is not None
    if len({bias, norm.bias is not None, ours.attention.out_proj.bias is not None}) > 1:
        raise InputError("module has biases in some of its layers, expected biases in all or in none")
    theirs = nn.TransformerEncoderLayer(
        ours.attention.d_model,
        ours.attention.heads,
        layer.up.out_features,
        dropout=ours.dropout,
        activation=next(f for f, name in ACTIVATIONS.items() if name == layer.activation),
        layer_norm_eps=norm.eps,
        batch_first=True,
        norm_first=ours.place == "pre",
        bias=bias,
    )
    _like(theirs, ours)
    theirs.self_attn = _attention_to_torch(ours.attention)
    for own, other in BLOCK.items():
        _copy(ours.get_submodule(own), theirs.get_submodule(other))
    return theirs


def _copy(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(source.state_dict())
    if isinstance(source, nn.LayerNorm) and isinstance(target, nn.LayerNorm):
        target.eps = source.eps


def _activation(function: Any) -> str:
    if function in ACTIVATIONS:
        return ACTIVATIONS[function]
    for kind, name in ((nn.ReLU, "relu"), (nn.GELU, "gelu")):
        if isinstance(function, kind) and getattr(function, "approximate", "none") == "none":
            return name
    raise InputError(f"module has the activation {function!r}, expected relu or gelu")


def _like(module: M, other: nn.Module, weights: dict[str, torch.Tensor] | None = None) -> M:
    """The module with the dtype, device and training mode of another, and with these weights if they are given."""
    first = next(other.parameters())
    module.to(first.device, first.dtype).train(other.training)
    if weights is not None:
        module.load_state_dict(weights)
    return module
