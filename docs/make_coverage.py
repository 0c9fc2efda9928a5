"""Writes docs/coverage.md: which Hugging Face architectures the profiler profiles, and how exactly.

Every one is built small with random weights, profiled, and compared with the weights of its own eager implementation.

.venv/bin/python docs/make_coverage.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from hf_zoo import Seen, build, examine, inputs  # noqa: E402
from hf_zoo_table import ALL, ROUTED  # noqa: E402
from qkv.errors import InputError  # noqa: E402
from qkv.profiler.run import profile  # noqa: E402

CLOSE = 1e-5
HEAD = """# Hugging Face architectures

Written by `docs/make_coverage.py`, with transformers {transformers} and torch {torch}. Each architecture is built
small, with random weights, and profiled. Weights, entropy, received attention and sink of every head then agree with
those of the model's own eager implementation to within 10⁻⁵ (relative to numbers above 1), or the page is not written.
(`nn.MultiheadAttention` returns the mean over its heads, so that is what is compared in WavLM and in pooling heads.)

`profile` takes what it can get, in this order, and `attrs["sources"]` of a profile names it for every module:

* `interface`: the model asks transformers' attention interface, and qkv's kernels compute. Exact, in linear memory.
* `sdpa`: the model calls `scaled_dot_product_attention` or `nn.MultiheadAttention`. Exact, in linear memory (but for
  what `nn.MultiheadAttention` itself forms when it is asked for weights).
* `softmax`: the model forms its scores and takes their softmax itself. Exact, in the quadratic memory that the model
  takes anyway; its queries, keys and values are not known.
* `outputs`: nothing can be read as it happens, but the model returns its weights if it runs once more and is asked.

What is **partial** has modules whose attention cannot be read: blocks, bands or landmarks instead of one softmax over
keys. Such a model is refused unless `partial=True` (`--partial`), and the modules are listed in `attrs["unobserved"]`.
"""
EXACT, SDPA, FORMED = "exact", "exact, by SDPA", "from weights the model forms"
PARTIAL, UNSUPPORTED = "partial", "not supported"
VERDICTS = (EXACT, SDPA, FORMED, PARTIAL, UNSUPPORTED)
NOTES = {
    "falcon_alibi": "compared by its output: its eager implementation computes something else",
    "prophetnet": "the main stream of its decoder only, as it returns it",
    "timesformer": "attention over time is compared by nobody: the model does not return it",
}


def verdict(seen: Seen) -> str:
    """What can be said of a model."""
    if not seen.sources:
        return UNSUPPORTED
    if seen.unobserved:
        return PARTIAL
    if {"softmax", "outputs"} & set(seen.sources):
        return FORMED
    return SDPA if "sdpa" in seen.sources else EXACT


def refusal(name: str) -> str:
    """What is said to those who try."""
    try:
        profile(build(name), inputs(name), progress=False)
    except InputError as error:
        return str(error)
    raise AssertionError(f"{name} is profiled after all")


def row(name: str, seen: Seen) -> str:
    """A line of the table."""
    if not (seen.error <= CLOSE and len(seen.unchecked) <= (2 if name in NOTES else 0)):
        raise AssertionError(f"{name}: {seen}")
    calls = ", ".join(f"{number} {source}" for source, number in Counter(seen.sources).items())
    remark = NOTES.get(name, "")
    if verdict(seen) == PARTIAL:
        remark = "without " + ", ".join(f"`{module}`" for module in seen.unobserved)
    if verdict(seen) == UNSUPPORTED:
        remark = refusal(name)
    return f"| {name} | {seen.kind} | {verdict(seen)} | {calls or 'none'} | {remark} |"


def said(line: str) -> str:
    """The verdict in a line of the table."""
    return line.split(" | ")[2]


def table(names: list[str], rows: dict[str, str]) -> str:
    """A table of architectures in the order of the names, with how many there are of each verdict."""
    found = Counter(said(rows[name]) for name in names)
    counts = ", ".join(f"{found[v]} {v}" for v in VERDICTS if found[v])
    head = "| Architecture | Model | Profiled | Calls | |\n|---|---|---|---|---|"
    return f"{len(names)} configurations: {counts}.\n\n{head}\n" + "\n".join(rows[name] for name in names)


def every_row() -> dict[str, str]:
    """All lines of the tables, each from its model."""
    return {name: row(name, examine(name)) for name in ALL}


def page(rows: dict[str, str]) -> str:
    """The whole page, of the lines of its tables."""
    total = Counter(said(line) for line in rows.values())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    parts = [
        HEAD.format(**versions),
        "| Profiled | Configurations |\n|---|---|\n" + "\n".join(f"| {v} | {total[v]} |" for v in VERDICTS),
        "## Those that ask transformers' interface",
        table(list(ROUTED), rows),
        "## Those that do not",
        table([name for name in ALL if name not in ROUTED], rows),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are so small that threads would only wait for one another
    (HERE / "coverage.md").write_text(page(every_row()))
