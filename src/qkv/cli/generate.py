"""`qkv generate`: continue a text with a language model."""

from __future__ import annotations

import os
import secrets
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from qkv._files import write_atomically
from qkv._packages import from_lab
from qkv._progress import spinner
from qkv.cli.shared import PROFILE, Input, discard_output, folder
from qkv.cli.terminal import print_files, print_line, show, table
from qkv.errors import InputError, renamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qkv.cache import Cache
    from qkv.models.decoder import DecoderLM, DecoderState
    from qkv.models.text import TextModel


@dataclass(frozen=True)
class Prompt(Input):
    """The model, and the text that it continues."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = "qkv-mini"
    """"qkv-mini", "smollm2", a folder with a model saved by qkv, a folder with a GPT-2 or Llama model of Hugging Face,
    a GGUF file of one, or the name of such a model on the Hugging Face hub."""
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="")] = None
    """The text to continue."""
    chat: Annotated[str | None, tyro.conf.arg(metavar="QUESTION", help_behavior_hint="")] = None
    """Answer this question, as the model's chat template writes it, instead of continuing a text."""
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 100
    """Largest number of new tokens. A model with learned positions stops at its last position, and one with rotary
    positions and the full cache at the longest text that it was trained for, unless you pass --beyond."""


PROMPT = Prompt()


def generate(
    given: Annotated[Prompt, tyro.conf.arg(name="")] = PROMPT,
    *,
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
    profile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-generate"),
) -> None:
    """Continue a text with a language model, and print the tokens as they are generated.

    Standard output contains only the prompt and its continuation, or the answer of a chat. Speed, size of the cache and
    the random seed are printed to standard error.

    qkv generate qkv-mini "class Stack:"                         (the small Python model that comes with qkv)

    qkv generate smollm2 --chat "Why is the sky blue?"           (a language model that answers)

    qkv generate smollm2 --chat "Why is the sky blue?" --profile (and a report of what each new token attended to)

    qkv generate gpt2 "Once upon a time"                         (a model from the Hugging Face hub)

    qkv generate ./my-model --file story.txt --greedy            (a model in a folder, and your own text)

    qkv generate ./llama "Hi" --tokens 9999 --cache sinks:4,252  (a long text in constant memory)

    printf "def sort(" | qkv generate ./my-model --file - > out.txt

    Args:
        given: Model and prompt.
        temperature: Values below 1 favour likely tokens; 0 always takes the most likely token.
        greedy: Always take the most likely token, like --temperature 0.
        top_k: Sample only from the K most likely tokens.
        top_p: Sample only from the most likely tokens whose probabilities add up to P (nucleus sampling).
        min_p: Sample only from tokens that have at least P times the probability of the most likely token.
        repetition_penalty: Values above 1 make tokens that already occurred less likely.
        stop: Stop before this text. You can repeat the option.
        seed: Seed of the random numbers: the same seed gives the same text. By default a new one is drawn and printed.
        cache: Which keys the cache keeps: full (all), sliding:N (the last N), sinks:S,N (the first S and the last N)
            or heavy:H,R (the H keys that received most attention, and the last R). NAME:N,R keeps N keys, of them the
            last R, by another policy of qkv evict (snapkv, pyramid, tova, keydiff, knorm, expected), or of an installed
            package.
        profile: Also measure what each new token attended to: the first token, the prompt (of a chat: the system's
            text, the question, and what the template writes after it) and the answer itself. It needs the full cache.
        out: Folder for the results of --profile.
    """
    from qkv.models.generation import Sampler, text_stream
    from qkv.models.text import is_translator, load_text_model

    if given.text is None and given.file is None and given.chat is None:
        raise InputError("prompt is missing, expected a text, --file with a text file, or --chat with a question")
    if profile and cache != "full":
        raise InputError(f"--cache is {cache!r}, but --profile needs the full cache")
    tokens, make_caches, new = given.tokens, _caches(cache), list[int]()
    sampling = Sampler(0.0 if greedy else temperature, top_k, top_p, min_p, repetition_penalty)
    with renamed(text="prompt"):
        text = given.passage()  # may wait for standard input, so the options are checked before
    if is_translator(given.model):
        if profile:
            raise InputError("--profile measures a model that continues a text; for a translator: qkv profile MODEL")
        print("qkv: translates greedily; the settings of sampling do not apply", file=sys.stderr)
        print(" ".join(from_lab("qkv.lab", "qkv_lab", "translate")(given.model, text).target))
        return
    seed = secrets.randbelow(2**32) if seed is None else seed
    with spinner(f"loading {given.model}"):
        loaded = load_text_model(given.model, dtype=given.dtype)
        with renamed(question="--chat"):
            ids = loaded.encode(text, chat=given.chat is not None)
        most = _most_tokens(loaded.model, len(ids), tokens, beyond=given.beyond or cache != "full")
        after = loaded.tokenizer.after(ids)

        def decode(found: list[int]) -> str:  # called with all new tokens
            new[:] = found
            return after.decode(found)

        state = loaded.model.start(cache=make_caches(len(ids) + most, loaded.model.config.layers).__next__)
        pieces = text_stream(
            loaded.model, state, replace(after, decode=decode), ids,
            max_new_tokens=most, sampling=sampling, end=loaded.end, seed=seed, stop=stop,
        )  # fmt: skip
        first = _first_piece(pieces, len(ids) + most)  # errors of the model appear before anything is printed
    before, start = state.seen, time.perf_counter()
    if given.chat is None:
        _print(text, dim=True)
    try:
        if first is not None:
            _print(first)
        for piece in pieces:
            _print(piece)
    finally:
        seconds = time.perf_counter() - start
        _print("\n")
    notes = _costs(state, len(ids), before, seconds)
    if sampling.temperature:
        notes.append(f"seed {seed}")
    limit = "the model's last position"
    if loaded.model.positions is None:
        limit = f"{loaded.model.config.context:,} tokens, for which the model was trained; --beyond goes on"
    notes.append(_ending(new, after.decode(new), stop, limit if most < tokens else f"--tokens {tokens}", most))
    print_line("Answer" if given.chat else "Text", " · ".join(notes), error=True)
    if profile and new:
        with folder(out):
            _profile(loaded, [*ids, *new], len(ids), given.chat, out)


