"""Wheel and sdist build, contain all required files, and work in a fresh environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import qkv
from qkv.models import checkpoint

pytest.importorskip("hatchling", reason="building needs the dev extra")
ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel of qkv, built from its sdist of the files that git tracks, and the wheel of qkv-lab."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT / "lab", cwd=folder)
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_contain_required_files(built: Path) -> None:
    (wheel,) = built.glob("qkv-*.whl")
    (sdist,) = built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "qkv").rglob("*") if p.is_file()}
    wanted = {name for name in here if "__pycache__" not in name}
    assert wanted <= names
    assert "qkv/models/trained/qkv-mini/model.safetensors" in names
    (lab,) = built.glob("qkv_lab-*.whl")
    for model in set(checkpoint.NAMES) - {"qkv-mini"}:
        assert f"qkv_lab/models/trained/{model}/model.safetensors" in zipfile.ZipFile(lab).namelist()
    assert not {name for name in names if not name.startswith(("qkv/", "qkv-"))}, "the wheel must contain only qkv"
    assert "qkv/py.typed" in names
    assert any(name.endswith(".dist-info/sboms/sbom.cdx.json") for name in names)
    assert wheel.stat().st_size <= 8 * 2**20, "the wheel is larger than 8 MiB: move a model to a package of its own"
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt"} <= inside
    assert not {name for name in inside if name.startswith((".venv", "docs/_build", "qkv-runs", "docs/reference"))}


@pytest.mark.slow
def test_every_link_of_the_published_readme_is_absolute(built: Path) -> None:
    (wheel,) = built.glob("qkv-*.whl")
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    head, readme = zipfile.ZipFile(wheel).read(name).decode().split("\n\n", 1)
    assert f"Version: {qkv.__version__}" in head.splitlines()
    assert "[arXiv:1906.04341](https://arxiv.org/abs/1906.04341)" in readme
    assert not re.findall(r"\]\((?!https://)[^)]*\)", readme)


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment through a path file; qkv, and then qkv-lab, are installed."""
    (wheel,) = built.glob("qkv-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    install = (*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*install, wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "qkv" not in path.name:  # neither the editable installations nor their metadata
            (packages / "dependencies" / path.name).symlink_to(path)
    (packages / "dependencies.pth").write_text("dependencies\n")
    qkv_command = tmp_path / "env" / "bin" / "qkv"
    for name in ("train", "lab", "check", "experiment", "claims"):
        alone = subprocess.run([qkv_command, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert alone.returncode == 2
        assert "pip install qkv-lab" in alone.stderr
    without = "import qkv\ntry:\n    qkv.course.create_causal_mask\nexcept ModuleNotFoundError as e:\n    print(e)\n"
    assert "qkv-lab" in run(python, "-c", without, cwd=tmp_path)
    run(*install, *built.glob("qkv_lab-*.whl"), cwd=tmp_path)
    assert run(qkv_command, "--version", cwd=tmp_path) == f"qkv {qkv.__version__}\n"
    code = (
        "import qkv, qkv.cli, qkv.models as m\n"
        "print(qkv.__file__, [m.load(n).__class__.__name__ for n in m.checkpoint.NAMES], sep='\\n')\n"
        "qkv.cli.main(['profile', 'qkv-mini', 'x = 1', '--no-probe', '--out', 'found'])\n"
    )
    where, loaded, *_ = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(tmp_path / "env")
    assert len(re.findall(r"'(\w+)'", loaded)) == len(checkpoint.NAMES)
    assert "qkv-mini" in (tmp_path / "found" / "report.html").read_text(encoding="utf-8")
    assert "holds only when" in run(qkv_command, "claims", "C180", cwd=tmp_path)  # it reads a benchmark
    assert "qkv.reference  largest difference" in run(qkv_command, "lab", "03-by-hand", cwd=tmp_path)
    assert list((tmp_path / "qkv-lab" / "03-by-hand").glob("*.png"))
