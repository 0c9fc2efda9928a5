"""Functions that make verdicts: from a condition that a check computed, an experiment, or a publication."""

from __future__ import annotations

from collections.abc import Iterable

from research.claims.claim import KINDS, Drifted, Verdict
from research.claims.results import result, verdict_in

KIND_OF = {
    "holds": "holds",
    "does not hold": "false",
    "holds only when": "only when",
    "undecided": "undecided",
    "not seen at this scale": "unseen",
    "cannot be seen here": "unseen",
}
"""The kind of verdict for each outcome of an experiment."""


def _verdict(condition: bool, kind: str, text: str, by: tuple[str, ...]) -> Verdict:
    if not condition:
        raise Drifted(f"the check no longer finds that: {text}")
    return Verdict(kind, text, by)


def holds(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds; `text` states the numbers."""
    return _verdict(bool(condition), "holds", text, by)


def false(condition: bool, text: str, *by: str) -> Verdict:
    """The claim is false; `condition` is the computed contradiction, `text` the correct value and the likely reason."""
    return _verdict(bool(condition), "false", text, by)


def only_when(condition: bool, text: str, *by: str) -> Verdict:
    """The claim holds only under a condition that it does not state; `condition` tests it with and without that."""
    return _verdict(bool(condition), "only when", text, by)


def unseen(text: str, *by: str, unless: bool = False) -> Verdict:
    """The claim cannot be decided here; `text` says why, and what would decide it. Raises `Drifted` if `unless`."""
    if unless:
        raise Drifted(f"the claim can be decided now, but the check says: {text}")
    return Verdict("unseen", text, by)


def cited(kind: str, text: str, *links: str) -> Verdict:
    """A verdict on a fact about publications, which needs no computation; `links` are the sources."""
    if not links or not all("](http" in link for link in links):
        raise Drifted("a cited verdict needs Markdown links")
    return Verdict(kind, text, links)


def experiment(id_: str, name: str, wording: str | None = None) -> Verdict:
    """The computed verdict of `qkv experiment NAME` on a claim, from the results that `research.claims.results` reads.

    If several experiments cover a claim, the check calls this for each and combines the verdicts.

    Args:
        id_: the number of the claim.
        name: the name of the experiment.
        wording: a sentence to put before the experiment's own text, or None.

    Raises:
        MissingResult: if there is no result of the experiment, or it has no verdict on the claim.
    """
    verdict = verdict_in(result(name), name, id_)
    text = (verdict["text"] if wording is None else f"{wording} {verdict['text']}").replace("<s>", "`<s>`")
    return Verdict(KIND_OF[verdict["holds"]], text, (f"[experiment `{name}`](../experiments/README.md#{name})",))


def together(id_: str, *names: str) -> Verdict:
    """The common verdict of several experiments on a claim, see `common`, with the text of each.

    >>> together("C061", "emergence").kind
    'holds'
    """
    found = [experiment(id_, name) for name in names]
    text = " ".join(f"`{name}`, {KINDS[v.kind]}: {v.text}" for name, v in zip(names, found, strict=True))
    return Verdict(common(v.kind for v in found), text, tuple(link for v in found for link in v.by))


def common(kinds: Iterable[str]) -> str:
    """The common verdict: the kind of all that decide, "only when" if they differ.

    >>> common(["holds", "undecided"]), common(["holds", "false"]), common(["unseen", "undecided"])
    ('holds', 'only when', 'undecided')
    """
    found = list(kinds)
    decided = {kind for kind in found if kind not in ("undecided", "unseen")}
    if len(decided) > 1:
        return "only when"
    return decided.pop() if decided else "undecided" if "undecided" in found else "unseen"
