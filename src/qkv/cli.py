"""The command line: `qkv profile`, `qkv generate`, `qkv bench`."""

from __future__ import annotations

import math
import os
import secrets
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import qkv
from qkv.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qkv.cache import Cache
    from qkv.models.decoder import DecoderLM, DecoderState
    from qkv.profiler.data import Profile

FIGURES = ("overview", "received", "entropy", "sink")


def profile(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "minilm",
    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]", help_behavior_hint="")] = None,
    /,
    *,
    file: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None,
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None,
    layers: Annotated[str | None, tyro.conf.arg(metavar="0,3,8-11", help_behavior_hint="")] = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-profile"),
    local_window: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    map_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 256,
    partial: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Where does a model attend? Exact, for every head, in memory linear in the length of the text.

    Runs the model once on a text, prints what stands out, and writes to DIR: report.html (one file, opens offline),
    figures as PNG, and profile.qkv.zip, the data itself (open it with qkv.Profile.load).

    qkv profile                                    (a trained BERT on a bundled text)

    qkv profile gpt2 "The cat sat on the mat."     (a model of the Hugging Face hub)

    qkv profile ./my-model --file book.txt         (a folder, and a text of your own)

    qkv profile random-gpt2 --tokens 32768         (what a long context costs)

    Args:
        model: A folder with a Hugging Face model or one saved by qkv, a name on the hub, "minilm" (a trained BERT that
            comes with the demo extra) or "random-gpt2" (GPT-2's shape, untrained, any length: to measure cost).
        text: The text to run on; a bundled passage if none is given.
        file: Read the text from this UTF-8 file instead; - is standard input.
        tokens: Use this many tokens: of the text or file if given, else of Python's own standard library.
        target: For an encoder-decoder, what its decoder reads; the text itself if not given.
        layers: Attention layers to keep; all if not given.
        dtype: Of the weights.
        out: Folder to write to; made if it is not there.
        local_window: "Local" is at most this many tokens away.
        map_tokens: Keep whole attention maps for texts up to this long.
        partial: Go on even if some attention of the model cannot be observed.
    """
    from rich.console import Console
    from rich.markup import escape

    from qkv.profiler import models, run

    wanted = None if layers is None else _numbers(layers)
    if text is not None and file is not None:
        raise InputError("text and --file are both given, expected one of them")
    if tokens is not None and tokens < 1:
        raise InputError(f"--tokens is {tokens}, expected at least 1")
    passage = _passage(text, file, tokens)
    with _folder(out):
        with Console(stderr=True).status(f"loading {escape(model)}"):
            loaded = models.load(model, dtype=dtype, tokens=tokens or len(passage.encode()))
        inputs: Any = passage if tokens is None else _first_tokens(loaded, passage, tokens)
        result = run.profile(
            loaded.model,
            inputs,
            tokenizer=loaded.tokenizer,
            target=target,
            layers=wanted,
            local_window=local_window,
            map_tokens=map_tokens,
            partial=partial,
            name=loaded.name,
            command=" ".join(["qkv", *sys.argv[1:]]),
        )
        _show(result)
        _write(result, out)


def _numbers(text: str) -> list[int]:
    """0,3,8-11 as a list of numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise InputError(f"--layers is {text!r}, expected numbers and ranges such as 0,3,8-11")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _passage(text: str | None, file: Path | None, tokens: int | None) -> str:
    from qkv.profiler import texts

    if file is not None:
        return _read(file)
    if text is not None:
        return text
    return texts.default_text() if tokens is None else texts.library_text(16 * tokens + 1024)


def _read(file: Path) -> str:
    """A text file; standard input if its name is "-"."""
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise InputError(f"--file: cannot read {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--file: {file} is not UTF-8 text") from error


def _first_tokens(loaded: Any, text: str, tokens: int) -> dict[str, Any]:
    if loaded.tokenizer is None:
        raise InputError("--tokens needs a tokenizer, and this model has none")
    batch = loaded.tokenizer(text, return_tensors="pt")
    found = batch["input_ids"].shape[1]
    if found < tokens:
        raise InputError(f"--tokens is {tokens:,}, but the text has {found:,}")
    return {k: v[:, :tokens] for k, v in batch.items() if k in ("input_ids", "attention_mask")}


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """The folder, known to be writable before the work starts; gone again if it was made in vain."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {path} ({error.strerror})") from error
    try:
        yield
    except BaseException:
        if made and not any(path.iterdir()):
            path.rmdir()
        raise


def _write(result: Profile, out: Path) -> None:
    from rich.console import Console

    console = Console()
    with console.status("writing the report and figures"):
        result.save(out / "profile.qkv.zip")
        for name in FIGURES:
            _save_figure(getattr(result.plot, name)(), out / f"{name}.png")
        report = result.report(out / "report.html")
    console.print(f"[bold]Report[/bold]   {report}", soft_wrap=True, highlight=False)
    data = out / "profile.qkv.zip"
    console.print(f"[dim]Data     {data}   (qkv.Profile.load)[/dim]", soft_wrap=True, highlight=False)
    console.print(f"[dim]Figures  {', '.join(f'{n}.png' for n in FIGURES)}[/dim]", soft_wrap=True, highlight=False)


def _save_figure(figure: Any, path: Path) -> None:
    """Written to a temporary name and renamed: never half a picture."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(unfinished, format="png", dpi=160)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _show(result: Profile) -> None:
    """What stands out, as tables in the terminal."""
    from rich.console import Console

    from qkv.view.findings import headline

    console = Console()
    for group, data in result.groups.items():
        heads = result.heads(group)
        console.print(f"\n[bold]{_title(result, group)}[/bold]", highlight=False)
        console.print(headline(data, heads), highlight=False, markup=False)
        console.print(_head_table(heads))
        console.print(_token_table(result, group))


def _title(result: Profile, group: str) -> str:
    from rich.markup import escape

    sizes = result.groups[group].sizes
    parts = [] if len(result.groups) == 1 else [group]
    parts += [escape(result.attrs["model"]), f"{sizes['layer']} layers × {sizes['head']} heads"]
    parts += [f"{sizes['key']:,} tokens", f"{result.attrs['seconds']:.1f} s"]
    return " · ".join(parts)


def _head_table(heads: Any, each: int = 3, most: int = 15) -> Any:
    """The heads that do most purely what they do: up to `each` of every kind."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most telling heads", title_justify="left")
    table.add_column("head", no_wrap=True)
    table.add_column("goes to", no_wrap=True)
    for name in ("sink share", "entropy", "of uniform", "distance", "keys used"):
        table.add_column(name, justify="right")
    clear = heads[heads["target"] != "spread"].sort_values("target_share", ascending=False)
    telling = clear.groupby("target", sort=False).head(each).head(most)
    spread = heads[heads["target"] == "spread"].sort_values("participation", ascending=False).head(each)
    for rows in (telling, spread):
        for row in rows.sort_values("target", kind="stable").itertuples():
            table.add_row(
                f"{row.layer}.{row.head}", Text(row.goes_to), f"{row.sink_share:.0%}", f"{row.entropy:.2f}",
                f"{row.entropy_ratio:.0%}", _number(row.distance), _number(row.participation),
            )  # fmt: skip
    return table


def _token_table(result: Profile, group: str, most: int = 8) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Most attended tokens", title_justify="left")
    for name in ("token", "of all attention", "× its share of the text", "occurs"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for row in result.tokens(most, group).itertuples():
        token = row.token if row.token.strip() and row.token.isprintable() else repr(row.token)
        table.add_row(Text(token), f"{row.share:.1%}", f"{row.lift:.1f}", str(row.count))
    return table


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


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

    qkv generate gpt2 "Once upon a time"                         (a model of the Hugging Face hub)

    qkv generate ./my-model --file story.txt --greedy            (a folder, and a text of your own)

    qkv generate ./llama "Hi" --tokens 9999 --cache sinks:4,252  (on and on, in constant memory)

    printf "def sort(" | qkv generate ./my-model --file - > out.txt

    Args:
        model: A folder that qkv.models.checkpoint.save wrote, a folder with a GPT-2 or Llama of Hugging Face, or the
            name of one on the hub.
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
    from rich.markup import escape

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
    text = prompt if prompt is not None else _read(file or Path())
    seed = secrets.randbelow(2**32) if seed is None else seed
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {escape(model)}"):
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
        _forget_output()
        raise InputError(f"standard output: cannot be written ({error.strerror})") from error


def _costs(state: DecoderState, prompt: int, early: int, seconds: float) -> list[str]:
    """What it took, the tokens timed that came after the first piece of text (at `early`)."""
    new, timed = state.seen - prompt + 1, state.seen - early
    notes = [f"{new:,} token{'s' if new != 1 else ''}"]
    if timed and seconds > 0:
        notes += [f"{timed / seconds:,.1f} tokens/s", f"{1000 * seconds / timed:.1f} ms per token"]
    return [*notes, f"cache {state.nbytes:,} bytes"]


def bench(
    mechanisms: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MECHANISM …]")] = (),
    /,
    *,
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …")] = (512, 1024, 2048, 4096, 8192),
    heads: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    backward: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    memory: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N …", help_behavior_hint="")] = (),
    threads: Annotated[int, tyro.conf.arg(metavar="N")] = 2,
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 2.0,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("qkv-bench"),
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
) -> None:
    """How fast is each mechanism on this machine, beside what you would use instead?

    Times every mechanism and its rivals (torch's SDPA, FlexAttention compiled, weights formed by hand, x-transformers
    if it is installed) in alternation, and writes to DIR the numbers as JSON, a table as Markdown, and a figure.
    What is there already from the same machine and lengths stays: an interrupted run can be taken up with the rest.

    qkv bench                                      (everything, about ten minutes)

    qkv bench alibi window --lengths 4096 16384    (two mechanisms, two lengths)

    qkv bench causal --backward --dtype bfloat16   (a training step)

    Args:
        mechanisms: Names such as causal, sink, alibi, window, bigbird, sigmoid, entmax, linear; all if none is given.
        lengths: Tokens.
        heads: Heads, of size 64.
        dtype: Of queries, keys and values.
        backward: Time forward and backward together.
        memory: Also measure memory at these lengths, each in a process of its own (Linux).
        threads: Threads of torch.
        seconds: For each cell of the table; three turns at least.
        out: Folder to write to; made if it is not there.
        name: Of the files; made of the dtype, the heads and the pass if not given.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from qkv.bench import run, show
    from qkv.bench.contenders import MECHANISMS

    if any(n < 1 for n in (*lengths, *memory, heads, threads)) or not lengths:
        raise InputError("--lengths, --memory, --heads and --threads are counts, expected at least 1")
    import torch

    chosen = mechanisms or tuple(MECHANISMS)
    with _folder(out):
        stem = name or f"{dtype}-{heads}-{'both' if backward else 'forward'}"
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("")
            result = run.bench(
                chosen,
                sorted(set(lengths)),
                heads=heads,
                dtype=getattr(torch, dtype),
                backward=backward,
                threads=threads,
                seconds=seconds,
                memory=sorted(set(memory)),
                on_cell=lambda what: progress.update(task, description=what),
                path=out / f"{stem}.json",
            )
        (out / f"{stem}.md").write_text(show.markdown(result))
        show.figure(result, out / f"{stem}.png")
        console = Console()
        console.print(show.table(result))
        console.print(f"[dim]{out / stem}.json, .md, .png[/dim]", highlight=False)


COMMANDS: dict[str, Callable[..., None]] = {"profile": profile, "generate": generate, "bench": bench}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `qkv`. Bad input gets one sentence on standard error and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"qkv {qkv.__version__}")
        return 0
    try:
        arguments = arguments or ["--help"]
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="qkv", description=__doc_main__, args=arguments)
    except InputError as error:
        print(f"qkv: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("qkv: interrupted; nothing half-written was left behind", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read has left, as `head` does: nobody is there to be told
        _forget_output()
        return 141  # as of a program that the signal ended
    return 0


def _forget_output() -> None:
    """What is still to be written goes nowhere, or Python would try once more at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


__doc_main__ = "Attention you can compose, measure and explain. `qkv COMMAND --help` says more."

if __name__ == "__main__":
    sys.exit(main())
