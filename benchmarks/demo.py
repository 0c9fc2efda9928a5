"""`make demo`: profile a real language model where its package is installed, and the bundled model where it is not.

python -m benchmarks.demo [--out qkv-demo]
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import tyro

from qkv.cli import main as qkv_main
from qkv.errors import InputError
from qkv.models import gguf_files

SMOLLM2 = (
    'profile smollm2 --chat "Why do you attend to the first token?" --out {out}/chat',
    "profile smollm2 --tokens 1024 --out {out}/text",
)
MINI = (
    "profile --out {out}/mini",
    "profile --tokens 512 --out {out}/text",
    'generate qkv-mini "class Stack:" --tokens 120 --seed 0',
)


def commands() -> tuple[str, ...]:
    """The commands of the demonstration; says why if they are not about SmolLM2."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    try:
        gguf_files.find("smollm2")
    except InputError as error:
        print(f"The bundled model qkv-mini is profiled instead of SmolLM2: {error}")
        return MINI
    if missing:
        print(f"The bundled model qkv-mini is profiled instead of SmolLM2: {missing[0]} is not installed")
        return MINI
    return SMOLLM2


def demo(out: Path = Path("qkv-demo")) -> int:
    """Run the commands, and say where the reports are."""
    found = [command.format(out=shlex.quote(str(out))) for command in commands()]
    for command in found:
        print(f"\n$ qkv {command}", flush=True)
        if code := qkv_main(shlex.split(command)):
            return code
    print("\nOpen the reports in a browser:")
    for report in sorted(out.glob("*/report.html")):
        print(f"  {report}")
    print(f"Or explore them in the viewer: qkv view {report.parent} (the saved profile)")
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(demo))
