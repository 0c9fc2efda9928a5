"""The ledger of claims: it is complete, and every check still gives the verdict on its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import make_larger
import pytest
from mdit_py_plugins.anchors.index import slugify

from qkv_lab.experiments.evidence import Holds
from research.claims import CLAIMS, Drifted, false, holds
from research.claims.claim import KINDS
from research.claims.mutation import PUBLISHED as SHARES
from research.claims.mutation import computed
from research.claims.page import pages, published
from research.claims.settled import load

load()
PAGES = Path(__file__).parents[2] / "docs" / "claims"
PUBLISHED = published()


def test_ledger_has_every_claim_of_the_sources() -> None:
    assert sorted(CLAIMS) == [f"C{i:03}" for i in range(1, 387)]
    assert set(PUBLISHED) == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(39))
def test_checks_give_the_verdicts_on_their_pages(tens: int) -> None:
    """For a changed verdict run `make claims`."""
    wrong = []
    for id_ in sorted(CLAIMS.keys() & {f"C{10 * tens + i:03}" for i in range(10)}):
        try:
            verdict = CLAIMS[id_].check()
        except Drifted as error:  # the condition of the verdict no longer holds
            wrong.append(f"{id_}: {error}")
            continue
        if verdict.kind != PUBLISHED[id_].kind or not is_readable(verdict.text):
            wrong.append(f"{id_} is now {verdict.kind!r}: {verdict.text}")
    assert not wrong, "\n".join(wrong)


def test_verdict_whose_condition_fails_raises_drifted() -> None:
    with pytest.raises(Drifted, match="no longer finds"):
        holds(False, "two is three")
    assert false(True, "two is two").kind == "false"


def test_links_to_claims_lead_to_a_heading_of_a_page_on_the_site_and_on_a_forge() -> None:
    docs, links = PAGES.parent, 0
    of_forge = re.compile(r"[^\w\- ]")
    headings = {page: re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M) for page in PAGES.glob("*.md")}
    for slug in (slugify, lambda title: of_forge.sub("", title.lower()).replace(" ", "-")):
        anchors = {page: {slug(title) for title in titles} for page, titles in headings.items()}
        for page in (docs.parent / "README.md", *docs.rglob("*.md")):
            text = "" if "_build" in page.parts else page.read_text(encoding="utf-8")
            for path, anchor in re.findall(r"\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", text):
                target = (page.parent / path).resolve()
                if target.parent == PAGES:
                    assert target in anchors, f"{page}: {path} is not there"
                    assert not anchor or anchor in anchors[target], f"{page}: {path}#{anchor}"
                    links += 1
    assert links > 2 * 270
    assert "docs/claims" not in (docs.parent / ".gitignore").read_text(), "only a build would make the pages"


def test_the_pages_in_the_repository_are_made_of_the_published_verdicts() -> None:
    found = pages(PUBLISHED)
    for name, text in found.items():
        assert (PAGES / name).read_text(encoding="utf-8") == text, "run `make docs`"
    assert 'id = "C001"\nsource = "chapter"' in found["chapter.md"], "a claim whose verdict is data shows its entry"
    assert "def " in found["chapter.md"], "others show their check"


def is_readable(text: str) -> bool:
    """Whole sentences on one line, without HTML outside of backticks; emphasis and formulas are closed."""
    plain = re.sub(r"`[^`]*`", "", text)
    stars = re.findall(r"(?<!\\)\*", re.sub(r"\$[^$]*\$", "", plain))
    closed = plain.count("$") % 2 == len(stars) % 2 == 0
    return closed and text.strip().endswith((".", ")", "*")) and not re.search(r"<[/a-zA-Z]|\n", plain)


# --- the page of larger models ----------------------------------------------------------------------------------------


DOCS = Path(__file__).parents[2] / "docs"


def test_page_of_larger_models_is_up_to_date_with_a_word_for_each_outcome() -> None:
    assert set(make_larger.WORDS) >= {*get_args(Holds), *KINDS}
    assert make_larger.page() == (DOCS / "larger-models.md").read_text(encoding="utf-8"), "run docs/make_larger.py"


def test_published_shares_of_checks_that_can_fail_are_of_the_present_checks() -> None:
    """If it fails: `make mutants`."""
    found = json.loads(SHARES.read_text(encoding="utf-8"))
    assert found["computed"] == [c.id for c in computed()]
    assert len(found["cannot"]) <= 0.05 * len(found["computed"])
