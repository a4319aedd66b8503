"""Tests the interface for scripts and notebooks: one-line recommendation, waiting, self-measured runs, and handles."""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.client.test_client import profile
from tula_client import AsyncClient, AsyncJobHandle, Client, JobHandle, ProfileRun, TulaError, recommend
from tula_client._flows import jobs_named, save
from tula_wire import Configuration, Job, JobSpec

TOML = """
name = "{name}"
model = {{ name = "resnet50" }}
dataset = {{ size = 50_000 }}
cluster = {{ max_nodes = 2, price = {{ usd_per_node_hour = 2.5 }} }}
batch = {{ min_local_batch_size = 32, max_local_batch_size = 64 }}
"""


def test_one_call_recommends_from_a_model_a_mapping_or_a_file(address: str, spec: JobSpec, tmp_path: Path) -> None:
    by_model = recommend(spec, url=address, token="")
    by_mapping = recommend(spec.model_dump(mode="json"), objective="time", url=address, token="")
    assert by_model.candidates
    assert (by_mapping.job_id, by_mapping.objective) == (by_model.job_id, "time")
    path = tmp_path / "job.toml"
    path.write_text(TOML.format(name=spec.name))
    by_file = recommend(str(path), url=address, token="")
    assert by_file.job_id == recommend(path, url=address, token="").job_id != by_model.job_id
    with pytest.raises(TulaError, match="spec: epochs: ") as raised:
        recommend(spec.model_dump(mode="json") | {"epochs": -1}, url=address, token="")
    assert "\n" not in str(raised.value)


