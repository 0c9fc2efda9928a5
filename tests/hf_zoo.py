"""Tiny models of every row of hf_zoo_table: built, fed, and their own weights as the oracle of the profiler's.

Nothing is downloaded; a model takes some hundredths of a second.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import hf_models
from hf_zoo_table import ALL, DROP, IMAGE, LENGTH, SAMPLES, SMALL, TARGET, VOCABULARY, Row
from qkv.profiler.capture.inputs import real_tokens, sequences_of
from qkv.profiler.capture.observe import Observer, Record, observe, unobserved

PADDED = 5  # tokens of padding in the second item of a padded batch
RETURN_SCORES = ("squeezebert", "prophetnet")  # they return scores before the softmax as their attentions
DISAGREE = ("falcon_alibi",)  # its eager implementation differs from its default one
RETURN_MEANS = ("wavlm",)  # over heads, repeated for each


def small(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make a tiny configuration of a class: `SMALL` wherever it has the name, then `settings`."""
    known = kind().to_dict()
    made = {name: value for name, value in SMALL.items() if name in known}
    for name, given in settings.items():
        if given is DROP:
            made.pop(name, None)
        elif name not in getattr(kind, "sub_configs", {}):
            made[name] = given
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(kind(), name)
        if inner is not None and settings.get(name) is not DROP:
            made[name] = small(type(inner), settings.get(name, {}))
            if "model_type" in known.get(name, {}):
                made[name]["model_type"] = known[name]["model_type"]
    return made


def build(name: str, implementation: str | None = None) -> Any:
    """The model, in evaluation mode, its weights so large that attention is far from uniform.

    Args:
        name: a row of the table.
        implementation: of attention, such as "eager"; the architecture's own default if None.
    """
    row = ALL[name]
    transformers.utils.logging.set_verbosity_error()  # advice on token ids that these configurations do not have
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = _special(name, implementation) or _made(row, implementation)
    hf_models.enliven(model)
    return model.eval()


def _made(row: Row, implementation: str | None) -> Any:
    package = f"transformers.models.{row.family}"
    try:
        configuration = importlib.import_module(f"{package}.configuration_{row.family}")
    except ModuleNotFoundError:
        configuration = importlib.import_module(package)
    kind = getattr(configuration, row.classes + "Config")
    config = kind(**small(kind, row.settings), attn_implementation=implementation)
    return getattr(importlib.import_module(package), row.classes + row.suffix)(config)


def _special(name: str, implementation: str | None) -> Any:
    """Models whose configuration contains other configurations."""
    if name == "detr":
        from transformers import DetrConfig, DetrModel, ResNetConfig

        sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
        backbone = ResNetConfig(**sizes, out_features=["stage2"])
        settings = small(DetrConfig, ALL[name].settings | {"backbone_config": DROP})
        settings |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        return DetrModel(DetrConfig(**settings, backbone_config=backbone, attn_implementation=implementation))
    if name != "encoder_decoder(bert2gpt2)":
        return None
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, GPT2Config

    encoder = BertConfig(**small(BertConfig, {}))
    decoder = GPT2Config(**small(GPT2Config, {"add_cross_attention": True, "is_decoder": True}))
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config._attn_implementation = implementation
    return EncoderDecoderModel(config)


