"""Tests that a job is registered once, however often it is sent, and that an impossible job gets one clear sentence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tula_service.errors import Conflict, Forbidden, InvalidInput, NotFound
from tula_service.store import Store
from tula_service.usecases import events, jobs, runs
from tula_service.usecases.access import ANONYMOUS, Principal


def test_registration_answers_with_a_prior_and_runs_to_profile(cluster: Cluster) -> None:
    created = cluster.register()
    assert created.recommendation.basis == "prior"
    assert created.recommendation.chosen is not None
    assert "No run of this job has been measured yet" in created.recommendation.why
    step = created.recommendation.chosen.step_time_s
    assert step.high / step.low > 10, "a guess must not look like a measurement"
    assert [run.state for run in created.runs] == ["pending"] * len(created.runs)
    assert created.job.runs_planned == len(created.runs) > 0
    assert max(run.configuration.num_nodes for run in created.runs) == 8


def test_the_same_specification_finds_the_same_job_and_nothing_is_measured_twice(cluster: Cluster) -> None:
    job_id = cluster.register(idempotency_key="first").job.id
    cluster.work(job_id)
    again = cluster.register(idempotency_key="second")
    assert again.job.id == job_id
    assert again.runs == []
    assert again.recommendation.basis == "profiled"
    assert cluster.work(job_id) == []


def test_an_idempotency_key_is_good_for_one_specification(cluster: Cluster) -> None:
    first = cluster.register(idempotency_key="key")
    assert cluster.register(idempotency_key="key").job.id == first.job.id
    with pytest.raises(Conflict, match="already used for another specification") as caught:
        cluster.register(spec(epochs=3), idempotency_key="key")
    assert caught.value.field == "Idempotency-Key"


def test_another_specification_is_another_job(cluster: Cluster) -> None:
    assert cluster.register().job.id != cluster.register(spec(epochs=11)).job.id


def test_a_job_may_ask_for_the_papers_step_time_model(cluster: Cluster) -> None:
    job_id = cluster.register(spec(step_time_model="ring")).job.id
    assert job_id != cluster.register().job.id
    cluster.work(job_id)
    assert cluster.recommendation(job_id).model.form == "ring"


def test_the_papers_search_profiles_two_points_and_answers_by_its_equation(cluster: Cluster) -> None:
    job_id = cluster.register(spec(search="paper", step_time_model="parameter_server")).job.id
    assert len(cluster.work(job_id)) == 2
    assert cluster.recommendation(job_id).model.form == "parameter_server"
    with pytest.raises(ValidationError, match='requires step_time_model "ring" or "parameter_server"'):
        spec(search="paper")


def test_a_failed_run_is_tried_again_only_when_the_job_is_registered_again(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    claimed = runs.claim(cluster.store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher")).run
    assert claimed is not None
    cluster.patch(claimed.id, "failed", message="The command exited with 1.")
    done = cluster.work(job_id)
    assert claimed.configuration not in [run.configuration for run in done]
    waiting = [run.configuration for run in cluster.register().runs]
    second = [run.configuration for run in cluster.work(job_id)]
    assert cluster.job(job_id).state == "ready"
    assert set(waiting) == set(second)


def test_an_archived_job_comes_back_when_it_is_registered_again(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    archived = jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch(archived=True))
    assert archived.state == "archived"
    assert jobs.list_jobs(cluster.store, ANONYMOUS).jobs == []
    with pytest.raises(Conflict, match="archived"):
        runs.claim(cluster.store, ANONYMOUS, job_id, wire.ClaimRequest(holder="launcher"))
    assert cluster.register().job.id == job_id
    assert cluster.job(job_id).state == "planning"


def test_archiving_and_unarchiving_publish_events(cluster: Cluster) -> None:
    job_id = cluster.register().job.id

    def published(archived: bool) -> list[str]:
        seen = events.last_id(cluster.store, ANONYMOUS, job_id)
        jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch(archived=archived))
        found = events.read_on(cluster.store, ANONYMOUS, job_id, seen)
        return [str(event.data["state"]) for event in found if event.kind == "job"]

    assert published(archived=True) == ["archived"]
    assert published(archived=True) == []
    assert published(archived=False)[0] == "planning"


def test_a_deleted_job_is_gone_and_its_specification_starts_over(cluster: Cluster) -> None:
    job_id = cluster.register(idempotency_key="key").job.id
    jobs.delete_job(cluster.store, ANONYMOUS, job_id)
    with pytest.raises(NotFound):
        cluster.job(job_id)
    assert cluster.register(idempotency_key="key").job.id != job_id


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cluster": {"max_nodes": 0}}, "cluster.0.max_nodes"),
        ({"batch": {"min_local_batch_size": 0}}, "batch.min_local_batch_size"),
        ({"objective": "cheapest"}, "objective"),
        ({"epochs": float("nan")}, "epochs"),
        ({"epochs": float("inf")}, "epochs"),
        ({"dataset": {"size": 10, "sizes": 11}}, "dataset.sizes"),
    ],
)
def test_a_value_that_no_field_may_hold_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == field


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"cluster": {"max_nodes": 2}, "objective": "cost"}, "cluster.0.price", "requires prices"),
        ({"cluster": {"max_nodes": 2}, "limits": {"budget_usd": 5}}, "limits.budget_usd", "requires prices"),
        (
            {
                "cluster": [
                    {"instance_type": "a", "max_nodes": 2, "price": {"usd_per_node_hour": 1}},
                    {"instance_type": "b", "max_nodes": 2},
                ]
            },
            "cluster.1.price",
            "set prices for all instance types, or for none",
        ),
        ({"dataset": {"size": 16}}, "batch", "data set of 16 examples"),
        ({"batch": {"global_batch_size": 7}}, "batch", "."),
        (
            {
                "batch": {"global_batch_size": 512, "min_local_batch_size": 16, "max_local_batch_size": 16},
                "cluster": {"max_nodes": 2},
            },
            "batch",
            "needs at least 16 accumulation steps, but max_grad_accum_steps is 1",
        ),
        *(
            (
                {"cluster": {"max_nodes": 2, "memory_bytes_per_rank": given}},
                "cluster.0.memory_bytes_per_rank",
                "set the number of bytes, for example 17179869184 for 16 GiB",
            )
            for given in (0, 16, 80, 2**26 - 1)
        ),
        (
            {"model": {"name": "net", "activation_bytes_per_sample": 0}},
            "model.activation_bytes_per_sample",
            "or leave it out",
        ),
        (
            {"model": {"name": "net", "precision": "bf16"}, "cluster": {"max_nodes": 2, "accelerator": "Tesla V100"}},
            "model.precision",
            "use one of fp32, fp16",
        ),
        (
            {"cluster": {"max_nodes": 2, "accelerator": "V100-16GB", "memory_bytes_per_rank": 2**35}},
            "cluster.0.memory_bytes_per_rank",
            "at most 16 GiB",
        ),
        (
            {
                "model": {"name": "net", "parameters": 6 * 10**9, "optimizer": "adam"},
                "cluster": {"max_nodes": 2, "memory_bytes_per_rank": 80 * 10**9},
            },
            "cluster.0.memory_bytes_per_rank",
            "89.4 GiB per rank in single precision, but the device has only 74.5 GiB",
        ),
    ],
)
def test_a_specification_that_contradicts_itself_is_refused_by_name(
    cluster: Cluster, changes: dict[str, Any], field: str, sentence: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        cluster.register(spec(**changes))
    assert caught.value.field == field
    assert sentence in caught.value.message


def test_changed_prices_change_cost_and_a_changed_objective_the_choice(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    cluster.work(job_id)
    before = cluster.recommendation(job_id).chosen
    patch = wire.JobPatch(prices={"default": wire.Price(usd_per_node_hour=6.0)})
    jobs.change(cluster.store, ANONYMOUS, job_id, patch)
    after = cluster.recommendation(job_id).chosen
    assert before is not None
    assert after is not None
    assert before.cost_usd is not None
    assert after.cost_usd is not None
    assert after.cost_usd.value == pytest.approx(2 * before.cost_usd.value)
    assert jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch(objective="cost")).objective == "cost"
    cheapest = cluster.recommendation(job_id)
    assert cheapest.objective == "cost"
    assert cheapest.chosen == cheapest.least_cost


def test_a_price_of_an_unknown_instance_type_is_refused_by_name(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    with pytest.raises(InvalidInput) as caught:
        jobs.change(cluster.store, ANONYMOUS, job_id, wire.JobPatch(prices={"p4d": wire.Price()}))
    assert caught.value.field == "prices.p4d"


def test_lists_are_searched_filtered_and_paged(cluster: Cluster) -> None:
    for number in range(5):
        cluster.register(spec(name=f"job {number}", model={"name": "even" if number % 2 == 0 else "odd"}))
    first = jobs.list_jobs(cluster.store, ANONYMOUS, limit=2)
    assert (first.total, [job.name for job in first.jobs]) == (5, ["job 4", "job 3"])
    second = jobs.list_jobs(cluster.store, ANONYMOUS, limit=2, cursor=first.next_cursor)
    assert [job.name for job in second.jobs] == ["job 2", "job 1"]
    assert [job.name for job in jobs.list_jobs(cluster.store, ANONYMOUS, search="ODD").jobs] == ["job 3", "job 1"]
    assert jobs.list_jobs(cluster.store, ANONYMOUS, state="ready").total == 0
    with pytest.raises(InvalidInput, match="cursor"):
        jobs.list_jobs(cluster.store, ANONYMOUS, cursor="x")


def test_jobs_of_another_project_do_not_exist(sqlite_store: Store, cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    stranger = Principal(name="stranger", scope="user", project_id="other")
    with pytest.raises(NotFound):
        jobs.get(sqlite_store, stranger, job_id)
    with pytest.raises(NotFound):
        jobs.change(sqlite_store, stranger, job_id, wire.JobPatch(archived=True))
    assert jobs.list_jobs(sqlite_store, stranger).total == 0
    agent = Principal(name="agent", scope="agent", job_id=job_id, project_id="default")
    with pytest.raises(Forbidden):
        jobs.register(sqlite_store, agent, spec())
