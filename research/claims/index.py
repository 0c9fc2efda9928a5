"""The index of docs/claims: counts by source, what is false, what is undecided, and how many checks can fail."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from qkv_lab.experiments.evidence import Interval
from research.claims.claim import KINDS, SOURCES, Claim, Verdict, find
from research.claims.evidence import evidence_of
from research.claims.markdown import MADE, claims_of, first_sentence, from_small_models, link, slug

MUTATION = Path(__file__).parent / "mutation.json"
"""What mutation tests of the checks found, if they were run."""
MOST = 1000
"""The largest number of seeds that is worth an estimate."""


def index(found: Mapping[str, Verdict], mutation: Path = MUTATION) -> str:
    """The page, in Markdown.

    Args:
        found: the verdicts on all claims.
        mutation: the file for `can_fail`.
    """
    lines = [
        "# Claims",
        "",
        MADE,
        "",
        "This package implements the attention mechanisms that five course documents describe. The documents also make",
        f"{len(found)} claims that can be checked. Each is checked here: by a computation, an experiment of the",
        "[lab](../experiments/README.md), a [study](../howto/sinks-of-a-model.md) of trained models,",
        "or, if it is about publications, by reading them. Verdicts are computed: if the result of a check contradicts",
        "its verdict, this page cannot be written and a test fails. The code of each check is below its claim.",
        "`qkv claims C014` prints a verdict with its evidence; in a clone `make claims` runs all checks.",
        "",
        *can_fail(mutation),
        *_counts(found),
        "",
        "An experiment trains small models, of thousands to a few hundred thousand parameters: its verdict holds for",
        "these. *Undecided* means that the interval of what was measured contains the bound of the claim.",
        "*Cannot be settled here* means that no model here can decide the claim; the text says what would.",
        "",
        "## All errors",
        "",
        "Most errors are about rounding, a name, or a word such as *only* or *never*. None changes the definition of",
        "attention.",
        "",
        *_wrong(found, small=False),
        "## What small models contradict",
        "",
        "These verdicts depend on small models: most were trained for the purpose, two are qkv-mini and MiniLM. They",
        "contradict the claim in its general form, but do not show whether it holds for large models.",
        "",
        *_wrong(found, small=True),
        *_undecided(found),
    ]
    lines += ["```{toctree}", ":hidden:", "", *map(slug, SOURCES), "```", ""]
    return "\n".join(lines)


def can_fail(file: Path) -> list[str]:
    """A paragraph: how many checks notice a wrong answer; no lines if the file does not exist.

    Args:
        file: JSON with the number of `computed` checks, how many of them `can_fail`, and the claims that `cannot`.
    """
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    computed, able, unable = found["computed"], found["can_fail"], found["cannot"]
    rest = f" The others are {', '.join(link(find(id_)) for id_ in unable)}." if unable else ""
    share = f"{able} of {computed} ({100 * able / computed:.1f} %)"
    return [
        "A check is worth something only if it can fail. Wrong answers were injected into what each computed check",
        f"computes: {share} then contradict their verdict.{rest}",
        "",
    ]


def _counts(found: Mapping[str, Verdict]) -> Iterator[str]:
    """The table of verdicts by source."""
    yield "| source | " + " | ".join(KINDS.values()) + " | all |"
    yield "|---|" + "---:|" * (len(KINDS) + 1)
    for source, title in SOURCES.items():
        counts = Counter(found[c.id].kind for c in claims_of(source))
        row = " | ".join(str(counts[kind]) for kind in KINDS)
        yield f"| the [{source}]({slug(source)}.md): *{title}* | {row} | {counts.total()} |"
    total = Counter(v.kind for v in found.values())
    yield f"| **all** | {' | '.join(str(total[kind]) for kind in KINDS)} | {total.total()} |"


def _wrong(found: Mapping[str, Verdict], *, small: bool) -> list[str]:
    """The false claims by source, each with the first sentence of its verdict."""
    lines = []
    for source in SOURCES:
        wrong = [c for c in _of_kind(source, "false", found) if from_small_models(found[c.id]) == small]
        lines += [f"**The {source}**", ""] if wrong else []
        for c in wrong:
            lines += [f"- {link(c)}: {c.text}\\", f"  → {first_sentence(found[c.id].text)}"]
        lines += [""] if wrong else []
    return lines


def _undecided(found: Mapping[str, Verdict]) -> list[str]:
    """A section with the undecided claims, their intervals, and what would decide them; empty if there are none."""
    claims = [c for source in SOURCES for c in _of_kind(source, "undecided", found)]
    if not claims:
        return []
    lines = ["## What is undecided", "", "The interval contains the bound of the claim.", ""]
    for c in claims:
        told = [f"{one} {needed(one.intervals)}".strip() for one in evidence_of(c.id, found[c.id]) if one.intervals]
        undecided = [f for f in found[c.id].findings if f.kind == "undecided" and f.length]
        told += [f"{f.model}, {f.length}: {f.number}. More texts would decide." for f in undecided]
        lines += [f"- {link(c)}: {c.text}\\", f"  → {' '.join(told) or first_sentence(found[c.id].text)}"]
    return [*lines, ""]


def needed(intervals: tuple[Interval, ...]) -> str:
    """A sentence on how many seeds would decide, if the means stay: a width falls as the square root of the number.

    It is empty if all intervals clear the bound, or have no width because there is one seed.

    >>> needed((Interval("", 10, 0.6, 0.4, 0.8, 0.5, True),))
    'About 40 seeds would decide if the mean stays.'
    """
    seeds = [
        one.n * ((one.high - one.low) / 2 / max(abs(one.mean - one.bound), 1e-12)) ** 2
        for one in intervals
        if one.clears is None and not one.unless and math.isfinite(one.high - one.low)
    ]
    if not seeds:
        return ""
    if max(seeds) > MOST:
        return f"More than {MOST:,} seeds would be needed: what was measured is at the bound."
    return f"About {math.ceil(max(seeds) - 1e-9)} seeds would decide if the mean stays."


def _of_kind(source: str, kind: str, found: Mapping[str, Verdict]) -> list[Claim]:
    return [c for c in claims_of(source) if found[c.id].kind == kind]
