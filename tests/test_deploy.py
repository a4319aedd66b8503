"""Container, compose and cluster files: checked without an engine against the code that they run."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
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
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml"))
SETTINGS = {PREFIX + name.upper() for name in Settings.model_fields}
AGENT_VARIABLES = {"TULA_URL", "TULA_JOB", "TULA_TOKEN"}


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def compose() -> dict[str, Any]:
    """docker-compose.yml with anchors resolved."""
    return documents(ROOT / "docker-compose.yml")[0]


def command_names() -> set[str]:
    """What `python -m tula_service` understands."""
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
    """An empty variable would have left Grafana's own, which everyone knows."""
    services = compose()["services"]
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        for variable, value in service.get("environment", {}).items():
            if "PASSWORD" in variable and not variable.endswith("__FILE"):
                assert ":?" in value, f"{name}: {variable} may be empty"
    assert "grafana-password" in services["grafana"]["secrets"]


def scraped(database: str) -> str:
    """What Prometheus gets from a service on this database."""
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


def test_the_example_job_gives_the_agent_what_it_reads() -> None:
    job = documents(ROOT / "deploy/kubernetes/example-job/pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    for replica in job.values():
        names = {each["name"] for each in replica["template"]["spec"]["containers"][0]["env"]}
        assert {name for name in names if name.startswith("TULA_")} == AGENT_VARIABLES


def test_the_commands_that_the_documents_say_fit_the_files() -> None:
    """`docs/deploy.md` names this file as its cover: services, profiles, arguments and paths in it exist."""
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
    for path in re.findall(r"apply -k (\S+)", text):
        assert (ROOT / path / "kustomization.yaml").is_file()
    for secret, key in re.findall(r"secret generic (\S+) --from-literal=(\w+)=", text):
        manifest = (ROOT / "deploy/kubernetes/base/deployment.yaml").read_text(encoding="utf-8")
        assert f"{{name: {secret}, key: {key}}}" in manifest
