"""Any Hugging Face model on qkv's kernels: one more name of an attention implementation."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.huggingface.attention import call_of, configurations, routes
from qkv.huggingface.masks import lazy_mask
from qkv.kernels import opaque, serve

NAME = "qkv"  # transformers reads meaning into names that contain "sdpa", "flash" or "/"
Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Make the attention implementation "qkv" known to transformers; again and again if you like.

    After it ``model.set_attn_implementation("qkv")``, or ``from_pretrained(..., attn_implementation="qkv")``, runs
    every model whose attention goes through transformers' `AttentionInterface` on qkv's kernels: forward and backward,
    `generate` with any cache, padding, windows, sinks, soft caps, position biases, cross-attention, dropout. A query
    that may see no key (such as one of padding) gets 0, where other implementations differ among themselves.
    Transformers only warns where a model does not use the interface; `use` refuses.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lazy_mask)  # without it masks, windows too, would be lost silently


def use(model: Model) -> Model:
    """`model`, from now on with its attention on qkv's kernels.

    What decides is the code of its modules, before anything runs: a model is refused if none of them asks
    transformers' interface for its attention. Some models have a part that does not beside parts that do, such as the
    pooling head of SigLIP; that part goes on as before. `model.set_attn_implementation("sdpa")` goes back.

    Args:
        model: any Hugging Face model, or a module that contains some.

    Returns:
        the same object.

    Raises:
        InputError: if no attention of the model goes through transformers' attention interface; it is then unchanged.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = use(LlamaModel(LlamaConfig(vocab_size=50, **sizes)))
    >>> model.config._attn_implementation
    'qkv'
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a Hugging Face model")
    if not any(map(routes, model.modules())):
        raise InputError(
            f"{type(model).__name__} does not send its attention through transformers' attention interface "
            "(AttentionInterface), so qkv cannot compute it; expected a model that does, such as GPT-2, Llama or BERT"
        )
    register()
    setter: Any = getattr(model, "set_attn_implementation", None)  # a module that contains models has none
    if setter is not None:
        setter(NAME)
    for config in configurations(model):  # it misses copies that modules hold of it, such as those of ViT-MAE's decoder
        config._attn_implementation_internal = NAME
    return model


@opaque  # a compiler would trace the choice of kernels anew for every length of a cache
def attend(
    module: nn.Module,
    query: Float[Tensor, "b h nq d"],
    key: Float[Tensor, "b hkv nk d"],
    value: Float[Tensor, "b hkv nk dv"],
    attention_mask: Any,
    **arguments: Any,
) -> tuple[Float[Tensor, "b nq h dv"], Float[Tensor, "b h nq nk"] | None]:
    """The attention function that transformers calls; the weights, too, if the model is asked for them."""
    device = query.device.type
    if torch.is_autocast_enabled(device):  # what it does to torch's own attention: rotary leaves q and k in float32
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # kernels know where they need float32
        call, _ = call_of(module, type(module).__name__, query, key, value, attention_mask, **arguments)
        result = serve(call, weights=bool(arguments.get("output_attentions")))
    return result.out.transpose(1, 2).contiguous(), result.weights
