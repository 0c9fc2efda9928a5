"""`make lint`: the code of README and how-tos passes mypy --strict, and return types follow the arguments.

It runs after mypy over the sources, whose cache it shares: alone it takes forty seconds, then five.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pages

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


def main() -> int:
    """Check one module for each page; `WRONG` shows that mypy finds what is wrong."""
    with TemporaryDirectory() as folder:
        modules = {re.sub(r"\W", "_", page.removesuffix(".md")): pages.python(page) for page in PAGES}
        sources = {f"page_{name}": "\n\n".join(b.code for b in blocks) + "\n" for name, blocks in modules.items()}
        for name, source in (sources | {"returns": RETURNS, "wrong": WRONG}).items():
            Path(folder, f"{name}.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", *sorted(map(str, Path(folder).glob("*.py")))],
            cwd=pages.ROOT, env={"MYPYPATH": f"{pages.ROOT}/src:{pages.ROOT}/lab:{pages.ROOT}"}, check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
