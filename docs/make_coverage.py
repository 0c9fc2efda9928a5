"""Writes docs/coverage.md: which Hugging Face architectures `profile` supports, and how exactly.

Each architecture is built small with random weights, profiled, and compared with its own eager implementation.

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

from hf_zoo import ALL, ROUTED, Seen, build, examine, inputs  # noqa: E402
from qkv.errors import InputError  # noqa: E402
from qkv.runs.run import profile  # noqa: E402

CLOSE = 2e-5  # rounding of float32 through two layers: nemotron differs by 1.1e-5
HEAD = """# Hugging Face architectures

Written by `docs/make_coverage.py`, with transformers {transformers} and torch {torch}. Each architecture is built
small, with random weights, and profiled. Weights, entropy, received attention and sink of every head must agree with
the model's own eager implementation to within 2 · 10⁻⁵ (relative to numbers above 1), or the page is not written.
(`nn.MultiheadAttention` returns the mean over its heads, so for WavLM and pooling heads this mean is compared.)

`profile` reads attention from the first of these sources that is available, and `attrs["sources"]` of a profile names
the source for every module:

* `interface`: the model uses transformers' attention interface, and qkv's kernels compute. Exact, in linear memory.
* `differential`: the same for two softmaxes, one of which is subtracted. Both maps are exact;
  `attrs["differential"]` has the factor λ of the map that acts, softmax₁ − λ softmax₂, which the report and
  `profile.plot.signed()` draw. Values are not measured.
* `sdpa`: the model calls `scaled_dot_product_attention` or `nn.MultiheadAttention`. Exact, in linear memory (except for
  the weights that `nn.MultiheadAttention` itself forms if it has to return them).
* `softmax`: the model writes its attention out: a softmax, a sigmoid or another function of a product of queries and
  keys, which is multiplied with values. It is found by what is computed, not by the names of classes. Exact, in
  quadratic memory, which the model needs anyway; its queries, keys and values are not known.
* `hidden`: the hidden maps of linear attention, the group `linear`: Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear.
  They are compared with the layer's output, and measured in linear memory. The table below leaves them out.
* `returned`: the weights that an attention function of your own returns, see below.
* `outputs`: the attention cannot be read during the forward pass, but a second forward pass returns the weights.

A **partial** model has modules whose attention cannot be read, because it uses blocks, bands or landmarks instead of
one softmax over keys. Profiling it raises an error unless `partial=True` (`--partial`); the modules are then listed in
`attrs["unobserved"]`.

## Nothing is guessed

The first layer of every model is compared with the model's own attention function, for a few queries, with the
arguments and the mask that transformers passes to it. So `module.is_causal` counts where the function reads it. If
their outputs differ by more than rounding, `profile` refuses the model and names the module, the function and the
difference. For the architectures below the outputs agree to within 2 · 10⁻⁵, and `attrs["checks"]` of a profile has
the difference.

An attention function of your own (registered with transformers' `AttentionInterface`, or put in the place of one of
transformers' functions) runs as it is, so the model's output does not change. Every layer is then compared:

* its output is that of standard attention with the same arguments: the profile is exact;
* it is not, but the function returns weights whose product with the values is its output: these weights are measured;
* neither: the model is refused. With `partial=True` the modules are listed instead.

In a module that writes its attention out, heads are a part of the features, and batch items, tokens and windows are
not: this tells which dimension of the weights is which. Where it cannot be told, the model is refused, and the message
asks for the number of heads in an attribute `num_heads` of the module. Refused are also weights in blocks or bands,
over channels, below 0, or divided by their sum only after the product with values.
"""
EXACT, SDPA, FORMED = "exact", "exact, by SDPA", "from weights the model forms"
PARTIAL, UNSUPPORTED = "partial", "not supported"
VERDICTS = (EXACT, SDPA, FORMED, PARTIAL, UNSUPPORTED)
NOTES = {
    "falcon_alibi": "compared by its output: its eager implementation computes something else",
    "groupvit_vision": "its assignment of tokens to groups is not compared: the model does not return its weights",
    "prophetnet": "the main stream of its decoder only, as it returns it",
    "timesformer": "attention over time is not compared: the model does not return it",
}


def verdict(seen: Seen) -> str:
    """How well a model is profiled: one of `VERDICTS`."""
    if not seen.sources:
        return UNSUPPORTED
    if seen.unobserved:
        return PARTIAL
    if {"softmax", "outputs"} & set(seen.sources):
        return FORMED
    return SDPA if "sdpa" in seen.sources else EXACT


def error_message(name: str) -> str:
    """The error message of a model that cannot be profiled."""
    try:
        profile(build(name), inputs(name), progress=False)
    except InputError as error:
        return str(error)
    raise AssertionError(f"{name} can be profiled, expected an InputError")


def row(name: str, seen: Seen) -> str:
    """A line of the table."""
    known = seen.check is None or seen.check <= CLOSE
    if not (seen.error <= CLOSE and known and len(seen.unchecked) <= (2 if name in NOTES else 0)):
        raise AssertionError(f"{name}: {seen}")
    calls = ", ".join(f"{number} {source}" for source, number in Counter(seen.sources).items())
    remark = NOTES.get(name, "")
    if verdict(seen) == PARTIAL:
        remark = "without " + ", ".join(f"`{module}`" for module in seen.unobserved)
    if verdict(seen) == UNSUPPORTED:
        remark = error_message(name)
    return f"| {name} | {seen.kind} | {verdict(seen)} | {calls or 'none'} | {remark} |"


def verdict_of(line: str) -> str:
    """The verdict in a line of a table."""
    return line.split(" | ")[2]


def table(names: list[str], rows: dict[str, str]) -> str:
    """A table of architectures in the order of the names, below the number of each verdict."""
    found = Counter(verdict_of(rows[name]) for name in names)
    counts = ", ".join(f"{found[v]} {v}" for v in VERDICTS if found[v])
    head = "| Architecture | Model | Profiled | Calls | |\n|---|---|---|---|---|"
    return f"{len(names)} configurations: {counts}.\n\n{head}\n" + "\n".join(rows[name] for name in names)


def every_row() -> dict[str, str]:
    """The lines of all tables: each model is built and examined."""
    return {name: row(name, examine(name, padded=True)) for name in ALL}


def page(rows: dict[str, str]) -> str:
    """The whole page, from the lines of its tables."""
    total = Counter(verdict_of(line) for line in rows.values())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    parts = [
        HEAD.format(**versions),
        "| Profiled | Configurations |\n|---|---|\n" + "\n".join(f"| {v} | {total[v]} |" for v in VERDICTS),
        "## Models that use transformers' attention interface",
        table(list(ROUTED), rows),
        "## Other models",
        table([name for name in ALL if name not in ROUTED], rows),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are so small that threads would only wait for one another
    (HERE / "coverage.md").write_text(page(every_row()))
