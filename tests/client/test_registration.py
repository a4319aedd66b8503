"""Tests that `job.toml` changes the existing job, and that a new job is registered only if a fixed field differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_bad_input import spec_file
from tests.client.test_cli import Tula, answer, tula
from tests.client.test_client import profile
from tula_client import Client, InvalidInputError
from tula_client._spec import load_spec
from tula_client.launch.registration import register
from tula_wire import ClaimRequest, JobPatch, JobSpec, ProfilingSpec, RunPatch

__all__ = ["tula"]

TWO_TYPES = [
    {"instance_type": "small", "max_nodes": 4, "price": {"usd_per_node_hour": 1.0}},
    {"instance_type": "large", "max_nodes": 2, "price": {"usd_per_node_hour": 3.0}},
]


def changed(spec: JobSpec, **values: Any) -> JobSpec:
    return JobSpec.model_validate({**spec.model_dump(mode="json"), **values})


def test_a_changeable_difference_changes_the_job_and_keeps_its_measurements(client: Client, spec: JobSpec) -> None:
    spec = changed(spec, batch={"min_local_batch_size": 32, "max_local_batch_size": 64})
    first = register(client, changed(spec, cluster=TWO_TYPES))
    assert first.notes == ()
    measured = profile(client, first.job.id)
    dearer = [TWO_TYPES[1] | {"price": {"usd_per_node_hour": 5.0}}, TWO_TYPES[0]]
    wanted = changed(spec, cluster=dearer, objective="cost", limits={"deadline_s": 86400}, usd_per_hour_of_waiting=20)
    wanted = changed(wanted, usd_per_kwh=0.3, gco2_per_kwh=400)
    again = register(client, wanted)
    assert again.job.id == first.job.id
    assert again.job.runs_done == measured
    assert (again.job.spec.objective, again.job.spec.limits) == (wanted.objective, wanted.limits)
    assert {one.instance_type: one.price.usd_per_node_hour for one in again.job.spec.cluster} == {
        "small": 1,
        "large": 5,
    }
    (said,) = again.notes
    for change in (
        "objective balanced -> cost",
        "limits.deadline_s none -> 86400",
        "usd_per_hour_of_waiting none -> 20",
        "usd_per_kwh none -> 0.3",
        "gco2_per_kwh none -> 400",
        "cluster[large].price.usd_per_node_hour 3 -> 5",
    ):
        assert change in said
    assert "small" not in said
    assert register(client, wanted).notes == ()
    assert register(client, changed(wanted, limits={})).job.spec.limits.deadline_s is None
    assert [job.id for job in client.jobs(search=spec.name).jobs] == [first.job.id]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epochs": 3, "objective": "cost"}, "epochs"),
        ({"dataset": {"size": 40_000}, "epochs": 3}, "dataset.size, epochs"),
        ({"cluster": {"max_nodes": 8}}, "cluster.max_nodes"),
        ({"cluster": {"max_nodes": 4, "instance_type": "other"}}, "cluster.instance_type"),
    ],
)
def test_a_fixed_difference_registers_another_job_and_is_named(
    client: Client, spec: JobSpec, values: dict[str, Any], named: str
) -> None:
    first = register(client, spec).job
    second = register(client, changed(spec, **values))
    assert second.job.id != first.id
    (said,) = second.notes
    assert f"the existing job {first.id} differs in " in said
    fields = said.split("differs in ")[1].split(", which cannot be changed")[0].split(", ")
    assert set(named.split(", ")) <= set(fields)
    assert f"tula jobs archive {first.id}" in said
    assert "objective" not in said
    assert client.job(first.id).spec == first.spec
    third = register(client, changed(spec, objective="time"))
    assert (third.job.id, len(third.notes)) == (first.id, 1)  # the other one of that name is no candidate


def test_shared_launches_that_were_turned_off_stay_so_unless_the_file_asks_for_them(
    client: Client, spec: JobSpec
) -> None:
    spec = spec.model_copy(update={"profiling": ProfilingSpec()})
    job = register(client, spec).job
    client.patch_job(job.id, JobPatch(share_launches=False))
    again = register(client, spec)
    assert (again.job.id, again.notes, again.job.spec.profiling.share_launches) == (job.id, (), False)
    asked = register(client, spec.model_copy(update={"profiling": ProfilingSpec(share_launches=True)}))
    assert (asked.job.id, asked.job.spec.profiling.share_launches) == (job.id, True)


def test_a_price_of_waiting_that_was_answered_stays_unless_the_file_gives_another(
    client: Client, spec: JobSpec
) -> None:
    given = spec.model_dump(mode="json", exclude={"usd_per_hour_of_waiting"})
    open_ = JobSpec.model_validate(given | {"cluster": TWO_TYPES})
    job = register(client, open_).job
    client.patch_job(job.id, JobPatch(usd_per_hour_of_waiting=25))
    again = register(client, open_)
    assert (again.job.id, again.notes, again.job.spec.usd_per_hour_of_waiting) == (job.id, (), 25)
    slower = JobSpec.model_validate(given | {"cluster": TWO_TYPES, "limits": {"deadline_s": 86400}})
    assert register(client, slower).job.spec.usd_per_hour_of_waiting == 25
    assert register(client, changed(open_, usd_per_hour_of_waiting=7)).job.spec.usd_per_hour_of_waiting == 7


def test_an_archived_job_stays_as_it_is(client: Client, spec: JobSpec) -> None:
    first = register(client, spec).job
    client.archive_job(first.id)
    second = register(client, changed(spec, objective="cost"))
    assert (second.job.id != first.id, second.notes) == (True, ())
    assert client.job(first.id).state == "archived"


def test_failed_runs_are_planned_again_also_in_a_changed_job(client: Client, spec: JobSpec) -> None:
    spec = changed(spec, batch={"min_local_batch_size": 32, "max_local_batch_size": 32})
    for objective in ("knee", "time", "cost", "cost"):
        wanted = changed(spec, objective=objective)
        found = register(client, wanted, retry_failed=True)
        assert found.job.objective == objective
        states = [run.state for run in found.job.plan]
        assert states.count("pending") >= 1, (objective, states)
        while (claimed := client.claim(found.job.id, ClaimRequest(holder="h")).run) is not None:
            client.patch_run(claimed.id, RunPatch(state="failed", holder="h"))
    assert len(client.jobs(search=spec.name).jobs) == 1


def test_the_options_that_vary_can_be_narrowed_and_widened_again(client: Client, spec: JobSpec) -> None:
    options = {"precision": ["fp32", "bf16"], "compile": ["off", "on"]}
    spec = changed(spec, options=options)
    job = register(client, spec).job
    narrowed = register(client, changed(spec, profiling={"only": ["precision"]}))
    assert (narrowed.job.id, narrowed.job.spec.profiling.only) == (job.id, ["precision"])
    assert narrowed.job.spec.varied_options == {"precision": ["fp32", "bf16"], "compile": ["off"]}
    assert "profiling.only none -> ['precision']" in narrowed.notes[0]
    widened = register(client, spec)
    assert (widened.job.id, widened.job.spec.varied_options) == (job.id, options)
    with pytest.raises(InvalidInputError, match="This job has no option 'zero': use compile, precision"):
        client.patch_job(job.id, JobPatch(only=["zero"]))


def test_a_job_that_was_changed_is_found_again(client: Client, spec: JobSpec) -> None:
    for objective in ("knee", "cost"):
        found = register(client, changed(spec, objective=objective))
    again = register(client, changed(spec, objective="cost"))
    assert (again.job.id, again.notes) == (found.job.id, ())


def test_registration_handles_every_field_of_a_patch() -> None:
    assert set(JobPatch.model_fields) == {
        "objective",
        "usd_per_hour_of_waiting",
        "usd_per_kwh",
        "gco2_per_kwh",
        "limits",
        "prices",
        "share_launches",
        "only",
        "archived",
        "retry_failed",
    }


def test_tune_reports_changes_and_continues(tula: Tula, tmp_path: Path, address: str) -> None:
    path = spec_file(tmp_path, tmp_path.name)
    with Client(address, token="") as client:
        job = client.register(load_spec(Path(path))).job
        profile(client, job.id)
    command = ["--work-dir", str(tmp_path / "w"), "--", "true", "{local_batch_size}", "{num_nodes}"]
    code, out, err = tula("tune", spec_file(tmp_path, tmp_path.name, objective='"cost"', price="2.0"), *command)
    assert (code, err) == (0, "")
    said = f"({job.id}) and kept its measurements: objective knee -> cost"
    assert said in " ".join(out.split())
    assert "usd_per_node_hour 1 -> 2" in " ".join(out.split())
    assert tula("recommend", tmp_path.name)[0] == 0
    code, out, _ = tula("tune", spec_file(tmp_path, tmp_path.name, objective='"cost"', price="2.0"), *command)
    assert (code, "Changed" in out) == (0, False)


def test_jobs_add_registers_without_running_and_says_what_recommend_says(
    tula: Tula, tmp_path: Path, address: str
) -> None:
    path, name = spec_file(tmp_path, tmp_path.name), tmp_path.name
    first = answer(tula("jobs", "add", path, "--json"))
    assert first == answer(tula("recommend", name, "--json"))
    assert first["basis"] in ("prior", "transfer")
    with Client(address, token="") as client:
        assert client.job(first["job_id"]).runs_done == 0
        assert len(client.jobs(search=name).jobs) == 1
    code, out, err = tula("jobs", "add", path)
    assert (code, err) == (0, "")
    title, printed = out.split("\n", 1)
    assert title.split() == [name, first["job_id"]]
    assert printed == tula("recommend", name)[1]
    code, out, err = tula("jobs", "add", spec_file(tmp_path, name, objective='"cost"'), "--json")
    assert (code, "objective knee -> cost" in err) == (0, True)
    assert json.loads(out)["objective"] == "cost"
    assert tula("jobs", "add", str(tmp_path / "none.toml"))[0] == 2
