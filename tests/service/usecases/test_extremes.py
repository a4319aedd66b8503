"""Whatever the contract lets through gets an answer or one sentence, never an internal error."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import tula_wire as wire
from tests.service.usecases.cluster import Cluster
from tula_service.errors import InvalidInput, NotFound
from tula_service.store import Store
from tula_service.usecases import jobs, runs
from tula_service.usecases.access import ANONYMOUS

count = st.one_of(st.integers(1, 64), st.sampled_from([1, 2**20, 2**31 - 1]))
positive = st.one_of(st.floats(1e-3, 1e6), st.sampled_from([5e-324, 1e-30, 3e8, 1e12, 1e24, 1.7e308]))
maybe = st.none() | positive
name = st.sampled_from(["job", "é", "\U0001f600", "a" * 200, "'; DROP TABLE jobs", "%_\\"])
clusters = st.fixed_dictionaries(
    {"max_nodes": count},
    optional={
        "ranks_per_node": count,
        "accelerator": st.sampled_from(["V100-16GB", "abacus"]),
        "network_gbps": positive,
        "memory_bytes_per_rank": st.sampled_from([0, 2**26, 2**34, 2**60]),
        "price": st.fixed_dictionaries({"usd_per_node_hour": st.one_of(st.just(0.0), positive)}),
    },
)
specs = st.fixed_dictionaries(
    {
        "name": name,
        "model": st.fixed_dictionaries(
            {"name": name},
            optional={
                "parameters": st.sampled_from([1, 10**9, 2**50]),
                "flops_per_sample": positive,
                "activation_bytes_per_sample": st.sampled_from([0, 1, 2**60]),
            },
        ),
        "dataset": st.fixed_dictionaries({"size": count}),
        "cluster": clusters,
    },
    optional={
        "epochs": st.sampled_from([1e-9, 0.5, 1e6]),
        "batch": st.fixed_dictionaries({}, optional={"min_local_batch_size": count, "global_batch_size": count}),
        "objective": st.sampled_from(["balanced", "time", "cost", "knee", "time_to_quality", "energy"]),
        "limits": st.fixed_dictionaries({}, optional={"deadline_s": positive, "max_global_batch_size": count}),
    },
)
HUGE = {
    "name": "huge",
    "model": {"name": "net", "flops_per_sample": 1e24},
    "dataset": {"size": 2**31 - 1},
    "epochs": 1e6,
    "cluster": {"max_nodes": 2, "price": {"usd_per_node_hour": 1e6}},
}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=specs)
@example(body=HUGE)
def test_any_specification_is_answered_or_refused_in_a_sentence(cluster: Cluster, body: dict[str, Any]) -> None:
    try:
        wanted = wire.JobSpec.model_validate(body)
    except ValidationError:
        return
    refusal: InvalidInput | None = None
    try:
        created = cluster.register(wanted)
    except InvalidInput as error:
        refusal = error
    if refusal is not None:
        assert refusal.field
        assert refusal.message.rstrip().endswith(".")
        return
    for candidate in created.recommendation.candidates:
        assert math.isfinite(candidate.step_time_s.high)
    again = wire.read(wire.JobCreated, created.model_dump_json())
    assert again == created


@pytest.mark.parametrize("text", ["%", "_", "'", "\\", "é", "a" * 200])
def test_any_text_may_be_searched_for(store: Store, text: str) -> None:
    assert jobs.list_jobs(store, ANONYMOUS, search=text).jobs == []


@pytest.mark.parametrize("text", ["\x00", "\ud800", "\x7f"])
def test_text_that_no_name_can_hold_is_refused_by_name(store: Store, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        jobs.list_jobs(store, ANONYMOUS, search=text)
    assert caught.value.field == "search"


@pytest.mark.parametrize("identity", ["", "job-\x00", "é" * 300, "../../etc/passwd", "1 OR 1=1"])
def test_an_id_that_is_none_is_simply_not_found(store: Store, identity: str) -> None:
    with pytest.raises(NotFound):
        jobs.get(store, ANONYMOUS, identity)
    with pytest.raises(NotFound):
        runs.get(store, ANONYMOUS, identity)
