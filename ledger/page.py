"""docs/claims: the ledger as pages, one a source, written from the verdicts."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ledger.claim import CLAIMS, KINDS, SOURCES, Claim, Verdict

PAGES = Path(__file__).parents[1] / "docs" / "claims"
MADE = "<!-- Made by `make claims`; do not edit. -->"


def pages(found: Mapping[str, Verdict]) -> dict[str, str]:
    """File name: text, of all pages and of verdicts.json."""
    texts = {f"{_slug(source)}.md": _page(source, found) for source in SOURCES}
    kinds = {id_: verdict.kind for id_, verdict in sorted(found.items())}
    return texts | {"index.md": _index(found), "verdicts.json": json.dumps(kinds, indent=0) + "\n"}


def _slug(source: str) -> str:
    return source.replace(" ", "-")


def _of(source: str) -> list[Claim]:
    return sorted((c for c in CLAIMS.values() if c.source == source), key=lambda c: c.id)


def _badge(verdict: Verdict) -> str:
    return f'<span class="verdict {verdict.kind.replace(" ", "-")}">{KINDS[verdict.kind]}</span>'


def _index(found: Mapping[str, Verdict]) -> str:
    lines = [
        "# Claims",
        "",
        MADE,
        "",
        "Five course documents taught us attention, and this package is what they describe. They also make",
        f"{len(found)} claims that can be checked, and here each one is: by a computation, an experiment of the",
        "[lab](../experiments/README.md), a trial of a minute, or, where it is about publications, by reading them.",
        "Verdicts are computed. A check that no longer finds what its verdict says stops this page from being made,",
        "and fails a test. Nobody needs to trust a sentence: under each claim is the code that settled it.",
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
        "An experiment or a trial trains small models, of thousands to a few million parameters: its verdict holds",
        "for these. *Cannot be settled here* means that nothing at hand decides it, and says what would.",
        "",
        "## The errors, all in one place",
        "",
        "To find these took a computer and patience; to have written the documents took more. Most are slips of",
        "rounding, of a name, or of a word such as *only* or *never*. None changes what attention is.",
        "",
    ]
    for source in SOURCES:
        wrong = [c for c in _of(source) if found[c.id].kind == "false"]
        lines += [f"**The {source}**", ""] if wrong else []
        lines += [f"- [{c.id}]({_slug(source)}.md#{c.id.lower()}): {c.text} {_badge(found[c.id])}" for c in wrong]
        lines += [""] if wrong else []
    lines += ["```{toctree}", ":hidden:", "", *map(_slug, SOURCES), "```", ""]
    return "\n".join(lines)


def _page(source: str, found: Mapping[str, Verdict]) -> str:
    lines = [f"# Claims of the {source}", "", MADE, "", f"*{SOURCES[source]}*. [All sources](index.md)", ""]
    for c in _of(source):
        verdict = found[c.id]
        lines += [f"({c.id.lower()})=", f"**{c.id}** · {c.section} · {_badge(verdict)}", ""]
        lines += [f"*{c.text}*", "", verdict.text, ""]
        lines += [f"Settled by {', '.join(verdict.by)}.", ""] if verdict.by else []
        lines += ["````{dropdown} The check", "```python", _code(c), "```", "````", ""]
    return "\n".join(lines)


def _code(c: Claim) -> str:
    """The check without its decorator."""
    text = textwrap.dedent(inspect.getsource(c.check))
    return text[text.index("def ") :].rstrip()
