"""Install qkv with one extra at a time into a fresh environment, and run the extra's smoke test there.

    python tests/install/environments.py                    # every extra, with the newest versions
    python tests/install/environments.py --lowest hf train  # two extras, with the lowest versions in pyproject.toml
    python tests/install/environments.py --python 3.14      # with another Python, which must be installed

uv makes the environments: it links the files of a package instead of copying them, so ten environments with torch take
the room of one, and it can choose the lowest versions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ["base", *(name for name in PROJECT["optional-dependencies"] if name not in ("dev", "zoo")), "lab"]
"""The installations to test; lab is qkv-lab without an extra. `make test` runs in dev, `make fuzz-runs` in zoo."""
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extra: str) -> Iterator[str]:
    """The requirements of an extra in pyproject.toml, with those of the extras that it includes."""
    for requirement in PROJECT["optional-dependencies"][extra]:
        included = re.fullmatch(r"qkv\[(.*)\]", requirement)
        if included is None:
            yield requirement
        else:
            for name in included[1].split(","):
                yield from requirements(name)


def run(*command: str | Path, cwd: Path) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    environment.pop("PYTHONPATH", None)
    if "PIP_FIND_LINKS" in environment:  # a folder of wheels, such as a CPU build of torch
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, check=False).returncode


def passes(extra: str, wheel: Path, lab: Path, *, python: str, lowest: bool) -> bool:
    """Whether an extra, or qkv-lab, can be installed alone, and its smoke test passes then."""
    with tempfile.TemporaryDirectory(prefix="qkv-") as name:
        folder = Path(name)
        uv, there = (sys.executable, "-m", "uv", "--quiet"), folder / "env" / "bin" / "python"
        install = (*uv, "pip", "install", "--python", there)
        if run(*uv, "venv", "--python", python, folder / "env", cwd=folder):
            return False
        if lowest:
            direct = folder / "direct.txt"
            more = {"base": [], "lab": [x for x in LAB["dependencies"] if not x.startswith("qkv")]}
            more = more[extra] if extra in more else list(requirements(extra))
            direct.write_text("\n".join(PROJECT["dependencies"] + more), encoding="utf-8")
            steps = [("--resolution", "lowest-direct", "-r", direct), ("--no-deps", wheel)]
            steps += [("--no-deps", lab)] if extra == "lab" else []
        elif extra == "lab":
            steps = [(f"qkv @ {wheel.as_uri()}", f"qkv-lab @ {lab.as_uri()}")]
        else:
            steps = [(f"qkv @ {wheel.as_uri()}" if extra == "base" else f"qkv[{extra}] @ {wheel.as_uri()}",)]
        (folder / "work").mkdir()
        return not any(run(*install, *step, cwd=folder) for step in steps) and not run(
            there, ROOT / "tests" / "install" / "smoke.py", extra, cwd=folder / "work"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"one of {', '.join(EXTRAS)}; all by default")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions that pyproject.toml allows")
    parser.add_argument("--python", default=sys.executable, help="version or path of the Python to use")
    given = parser.parse_args()
    if unknown := set(given.extras) - set(EXTRAS):
        parser.error(f"no extra {', '.join(sorted(unknown))}; expected some of {', '.join(EXTRAS)}")
    with tempfile.TemporaryDirectory(prefix="qkv-") as name:
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", name)
        if run(*build, ROOT, cwd=Path(name)) or run(*build, ROOT / "lab", cwd=Path(name)):
            return 1
        (wheel,), (lab,) = Path(name).glob("qkv-*.whl"), Path(name).glob("qkv_lab-*.whl")
        failed = [
            extra
            for extra in given.extras or EXTRAS
            if not passes(extra, wheel, lab, python=given.python, lowest=given.lowest)
        ]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
