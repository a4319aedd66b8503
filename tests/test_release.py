"""What a release needs is there and valid: workflows by their schemas, and a tag that becomes wheel and archive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / "bug.yml", GITHUB / "ISSUE_TEMPLATE" / "feature.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_follows_its_published_schema(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, SCHEMAS[schema])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_workflow_has_few_rights_and_a_time_limit() -> None:
    """Only publishing writes, and no step reads a stored secret but the token of the run itself."""
    assert {path.stem for path in WORKFLOWS} == {"tests", "release", "image", "documents"}
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        workflow = yaml.safe_load(text)
        assert workflow["permissions"]["contents"] == "read"
        assert all("timeout-minutes" in job for job in workflow["jobs"].values()), path
        assert set(re.findall(r"secrets\.(\w+)", text)) <= {"GITHUB_TOKEN"}
    publish = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}


def test_every_make_target_and_file_that_a_step_runs_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    commands = "\n".join(
        step["run"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    )
    assert set(re.findall(r"\bmake (\w+)", commands)) <= targets
    assert all((ROOT / name).is_file() for name in re.findall(r"\bdeploy/[\w.-]+", commands))


def test_the_steps_of_a_release_build_a_tag_and_refuse_another(tmp_path: Path) -> None:
    """The commands of the workflow, in a clone with the tag; an index is not needed, as the builder is installed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    changelog = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
    (clone / "CHANGELOG.md").write_text(changelog.replace(f"## {version} (unreleased)", f"## {version}"), "utf-8")
    workflow = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8"))
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step}
    refuse, build = (steps[name] for name in steps if name.startswith(("Refuse", "Build")))

    def run(script: str, tag: str) -> int:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"GITHUB_REF_NAME": tag, "PATH": path}
        return subprocess.run(["bash", "-e", "-c", script], cwd=clone, env=env, check=False, timeout=120).returncode

    assert run(refuse, "v9.9.9") != 0
    assert run(refuse, f"v{version}") == 0
    assert run(build, f"v{version}") == 0
    assert {path.name for path in (clone / "dist").iterdir()} == {
        f"tula-{version}-py3-none-any.whl",
        f"tula-{version}.tar.gz",
    }
