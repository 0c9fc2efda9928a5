"""What the pages of the ledger share: file names, links to claims, and marks of verdicts."""

from __future__ import annotations

import re

from research.claims.claim import CLAIMS, KINDS, Claim, Verdict

MADE = "<!-- Made by `make claims`; do not edit. -->"
SMALL = ("[experiment ", "the bundled model ", "[study of ")
"""The prefixes of entries in `Verdict.by` that refer to small models: toy models, bundled models, MiniLM."""
_SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z“])")


def slug(source: str) -> str:
    """The name of a source's page, without its suffix."""
    return source.replace(" ", "-")


def claims_of(source: str) -> list[Claim]:
    """The claims of a source, by number."""
    return sorted((c for c in CLAIMS.values() if c.source == source), key=lambda c: c.id)


def mark(kind: str) -> str:
    """A kind of verdict, with the class that colours it."""
    return f'<span class="verdict {kind.replace(" ", "-")}">{KINDS[kind]}</span>'


def link(c: Claim) -> str:
    """The number of a claim, linked to its entry."""
    return f"[{c.id}]({slug(c.source)}.md#{c.id.lower()})"


def linked(text: str) -> str:
    """The text with all numbers of claims that are not links yet, such as C014, replaced by links."""
    return re.sub(r"(?<![\[\w`])C\d{3}\b", lambda m: link(CLAIMS[m[0]]) if m[0] in CLAIMS else m[0], text)


def first_sentence(text: str) -> str:
    """The first sentence of a text."""
    return re.split(_SENTENCE, text)[0]


def from_small_models(verdict: Verdict) -> bool:
    """True if the verdict depends on small models."""
    return any(by.startswith(SMALL) for by in verdict.by)
