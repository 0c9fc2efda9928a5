"""Claims about attention sinks on toy models and on trained models: one verdict from all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv_lab.experiments.evidence import own_bound, shown, side
from research.claims.claim import KINDS, Finding, Verdict
from research.claims.evidence import interval
from research.claims.results import result, verdict_in
from research.claims.settle import KIND_OF, common, experiment
from research.sinks import result as study_of

TOY: dict[str, tuple[str, ...]] = {
    "C061": ("emergence",),
    "C062": ("first_token",),
    "C063": ("emergence",),
    "C064": ("emergence",),
    "C065": ("first_token",),
    "C067": ("mechanism",),
    "C068": ("mechanism",),
    "C069": ("mechanism",),
    "C070": (),
    "C073": ("mechanism",),
    "C074": ("overmixing",),
    "C075": (),
    "C076": ("overmixing",),
    "C077": ("overmixing",),
}
"""The claims about sinks that `research.sinks` judges on trained models, each with its experiments on toy models."""
TRAINED = {"qkv-mini": "qkv-mini", "minilm": "MiniLM", "smollm2": "SmolLM2"}
"""The trained models with a stored study, and their names in sentences."""
COMPUTED = "computed"
_PHRASES = {
    "holds": "it holds on",
    "false": "it does not hold on",
    "only when": "it holds under some conditions only on",
    "undecided": "it is undecided on",
    "unseen": "it cannot be seen on",
}


def everywhere(id_: str, computed: Verdict | None = None) -> Verdict:
    """The verdict on a claim of `TOY`, from all models on which it is judged.

    If all models agree, theirs is the common verdict. If the claim holds on some and not on others, it holds only when.
    Models on which it is undecided or cannot be seen are named and do not decide.

    Args:
        id_: the number of the claim.
        computed: the verdict of a computation on the same claim, which counts as one more.

    Raises:
        MissingResult: if the result of an experiment is missing.

    >>> verdict = everywhere("C068")
    >>> [(f.model, f.length) for f in verdict.findings if f.model == "MiniLM"]
    [('MiniLM', '64 tokens'), ('MiniLM', '512 tokens')]
    """
    toy = {name: experiment(id_, name) for name in TOY[id_]}
    findings, real = findings_on(id_)
    parts = [_summary(findings, real), f"Computed, {KINDS[computed.kind]}: {computed.text}" if computed else ""]
    parts += [f"Toy models (`{name}`): {verdict.text}" for name, verdict in toy.items()]
    parts.append(f"Trained models: {_criterion(id_)}")
    links = [link for verdict in ([computed] if computed else []) + list(toy.values()) for link in verdict.by]
    links += [f"[study of `{name}`](../howto/sinks-of-a-model.md)" for name in TRAINED]
    findings = [*([Finding(COMPUTED, "", computed.kind, "")] if computed else []), *findings, *real]
    return Verdict(common(f.kind for f in findings), " ".join(filter(None, parts)), tuple(links), tuple(findings))


def findings_on(id_: str) -> tuple[list[Finding], list[Finding]]:
    """The verdicts of the experiments on toy models, and those of the stored studies of trained models."""
    toy = []
    for name in TOY[id_]:
        verdict = verdict_in(result(name), name, id_)
        toy.append(Finding(f"toy models (`{name}`)", "", KIND_OF[verdict["holds"]], numbers(verdict, "seed")))
    return toy, [one for name, label in TRAINED.items() for one in trained_findings(study_of(name), id_, label)]


def trained_findings(study: Mapping[str, Any], id_: str, model: str) -> list[Finding]:
    """The verdicts of a study (`research.sinks.Study.as_dict`) on a claim, one for each length of the texts."""
    return [
        Finding(model, f"{verdict['tokens']} tokens", KIND_OF[verdict["holds"]], numbers(verdict, "text"))
        for verdict in study["verdicts"]
        if verdict["claim"] == id_
    ]


def numbers(verdict: Mapping[str, Any], unit: str) -> str:
    """The effects of a verdict with their intervals and the number of seeds or texts; empty if it has none.

    A bound that is not that of the criterion, and a premise that does not clearly hold, are part of it.

    Args:
        verdict: a verdict in a result of an experiment or a study.
        unit: what each value is of, in the singular.
    """
    intervals = [interval(one) for one in verdict.get("intervals", ())]
    counted = [one for one in intervals if not one.premise and not one.unless and one.n]
    if not counted:
        return "; ".join(dict.fromkeys(one.unless for one in intervals if one.unless))
    sizes = sorted({one.n for one in counted})
    bound, above = verdict["criterion"]["bound"], verdict["criterion"]["above"]
    each = [f"{one.condition} {shown(one)}{own_bound(one, bound, above)}".strip() for one in counted]
    each += [
        f"{one.condition} {shown(one)} [must be {side(one.above)} {one.bound:g}]"
        for one in intervals
        if one.premise and not one.clears
    ]
    return f"{', '.join(each)}; {'–'.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} {unit}s"


def _criterion(id_: str) -> str:
    """What decides the claim on trained models."""
    from research.sinks.criteria import Sinks

    one = next(criterion for criterion in Sinks.criteria if criterion.claim == id_)
    return f"{one.effect}. It holds {side(one.above)} {one.bound:g}."


def _summary(small: Sequence[Finding], real: Sequence[Finding]) -> str:
    """A sentence that says where the claim holds and where it does not."""
    named: dict[str, dict[str, list[str]]] = {}
    for one in [*small, *real]:
        named.setdefault(one.kind, {}).setdefault(one.model, []).append(one.length)
    where = "; ".join(f"{_PHRASES[kind]} {_listed(named[kind])}" for kind in _PHRASES if kind in named)
    on_small, on_real = ({one.kind for one in some} - {"undecided", "unseen"} for some in (small, real))
    if on_small and on_real and not on_small & on_real:
        return f"Toy and trained models disagree, which is the finding: {where}."
    if len(on_small | on_real) > 1:
        return f"It depends on the model or the length of the text, which is the finding: {where}."
    return f"{where[0].upper()}{where[1:]}."


def _listed(models: Mapping[str, Sequence[str]]) -> str:
    """Models with the lengths of their texts: "MiniLM (64 and 512 tokens)"."""
    names = []
    for model, lengths in models.items():
        tokens = " and ".join(length.removesuffix(" tokens") for length in lengths)
        names.append(f"{model} ({tokens} tokens)" if tokens else model)
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
