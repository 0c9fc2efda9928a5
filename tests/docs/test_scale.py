"""The page on surveys: its plan is the one that its script derives, and its files can be submitted."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import yaml

DOCS = Path(__file__).parents[2] / "docs"


def test_the_plan_is_up_to_date_and_its_jobs_can_be_submitted() -> None:
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(DOCS / "make_plan.py"))["filled"](page) == page, "run docs/make_plan.py"
    code = {kind: re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for kind in ("yaml", "bash")}
    (job,) = (found for found in map(yaml.safe_load, code["yaml"]) if "kind" in found)
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert f'--only-shards "$JOB_COMPLETION_INDEX/{job["spec"]["completions"]}"' in container["args"][0]
    for script in code["bash"]:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
