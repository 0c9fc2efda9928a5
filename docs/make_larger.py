"""Writes docs/larger-models.md: published findings about attention sinks beside our verdicts on the same claims.

The findings are in docs/larger-models.toml. Our verdicts are read from the results of the experiments, the stored
studies of three trained models, and the verdicts of the ledger, so run this again after any of them has changed:

.venv/bin/python docs/make_larger.py
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import research.sinks
from qkv_lab.experiments.run import SHIPPED
from qkv_lab.settings import updated
from qkv_lab.tasks.backcopy import Backcopy
from research.claims import CLAIMS
from research.claims.models import TRAINED
from research.claims.page import published
from research.claims.settled import load

DOCS = Path(__file__).parent
FILE = DOCS / "larger-models.md"
FACTS: dict[str, Any] = tomllib.loads((DOCS / "larger-models.toml").read_text(encoding="utf-8"))

TOY = "toy"
WORDS = {
    "holds": "holds",
    "does not hold": "does not hold",
    "false": "does not hold",
    "holds only when": "holds only when …",
    "only when": "holds only when …",
    "undecided": "undecided",
    "not seen at this scale": "not seen",
    "cannot be seen here": "not seen",
    "unseen": "not seen",
}
"""What the page says for each outcome, in its order: of experiments and studies, and of the ledger."""
OPPOSITE = {"holds": "does not hold", "does not hold": "holds"}

Verdicts = Mapping[str, Mapping[str, str]]
"""For each claim: the word of `WORDS` for each of our models."""


def main() -> None:
    FILE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page."""
    verdicts = ours()
    parts = [_head(), *(_section(section, verdicts) for section in FACTS["sections"]), _differences(verdicts), _tail()]
    return "\n\n".join(parts) + "\n"


def claims() -> dict[str, str]:
    """What the papers say of every claim on the page."""
    return {id_: said for s in FACTS["sections"] for f in s["findings"] for id_, said in f["claims"].items()}


def ours() -> dict[str, dict[str, str]]:
    """Our verdicts on the claims of the page: of toy models, trained models, or else of a computation."""
    ledger = {id_: verdict.kind for id_, verdict in published().items()}
    toys = toy_verdicts(_results().values())
    studies = [study_verdicts(name, research.sinks.result(key)) for key, name in TRAINED.items()]
    found = {}
    for id_ in claims():
        of = dict(toys.get(id_, {}))
        for study in studies:
            of |= study.get(id_, {})
        found[id_] = of or {"computed": WORDS[ledger[id_]]}
    return found


