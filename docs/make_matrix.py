"""Writes docs/matrix.md: which kernel supports what, according to the kernels' `unsupported_reason`.

.venv/bin/python docs/make_matrix.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import qkv
from qkv import biases, masks, normalizers, scores
from qkv.kernels import KERNELS, fused
from qkv.scores import Features

B, H, N, D = 2, 2, 8, 4

MASKS: dict[str, Any] = {
    "none": None,
    "`Causal()`": masks.Causal(),
    "`Window(w)`": masks.Window(3),
    "`Prefix(n)`": masks.Prefix(3),
    "`Global(indices)`": masks.Global([0]),
    "`Strided(step)`": masks.Strided(2),
    "`Dilated(w, step)`": masks.Dilated(2, 2),
    "`RandomKeys(r)`": masks.RandomKeys(2),
    "`TopKeys(index_scores, k)`": masks.TopKeys(torch.zeros(N, N), 3),
    "`longformer(w, tokens)`": masks.longformer(2),
    "`bigbird(block)`": masks.bigbird(1, 1),
    "`Blockwise(mask, size)`": masks.Blockwise(masks.Causal(), 2),
    "`Padding(lengths)`": masks.Padding([5, 8]),
    "`Padding(lengths) & Causal()`": masks.Padding([5, 8]) & masks.Causal(),
    "`Document(ids)`": masks.Document([0] * 4 + [1] * 4),
    "`Dense(tensor)`": masks.Dense(torch.ones(N, N, dtype=torch.bool)),
    "`Predicate(function)`": masks.Predicate(lambda b, h, q, k: q >= k),
    "`Shifted(mask, offset)`": masks.Shifted(masks.Causal(), 0),
}
BIASES: dict[str, Any] = {
    "none": None,
    "`SoftCap(cap)`": biases.SoftCap(1.0),
    "`Dense(tensor)`": biases.TensorBias(torch.zeros(N, N)),
    "`ByDistance(tensor)`": biases.ByDistance(torch.zeros(1, 2 * N - 1)),
    "`ALiBi()`": biases.ALiBi(),
    "`T5Bias(table)`": biases.T5Bias(torch.zeros(8, H)),
    "`Forget(log_f)`": biases.Forget(torch.zeros(H, N)),
    "`RelativePosition(keys)`": biases.RelativePosition(torch.zeros(3, D)),
    "`RelativePosition(keys, values)`": biases.RelativePosition(torch.zeros(3, D), torch.zeros(3, D)),
    "a learned bias, in training": biases.TensorBias(torch.zeros(N, N, requires_grad=True)),
}
SCORES: dict[str, Any] = {
    "`Dot()`": scores.Dot(),
    "`General(weight)`": scores.General(torch.eye(D)),
    "`Cosine()`": scores.Cosine(),
    "`SSMax(scale)`": scores.SSMax(),
    "`Additive(vector, …)`": scores.Additive(torch.zeros(D)),
    "`Concat(weight, vector, dq)`": scores.Concat(torch.zeros(D, 2 * D), torch.zeros(D), D),
    "`Features(map)`": Features(torch.relu),
}
NORMALIZERS: dict[str, Any] = {
    "`Softmax()`": normalizers.Softmax(),
    "`Softmax(sink=…)`": normalizers.Softmax(sink=0.0),
    "`Softmax(key=…)`": normalizers.Softmax(key=torch.zeros(H, D)),
    "`Sigmoid()`": normalizers.Sigmoid(),
    "`EluPlusOne()`": normalizers.EluPlusOne(),
    "`ReLU()`": normalizers.ReLU(),
    "`Identity()`": normalizers.Identity(),
    '`Identity("sum")`': normalizers.Identity("sum"),
    "`Entmax()`": normalizers.Entmax(),
    "`Sparsemax()`": normalizers.Sparsemax(),
    "`Softpick()`": normalizers.Softpick(),
    "`Hard()`": normalizers.Hard(),
    "`Hard(sample=True)`": normalizers.Hard(sample=True),
}
OTHERS: dict[str, dict[str, Any]] = {
    "`dropout_p` > 0": {"dropout_p": 0.1},
    "`return_weights=True`": {"return_weights": True},
    "gradients of q, k, v": {"train": True},
}

HEAD = """# Kernels and mechanisms

Any mask can be combined with any bias, any score and any normalizer. A kernel either computes the composition exactly
or raises an error with the reason; nothing falls back silently. `eager` supports everything and forms the weights.
`tiled` supports everything without forming them. The other kernels are faster where they apply.
Every pair of choices is tested on every kernel against the specification,
[`qkv.reference`](../src/qkv/reference.py), in [`tests/core/test_oracle.py`](../tests/core/test_oracle.py),
outputs and gradients. `qkv.plan(...)` gives the same reasons for your call.

Written by `docs/make_matrix.py`, which asks the kernels on a CPU, with torch {version}. A kernel supports a
composition if all of its rows say yes; a number refers to the reason below the table. On CUDA `flex` also trains, and
`native` supports nothing, because it is compiled for CPUs; in float64 `tiled` takes its place. `fused` is for CUDA
only: its column says what it supports there in float32; in bfloat16 and float16 it also supports windows."""
WITH = {
    "Scores": 'Under softmax; for the kernel `linear` with `Identity("sum")`, the only weights it supports.',
    "Masks": 'Under softmax; for the kernel `linear` with `Features(map)` and `Identity("sum")`.',
    "Biases": 'Under softmax; for the kernel `linear` with `Features(map)` and `Identity("sum")`.',
    "Normalizers": "With the dot product.",
    "Also": 'Under softmax; for the kernel `linear` with `Features(map)` and `Identity("sum")`.',
}


def unsupported_reason(kernel: str, call: dict[str, Any]) -> str | None:
    """Why a kernel does not support a call, or None if it does."""
    call = dict(call)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, N, D, generator=generator) for _ in range(3))
    if call.pop("train", False):
        q.requires_grad_()
    try:
        qkv.plan(q, k, v, kernel=kernel, **call)
    except qkv.InputError as error:
        return str(error).split("cannot serve this call: ")[1]
    return None


def table(title: str, rows: dict[str, dict[str, Any]], for_linear: dict[str, Any]) -> str:
    """A Markdown table, with the reasons below it."""
    lines = [f"## {title}", "", WITH[title], "", "| | " + " | ".join(f"`{name}`" for name in KERNELS) + " |"]
    lines.append("|---|" + "---|" * len(KERNELS))
    reasons: list[str] = []
    for name, call in rows.items():
        cells = []
        for kernel in KERNELS:
            reason = unsupported_reason(kernel, call if kernel != "linear" else for_linear | call)
            if reason is None:
                cells.append("yes")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1))] if reasons else []
    return "\n".join(lines)


def page() -> str:
    """The whole page. The kernel for CUDA says what it would support on a card whose own kernels are right."""
    with mock.patch.object(fused, "GPUS", ("cpu",)), mock.patch.object(fused, "_wrong", return_value=None):
        return _page()


def _page() -> str:
    by_sum = {"normalizer": normalizers.Identity("sum")}
    linear = {"score": Features(torch.relu)} | by_sum
    tables = [
        table("Scores", {name: {"score": x} for name, x in SCORES.items()}, by_sum),
        table("Masks", {name: {"mask": x} for name, x in MASKS.items()}, linear),
        table("Biases", {name: {"bias": x} for name, x in BIASES.items()}, linear),
        table("Normalizers", {name: {"normalizer": x} for name, x in NORMALIZERS.items()}, {}),
        table("Also", OTHERS, linear),
    ]
    version = torch.__version__.split("+")[0]
    return "\n\n".join([HEAD.format(version=version), *tables]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("matrix.md").write_text(page())
