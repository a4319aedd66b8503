"""Tests impossible memory readings and every way of charging, over real HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tula_wire as wire
from benchmarks.support.forked import Server
from tests.service.api.test_loop import ok, path, step_time

GB = 10**9
CAPACITY = 16 * GB
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Start a service in a separate process; yield a client of it."""
    folder: Path = tmp_path_factory.mktemp("served")
    with Server(str(folder / "tula.db")) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def register(client: httpx.Client, *clusters: dict[str, Any], **changes: Any) -> str:
    """Register a new job, by default with two nodes per cluster; return its id.

    Each job has a different name, since a specification that is sent twice is one job.
    """
    body = {
        "name": f"job {next(NUMBERS)}",
        "model": {"name": "net"},
        "dataset": {"size": 50_000},
        "cluster": [{"max_nodes": 2, **cluster} for cluster in clusters or ({},)],
        "batch": {"max_local_batch_size": 64},
    }
    return str(ok(client.post(wire.routes.JOBS, json=body | changes), 201)["job"]["id"])


def measured(client: httpx.Client, job_id: str, batch: int, memory: dict[str, Any] | None, **more: Any) -> Any:
    """Create a run with this configuration, send samples and let it succeed; return the response to the samples."""
    configuration = {"num_nodes": 1, "ranks_per_node": 1, "local_batch_size": batch, **more}
    body = {"kind": "profile", "configuration": configuration, "holder": "tests"}
    run = ok(client.post(path(wire.routes.JOB_RUNS, job_id=job_id), json=body), 201)
    where = path(wire.routes.RUN, run_id=run["id"])
    ok(client.patch(where, json={"state": "running", "holder": "tests"}))
    steps = list(range(6))
    sent = {"rank": 0, "boot_id": "b", "sequence": steps, "step": steps, "memory": memory}
    sent["step_time_s"] = [step_time(configuration) * (1 + 0.01 * (step % 3)) for step in steps]
    answer = client.post(path(wire.routes.RUN_SAMPLES, run_id=run["id"]), json=sent)
    ok(client.patch(where, json={"state": "succeeded", "holder": "tests"}))
    return answer


def reading(peak: float, **more: Any) -> dict[str, Any]:
    """Return a memory reading of a rank on a device of 16 GB."""
    return {"method": "cuda_allocator", "peak_bytes": int(peak), "capacity_bytes": CAPACITY, "context_bytes": 0, **more}


def recommended(client: httpx.Client, job_id: str, **query: str) -> wire.Recommendation:
    """Return the current recommendation."""
    found = client.get(path(wire.routes.JOB_RECOMMENDATION, job_id=job_id), params=query)
    ok(found)
    return wire.read(wire.Recommendation, found.content)


def test_a_reading_above_capacity_is_left_out_and_said(client: httpx.Client) -> None:
    job_id = register(client)
    ok(measured(client, job_id, 32, reading(3 * GB)), 202)
    ok(measured(client, job_id, 64, reading(40 * GB)), 202)
    answer = recommended(client, job_id)
    assert any("above the capacity" in warning for warning in answer.model.warnings)
    assert any("at only one batch" in warning for warning in answer.model.warnings)
    (at_64,) = [
        c for c in answer.candidates if c.configuration.local_batch_size == 64 and c.configuration.num_nodes == 1
    ]
    assert at_64.memory_bytes is not None
    assert 3 * GB < at_64.memory_bytes.value < 7 * GB
    assert at_64.memory_bytes.high / at_64.memory_bytes.low > 1.15


def test_an_out_of_memory_where_readings_say_there_is_room_caps_the_batch_and_is_said(client: httpx.Client) -> None:
    job_id = register(client)
    ok(measured(client, job_id, 32, reading(3 * GB)), 202)
    ok(measured(client, job_id, 64, reading(5 * GB)), 202)
    before = recommended(client, job_id).max_local_batch_size["default"]
    configuration = {"num_nodes": 2, "ranks_per_node": 1, "local_batch_size": 64}
    body = {"kind": "profile", "configuration": configuration, "holder": "tests"}
    run = ok(client.post(path(wire.routes.JOB_RUNS, job_id=job_id), json=body), 201)
    failed = {"state": "out_of_memory", "holder": "tests", "failed_local_batch_size": 64}
    ok(client.patch(path(wire.routes.RUN, run_id=run["id"]), json=failed))
    answer = recommended(client, job_id)
    assert before > 64
    assert answer.max_local_batch_size["default"] == 63
    assert any("64 ran out of memory" in w and "also has a measured peak" in w for w in answer.model.warnings)
    assert answer.chosen is not None
    assert answer.chosen.configuration.local_batch_size == 32


