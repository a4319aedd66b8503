"""Tests that runs are leased to one holder, change only between permitted states, and are never lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.clock import ManualClock
from tula_service.domain import RUN_TRANSITIONS
from tula_service.errors import Conflict, InvalidInput
from tula_service.store import Store
from tula_service.usecases import events, jobs, runs
from tula_service.usecases.access import ANONYMOUS, KnownRuns
from tula_service.usecases.telemetry import TelemetryIngest

SMALL = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=128)
"""256 examples a step."""


def claim(cluster: Cluster, job_id: str, holder: str = "launcher", **more: object) -> wire.RunClaimed:
    """Claim the next run."""
    request = wire.ClaimRequest.model_validate({"holder": holder, **more})
    return runs.claim(cluster.store, ANONYMOUS, job_id, request)


def claimed(cluster: Cluster, **more: object) -> wire.Run:
    """Register a new job; return a claimed run of it."""
    run = claim(cluster, cluster.register().job.id, **more).run
    assert run is not None
    return run


def test_every_transition_is_allowed_by_the_table_or_refused_with_a_sentence(cluster: Cluster) -> None:
    finals = {"succeeded", "out_of_memory", "failed", "cancelled"}
    assert all((state, None) not in RUN_TRANSITIONS for state in finals)
    for number, state in enumerate(sorted(finals)):
        run = claim(cluster, cluster.register(spec(epochs=number + 1)).job.id).run
        assert run is not None
        cluster.patch(run.id, "running")
        cluster.send(run, [0.1] * 5)
        assert cluster.patch(run.id, state).state == state
        assert cluster.patch(run.id, state).state == state, "launcher and agent may both report it"
        for other in sorted(finals - {state} | {"running", "claimed", "pending"}):
            with pytest.raises(Conflict, match=rf"already ended \({state}\)"):
                cluster.patch(run.id, other)


def test_two_launchers_never_get_the_same_run(store: Store) -> None:
    cluster = Cluster(store)
    job_id = cluster.register(spec(search="full")).job.id
    planned = cluster.job(job_id).runs_planned
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: claim(cluster, job_id, f"holder {number}").run, range(planned + 4)))
    ids = [run.id for run in found if run is not None]
    assert len(ids) == len(set(ids)) == planned


def test_an_expired_lease_is_given_to_another_and_its_old_holder_is_refused(
    cluster: Cluster, clock: ManualClock
) -> None:
    run = claimed(cluster, lease_s=60.0)
    clock.advance(61.0)
    again = claim(cluster, run.job_id, "other").run
    assert again is not None
    assert again.id == run.id
    with pytest.raises(Conflict, match="held by 'other'") as caught:
        cluster.patch(run.id, "succeeded")
    assert caught.value.field == "holder"


def test_agents_of_a_lease_that_is_over_are_told_so_and_change_nothing(store: Store, clock: ManualClock) -> None:
    cluster = Cluster(store)
    run = claimed(cluster, lease_s=60.0, whole_launch=True)
    assert run.lease > 0
    clock.advance(61.0)
    again = claim(cluster, run.job_id, "other", whole_launch=True)
    assert again.run is not None
    assert (again.run.id, again.run.lease) == (run.id, run.lease + 2), "it has been back in the plan"
    assert {each.lease for each in again.smaller} <= {again.run.lease}, "one launch, one number"
    late: dict[str, object] = {"boot_id": "late", "sequence": [0], "step": [0], "step_time_s": [9.0], "rank": 0}
    chunk = {"rank": 0, "boot_id": "late", "sequence": 0, "steps": [0], "columns": {"loss": [1.0]}}
    samples, telemetry = cluster.ingest, TelemetryIngest(cluster.store, KnownRuns(cluster.store))
    for number in (run.lease, run.lease + 1):
        with pytest.raises(Conflict, match="stop working on the run"):
            samples.store(ANONYMOUS, run.id, wire.SampleBatch.model_validate(late), number)
        with pytest.raises(Conflict, match="stop working on the run"):
            telemetry.store(ANONYMOUS, run.id, wire.TelemetryChunk.model_validate(chunk), number)
        with pytest.raises(Conflict, match="stop working on the run"):
            runs.patch(cluster.store, ANONYMOUS, run.id, wire.RunPatch(state="succeeded"), number)
    left = runs.get(cluster.store, ANONYMOUS, run.id)
    assert (left.state, left.num_samples) == ("claimed", 0)
    samples.store(ANONYMOUS, run.id, wire.SampleBatch.model_validate(late), again.run.lease)
    assert runs.get(cluster.store, ANONYMOUS, run.id).num_samples == 1


def test_ranks_on_one_machine_are_the_nodes_of_a_job_of_one_rank_a_node(cluster: Cluster) -> None:
    """An agent registers one node with two ranks under `TULA_JOB`, but the job was tuned with one rank per node."""
    job_id = cluster.register(spec(cluster={"instance_type": "a", "max_nodes": 4})).job.id
    seen = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=64)
    made = runs.create(cluster.store, ANONYMOUS, job_id, wire.RunCreate(kind="train", configuration=seen))
    assert made.configuration == wire.Configuration(
        num_nodes=2, ranks_per_node=1, local_batch_size=64, instance_type="a"
    )


def test_an_expired_lease_without_a_new_holder_must_be_claimed_again(cluster: Cluster, clock: ManualClock) -> None:
    run = claimed(cluster, lease_s=60.0)
    clock.advance(61.0)
    claim(cluster, run.job_id, "other", max_nodes=1)
    others = runs.get(cluster.store, ANONYMOUS, run.id)
    if others.state == "pending":
        with pytest.raises(Conflict, match="claim it again"):
            cluster.patch(run.id, "running")


@pytest.mark.parametrize("renewal", ["patch", "samples"])
def test_patches_and_samples_both_renew_the_lease(cluster: Cluster, clock: ManualClock, renewal: str) -> None:
    run = claimed(cluster, lease_s=60.0)
    cluster.patch(run.id, "running")
    for _ in range(3):
        clock.advance(50.0)
        if renewal == "patch":
            cluster.patch(run.id, "running")
        else:
            cluster.send(run, [0.1])
    assert claim(cluster, run.job_id, "other", max_nodes=run.configuration.num_nodes).run != run
    assert runs.get(cluster.store, ANONYMOUS, run.id).state == "running"


def test_a_launcher_gets_only_runs_that_its_nodes_can_hold(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    while (answer := claim(cluster, job_id, max_nodes=1)).run is not None:
        assert answer.run.configuration.num_nodes == 1
    assert "max_nodes" in answer.reason
    assert answer.retry_after_s is not None


def test_work_elsewhere_and_work_done_have_different_reasons(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    held = []
    while (answer := claim(cluster, job_id)).run is not None:
        held.append(answer.run)
    assert "in progress elsewhere" in answer.reason
    assert answer.retry_after_s is not None
    for run in held:
        cluster.execute(run)
    cluster.work(job_id)
    done = claim(cluster, job_id)
    assert (done.run, done.retry_after_s) == (None, None)
    assert done.reason == cluster.job(job_id).plan_reason


def test_a_command_that_never_calls_the_agent_fails_with_the_remedy(cluster: Cluster) -> None:
    run = claimed(cluster)
    cluster.patch(run.id, "running")
    ended = cluster.patch(run.id, "succeeded")
    assert ended.state == "failed"
    assert ended.message is not None
    assert "tula_agent.init" in ended.message
    assert ended.end_cause == "no_samples"
    assert cluster.patch(run.id, "succeeded").state == "failed", "the second reporter sees the same"


def test_a_command_that_ends_within_its_warm_up_fails_with_the_remedy(cluster: Cluster) -> None:
    """Such a command once counted as done, and the plan asked for it again forever."""
    run = claimed(cluster)
    cluster.patch(run.id, "running")
    cluster.send(run, [0.1] * 10, warmup=True)
    ended = cluster.patch(run.id, "succeeded")
    assert (ended.state, ended.end_cause) == ("failed", "no_samples")
    assert ended.message is not None
    assert "more epochs" in ended.message


def test_a_profiling_run_may_end_once_its_step_time_is_known(cluster: Cluster) -> None:
    run = claimed(cluster)
    cluster.patch(run.id, "running")
    assert not cluster.send(run, [0.1, 0.2, 0.1]).stop
    accepted = cluster.send(run, [0.1] * 12)
    assert run.instruction is not None
    assert run.instruction.measuring_steps > 15
    accepted = cluster.send(run, [0.1] * 30) if not accepted.stop else accepted
    assert accepted.stop
    assert accepted.reason


def test_a_profiling_run_that_was_slow_to_start_measures_for_longer(cluster: Cluster, clock: ManualClock) -> None:
    """A run measures for a tenth of its start-up time, here 100 s: nine steps of 1 s are too few, eighteen suffice."""
    run = claimed(cluster)
    cluster.patch(run.id, "running")
    clock.advance(109)
    assert not cluster.send(run, [1.0] * 9).stop
    clock.advance(9)
    accepted = cluster.send(run, [1.0] * 9)
    assert accepted.stop
    assert "known to within" in str(accepted.reason)


def test_a_run_of_the_users_own_choice_is_checked_against_the_cluster(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    configuration = wire.Configuration(num_nodes=1, local_batch_size=32, instance_type="p4d")
    with pytest.raises(InvalidInput) as caught:
        runs.create(cluster.store, ANONYMOUS, job_id, wire.RunCreate(kind="train", configuration=configuration))
    assert caught.value.field == "configuration.instance_type"


def test_a_run_has_a_value_of_each_option_and_none_that_the_job_lacks(cluster: Cluster) -> None:
    job_id = cluster.register(spec(options={"precision": ["fp32", "bf16"], "compile": ["off", "on"]})).job.id

    def made(**options: str) -> wire.Run:
        configuration = replace(SMALL, options=tuple(options.items()))
        request = wire.RunCreate(kind="profile", configuration=configuration)
        return runs.create(cluster.store, ANONYMOUS, job_id, request)

    assert made().configuration.options == (("compile", "off"), ("precision", "fp32"))
    run = made(precision="bf16")
    assert run.configuration.options == (("compile", "off"), ("precision", "bf16"))
    assert runs.get(cluster.store, ANONYMOUS, run.id).configuration == run.configuration
    for wrong, sentence in (({"precision": "fp8"}, "no value 'fp8': use fp32, bf16"), ({"zero": "1"}, "no option")):
        with pytest.raises(InvalidInput, match=sentence) as caught:
            made(**wrong)
        assert caught.value.field == "configuration.options"


def test_a_run_without_an_instance_type_is_of_the_only_one_that_it_can_be(cluster: Cluster) -> None:
    """An agent that creates its run knows ranks and batch, but not how the job names its machines."""
    rows = [{"max_nodes": 2, "instance_type": name, "ranks_per_node": ranks} for name, ranks in (("a", 8), ("b", 4))]
    both = cluster.register(spec(name="both", cluster=rows)).job.id
    one = cluster.register(spec(name="one", cluster=rows[0])).job.id

    def type_of(job_id: str, ranks: int) -> str:
        configuration = wire.Configuration(num_nodes=1, ranks_per_node=ranks, local_batch_size=32)
        request = wire.RunCreate(kind="train", configuration=configuration)
        return runs.create(cluster.store, ANONYMOUS, job_id, request).configuration.instance_type

    assert (type_of(both, 8), type_of(both, 4), type_of(one, 2)) == ("a", "b", "a")
    with pytest.raises(InvalidInput, match="use a, b"):
        type_of(both, 2)


def test_training_moves_the_job_along(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    cluster.work(job_id)
    assert cluster.job(job_id).state == "ready"
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    assert cluster.job(job_id).state == "training"
    cluster.send(run, cluster.times(run.configuration, 30))
    cluster.patch(run.id, "succeeded")
    assert cluster.job(job_id).state == "finished"


def test_a_job_whose_training_failed_is_not_ready_while_runs_of_its_plan_wait(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    cluster.patch(run.id, "failed")
    assert cluster.job(job_id).state == "planning"
    cluster.work(job_id)
    assert cluster.job(job_id).state == "ready"


def test_runs_are_listed_newest_first_in_pages(cluster: Cluster) -> None:
    job_id = cluster.register(spec(search="full")).job.id
    first = runs.list_runs(cluster.store, ANONYMOUS, job_id, limit=3)
    second = runs.list_runs(cluster.store, ANONYMOUS, job_id, limit=100, cursor=first.next_cursor)
    everything = [run.id for run in (*first.runs, *second.runs)]
    assert len(everything) == len(set(everything)) == cluster.job(job_id).runs_planned
    assert second.next_cursor is None
    assert runs.list_runs(cluster.store, ANONYMOUS, job_id, kind="train").runs == []


def test_a_training_that_vanished_fails_and_is_reopened_by_its_next_report(
    cluster: Cluster, clock: ManualClock
) -> None:
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    clock.advance(100.0)
    cluster.send(run, [0.1])
    clock.advance(100.0)
    cluster.register()
    assert runs.get(cluster.store, ANONYMOUS, run.id).state == "running", "samples renewed its lease"
    clock.advance(100.0)
    cluster.register()
    gone = runs.get(cluster.store, ANONYMOUS, run.id)
    assert gone.state == "failed"
    assert gone.end_cause == "vanished"
    assert "lease expired" in (gone.message or "")
    back = cluster.patch(run.id, "running")
    assert (back.state, back.message, back.end_cause, back.finished_at) == ("running", None, None, None)
    assert cluster.job(job_id).state == "training"


def test_a_training_that_succeeds_after_it_vanished_ends_once(cluster: Cluster, clock: ManualClock) -> None:
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=2, ranks_per_node=2, local_batch_size=64))
    cluster.send(run, [0.1])
    clock.advance(1000.0)
    cluster.register()
    assert runs.get(cluster.store, ANONYMOUS, run.id).state == "failed"
    for _ in range(2):
        runs.patch(cluster.store, ANONYMOUS, run.id, wire.RunPatch(state="succeeded", holder="launcher"))
    said = events.recent(cluster.store, ANONYMOUS, job_id, kinds=["run"], run_id=run.id)
    assert [one.data["state"] for one in said].count("succeeded") == 1


def test_a_run_says_who_asked_for_it(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    request = wire.RunCreate(kind="profile", configuration=SMALL)
    assert runs.create(cluster.store, ANONYMOUS, job_id, request).origin == "user"
    assert cluster.train(job_id, SMALL).origin == "user"
    assert claimed(cluster).origin == "plan"


def test_a_run_whose_process_saw_another_configuration_says_so(cluster: Cluster) -> None:
    run = claimed(cluster)
    cluster.patch(run.id, "running")
    cluster.send(run, [0.1] * 20, world_size=run.configuration.world_size, local_batch_size=3)
    ended = cluster.patch(run.id, "succeeded")
    assert "but used 3, 1" in (ended.configuration_mismatch or "")
    assert "reduces its batch to save memory, set batch.max_local_batch_size = 3" in ended.message
    assert (ended.state, ended.message) == ("failed", ended.configuration_mismatch)
    assert cluster.patch(run.id, "succeeded").state == "failed"  # launcher and agent may both report the end
    as_planned = cluster.execute(claimed(cluster))
    assert as_planned.configuration_mismatch is None
    accumulating = claimed(cluster)
    cluster.send(accumulating, [0.1] * 20, grad_accum_steps=2)
    assert "its own gradient" in (runs.get(cluster.store, ANONYMOUS, accumulating.id).configuration_mismatch or "")


@pytest.mark.parametrize("reader", ["run", "runs", "job", "jobs"])
def test_a_training_whose_launcher_is_gone_runs_for_no_reader(
    cluster: Cluster, clock: ManualClock, reader: str
) -> None:
    job_id = cluster.register().job.id
    run = cluster.train(job_id, wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=32))
    user = (cluster.store, cluster.principal)
    assert runs.get(*user, run.id).state == "running"
    clock.advance(1e6)
    if reader == "run":
        assert runs.get(*user, run.id).end_cause == "vanished"
    elif reader == "runs":
        assert runs.list_runs(*user, job_id).runs[0].end_cause == "vanished"
    elif reader == "job":
        assert jobs.get(*user, job_id).state == "planning"
    else:
        assert [job.state for job in jobs.list_jobs(*user).jobs] == ["planning"]
    assert cluster.patch(run.id, "running").state == "running", "it was alive after all"


def test_a_measurement_of_fewer_steps_than_planned_says_so(cluster: Cluster) -> None:
    job_id = cluster.register().job.id
    claimed = runs.claim(cluster.store, cluster.principal, job_id, wire.ClaimRequest(holder="launcher")).run
    assert claimed is not None
    cluster.noise = 1.0
    ended = cluster.execute(claimed, steps=4)
    assert ended.state == "succeeded"
    assert ended.message is not None
    assert ended.message.startswith("Only 4 of ")
