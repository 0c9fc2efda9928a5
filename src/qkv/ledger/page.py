"""Writes docs/claims from the verdicts: an index, one page per source, and verdicts.json."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from qkv.ledger.claim import CLAIMS, KINDS, SOURCES, Claim, Verdict

PAGES = Path(__file__).parents[3] / "docs" / "claims"
SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z“])")
MADE = "<!-- Made by `make claims`; do not edit. -->"
SMALL = ("[experiment ", "trial ", "the trial ", "the bundled model ")
"""The prefixes of entries in `Verdict.by` that refer to models trained in this project."""


def pages(found: Mapping[str, Verdict]) -> dict[str, str]:
    """The texts of all pages and of verdicts.json, by file name."""
    texts = {f"{_slug(source)}.md": _page(source, found) for source in SOURCES}
    kinds = {id_: verdict.kind for id_, verdict in sorted(found.items())}
    return texts | {"index.md": _index(found), "verdicts.json": json.dumps(kinds, indent=0) + "\n"}


def _slug(source: str) -> str:
    return source.replace(" ", "-")


def _of(source: str) -> list[Claim]:
    return sorted((c for c in CLAIMS.values() if c.source == source), key=lambda c: c.id)


def _badge(verdict: Verdict) -> str:
    return _mark(verdict.kind)


def _mark(kind: str) -> str:
    return f'<span class="verdict {kind.replace(" ", "-")}">{KINDS[kind]}</span>'


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


def _linked(text: str) -> str:
    """Replace the numbers of claims in a text, such as C014, by links."""
    return re.sub(r"(?<![\[\w`])C\d{3}\b", lambda m: _link(CLAIMS[m[0]]) if m[0] in CLAIMS else m[0], text)


def _link(c: Claim) -> str:
    return f"[{c.id}]({_slug(c.source)}.md#{c.id.lower()})"


def _counts(claims: Iterable[Claim], found: Mapping[str, Verdict]) -> str:
    counts = Counter(found[c.id].kind for c in claims)
    return " · ".join(f"{_mark(kind)} {counts[kind]}" for kind in KINDS)


def _trained(verdict: Verdict) -> bool:
    """True if the verdict depends on models trained in this project."""
    return any(by.startswith(SMALL) for by in verdict.by)


def _settled(verdict: Verdict) -> list[str]:
    own = [by.removeprefix("the ") for by in verdict.by if by.startswith(SMALL)]
    read = [by for by in verdict.by if not by.startswith(SMALL)]
    lines = [f"Settled with small models: {', '.join(own)}."] if own else []
    lines += [f"To read: {', '.join(read)}."] if read else []
    return [" ".join(lines), ""] if lines else []


def _index(found: Mapping[str, Verdict]) -> str:
    lines = [
        "# Claims",
        "",
        MADE,
        "",
        "This package implements the attention mechanisms that five course documents describe. The documents also make",
        f"{len(found)} claims that can be checked. Each is checked here: by a computation, an experiment of the",
        "[lab](../experiments/README.md), a short trial, or, if it is about publications, by reading them. Verdicts",
        "are computed: if the result of a check contradicts its verdict, this page cannot be written and a test fails.",
        "The code of each check is below its claim.",
        "",
        "| source | " + " | ".join(KINDS.values()) + " | all |",
        "|---|" + "---:|" * (len(KINDS) + 1),
    ]
    for source, title in SOURCES.items():
        counts = Counter(found[c.id].kind for c in _of(source))
        row = " | ".join(str(counts[kind]) for kind in KINDS)
        lines.append(f"| the [{source}]({_slug(source)}.md): *{title}* | {row} | {counts.total()} |")
    total = Counter(v.kind for v in found.values())
    lines.append(f"| **all** | {' | '.join(str(total[kind]) for kind in KINDS)} | {total.total()} |")
    lines += [
        "",
        "An experiment or a trial trains small models, of thousands to a few million parameters: its",
        "verdict holds for these. *Cannot be settled here* means that neither can decide the claim; the text says what",
        "would.",
        "",
        "## All errors",
        "",
        "Most errors are about rounding, a name, or a word such as *only* or *never*. None changes the definition of",
        "attention.",
        "",
        *_wrong(found, trained=False),
        "## What small models contradict",
        "",
        "These verdicts depend on small models that were trained for the purpose. They contradict the claim in its",
        "general form, but do not show whether it holds for large models.",
        "",
        *_wrong(found, trained=True),
    ]
    lines += ["```{toctree}", ":hidden:", "", *map(_slug, SOURCES), "```", ""]
    return "\n".join(lines)


def _wrong(found: Mapping[str, Verdict], *, trained: bool) -> list[str]:
    """List the false claims by source, each with the first sentence of its verdict."""
    lines = []
    for source in SOURCES:
        wrong = [c for c in _of(source) if found[c.id].kind == "false" and _trained(found[c.id]) == trained]
        lines += [f"**The {source}**", ""] if wrong else []
        for c in wrong:
            lines += [f"- {_link(c)}: {c.text}\\", f"  → {re.split(SENTENCE, found[c.id].text)[0]}"]
        lines += [""] if wrong else []
    return lines


def _page(source: str, found: Mapping[str, Verdict]) -> str:
    claims = _of(source)
    parts = _parts(claims)
    lines = [f"# Claims of the {source}", "", MADE, "", f"*{SOURCES[source]}*. [All sources](index.md)", ""]
    lines += [f"{len(claims)} claims: {_counts(claims, found)}", ""]
    lines += [" · ".join(f"[{part}](#{_anchor(part)})" for part in parts), ""]
    for part, of_part in parts.items():
        lines += [f"## {part}", ""]
        for c in of_part:
            verdict = found[c.id]
            lines += ["---", ""] if c is not of_part[0] else []
            lines += [f"({c.id.lower()})=", f"**{c.id}** · {c.section} · {_badge(verdict)}", ""]
            lines += [f"> {c.text}", "", _linked(verdict.text), "", *_settled(verdict)]
            lines += ["````{dropdown} The check", "```python", _code(c), "```", "````", ""]
    return "\n".join(lines)


def _code(c: Claim) -> str:
    """The source code of the check, without its decorator."""
    text = textwrap.dedent(inspect.getsource(c.check))
    return text[text.index("def ") :].rstrip()
