"""The inputs of a run: texts, tokens and batches, and which tokens are special."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from qkv import ring
from qkv._packages import user_frame
from qkv.errors import InputError
from qkv.huggingface.masks import MASKED
from qkv.profiler.capture.patches import Patches


@dataclass(frozen=True)
class Special:
    """Ids of the special tokens that a tokenizer puts before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Special:
        """Find the special tokens of a tokenizer by encoding a short text with and without them."""
        whole, bare = _ids(tokenizer, "a"), _ids(tokenizer, "a", add_special_tokens=False)
        for at in range(len(whole) - len(bare) + 1):
            if bare and whole[at : at + len(bare)] == bare:
                return cls(tuple(whole[:at]), tuple(whole[at + len(bare) :]))
        raise InputError(f"tokenizer: {type(tokenizer).__name__} does not put its special tokens around the text")


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Any, text: str, **settings: Any) -> list[int]:
    encoded: Mapping[str, Any] = tokenizer(text, **settings)
    ids = encoded["input_ids"]
    ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    return list(ids[0]) if ids and isinstance(ids[0], list) else ids


BEYOND = ContextVar[bool | None]("BEYOND", default=None)
"""Whether a model with rotary positions reads texts longer than those it was trained for; None: with a warning."""

NOT_TOKENS = re.compile("mask|position|type|label|segment|length", re.IGNORECASE)  # names of metadata about tokens


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences that a model reads: one, or a source and a target. Token ids, or None if they are not tokens."""

    source: Int[Tensor, "b s"] | None = None
    target: Int[Tensor, "b t"] | None = None
    two: bool = False
    real_source: Mapping[int, Bool[Tensor, "b s"]] = field(default_factory=dict)
    """True at real tokens of the source, by length; empty if all are real."""
    real_target: Mapping[int, Bool[Tensor, "b t"]] = field(default_factory=dict)
    """The same for the target; for a model that reads one sequence, both are the same."""
    patches: Mapping[str, Patches] = field(default_factory=dict)
    """The patches of images among the keys, by kind of attention."""


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
        if not callable(tokenizer):
            raise InputError("inputs is text but there is no tokenizer; pass tokenizer=…, or token ids")
        batch = {k: v for k, v in tokenizer(text, return_tensors="pt").items() if k in ("input_ids", "attention_mask")}
        of_target = getattr(tokenizer, "target", tokenizer)
        if target is None and of_target is not tokenizer:
            raise InputError("target is missing, expected the translation, which the decoder reads")
        if target is not None:
            batch["decoder_input_ids"] = of_target(target, return_tensors="pt")["input_ids"]
        yield _prepared(model, batch)


def texts_of(model: nn.Module, inputs: Any, tokenizer: Any) -> Iterator[Int[Tensor, " n"]]:
    """The token ids of each text, without its padding, for a model that reads one sequence of tokens."""
    for batch in batches(model, inputs, tokenizer, None):
        sequences = sequences_of(model, batch)
        if sequences.source is None or sequences.two:
            raise InputError(
                f"model {type(model).__name__} does not read one sequence of tokens, expected a language model"
            )
        for item, ids in enumerate(sequences.source):
            keep = sequences.real_source.get(len(ids))
            yield ids if keep is None else ids[keep[item]]


def arguments_of(
    module: nn.Module | Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a module's forward by name, those of ``**kwargs`` among them."""
    if not isinstance(module, nn.Module):  # a method that counts as a forward
        return dict(named)
    signature = signature_of(module)
    arguments = dict(signature.bind_partial(*args, **named).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def sequences_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Sequences:
    """The sequences in a batch: by Hugging Face's argument names, else in the order of the forward's parameters.

    Attention masks tell which tokens are real, or else ``config.pad``.
    """
    if "input_ids" in batch or "decoder_input_ids" in batch:
        source, target = batch.get("input_ids"), batch.get("decoder_input_ids")
        two = target is not None
    else:
        read = [batch[name] for name in _parameters(model) if name in batch and _is_sequence(name, batch[name])]
        source, target, *_ = [*(None if x.is_floating_point() else x for x in read), None, None]
        two = len(read) > 1
    real_source, real_target = (_padding_mask(batch, name) for name in ("attention_mask", "decoder_attention_mask"))
    pad = getattr(getattr(model, "config", None), "pad", None)
    if isinstance(pad, int):
        real_source, real_target = real_source or _unequal(source, pad), real_target or _unequal(target, pad)
    real_source, real_target = (
        {n: mask for n, mask in real.items() if not bool(mask.all())} for real in (real_source, real_target)
    )
    return Sequences(source, target, two, real_source, real_target if two else real_source)


def _padding_mask(batch: Mapping[str, Tensor], name: str) -> dict[int, Tensor]:
    """True at real tokens: by a mask of tokens, or by a mask of pairs in which all other tokens see themselves."""
    mask = batch.get(name)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return {mask.shape[1]: mask.bool()}
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[2] != mask.shape[3]:
        return {}
    visible = (mask > MASKED if mask.is_floating_point() else mask.bool()).any(1)
    seen = visible.any(1)
    told = not bool(seen.all()) and torch.equal(seen, visible.diagonal(dim1=1, dim2=2))
    return {mask.shape[3]: seen} if told else {}


def _unequal(ids: Tensor | None, pad: int) -> dict[int, Tensor]:
    return {} if ids is None or not (ids == pad).any() else {ids.shape[1]: ids != pad}


def _is_sequence(name: str, x: object) -> bool:
    if not isinstance(x, Tensor) or NOT_TOKENS.search(name):
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
    hooks = (vars(module).get("_hf_hook") for module in model.modules())
    hooked = next((d for hook in hooks if (d := getattr(hook, "execution_device", None)) is not None), None)
    if hooked is not None:
        return torch.device("cuda", hooked) if isinstance(hooked, int) else torch.device(hooked)
    devices = (x.device for x in model.parameters())
    first = next(devices, None)
    return first if first is None or first.type != "meta" else next((d for d in devices if d.type != "meta"), first)


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
    own: Any = getattr(model, "config", None)
    limit = getattr(own, "context", None) or positions(model)
    for argument, x in (("inputs", sequences.source), ("target", sequences.target)):
        if x is None:
            continue
        if x.numel() == 0:
            raise InputError(f"{argument} has no tokens, expected at least one")
        name, n = type(model).__name__, x.shape[1]
        too_many = limit is not None and n > limit
        # Rotary positions have no last one, and neither have models of qkv without learned ones.
        endless = too_many and any("rotary" in type(module).__name__.lower() for module in model.modules())
        endless |= getattr(own, "positions", "learned") != "learned"
        if not too_many:
            pass
        elif not endless:
            raise InputError(
                f"{argument} has {n:,} tokens, expected at most {limit:,}, the positions of {name}; on the command "
                f"line, --tokens {limit} takes the first of them"
            )
        elif BEYOND.get() is None:
            warnings.warn(
                f"{argument} has {n:,} tokens, expected at most {limit:,}, for which {name} was trained",
                stacklevel=user_frame(),
            )
        elif not BEYOND.get():
            raise InputError(
                f"{argument} has {n:,} tokens, expected at most {limit:,}, for which {name} was trained; --tokens "
                f"{limit} takes the first, --beyond all of them"
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


def config_of_text(model: nn.Module) -> Any:
    """The configuration of a model, or of the part that reads text, if it has one."""
    config: Any = getattr(model, "config", None)
    with suppress(ValueError):  # it may have several
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return config


def positions(model: nn.Module) -> int | None:
    """The largest number of tokens that the model has positions for; None if its configuration does not state it."""
    config = config_of_text(model)
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "positions", None) == "learned":  # a model of qkv
        limit = getattr(config, "context", None)
    if not isinstance(limit, int) or limit < 1:  # XLNet has −1: any number
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1  # in models such as RoBERTa, positions start after the padding id
    return limit


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of a model's forward; that of its class where a wrapper on the object hides it, as nnsight's does.

    Such a wrapper takes ``*args, **kwargs``, or says that it takes the parameters of the unbound method.
    """
    signature = inspect.signature(model.forward)
    named = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    hidden = "forward" in vars(model) and named[:1] in ([], ["self"])
    return inspect.signature(type(model).forward.__get__(model)) if hidden else signature


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return signature_of(model).parameters


class Tokens:
    """The tokens at a group's queries and keys, and their names.

    Args:
        sequences: the sequences that the model reads.
        tokenizer: converts ids to text; names are ids if it is None.
        group: kind of attention.
        processes: the processes of which each has a shard of the sequences (`qkv.ring`).
    """

    def __init__(self, sequences: Sequences, tokenizer: Any, group: str, processes: ProcessGroup | None = None) -> None:
        source, target = sequences.source, sequences.target if sequences.two else sequences.source
        kind = group.partition("-")[0]
        self.tokenizer, self.reads_target = tokenizer_of(tokenizer), kind in ("decoder", "cross")
        self.patches = sequences.patches.get(kind)
        self.queries = target if kind in ("decoder", "cross") else source
        self.keys = target if kind == "decoder" else source
        if processes is not None:
            self.queries, self.keys = (
                None if ids is None else ring.unshard(ids, processes, dim=1) for ids in (self.queries, self.keys)
            )

    def names(self, ids: Tensor | None, item: int, real: np.ndarray) -> list[str]:
        """Names of the real tokens of one batch item: patches, pieces of text, or else positions."""
        if self.patches is not None and self.patches.place.shape[1] == len(real):
            known, pieces = self.patches.names[item], self._pieces(ids, item, real)
            return [known.get(at, piece) for at, piece in zip(np.flatnonzero(real).tolist(), pieces, strict=True)]
        return self._pieces(ids, item, real)

    def _pieces(self, ids: Tensor | None, item: int, real: np.ndarray) -> list[str]:
        if ids is None or ids.shape[1] != len(real):
            return [str(n) for n in range(int(real.sum()))]
        kept = ids[item].cpu().numpy()[real].tolist()
        tokenizer = self.tokenizer
        if self.reads_target and ids is self.queries:  # a translator has other words for what it writes
            tokenizer = getattr(tokenizer, "target", tokenizer)
        return token_texts(tokenizer, kept)

    @property
    def special(self) -> list[str]:
        return list(getattr(self.tokenizer, "all_special_tokens", ()) or ())


def first_real(keys: Bool[Tensor, "b n"]) -> int | Int[Tensor, " b"]:
    """The position of the first real token of each text, on the CPU; 0 if it is 0 in all of them."""
    first = keys.to(torch.int8).argmax(1).cpu()
    return first if bool(first.any()) else 0


def nan_error(module: str, what: str = "weights") -> InputError:
    return InputError(f"model computes {what} that are NaN in {module}: its parameters or its inputs contain NaN")


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a processor of images or sounds; None if it has none. Tokenizers are returned as they are."""
    has_others = any(hasattr(processor, name) for name in ("image_processor", "feature_extractor"))
    of_images = hasattr(processor, "preprocess") and not hasattr(processor, "convert_ids_to_tokens")
    return getattr(processor, "tokenizer", None) if has_others or of_images else processor


def special_ids(model: nn.Module, tokenizer: Any) -> set[int]:
    """Ids of special tokens, by the tokenizer and the model's configuration."""
    config = getattr(model, "config", None)
    names = ("pad", "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    known = [getattr(config, name, None) for name in names]
    flat = [i for x in known for i in (x if isinstance(x, list | tuple) else [x])]
    around = Special.of(tokenizer) if callable(tokenizer) else Special()
    declared = getattr(tokenizer, "all_special_ids", ()) or ()
    return {int(i) for i in (*flat, *declared, *around.before, *around.after) if isinstance(i, int)}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token id: markers of byte-level and SentencePiece tokenizers become spaces and characters.

    Different ids have different texts: bytes that are no whole character are named as in SentencePiece, such as
    ``<0xF0>``, and an id outside of the vocabulary by its number.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return [str(i) for i in ids]
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    special = {*(getattr(tokenizer, "all_special_tokens", ()) or ())}
    return [
        f"token {i}" if piece is None else piece if piece in special else _text(tokenizer, i, str(piece))
        for i, piece in zip(ids, pieces, strict=True)
    ]


def _text(tokenizer: Any, token: int, piece: str) -> str:
    if "▁" in piece:
        return piece.replace("▁", " ")
    if ("Ġ" in piece or "Ċ" in piece or not piece.isascii()) and hasattr(tokenizer, "decode"):
        # Cleaning up would remove the space before punctuation, which is another token.
        as_it_is = hasattr(tokenizer, "clean_up_tokenization_spaces")
        text = str(tokenizer.decode([token], **({"clean_up_tokenization_spaces": False} if as_it_is else {})))
        if "\N{REPLACEMENT CHARACTER}" in text and all(character in _BYTES for character in piece):
            escaped = bytes(_BYTES[character] for character in piece).decode(errors="backslashreplace")
            return re.sub(r"\\x(..)", lambda match: f"<0x{match[1].upper()}>", escaped)
        return text or piece
    return piece


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + at): byte for at, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}
"""The byte of each character in the vocabulary of a byte-level tokenizer (Radford et al. 2019, section 2.2)."""
