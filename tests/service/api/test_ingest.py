"""Tests that agents' data are stored completely and once, or refused with a message that names the field and remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.service.api.conftest import Service, Tenant
from tula_wire import MEDIA_TYPE, routes


def chunk(steps: int = 5, **changes: Any) -> dict[str, Any]:
    """Return a telemetry chunk as a dictionary."""
    members: dict[str, Any] = {
        "rank": 0,
        "boot_id": "boot",
        "sequence": 0,
        "steps": list(range(steps)),
        "columns": {"loss": [1.0 / (step + 1) for step in range(steps)], "lr": [None] + [0.1] * (steps - 1)},
    }
    return members | changes


def batch(rows: int = 4, **changes: Any) -> dict[str, Any]:
    """Return a batch of samples as a dictionary."""
    members: dict[str, Any] = {
        "rank": 0,
        "boot_id": "boot",
        "sequence": list(range(rows)),
        "step": list(range(rows)),
        "step_time_s": [0.1] * rows,
    }
    return members | changes


@pytest.fixture
def post(service: Service, red: Tenant) -> Callable[..., httpx.Response]:
    """Return a function that posts a body to the tenant's run as its agent."""

    def send(route: str, body: bytes | dict[str, Any]) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with service.client(red.agent) as client:
            return client.post(route.format(run_id=red.run_id), content=content)

    return send


