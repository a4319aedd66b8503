"""Tests the whole loop over real HTTP: register, claim, measure, recommend, train, and read the events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import tula_wire as wire
from benchmarks.support.forked import Server

SPEC: dict[str, Any] = {
    "name": "loop",
    "model": {"name": "net"},
    "dataset": {"size": 50_000},
    "cluster": {"max_nodes": 4, "price": {"usd_per_node_hour": 2.0}},
    "batch": {"max_local_batch_size": 128},
    "objective": "time",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Start a service in a separate process; yield a client of it."""
    folder: Path = tmp_path_factory.mktemp("served")
    with Server(str(folder / "tula.db")) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def ok(response: httpx.Response, status: int = 200) -> Any:
    """Return the body of a response that must have this status."""
    assert response.status_code == status, response.text
    return response.json() if response.content else None


def problem(response: httpx.Response, status: int, field: str | None) -> wire.Problem:
    """Return the problem document of a refusal, which names the field and says what to do."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == wire.MEDIA_TYPE
    found = wire.read(wire.Problem, response.content)
    assert found.field == field, found
    assert found.detail.rstrip().endswith((".", ")", "…")) or ":" in found.detail
    return found


def path(route: str, **names: str) -> str:
    """Return the path of a route with these names."""
    return route.format(**names)


def step_time(configuration: dict[str, Any]) -> float:
    """Return the true step time of a configuration."""
    nodes = configuration["num_nodes"]
    return 0.01 + 0.0004 * configuration["local_batch_size"] + 0.02 * (1 - 1 / nodes)


def measure(client: httpx.Client, run: dict[str, Any]) -> None:
    """Run a claimed run to its end."""
    ok(client.patch(path(wire.routes.RUN, run_id=run["id"]), json={"state": "running", "holder": "tests"}))
    steps = list(range(10))
    noise = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    body = {
        "rank": 0,
        "boot_id": "boot",
        "sequence": steps,
        "step": steps,
        "step_time_s": [step_time(run["configuration"]) * factor for factor in noise],
    }
    accepted = ok(client.post(path(wire.routes.RUN_SAMPLES, run_id=run["id"]), json=body), 202)
    assert accepted["stored"] == 10
    again = ok(client.post(path(wire.routes.RUN_SAMPLES, run_id=run["id"]), json=body), 202)
    assert (again["stored"], again["duplicates"]) == (0, 10)
    ended = {"state": "succeeded", "holder": "tests"}
    assert ok(client.patch(path(wire.routes.RUN, run_id=run["id"]), json=ended))["state"] == "succeeded"


def profile(client: httpx.Client, job_id: str) -> int:
    """Run the whole plan; return the number of runs."""
    done = 0
    while True:
        claimed = ok(client.post(path(wire.routes.JOB_CLAIM, job_id=job_id), json={"holder": "tests"}))
        if claimed["run"] is None:
            return done
        measure(client, claimed["run"])
        done += 1


def test_the_loop_ends_in_a_recommendation_that_rests_on_measurements(client: httpx.Client) -> None:
    created = ok(client.post(wire.routes.JOBS, json=SPEC, headers={"Idempotency-Key": "loop"}), 201)
    job_id = created["job"]["id"]
    assert created["recommendation"]["basis"] == "prior"
    runs = profile(client, job_id)
    assert runs >= len(created["runs"])

    answer = wire.read(wire.Recommendation, client.get(path(wire.routes.JOB_RECOMMENDATION, job_id=job_id)).content)
    assert answer.basis == "profiled"
    assert answer.model.num_runs == runs
    assert answer.chosen is not None
    truth = step_time(answer.chosen.configuration.as_json())
    assert answer.chosen.step_time_s.value == pytest.approx(truth, rel=0.1)

    job = ok(client.get(path(wire.routes.JOB, job_id=job_id)))
    assert job["state"] == "ready"
    assert job["recommended"] == answer.chosen.configuration.as_json()
    assert [run["state"] for run in job["plan"]] == ["succeeded"] * runs
    listed = ok(client.get(wire.routes.JOBS, params={"search": "LOOP"}))
    assert [row["id"] for row in listed["jobs"]] == [job_id]

    run = ok(
        client.post(
            path(wire.routes.JOB_RUNS, job_id=job_id),
            json={"kind": "train", "configuration": job["recommended"], "holder": "tests"},
        ),
        201,
    )
    measure(client, run)
    ledger = ok(client.get(path(wire.routes.JOB_LEDGER, job_id=job_id)))["entries"]
    assert ledger[0]["run_id"] == run["id"]
    assert ledger[0]["within_interval"] is True
    assert ledger[-1]["basis"] == "prior"
    again = ok(client.post(wire.routes.JOBS, json=SPEC, headers={"Idempotency-Key": "loop"}), 201)
    assert (again["job"]["id"], again["runs"]) == (job_id, [])

    grid = ok(
        client.get(
            path(wire.routes.JOB_PREDICTIONS, job_id=job_id),
            params={"num_nodes": [1, 3], "local_batch_size": [48, 96], "usd_per_node_hour": 4.0},
        )
    )
    assert len(grid["candidates"]) == 4

    changed = ok(client.patch(path(wire.routes.JOB, job_id=job_id), json={"objective": "cost"}))
    assert changed["objective"] == "cost"
    assert client.delete(path(wire.routes.JOB, job_id=job_id)).status_code == 204
    problem(client.get(path(wire.routes.JOB, job_id=job_id)), 404, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cluster": {"max_nodes": 0}}, "cluster.0.max_nodes"),
        ({"batch": {"min_local_batch_size": 0}}, "batch.min_local_batch_size"),
        ({"objective": "cheapest"}, "objective"),
        ({"dataset": {"size": 50_000, "colour": "blue"}}, "dataset.colour"),
        ({"limits": {"budget_usd": 3}, "cluster": {"max_nodes": 2}}, "limits.budget_usd"),
        ({"name": None}, "name"),
    ],
)
def test_a_bad_specification_is_refused_with_its_field(
    client: httpx.Client, changes: dict[str, Any], field: str
) -> None:
    problem(client.post(wire.routes.JOBS, json=SPEC | changes), 422, field)


def test_refusals_name_what_to_do(client: httpx.Client) -> None:
    job_id = ok(client.post(wire.routes.JOBS, json=SPEC | {"epochs": 2}), 201)["job"]["id"]
    problem(
        client.post(wire.routes.JOBS, json=SPEC | {"epochs": 3}, headers={"Idempotency-Key": "a" * 201}),
        422,
        "Idempotency-Key",
    )
    claim = path(wire.routes.JOB_CLAIM, job_id=job_id)
    run = ok(client.post(claim, json={"holder": "one"}))["run"]
    other = {"state": "running", "holder": "two"}
    assert (
        "held by 'one'"
        in problem(client.patch(path(wire.routes.RUN, run_id=run["id"]), json=other), 409, "holder").detail
    )
    problem(client.get(wire.routes.JOBS, params={"cursor": "newest"}), 422, "cursor")
    problem(client.get(wire.routes.JOBS, params={"limit": 0}), 422, "limit")
    problem(
        client.get(path(wire.routes.JOB_RECOMMENDATION, job_id=job_id), params={"objective": "x"}), 422, "objective"
    )
    problem(client.get(path(wire.routes.JOB_PREDICTIONS, job_id=job_id), params={"num_nodes": 0}), 422, "num_nodes.0")
    for route, known in ((wire.routes.JOB_PREDICTIONS, "num_nodes"), (wire.routes.JOB_RECOMMENDATION, "objective")):
        found = problem(client.get(path(route, job_id=job_id), params={"foo": 1}), 422, "foo")
        assert known in found.detail
    problem(client.get(path(wire.routes.RUN, run_id="run-none")), 404, None)
    problem(client.get(path(wire.routes.JOB_EVENTS, job_id="job-none")), 404, None)
    problem(client.get(path(wire.routes.JOB_EVENTS, job_id=job_id), headers={"Last-Event-ID": "new"}), 422, None)


def test_thresholds_cost_no_body_while_they_stand(client: httpx.Client) -> None:
    job_id = ok(client.post(wire.routes.JOBS, json=SPEC | {"epochs": 4}), 201)["job"]["id"]
    where = path(wire.routes.JOB_SCALING, job_id=job_id)
    first = client.get(where)
    etag = first.headers["etag"]
    assert wire.read(wire.ScalingThresholds, first.content).version == 1
    unchanged = client.get(where, headers={"If-None-Match": etag})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert client.get(where, headers={"If-None-Match": f'"other", W/{etag}'}).status_code == 304
    assert client.get(where, headers={"If-None-Match": etag}, params={"policy": "ags"}).status_code == 200
    problem(client.get(where, params={"policy": "more"}), 422, "policy")
    ok(client.patch(where, json={"s_max": 2.0}, params={"policy": "gain"}))
    changed = client.get(where, headers={"If-None-Match": etag})
    assert (changed.status_code, changed.headers["etag"] == etag) == (200, False)


def events(client: httpx.Client, job_id: str, count: int, **options: Any) -> list[wire.Event]:
    """Return the first events of a stream."""
    found = []
    with client.stream("GET", path(wire.routes.JOB_EVENTS, job_id=job_id), **options) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(wire.read(wire.Event, line[len("data: ") :]))
                if len(found) == count:
                    break
    return found


def test_a_reader_that_reconnects_goes_on_after_the_last_event_it_saw(client: httpx.Client) -> None:
    job_id = ok(client.post(wire.routes.JOBS, json=SPEC | {"epochs": 5}), 201)["job"]["id"]
    everything = events(client, job_id, 5, params={"after": 0})
    assert [event.id for event in everything] == sorted(event.id for event in everything)
    assert {event.kind for event in everything} >= {"job", "run"}
    resumed = events(client, job_id, 2, headers={"Last-Event-ID": str(everything[2].id)})
    assert resumed == everything[3:5]


def test_open_streams_leave_room_for_other_requests_and_end_when_the_service_stops(tmp_path: Path) -> None:
    with Server(str(tmp_path / "tula.db"), max_in_flight=32) as server, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
        job_id = ok(client.post(wire.routes.JOBS, json=SPEC), 201)["job"]["id"]
        target = path(wire.routes.JOB_EVENTS, job_id=job_id)
        streams = [stack.enter_context(client.stream("GET", target, params={"after": 0})) for _ in range(3)]
        reading = [stream.iter_lines() for stream in streams]  # closing an iterator would close its stream
        assert [next(lines) for lines in reading] == ["retry: 2000"] * 3
        one_more = client.get(target)
        assert one_more.status_code == 429
        assert int(one_more.headers["retry-after"]) > 0
        ok(client.get(path(wire.routes.JOB, job_id=job_id)))
        server.process.terminate()
        for lines in reading:
            for _ in lines:
                pass
        assert server.process.wait(10) in (0, -15)
