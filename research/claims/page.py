"""Makes docs/claims from the verdicts: an index, and one page per source."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from research.claims.claim import KINDS, SOURCES, Claim, Finding, Verdict
from research.claims.evidence import evidence_of
from research.claims.index import index
from research.claims.markdown import MADE, SMALL, claims_of, linked, mark, slug
from research.claims.settled import Entry

PUBLISHED = Path(__file__).parents[2] / "lab" / "qkv_lab" / "claims.json"
"""All verdicts with their evidence, which `make claims` writes and `qkv claims` reads."""


def pages(found: Mapping[str, Verdict]) -> dict[str, str]:
    """The texts of all pages, by file name.

    Args:
        found: the verdicts on all claims.

    Raises:
        MissingResult: if a verdict refers to an experiment without a result.
    """
    return {f"{slug(source)}.md": _page(source, found) for source in SOURCES} | {"index.md": index(found)}


def published() -> dict[str, Verdict]:
    """The verdicts in claims.json, from which the documentation is built without running a check."""
    entries = json.loads(PUBLISHED.read_text(encoding="utf-8"))
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


def _parts(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    found: dict[str, list[Claim]] = {}
    for c in claims:
        found.setdefault(_part(c.section), []).append(c)
    return found


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _counts(claims: Iterable[Claim], found: Mapping[str, Verdict]) -> str:
    counts = Counter(found[c.id].kind for c in claims)
    return " · ".join(f"{mark(kind)} {counts[kind]}" for kind in KINDS)


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
    parts = _parts(claims)
    lines = [f"# Claims of the {source}", "", MADE, "", f"*{SOURCES[source]}*. [All sources](index.md)", ""]
    lines += [f"{len(claims)} claims: {_counts(claims, found)}", ""]
    lines += [" · ".join(f"[{part}](#{_anchor(part)})" for part in parts), ""]
    for part, of_part in parts.items():
        lines += [f"## {part}", ""]
        for c in of_part:
            verdict = found[c.id]
            lines += ["---", ""] if c is not of_part[0] else []
            lines += [f"({c.id.lower()})=", f"**{c.id}** · {c.section} · {mark(verdict.kind)}", ""]
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