def read(service: Service, red: Tenant, column: str = "loss", **asked: Any) -> dict[str, Any]:
    """Return a column of the tenant's run."""
    with service.client(red.user) as client:
        answer = client.get(routes.RUN_TELEMETRY.format(run_id=red.run_id), params={"column": column, **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(response: httpx.Response, status: int, field: str | None = None) -> str:
    """Return the sentence of a refusal that names this field."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    found = response.json()
    assert found["field"] == field, found
    return str(found["detail"])


class TestResends:
    """Tests that a repeated request stores no row twice."""

    def test_a_chunk_sent_again_is_a_duplicate(self, post: Callable[..., httpx.Response]) -> None:
        assert post(routes.RUN_TELEMETRY, chunk()).json() == {"stored": 10, "duplicate": False, "refused": []}
        assert post(routes.RUN_TELEMETRY, chunk()).json() == {"stored": 0, "duplicate": True, "refused": []}

    def test_samples_sent_again_are_counted_as_duplicates(self, post: Callable[..., httpx.Response]) -> None:
        assert post(routes.RUN_SAMPLES, batch(4)).json()["stored"] == 4
        again = post(routes.RUN_SAMPLES, batch(6)).json()
        assert (again["stored"], again["duplicates"]) == (2, 4)


class TestRefusals:
    """Tests that a refusal is one sentence, names the field, and stores nothing."""

    def test_a_rank_that_the_run_does_not_have_is_refused_and_nothing_is_stored(
        self, post: Callable[..., httpx.Response], service: Service, red: Tenant
    ) -> None:
        assert "0 to 0" in refused(post(routes.RUN_SAMPLES, batch(rank=99)), 422, "rank")
        assert "0 to 3" in refused(post(routes.RUN_SAMPLES, batch(rank=4, world_size=4)), 422, "rank")
        with service.store.reading() as tx:
            assert tx.runs.get(red.run_id).num_samples == 0
        assert post(routes.RUN_SAMPLES, batch(rank=3, world_size=4)).status_code == 202, "as the process saw it"

    def test_columns_of_unequal_length_are_refused(self, post: Callable[..., httpx.Response]) -> None:
        assert "columns.loss has 1 entries but steps has 3: send columns of equal length" in refused(
            post(routes.RUN_TELEMETRY, chunk(3, columns={"loss": [1.0]})), 422, "body"
        )

    def test_an_unknown_or_deleted_run_is_404(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        assert post(routes.RUN_TELEMETRY, chunk()).status_code == 202
        with service.store.transaction() as tx:
            tx.jobs.delete(red.job_id)
        with service.client(service.token("admin")) as client:
            path = routes.RUN_TELEMETRY.format(run_id=red.run_id)
            refused(client.post(path, json=chunk(sequence=1)), 404)
            refused(client.post("/v1/runs/run-nowhere/telemetry", json=chunk()), 404)

    def test_a_column_of_an_impossible_name_costs_itself_alone(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        columns = {"loss": [1.0], "Loss": [2.0], "val/acc": [0.5], "a,b": [0.1], "x" * 65: [0.1]}
        answer = post(routes.RUN_TELEMETRY, chunk(1, columns=columns)).json()
        assert (answer["stored"], answer["refused"]) == (1, ["Loss", "val/acc", "a,b", "x" * 64])
        assert read(service, red)["available"] == ["loss"]
        nothing = post(routes.RUN_TELEMETRY, chunk(1, columns={"Loss": [2.0]})).json()
        assert (nothing["stored"], nothing["refused"]) == (0, ["Loss"])

    def test_columns_beyond_a_thousand_cost_themselves_alone(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        for boot in range(10):
            columns = {f"c{boot}_{number}": [1.0] for number in range(100)}
            assert post(routes.RUN_TELEMETRY, chunk(1, boot_id=f"b{boot}", columns=columns)).json()["refused"] == []
        answer = post(routes.RUN_TELEMETRY, chunk(1, columns={"c0_0": [2.0], "late": [1.0]})).json()
        assert (answer["stored"], answer["refused"]) == (1, ["late"])
        assert len(read(service, red, "c0_0")["available"]) == 1_000

    def test_seventy_columns_are_one_chunk(self, post: Callable[..., httpx.Response]) -> None:
        assert post(routes.RUN_TELEMETRY, chunk(1, columns={f"c{n}": [1.0] for n in range(70)})).json()["stored"] == 70


class TestReadingBack:
    """Tests how columns are read back, and that thinning preserves the extremes and the last value of a column."""

    def test_a_thinned_column_keeps_its_extremes(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        values = np.sin(np.arange(9000) / 100)
        values[4321], values[777] = 50.0, -50.0
        post(routes.RUN_TELEMETRY, chunk(9000, columns={"loss": values.tolist()}))
        found = read(service, red, max_points=100)
        assert found["downsampled"]
        assert len(found["values"]) <= 100
        assert (max(found["values"]), min(found["values"])) == (50.0, -50.0)
        assert (found["steps"][0], found["steps"][-1]) == (0, 8999), "the last value is the one that is read off"
        assert found["steps"] == sorted(found["steps"])
        assert found["total_points"] == 9000
        part = read(service, red, first_step=4300, last_step=4330)
        assert part["steps"] == list(range(4300, 4331))

    def test_step_times_are_there_without_telemetry(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        post(routes.RUN_SAMPLES, batch(3, step_time_s=[0.1, 0.2, 0.3]))
        assert read(service, red, "step_time_s")["values"] == [0.1, 0.2, 0.3]
        assert read(service, red, "step_time_s", first_step=1, last_step=1)["values"] == [0.2]
        assert read(service, red, "step_time_s", last_step=0)["values"] == [0.1]

    def test_a_column_that_is_not_there_says_which_are(
        self, service: Service, red: Tenant, post: Callable[..., httpx.Response]
    ) -> None:
        post(routes.RUN_TELEMETRY, chunk())
        with service.client(red.user) as client:
            path = routes.RUN_TELEMETRY.format(run_id=red.run_id)
            assert "loss, lr" in refused(client.get(path, params={"column": "accuracy"}), 404, "column")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=arrays.arrays(
        np.float64, st.integers(1, 40), elements=st.floats(allow_nan=False, allow_infinity=False, width=64)
    )
)
def test_any_finite_number_is_stored_bit_for_bit(service: Service, red: Tenant, values: np.ndarray) -> None:
    """The values include denormal and very large numbers; null is a missing value."""
    columns = {"loss": values.tolist(), "lr": [None] * values.size}
    body = chunk(values.size, boot_id=str(hash(values.tobytes())), columns=columns)
    with service.client(red.agent) as client:
        assert client.post(routes.RUN_TELEMETRY.format(run_id=red.run_id), json=body).status_code == 202
    with service.store.transaction() as tx:
        key = tx.runs.get(red.run_id).key
        stored, missing = (tx.telemetry.read(key, name)[1] for name in ("loss", "lr"))
        tx.connection.exec_driver_sql("DELETE FROM telemetry_chunks")
    np.testing.assert_array_equal(stored, values)
    assert np.isnan(missing).all()
