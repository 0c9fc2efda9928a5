"""Every Hugging Face architecture that the profiler is held to: tiny, fed, and its own weights as the oracle.

The architectures are in hf_zoo.toml: sizes come from one list of names that configurations use, wherever a
configuration has that name, and a row says only what is different. Nothing is downloaded; a model takes some hundredths
of a second.
"""

from __future__ import annotations

import functools
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import hf_models
from hf_models import PADDED, VOCABULARY, Architecture, architectures
from qkv.profiler.capture.inputs import sequences_of
from qkv.profiler.capture.observe import observe
from qkv.profiler.capture.observer import Observer, unobserved
from qkv.profiler.capture.record import Measures, Record, Recorder
from qkv.reference import statistics

LOCAL = 3  # window of the local weight
LENGTH, SAMPLES = 32, 330  # of a text, and of audio, which give 32 frames
IMAGE = 3  # id of the token that stands for a piece of an image; texts have none so small
PIECES = {"gemma3_vlm": 4, "idefics3": 4, "qwen2_5_vl": 4, "mllama": 0}  # of an image in a text, where they are not 16
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROUTED, UNROUTED = (architectures(TABLES[kind], TABLES["shared"]) for kind in ("routed", "unrouted"))
ALL = ROUTED | UNROUTED
RETURN_SCORES = ("squeezebert", "prophetnet")  # they return scores before the softmax as their attentions
DISAGREE = ("falcon_alibi",)  # its eager implementation differs from its default one
RETURN_MEANS = ("wavlm",)  # over heads, repeated for each
UNDERFLOW = ("detr", "swin", "swinv2")  # weights of visible keys are 0, or those of masked keys are not


