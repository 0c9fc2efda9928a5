"""`qkv generate`: how does a language model go on?"""

from __future__ import annotations

import os
import secrets
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from qkv.cli.files import forget_output, read
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qkv.cache import Cache
    from qkv.models.decoder import DecoderLM, DecoderState


def generate(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    prompt: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="")
    ] = None,
    /,
    *,
    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 100,
    temperature: Annotated[float, tyro.conf.arg(metavar="T")] = 0.8,
    greedy: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint="")] = None,
    top_p: Annotated[float, tyro.conf.arg(metavar="P")] = 0.95,
    min_p: Annotated[float | None, tyro.conf.arg(metavar="P", help_behavior_hint="")] = None,
    repetition_penalty: Annotated[float, tyro.conf.arg(metavar="X")] = 1.0,
    stop: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT", help_behavior_hint="")
    ] = (),
    seed: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    cache: Annotated[str, tyro.conf.arg(metavar="KIND")] = "full",
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
) -> None:
    """How does a language model go on? The prompt and its continuation, printed as it comes.

    The text goes to standard output, and nothing else does; what it took (tokens a second, bytes of the cache, the seed
    to get the same again) goes to standard error.

    qkv generate qkv-mini "class Stack:"                         (the small model of Python that comes with qkv)

    qkv generate gpt2 "Once upon a time"                         (a model of the Hugging Face hub)

    qkv generate ./my-model --file story.txt --greedy            (a folder, and a text of your own)

    qkv generate ./llama "Hi" --tokens 9999 --cache sinks:4,252  (on and on, in constant memory)

    printf "def sort(" | qkv generate ./my-model --file - > out.txt

    Args:
        model: "qkv-mini", a folder that qkv.models.checkpoint.save wrote, a folder with a GPT-2 or Llama of Hugging
            Face, or the name of one on the hub.
        prompt: The text to continue.
        file: Read the prompt from this UTF-8 file instead, line breaks at its end included; - is standard input.
        tokens: New tokens at most. A model with learned positions stops where these end.
        temperature: Below 1 likely tokens become likelier; 0 takes the likeliest.
        greedy: Always the likeliest token, as --temperature 0.
        top_k: Only the K likeliest tokens.
        top_p: Only the likeliest tokens that have this probability together.
        min_p: Only tokens with this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens that were there become unlikelier.
        stop: End before this text; may be given again.
        seed: The same number gives the same text; a new one is drawn, and told, if not given.
        cache: Keys to keep: full (all), sliding:N (the last N), sinks:S,N (the first S and the last N) or heavy:H,R
            (the H attended to most and the last R).
        dtype: Of the weights.
    """
    from rich.console import Console

    from qkv._progress import spinner
    from qkv.models.generation import text_stream
    from qkv.models.sampling import Sampler
    from qkv.models.text import load_text_model

    if prompt is not None and file is not None:
        raise InputError("prompt and --file are both given, expected one of them")
    if prompt is None and file is None:
        raise InputError("there is no prompt, expected a text, or --file with one")
    if tokens < 1:
        raise InputError(f"--tokens is {tokens}, expected at least 1")
    sampling = Sampler(0.0 if greedy else temperature, top_k, top_p, min_p, repetition_penalty)
    make_cache = _cache(cache)
    text = prompt if prompt is not None else read(file or Path())
    seed = secrets.randbelow(2**32) if seed is None else seed
    console = Console(stderr=True, highlight=False)
    with spinner(f"loading {model}"):
        loaded = load_text_model(model, dtype=dtype)
        ids = loaded.encode(text)
        most = _room(loaded.model, len(ids), tokens)
        state = loaded.model.start(cache=lambda: make_cache(len(ids) + most))
        pieces = text_stream(
            loaded.model, state, loaded.tokenizer.after(ids), ids,
            max_new_tokens=most, sampling=sampling, end=loaded.end, seed=seed, stop=stop,
        )  # fmt: skip
        first = _first_piece(pieces, len(ids) + most)  # before anything is printed: what cannot work shows here
    early, start = state.seen, time.perf_counter()
    _say(text, dim=True)
    try:
        if first is not None:
            _say(first)
        for piece in pieces:
            _say(piece)
    finally:
        seconds = time.perf_counter() - start
        _say("\n")
    notes = _costs(state, len(ids), early, seconds)
    if sampling.temperature:
        notes.append(f"seed {seed}")
    if most < tokens and state.seen == loaded.model.config.context:
        notes.append(f"stopped where the model's positions end, at {loaded.model.config.context:,} tokens")
    console.print(f"[dim]{' · '.join(notes)}[/dim]", soft_wrap=True)


def _room(model: DecoderLM, prompt: int, tokens: int) -> int:
    """How many new tokens there is room for: the last of them is never read, so it needs no position."""
    if model.positions is None:
        return tokens
    context = model.config.context
    if prompt > context:
        raise InputError(
            f"the prompt has {prompt:,} tokens, but the model has learned positions for a context of {context:,}"
        )
    return min(tokens, context - prompt + 1)


def _cache(text: str) -> Callable[[int], Cache]:
    """What makes the cache of a layer, from how many tokens will come."""
    from qkv import cache

    kind, _, rest = text.partition(":")
    sizes = [int(x) for x in rest.split(",") if x.isascii() and x.isdigit()]
    kinds: dict[str, tuple[int, Callable[..., Cache]]] = {
        "sliding": (1, cache.Sliding), "sinks": (2, cache.Sinks), "heavy": (2, cache.HeavyHitters),
    }  # fmt: skip
    if text == "full":
        return cache.Full
    if kind not in kinds or len(rest.split(",")) != len(sizes) or len(sizes) != kinds[kind][0]:
        raise InputError(f"--cache is {text!r}, expected full, sliding:N, sinks:S,N or heavy:H,R with numbers of keys")
    make = kinds[kind][1]
    make(*sizes)  # now, for what it says of sizes
    return lambda _: make(*sizes)


def _first_piece(pieces: Iterator[str], capacity: int) -> str | None:
    try:
        return next(pieces, None)
    except (RuntimeError, TypeError) as error:  # TypeError: a number of keys that no integer of torch holds
        if "memory" not in str(error) and "overflow" not in str(error).lower():
            raise
        raise InputError(f"no memory for {capacity:,} tokens; expected fewer --tokens, or --cache sliding:N") from error


def _say(text: str, *, dim: bool = False) -> None:
    """To standard output, at once; a control character shows as its number, since a terminal might obey it."""
    text = "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if dim and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        text = f"\x1b[2m{text}\x1b[0m"
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        forget_output()
        raise InputError(f"standard output: cannot be written ({error.strerror})") from error


def _costs(state: DecoderState, prompt: int, early: int, seconds: float) -> list[str]:
    """What it took, the tokens timed that came after the first piece of text (at `early`)."""
    new, timed = state.seen - prompt + 1, state.seen - early
    notes = [f"{new:,} token{'s' if new != 1 else ''}"]
    if timed and seconds > 0:
        notes += [f"{timed / seconds:,.1f} tokens/s", f"{1000 * seconds / timed:.1f} ms per token"]
    return [*notes, f"cache {state.nbytes:,} bytes"]
