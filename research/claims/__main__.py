"""`python -m research.claims`: run the checks of the ledger, write its pages, or judge a model by them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv._files import write_atomically
from qkv._untrusted import allow
from qkv.cli.shared import folder
from qkv.errors import InputError, renamed
from qkv_lab.cli.claims import count, numbers, print_claims


def claims(
    ids: Annotated[tuple[str, ...], Positional, arg(metavar="[C014 …]", help_behavior_hint="")] = (),
    /,
    *,
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None,
    results: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None,
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="")] = None,
    text: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None,
    as_json: Annotated[bool, FlagCreatePairsOff, arg(name="json")] = False,
    max_size: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None,
) -> None:
    """Check what five courses claim about attention, or judge the claims about attention sinks on your own model.

    Each claim has a check that computes its verdict: holds, false, holds only when …, undecided, or cannot be settled
    here. Without arguments the command runs all checks and counts the verdicts by source. With numbers of claims it
    prints their verdicts with the numbers and, for models that were trained, intervals, budget and the command that
    repeats them. The exit code is 0 if every check gives its verdict, 1 if one contradicts it or has no result to read,
    2 for wrong input.

    python -m research.claims                                  (all checks, a few minutes)

    python -m research.claims C014 C078                        (two claims, with their evidence)

    python -m research.claims --results qkv-experiments        (with results of your own runs of qkv experiment)

    python -m research.claims --model minilm                   (the claims about sinks on a model, beside others)

    python -m research.claims C061 C068 --model ./my-model --text book.txt --out sinks

    Args:
        ids: Numbers of claims; all if you give none.
        out: Write the pages of all claims to this folder, and all verdicts to the claims.json of qkv-lab; with --model,
            write sinks.json and sinks.png to it.
        results: Read the results of experiments from this folder, as qkv experiment --out wrote it, and compare with
            those that come with qkv. Without numbers of claims: those on which the folder has a verdict.
        model: Judge the claims about attention sinks on this model: a built-in model, a folder, or a name on the
            Hugging Face hub, as for qkv profile.
        text: With --model: a UTF-8 file from which 16 windows of up to 512 tokens are cut; a bundled text by default.
        as_json: Print the verdicts as JSON.
        max_size: Memory that a file which is opened may take, such as 8GB: see docs/howto/files-from-strangers.md.
    """
    from qkv._progress import bar
    from research.claims import page, show
    from research.claims.claim import CLAIMS
    from research.claims.results import claims_in, results_in
    from research.claims.run import check
    from research.claims.settled import load

    allow(max_size)
    load()
    ids = numbers(ids, CLAIMS)
    if model is None and text is not None:
        raise InputError("--text is for --model, expected --model MODEL, or no --text")
    if model is not None:
        if results is not None:
            raise InputError("--results is for experiments, expected no --results with --model")
        show.run_model(model, text, out, ids, as_json)
        return
    if ids and out is not None:
        raise InputError(f"--out writes the pages of all claims, expected no numbers of claims beside it, got {ids[0]}")
    began = time.perf_counter()
    with (
        renamed(results="--results"),
        results_in(results) if results else nullcontext(),
        folder(out) if out else nullcontext(),
    ):
        chosen = ids or sorted(CLAIMS)
        if results is not None and not ids and out is None:
            chosen = [id_ for id_ in claims_in(results) if id_ in CLAIMS]
            if not chosen:
                raise InputError(f"--results is {str(results)!r}, whose experiments judge no claim of the ledger")
        with bar("claims", "checks", len(chosen), show=len(chosen) > 5) as step:
            found = check(chosen, progress=step)
        if results is not None:
            shipped = page.published()
            found = [one | {"shipped": shipped[one["claim"]].kind} for one in found]
        failed = any(one["verdict"] is None for one in found)
        if as_json:
            print(show.text(found), end="")
        elif ids:
            print_claims(found)
        elif results is None or out is not None:
            count(found)
        if out is not None and not failed:
            for name, made in page.pages(page.verdicts(found)).items():
                write_atomically(out / name, made)
            if results is None:
                write_atomically(page.PUBLISHED, show.text(found))
        if results is not None and out is None and not as_json:
            show.compared(found, results)
        elif not ids and not as_json:
            show.summary(found, time.perf_counter() - began, out)
        if failed:
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Bad input prints one sentence and returns exit code 2."""
    try:
        tyro.cli(claims, prog="python -m research.claims", args=arguments)
    except InputError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
