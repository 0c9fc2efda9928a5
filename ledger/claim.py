"""A claim, its verdict, and the decorator that puts both into the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qkv.errors import InputError

SOURCES = {
    "chapter": "Attention Mechanisms in Deep Learning: From First Principles to Attention Sinks",
    "notebook": "Chapter 2: The Attention Mechanism (a notebook)",
    "lesson": "2.3 Attention Mechanisms (with a build-along)",
    "deep dive": "Attention Mechanism Deep Dive (with interview questions)",
    "overview": "Attention Mechanisms: Learning Where to Focus",
}
KINDS = {
    "holds": "holds",
    "false": "false",
    "only when": "holds only when …",
    "unseen": "cannot be settled here",
}


class Drifted(AssertionError):  # noqa: N818  # what happened
    """A check no longer finds what its verdict says."""


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    kind: str
    """One of `KINDS`."""
    text: str
    """The numbers found; of a false claim the right value, of a conditional one the condition. Markdown."""
    by: tuple[str, ...] = field(default=())
    """What else settles it: Markdown links to experiments, trials, publications. The check is always shown."""


@dataclass(frozen=True)
class Claim:
    """One statement of a source, in our words."""

    id: str
    source: str
    section: str
    text: str
    check: Callable[[], Verdict]


CLAIMS: dict[str, Claim] = {}


def claim(id_: str, source: str, section: str, text: str) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Enter a check into the ledger under its claim.

    Args:
        id_: as C014.
        source: a key of `SOURCES`.
        section: where in the source.
        text: what is claimed, in our words, one sentence. Markdown.
    """
    if source not in SOURCES or id_ in CLAIMS:
        raise InputError(f"claim {id_}: source is {source!r}, expected one of {', '.join(SOURCES)}, each id once")

    def enter(check: Callable[[], Verdict]) -> Callable[[], Verdict]:
        CLAIMS[id_] = Claim(id_, source, section, text, check)
        return check

    return enter
