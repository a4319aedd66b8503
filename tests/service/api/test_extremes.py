"""Tests that extreme but valid input is answered or refused in one sentence, and leaves every page and route usable."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.service.api.conftest import SPEC, Service
from tests.service.api.test_ingest import batch, chunk
from tula_service.dashboard.charts.candidates import CANDIDATE_CHARTS
from tula_service.dashboard.charts.runs import RUN_CHARTS
from tula_service.domain import SampleColumns
from tula_service.perfmodel.step_summary import summarise
from tula_service.usecases.job_data import read_spec
from tula_wire import routes

ROWS = 6
NO_SHRINKING = (Phase.explicit, Phase.generate)  # an example takes a second
COUNTS = st.sampled_from([0, 1, 2**20, 2**31 - 1, 2**53])
BATCHES = st.sampled_from([1, 3, 32, 2**31 - 1])
SECONDS = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.1, 1e6])
STEP_TIMES = st.sampled_from([5e-324, 1e-300, 1e-9, 0.1, 1e6])
BYTES = st.sampled_from([0, 1, 2**34, 2**60])
FLOATS = st.sampled_from([0.0, -0.0, 5e-324, -1.0, 1e-300, 1.0, 1e38, 1.7e308, -1.7e308])


def column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Return a strategy for lists with one value per row."""
    return st.lists(values, min_size=ROWS, max_size=ROWS)


maybe = {name: column(st.none() | SECONDS) for name in ("compute_time_s", "comm_time_s", "exposed_comm_time_s")}
maybe |= {name: column(st.none() | SECONDS) for name in ("input_time_s", "skew_s")}
parts = ("parameter", "gradient", "optimizer", "activation", "batch", "reserved", "context", "capacity")
memory = st.fixed_dictionaries(
    {"method": st.sampled_from(["cuda_allocator", "peak_rss", "estimate", "reported"]), "peak_bytes": BYTES},
    optional={f"{part}_bytes": BYTES for part in parts},
)
batches = st.fixed_dictionaries(
    {"step_time_s": column(STEP_TIMES)},
    optional={
        **maybe,
        "straggler_rank": column(st.none() | COUNTS),
        "step": column(COUNTS),
        "memory": memory,
        "world_size": BATCHES,
        "local_batch_size": BATCHES,
        "grad_accum_steps": BATCHES,
        "epochs_before": st.sampled_from([0.0, 5e-324, 1e6]),
        "warmup": st.booleans(),
    },
)
COLUMNS = (
    "step_time_s", "grad_norm", "gradient_variability", "scale", "scaled_share", "gradient_noise_scale", "loss",
    "accuracy", "validation_accuracy", "lr", "memory_bytes", "skew_s", "delta", "small_batch_size", "directions",
    "scripted_s_min",
    "scripted_s_max", "scripted_delta", "thresholds_version",
)  # fmt: skip
chunks = st.fixed_dictionaries(
    {"columns": st.dictionaries(st.sampled_from(COLUMNS), column(st.none() | FLOATS), min_size=1)},
    optional={"steps": column(COUNTS)},
)


