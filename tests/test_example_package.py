"""A package outside of qkv can add one of each thing: the example package is installed, and its own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "qkv-example"


@pytest.mark.slow
def test_the_example_package_installs_and_passes_its_tests(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests")]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command in ([*install, "--target", str(tmp_path), str(EXAMPLE)], test):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
