"""A package outside of qkv can add one of each thing: the example package is installed, and its own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "qkv-example"


@pytest.mark.slow
def test_the_example_package_installs_and_passes_its_tests(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = "-m pip install --quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check --target"
    command = [sys.executable, *install.split(), str(packages), str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    process = Forked(its_tests, packages, folder=tmp_path)
    assert process.wait(600) == 0, process.out[-3000:] + process.errors[-3000:]


def its_tests(packages: Path) -> None:
    """Run the tests of the example package, as it is installed in a folder.

    In place of the checks of qkv.testing, which take long and which docs/howto/your-own.md runs on such objects too,
    two kernels compute with all of them at once.
    """
    sys.path.insert(0, str(packages))
    os.chdir(packages.parent)
    import qkv_example as mine
    import torch

    import qkv

    q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = {"mask": mine.Triangle(2), "bias": mine.Weekly(), "score": mine.Gaussian()}
    tiled, eager = (
        qkv.attend(q, k, v, **parts, normalizer=mine.SoftplusSquared(), kernel=name) for name in ("tiled", "eager")
    )
    torch.testing.assert_close(tiled, eager)
    already_imported = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-q", "-p", "no:cacheprovider", "-W", already_imported, "-k", "not mask_bias_score"]
    sys.exit(pytest.main([*options, str(EXAMPLE / "tests")]))
