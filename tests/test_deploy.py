"""Tests container, compose and cluster files against the code that they run, without a container engine."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tula_service.__main__ import app as commands
from tula_service.app import create_app
from tula_service.settings import PREFIX, Settings
from tula_wire import routes

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted([*CHART.glob("base/*.yaml"), *CHART.glob("example-job/*.yaml")])
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}
AGENT_VARIABLES = {"TULA_URL", "TULA_JOB", "TULA_TOKEN"}


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def compose() -> dict[str, Any]:
    """Return docker-compose.yml with anchors resolved."""
    return documents(ROOT / "docker-compose.yml")[0]


def command_names() -> set[str]:
    """Return the commands of `python -m tula_service`."""
    return {str(each.name) for each in (*commands.registered_commands, *commands.registered_groups)}


def test_every_file_deploys_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert compose()["x-tula"]["image"] == f"tula:${{TULA_VERSION:-{version}}}"
    tags = [
        image["newTag"]
        for path in MANIFESTS
        for document in documents(path)
        for image in document.get("images", [])
        if image["name"] == "tula"
    ]
    assert tags == [version] * len(tags)
    assert tags
    chart = documents(CHART / "Chart.yaml")[0]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    build = compose()["x-tula"]["build"]
    arguments = build.get("args", {}) if isinstance(build, dict) else {}
    assert set(arguments) <= {rest.partition("=")[0] for word, rest in dockerfile() if word == "ARG"}


def test_the_image_starts_a_command_that_exists_with_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = dict(dockerfile())
    assert json.loads(steps["ENTRYPOINT"]) == ["python", "-m", "tula_service"]
    assert set(json.loads(steps["CMD"])) <= command_names()
    environment = " ".join(rest for word, rest in dockerfile() if word == "ENV")
    given = dict(each.split("=", 1) for each in shlex.split(environment) if each.startswith(PREFIX))
    assert set(given) <= SETTINGS
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Settings.read().port == 8321
    assert f":8321{routes.READY}" in steps["HEALTHCHECK"]
    assert steps["EXPOSE"] == "8321"


def test_no_container_keeps_capabilities_or_has_a_default_password() -> None:
    """An empty variable would leave Grafana's default password, which everyone knows."""
    services = compose()["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        for variable, value in service.get("environment", {}).items():
            if "PASSWORD" in variable and not variable.endswith("__FILE"):
                assert ":?" in value, f"{name}: {variable} may be empty"
    assert "grafana-password" in services["grafana"]["secrets"]


def scraped(database: str) -> str:
    """Return what Prometheus gets from a service on this database."""
    app = create_app(Settings(database=database))

    async def ask() -> str:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(routes.METRICS)).text

    try:
        return asyncio.run(ask())
    finally:
        app.state.services.store.close()


