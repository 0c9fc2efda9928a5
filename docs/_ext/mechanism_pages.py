"""Adds the reference part to each page of mechanisms/: base class, cost, source, tests and claims, from the objects.

The front matter of a page has `object` (public names), `plan` (arguments of `qkv.plan`, n is the number of tokens),
`claims` (of the ledger), `see` (other pages), and `tests` (the words to look for, if they are not the object's name). A
page with a paragraph that begins with **Source.** has its sources there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml
from sphinx.application import Sphinx

import qkv
from qkv import biases, features, masks, normalizers, scores
from qkv._contract import Definition, overrides

DOCS = Path(__file__).parents[1]
CITED = re.compile(r"\(([^()]*arXiv:\d{4}\.\d{4,5}[^()]*)\)")
NAMES = {
    "torch": torch,
    "scores": scores,
    "biases": biases,
    "features": features,
    "masks": masks,
    "normalizers": normalizers,
}
MOST_TESTS = 4


def reference(text: str) -> str:
    """The page with its reference part instead of the front matter."""
    about, body = front_matter(text)
    names = about["object"].split()
    things = [_find(name) for name in names]
    links = ", ".join(f"[`{n.removeprefix('qkv.')}`](../reference/{n}.rst)" for n in names)
    lines = [f"- **Objects:** {links}.", base(things[0]), _cost(about.get("plan"))]
    lines += [] if "**Source.**" in body else [_sources(things)]
    lines += [_tests(about.get("tests") or "|".join(name.split(".")[-1] for name in names))]
    lines += [_claims(about.get("claims", "").split()), _see(about.get("see", "").split())]
    return f"{body.rstrip()}\n\n## Reference\n\n" + "\n".join(filter(None, lines)) + "\n"


def front_matter(text: str) -> tuple[dict[str, str], str]:
    """What the front matter of a page says, and the page without it."""
    head, body = text.removeprefix("---\n").split("\n---\n", 1)
    return yaml.safe_load(head), body


def described(text: str) -> Any:
    """The first object of a page."""
    return _find(front_matter(text)[0]["object"].split()[0])


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def base(thing: Any) -> str:
    """The base class of a mask, score, bias or normalizer, and the method that defines a subclass."""
    bases = [x for x in getattr(thing, "__mro__", ()) if x is not Definition and "definitions" in vars(x)]
    if not bases:
        return ""
    base = bases[0]
    bound = base is biases.Bias and overrides(thing.__new__(thing), base, "bind")
    owner = biases.AdditiveBias if bound else base
    [method] = owner.definitions
    arguments = ", ".join(list(inspect.signature(getattr(owner, method)).parameters)[1:])
    room = base.__module__.split(".")[1]
    then = "; bound to a call it is a `biases.AdditiveBias`" if bound else ""
    own = f"defined by `{method}({arguments})`. [Your own](../howto/your-own.md) is written the same way."
    return f"- **Base class:** `{room}.{base.__name__}`{then}, {own}"


def _cost(arguments: str | None) -> str:
    """What `qkv.plan` says of a call of two lengths on this machine."""
    if arguments is None:
        return ""
    call = f"`qkv.plan(q, k, v, {arguments})`"
    lines = [f"- **Cost** on a CPU, 8 heads of 64, {call} ([kernels](../matrix.md), [times](../benchmarks.md)):"]
    for n in (4096, 8192):
        x = torch.zeros(1).expand(1, 8, n, 64)
        plan = qkv.plan(x, x, x, **eval(f"dict({arguments})", {"n": n, **NAMES}))
        work = f"{plan.flops / 1e9:,.3g} GFLOP over {plan.share:.1%} of the pairs"
        lines += [f"  - {n:,} tokens: `{plan.kernel}`, {work}, {plan.peak_bytes / 2**20:,.0f} MiB beside the inputs"]
    return "\n".join(lines)


def _sources(things: list[Any]) -> str:
    """The publications in the docstrings, linked."""
    texts = (" ".join((thing.__doc__ or "").split()) for thing in things)
    cited = dict.fromkeys(each for text in texts for each in CITED.findall(text))
    link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
    return f"- **Source:** {re.sub(r'arXiv:([0-9.]+[0-9])', link, '; '.join(cited)).rstrip('.')}." if cited else ""


@functools.cache
def _test_files() -> dict[str, str]:
    root = DOCS.parent
    return {
        path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(root.glob("tests/*/test_*.py"))
    }


def _tests(word: str) -> str:
    """The files of tests that use the object most."""
    counts = {name: len(re.findall(rf"\b(?:{word})\b", text)) for name, text in _test_files().items()}
    most = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])[:MOST_TESTS]
    return f"- **Tests:** {', '.join(f'`{name}`' for name in most)}." if most else ""


@functools.cache
def _ledger() -> dict[str, dict[str, Any]]:
    entries = json.loads((DOCS.parent / "lab/qkv_lab/claims.json").read_text("utf-8"))
    return {entry["claim"]: entry for entry in entries}


def _claims(names: list[str]) -> str:
    """Claims of the ledger with their verdicts."""
    entries = [_ledger()[name] for name in names]
    pages = [f"../claims/{entry['source'].replace(' ', '-')}.md#{entry['claim'].lower()}" for entry in entries]
    lines = [f"  - [{e['claim']}]({page}), {e['verdict']}: {e['text']}" for e, page in zip(entries, pages, strict=True)]
    return "\n".join(["- **Claims** of the courses, checked:", *lines]) if lines else ""


def _see(names: list[str]) -> str:
    links = (f"[{_title(name)}]({name}.md)" for name in names)
    return f"- **See also:** {', '.join(links)}." if names else ""


def _title(name: str) -> str:
    text = (DOCS / "mechanisms" / f"{name}.md").read_text("utf-8")
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")


def add(app: Sphinx, name: str, source: list[str]) -> None:
    if name.startswith("mechanisms/") and name != "mechanisms/index":
        source[0] = reference(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add, priority=400)  # before open_in_jupyter
    return {"parallel_read_safe": True, "parallel_write_safe": True}