def toy_verdicts(results: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """For each claim: the verdict on toy models; of each experiment by its name if they disagree."""
    by_claim: dict[str, dict[str, str]] = {}
    for result in results:
        for verdict in result["verdicts"]:
            by_claim.setdefault(verdict["claim"], {})[f"{TOY} ({result['name']})"] = WORDS[verdict["holds"]]
    return {id_: _merged(TOY, of) for id_, of in by_claim.items()}


def study_verdicts(name: str, study: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """For each claim: the verdict on a trained model; by the length of the texts if it depends on that."""
    by_claim: dict[str, dict[str, str]] = {}
    for verdict in study["verdicts"]:
        by_claim.setdefault(verdict["claim"], {})[f"{name} at {verdict['tokens']}"] = WORDS[verdict["holds"]]
    return {id_: _merged(name, of) for id_, of in by_claim.items()}


def _merged(name: str, of: dict[str, str]) -> dict[str, str]:
    """One entry in place of several that agree."""
    words = set(of.values())
    return {name: words.pop()} if len(words) == 1 else of


def _results() -> dict[str, dict[str, Any]]:
    files = sorted(SHIPPED.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def _head() -> str:
    studied = {name: research.sinks.result(key)["attrs"] for key, name in TRAINED.items()}
    rows = "\n".join(
        f"| {name}, {'a decoder' if of['causal'] else 'an encoder'} | {of['parameters'] / 1e6:.1f} million "
        f"| {of['blocks']} | {'Python code' if name == 'qkv-mini' else 'English'} |"
        for name, of in studied.items()
    )
    tokens = max(of["texts"]["tokens"] for of in studied.values())
    return f"""<!-- Made by docs/make_larger.py from docs/larger-models.toml: do not edit. -->
# What larger models say

We judge claims about attention sinks on models that train in seconds, and on three small trained models. The literature
has models of up to 405 billion parameters. This page puts its findings beside our verdicts, and says what ours cannot
tell.

| our models | parameters | blocks | text |
|---|---|---|---|
{_toys()}
{rows}

Under *ours*, [experiments](experiments/README.md) judge toy models with several seeds, and
[a study](howto/sinks-of-a-model.md) judges the trained ones by interventions, *at 64* tokens and on texts of up to
{tokens}. *Computed* needs no trained model. *Undecided* means that the interval contains the bound,
*not seen* that the models lack what the claim is about. The numbers are on the pages of the claims."""


def _toys() -> str:
    """The row of the toy models, from the settings of the experiments that judge the claims of this page."""
    here, sizes, layers, length = set(claims()), set(), set(), 0
    for result in _results().values():
        if not here & set(result["claims"]):
            continue
        for variant in result["variants"].values():
            settings = variant.get("settings", {})
            if settings.get("task") == Backcopy.name:
                task = updated(Backcopy(), settings[Backcopy.name])
                sizes.add(sum(p.numel() for p in task.build().parameters()))
                layers.add(task.model.layers)
                length = max(length, task.length)
    parameters = f"{min(sizes):,} to {max(sizes):,}"
    return f"| toy decoders | {parameters} | {min(layers)} to {max(layers)} | Bigram-Backcopy, {length} tokens |"


def _section(section: Mapping[str, Any], verdicts: Verdicts) -> str:
    rows = "\n".join(
        f"| {_cited(f['found'])}<br>*{f['models']}* | {_ours(f['claims'], verdicts)} | {_cited(f['beyond'])} |"
        for f in section["findings"]
    )
    text = f"{_cited(section['text'])}\n\n" if "text" in section else ""
    head = "| larger models | ours | what our scale cannot say |\n|---|---|---|"
    return f"## {section['title']}\n\n{text}{head}\n{rows}"


def _ours(ids: Iterable[str], verdicts: Verdicts) -> str:
    """A cell with our verdicts on some claims: "C068 holds: toy, MiniLM"."""
    return "<br>".join(f"{_link(id_)} {_grouped(verdicts[id_])}" for id_ in ids) or "no claim"


def _grouped(of: Mapping[str, str]) -> str:
    """The verdicts on one claim, with the models of each."""
    by_word = {word: [name for name, w in of.items() if w == word] for word in WORDS.values()}
    return "; ".join(f"**{word}**: {', '.join(names)}" for word, names in by_word.items() if names)


def _differences(verdicts: Verdicts) -> str:
    """The claims on which a model of ours contradicts what the papers say."""
    load()
    said = claims()
    rows = []
    for id_ in sorted(said):
        opposite = OPPOSITE.get(said[id_])
        if against := [name for name, word in verdicts[id_].items() if word == opposite]:
            rows.append(f"| {_link(id_)} {CLAIMS[id_].text} | {said[id_]} | {opposite}: {', '.join(against)} |")
    head = "| claim | papers | ours |\n|---|---|---|\n"
    found = head + "\n".join(rows) if rows else "There is no such claim."
    contested, untested = (
        ", ".join(_link(id_) for id_ in sorted(said) if said[id_] == what) for what in ("contested", "not tested")
    )
    return f"""## Where ours differ

Where a claim holds in large models and not in ours, it may need size, or another task. Or it fails by our criterion
only: a paper shows a figure where we ask for an interval on one side of a bound. It is not refuted.

{found}

About {contested} the papers disagree with one another, or with the wording of the claim. None of them
tests {untested}."""


def _tail() -> str:
    others = "\n".join(f"- {_cited(other['text'])}" for other in FACTS["others"])
    return f"""## Findings without a claim

None of the courses' claims is about these, so we have no verdict:

{others}

To judge a larger model of your own: [Sinks of a model](howto/sinks-of-a-model.md)."""


def _cited(text: str) -> str:
    return text.format_map({key: f"[{name}]({link})" for key, (name, link) in FACTS["papers"].items()})


def _link(id_: str) -> str:
    return f"[{id_}](claims/chapter.md#{id_.lower()})"


if __name__ == "__main__":
    main()