def small(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make a tiny configuration of a class: small sizes wherever it has the name, then `settings`."""
    plain, inside = kind(), getattr(kind, "sub_configs", {})
    known = plain.to_dict()
    made = {name: value for name, value in TABLES["small"].items() if name in known}
    made |= {name: value for name, value in settings.items() if name not in inside}
    for name in inside:
        inner = getattr(plain, name)
        if inner is not None and settings.get(name) != "DROP":
            made[name] = small(type(inner), settings.get(name, {}))
            if "model_type" in known.get(name, {}):
                made[name]["model_type"] = known[name]["model_type"]
    return {name: value for name, value in made.items() if not (isinstance(value, str) and value == "DROP")}


def build(name: str, implementation: str | None = None) -> Any:
    """The model, in evaluation mode, its weights so large that attention is far from uniform.

    Args:
        name: a row of the table.
        implementation: of attention, such as "eager"; the architecture's own default if None.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = _config(name, ALL[name])
        config._attn_implementation = implementation
        model = ALL[name].class_of(ALL[name].suffix)(config)
    hf_models.enliven(model)
    return model.eval()


def _config(name: str, row: Architecture) -> Any:
    kind, given = row.class_of("Config"), dict(row.settings)
    if name == "encoder_decoder(bert2gpt2)":
        encoder = transformers.BertConfig(**small(transformers.BertConfig, {}))
        settings = small(transformers.GPT2Config, {"add_cross_attention": True, "is_decoder": True})
        return kind.from_encoder_decoder_configs(encoder, transformers.GPT2Config(**settings))
    if name == "detr":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
        given |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        given = small(kind, given | {"backbone_config": "DROP"})
        return kind(**given, backbone_config=transformers.ResNetConfig(**sizes, out_features=["stage2"]))
    return kind(**small(kind, given))


def inputs(name: str, *, padded: bool = False) -> dict[str, Tensor]:
    """The arguments of the forward; with padding in the second item if `padded` and the row has a side for it.

    The table says what each kind of model reads: tokens (a number of them), ones (in a list), and else noise, of this
    shape, with the size of the row's images in place of "size".
    """
    row = ALL[name]
    generator = torch.Generator().manual_seed(5)
    size = row.settings.get("image_size", 16)
    size = size[0] if isinstance(size, list) else size
    given: dict[str, Tensor] = {}
    for argument, shape in TABLES["inputs"][row.kind].items():
        if isinstance(shape, int):
            given[argument] = torch.randint(5, VOCABULARY, (2, shape), generator=generator)
        elif isinstance(shape[0], list):
            given[argument] = torch.ones(shape[0], dtype=torch.long)
        else:
            given[argument] = torch.randn([size if n == "size" else n for n in shape], generator=generator)
    if "image_token_id" in row.settings or "image_token_index" in row.settings:
        given["input_ids"][:, 7 : 7 + PIECES.get(name, 16)] = IMAGE
    if name == "sam":
        given["input_points"] = given["input_points"].abs() * 8
    if name == "qwen2_5_vl":
        given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    if name == "paligemma":  # without them its implementations disagree on what is causal
        given["token_type_ids"] = (torch.arange(LENGTH) > 25).long().expand(2, -1)
    if padded and row.kind == "sound":
        given["attention_mask"] = (torch.arange(SAMPLES) < torch.tensor([[SAMPLES], [SAMPLES - 60]])).long()
    elif padded and row.padding:
        given |= hf_models.pad(given, row.padding[len(name) % len(row.padding)], PADDED, ids=None)
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
    observer = Observer(model, sequences=sequences_of(model, batch), receive=Recorder(Measures(LOCAL)))
    torch.manual_seed(0)  # some models choose keys at random
    with observe(observer):
        got = model(**batch)[0]
    torch.manual_seed(0)
    want = model(**batch)[0]
    for group in {record.group for record in observer.records}:
        layers = [record.layer for record in observer.records if record.group == group]
        assert layers == sorted({*layers}), "the layers of a group are not in the order of their calls"
    if ALL[name].kind in ("text", "texts"):
        check_padding(observer.records, batch)
    missed = unobserved(observer)
    error, unchecked = differences(observer.records, in_eager(name, model), batch, name)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    change = (got - want).abs()
    if mask is not None and mask.shape == got.shape[:2]:
        change = change[mask.bool()]
    sources = [observer.sources[record.module] for record in observer.records]
    check = max((one.difference for one in observer.checks), default=None)
    return Seen(type(model).__name__, sources, missed, error, unchecked, change.max().item(), check)


def in_eager(name: str, model: Any) -> Any:
    """A model with the same weights and eager attention: this one if it has it or can be switched, else another."""
    if name in DISAGREE:
        return None
    if model.config._attn_implementation == "eager":
        return model
    if name not in ROUTED or name == "sam":  # whose class of attention is chosen when it is built
        return build(name, "eager")
    model.set_attn_implementation("eager")
    return model


def check_padding(records: Sequence[Record], batch: Mapping[str, Tensor]) -> None:
    """The records know which queries and keys are real, where the model keeps the length of the text."""
    source, target = batch.get("attention_mask"), batch.get("decoder_attention_mask")
    for record in records:
        assert record.weights is not None
        queries = target if record.group in ("decoder", "cross") else source
        keys = target if record.group == "decoder" else source
        for mask, known, n in zip(
            (queries, keys), (record.queries, record.keys), record.weights.shape[2:], strict=True
        ):
            if mask is not None and mask.shape[1] == n:
                assert known is not None, record.module
                assert torch.equal(known, mask.bool()), record.module


def differences(
    records: Sequence[Record], eager: Any, batch: Mapping[str, Tensor], name: str = ""
) -> tuple[float, list[str]]:
    """The largest distance of records to the weights of the eager model; and modules that do not return theirs."""
    own, error, unchecked = own_weights(eager, batch, name), 0.0, []
    for record in records:
        weights = own[record.module].pop(0) if own.get(record.module) else None
        if weights is None:
            unchecked.append(record.module)
        else:
            error = max(error, difference(record, weights, counted=name not in UNDERFLOW))
    return error, unchecked


@torch.no_grad()
def own_weights(model: Any, batch: Mapping[str, Tensor], name: str = "") -> dict[str, list[Tensor]]:
    """The weights that each attention module computes in the eager implementation, call by call.

    They come from the function that the module asks transformers' interface for, or are what the module returns beside
    its output: (batch, heads, queries, keys), or without heads if that is the mean over them.
    """
    if model is None:
        return {}
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


def difference(record: Record, weights: Tensor, *, counted: bool = True) -> float:
    """Distance of a record to the statistics of `weights` by definition; unless `counted`, not of visible keys."""
    assert record.weights is not None
    b, heads, n, n_keys = record.weights.shape
    if weights.ndim == 3 and weights.shape[0] != b:
        weights = weights.unflatten(0, (b, heads))
    real = (torch.ones(b, n) if record.queries is None else record.queries)[:, None, :, None].double()
    if weights.ndim == 3:
        return _far(record.weights.mean(1), weights, real[:, 0])
    own, found = (weights * real).double(), record.statistics
    steps = torch.arange(n)[:, None] + n_keys - n - torch.arange(n_keys)  # how far back each key is
    if own.shape != record.weights.shape or (record.causal and bool((own * (steps < 0)).any())):
        return float("inf")
    first = torch.zeros(b, dtype=torch.long) if record.keys is None else record.keys.int().argmax(1)
    missing, row, known = (1 - own.sum(-1)) * real[..., 0], real[..., 0], statistics(own.numpy())
    return max(
        _far(record.weights, own, real),
        *(_far(getattr(found, name), getattr(known, name)) for name in ("entropy", "received")),
        *(_far(getattr(found, name), getattr(known, name)) / 2 for name in ("distance", "effective_keys")),  # amplified
        _far(found.sink, own.gather(3, first[:, None, None, None].expand(-1, heads, n, 1))[..., 0]),
        _far(found.self_, (own * (steps == 0)).sum(-1)),
        _far(found.previous, (own * (steps == 1)).sum(-1)),
        _far(found.next_, (own * (steps == -1)).sum(-1)),
        _far(found.mass["local"], (own * (steps.abs() <= LOCAL)).sum(-1)),
        _far(found.visible, (own > 0).sum(-1), row) * counted,
        _far(torch.zeros(1) if found.sink_mass is None else found.sink_mass, missing),
    )


def _far(got: Tensor, want: Any, real: Tensor | float = 1.0) -> float:
    """The largest difference at real queries, relative to numbers above 1."""
    want = torch.as_tensor(want)
    return ((got - want) * real / want.abs().clamp(min=1)).abs().max().item()