def test_the_context_beside_the_allocators_peak_takes_its_part_of_the_device(client: httpx.Client) -> None:
    bounds = []
    for context in (0, 2 * GB):
        job_id = register(client)
        for batch in (32, 64):
            ok(measured(client, job_id, batch, reading(1 * GB + batch * 0.06 * GB, context_bytes=context)), 202)
        bounds.append(recommended(client, job_id).max_local_batch_size["default"])
    assert 0.06 * (bounds[0] - bounds[1]) == pytest.approx(2.0, rel=0.5), bounds


def test_spot_at_no_interruptions_is_on_demand_and_each_more_costs_more_time_and_money(client: httpx.Client) -> None:
    found = []
    for rate in (0.0, 0.5, 5.0):
        spot = {"usd_per_node_hour": 2.0, "interruptions_per_node_hour": rate}
        job_id = register(client, {"price": {"usd_per_node_hour": 2.0, "spot": spot}}, objective="cost")
        for candidate in recommended(client, job_id).candidates:
            assert candidate.cost_usd is not None
        ok(measured(client, job_id, 32, None), 202)
        ok(measured(client, job_id, 64, None), 202)
        by_kind = {(c.configuration, c.spot): c for c in recommended(client, job_id).candidates}
        for (configuration, is_spot), one in by_kind.items():
            twin = by_kind[configuration, not is_spot]
            if rate == 0.0:
                assert (one.total_time_s, one.cost_usd) == (twin.total_time_s, twin.cost_usd)
            elif is_spot:
                assert one.total_time_s.value > twin.total_time_s.value
                assert one.cost_usd.value > twin.cost_usd.value  # type: ignore[union-attr]
        found.append({key: c for key, c in by_kind.items() if c.spot})
    for calm, rough in itertools.pairwise(found):
        assert all(rough[key].cost_usd.value > calm[key].cost_usd.value for key in calm)  # type: ignore[union-attr]


def test_spot_whose_interruptions_let_no_training_finish_leaves_the_candidates_on_demand(client: httpx.Client) -> None:
    """The training time would be infinite, which JSON cannot express; such a job was once refused yet stored."""
    spot = {"usd_per_node_hour": 1.0, "interruptions_per_node_hour": 60.0, "checkpoint_interval_s": 7200.0}
    job_id = register(client, {"price": {"usd_per_node_hour": 2.0, "spot": spot}}, objective="cost")
    found = recommended(client, job_id)
    assert found.chosen is not None
    assert not any(candidate.spot for candidate in (found.chosen, *found.candidates))
    assert "interruptions" in found.why
    predicted = client.get(wire.routes.JOB_PREDICTIONS.format(job_id=job_id), params={"num_nodes": 2})
    assert ok(predicted)["candidates"]
    only = register(client, {"price": {"spot": spot}}, name="only")
    assert recommended(client, only).candidates == []
    assert ok(client.get(wire.routes.JOB_LEDGER.format(job_id=only))) is not None


def test_several_types_each_at_its_own_way_of_charging_compete_in_one_job(client: httpx.Client) -> None:
    small = {"instance_type": "small", "price": {"usd_per_node_hour": 1.0}}
    large = {"instance_type": "large", "max_nodes": 1, "price": {"usd_per_gb_hour": 0.5}}
    job_id = register(client, small, large, objective="cost")
    early = recommended(client, job_id)
    assert {c.configuration.instance_type for c in early.candidates} == {"small", "large"}
    assert all(c.cost_usd is None for c in early.candidates)
    for kind in ("small", "large"):
        for batch in (32, 64):
            ok(measured(client, job_id, batch, reading(1 * GB + batch * 0.06 * GB), instance_type=kind), 202)
    answer = recommended(client, job_id)
    for c in answer.candidates:
        assert c.cost_usd is not None
        assert c.memory_bytes is not None
        an_hour = 1.0 * c.configuration.num_nodes
        if c.configuration.instance_type == "large":
            an_hour = 0.5 * c.configuration.world_size * c.memory_bytes.value / GB
        assert c.cost_usd.value == pytest.approx(c.total_time_s.value / 3600 * an_hour, rel=1e-6)
    assert answer.chosen is not None
    assert answer.chosen.cost_usd == min((c.cost_usd for c in answer.candidates if c.cost_usd), key=lambda e: e.value)
