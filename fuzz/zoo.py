"""Runs of models of other libraries: torch's own layers, x-transformers, timm, diffusers, open_clip; and of models of
transformers inside what others put around them: PEFT's adapters, the hooks of accelerate, and nnsight.

Each runs as it is, under `qkv.watch` and under `qkv.profile`. The outputs must be the same bit for bit, and the weights
must be those of what the model gives to torch's functions, in float64.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hf_models as hf
import qkv

F = nn.functional
CLOSE = 1e-4


class Weights(TorchFunctionMode):
    """Collects the weights of what torch's functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[np.ndarray] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (F.softmax, torch.softmax, Tensor.softmax) and result.ndim == 4:
            self._add(result)
        elif func is F.scaled_dot_product_attention:
            self._add(_of_sdpa(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self._add(func(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})[1])
        return result

    def _add(self, weights: Tensor) -> None:
        self.found.append(weights.detach().double().numpy())


def _of_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1) if enable_gqa else key
    scores = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


Made = tuple[Any, ...]
"""A model, its inputs, and how to run it if not by a call."""


def _of_torch(random: np.random.Generator) -> Made:
    heads, batch, n, width = int(random.choice([1, 2, 4])), int(random.integers(1, 4)), int(random.integers(2, 12)), 16
    options: Any = {"batch_first": True, "norm_first": bool(random.integers(2)), "bias": bool(random.integers(2))}
    x = torch.randn(batch, n, width)
    causal = torch.ones(n, n, dtype=torch.bool).triu(1) if random.integers(2) else None
    if random.integers(2):
        layer = nn.TransformerDecoderLayer(width, heads, 32, **options)
        memory = torch.randn(batch, int(random.integers(1, 9)), width)
        return nn.TransformerDecoder(layer, 2), {"tgt": x, "memory": memory, "tgt_mask": causal}
    nested = bool(random.integers(2)) and not options["norm_first"] and options["bias"] and heads > 1
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, heads, 32, **options), 2, enable_nested_tensor=nested
    )
    return encoder, {"src": x, "mask": causal}


def _of_x_transformers(random: np.random.Generator) -> Made:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    options = {
        name: True
        for name in ("rotary_pos_emb", "alibi_pos_bias", "attn_qk_norm", "attn_gate_values", "attn_one_kv_head")
        if random.random() < 0.3
    }  # fmt: skip
    kind = Decoder if random.integers(2) else Encoder
    layers = kind(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=bool(random.integers(2)), **options)
    ids = torch.randint(50, (int(random.integers(1, 4)), int(random.integers(2, 12))))
    return TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers), {"x": ids}


def _of_timm(random: np.random.Generator) -> Made:
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    x = torch.randn(int(random.integers(1, 4)), 3, 16, 16)
    shared: Any = {"img_size": 16, "num_classes": 3}
    if random.integers(2):
        return SwinTransformer(**shared, patch_size=2, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,)), {
            "x": x
        }
    options: Any = {"qk_norm": bool(random.integers(2)), "reg_tokens": int(random.integers(3))}
    return VisionTransformer(**shared, patch_size=4, embed_dim=16, depth=2, num_heads=2, **options), {"x": x}


def _of_diffusers(random: np.random.Generator) -> Made:
    from diffusers import UNet2DConditionModel

    blocks: Any = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    batch, size = int(random.integers(1, 3)), int(random.choice([4, 8]))
    model = UNet2DConditionModel(
        sample_size=size, block_out_channels=(16, 16), cross_attention_dim=8, norm_num_groups=4, layers_per_block=1,
        attention_head_dim=int(random.choice([2, 4])), **blocks,
    )  # fmt: skip
    states = torch.randn(batch, int(random.integers(1, 7)), 8)
    inputs = {"sample": torch.randn(batch, 4, size, size), "timestep": torch.tensor(3), "encoder_hidden_states": states}
    return model, inputs


def _of_open_clip(random: np.random.Generator) -> Made:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=4, image_size=16)
    text = CLIPTextCfg(context_length=8, vocab_size=50, width=32, heads=int(random.choice([2, 4])), layers=2)
    batch = int(random.integers(1, 4))
    inputs = {"image": torch.randn(batch, 3, 16, 16), "text": torch.randint(1, 50, (batch, 8))}
    return CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text), inputs