def everything(job_id: str, run_ids: list[str]) -> list[str]:
    """Return every route and page that reads a job or its runs."""
    asked = [f"/jobs/{job_id}", f"/jobs/{job_id}/what-if", f"/jobs/{job_id}/quality", "/", routes.METRICS]
    read = [routes.JOB, routes.JOB_RUNS, routes.JOB_SAMPLES, routes.JOB_RECOMMENDATION, routes.JOB_PREDICTIONS]
    asked += [route.format(job_id=job_id) for route in (*read, routes.JOB_SCALING, routes.JOB_LEDGER)]
    asked += [routes.JOB_CHART.format(job_id=job_id, name=name) for name in (*CANDIDATE_CHARTS, "accuracy", "quality")]
    for run_id in run_ids:
        asked += [f"/runs/{run_id}", routes.RUN.format(run_id=run_id)]
        asked += [routes.RUN_CHART.format(run_id=run_id, name=name) for name in RUN_CHARTS]
    return asked


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=NO_SHRINKING)
@given(profiled=batches, trained=batches, series=chunks, state=st.sampled_from(["succeeded", "out_of_memory"]))
@example(
    profiled={"step_time_s": [0.1] * ROWS, "straggler_rank": [2**53] * ROWS},
    trained={"step_time_s": [0.1] * ROWS},
    series={"columns": {"loss": [1.0] * ROWS}},
    state="succeeded",
)
@example(
    profiled={
        "step_time_s": [1e-09, 1e-09, 1e-09, 0.1, 0.1, 1e-09],
        "exposed_comm_time_s": [1e-300, 0.0, 5e-324, 0.1, None, 1000000.0],
    },
    trained={
        "step_time_s": [0.1, 1000000.0, 0.1, 0.1, 1e-300, 0.1],
        "local_batch_size": 2147483647,
        "grad_accum_steps": 3,
        "compute_time_s": [None, None, None, 5e-324, None, 1e-300],
    },
    series={
        "columns": {
            "thresholds_version": [1e-300, 1e38, -1.0, 5e-324, None, None],
            "lr": [-1.0, 0.0, -1.0, None, -1.0, None],
        },
        "steps": [1048576, 9007199254740992, 2147483647, 9007199254740992, 0, 0],
    },
    state="out_of_memory",
)
def test_whatever_was_accepted_leaves_every_route_of_its_job_usable(
    service: Service, profiled: dict[str, Any], trained: dict[str, Any], series: dict[str, Any], state: str
) -> None:
    with service.client(service.token("admin"), Accept="text/html") as client:
        key = {"Idempotency-Key": str(id(profiled)) + str(len(_jobs(client)))}
        # A launch of several batches begins with the smallest: without memory for that, there is nothing to ask about.
        spec = SPEC.model_dump(mode="json") | {
            "name": f"job {len(_jobs(client))}",
            "profiling": {"share_launches": False},
        }
        job_id = client.post(routes.JOBS, json=spec, headers=key).json()["job"]["id"]
        claimed = client.post(routes.JOB_CLAIM.format(job_id=job_id), json={"holder": "h", "lease_s": 60}).json()["run"]
        training = {"kind": "train", "configuration": claimed["configuration"], "holder": "h"}
        train = client.post(routes.JOB_RUNS.format(job_id=job_id), json=training)
        assert train.status_code == 201, train.text
        runs = [claimed["id"], train.json()["id"]]
        for run_id, sample in zip(runs, (profiled, trained), strict=True):
            running = client.patch(routes.RUN.format(run_id=run_id), json={"state": "running"})
            assert running.status_code == 200, running.text
            answer = client.post(routes.RUN_SAMPLES.format(run_id=run_id), json=batch(ROWS, **sample))
            assert answer.status_code in (202, 422), answer.text
            answer = client.post(routes.RUN_TELEMETRY.format(run_id=run_id), json=chunk(ROWS) | series)
            assert answer.status_code == 202, answer.text
        asked = everything(job_id, runs)
        for final in (None, state):
            for run_id in runs if final is not None else ():
                moved = client.patch(routes.RUN.format(run_id=run_id), json={"state": final, "dropped": 2**53})
                assert moved.status_code == 200, moved.text
            statuses = {path: client.get(path).status_code for path in asked}
            # Where not even the smallest batch fits, there is nothing to ask about.
            for question in (f"/jobs/{job_id}/what-if", routes.JOB_PREDICTIONS.format(job_id=job_id)):
                assert statuses.pop(question) in (200, 422), statuses
            assert set(statuses.values()) == {200}, statuses
        changed = client.patch(routes.JOB.format(job_id=job_id), json={"objective": "time"})
        assert changed.status_code == 200, changed.text


