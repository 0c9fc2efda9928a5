"""`qkv claims`: what five courses claim about attention, with the verdicts of the ledger and their evidence."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from qkv.cli.terminal import show, table
from qkv.errors import InputError, nearest

if TYPE_CHECKING:
    from rich.text import Text

VERDICTS = Path(__file__).parents[1] / "claims.json"
"""All verdicts; `make claims` in a clone runs the checks and writes them."""
KINDS = {
    "holds": "holds",
    "false": "false",
    "only when": "holds only when …",
    "undecided": "undecided",
    "unseen": "cannot be settled here",
}
COLOURS = {"holds": "green", "false": "red", "only when": "yellow", "undecided": "magenta", "unseen": "dim"}
Source = Literal["chapter", "notebook", "lesson", "deep dive", "overview"]
Kind = Literal["holds", "false", "only when", "undecided", "unseen"]


def claims(
    ids: Annotated[tuple[str, ...], Positional, arg(metavar="[C014 …]", help_behavior_hint="")] = (),
    /,
    *,
    source: Annotated[Source | None, arg(metavar="COURSE", help_behavior_hint="")] = None,
    verdict: Annotated[Kind | None, arg(metavar="VERDICT", help_behavior_hint="")] = None,
    as_json: Annotated[bool, FlagCreatePairsOff, arg(name="json")] = False,
) -> None:
    """Show what five courses claim about attention: 386 claims, each with a verdict that was computed.

    A claim holds, is false, holds only when …, is undecided, or cannot be settled here. Without arguments the command
    counts the verdicts by source. With numbers of claims, or a choice of them, it prints each verdict with its numbers
    and, for models that were trained, intervals, budget and the command that repeats them.

    The checks themselves are in a clone of the repository: python -m research.claims C014 runs one, and
    python -m research.claims --model MODEL judges the claims about attention sinks on your own model.

    qkv claims                                  (the verdicts by source)

    qkv claims C014 C078                        (two claims, with their evidence)

    qkv claims --verdict false --source lesson  (what is wrong in a course)

    Args:
        ids: Numbers of claims; all if you give none.
        source: Only the claims of this course: chapter, notebook, lesson, "deep dive" or overview.
        verdict: Only claims with this verdict: holds, false, "only when", undecided or unseen.
        as_json: Print the claims as JSON.
    """
    every = {one["claim"]: one for one in json.loads(VERDICTS.read_text(encoding="utf-8"))}
    ids = numbers(ids, every)
    chosen = [
        one
        for one in (every[id_] for id_ in ids or every)
        if source in (None, one["source"]) and verdict in (None, one["verdict"])
    ]
    if as_json:
        print(json.dumps(chosen, indent=1, ensure_ascii=False))
    elif ids or source or verdict:
        print_claims(chosen)
    else:
        count(chosen)


def numbers(ids: Iterable[str], every: Collection[str]) -> tuple[str, ...]:
    """The numbers of claims in upper case, each once; `InputError` for one that is not among `every`."""
    found = tuple(dict.fromkeys(id_.upper() for id_ in ids))
    for id_ in found:
        if id_ not in every:
            padded = "C" + id_.lstrip("C").zfill(3)  # of C14, whose characters are nearer to C314
            hint = f"; did you mean {padded!r}?" if padded in every else nearest(id_, every)
            raise InputError(f"claim is {id_!r}, expected {min(every)} to {max(every)}{hint}")
    return found


def count(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print the number of verdicts of each kind, by source."""
    rows = table("source", *(f">{word}" for word in (*KINDS.values(), "all")))
    for source in (*dict.fromkeys(one["source"] for one in entries), None):
        numbers = Counter(one["verdict"] for one in entries if source in (None, one["source"]))
        cells = (*(str(numbers[kind]) for kind in KINDS), str(numbers.total()))
        rows.add_row(source or "all", *cells, end_section=source is None)
    show(rows)


def print_claims(entries: Iterable[Mapping[str, Any]]) -> None:
    """Print each claim with its verdict and evidence; a verdict is None if the check of the claim failed."""
    from rich.text import Text

    for one in entries:
        show(Text.assemble((one["claim"], "bold"), (f"  {one['source']}, {one['section']}", "dim")))
        show(Text(one["text"], "italic"))
        if one["verdict"] is None:
            show(Text(f"{one['state']}: {one['because']}\n", "red"))
            continue
        show(Text.assemble(word(one["verdict"]), "  ", one["because"]))
        if one["models"]:
            rows = table("model", "text", "verdict", "measured")
            for row in one["models"]:
                rows.add_row(row["model"].replace("`", ""), row["length"], word(row["kind"]), row["number"])
            show(rows)
        for evidence in one["evidence"]:
            show(Text(f"{evidence['summary']} Repeat it: {evidence['command']}", "dim"))
        read = [_plain(link) for link in one["links"] if not link.startswith(("[experiment ", "[study of "))]
        if read:
            show(Text(f"See {', '.join(read)}", "dim"))
        show("")


def word(kind: str) -> Text:
    """The words for a kind of verdict, in its colour."""
    from rich.text import Text

    return Text(KINDS[kind], COLOURS[kind])


def _plain(link: str) -> str:
    """A Markdown link as text: its address follows if it is on the web."""
    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", lambda m: f"{m[1]} {m[2]}" if m[2].startswith("http") else m[1], link)