def _profile(loaded: TextModel, ids: list[int], prompt: int, question: str | None, out: Path) -> None:
    """Print the shares of the parts of the text, and write tables, a figure, a report and the profile."""
    import torch

    from qkv.plot.analyses import answer_figure
    from qkv.plot.layout import save_figure
    from qkv.profiler.analyses.answers import answer_shares, parts_of
    from qkv.profiler.capture.inputs import token_texts
    from qkv.profiler.data.frames import percent
    from qkv.runs import run

    text, tokenizer = torch.tensor(ids), loaded.tokenizer.whole
    shares = answer_shares(loaded.model, text, parts_of(ids, prompt, tokenizer, question), prompt)
    by_head = shares.mean("token")
    names = token_texts(tokenizer, ids[prompt:])
    rows = table("part", ">share of the new tokens' attention", ">largest", "head", title="What the answer attends to")
    for part in by_head:
        layer, head = divmod(int(part.values.argmax()), part.sizes["head"])
        rows.add_row(
            str(part["part"].values), percent(float(part.mean())), percent(float(part.max())), f"L{layer} · H{head}"
        )
    show(rows, error=True)
    save_figure(answer_figure(shares, names, loaded.name), out / "answer.png")
    by_token = shares.mean(("layer", "head")).to_dataframe("share").reset_index()
    by_token.insert(2, "name", [names[at - prompt] for at in by_token["token"]])
    for name, found in (("heads.csv", by_head.to_dataframe("share").reset_index()), ("tokens.csv", by_token)):
        write_atomically(out / name, found.to_csv(index=False).encode())
    found = run.profile(loaded.model, text, tokenizer=tokenizer, probe=False).rounded()
    found.attrs["model"] = loaded.name
    found.save(out / PROFILE)
    print_line("Report", found.report(out / "report.html"), main=True, error=True)
    print_files([out / name for name in (PROFILE, "heads.csv", "tokens.csv", "answer.png")], error=True)


