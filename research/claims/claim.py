"""Claims, verdicts, and the decorator that registers a check for a claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qkv.errors import InputError, nearest

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
    "undecided": "undecided",
    "unseen": "cannot be settled here",
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
    by: tuple[str, ...] = field(default=())
    """Markdown links to further evidence: experiments, studies, publications. The code of the check is always shown."""
    findings: tuple[Finding, ...] = field(default=())
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


def claim(id_: str, source: str, section: str, text: str) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Register the decorated function as the check of a claim.

    Args:
        id_: the number of the claim, such as C014.
        source: a key of `SOURCES`.
        section: the section of the source.
        text: the claim in one sentence, paraphrased. Markdown.
    """
    if source not in SOURCES or id_ in CLAIMS:
        raise InputError(f"claim {id_}: source is {source!r}, expected one of {', '.join(SOURCES)}, each id once")

    def register(check: Callable[[], Verdict]) -> Callable[[], Verdict]:
        CLAIMS[id_] = Claim(id_, source, section, text, check)
        return check

    return register


def find(id_: str) -> Claim:
    """The claim of a number."""
    if id_ not in CLAIMS:
        known = f"{min(CLAIMS)} to {max(CLAIMS)}" if CLAIMS else "a claim that is loaded"
        padded = "C" + id_.lstrip("Cc").zfill(3)  # of C14, whose characters are nearer to C314
        hint = f"; did you mean {padded!r}?" if padded in CLAIMS else nearest(id_, CLAIMS)
        raise InputError(f"claim is {id_!r}, expected {known}{hint}")
    return CLAIMS[id_]
