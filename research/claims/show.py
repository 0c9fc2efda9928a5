"""What `python -m research.claims` prints beside verdicts, which `qkv claims` shows, too: comparisons and models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from qkv.cli.shared import folder, read
from qkv.errors import InputError, renamed
from qkv_lab.cli.claims import word
from research.claims.claim import Finding

if TYPE_CHECKING:
    from research.sinks import Study


def text(entries: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> str:
    """JSON, with null for numbers that are not finite."""
    from qkv_lab.log import finite

    return json.dumps(finite(entries), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def compared(entries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Print verdicts with the results in a folder beside the published ones, which entries have as ``shipped``."""
    table = Table("claim", escape(str(folder)), "results of qkv", "because", box=box.SIMPLE_HEAD, pad_edge=False)
    for one in entries:
        own = Text(one["state"], "red") if one["verdict"] is None else word(one["verdict"])
        table.add_row(Text(one["claim"], no_wrap=True), own, word(one["shipped"]), Text(one["because"]))
    _console().print(table)
    changed = [one["claim"] for one in entries if one["verdict"] != one["shipped"]]
    if changed:
        print(f"{len(changed)} of {len(entries)} verdicts not as with the results of qkv: {', '.join(changed)}")
    else:
        print("All verdicts are those with the results of qkv.")


def summary(entries: Sequence[Mapping[str, Any]], seconds: float, out: Path | None) -> None:
    """Print the checks without a verdict, and where the pages are."""
    console = _console()
    failed = [one for one in entries if one["verdict"] is None]
    for one in failed:
        console.print(Text(f"{one['claim']} {one['state']}: {one['because']}", "red"))
    drifted = sum(one["state"] == "drifted" for one in failed)
    missing = f", {len(failed) - drifted} without a result to read" if len(failed) > drifted else ""
    console.print(f"{len(entries)} checks in {seconds:.0f} s, {drifted} drifted{missing}", markup=False)
    if out is not None:
        console.print(f"No pages were written to {out}." if failed else f"Pages  {out}", markup=False, soft_wrap=True)


def _console() -> Console:
    return Console(highlight=False)


def run_model(model: str, text: Path | None, out: Path | None, ids: Sequence[str] = (), as_json: bool = False) -> None:
    """Study a model, and print its verdicts beside those of toy models, qkv-mini, MiniLM and SmolLM2.

    Args:
        model: a name or folder, as for `qkv.load`.
        text: a UTF-8 file, from which 16 windows of up to 512 tokens are cut; the default texts if None.
        out: folder for sinks.json and sinks.png, which is created if it does not exist; None to write no files.
        ids: numbers of claims to print; all if empty.
        as_json: print JSON.
    """
    from qkv.plot.layout import save_figure
    from research.claims.models import TOY
    from research.sinks import study

    if unknown := [id_ for id_ in ids if id_ not in TOY]:
        raise InputError(f"claim is {unknown[0]!r}, expected one that is judged on models: {', '.join(TOY)}")
    passage = None if text is None else read(text, "--text")
    with folder(out) if out else nullcontext(), renamed(texts="--text", model="--model"):
        found = study(model, passage)
        if as_json:
            _print_json(found, ids or tuple(TOY))
        else:
            _show(found, ids or tuple(TOY))
        if out is not None:
            files = [out / "sinks.json", out / "sinks.png"]
            found.save(files[0])
            save_figure(found.figure(), files[1])
            if not as_json:
                print("\n".join(map(str, files)))


def _print_json(study: Study, ids: Sequence[str]) -> None:
    from research.claims.models import findings_on

    verdicts = [one for one in study.as_dict()["verdicts"] if one["claim"] in ids]
    others = {id_: [asdict(one) for some in findings_on(id_) for one in some] for id_ in ids}
    print(text({"attrs": dict(study.attrs), "verdicts": verdicts, "others": others}), end="")


def _show(study: Study, ids: Sequence[str]) -> None:
    """Print a table of the verdicts on all models, and for each length one with the numbers of this model."""
    from research.claims.models import TRAINED, findings_on, trained_findings

    console = _console()
    name, data = study.attrs["model"], study.as_dict()
    table = Table("claim", "toy models", *TRAINED.values(), escape(name), box=box.SIMPLE_HEAD, pad_edge=False)
    for id_ in ids:
        toy, real = findings_on(id_)
        columns = [toy, *([one for one in real if one.model == label] for label in TRAINED.values())]
        columns.append(trained_findings(data, id_, name))
        table.add_row(Text(id_, no_wrap=True), *(Text(_kinds(column)) for column in columns))
    console.print(table)
    for tokens, verdicts in study.verdicts.items():
        table = Table(
            "claim", "verdict", "because", title=Text(f"{name}, {tokens} tokens"), title_justify="left",
            box=box.SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        for verdict in (one for one in verdicts if one.claim in ids):
            table.add_row(Text(verdict.claim, no_wrap=True), Text(verdict.holds), Text(verdict.text))
        console.print(table)


def _kinds(findings: Sequence[Finding]) -> str:
    """The kinds of verdicts, with the number of tokens where they differ: "64: holds, 512: false"."""
    kinds = ["not seen" if one.kind == "unseen" else one.kind for one in findings]
    if len(set(kinds)) <= 1:
        return kinds[0] if kinds else "–"
    lengths = (one.length.removesuffix(" tokens") for one in findings)
    return ", ".join(f"{length}: {kind}" if length else kind for length, kind in zip(lengths, kinds, strict=True))