def test_a_run_that_cannot_be_summarised_is_left_out_with_a_note(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cause, every page and route of its job works and shows what other runs measured."""

    def broken(samples: SampleColumns) -> Any:
        if (samples.step_time_s == 0.5).any():
            raise OverflowError("a case that was not thought of")
        return summarise(samples)

    for name in ("samples", "runs", "job_data"):
        monkeypatch.setattr(f"tula_service.usecases.{name}.summarise", broken)
    red = service.tenant("red")
    with service.client(red.user, Accept="text/html") as client:
        runs = {}
        for seconds in (0.1, 0.5):
            configuration = (
                {"num_nodes": 2, "local_batch_size": 64} if runs else {"num_nodes": 1, "local_batch_size": 32}
            )
            wanted = {"kind": "profile", "configuration": configuration}
            run = client.post(routes.JOB_RUNS.format(job_id=red.job_id), json=wanted).json()
            client.patch(routes.RUN.format(run_id=run["id"]), json={"state": "running"})
            sent = client.post(
                routes.RUN_SAMPLES.format(run_id=run["id"]), json=batch(ROWS, step_time_s=[seconds] * ROWS)
            )
            assert sent.status_code == 202, sent.text
            ended = client.patch(routes.RUN.format(run_id=run["id"]), json={"state": "succeeded"})
            assert ended.status_code == 200, ended.text
            runs[seconds] = run["id"]
        statuses = {path: client.get(path).status_code for path in everything(red.job_id, list(runs.values()))}
        assert set(statuses.values()) == {200}, statuses
        recommended = client.get(routes.JOB_RECOMMENDATION.format(job_id=red.job_id)).json()["model"]
    assert f"Run {runs[0.5]} is ignored because its samples cannot be summarised" in " ".join(recommended["warnings"])
    assert recommended["num_runs"] == 1


def test_a_job_stored_before_a_bound_was_set_can_be_read_and_cured(service: Service) -> None:
    red = service.tenant("red")
    with service.store.transaction() as tx:
        spec = SPEC.model_dump(mode="json")
        spec["cluster"][0] |= {"price": {"usd_per_node_hour": 1e7, "spot": None}, "network_gbps": 1e-9}
        tx.jobs.update(red.job_id, spec=spec, bump=True)
    with service.client(red.user, Accept="text/html") as client:
        asked = everything(red.job_id, [red.run_id])
        statuses = {path: client.get(path).status_code for path in asked}
        assert set(statuses.values()) == {200}, statuses
        path = routes.JOB.format(job_id=red.job_id)
        assert client.get(path).json()["spec"]["cluster"][0]["price"]["usd_per_node_hour"] == 1e6
        cured = client.patch(path, json={"prices": {"default": {"usd_per_node_hour": 3.0}}})
        assert cured.status_code == 200, cured.text
        assert client.get(path).json()["spec"]["cluster"][0]["price"]["usd_per_node_hour"] == 3.0
        spec["name"] = ""
    with service.store.transaction() as tx, pytest.raises(ValidationError):
        read_spec(tx.jobs.update(red.job_id, spec=spec))  # not a matter of bounds


def _jobs(client: httpx.Client) -> list[Any]:
    found: list[Any] = client.get(routes.JOBS, params={"limit": 500}).json()["jobs"]
    return found


def test_a_straggler_beyond_the_world_is_refused_by_name(service: Service) -> None:
    """Stragglers are counted in an array as long as the highest rank, and no schema knows the world size."""
    red = service.tenant("red")
    with service.client(red.agent) as client:
        body = batch(4, straggler_rank=[0, None, 1, 0])
        answer = client.post(routes.RUN_SAMPLES.format(run_id=red.run_id), json=body)
    assert answer.status_code == 422
    assert answer.json()["field"].startswith("straggler_rank")


count = st.one_of(st.integers(1, 64), st.sampled_from([1, 2**20, 2**31 - 1]))
positive = st.one_of(st.floats(1e-3, 1e6), st.sampled_from([5e-324, 1e-30, 3e8, 1e12, 1e24, 1.7e308]))
name = st.sampled_from(["job", "é", "\U0001f600", "a" * 200, "'; DROP TABLE jobs", "%_\\"])
one_type = st.fixed_dictionaries(
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
        "cluster": one_type,
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


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=specs)
@example(body=HUGE)
def test_any_specification_is_answered_or_refused_in_a_sentence(service: Service, body: dict[str, Any]) -> None:
    with service.client(service.token("admin")) as client:
        answer = client.post(routes.JOBS, json=body)
    assert answer.status_code in (200, 201, 422), answer.text
    if answer.status_code == 422:
        assert answer.json()["field"]
        assert ". " in answer.json()["detail"] + " ", "a sentence, after which may stand how many more errors there are"
        return
    candidates = answer.json()["recommendation"]["candidates"]
    assert all(math.isfinite(candidate["step_time_s"]["high"]) for candidate in candidates)
