"""Makes docs/claims from the verdicts: an index, and one page per source."""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkv_lab.experiments.evidence import Interval
from research.claims.claim import CLAIMS, KINDS, SOURCES, Claim, Finding, Verdict
from research.claims.evidence import evidence_of
from research.claims.settled import Entry

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
        *_index_counts(found),
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
        "These verdicts depend on small models: most were trained for the purpose, three are qkv-mini, MiniLM and",
        "SmolLM2. They contradict the claim in its general form, but do not show whether it holds for large models.",
        "",
        *_wrong(found, small=True),
        *_undecided(found),
    ]
    lines += ["```{toctree}", ":hidden:", "", *map(slug, SOURCES), "```", ""]
    return "\n".join(lines)


def can_fail(file: Path) -> list[str]:
    """A paragraph: how many checks notice a wrong answer; no lines if the file does not exist.

    Args:
        file: JSON with the claims whose checks are `computed`, and those whose checks `cannot` fail.
    """
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    computed, able = len(found["computed"]), len(found["computed"]) - len(found["cannot"])
    rest = f" The others are {', '.join(link(CLAIMS[id_]) for id_ in found['cannot'])}." if found["cannot"] else ""
    return [
        "A check is worth something only if it can fail. Wrong answers were injected into what each computed check",
        f"computes: {able} of {computed} ({100 * able / computed:.1f} %) then contradict their verdict.{rest}",
        "",
    ]


def _index_counts(found: Mapping[str, Verdict]) -> Iterator[str]:
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
    """The false claims by source, of small models or not, each with the first sentence of its verdict."""
    lines = []
    for source in SOURCES:
        wrong = [
            c for c in _of_kind(source, "false", found) if any(by.startswith(SMALL) for by in found[c.id].by) == small
        ]
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


PUBLISHED = Path(__file__).parents[2] / "lab" / "qkv_lab" / "claims.json"
"""All verdicts with their evidence, which `make claims` writes and `qkv claims` reads."""


def pages(found: Mapping[str, Verdict]) -> dict[str, str]:
    """The texts of all pages, by file name.

    Args:
        found: the verdicts on all claims.
    """
    return {f"{slug(source)}.md": _page(source, found) for source in SOURCES} | {"index.md": index(found)}


def published() -> dict[str, Verdict]:
    """The verdicts in claims.json, from which the documentation is built without running a check."""
    return verdicts(json.loads(PUBLISHED.read_text(encoding="utf-8")))


def verdicts(entries: Iterable[Mapping[str, Any]]) -> dict[str, Verdict]:
    """The verdicts in entries of claims.json, by the number of the claim."""
    return {
        one["claim"]: Verdict(
            one["verdict"], one["because"], tuple(one["links"]), tuple(Finding(**finding) for finding in one["models"])
        )
        for one in entries
    }


def _part(section: str) -> str:
    """The heading for the claims of a section: 4.2 is under Section 4, an exercise under its lab."""
    if found := re.match(r"(\d+)(?: (.+))?", section):
        number, name = found.groups()
        return f"Section {number}: {name}" if name else f"Section {number}"
    if found := re.match(r"Ex (\d+)", section):
        return f"Lab {found[1]}"
    if re.fullmatch(r"Q\d+", section):
        return "Questions"
    return section.replace("App. ", "Appendix ")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _settled(id_: str, verdict: Verdict) -> list[str]:
    """What the verdict rests on: links, and for an experiment intervals, seeds, budget and command."""
    own = [by.removeprefix("the ") for by in verdict.by if by.startswith(SMALL)]
    read = [by for by in verdict.by if not by.startswith(SMALL)]
    lines = [f"Settled with small models: {', '.join(own)}."] if own else []
    lines += [f"To read: {', '.join(read)}."] if read else []
    found = [" ".join(lines), ""] if lines else []
    how = [f"{one} Command: `{one.command}`." for one in evidence_of(id_, verdict)]
    if any(by.startswith("[study of ") for by in verdict.by):
        how.append(f"`python -m research.claims {id_} --model MODEL` judges the claim on one more model.")
    found += [" ".join(how), ""] if how else []
    return found


def _table(findings: Sequence[Finding]) -> list[str]:
    """The verdicts on single models."""
    if not findings:
        return []
    rows = [f"| {f.model} | {f.length} | {mark(f.kind)} | {f.number} |" for f in findings]
    return ["| model | text | verdict | measured |", "|---|---|---|---|", *rows, ""]


def _page(source: str, found: Mapping[str, Verdict]) -> str:
    claims = claims_of(source)
    parts = {_part(c.section): [other for other in claims if _part(other.section) == _part(c.section)] for c in claims}
    counts = Counter(found[c.id].kind for c in claims)
    lines = [f"# Claims of the {source}", "", MADE, "", f"*{SOURCES[source]}*. [All sources](index.md)", ""]
    lines += [f"{len(claims)} claims: {' · '.join(f'{mark(kind)} {counts[kind]}' for kind in KINDS)}", ""]
    lines += [" · ".join(f"[{part}](#{_anchor(part)})" for part in parts), ""]
    for part, of_part in parts.items():
        lines += [f"## {part}", ""]
        for c in of_part:
            verdict = found[c.id]
            lines += ["---", ""] if c is not of_part[0] else []
            # A heading is an anchor on the site and on a forge, which both call it c001.
            lines += [f"### {c.id}", "", f"{c.section} · {mark(verdict.kind)}", ""]
            lines += [f"> {c.text}", "", linked(verdict.text), ""]
            lines += [*_table(verdict.findings), *_settled(c.id, verdict)]
            lines += ["````{dropdown} The check", "```python", _code(c), "```", "````", ""]
    return "\n".join(lines)


def _code(c: Claim) -> str:
    """The source code of the check, without its decorator, or its entry in claims.toml."""
    if isinstance(c.check, Entry):
        return c.check.code
    text = textwrap.dedent(inspect.getsource(c.check))
    return text[text.index("def ") :].rstrip()
