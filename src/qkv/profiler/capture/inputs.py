"""Turn texts, token ids or named tensors into the arguments of a model's forward, and find its sequences in them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from qkv.errors import InputError

_NOT_TOKENS = re.compile("mask|position|type|label|segment|length", re.IGNORECASE)  # names of metadata about tokens


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences that a model reads: one, or a source and a target. Token ids, or None if they are not tokens."""

    source: Int[Tensor, "b s"] | None = None
    target: Int[Tensor, "b t"] | None = None
    two: bool = False


def batches(
    model: nn.Module, inputs: str | Sequence[str] | Tensor | Mapping[str, Tensor], tokenizer: Any, target: str | None
) -> Iterator[dict[str, Tensor]]:
    """The arguments of the model's forward, for each run."""
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Tensor):
        if inputs.dtype not in (torch.int32, torch.int64) or inputs.ndim not in (1, 2):
            raise InputError(
                f"inputs is a {inputs.dtype} tensor of shape {tuple(inputs.shape)}, expected token ids of shape "
                "(length,) or (batch, length); pass anything else by name, such as {'pixel_values': tensor}"
            )
        inputs = {"input_ids": inputs if inputs.ndim == 2 else inputs[None]}
    if isinstance(inputs, Mapping):
        yield _prepared(model, dict(inputs))
        return
    if not inputs:
        raise InputError("inputs has no text, expected at least one")
    for number, text in enumerate(inputs):
        if not isinstance(text, str):
            raise InputError(f"inputs holds {type(text).__name__}, expected texts, token ids or a mapping of tensors")
        if not text.strip() and len(inputs) == 1:
            raise InputError("inputs: the text is empty, expected at least one token")
        if not text.strip():
            raise InputError(f"inputs[{number}] is empty, expected a text of at least one token")
        if tokenizer is None:
            raise InputError("inputs is text but there is no tokenizer; pass tokenizer=…, or token ids")
        batch = {k: v for k, v in tokenizer(text, return_tensors="pt").items() if k in ("input_ids", "attention_mask")}
        if target is not None:
            batch["decoder_input_ids"] = tokenizer(target, return_tensors="pt")["input_ids"]
        yield _prepared(model, batch)


