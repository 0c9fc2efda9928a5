"""What a release needs: one version, links that lead somewhere, hashes of models, wheels that work when installed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import qkv
from qkv import native
from qkv.models import checkpoint

pytest.importorskip("hatchling", reason="building needs the dev extra")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qkv-example"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
LINK = r"\]\(([^)]*)\)"


def test_with_a_repository_all_links_lead_to_this_version() -> None:
    hook, readme = runpy.run_path(str(ROOT / "hatch_build.py")), (ROOT / "README.md").read_text(encoding="utf-8")
    published = hook["published"](readme, "https://github.com/someone/qkv", "1.2.3")
    for before, after in zip(re.findall(LINK, readme), re.findall(LINK, published), strict=True):
        if not before.startswith("https://"):
            path = re.fullmatch(r"https://github\.com/someone/qkv/(?:blob|raw)/v1\.2\.3/(.*)", after)
            assert path is not None
            assert (ROOT / path[1].partition("#")[0]).exists(), f"README.md links to {path[1]}, which does not exist"
    assert hook["urls"]("", "1.2.3") == {}
    found = hook["urls"]("https://github.com/Some-One/qkv", "1.2.3")
    assert found["Documentation"] == "https://some-one.github.io/qkv/"
    assert found["Changelog"].endswith("/v1.2.3/CHANGELOG.md")
    for wrong in ("github.com/someone/qkv", "https://github.com/someone", "https://github.com/someone/qkv/"):
        with pytest.raises(ValueError, match="repository"):
            hook["urls"](wrong, "1.2.3")


def test_files_of_the_release_have_one_version_and_one_repository() -> None:
    hatch = CONFIG["tool"]["hatch"]
    assert "version" in CONFIG["project"]["dynamic"]
    assert (ROOT / hatch["version"]["path"]).samefile(str(qkv.__file__))
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (qkv.__version__, CONFIG["project"]["license"])
    assert {"cff-version", "message", "title", "authors", "date-released"} <= set(cited)
    assert cited.get("repository-code", "") == hatch["metadata"]["hooks"]["custom"]["repository"]
    changes = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes[0] == qkv.__version__


def test_bill_of_materials_has_the_hash_of_every_bundled_model() -> None:
    kept = (ROOT / "sbom.cdx.json").read_text(encoding="utf-8")
    assert kept == runpy.run_path(str(ROOT / "release" / "sbom.py"))["text"](), "run `make sbom`"
    assert all(f"/models/trained/{name}/model.safetensors" in kept for name in checkpoint.NAMES)


def test_workflows_are_valid_run_targets_that_exist_and_one_job_may_publish() -> None:
    """On every Python that the classifiers name; only the job that publishes may ask for an identity."""
    pytest.importorskip("check_jsonschema", reason="it has the schema of workflows")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    run(*command, *(ROOT / ".github" / "workflows").glob("*.yml"), cwd=ROOT)
    test, release = (yaml.safe_load(WORKFLOWS[name]) for name in ("test", "release"))
    named = re.findall(r":: (3\.\d+)$", "\n".join(CONFIG["project"]["classifiers"]), re.MULTILINE)
    assert named == test["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert CONFIG["project"]["requires-python"] == f">={named[0]}"
    text = "".join(WORKFLOWS.values())
    used = {*re.findall(r"\bmake ([a-z0-9-]+)", text), *test["jobs"]["install"]["strategy"]["matrix"]["target"]}
    assert used <= set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asking = [name for name, job in release["jobs"].items() if job.get("permissions", {}).get("id-token") == "write"]
    assert (asking, release["permissions"]) == (["publish"], {"contents": "read"})
    assert "secrets." not in text


# --- wheels -----------------------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path, **changed: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"HF_HUB_OFFLINE": "1"}
    env |= changed
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel of qkv, built from its sdist of the files that git tracks, and the wheel of qkv-lab."""
    folder = tmp_path_factory.mktemp("dist")
    compiler = folder / "cc"  # it copies the library of this environment to where it is asked to compile
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{native.LIBRARY}" "$2"\n')
    compiler.chmod(0o755)
    build = (sys.executable, "-m", "hatchling", "build", "--directory", folder, "--target")
    run(*build, "sdist", cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    run(*build, "wheel", cwd=folder / sdist.name.removesuffix(".tar.gz"), CC=str(compiler))
    run(*build, "wheel", cwd=ROOT / "lab")
    return folder


@pytest.mark.slow
def test_wheel_and_sdist_contain_required_files(built: Path) -> None:
    """And every link of the published README is absolute."""
    (wheel,), (lab,), (sdist,) = (list(built.glob(name)) for name in ("qkv-*.whl", "qkv_lab-*.whl", "*.tar.gz"))
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    here = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "qkv").rglob("*") if p.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= names
    assert {"qkv/models/trained/qkv-mini/model.safetensors", "qkv/py.typed"} <= names
    assert not {name for name in names if not name.startswith(("qkv/", "qkv-"))}, "the wheel must contain only qkv"
    assert any(name.endswith(".dist-info/sboms/sbom.cdx.json") for name in names)
    assert wheel.stat().st_size <= 8 * 2**20, "the wheel is larger than 8 MiB: move a model to a package of its own"
    models = {f"qkv_lab/models/trained/{name}/model.safetensors" for name in set(checkpoint.NAMES) - {"qkv-mini"}}
    assert models <= set(zipfile.ZipFile(lab).namelist())
    with tarfile.open(sdist) as opened:
        inside = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt"} <= inside
    assert not {name for name in inside if name.startswith((".venv", "docs/_build", "qkv-runs", "docs/reference"))}
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    head, readme = archive.read(name).decode().split("\n\n", 1)
    assert f"Version: {qkv.__version__}" in head.splitlines()
    assert "](https://xarray.dev)" in readme
    assert not re.findall(r"\]\((?!https://)[^)]*\)", readme)


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment through a path file; qkv, qkv-lab and the example are installed."""
    (wheel,) = built.glob("qkv-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "uv", "pip", "install", "--python", python, "--offline", "--no-deps")
    run(*pip, wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "qkv" not in path.name:  # neither the editable installations nor their metadata
            (packages / "dependencies" / path.name).symlink_to(path)
    (packages / "dependencies.pth").write_text("dependencies\n")
    without = "import qkv\ntry:\n    qkv.course.create_causal_mask\nexcept ModuleNotFoundError as e:\n    print(e)\n"
    assert "pip install qkv-lab" in run(python, "-c", without, cwd=tmp_path)
    run(*pip, "--no-build-isolation", *built.glob("qkv_lab-*.whl"), EXAMPLE, cwd=tmp_path)
    code = """
import sys, qkv, qkv.models as m
from qkv.cli import main
from qkv.statistics.base import STATISTICS
from qkv_lab import experiments, tasks
print(qkv.__file__, qkv.__version__, [type(m.load(name)).__name__ for name in m.checkpoint.NAMES], sep="\\n")
STATISTICS.load("older"), experiments.experiment("temperature"), tasks.task_class("first")
main(["claims", "C180"])
sys.exit(main("generate qkv-mini for --tokens 12 --cache mean:8,4".split()))
"""  # the tests of the example take long: tests/lab and docs/howto/your-own.md make their checks on such objects
    said = run(python, "-c", code, cwd=tmp_path)
    where, version, loaded, *_ = said.splitlines()
    assert (Path(where).is_relative_to(tmp_path / "env"), version) == (True, qkv.__version__)
    assert len(re.findall(r"'(\w+)'", loaded)) == len(checkpoint.NAMES)
    assert "holds only when" in said  # the claim reads a benchmark