def test_waiting_ends_with_the_plan(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    with pytest.raises(TulaError, match="0 of 4 runs are done"):
        handle.wait(timeout_s=0.01, poll_s=0.001)
    profile(client, handle.id)
    assert handle.wait(timeout_s=0.0).basis == "profiled"


def test_steps_that_the_caller_measures_become_a_run(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    chosen = Configuration(num_nodes=2, local_batch_size=64)
    with client.profile_run(handle.id, chosen) as run:
        run.log_steps([0.5, 0.4], warmup=True)
        run.log_steps([0.2] * 12, compute_time_s=[0.15] * 12, peak_bytes=2**30)
    stored = client.run(run.run.id)
    assert (stored.state, stored.num_samples, stored.configuration) == ("succeeded", 14, chosen)
    assert stored.step_time_s == pytest.approx(0.2)
    samples = client.samples(handle.id, run_id=stored.id).samples
    assert [one.step for one in samples] == list(range(14))
    assert [one.warmup for one in samples] == [True] * 2 + [False] * 12
    assert next(one for one in handle.recommendation().candidates if one.configuration == chosen).profiled


def test_an_exception_within_an_own_run_fails_it_and_is_raised(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    for error, state in ((ValueError("no data"), "failed"), (KeyboardInterrupt(), "cancelled")):
        with (
            pytest.raises(type(error)),
            client.profile_run(spec.name, Configuration(num_nodes=1, local_batch_size=32)) as run,
        ):
            raise error
        assert client.run(run.run.id).state == state
    assert {one.message for one in handle.runs()} >= {"ValueError: no data"}
    with pytest.raises(RuntimeError, match="inside"):
        ProfileRun(client, handle.id, Configuration(num_nodes=1, local_batch_size=32)).log_steps([0.1])


def test_a_prediction_takes_everything_that_the_route_takes(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    (one,) = handle.predict(2, local_batch_size=64, instance_type="default", usd_per_node_hour=5.0).candidates
    (half,) = handle.predict(2, 128, usd_per_node_hour=2.5, deadline_s=1.0).candidates
    assert one.configuration == half.configuration
    assert one.cost_usd is not None
    assert half.cost_usd is not None
    assert one.cost_usd.value == pytest.approx(2 * half.cost_usd.value)
    assert half.excluded_by is not None


def test_the_async_handle_answers_as_the_other(address: str, spec: JobSpec) -> None:
    with Client(address, token="") as client:
        handle = client.handle(spec)
        profile(client, handle.id)
        answers = [handle.status(), handle.predict(2), handle.runs(), handle.rows("samples"), handle.chart()]
        best = handle.wait()

    async def ask() -> None:
        async with AsyncClient(address, token="") as client:
            other = await client.handle(spec.name)
            assert other.id == (await client.handle(spec)).id == handle.id
            found = [await other.status(), await other.predict(2), await other.runs(), await other.rows("samples")]
            assert [*found, await other.chart()] == answers
            assert (await other.wait()).chosen == best.chosen
            assert (await other.recommendation("time")).objective == "time"
            assert len(await other.to_dataframe()) == len(best.candidates)
            with pytest.raises(TulaError, match="tula jobs list"):
                await client.handle("no such job")

    asyncio.run(ask())


@pytest.mark.parametrize("kind", [Client, AsyncClient, JobHandle, AsyncJobHandle, ProfileRun])
def test_every_public_method_has_a_signature_with_its_arguments_and_answer(kind: type) -> None:
    methods = {name: value for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}
    assert methods
    for name, method in methods.items():
        signature = inspect.signature(method)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}, name
        assert signature.return_annotation is not inspect.Signature.empty, name
        assert not str(signature.return_annotation).startswith("Call["), name
        assert method.__doc__, name


@pytest.mark.parametrize(("sync", "awaited"), [(JobHandle, AsyncJobHandle), (Client, AsyncClient)])
def test_the_async_kind_has_the_methods_of_the_other(sync: type, awaited: type) -> None:
    not_awaited = {"close", "profile_run"}
    public = [{name for name, _ in inspect.getmembers(kind, callable) if name[0] != "_"} for kind in (sync, awaited)]
    assert public[0] - not_awaited == public[1] - {"aclose"}
    for name in public[0] & public[1]:
        one, other = (inspect.signature(getattr(kind, name)) for kind in (sync, awaited))
        assert list(one.parameters.values()) == list(other.parameters.values()), name


def test_methods_of_a_handle_are_those_of_its_class(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    assert JobHandle.status(handle) == handle.status()
    assert handle.status == handle.status
    for kind, name in ((JobHandle, "JobHandle.status"), (AsyncJobHandle, "AsyncJobHandle.status")):
        method = kind.status
        assert (method.__name__, method.__qualname__, method.__module__) == ("status", name, kind.__module__)
        assert get_type_hints(method) == {"return": Job}
        assert list(inspect.signature(method).parameters) == ["self"]
        assert inspect.signature(kind.wait).parameters["poll_s"].annotation is float
    assert not inspect.signature(handle.status).parameters
    for awaited in (AsyncJobHandle.status, AsyncJobHandle.wait, AsyncClient.job):
        assert inspect.iscoroutinefunction(awaited)
    assert not inspect.iscoroutinefunction(JobHandle.status)


def test_an_async_plot_is_drawn_outside_the_event_loop(
    address: str, client: Client, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = client.handle(spec)
    profile(client, handle.id)
    threads: list[int] = []

    def save_noting_the_thread(chart: dict[str, Any], path: Path) -> None:
        threads.append(threading.get_ident())
        save(chart, path)

    monkeypatch.setattr("tula_client._flows.save", save_noting_the_thread)

    async def plot() -> None:
        async with AsyncClient(address, token="") as async_client:
            other = await async_client.handle(handle.id)
            await other.plot(output=tmp_path / "awaited.svg")
            with pytest.raises(TulaError, match="must end in"):
                await other.plot(output=tmp_path / "awaited.gif")

    asyncio.run(plot())
    assert threading.get_ident() not in threads
    handle.plot(output=tmp_path / "blocking.svg")
    assert threads[-1] == threading.get_ident()
    assert (tmp_path / "awaited.svg").read_bytes() == (tmp_path / "blocking.svg").read_bytes()


def test_jobs_of_a_name_are_asked_for_until_there_are_enough(client: Client, spec: JobSpec) -> None:
    job_id = client.handle(spec).id
    page = client.jobs(search=spec.name).model_copy(update={"next_cursor": "more"})
    flow = jobs_named(spec.name, 1)
    next(flow)
    with pytest.raises(StopIteration) as ended:
        flow.send(page)
    assert [one.id for one in ended.value.value] == [job_id]
