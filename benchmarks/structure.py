"""Measures of the code: functions on the way of a query to a kernel and of a statistic to the report, files, lines.

python -m benchmarks.structure prints the numbers of the installed qkv; with PYTHONPATH=OTHER/src, those of another.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import torch
import xarray as xr
from torch import Tensor

import qkv

SOURCE = Path(qkv.__file__).parent
CORE = (
    "*.py", "_engine/**/*.py", "masks/**/*.py", "biases/**/*.py", "normalizers/**/*.py", "kernels/**/*.py",
    "statistics/**/*.py",
)  # fmt: skip


def hops(run: Callable[[], object], holds: Callable[[Any], bool], end: Callable[[FrameType], bool]) -> list[str]:
    """Functions of qkv, in the order of their first call, with an argument that `holds` it, until `end`."""
    seen: dict[str, None] = {}
    over = False

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal over
        code = frame.f_code
        if over or event != "call" or not code.co_filename.startswith(str(SOURCE)) or code.co_name.startswith("<"):
            return
        given = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount] if name in frame.f_locals]
        if any(holds(x) for x in given):
            seen[f"{Path(code.co_filename).relative_to(SOURCE)}:{code.co_qualname}"] = None
            over = end(frame)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(seen)


def query() -> list[str]:
    """From `attend` with a window to the kernel's `forward`."""
    q, k, v = torch.randn(3, 1, 4, 200, 16)

    def holds(x: Any) -> bool:
        x = x if isinstance(x, Tensor) else getattr(x, "q", None)
        return isinstance(x, Tensor) and x.data_ptr() == q.data_ptr()

    def end(frame: FrameType) -> bool:
        return frame.f_code.co_name in ("run", "forward") and "kernels" in frame.f_code.co_filename

    return hops(lambda: qkv.attend(q, k, v, mask=qkv.masks.Window(20)), holds, end)


def statistic() -> list[str]:
    """From the observer of a call to the end of the report."""
    config = qkv.models.DecoderConfig(vocab_size=20, d_model=16, layers=1, heads=2)
    model = qkv.models.DecoderLM(config)
    ids = torch.arange(12)[None]
    kinds = {"Statistics", "Sums", "Record", "Profile"}

    def holds(x: Any) -> bool:
        if isinstance(x, xr.Dataset):
            return "entropy" in x
        if isinstance(x, list) and x:
            return holds(x[0])
        return type(x).__name__ in kinds or (isinstance(x, pd.DataFrame) and "entropy" in x.columns)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        return hops(lambda: qkv.profile(model, ids, progress=False).report(path), holds, lambda frame: False)


def naming(word: str) -> list[str]:
    """Files of the package, pages included, that name a thing."""
    files = sorted(x for kind in ("py", "js") for x in SOURCE.rglob(f"*.{kind}"))
    return [str(f.relative_to(SOURCE)) for f in files if re.search(rf"\b{word}\b", f.read_text())]


def lines(*patterns: str) -> int:
    """Lines of Python."""
    files = {file for pattern in patterns for file in SOURCE.glob(pattern)}
    return sum(file.read_text().count("\n") for file in files)


def main() -> None:
    q, s = query(), statistic()
    numbers = {
        "functions from attend to the kernel": len(q),
        "files of these": len({x.partition(":")[0] for x in q}),
        "functions from the hook to the report": len(s),
        "files of these ": len({x.partition(":")[0] for x in s}),
        "files that name effective_keys": len(naming("effective_keys")),
        "files that name Window": len(naming("Window")),
        "lines of the core": lines(*CORE),
        "lines of Python in src": lines("**/*.py"),
        "longest file": max(file.read_text().count("\n") for file in SOURCE.rglob("*.py")),
    }
    for name, value in numbers.items():
        print(f"{name.strip():40s} {value:,}")


if __name__ == "__main__":
    main()
