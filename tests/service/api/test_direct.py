"""The short way of telemetry answers as the application's own routes do, which are declared all the same."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.service.api.conftest import Service, Tenant
from tests.service.api.test_ingest import chunk, packed
from tula_service.api.direct import ShortWay
from tula_wire import routes

JSON, MSGPACK = {"content-type": "application/json"}, {"content-type": "application/msgpack"}
ZIPPED = {"content-encoding": "gzip"}
DIFFERS = ("x-request-id", "date", "retry-after")

ASKED: dict[str, tuple[int, dict[str, Any]]] = {
    "a chunk": (202, {"content": json.dumps(chunk()), "headers": JSON}),
    "the same again": (202, {"content": json.dumps(chunk()), "headers": JSON}),
    "packed": (202, {"content": packed(sequence=1), "headers": MSGPACK}),
    "zipped": (202, {"content": gzip.compress(packed(sequence=2)), "headers": MSGPACK | ZIPPED}),
    "not zipped": (422, {"content": packed(), "headers": MSGPACK | ZIPPED}),
    "another encoding": (415, {"content": packed(), "headers": MSGPACK | {"content-encoding": "br"}}),
    "another kind": (415, {"content": b"a=1", "headers": {"content-type": "text/plain"}}),
    "no JSON": (422, {"content": b"{", "headers": JSON}),
    "no MessagePack": (422, {"content": b"\xc1", "headers": MSGPACK}),
    "a field too much": (422, {"content": json.dumps(chunk(colour="red")), "headers": JSON}),
    "no number": (422, {"content": json.dumps(chunk(columns={"loss": ["x"] * 5})), "headers": JSON}),
    "too large": (413, {"content": b" " * 5000, "headers": JSON}),
    "too large zipped": (413, {"content": gzip.compress(b" " * 200_000), "headers": JSON | ZIPPED}),
    "no token": (401, {"headers": JSON, "token": None}),
    "a wrong token": (401, {"headers": JSON, "token": "tula_wrong"}),
    "no token at all": (401, {"headers": JSON | {"authorization": "Digest x"}, "token": None}),
    "another tenant's run": (404, {"content": json.dumps(chunk()), "headers": JSON, "token": "blue"}),
    "no such run": (404, {"content": json.dumps(chunk()), "headers": JSON, "run_id": "run-0"}),
    "a run that no id names": (404, {"content": json.dumps(chunk()), "headers": JSON, "run_id": "a%00b"}),
    "another method": (405, {"method": "DELETE"}),
    "reading": (200, {"method": "GET", "token": "user", "params": {"column": "loss"}}),
    "a slash behind": (307, {"content": json.dumps(chunk()), "headers": JSON, "behind": "/"}),
}


def answers(service: Service) -> dict[str, tuple[Any, ...]]:
    """Status, headers and body of the answer to everything that is asked, as far as they tell no time and no place."""
    red, blue = service.tenant("red"), service.tenant("blue")
    tokens = {"blue": blue.agent, "user": red.user}
    found = {}
    for what, (_, how) in ASKED.items():
        asked = {"method": "POST", "token": red.agent, "run_id": red.run_id, "behind": "", **how}
        token, run_id = asked.pop("token"), asked.pop("run_id")
        path = routes.RUN_TELEMETRY.format(run_id=run_id) + asked.pop("behind")
        with service.client(tokens.get(token, token)) as client:
            answer = client.request(asked.pop("method"), path, **asked)
        headers = {
            name: value.replace(red.run_id, "RUN") for name, value in answer.headers.items() if name not in DIFFERS
        }
        body = answer.text.replace(red.run_id, "RUN").replace(answer.headers["x-request-id"], "ID")
        found[what] = (answer.status_code, headers, body)
    return found


def test_both_ways_answer_the_same(sqlite_template: Path, tmp_path: Path, start: Callable[..., Service]) -> None:
    ways = []
    for name in ("short", "long"):
        shutil.copy(sqlite_template, tmp_path / name)
        service = start(f"sqlite:///{tmp_path}/{name}", max_body_bytes=4096, max_decompressed_bytes=100_000)
        if name == "long":
            middleware = service.app.user_middleware
            service.app.user_middleware = [each for each in middleware if each.cls is not ShortWay]
            assert len(service.app.user_middleware) == len(middleware) - 1
        ways.append(answers(service))
    short, long = ways
    assert {what: status for what, (status, *_) in short.items()} == {
        what: status for what, (status, _) in ASKED.items()
    }
    assert short == long


def test_a_bug_on_the_short_way_is_told_as_any_other(service: Service, red: Tenant) -> None:
    service.app.state.services.metrics.step_values = None
    path = routes.RUN_TELEMETRY.format(run_id=red.run_id)
    with service.client(red.agent) as client:
        answer = client.post(path, content=json.dumps(chunk()), headers=JSON)
    assert (answer.status_code, answer.json()["title"]) == (500, "Internal error")