def inputs(name: str, *, padded: bool = False) -> dict[str, Tensor]:
    """The arguments of the forward; with padding in the second item if `padded` and the row has a side for it."""
    row = ALL[name]
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> Tensor:
        return torch.randint(5, VOCABULARY, (2, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = {}
    if row.reads in ("text", "texts", "both", "described", "patches", "tiles"):
        given["input_ids"] = tokens(LENGTH)
    if row.reads in ("texts", "mel", "speech", "wave", "heard"):
        given["decoder_input_ids"] = tokens(TARGET)
    size = row.settings.get("image_size", 16)
    size = size[0] if isinstance(size, list) else size
    match row.reads:
        case "image" | "both" | "points":
            given["pixel_values"] = noise(2, 3, size, size)
        case "video" | "clip":
            given["pixel_values" if row.reads == "video" else "pixel_values_videos"] = noise(2, 2, 3, size, size)
        case "described":
            pieces = 4 if name in ("gemma3_vlm", "idefics3") else 16
            given["input_ids"][:, 7 : 7 + pieces] = IMAGE
            given["pixel_values"] = noise(2, *((1,) if name == "idefics3" else ()), 3, 16, 16)
            if name == "paligemma":  # without them its implementations disagree on what is causal
                given["token_type_ids"] = (torch.arange(LENGTH) > 25).long().expand(2, -1)
        case "patches":
            given["input_ids"][:, 7:11] = IMAGE
            given["pixel_values"] = noise(2 * 16, 3 * 2 * 4 * 4)
            given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        case "tiles":
            given["pixel_values"] = noise(2, 1, 1, 3, 16, 16)
            given["aspect_ratio_ids"] = torch.ones(2, 1, dtype=torch.long)
            given["aspect_ratio_mask"] = torch.ones(2, 1, 1, dtype=torch.long)
            given["cross_attention_mask"] = torch.ones(2, LENGTH, 1, 1, dtype=torch.long)
        case "sound" | "wave" | "heard":
            given["input_values"] = noise(2, 4000 if row.reads == "wave" else SAMPLES)
        case "frames" | "mels":
            given["input_features"] = noise(2, 24 if row.reads == "frames" else 128, 16)
        case "mel":
            given["input_features"] = noise(2, 16, 2 * LENGTH)
        case "speech":
            given["input_features"] = noise(2, 64, 16)
        case "spectrum":
            given["input_values"] = noise(2, 24, 16)
        case "series":
            given["past_values"] = noise(2, LENGTH, 2)
        case "forecast":
            given |= {
                "past_values": noise(2, LENGTH + 2),
                "past_time_features": noise(2, LENGTH + 2, 1),
                "past_observed_mask": torch.ones(2, LENGTH + 2),
                "future_values": noise(2, 8),
                "future_time_features": noise(2, 8, 1),
            }
        case "vectors":
            given["inputs"] = noise(2, 20, 64)
    if row.reads == "points":
        given["input_points"] = noise(2, 1, 2, 2).abs() * 8
    if padded and row.padding is not None:
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in given:
                given[mask] = torch.ones_like(given[ids])
                pad = slice(None, PADDED) if row.padding == "left" else slice(-PADDED, None)
                given[mask][1, pad] = 0
        if row.reads == "sound":
            given["attention_mask"] = (torch.arange(SAMPLES) < torch.tensor([[SAMPLES], [SAMPLES - 60]])).long()
    return given


@dataclass(frozen=True)
class Seen:
    """The profiler's records of a model, and their distance to the model's own weights."""

    kind: str  # of the model
    sources: list[str]  # source of each call's statistics, in the model's order
    unobserved: list[str]
    error: float  # largest difference of any statistic to that of the model's own weights
    unchecked: list[str]  # modules that were recorded, but do not return their weights
    change: float  # largest difference of the model's output while it is observed
    check: float | None  # difference to the model's own attention function in its first layer, if it was compared


@functools.cache
@torch.no_grad()
def examine(name: str, *, padded: bool = False) -> Seen:
    """Observe a model and compare with its twin in the eager implementation."""
    model, batch = build(name), inputs(name, padded=padded)
    sequences = sequences_of(model, batch)
    keys, queries = real_tokens(model, batch, sequences)
    observer = Observer(model, key_masks=keys, query_masks=queries, sequences=sequences)
    torch.manual_seed(0)  # some models choose keys at random
    with observe(observer):
        got = model(**batch)[0]
    torch.manual_seed(0)
    want = model(**batch)[0]
    own = own_weights(name, batch)
    error, unchecked = 0.0, []
    for record in observer.records:
        weights = own[record.module].pop(0) if own.get(record.module) else None
        if weights is None:
            unchecked.append(record.module)
        else:
            error = max(error, difference(record, weights))
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    fits = mask is not None and mask.shape == got.shape[:2]
    change = (got - want).abs()[mask.bool()] if fits and mask is not None else (got - want).abs()
    sources = [observer.sources[record.module] for record in observer.records]
    kind = type(model).__name__
    check = max((one.difference for one in observer.checks), default=None)
    return Seen(kind, sources, unobserved(observer), error, unchecked, change.max().item(), check)


def own_weights(name: str, batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The weights that each attention module computes in the eager implementation, call by call.

    They come from the function that the module asks transformers' interface for, or are what the module returns beside
    its output: (batch, heads, queries, keys), or without heads if that is the mean over them.
    """
    if name in DISAGREE:
        return {}
    model = build(name, "eager")
    names = {module: path for path, module in model.named_modules()}
    asked: dict[str, list[Tensor]] = {}
    returned: dict[str, list[Tensor]] = {}
    own_interface = AttentionInterface.get_interface

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out, weights = default(module, *args, **kwargs)
            asked.setdefault(names[module], []).append(weights)
            return out, weights

        return attend

    def hear(module: nn.Module, args: Any, outputs: Any) -> None:
        for value in _beside(outputs):
            weights = value.permute(2, 3, 0, 1) if name == "xlnet" and value.ndim == 4 else value
            if name in RETURN_SCORES and not _normalized(weights):
                weights = weights.softmax(-1)
            if weights.ndim == 5:
                weights = weights.transpose(1, 2).flatten(0, 1)  # windows are texts
            if _normalized(weights):
                returned.setdefault(names[module], []).append(weights.mean(1) if name in RETURN_MEANS else weights)
                return

    handles = [module.register_forward_hook(hear) for module in model.modules()]
    AttentionInterface.get_interface = get_interface
    try:
        torch.manual_seed(0)
        try:
            model(**batch, output_attentions=True)
        except (TypeError, ValueError):  # it has no such argument
            model(**batch)
    finally:
        AttentionInterface.get_interface = own_interface
        for handle in handles:
            handle.remove()
    return returned | asked


def _beside(outputs: Any) -> list[Tensor]:
    """Tensors of 3 to 5 dimensions that a module returns beside its first."""
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple | list) else ()
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))][1:]
    return [x for x in flat if isinstance(x, Tensor) and x.is_floating_point() and 3 <= x.ndim <= 5]


def _normalized(x: Tensor) -> bool:
    total = x.sum(-1)
    return bool((x >= 0).all()) and bool((((total - 1).abs() < 1e-3) | (total == 0)).all())


def difference(record: Record, weights: Tensor) -> float:
    """Distance of a record to `weights`: in the weights, entropy, received weight and sink."""
    assert record.weights is not None
    b, heads, n_queries, _ = record.weights.shape
    if weights.ndim == 3 and weights.shape[0] != b:
        weights = weights.unflatten(0, (b, heads))
    every = torch.ones(b, n_queries, dtype=torch.bool)
    real = (every if record.queries is None else record.queries)[:, None, :, None]
    mine = record.weights * real
    if weights.ndim == 3:
        return _far(mine.mean(1), weights * real[:, 0])
    if mine.shape != weights.shape:
        return float("inf")
    own = (weights * real).double()
    total = own.sum(-1, keepdim=True)
    shape = own / total.where(total > 0, 1.0)
    first = torch.zeros(b, dtype=torch.long) if record.keys is None else record.keys.int().argmax(1)
    sink = own.gather(3, first[:, None, None, None].expand(-1, heads, n_queries, 1))[..., 0]
    found = record.statistics
    pairs = (
        (mine, own),
        (found.entropy, -torch.special.xlogy(shape, shape).sum(-1)),
        (found.received, own.sum(2)),
        (found.sink, sink),
    )
    return max(_far(a, b) for a, b in pairs)


def _far(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to numbers above 1."""
    return ((got - want).abs() / want.abs().clamp(min=1)).max().item()
