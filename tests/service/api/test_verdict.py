"""Tests the service's verdict on a run from the samples, host facts and memory readings of its agents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.api.conftest import Service, Tenant
from tula_wire import Verdict, routes

STEPS = 40


@pytest.fixture
def tenant(service: Service) -> Tenant:
    return service.tenant("bound")


def send(service: Service, tenant: Tenant, **columns: Any) -> Verdict:
    """Store one batch of samples; return the verdict."""
    body = {"rank": 0, "boot_id": "a", "sequence": list(range(STEPS)), "step": list(range(STEPS))}
    body |= {"step_time_s": [0.1] * STEPS, "exposed_comm_time_s": [0.0] * STEPS} | columns
    answer = service.client(tenant.agent).post(routes.RUN_SAMPLES.format(run_id=tenant.run_id), json=body)
    assert answer.status_code == 202, answer.text
    return verdict(service, tenant)


def verdict(service: Service, tenant: Tenant) -> Verdict:
    answer = service.client(tenant.user).get(routes.RUN_VERDICT.format(run_id=tenant.run_id))
    assert answer.status_code == 200, answer.text
    return Verdict.model_validate_json(answer.content)


def test_a_run_without_samples_has_no_verdict_yet(service: Service, tenant: Tenant) -> None:
    assert verdict(service, tenant).diagnosis == "unknown"


def test_what_the_agent_knows_of_its_loader_is_in_the_next_step(service: Service, tenant: Tenant) -> None:
    host = {"loader_workers": 2, "cores": 8}
    said = send(service, tenant, input_time_s=[0.04] * STEPS, machine=host)
    assert (said.diagnosis, said.steps) == ("input_bound", STEPS)
    assert "2 more workers (num_workers=4)" in said.next_step


def test_what_a_script_was_seen_to_do_is_a_fact_of_its_run(service: Service, tenant: Tenant) -> None:
    client, run = service.client(tenant.user), routes.RUN.format(run_id=tenant.run_id)
    assert client.get(run).json()["machine"] is None
    seen = {"precision": "bfloat16", "compiled": True, "checkpointing": False, "sharded": True, "loader_workers": 4}
    send(service, tenant, machine=seen)
    machine = client.get(run).json()["machine"]
    assert {name: machine[name] for name in seen} == seen


def test_steps_without_a_measured_split_do_not_hide_those_with_one(service: Service, tenant: Tenant) -> None:
    exposed = [0.04 if step % 10 == 0 else None for step in range(STEPS)]
    assert send(service, tenant, exposed_comm_time_s=exposed).diagnosis == "communication_bound"


def test_the_straggler_is_named(service: Service, tenant: Tenant) -> None:
    said = send(service, tenant, world_size=8, skew_s=[0.03] * STEPS, straggler_rank=[5] * STEPS)
    assert (said.diagnosis, said.straggler_rank) == ("straggler", 5)


def test_a_device_that_was_full_is_memory(service: Service, tenant: Tenant) -> None:
    memory = {"method": "cuda_allocator", "peak_bytes": 70 * 2**30, "capacity_bytes": 80 * 2**30, "alloc_retries": 12}
    assert send(service, tenant, memory=memory).diagnosis == "memory_bound"


def test_small_operations_are_launches(service: Service, tenant: Tenant) -> None:
    assert send(service, tenant, machine={"operations": 4000, "launch_time_s": 2e-5}).diagnosis == "launch_bound"


def test_another_project_s_run_has_no_verdict(service: Service, tenant: Tenant) -> None:
    other = service.tenant("other")
    answer = service.client(other.user).get(routes.RUN_VERDICT.format(run_id=tenant.run_id))
    assert answer.status_code == 404