def test_every_metric_on_the_grafana_dashboard_exists(sqlite_url: str) -> None:
    text = scraped(sqlite_url)
    known = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        known |= {name + suffix for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))}
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/tula.json").read_text(encoding="utf-8"))
    source = documents(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")[0]["datasources"][0]["uid"]
    used = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == source
        used |= {name for target in panel["targets"] for name in re.findall(r"\btula_\w+", target["expr"])}
    assert len(used) > 8
    assert used <= known


def test_pods_are_restricted_probe_real_routes_and_take_settings_that_exist() -> None:
    deployment = documents(ROOT / "deploy/kubernetes/base/deployment.yaml")[0]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert documents(ROOT / "deploy/kubernetes/base/service.yaml")[0]["spec"]["selector"] == labels
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert set(container["args"]) <= command_names()
        assert {each["name"] for each in container["env"]} <= SETTINGS
    serving = pod["containers"][0]
    assert serving["readinessProbe"]["httpGet"]["path"] == routes.READY
    assert serving["livenessProbe"]["httpGet"]["path"] == routes.HEALTH


HELM = """
import json, sys
import helm_python as helm

path, given, options = sys.argv[1], *map(json.loads, sys.argv[2:])
parsers = {"--set": helm.parse_set_string, "--set-string": helm.parse_set_string_values}
asked = [{"replica": 3}, {"env": {"TULA_DATABASE": "a password"}}]
refused = []
with helm.Chart.load(path) as chart:
    rendered = [chart.render(values, name="mine", namespace="tula") for values in given]
    for values in asked + [parsers[option](expression) for option, expression in options]:
        try:
            chart.validate_schema(values)
        except helm.HelmValuesError as error:
            refused.append(str(error))
json.dump({"rendered": rendered, "refused": refused, "lint": helm.lint(path, strict=True)}, sys.stdout)
"""
"""Runs in a process, which Go's runtime then shares with nothing else."""

CHANGED = {
    "image": "registry.example/tula:1",
    "replicas": 3,
    "databaseSecret": "other",
    "env": {"TULA_WORKERS": "2"},
}


@pytest.fixture(scope="module")
def helm() -> dict[str, Any]:
    """Return what Helm renders from the chart without values and with CHANGED, what it refuses, and lint messages.

    `refused` has Helm's messages about two values that the chart must refuse; values from docs/deploy.md must add none.
    """
    options = re.findall(r"(--set\S*) (\S+)", (ROOT / "docs/deploy.md").read_text(encoding="utf-8"))
    assert options
    arguments = [sys.executable, "-c", HELM, str(CHART), json.dumps([{}, CHANGED]), json.dumps(options)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def by_kind(text: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a stream of YAML documents, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_chart_is_linted_takes_the_documented_values_and_refuses_others(helm: dict[str, Any]) -> None:
    """One refused value is the database's address in plain text, which belongs in the Secret."""
    above_information = [message for message in helm["lint"]["messages"] if message["severity"] > 1]
    assert (helm["lint"]["total_charts_linted"], above_information, helm["lint"]["errors"]) == (1, [], [])
    unknown, plain = helm["refused"]
    assert "replica" in unknown
    assert "TULA_DATABASE" in plain


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed, which has kustomize built in")
def test_the_chart_renders_what_kustomize_does(helm: dict[str, Any]) -> None:
    """The namespace is excluded, since Helm installs into an existing one."""
    kustomize = ["kubectl", "kustomize", str(CHART / "base")]
    built = by_kind(subprocess.run(kustomize, capture_output=True, text=True, check=True, timeout=60).stdout)
    del built["Namespace"]
    (text,) = helm["rendered"][0].values()
    assert by_kind(text) == built


def test_values_of_the_chart_change_what_they_name_and_nothing_else(helm: dict[str, Any]) -> None:
    expected, changed = (by_kind(next(iter(files.values()))) for files in helm["rendered"])
    spec = expected["Deployment"]["spec"]
    spec["replicas"] = 3
    pod = spec["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        container["image"] = "registry.example/tula:1"
        container["env"][0]["valueFrom"]["secretKeyRef"]["name"] = "other"
    pod["containers"][0]["env"].append({"name": "TULA_WORKERS", "value": "2"})
    assert changed == expected


def test_the_example_job_gives_the_agent_what_it_reads() -> None:
    job = documents(ROOT / "deploy/kubernetes/example-job/pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    for replica in job.values():
        names = {each["name"] for each in replica["template"]["spec"]["containers"][0]["env"]}
        assert {name for name in names if name.startswith("TULA_")} == AGENT_VARIABLES


def test_the_commands_that_the_documents_say_fit_the_files() -> None:
    """The services, profiles, arguments and paths in `docs/deploy.md` exist; the page names this file as its test."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    services = compose()["services"]
    ran = re.findall(r"docker compose run --rm (\S+) (\S+)", text)
    assert ran
    for service, command in ran:
        assert service in services
        assert command in command_names()
    assert set(re.findall(r"--profile (\S+)", text)) == {"monitoring"}
    assert "monitoring" in services["grafana"]["profiles"]
    for argument in re.findall(r"--build-arg (\w+)=", text):
        assert any(word == "ARG" and rest.startswith(f"{argument}=") for word, rest in dockerfile())
    for variable in re.findall(r"export (\w+)=", text):
        assert f"${{{variable}:" in (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for path in re.findall(r"helm install tula (\S+)", text):
        assert (ROOT / path) == CHART
    for path in re.findall(r"apply -k (\S+)", text):
        assert (ROOT / path / "kustomization.yaml").is_file()
    for secret, key in re.findall(r"secret generic (\S+) --from-literal=(\w+)=", text):
        manifest = (ROOT / "deploy/kubernetes/base/deployment.yaml").read_text(encoding="utf-8")
        assert f"{{name: {secret}, key: {key}}}" in manifest
