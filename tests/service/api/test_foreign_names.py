"""Tests that the server never opens, lists or connects to an address or path that a client has sent."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.service.api.conftest import SPEC, Service, Tenant
from tests.service.api.test_security import BODIES, all_routes, concrete
from tula_wire import routes

CANARY = "tula-canary"
HOSTILE = (
    f"http://{CANARY}.invalid/latest/meta-data",
    f"/{CANARY}/../../etc/passwd",
    f"..%2f..%2f{CANARY}",
    f"$({CANARY})",
)
REACHES_OUT = re.compile(
    r"open|socket\.|sqlite3\.connect|subprocess\.|os\.(system|exec|posix_spawn|spawn|listdir|scandir|remove|rename|mkdir"
    r"|rmdir|link|symlink|truncate|chmod|chown|utime)|shutil\.|glob\.|tempfile\.|urllib\.|http\.client\.|ftplib\.|import"
    r"|ctypes\.dlopen|pathlib\."
)
"""Audit events (PEP 578) of whatever touches files, the network, other programs or code."""

NAMES_OF_PLACES = re.compile(
    r"(^|_)(ur[il]|path|file|dir|directory|folder|host|hostname|endpoint|callback|webhook|proxy)s?(_|$)"
)
FORMATS_OF_PLACES = {"uri", "uri-reference", "iri", "iri-reference", "path", "file-path", "directory-path", "binary"}


class Watch:
    """Records what the interpreter is about to do with a text that contains the canary, while `on` is True."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and REACHES_OUT.match(event) and (said := repr(arguments)).find(CANARY) >= 0:
            self.seen.append((event, said))


@pytest.fixture(scope="module")
def hook() -> Watch:
    """Return the only watch of the module, since an audit hook cannot be removed."""
    return Watch()


@pytest.fixture
def watch(hook: Watch) -> Iterator[Watch]:
    """Turn the watch on during a test."""
    hook.seen.clear()
    hook.on = True
    yield hook
    hook.on = False


def test_the_watch_sees_what_it_is_there_for(watch: Watch) -> None:
    """If the watch missed these calls, the tests below would prove nothing."""
    for attempt in (
        lambda: open(f"/{CANARY}"),  # noqa: SIM115, PTH123
        lambda: __import__("socket").getaddrinfo(f"{CANARY}.invalid", 80),
        lambda: __import__("subprocess").run([f"/{CANARY}"], check=False),
        lambda: __import__("sqlite3").connect(f"/{CANARY}/x"),
    ):
        before = len(watch.seen)
        with pytest.raises((OSError, __import__("sqlite3").Error)):
            attempt()
        assert len(watch.seen) > before


def test_no_route_takes_an_address_or_a_path(service: Service) -> None:
    """The test checks every parameter and every property of every body in the OpenAPI document."""
    with service.client() as client:
        document = client.get("/openapi.json").json()
    walked = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parameters = {each["name"]: each["schema"] for each in operation.get("parameters", [])}
            body = operation.get("requestBody", {}).get("content", {})
            for media in body.values():
                parameters |= dict(properties(media["schema"], document))
            for name, schema in parameters.items():
                walked += 1
                assert not NAMES_OF_PLACES.search(name.lower()), (method, path, name)
                assert schema.get("format") not in FORMATS_OF_PLACES, (method, path, name)
    assert walked > 100


def properties(
    schema: dict[str, Any], document: dict[str, Any], depth: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every property at any depth of a schema, by name."""
    assert depth < 20
    if "$ref" in schema:
        yield from properties(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document, depth + 1)
    for name, inner in schema.get("properties", {}).items():
        yield name, inner
        yield from properties(inner, document, depth + 1)
    below = [*schema.get("anyOf", []), *schema.get("allOf", []), *schema.get("oneOf", []), schema.get("items")]
    below += [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
    for inner in below:
        if isinstance(inner, dict):
            yield from properties(inner, document, depth + 1)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_name_that_is_an_address_or_a_path_stays_a_name(
    service: Service, red: Tenant, watch: Watch, hostile: str
) -> None:
    """An administrator sends such a name in every id, query, header and text, on every route; nothing touches it."""
    with service.client(service.token("admin")) as client:
        document = client.get("/openapi.json").json()
        documented = {(m.upper(), path): o for path, found in document["paths"].items() for m, o in found.items()}
        for method, path in all_routes(service):
            names = [each["name"] for each in documented.get((method, path), {}).get("parameters", [])]
            asked = dict.fromkeys((name for name in names if "{" + name + "}" not in path), hostile)
            headers = dict.fromkeys(("Referer", "X-Forwarded-Host", "Idempotency-Key", "Last-Event-ID"), hostile)
            body = poisoned(BODIES.get((method, path), SPEC.model_dump(mode="json")), hostile)
            named = "/".join(hostile if part.startswith("{") else part for part in path.split("/"))
            answers = [client.request(method, named, params=asked, json=body)]
            if not path.endswith("/events"):  # which has no end
                own = concrete(path, red)
                answers += [
                    client.request(method, own, params=asked, json=body),
                    client.request(method, own, headers=headers, json=body),
                ]
            for answer in answers:
                assert answer.status_code < 500, (method, path, answer.text)
                assert "root:" not in answer.text
                assert "location" not in answer.headers or CANARY not in answer.headers["location"]
    assert watch.seen == []


def poisoned(body: Any, hostile: str) -> Any:
    """Return the body with every text replaced, except texts that must be one of a few words."""
    if isinstance(body, dict):
        return {name: poisoned(value, hostile) for name, value in body.items() if value is not None}
    if isinstance(body, list):
        return [poisoned(value, hostile) for value in body]
    return hostile if isinstance(body, str) and body not in WORDS else body


WORDS = {"train", "running", "knee", "time", "ring", "sgd", "momentum", "adam", "other", "adaptive", "partial", "full"}


@pytest.mark.parametrize(
    "name",
    ["../app.css", "..%2fpages.py", "%2e%2e/pages.py", "/etc/passwd", "....//app.css", "app.css/../../pages.py", ""],
)
def test_no_path_leads_out_of_the_static_files(service: Service, name: str) -> None:
    """The service looks up names in a table and joins none of them to a folder."""
    with service.client() as client:
        assert client.get(f"/static/{name}").status_code == 404


def test_an_accepted_job_keeps_such_names_as_they_are(service: Service, red: Tenant, watch: Watch) -> None:
    """The job is registered, planned, given a recommendation and drawn in charts; its name remains only a name."""
    spec = SPEC.model_dump(mode="json") | {"name": HOSTILE[0], "model": {"name": HOSTILE[1]}}
    with service.client(red.user) as client:
        made = client.post(routes.JOBS, json=spec)
        assert made.status_code == 201
        job_id = made.json()["job"]["id"]
        assert client.get(routes.JOBS, params={"search": CANARY}).json()["jobs"][0]["name"] == HOSTILE[0]
        for path in (routes.JOB_RECOMMENDATION, routes.JOB_LEDGER, "/jobs/{job_id}"):
            assert client.get(path.format(job_id=job_id)).status_code == 200
        assert client.get(routes.JOB_CHART.format(job_id=job_id, name="tradeoff")).status_code == 200
    assert watch.seen == []