def _of_transformers(random: np.random.Generator) -> tuple[nn.Module, dict[str, Tensor]]:
    name, way = str(random.choice(["llama", "gpt2", "gemma2", "opt"])), [None, "eager"][random.integers(2)]
    model = hf.build(name, way, suffix="LMHeadModel" if name == "gpt2" else "ForCausalLM")
    return model, {"input_ids": torch.randint(3, 96, (int(random.integers(1, 4)), int(random.integers(2, 12))))}


def _of_peft(random: np.random.Generator) -> Made:
    import peft

    model, inputs = _of_transformers(random)
    text: Any = {"task_type": "CAUSAL_LM"}
    if random.integers(4) == 0:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, **text)), inputs
    adapter = peft.LoraConfig(
        r=2, target_modules="all-linear", init_lora_weights=False, use_dora=bool(random.integers(2)), **text
    )
    made = peft.get_peft_model(model, adapter)
    state = random.choice(["on", "off", "merged", "another"])
    if state == "off":
        made.base_model.disable_adapter_layers()
    elif state == "merged":
        made.merge_adapter()
    elif state == "another":
        made.add_adapter("other", peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, **text))
        made.set_adapter("other")
    return made, inputs


def _of_accelerate(random: np.random.Generator) -> Made:
    import accelerate
    from accelerate import hooks

    model, inputs = _of_transformers(random)
    way = random.choice(["dispatched", "offloaded", "one hook", "two hooks", "hooks of layers"])
    if way == "dispatched":
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    elif way == "offloaded":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif way == "hooks of layers":
        hooks.attach_align_device_hook(model, execution_device="cpu")
    else:
        made = hooks.AlignDevicesHook("cpu", io_same_device=True)
        hooks.add_hook_to_module(model, made)
        if way == "two hooks":
            hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu"), append=True)
    return model, inputs


def _of_nnsight(random: np.random.Generator) -> Made:
    from nnsight import NNsight

    model, inputs = _of_transformers(random)
    wrapped = NNsight(model)

    def traced() -> Any:
        with wrapped.trace(**inputs):
            out = wrapped.output.save()
        return out

    return (wrapped if random.integers(2) else model), inputs, *([traced] if random.integers(2) else [])


ZOO: dict[str, Callable[[np.random.Generator], Made]] = {
    "torch": _of_torch, "x_transformers": _of_x_transformers, "timm": _of_timm, "diffusers": _of_diffusers,
    "open_clip": _of_open_clip, "peft": _of_peft, "accelerate": _of_accelerate, "nnsight": _of_nnsight,
}  # fmt: skip


def missing() -> dict[str, str]:
    """The libraries that cannot be imported, and why."""
    found = {}
    for name in ZOO:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # torchvision for another build of torch
            found[name] = str(error).splitlines()[0]
    return found


@torch.no_grad()
def mismatch(library: str, seed: int, number: int) -> str | None:
    """What is wrong with a run of a model of a library; None if all is right."""
    random = np.random.default_rng([seed, number])
    torch.manual_seed(int(random.integers(2**31)))
    made, inputs, *runs = ZOO[library](random)
    model = getattr(made, "_module", made).eval()  # of nnsight
    for p in model.parameters():
        if not p.is_meta:  # offloaded
            p.copy_(p + 0.1 * torch.randn(p.shape))
    run = runs[0] if runs else lambda: model(**inputs)
    want = run()
    with qkv.watch(made) as watched:
        got = run()
    if not all(torch.equal(a, b) for a, b in zip(_tensors(want), _tensors(got), strict=True)):
        return f"{library}: the run differs from the same without qkv.watch"
    with Weights() as oracle:
        model(**inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "hidden states of")  # of layers with different numbers of tokens
            profiles = [watched.profile(), qkv.profile(made, inputs, probe=False, progress=False)]
    except (UserWarning, qkv.errors.InputError) as error:
        return f"{library}: {error}"
    for profile in profiles:
        rows = [x for data in profile.groups.values() for x in data["weights"].values.swapaxes(0, 1)]
        if len(rows) != len(oracle.found):
            return f"{library}: {len(rows)} layers, expected {len(oracle.found)}"
        for weights in oracle.found:
            near = [i for i, x in enumerate(rows) if x.size == weights.size]
            errors = {i: np.abs(rows[i] - weights.reshape(rows[i].shape)).max() for i in near}
            best = min(errors, key=errors.__getitem__, default=None)
            if best is None or not errors[best] < CLOSE:
                return f"{library}: weights of shape {weights.shape} differ"
            rows.pop(best)
    return None


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    values = (
        x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else getattr(x, "__dict__", {}).values()
    )
    return [y for one in values for y in _tensors(one)]
