"""Shapes and types in the signatures of the core hold: one case of most tests runs with every call checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

import qkv

TESTS = Path(__file__).parents[1]
CHECKED = os.environ.get("QKV_CHECK_SHAPES") == "1"
FILES = [
    "attend",
    "laws",
    "linear",
    "masks",
    "partial",
    "measure",
    "maps",
    "statistics",
    "cache",
    "nn",
    "decoder",
    "captioner",
    "alignment",
    "calls",
    "course_snippets",
]
# Words in the names of tests that repeat the calls of others many times: no signature is checked by them alone.
SLOW = [
    "learn", "memory", "random", "gradcheck", "differences", "command", "overfit", "compositions",
    "rate_and_the_mean", "equal_logits", "memorises", "loss_equals", "boolean_algebra", "visible_pair", "shifted_by",
    "for_each_query", "soft_cap_bounds", "over_splits", "draws_depend", "same_seed_drops", "longer_than_one_batch",
    "orthogonal_rows", "favor_is_unbiased", "linformer_has", "entropy_rises", "baseline_is", "reinforce_is",
    "sliding_equals", "appears_everywhere", "sharded_checkpoints", "use_units",
    "old_names",  # its warnings name the line of the caller, which here is in jaxtyping
]  # fmt: skip

if CHECKED:  # in the process that the next test starts

    def test_a_wrong_shape_is_found() -> None:
        q, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
        with pytest.raises(jaxtyping.TypeCheckError):
            qkv.Partial(q, lse).merge(0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_signatures_tell_the_shapes_of_what_passes() -> None:
    """`test_a_wrong_shape_is_found` runs among them: without it this process could not tell checks from none."""
    runs = [f"{__file__}::test_a_wrong_shape_is_found", *(str(next(TESTS.glob(f"*/test_{name}.py"))) for name in FILES)]
    command = [sys.executable, "-m", "pytest", "--one-case", "-m", "not slow", "-k", f"not ({' or '.join(SLOW)})"]
    done = subprocess.run(
        [*command, *runs], env={**os.environ, "QKV_CHECK_SHAPES": "1"}, cwd=TESTS.parent,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
