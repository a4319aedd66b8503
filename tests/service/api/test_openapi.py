"""Tests `/openapi.json`: every property is described, its examples are accepted, and a generated client works."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_python_client import Config, MetaType, generate
from openapi_python_client.config import ConfigFile

from benchmarks.support.forked import Server
from benchmarks.support.server import make_token, migrate
from tests.service.api.conftest import Service
from tula_service.api.docs import EXAMPLES, TAGS, document
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_wire import MEDIA_TYPE, ProblemType


@pytest.fixture
def openapi(sqlite_url: str) -> dict[str, Any]:
    """Return the OpenAPI document of the application."""
    app = create_app(Settings(database=sqlite_url))
    app.state.services.store.close()
    return document(app)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Start a service; yield its address and an administrator's token."""
    database = f"sqlite:///{tmp_path_factory.mktemp('openapi') / 'tula.db'}"
    migrate(database)
    with Server(database) as server:
        yield server.url, make_token(database, "admin")


def operations(openapi: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every operation with its method and path."""
    for path, found in openapi["paths"].items():
        for method, operation in found.items():
            yield f"{method.upper()} {path}", operation


def test_every_property_and_parameter_has_a_description(openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    properties = list(properties_in(schemas))
    assert len(properties) > 300
    assert [name for name, schema in properties if not schema.get("description")] == []
    parameters = {
        f"{at}: {each['name']}": each
        for at, operation in operations(openapi)
        for each in operation.get("parameters", ())
    }
    assert [name for name, parameter in parameters.items() if not parameter.get("description")] == []


def properties_in(found: Any, at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every property at any depth of the document, with its place."""
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    for key, value in inner:
        if key == "properties":
            yield from ((f"{at}.{name}", schema) for name, schema in value.items())
        if key != "examples":
            yield from properties_in(value, f"{at}.{key}" if at else str(key))


UNITS = {
    "_s": "second",
    "_bytes": "byte",
    "_usd": "US dollar",
    "_gbps": "gigabits per second",
    "usd_per": "US dollars per",
}


def test_a_description_names_the_unit_that_the_name_ends_in(openapi: dict[str, Any]) -> None:
    """The description of a list of objects or of a nested estimate also says what its numbers count."""
    without = []
    for model, found in openapi["components"]["schemas"].items():
        for name, schema in found.get("properties", {}).items():
            unit = next((text for end, text in UNITS.items() if name.endswith(end) or name.startswith(end)), None)
            if unit is not None and unit.lower() not in schema["description"].lower():
                without.append(f"{model}.{name}: {schema['description']}")
    assert without == []


def test_operations_have_short_names_known_tags_and_errors_by_type(openapi: dict[str, Any]) -> None:
    found = dict(operations(openapi))
    names = [operation["operationId"] for operation in found.values()]
    assert len(set(names)) == len(names)
    assert found["POST /v1/jobs"]["operationId"] == "create_job"
    assert [name for name in names if "v1" in name or name.startswith(("post_", "patch_"))] == []
    assert {tag for operation in found.values() for tag in operation["tags"]} == set(TAGS)
    types = {kind for name, kind in vars(ProblemType).items() if name.isupper()}
    described = set()
    for at, operation in found.items():
        errors = {status: answer for status, answer in operation["responses"].items() if status[0] in "45"}
        open_ = operation.get("security") == []
        assert set(errors) >= {"500", "503"} | (set() if open_ else {"401", "403", "429"}), at
        assert all(list(answer["content"]) == [MEDIA_TYPE] for answer in errors.values()), at
        named = {s: {kind for kind in types if f"`{kind}`" in errors[s]["description"]} for s in errors if s.isdigit()}
        assert all(len(kinds) == 1 for kinds in named.values()), at
        described |= set().union(*named.values())
    assert described == types


def test_every_body_has_an_example_that_the_service_accepts(openapi: dict[str, Any], served: tuple[str, str]) -> None:
    read = {
        media["schema"]["$ref"].rpartition("/")[2]
        for _, operation in operations(openapi)
        for media in operation.get("requestBody", {}).get("content", {}).values()
    }
    assert read == set(EXAMPLES)
    url, token = served
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
        job = send(client, "POST", "/v1/jobs", "JobSpec")["job"]["id"]
        send(client, "PATCH", f"/v1/jobs/{job}", "JobPatch")
        send(client, "PATCH", f"/v1/jobs/{job}/scaling", "ScalingPatch")
        run = send(client, "POST", f"/v1/jobs/{job}/runs:claim", "ClaimRequest")["run"]["id"]
        assert send(client, "POST", f"/v1/runs/{run}/samples", "SampleBatch")["stored"] == 3
        assert send(client, "PATCH", f"/v1/runs/{run}", "RunPatch")["state"] == "succeeded"
        run = send(client, "POST", f"/v1/jobs/{job}/runs", "RunCreate")["id"]
        assert send(client, "POST", f"/v1/runs/{run}/telemetry", "TelemetryChunk")["stored"] == 3
        send(client, "POST", "/v1/fabrics", "FabricProbe")
        send(client, "POST", "/v1/projects", "ProjectCreate")
        send(client, "POST", "/v1/tokens", "TokenCreate")


def test_a_client_generated_from_the_document_does_the_whole_loop(
    openapi: dict[str, Any], served: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document_file = tmp_path / "openapi.json"
    document_file.write_text(json.dumps(openapi))
    config = Config.from_sources(
        ConfigFile(post_hooks=[]),
        MetaType.NONE,
        document_source=document_file,
        file_encoding="utf-8",
        overwrite=False,
        output_path=tmp_path / "generated_tula",
    )
    assert list(generate(config=config)) == [], "errors and warnings of the generator"
    monkeypatch.syspath_prepend(tmp_path)
    models = importlib.import_module("generated_tula.models")
    assert [name for name in models.__all__ if re.search(r"Type\d|\d$", name)] == [], "names made up by the generator"
    url, token = served
    package = importlib.import_module("generated_tula")
    with package.AuthenticatedClient(base_url=url, token=token) as client:

        def call(operation: str, *ids: str, **options: Any) -> Any:
            return importlib.import_module(f"generated_tula.api.{operation}").sync(*ids, client=client, **options)

        whole_loop(models, call)


def whole_loop(models: Any, call: Callable[..., Any]) -> None:
    """Register, profile, recommend, predict and be refused, with the models and calls of a generated package."""
    spec = models.JobSpec.from_dict(EXAMPLES["JobSpec"] | {"name": "generated"})
    created = call("jobs.create_job", body=spec)
    assert created.recommendation.basis == models.Basis.PRIOR
    job_id, steps = created.job.id, list(range(10))
    while (run := call("runs.claim_run", job_id, body=models.ClaimRequest(holder="test")).run) is not None:
        time_s = 0.02 + 0.001 * run.configuration.local_batch_size + 0.03 * (1 - 1 / run.configuration.num_nodes)
        times = [time_s * (1 + 0.01 * (step % 3)) for step in steps]
        batch = models.SampleBatch(rank=0, boot_id="a", sequence=steps, step=steps, step_time_s=times)
        assert call("samples.send_samples", run.id, body=batch).stored == 10
        ended = models.RunPatch(state=models.RunState.SUCCEEDED, holder="test")
        assert call("runs.update_run", run.id, body=ended).state == models.RunState.SUCCEEDED
    found = call("recommendation.get_recommendation", job_id, objective=models.Objective.COST)
    assert found.basis == models.Basis.PROFILED
    chosen = found.chosen.configuration
    predicted = call("recommendation.get_predictions", job_id, num_nodes=[chosen.num_nodes])
    assert chosen in [candidate.configuration for candidate in predicted.candidates]
    assert call("jobs.get_job", "job-none").type_ == ProblemType.NOT_FOUND
    refused = call(
        "runs.create_run", job_id, body=models.RunCreate(kind=models.RunKind.TRAIN, configuration=chosen, holder="")
    )
    assert (refused.type_, refused.field) == (ProblemType.INVALID, "holder")


def test_the_page_of_the_reference_loads_only_files_of_the_service(service: Service) -> None:
    with service.client(service.token("user")) as client:
        html = client.get("/docs").text
        named = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert "/static/docs.js" in named
        assert "/static/icon.svg" in named, "else a browser asks for /favicon.ico"
        assert "<script>" not in html, "the content security policy refuses scripts inside the page"
        for name in named:
            assert name.startswith("/")
            assert client.get(name).status_code == 200, name


def send(client: httpx.Client, method: str, path: str, model: str) -> Any:
    """Send the example of a model; return the response."""
    answer = client.request(method, path, json=EXAMPLES[model])
    assert answer.is_success, answer.text
    return answer.json()
