"""The OpenAPI document is true: generated requests, valid and invalid, never find an answer it does not tell of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from benchmarks.support.forked import Server
from benchmarks.support.server import make_token, migrate

TOKEN: list[str] = []


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    """The document of a real service, with an administrator's token."""
    database = f"sqlite:///{tmp_path_factory.mktemp('schema') / 'tula.db'}"
    migrate(database)
    TOKEN[:] = [make_token(database, "admin")]
    with Server(database, requests_per_minute=10**9) as server:
        headers = {"Authorization": f"Bearer {TOKEN[0]}"}
        found = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=headers)
        # A stream of events has no end, so no generated request may wait for one.
        yield found.exclude(path_regex=r"/events$")


FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
BETWEEN_FIELDS = {
    "POST /v1/jobs": "min_nodes up to max_nodes, some candidate within the data set, limits that need a price",
    "POST /v1/runs/{run_id}/samples": "columns of equal length",
    "POST /v1/runs/{run_id}/telemetry": "columns of equal length",
    "POST /v1/tokens": "scope, project and job that go together",
    "GET /v1/jobs": "printable text as Unicode has it",
}
"""Operations with rules that no schema says, and which; every other accepts all that its schema allows."""

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_every_operation_keeps_to_the_document(api: schemathesis.BaseSchema, mode: GenerationMode) -> None:
    """All checks; where a rule between fields is more than a schema can say, valid data may still be refused."""
    tried: list[str] = []
    for found in api.get_all_operations():
        operation = found.ok()
        tried.append(operation.label)

        @settings(FEW)
        @given(case=operation.as_strategy(generation_mode=mode))
        def keeps_to_it(case: schemathesis.Case) -> None:
            headers = {"Authorization": f"Bearer {TOKEN[0]}"}
            excused = [positive_data_acceptance] if case.operation.label in BETWEEN_FIELDS else []
            case.call_and_validate(headers=headers, timeout=30, excluded_checks=excused)

        # An operation without parameters has nothing that could be wrong.
        with contextlib.suppress(Unsatisfiable):
            keeps_to_it()
    assert len(tried) >= 18
    assert set(tried) >= BETWEEN_FIELDS.keys()