def _ending(new: list[int], text: str, stop: tuple[str, ...], limit: str, most: int) -> str:
    """Why the text ends where it does."""
    if found := [one for one in stop if one in text]:
        return f"stopped before {found[0]!r}"
    if len(new) < most:
        return "stopped at the end token"
    return f"stopped at {limit}"


def _most_tokens(model: DecoderLM, prompt: int, tokens: int, *, beyond: bool) -> int:
    """How many new tokens the positions allow: the last token is not read by the model, so it needs no position."""
    learned, context = model.positions is not None, model.config.context
    if beyond and not learned:
        return tokens
    if prompt > context:
        why = "has learned positions" if learned else "was trained; --beyond reads all of them"
        raise InputError(f"prompt has {prompt:,} tokens, expected at most {context:,}, for which the model {why}")
    return min(tokens, context - prompt + 1)


def _caches(text: str) -> Callable[[int, int], Iterator[Cache]]:
    """A function that makes the caches of all layers, called with the number of tokens to expect and of layers."""
    from qkv import cache
    from qkv.cache.evicting import POLICIES

    if text == "full":
        return lambda tokens, layers: (cache.Full(tokens) for _ in range(layers))
    kind, _, rest = text.partition(":")
    sizes = [int(x) for x in rest.split(",") if x.isascii() and x.isdigit()]
    known = [name for name in POLICIES.names() if name not in ("full", "window")]
    if kind not in known or len(rest.split(",")) != len(sizes) or len(sizes) != (1 if kind == "sliding" else 2):
        others = ", ".join(f"{name}:N,R" for name in known[3:])
        raise InputError(
            f"--cache is {text!r}, expected full, sliding:N, sinks:S,N, heavy:H,R, {others} with numbers of keys"
        )
    make = POLICIES.load(kind)
    made = make(*sizes)  # raises for sizes that are not allowed
    if isinstance(made, cache.Evicting):
        return lambda _, layers: iter(made.for_layers(layers))
    return lambda _, layers: (make(*sizes) for _ in range(layers))


def _first_piece(pieces: Iterator[str], capacity: int) -> str | None:
    """The first piece of the continuation, None if there is none; `InputError` if the cache does not fit in memory."""
    try:
        return next(pieces, None)
    except (RuntimeError, TypeError) as error:  # TypeError: the number of keys overflows torch's integers
        if "memory" not in str(error) and "overflow" not in str(error).lower():
            raise
        raise InputError(
            f"--tokens: no memory for a cache of {capacity:,} tokens with the prompt, expected fewer, or "
            "--cache sliding:N"
        ) from error


def _print(text: str, *, dim: bool = False) -> None:
    """Write to standard output and flush; control characters are escaped, because a terminal would obey them."""
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
        discard_output()
        raise InputError(f"standard output: cannot be written ({error.strerror})") from error


def _costs(state: DecoderState, prompt: int, before: int, seconds: float) -> list[str]:
    """Speed and cache size. The time counts from the first piece on, when the model had read `before` tokens."""
    new, timed = state.seen - prompt + 1, state.seen - before
    notes = [f"{new:,} token{'s' if new != 1 else ''}"]
    if timed and seconds > 0:
        notes += [f"{timed / seconds:,.1f} tokens/s", f"{1000 * seconds / timed:.1f} ms per token"]
    return [*notes, f"cache {state.nbytes:,} bytes"]
