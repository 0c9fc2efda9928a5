"""Types for users: the code of README and how-tos passes mypy --strict, and return types follow the arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages

pytest.importorskip("mypy", reason="types are checked with the dev extra")
pytestmark = pytest.mark.slow
PAGES = [page for page in pages.pages() if page == "README.md" or page.startswith("docs/howto/")]
PAGES = [page for page in PAGES if pages.python(page)]

RETURNS = """
from typing import Any, assert_type

import numpy as np
from torch import Tensor, nn

import qkv
from qkv.models import DecoderConfig, DecoderLM
from qkv.nn import AdditiveAttention, LuongAttention, MultiHeadAttention, TransformerBlock
from qkv.statistics import Statistics
from qkv_lab import course


def returns(x: Tensor, array: np.ndarray, flag: bool, name: str) -> None:
    assert_type(qkv.attend(x, x, x), Tensor)
    assert_type(qkv.attend(array, array, array), np.ndarray)
    assert_type(qkv.attend(x, x, x, return_lse=True), qkv.Result[Tensor])
    assert_type(qkv.attend(x, x, x, return_lse=True, return_weights=True).weights, Tensor | None)
    assert_type(qkv.attend(array, array, array, return_statistics=True).out, np.ndarray)
    assert_type(qkv.attend(x, x, x, return_statistics=True).statistics, Statistics | None)
    attention = qkv.Attention()
    assert_type(attention(x, x, x), Tensor)
    assert_type(attention(x, x, x, return_statistics=True), qkv.Result[Tensor])
    assert_type(qkv.linear_attend(x, x, x), Tensor)
    assert_type(qkv.linear_attend(x, x, x, return_state=True), Any)
    heads = MultiHeadAttention(8, 2)
    assert_type(heads(x, x), Tensor)
    assert_type(heads(x, return_weights=True, return_statistics=flag), Any)
    assert_type(heads(x, need_weights=flag), Any)
    assert_type(qkv.attend(x, x, x, is_causal=True, scale=0.5, attn_mask=x), Tensor)
    block = TransformerBlock(heads, nn.Identity(), cross=heads)
    assert_type(block(x, x), Tensor)
    assert_type(block(x, return_weights=flag), Any)
    decoder = DecoderLM(DecoderConfig(attention=attention))
    assert_type(decoder(x, return_weights=True), tuple[Tensor, tuple[Tensor, ...]])
    assert_type(course.scaled_dot_product_attention(array, array, array), tuple[np.ndarray, np.ndarray])
    additive = AdditiveAttention(8, 8, 8)
    assert_type(additive(x, x), Tensor)
    assert_type(LuongAttention(8, 8)(x, x, return_weights=True), Any)
    assert_type(qkv.nn.Composition(attention)(x, x, x), Tensor)
    assert_type(qkv.nn.from_torch(nn.MultiheadAttention(8, 2)), MultiHeadAttention)
    assert_type(qkv.nn.from_torch(nn.TransformerEncoderLayer(8, 2)), TransformerBlock)
    assert_type(qkv.load("qkv-mini")[0], DecoderLM)
    assert_type(qkv.load(name)[0], nn.Module)
"""

# A comment that hides no error is an error itself. Were the errors shown, mypy's cache could not keep this module, and
# every run would load the types of torch again.
WRONG = """
import qkv

qkv.masks.Window("3")  # type: ignore[arg-type]
qkv.attned  # type: ignore[attr-defined]
"""


def test_the_code_of_pages_passes_mypy_and_return_types_follow_the_arguments(tmp_path: Path) -> None:
    """One module for each page; `WRONG` shows that mypy finds what is wrong."""
    for page in PAGES:
        name = "page_" + re.sub(r"\W", "_", page.removesuffix(".md"))
        (tmp_path / f"{name}.py").write_text("\n\n".join(b.code for b in pages.python(page)) + "\n")
    (tmp_path / "returns.py").write_text(RETURNS)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *sorted(map(str, tmp_path.glob("*.py")))],
        cwd=pages.ROOT, env={"MYPYPATH": f"{pages.ROOT}/src:{pages.ROOT}/lab:{pages.ROOT}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if re.search(r"(page_|returns|wrong)\w*\.py:", line)]
    assert not errors, "\n".join(errors)
