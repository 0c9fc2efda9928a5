"""What a release needs: links from one address, hashes of bundled models, valid workflows, one version."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import qkv

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = CONFIG["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def script(path: str) -> ModuleType:
    """A Python file of the repository that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("hatchling", reason="the build hook is a plugin of hatchling")
    return script("hatch_build.py")


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]*)\)", text)


def test_with_a_repository_every_link_of_the_readme_leads_to_this_version(hook: ModuleType) -> None:
    text = hook.published(README, "https://github.com/someone/qkv", "1.2.3")
    assert len(links(text)) == len(links(README))
    assert all(link.startswith("https://") for link in links(text))
    assert "![" in text
    for before, after in zip(links(README), links(text), strict=True):
        if not before.startswith("https://"):
            path = re.fullmatch(r"https://github\.com/someone/qkv/(?:blob|raw)/v1\.2\.3/(.*)", after)
            assert path is not None
            assert (ROOT / path[1].partition("#")[0]).exists(), f"README.md links to {path[1]}, which does not exist"


def test_without_a_repository_the_readme_has_no_relative_link(hook: ModuleType) -> None:
    text = hook.published(README, "", "1.2.3")
    assert links(text)
    assert all(link.startswith("https://") for link in links(text))
    assert "docs/comparison.md compares qkv" in text


def test_project_urls_come_from_the_repository(hook: ModuleType) -> None:
    assert hook.urls("", "1.2.3") == {}
    found = hook.urls("https://github.com/Some-One/qkv", "1.2.3")
    assert found["Documentation"] == "https://some-one.github.io/qkv/"
    assert found["Changelog"].endswith("/v1.2.3/CHANGELOG.md")
    for wrong in ("github.com/someone/qkv", "https://github.com/someone", "https://github.com/someone/qkv/"):
        with pytest.raises(ValueError, match="repository"):
            hook.urls(wrong, "1.2.3")


def test_the_version_is_in_one_place() -> None:
    assert "version" in CONFIG["project"]["dynamic"]
    assert "version" not in CONFIG["project"]
    assert (ROOT / CONFIG["tool"]["hatch"]["version"]["path"]).samefile(str(qkv.__file__))


def test_citation_agrees_with_version_and_repository() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == qkv.__version__
    assert cited["license"] == CONFIG["project"]["license"]
    assert {"cff-version", "message", "title", "authors", "date-released"} <= set(cited)
    assert cited.get("repository-code", "") == REPOSITORY


def test_changelog_has_this_version_first() -> None:
    found = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found[0] == qkv.__version__


def test_bill_of_materials_has_the_hash_of_every_bundled_model() -> None:
    made = script("release/sbom.py")
    kept = (ROOT / "sbom.cdx.json").read_text(encoding="utf-8")
    assert kept == made.text(), "sbom.cdx.json is not that of the bundled models: run `make sbom`"
    files = [file for model in json.loads(kept)["components"] for file in model["components"]]
    assert {file["name"] for file in files} >= {
        f"qkv/models/trained/{name}/model.safetensors" for name in qkv.models.checkpoint.NAMES
    }
    assert all(re.fullmatch(r"[0-9a-f]{64}", file["hashes"][0]["content"]) for file in files)


def test_workflows_have_the_form_that_github_expects() -> None:
    pytest.importorskip("check_jsonschema", reason="it has the schema of workflows")
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows")
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert len(WORKFLOWS) == 3
    assert done.returncode == 0, done.stdout + done.stderr


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", ())]


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    matrix = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["install"]["strategy"]["matrix"]
    commands = [step.get("run", "") for file in WORKFLOWS for step in steps(file)]
    used = {name for command in commands for name in re.findall(r"make ([a-z-]+)", command)}
    assert used | set(matrix["target"]) == {"docs", "extras", "lowest"}
    assert used | set(matrix["target"]) <= targets
    assert [step for step in steps(ROOT / ".github/workflows/test.yml") if step.get("run") == ".ci/run"]


def test_every_python_that_the_classifiers_name_is_tested() -> None:
    named = re.findall(r":: (3\.\d+)$", "\n".join(CONFIG["project"]["classifiers"]), re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]
    assert named == jobs["test"]["strategy"]["matrix"]["python"]
    assert CONFIG["project"]["requires-python"] == f">={named[0]}"


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    asking = [name for name, job in release["jobs"].items() if job.get("permissions", {}).get("id-token") == "write"]
    assert asking == ["publish"]
    assert release["permissions"] == {"contents": "read"}
    uses = [step["uses"] for step in release["jobs"]["publish"]["steps"]]
    assert uses[-1].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in "".join(file.read_text(encoding="utf-8") for file in WORKFLOWS)
