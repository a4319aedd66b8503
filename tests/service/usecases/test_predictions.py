"""Tests predictions for configurations, prices and limits that differ from the job's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping
from tula_service.analysis.questions import WhatIf
from tula_service.errors import InvalidInput
from tula_service.store import Store
from tula_service.usecases import recommendations
from tula_service.usecases.access import ANONYMOUS


def ask(cluster: Cluster, job_id: str, **question: Any) -> wire.Predictions:
    """Return the answer to a what-if question."""
    return wire.read(wire.Predictions, recommendations.predict(cluster.store, ANONYMOUS, job_id, WhatIf(**question)))


def test_a_what_if_answers_for_what_was_never_a_candidate(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    (found,) = ask(cluster, job_id, num_nodes=[3], local_batch_size=[48]).candidates
    assert found.global_batch_size == 3 * 2 * 48
    truth = overlapping(found.configuration)
    assert found.step_time_s.low < truth < found.step_time_s.high
    (outside,) = ask(cluster, job_id, num_nodes=[32], local_batch_size=[48]).candidates
    assert outside.extrapolated
    width = outside.step_time_s.high / outside.step_time_s.low
    assert width > found.step_time_s.high / found.step_time_s.low


def test_a_what_if_grid_price_and_deadline_replace_the_jobs_own(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    grid = ask(cluster, job_id, num_nodes=[1, 2, 4], global_batch_size=[256, 512])
    assert {(c.configuration.num_nodes, c.global_batch_size) for c in grid.candidates} == {
        (n, b) for n in (1, 2, 4) for b in (256, 512)
    }
    dear = ask(cluster, job_id, num_nodes=[1], local_batch_size=[32], usd_per_node_hour=6.0, deadline_s=1e-3)
    (plain,) = ask(cluster, job_id, num_nodes=[1], local_batch_size=[32]).candidates
    assert plain.cost_usd is not None
    assert dear.candidates[0].cost_usd is not None
    assert dear.candidates[0].cost_usd.value == pytest.approx(2 * plain.cost_usd.value)
    assert "deadline" in (dear.candidates[0].excluded_by or "") or " s" in (dear.candidates[0].excluded_by or "")


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"global_batch_size": [512], "local_batch_size": [32]}, "local_batch_size"),
        ({"num_nodes": [3], "global_batch_size": [7]}, "global_batch_size"),
        ({"instance_type": ["p4d"]}, "instance_type"),
        ({"usd_per_node_hour": float("nan")}, "usd_per_node_hour"),
        ({"usd_per_node_hour": 1e7}, "usd_per_node_hour"),
        ({"deadline_s": 1e12}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"global_batch_size": [256, 200_000]}, "global_batch_size"),
        ({"local_batch_size": [100_001]}, "local_batch_size"),
        ({"num_nodes": [1, 8], "local_batch_size": [32, 10_000]}, "local_batch_size"),
        ({"num_nodes": [2_000_000]}, "num_nodes"),
        ({"num_nodes": list(range(1, 50)), "local_batch_size": list(range(1, 50))}, "num_nodes"),
    ],
)
def test_a_question_without_an_answer_is_refused_by_field(
    profiled: tuple[Cluster, str], question: dict[str, Any], field: str
) -> None:
    cluster, job_id = profiled
    with pytest.raises((InvalidInput, ValidationError)) as caught:
        ask(cluster, job_id, **question)
    error = caught.value
    assert field == (error.field if isinstance(error, InvalidInput) else error.errors()[0]["loc"][0])


def test_more_nodes_than_the_job_has_are_said_to_be_so_where_no_batch_fits(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    with pytest.raises(InvalidInput, match=r"\(198\)\. The job has at most \d+ nodes\."):
        ask(cluster, job_id, num_nodes=[99], global_batch_size=[64])


def test_no_answer_has_less_than_a_step_an_epoch(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    for question in ({"num_nodes": [1000]}, {"local_batch_size": [20_000]}):
        totals = [c.global_batch_size for c in ask(cluster, job_id, **question).candidates]
        assert totals
        assert max(totals) <= 100_000


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(nodes=st.integers(1, 16), batch=st.integers(1, 512))
def test_every_prediction_lies_inside_its_own_interval(profiled: tuple[Cluster, str], nodes: int, batch: int) -> None:
    cluster, job_id = profiled
    (found,) = ask(cluster, job_id, num_nodes=[nodes], local_batch_size=[batch]).candidates
    for value in (found.step_time_s, found.total_time_s, found.cost_usd):
        assert value is not None
        assert 0 < value.low <= value.value <= value.high < float("inf")


def test_a_question_only_reads(profiled: tuple[Cluster, str], sqlite_store: Store) -> None:
    cluster, job_id = profiled
    with sqlite_store.reading() as tx:
        before = tx.jobs.data_version(job_id)
    ask(cluster, job_id)
    with sqlite_store.reading() as tx:
        assert tx.jobs.data_version(job_id) == before