def arguments_of(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's forward by name, those of ``**kwargs`` among them."""
    signature = inspect.signature(module.forward)
    found = dict(signature.bind_partial(*args, **named).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


def sequences_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Sequences:
    """The sequences in a batch: by Hugging Face's argument names, else in the order of the forward's parameters."""
    if "input_ids" in batch or "decoder_input_ids" in batch:
        target = batch.get("decoder_input_ids")
        return Sequences(batch.get("input_ids"), target, two=target is not None)
    read = [batch[name] for name in _parameters(model) if name in batch and _is_sequence(name, batch[name])]
    source, target, *_ = [*(None if x.is_floating_point() else x for x in read), None, None]
    return Sequences(source, target, two=len(read) > 1)


def real_tokens(
    model: nn.Module, batch: Mapping[str, Tensor], sequences: Sequences
) -> tuple[dict[int, Bool[Tensor, "b s"]], dict[int, Bool[Tensor, "b t"]]]:
    """Masks of the real tokens of source and target, by length: from attention masks, or else from ``config.pad``.

    For a model that reads one sequence, both are the same.
    """
    source, target = (_padding_mask(batch, name) for name in ("attention_mask", "decoder_attention_mask"))
    pad = getattr(getattr(model, "config", None), "pad", None)
    if isinstance(pad, int):
        source, target = source or _unequal(sequences.source, pad), target or _unequal(sequences.target, pad)
    return source, target if sequences.two else source


def _padding_mask(batch: Mapping[str, Tensor], name: str) -> dict[int, Tensor]:
    mask = batch.get(name)
    return {} if mask is None or mask.ndim != 2 else {mask.shape[1]: mask.bool()}


def _unequal(ids: Tensor | None, pad: int) -> dict[int, Tensor]:
    return {} if ids is None or not (ids == pad).any() else {ids.shape[1]: ids != pad}


def _is_sequence(name: str, x: object) -> bool:
    if not isinstance(x, Tensor) or _NOT_TOKENS.search(name):
        return False
    return x.ndim >= 3 if x.is_floating_point() else x.ndim == 2 and x.dtype != torch.bool


def _prepared(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name the arguments by the forward's parameters, validate them, and move them to the model's device."""
    batch = _named(model, batch)
    sequences = sequences_of(model, batch)
    _check_ids(model, sequences)
    if "logits_to_keep" in _parameters(model):
        batch["logits_to_keep"] = 1  # type: ignore[assignment]  # the logits are not used, so compute as few as possible
    device = device_of(model)
    return {k: v.to(device) if isinstance(v, Tensor) and device is not None else v for k, v in batch.items()}


def device_of(model: nn.Module) -> torch.device | None:
    """The device on which a model takes its inputs; None for a model without parameters.

    Weights that accelerate offloads are on the meta device until they are used; then its hook says where that is.
    """
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    found = next((d for hook in hooks if (d := getattr(hook, "execution_device", None)) is not None), None)
    if found is not None:
        return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    devices = [x.device for x in model.parameters()]
    return next((d for d in devices if d.type != "meta"), devices[0] if devices else None)


def _named(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the arguments in a batch to the parameters of the forward.

    Ids are passed as ``input_ids`` and ``decoder_input_ids`` if the forward has Hugging Face's parameters, otherwise
    as its first parameter and, if that is required, its second. Without a target, a decoder reads the source.
    """
    parameters = _parameters(model)
    kinds = inspect.Parameter
    free = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    own = {n: p for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    config: Any = getattr(model, "config", None)
    ids, target = batch.get("input_ids"), batch.get("decoder_input_ids")
    if getattr(config, "is_encoder_decoder", False) or "input_ids" in own or ids is None or not own:
        reads_target = getattr(config, "is_encoder_decoder", False)
        if reads_target and ids is not None:
            batch.setdefault("decoder_input_ids", ids)
    else:
        first, *others = own
        second = next((name for name in others if own[name].default is kinds.empty), None)
        reads_target = second is not None
        batch = {n: x for n, x in batch.items() if n not in ("input_ids", "decoder_input_ids")} | {first: ids}
        if second is not None:
            batch.setdefault(second, ids if target is None else target)
        mask = batch.get("attention_mask")
        if mask is not None and "attention_mask" not in own and not free and bool(mask.all()):
            del batch["attention_mask"]
    if target is not None and not reads_target and "decoder_input_ids" not in own:
        raise InputError(f"target is given, but {type(model).__name__} has no decoder that could read it")
    unknown = [] if free else [name for name in batch if name not in own]
    missing = [n for n, p in own.items() if p.default is kinds.empty and n not in batch]
    if unknown or missing:
        raise InputError(
            f"inputs has {', '.join(batch) or 'nothing'}, but {type(model).__name__} takes {', '.join(own)}: "
            + " and ".join(f"{', '.join(x)} {what}" for x, what in ((unknown, "unknown"), (missing, "missing")) if x)
        )
    return batch


def _check_ids(model: nn.Module, sequences: Sequences) -> None:
    """Check the number of tokens and their ids against the model's configuration, as far as it states limits."""
    limit = positions(model)
    for argument, x in (("inputs", sequences.source), ("target", sequences.target)):
        if x is None:
            continue
        if x.numel() == 0:
            raise InputError(f"{argument} has no tokens, expected at least one")
        if limit and x.shape[1] > limit:
            raise InputError(
                f"{argument} has {x.shape[1]:,} tokens, expected at most {limit:,}, the positions of "
                f"{type(model).__name__}; on the command line, --tokens {limit} takes the first of them"
            )
        size = vocabulary(model, target=argument == "target")
        if size is None:
            continue
        low, high = map(int, x.aminmax())
        if low < 0 or high >= size:
            raise InputError(f"{argument} has token ids in {low}..{high}, expected 0..{size - 1} for this model")


def vocabulary(model: nn.Module, *, target: bool = False) -> int | None:
    """The vocabulary size of the model, or of its decoder if `target`; None if its configuration does not state it."""
    config: Any = getattr(model, "config", None)
    names = ("decoder_vocab_size", "target_vocab", "vocab_size") if target else ("source_vocab", "vocab_size")
    return next((n for name in names if (n := getattr(config, name, None))), None)


def positions(model: nn.Module) -> int | None:
    """The largest number of tokens that the model has positions for; None if its configuration does not state it."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "positions", None) == "learned":  # a model of qkv
        limit = getattr(config, "context", None)
    if not isinstance(limit, int) or limit < 1:  # XLNet has −1: any number
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1  # in models such as RoBERTa, positions start after the padding id
    return limit


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters
