"""What the Triton kernels compile to for a card that is not there: no spills in loops, a budget of instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SHARED = 99 * 1024  # which a program may have on every card since Ampere
CODE = """
import dataclasses, json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from benchmarks import gpu_static
from qkv.kernels.fused_sink import merge_sink
for ones in ((), range(3, 15)):
    names = [p.name for p in merge_sink.params]
    constants = {15: 16, 16: 128} | dict.fromkeys(ones, 1)
    types = dict(zip(names, ["*bf16", "*fp32", "*fp32", *["i32"] * 12, "constexpr", "constexpr"], strict=True))
    types |= {names[n]: "constexpr" for n in ones}
    source = ASTSource(merge_sink, types, {(n,): x for n, x in constants.items()})
    compile(source, target=GPUTarget("cuda", 90, 32))
cases = json.load(sys.stdin)
made = {title: gpu_static.compiled(name, options) for title, (name, options) in cases.items()}
found = {title: dataclasses.asdict(x) | {"additions": sorted(x.additions)} for title, x in made.items()}
ratios = {
    f"{d} {title}": gpu_static.ratio_to_forward(gpu_static.compiled("statistics", options, d=d), d)
    for d in (64, 128)
    for title, options in {"few": {}, "map": gpu_static.PROFILE}.items()
}
stacks = {
    f"{capability} {dtype} {d}": gpu_static.compiled("statistics", {}, d=d, dtype=dtype, capability=capability).stack
    for capability, dtype, d in ((80, "bf16", 64), (80, "bf16", 128), (100, "bf16", 128), (90, "fp32", 64))
}
json.dump({"cases": found, "ratios": ratios, "stacks": stacks}, sys.stdout)
"""


def test_kernels_fit_on_a_card_and_keep_their_budget() -> None:
    """In another process, because Triton reads when it is imported whether its interpreter runs the kernels."""
    every = {"HAS_KEYS": True, "HAS_SINK": True, "HAS_COUNTED": True, "HAS_DISTANCE": True, "CAP": 2, "PLANES": 9}
    cases = {"statistics": ("statistics", {}), "by_row": ("by_row", every), "masses": ("masses", every)}
    cases["extremes"] = ("extremes", every | {"LOW": 6})
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(cases), capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    found, ratios = results["cases"], results["ratios"]
    for title, made in found.items():
        assert made["shared"] <= SHARED, title
        # Sums of floats by atomic additions would differ from run to run.
        assert set(made["additions"]) <= {"i64"}, title
    unmasked, masked = found["statistics"]["loops"]
    assert found["statistics"]["additions"] == ["i64"]
    for loop in (unmasked, masked):
        assert "spills" not in loop
        assert loop["exponential"] == pytest.approx(1)  # of each score, once
    assert "float64" not in unmasked
    assert sum(unmasked.values()) <= 13
    assert sum(masked.values()) <= 26
    assert max(ratios["64 few"], ratios["128 few"]) <= 1.8
    assert max(ratios["64 map"], ratios["128 map"]) <= 2.0
    assert set(results["stacks"].values()) == {0}
