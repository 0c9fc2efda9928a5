"""Run `python -m benchmarks.mechanisms`: time every attention mechanism on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from benchmarks.mechanisms.command import bench
from qkv.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Time mechanisms. Bad input prints one sentence and returns exit code 2."""
    try:
        tyro.cli(bench, prog="python -m benchmarks.mechanisms", args=arguments)
    except InputError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
