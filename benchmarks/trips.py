"""How far a call travels: the functions and files of qkv that it passes, and the depth of its stack.

    python -m benchmarks.trips [--list]

Counted with sys.setprofile on the second call, when modules are imported and caches are filled. Only Python functions
of `src/qkv` count; depth is the number of them on the stack at once. Comprehensions, generator expressions and lambdas
belong to the function that has them: Python 3.12 runs most of them in its frame.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import qkv
from qkv.masks import Causal, Window
from qkv.models import DecoderConfig, DecoderLM

SOURCE = str(Path(qkv.__file__).parent)
GOALS = {"attend": (40, 10, 8), "measure": (50, 12, 9), "profile": (220, 35, 20)}


def trip(call: Callable[[], Any]) -> tuple[list[tuple[str, str]], int, int]:
    """The functions of a call by file and name in the order of their first call, its depth, and its number of calls."""
    functions: dict[tuple[str, str], None] = {}
    depth = deepest = calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth, deepest, calls
        of_qkv = frame.f_code.co_filename.startswith(SOURCE) and not frame.f_code.co_name.startswith("<")
        if not of_qkv or event not in ("call", "return"):
            return
        if event == "return":
            depth -= 1
            return
        functions[frame.f_code.co_filename[len(SOURCE) + 1 :], frame.f_code.co_qualname] = None
        depth, calls = depth + 1, calls + 1
        deepest = max(deepest, depth)

    call()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(functions), deepest, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function in the order of its first call")
    listed = parser.parse_args().list
    q, k, v = (torch.randn(1, 4, 600, 16) for _ in range(3))
    model, ids = DecoderLM(DecoderConfig(d_model=32, layers=1, heads=2)).eval(), torch.arange(20)[None]
    calls: dict[str, Callable[[], Any]] = {
        "attend": lambda: qkv.attend(q, k, v, mask=Window(64)),
        "measure": lambda: qkv.measure(q, k, mask=Causal()),
        "profile": lambda: qkv.profile(model, ids, progress=False),
    }
    for name, call in calls.items():
        functions, depth, number = trip(call)
        files = len({file for file, _ in functions})
        goal = " / ".join(map(str, GOALS[name]))
        print(f"{name}: {len(functions)} functions / {files} files / depth {depth} (goal {goal}), {number:,} calls")
        for file, function in functions if listed else ():
            print(f"    {file}: {function}")


if __name__ == "__main__":
    main()
