"""Claims, verdicts, and the decorator that registers a check for a claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qkv.errors import InputError
from qkv_lab.cli.claims import KINDS

__all__ = ["CLAIMS", "KINDS", "SOURCES", "Claim", "Drifted", "Finding", "Verdict", "claim", "register"]

SOURCES = {
    "chapter": "Attention Mechanisms in Deep Learning: From First Principles to Attention Sinks",
    "notebook": "Chapter 2: The Attention Mechanism (a notebook)",
    "lesson": "2.3 Attention Mechanisms (with a build-along)",
    "deep dive": "Attention Mechanism Deep Dive (with interview questions)",
    "overview": "Attention Mechanisms: Learning Where to Focus",
}


class Drifted(AssertionError):  # noqa: N818  # a name without "Error"
    """The computed result of a check contradicts its verdict."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one model, for a claim that is judged on several."""

    model: str
    length: str
    """The length of the texts, such as "64 tokens"; empty if the model has its own."""
    kind: str
    """One of `KINDS`."""
    number: str
    """What was measured, with its interval; empty if the text of the verdict has the numbers."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    kind: str
    """One of `KINDS`."""
    text: str
    """The computed numbers. For a false claim also the correct value, for a conditional one the condition. Markdown."""
    by: tuple[str, ...] = ()
    """Markdown links to further evidence: experiments, studies, publications. The code of the check is always shown."""
    findings: tuple[Finding, ...] = ()
    """The verdicts on single models, if the claim is judged on several."""


@dataclass(frozen=True)
class Claim:
    """A statement of a source, paraphrased."""

    id: str
    source: str
    section: str
    text: str
    check: Callable[[], Verdict]


CLAIMS: dict[str, Claim] = {}


def register(one: Claim) -> None:
    """Enter a claim in the ledger."""
    if one.source not in SOURCES or one.id in CLAIMS:
        raise InputError(
            f"claim {one.id}: source is {one.source!r}, expected one of {', '.join(SOURCES)}, each id once"
        )
    CLAIMS[one.id] = one


def claim(section: str, text: str) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Register the decorated function as the check of a claim: c014 in the folder chapter of claim C014 of the chapter.

    Args:
        section: the section of the source.
        text: the claim in one sentence, paraphrased. Markdown.
    """

    def registered(check: Callable[[], Verdict]) -> Callable[[], Verdict]:
        folder = check.__module__.split(".")[-2]
        register(Claim(check.__name__.upper(), folder.replace("_", " "), section, text, check))
        return check

    return registered
