"""Tests that responses to generated requests, valid and invalid, match the OpenAPI document.

A refused request must have changed nothing. `TULA_SCHEMA_EXAMPLES` sets the number of requests for each operation and
mode, on both engines, so that one can send far more than a test run has time for. `pytest -s` prints the number of
requests.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection, positive_data_acceptance

from benchmarks.support.forked import Server
from benchmarks.support.server import make_token, migrate
from tests.service.api.conftest import SPEC
from tula_service.store import Store
from tula_wire import routes

MANY = "TULA_SCHEMA_EXAMPLES" in os.environ
STORED = (
    "projects", "jobs", "runs", "run_outputs", "sample_sources", "step_samples", "memory_readings", "telemetry_chunks",
    "telemetry_columns", "scaling_numbers", "fabrics", "audit_log",
)  # fmt: skip
"""Tables that only a request changes; the others hold what is computed later, or when a token was used."""


@dataclass(frozen=True)
class Api:
    """The document of a real service, with its database, job, run and token; `sent` counts requests."""

    schema: schemathesis.BaseSchema
    store: Store
    headers: dict[str, str]
    ids: dict[str, str]
    sent: Counter[str] = field(default_factory=Counter)

    def call(self, case: schemathesis.Case[Any]) -> None:
        """Send a request; check the response against the document and, after a refusal, the database."""
        excused = [positive_data_acceptance] if case.operation.label in BETWEEN_FIELDS else []
        if MANY:
            excused.append(ignored_auth)  # sends a wrong token each time, of which an address has 600 a minute
        self._name_what_exists(case)
        before = self.stored()
        answer = case.call(headers=self.headers, timeout=30)
        asked = parse_qs(urlsplit(str(answer.request.url)).query, keep_blank_values=True)
        if answer.status_code == 413 or not (case.query or {}).keys() <= asked.keys():
            excused.append(negative_data_rejection)  # does not know this status, or that an empty list is not sent
        case.validate_response(answer, headers=self.headers, excluded_checks=excused)
        if answer.status_code >= 400:
            assert self.stored() == before, f"{case.method} {case.path} was refused and changed something"

    def stored(self) -> list[list[str]]:
        """Return all rows of the tables that only a request changes."""
        with self.store.reading() as tx:
            found = [tx.connection.exec_driver_sql(f"SELECT * FROM {table}").all() for table in STORED]
        return [sorted(map(str, rows)) for rows in found]

    def _name_what_exists(self, case: schemathesis.Case[Any]) -> None:
        """Put the ids of a real job and run into the path, unless it is invalid on purpose or deletes them."""
        self.sent["requests"] += 1
        path = case.meta.components.get(ParameterLocation.PATH) if case.meta else None
        if case.method == "DELETE" or (path is not None and path.mode.is_negative):
            return
        real = {name: value for name, value in self.ids.items() if name in (case.path_parameters or {})}
        case.path_parameters = (case.path_parameters or {}) | real
        self.sent["with real ids"] += bool(real)


@pytest.fixture(scope="module", params=["sqlite", "postgres"] if MANY else ["sqlite"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Start a service with a job and a training run."""
    database = f"sqlite:///{tmp_path_factory.mktemp('schema') / 'tula.db'}"
    if request.param == "postgres":
        database = request.getfixturevalue("postgres_server").create_database("schema")
    migrate(database)
    headers = {"Authorization": f"Bearer {make_token(database, 'admin')}"}
    with Server(database, requests_per_minute=10**9) as server:
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client:
            job_id = client.post(routes.JOBS, json=SPEC.model_dump(mode="json")).json()["job"]["id"]
            wanted = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}}
            run_id = client.post(routes.JOB_RUNS.format(job_id=job_id), json=wanted).json()["id"]
        found = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=headers)
        store = Store.open(database)
        # A stream of events has no end, so no generated request may wait for one.
        yield Api(found.exclude(path_regex=r"/events$"), store, headers, {"job_id": job_id, "run_id": run_id})
        store.close()


FEW = settings(
    max_examples=int(os.environ.get("TULA_SCHEMA_EXAMPLES", "3")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
BETWEEN_FIELDS = {
    "POST /v1/jobs": "min_nodes up to max_nodes, some candidate within the data set, limits that need a price",
    "POST /v1/runs/{run_id}/samples": "columns of equal length",
    "POST /v1/runs/{run_id}/telemetry": "columns of equal length",
    "POST /v1/fabrics": "two ranks or more, seconds that a link can reach, `in_node` where nodes have several ranks",
    "POST /v1/tokens": "scope, project and job that go together",
    "PATCH /v1/jobs/{job_id}": "the same, together with what is not changed",
    "POST /v1/jobs/{job_id}/runs": "an instance type of the job's cluster",
    "GET /v1/jobs/{job_id}/predictions": "instance types of the job's cluster",
    "PATCH /v1/jobs/{job_id}/scaling": "s_min up to s_max",
    "GET /v1/jobs": "printable text as Unicode has it",
}
"""Operations with rules that no schema says, and which; every other accepts all that its schema allows."""

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.mark.timeout(0 if MANY else 300)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_every_operation_keeps_to_the_document(api: Api, mode: GenerationMode) -> None:
    """All checks apply, but rules that no schema can express, such as those across fields, may refuse matching data."""
    tried: list[str] = []
    for found in api.schema.get_all_operations():
        operation = found.ok()
        tried.append(operation.label)

        @settings(FEW)
        @given(case=operation.as_strategy(generation_mode=mode))
        def keeps_to_it(case: schemathesis.Case[Any]) -> None:
            api.call(case)

        # An operation without parameters has nothing that could be wrong.
        with contextlib.suppress(Unsatisfiable):
            keeps_to_it()
    sys.stdout.write(f"{mode.value}, and before it: {dict(api.sent)}\n")
    assert len(tried) >= 18
    assert set(tried) >= BETWEEN_FIELDS.keys()
