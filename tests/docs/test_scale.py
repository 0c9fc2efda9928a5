"""The page on surveys: its plan is the one that its script derives, and its files can be submitted."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "scale.md").read_text(encoding="utf-8")


def test_the_plan_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_plan", DOCS / "make_plan.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.filled(PAGE) == PAGE, "run docs/make_plan.py"


def test_the_kubernetes_job_gives_every_pod_a_part() -> None:
    pages = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    (job,) = (page for page in pages if "kind" in page)
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert f'--only-shards "$JOB_COMPLETION_INDEX/{job["spec"]["completions"]}"' in container["args"][0]


@pytest.mark.parametrize("script", re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
def test_shell_scripts_have_no_syntax_errors(script: str) -> None:
    found = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
