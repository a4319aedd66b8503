"""`/openapi.json` as a product: every property described, names for generated clients, examples that are accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.forked import Server
from benchmarks.support.server import make_token, migrate
from tests.service.api.conftest import Service
from tula_service.api.docs import EXAMPLES, TAGS, document
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_wire import ProblemType


@pytest.fixture
def openapi(sqlite_url: str) -> dict[str, Any]:
    """The document of the application."""
    app = create_app(Settings(database=sqlite_url))
    app.state.services.store.close()
    return document(app)


def operations(openapi: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every operation, with its method and path."""
    for path, found in openapi["paths"].items():
        for method, operation in found.items():
            yield f"{method.upper()} {path}", operation


def test_every_property_and_parameter_has_a_description(openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    properties = {
        f"{model}.{name}": schema
        for model, found in schemas.items()
        for name, schema in found.get("properties", {}).items()
    }
    assert len(properties) > 300
    assert [name for name, schema in properties.items() if not schema.get("description")] == []
    parameters = {
        f"{at}: {each['name']}": each
        for at, operation in operations(openapi)
        for each in operation.get("parameters", ())
    }
    assert [name for name, parameter in parameters.items() if not parameter.get("description")] == []


UNITS = {
    "_s": "second",
    "_bytes": "byte",
    "_usd": "US dollar",
    "_gbps": "gigabits per second",
    "usd_per": "US dollars per",
}


def test_a_description_names_the_unit_that_the_name_ends_in(openapi: dict[str, Any]) -> None:
    """A list of objects or a nested estimate too: its description says what its numbers count."""
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
    described = {
        kind
        for operation in found.values()
        for answer in operation["responses"].values()
        for kind in types
        if f"`{kind}`" in answer["description"]
    }
    assert described == types


def test_every_body_has_an_example_that_the_service_accepts(openapi: dict[str, Any], tmp_path: Path) -> None:
    read = {
        media["schema"]["$ref"].rpartition("/")[2]
        for _, operation in operations(openapi)
        for media in operation.get("requestBody", {}).get("content", {}).values()
    }
    assert read == set(EXAMPLES)
    database = f"sqlite:///{tmp_path / 'tula.db'}"
    migrate(database)
    head = {"Authorization": f"Bearer {make_token(database, 'admin')}"}
    with Server(database) as server, httpx.Client(base_url=server.url, headers=head) as client:
        job = send(client, "POST", "/v1/jobs", "JobSpec")["job"]["id"]
        send(client, "PATCH", f"/v1/jobs/{job}", "JobPatch")
        send(client, "PATCH", f"/v1/jobs/{job}/scaling", "ScalingPatch")
        run = send(client, "POST", f"/v1/jobs/{job}/runs:claim", "ClaimRequest")["run"]["id"]
        assert send(client, "POST", f"/v1/runs/{run}/samples", "SampleBatch")["stored"] == 3
        assert send(client, "PATCH", f"/v1/runs/{run}", "RunPatch")["state"] == "succeeded"
        run = send(client, "POST", f"/v1/jobs/{job}/runs", "RunCreate")["id"]
        assert send(client, "POST", f"/v1/runs/{run}/telemetry", "TelemetryChunk")["stored"] == 3
        send(client, "POST", "/v1/projects", "ProjectCreate")
        send(client, "POST", "/v1/tokens", "TokenCreate")


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_a_page_of_the_reference_loads_only_files_of_the_service(service: Service, page: str) -> None:
    with service.client(service.token("user")) as client:
        html = client.get(page).text
        named = re.findall(r'(?:src|href|spec-url)="([^"]+)"', html)
        assert "/openapi.json" in named or "/static/docs.js" in named
        assert "/static/icon.svg" in named, "else a browser asks for /favicon.ico"
        assert "<script>" not in html, "the content security policy refuses scripts inside the page"
        for name in named:
            assert name.startswith("/")
            answer = client.get(name)
            assert answer.status_code == 200, name
            assert "cdn.redoc" not in answer.text


def send(client: httpx.Client, method: str, path: str, model: str) -> Any:
    """The answer to the example of a model."""
    answer = client.request(method, path, json=EXAMPLES[model])
    assert answer.is_success, answer.text
    return answer.json()
