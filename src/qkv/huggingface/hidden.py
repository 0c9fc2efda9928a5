"""The hidden maps of linear attention layers: the weights that unrolling their recurrence gives. (Written for 5.24.)

No step of such a layer computes a weight, but its output is linear in the values: out = W v. `qkv.linear_attend` with a
unit matrix as values gives W from the queries, keys and gates that the model passes to its own function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv.errors import InputError
from qkv.linear import linear_attend
from qkv.models.generation import evaluation_mode

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Names of the functions in transformers' files of models: Gated DeltaNet and Kimi Linear."""
EPSILON = 1e-6  # of the length of queries and keys, in both


def hidden_maps(model: nn.Module, /, **inputs: Any) -> dict[int, Float[Tensor, "b h n n"]]:
    """Run a Hugging Face model once, and return the weights of its layers of linear attention with the delta rule.

    A weight says how much of the value of a key is in the output of a query, before the layer's norm and gate. It has a
    sign, and rows have no fixed sum. Layers of Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear are known. Each map is
    compared with the layer's own output. Memory: 4 b h n² bytes for each layer.

    Args:
        model: the model. It runs without gradients, in evaluation mode, and is left as it was.
        inputs: what is passed to it, such as ``input_ids``. Nothing else may run the model meanwhile.

    Returns:
        The maps (b, h, n, n), queries down and keys across, on the CPU in float32, by the model's number of the layer.

    Raises:
        InputError: if no layer is of a known kind, the text is continued or packed, or a map does not give the layer's
            output.

    Source: as hidden attention, for state space models: Ali et al. 2024, arXiv:2403.01590.

    >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    >>> linear = {f"linear_{of}": 2 for of in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    >>> sizes |= {"vocab_size": 9, "num_hidden_layers": 4, "num_experts": 0, "intermediate_size": 8}
    >>> config = Qwen3NextConfig(**sizes, **linear)
    >>> maps = hidden_maps(Qwen3NextForCausalLM(config), input_ids=torch.arange(9)[None])
    >>> {layer: tuple(weights.shape) for layer, weights in maps.items()}  # layer 3 is softmax attention
    {0: (1, 2, 9, 9), 1: (1, 2, 9, 9), 2: (1, 2, 9, 9)}
    """
    maps: dict[int, Tensor] = {}
    running: list[nn.Module] = []

    def measured(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor, most: float) -> None:
        index = int(running[-1].layer_idx)  # type: ignore[arg-type]
        if index in maps:
            raise InputError(f"model calls the delta rule of layer {index} more than once, expected one call")
        unit = torch.eye(v.shape[2], device=v.device).expand(*v.shape[:3], -1)
        maps[index] = linear_attend(q, k, unit, features=_same, normalize=False, decay=decay, beta=beta)
        check(f"layer {index}", maps[index] @ v, out, most)
        maps[index] = maps[index].cpu()

    def ended(*_: object) -> None:
        running.pop()

    with ExitStack() as stack, evaluation_mode(model), torch.no_grad():
        for layer in linear_layers(model).values():
            stack.callback(layer.register_forward_pre_hook(lambda module, _: running.append(module)).remove)
            stack.callback(layer.register_forward_hook(ended, always_call=True).remove)
        stack.enter_context(listening(model, measured))
        model(**{"use_cache": False} | inputs)
    if not maps:
        raise InputError(
            f"model is {type(model).__name__}, of whose layers none is linear attention that is known, expected Gated "
            "DeltaNet or Kimi Delta Attention of transformers"
        )
    return maps


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a Hugging Face model that compute the delta rule, by name."""
    found = {}
    for name, module in model.named_modules():
        names = vars(sys.modules[type(module).__module__])
        kind = type(module).__name__
        if isinstance(getattr(module, "layer_idx", None), int) and "Delta" in kind and any(x in names for x in RULES):
            found[name] = module
    return found


@contextmanager
def listening(model: nn.Module, on_call: Callable[..., None]) -> Iterator[None]:
    """Inside, each call of the delta rule by a Hugging Face model is reported.

    `on_call` gets queries, keys and values (b, h, n, …), decay, β, the output, and the largest difference that another
    computation of the output may have.

    Raises:
        InputError: inside, if the text is continued or packed.
    """
    files = {type(x).__module__: vars(sys.modules[type(x).__module__]) for x in linear_layers(model).values()}
    found = {(file, name): names[name] for file, names in files.items() for name in RULES if name in names}

    def reporting(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
            result = rule(query, key, value, g=g, beta=beta, **options)
            if options.get("initial_state") is not None or options.get("cu_seqlens") is not None:
                raise InputError("inputs continue a cache, or pack several texts into one, expected whole texts")
            q, k, v, decay, rate, out = (x.transpose(1, 2).float() for x in (query, key, value, g, beta, result[0]))
            if options.get("use_qk_l2norm_in_kernel", False):
                q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
            q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
            most = max(1e-4, 4 * torch.finfo(result[0].dtype).eps) * float(out.abs().max())
            on_call(q * q.shape[3] ** -0.5, k, v, decay, rate, out, most)
            return result

        return run

    with ExitStack() as stack:
        for (file, name), rule in found.items():
            stack.enter_context(patch.dict(files[file], {name: reporting(rule)}))
        yield


def check(place: str, got: Tensor, want: Tensor, most: float) -> None:
    """Raise `InputError` if the output of a known rule is not that of the layer at `place`."""
    error = (got - want).abs().max()
    if not bool(error <= most):
        raise InputError(
            f"model does not compute the delta rule that is known in {place}: the output of its map is "
            f"{float(error):.1g} off, expected at most {most:.1g}"
        )


def _same(x: Tensor) -> Tensor:
    return x
