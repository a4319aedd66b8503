"""Tests the clients with the real service, over a socket."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from tula_client import (
    NO_RETRY,
    AsyncClient,
    Client,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    RetryPolicy,
    ServiceUnavailableError,
    ServiceUnreachableError,
    TulaError,
    UnexpectedAnswerError,
)
from tula_client._calls import calls
from tula_client._flows import TABLES
from tula_client._request import Answer
from tula_client._request import steps as send_steps
from tula_wire import (
    Candidate,
    ClaimRequest,
    Configuration,
    Event,
    JobPatch,
    JobSpec,
    LedgerEntry,
    Price,
    ProjectCreate,
    Run,
    RunCreate,
    RunPatch,
    SampleBatch,
    ScalingPatch,
    StepSample,
    TelemetryChunk,
    TokenCreate,
)

boots = (f"boot-{number}" for number in itertools.count())


def steps(run: Run, count: int = 12) -> SampleBatch:
    """Return steps that follow the additive model, so that a fit finds its parameters."""
    chosen = run.configuration
    base = 0.02 + 0.001 * chosen.local_batch_size + 0.08 * (1 - 1 / chosen.world_size)
    return SampleBatch(
        rank=0,
        boot_id=next(boots),
        sequence=list(range(count)),
        step=list(range(count)),
        step_time_s=[base + 0.0003 * (i % 3) for i in range(count)],
    )


def profile(client: Client, job_id: str) -> int:
    """Run the whole plan of a job with invented step times; return the number of runs."""
    for done in itertools.count():
        claimed = client.claim(job_id, ClaimRequest(holder="test"))
        if claimed.run is None:
            return done
        client.patch_run(claimed.run.id, RunPatch(state="running", holder="test"))
        assert client.send_samples(claimed.run.id, steps(claimed.run)).stored == 12
        client.patch_run(claimed.run.id, RunPatch(state="succeeded", holder="test"))
    raise AssertionError


def test_a_job_goes_from_its_spec_to_a_recommendation_that_rests_on_its_steps(client: Client, spec: JobSpec) -> None:
    created = client.register(spec)
    assert created.recommendation.basis in ("prior", "transfer")
    assert profile(client, created.job.id) >= 3
    answer = client.recommendation(created.job.id, objective="time")
    assert answer.basis == "profiled"
    assert answer.chosen is not None
    least = min((one for one in answer.candidates if one.excluded_by is None), key=lambda one: one.total_time_s.value)
    assert answer.chosen.configuration == least.configuration
    true_s = 0.02 + 0.001 * 128 + 0.08 * (1 - 1 / 2)
    between = client.predictions(created.job.id, num_nodes=2, global_batch_size=256).candidates[0]
    assert between.step_time_s.value == pytest.approx(true_s, rel=0.25)


def test_the_same_key_finds_the_same_job(client: Client, spec: JobSpec) -> None:
    first = client.register(spec, idempotency_key=spec.name).job
    assert client.register(spec, idempotency_key=spec.name).job.id == first.id


def test_jobs_are_listed_in_pages_and_found_by_name(client: Client, spec: JobSpec) -> None:
    ids = {client.register(spec.model_copy(update={"name": f"{spec.name} {n}"})).job.id for n in range(3)}
    page = client.jobs(search=spec.name, limit=2)
    rest = client.jobs(search=spec.name, limit=2, cursor=page.next_cursor)
    assert {job.id for job in page.jobs + rest.jobs} == ids
    assert rest.next_cursor is None
    assert client.handle(f"{spec.name} 1").id in ids
    with pytest.raises(TulaError, match="tula jobs list"):
        client.handle(f"{spec.name} 7")


def test_objective_prices_and_archive_change_by_patch(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    changed = client.patch_job(job.id, JobPatch(objective="cost", prices={"default": Price(usd_per_node_hour=9.0)}))
    assert changed.objective == "cost"
    assert changed.spec.cluster[0].price.usd_per_node_hour == 9.0
    assert client.archive_job(job.id).state == "archived"
    assert job.id not in {one.id for one in client.jobs(search=spec.name).jobs}
    assert job.id in {one.id for one in client.jobs(search=spec.name, archived=True).jobs}


def test_a_deleted_job_is_gone(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    client.delete_job(job.id)
    with pytest.raises(NotFoundError):
        client.job(job.id)


def test_a_resend_of_samples_and_telemetry_stores_nothing_twice(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    chosen = Configuration(num_nodes=1, local_batch_size=64)
    run = client.create_run(job.id, RunCreate(kind="profile", configuration=chosen, holder="me"))
    batch = steps(run)
    assert client.send_samples(run.id, batch).stored == 12
    again = client.send_samples(run.id, batch)
    assert (again.stored, again.duplicates) == (0, 12)
    page = client.samples(run.job_id, run_id=run.id, warmup=batch.warmup, limit=5)
    assert [one.sequence for one in page.samples] == list(batch.sequence[:5])
    rest = client.samples(run.job_id, run_id=run.id, cursor=page.next_cursor)
    assert (len(rest.samples), rest.next_cursor) == (7, None)
    assert not client.samples(run.job_id, run_id=run.id, warmup=not batch.warmup).samples
    chunk = TelemetryChunk(boot_id="b", sequence=0, steps=[0, 1, 2], columns={"loss": [2.0, None, 0.5]})
    assert client.send_telemetry(run.id, chunk).stored > 0
    assert client.send_telemetry(run.id, chunk).duplicate
    series = client.series(run.id, "loss", first_step=0, last_step=2)
    assert (series.steps, series.values) == ([0, 1, 2], [2.0, None, 0.5])


def test_only_the_holder_moves_a_run(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    run = client.claim(job.id, ClaimRequest(holder="me")).run
    assert run is not None
    with pytest.raises(ConflictError, match="held by"):
        client.patch_run(run.id, RunPatch(state="running", holder="another"))
    assert client.run(run.id).state == "claimed"
    assert run.id in {one.id for one in client.runs(job.id, kind="profile").runs}


def test_thresholds_come_once_and_then_by_etag(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    first = client.scaling(job.id)
    assert first.thresholds is not None
    assert first.etag
    assert client.scaling(job.id, etag=first.etag).thresholds is None


def test_numbers_are_set_for_one_policy(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    answered = client.patch_scaling(job.id, ScalingPatch(static_scale=1.5), policy="static")
    assert (answered.policy, answered.static_scale) == ("static", 1.5)
    assert client.scaling(job.id, policy="static").thresholds == answered
    free = client.scaling(job.id, policy="gain").thresholds
    assert free is not None
    assert (free.policy, free.static_scale) == ("gain", None)


def test_the_ledger_keeps_what_was_said(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    profile(client, job.id)
    client.recommendation(job.id)
    assert client.ledger(job.id).entries
    assert len(client.ledger(job.id, limit=1).entries) == 1


def test_charts_are_vega_lite(client: Client, spec: JobSpec) -> None:
    job = client.register(spec).job
    profile(client, job.id)
    assert "vega-lite" in client.chart(job.id, "tradeoff")["$schema"]
    with pytest.raises(NotFoundError):
        client.chart(job.id, "no-such-chart")
    run = client.runs(job.id).runs[0]
    assert "vega-lite" in client.run_chart(run.id, "step_time")["$schema"]


def test_a_handle_gives_rows_frames_and_plots(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    profile(client, handle.id)
    frame = handle.to_dataframe()
    assert set(frame["num_nodes"]) == {1, 2, 4}
    assert frame["chosen"].sum() == 1
    assert (frame["step_time_s_low"] <= frame["step_time_s"]).all()
    assert len(handle.to_dataframe("runs")) == len(handle.runs())
    assert handle.plot().to_dict()["$schema"] == handle.chart()["$schema"]
    assert handle.predict(num_nodes=2).candidates
    assert handle.status().id in repr(handle)
    with pytest.raises(TulaError, match="candidates, runs, ledger"):
        handle.rows("steps")  # type: ignore[arg-type]


def test_every_table_has_the_columns_of_the_wire_and_every_row(client: Client, spec: JobSpec) -> None:
    handle = client.handle(spec)
    profile(client, handle.id)
    chosen = Configuration(num_nodes=1, local_batch_size=64)
    run = client.create_run(handle.id, RunCreate(kind="train", configuration=chosen, holder="me"))
    losses = [1.0 / (1 + step) for step in range(25_000)]  # more than one answer holds
    for sequence, first in enumerate(range(0, 25_000, 10_000)):
        values: list[float | None] = [*losses[first : first + 10_000]]
        chunk_steps = list(range(first, first + len(values)))
        client.send_telemetry(
            run.id, TelemetryChunk(boot_id="b", sequence=sequence, steps=chunk_steps, columns={"loss": values})
        )
    tables = {table: handle.rows(table) for table in TABLES}
    for table, model in (("candidates", Candidate), ("runs", Run), ("ledger", LedgerEntry), ("events", Event)):
        plain = {
            name for name in model.model_fields if name not in ("configuration", "instruction", "machine", "terms")
        }
        assert plain <= set(tables[table][0])  # type: ignore[index]
        assert len({tuple(row) for row in tables[table]}) == 1  # type: ignore[index]
    assert {"num_nodes", "world_size", "profiling_warmup_steps"} <= set(tables["runs"][0])
    assert set(tables["samples"][0]) == set(StepSample.model_fields)
    assert len(tables["samples"]) == sum(one.num_samples for one in handle.runs())
    points = [row for row in tables["telemetry"] if row["run_id"] == run.id]
    assert {row["column"] for row in points} == {"loss"}
    assert [row["step"] for row in points] == list(range(25_000))
    assert [row["value"] for row in points] == pytest.approx(losses)
    assert {row["column"] for row in tables["telemetry"]} == {"loss", "step_time_s"}
    assert [row["id"] for row in tables["events"]] == [event.id for event in client.past_events(handle.id)]


def test_projects_and_tokens_are_an_administrators(client: Client, spec: JobSpec) -> None:
    name = spec.name
    assert client.create_project(ProjectCreate(name=name)).name in {one.name for one in client.projects().projects}
    assert client.tokens().tokens == []
    assert client.health()
    assert client.ready()


def test_a_bad_field_is_named(client: Client, spec: JobSpec) -> None:
    wrong = spec.model_copy(update={"epochs": -1.0})
    with pytest.raises(InvalidInputError, match="epochs") as caught:
        client.register(wrong)
    assert caught.value.field == "epochs"
    assert caught.value.status == 422


def test_an_unknown_job_is_not_found(client: Client) -> None:
    with pytest.raises(NotFoundError):
        client.job("no/such job?")


def test_the_async_client_does_the_same(address: str, spec: JobSpec) -> None:
    async def work() -> None:
        async with AsyncClient(address, token="") as client:
            created = await client.register(spec)
            claimed = await client.claim(created.job.id, ClaimRequest(holder="test"))
            assert claimed.run is not None
            assert (await client.send_samples(claimed.run.id, steps(claimed.run))).stored == 12
            await client.patch_run(claimed.run.id, RunPatch(state="succeeded", holder="test"))
            assert (await client.run(claimed.run.id)).num_samples == 12
            assert (await client.recommendation(created.job.id)).candidates
            with pytest.raises(NotFoundError):
                await client.job("nothing")

    asyncio.run(work())


def test_events_of_a_job_stream_over_a_socket(address: str, spec: JobSpec) -> None:
    with Client(address, token="") as client:
        job = client.register(spec).job
        profile(client, job.id)
        seen = list(itertools.islice(client.events(job.id, last_id=0), 5))
        assert [event.id for event in seen] == sorted({event.id for event in seen})
        assert {event.job_id for event in seen} == {job.id}
        after = next(client.events(job.id, last_id=seen[2].id))
        assert after.id == seen[3].id


def test_events_stream_to_the_async_client_too(address: str, spec: JobSpec) -> None:
    async def first() -> int:
        async with AsyncClient(address, token="") as client:
            job = (await client.register(spec)).job
            stream = client.events(job.id, last_id=0)
            event = await anext(stream)
            await stream.aclose()
            return event.id

    assert asyncio.run(first()) > 0


def test_an_unreachable_service_is_one_sentence_with_the_remedy() -> None:
    with (
        Client("http://127.0.0.1:9", retry=NO_RETRY) as client,
        pytest.raises(ServiceUnreachableError, match="tula serve"),
    ):
        client.jobs()


def test_an_unreachable_service_behind_a_proxy_names_the_proxy_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    with (
        Client("http://127.0.0.1:8321", retry=NO_RETRY) as client,
        pytest.raises(ServiceUnreachableError, match=r"proxy http://127\.0\.0\.1:9\).*127\.0\.0\.1 to NO_PROXY"),
    ):
        client.jobs()


def test_a_busy_service_is_asked_again_as_late_as_it_wants() -> None:
    todo = send_steps(calls.health(), RetryPolicy(), "http://service")
    request = next(todo)
    wait = todo.send(Answer(503, {"retry-after": "2"}, b""))
    assert isinstance(wait, float)
    assert wait >= 2.0
    assert next(todo) == request
    with pytest.raises(StopIteration) as end:
        todo.send(Answer(200, {}, b'{"status": "ok"}'))
    assert end.value.value == {"status": "ok"}


def test_a_claim_whose_answer_was_lost_is_not_repeated() -> None:
    sent = []

    def lose(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        raise httpx.ReadTimeout("too late", request=request)

    with Client(transport=httpx.MockTransport(lose), retry=RetryPolicy(base_s=0.001)) as client:
        with pytest.raises(ServiceUnreachableError):
            client.claim("j", ClaimRequest(holder="me"))
        assert len(sent) == 1
        with pytest.raises(ServiceUnreachableError):
            client.job("j")
        assert len(sent) == 1 + RetryPolicy().max_attempts


def test_an_unavailable_service_stays_a_problem_after_the_retries() -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(503))
    with Client(transport=transport, retry=NO_RETRY) as client, pytest.raises(ServiceUnavailableError):
        client.jobs()


def test_an_endless_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_client._client.MAX_ANSWER_BYTES", 1000)
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=b"x" * 2000))
    with Client(transport=transport) as client, pytest.raises(UnexpectedAnswerError, match="longer"):
        client.jobs()


@pytest.mark.parametrize("url", ["ftp://host", "127.0.0.1:8321", "http://", "http://host:port", "http://host:99999"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(TulaError, match="url: "):
        Client(url)


def test_address_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_URL", "http://tula.example:9000/")
    monkeypatch.setenv("TULA_TOKEN", " secret\n")
    seen = []
    transport = httpx.MockTransport(lambda request: (seen.append(request), httpx.Response(200, json={}))[1])
    with Client(transport=transport) as client:
        client.health()
    assert str(seen[0].url) == "http://tula.example:9000/healthz"
    assert seen[0].headers["authorization"] == "Bearer secret"
    monkeypatch.setenv("TULA_TOKEN", "two words")
    with pytest.raises(TulaError, match="TULA_TOKEN"):
        Client()


def test_a_token_is_created_and_revoked(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> None:
    from benchmarks.support.server import migrate
    from tests.support.inprocess import InProcess
    from tula_service.app import create_app
    from tula_service.settings import Settings

    database = str(tmp_path_factory.mktemp("tokens") / "tula.db")
    migrate(database)
    app = create_app(Settings(database=database), token_cache_s=0.0)
    road = InProcess(app)
    with Client("http://localhost", token="", transport=road) as open_client:
        created = open_client.create_token(TokenCreate(name="admin", scope="admin"))
    with Client("http://localhost", token=created.secret, transport=road) as admin:
        other = admin.create_token(TokenCreate(name="other", scope="admin"))
        assert {token.name for token in admin.tokens().tokens} == {"admin", "other"}
        admin.revoke_token(other.token.id)
        admin.register(spec)
    with (
        Client("http://localhost", token=other.secret, transport=road) as revoked,
        pytest.raises(TulaError, match="oken"),
    ):
        revoked.jobs()
    road.shut_down()
