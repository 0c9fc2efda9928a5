"""Adds the reference part to each page of mechanisms/: base class, cost, source, tests and claims, from the objects.

The front matter of a page has `object` (public names), `plan` (arguments of `qkv.plan`, n is the number of tokens),
`claims` (of the ledger), `see` (other pages), and `tests` (the words to look for, if they are not the object's name). A
page with a paragraph that begins with **Source.** has its sources there. `picture` draws what stands below the first
paragraph, and in the gallery of the index: arguments of `qkv.plot.composition`, or an expression of a figure.
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
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from torch import Tensor

import qkv
from qkv import biases, features, masks, normalizers, plot, positions, scores
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
    "plot": plot,
    "positions": positions,
}
MOST_TESTS = 4
PICTURES = DOCS / "_build" / "pictures"


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


def drawn(text: str) -> Figure:
    """The picture of a page."""
    expression = front_matter(text)[0]["picture"]
    names = NAMES | {"example": _example, "rotated": _rotated, "hidden_map": _hidden_map}
    if re.match(r"\w+=", expression):
        return plot.composition(**eval(f"dict({expression})", names))
    made = eval(expression, names)
    return made if isinstance(made, Figure) else made.get_figure()


def _example(heads: int = 4, n: int = 24, keys: int | None = None, kv: int | None = None, **options: Any) -> Tensor:
    """The weights (heads, n, keys) of random queries and keys under a causal mask, or of a cross-attention."""
    torch.manual_seed(0)
    q, k = torch.randn(1, heads, n, 16), torch.randn(1, kv or heads, keys or n, 16)
    mask = masks.Causal() if keys is None else None
    return qkv.attend(2 * q, k, k, mask=mask, return_weights=True, **options)[1][0]


def _rotated(rotary: positions.Rotary, n: int) -> Tensor:
    """The scores of n equal queries and keys after rotation."""
    x = rotary(torch.ones(1, 1, n, 64), torch.arange(n))[0, 0]
    return x @ x.mT / 64


def _hidden_map() -> Tensor:
    """The weights under the delta rule of eight keys in turn; each query asks for that of five tokens ago."""
    torch.manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)[torch.arange(24) % 8][None, None]
    options = {"features": lambda x: x, "normalize": False, "decay": torch.tensor([-0.02]), "beta": torch.tensor([0.7])}
    return qkv.linear_attend(k.roll(5, 2), k, torch.eye(24)[None, None], **options)[0, 0]


def draw(app: Sphinx) -> None:
    """Draw the pictures of all pages that changed since they were drawn."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for page in sorted((DOCS / "mechanisms").glob("*.md")):
        picture = PICTURES / f"{page.stem}.png"
        newest = max(page.stat().st_mtime, Path(__file__).stat().st_mtime, Path(plot.__file__).stat().st_mtime)
        if page.stem != "index" and (not picture.exists() or picture.stat().st_mtime < newest):
            figure = drawn(page.read_text("utf-8"))
            figure.savefig(picture, dpi=110, facecolor="white", **{"bbox_inches": "tight"})


def illustrated(name: str, text: str) -> str:
    """The page with its picture before the first section."""
    start, section, rest = text.partition("\n## ")
    return f"{start.rstrip()}\n\n![{_title(name)}, drawn](../_build/pictures/{name}.png)\n{section}{rest}"


def gallery(text: str) -> str:
    """The index with the pictures of the pages that a section links to, below the heading of the section."""
    sections, seen = text.split("\n## "), set[str]()
    for at, section in enumerate(sections[1:], 1):
        found = [name for name in dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", section)) if name not in seen]
        seen |= {*found}
        cards = "".join(
            f":::{{grid-item-card}} {_title(name)}\n:link: {name}\n:link-type: doc\n"
            f":img-top: ../_build/pictures/{name}.png\n:img-alt: {_title(name)}\n:::\n"
            for name in found
        )
        heading, _, body = section.partition("\n")
        grid = f"\n::::{{grid}} 2 3 4 4\n:gutter: 2\n:class-container: gallery\n{cards}::::\n" if found else ""
        sections[at] = f"{heading}\n{grid}{body}"
    return "\n## ".join(sections)


def add(app: Sphinx, name: str, source: list[str]) -> None:
    folder, _, page = name.partition("/")
    if folder == "mechanisms":
        source[0] = gallery(source[0]) if page == "index" else illustrated(page, reference(source[0]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", draw)
    app.connect("source-read", add, priority=400)  # before open_in_jupyter
    return {"parallel_read_safe": True, "parallel_write_safe": True}
