"""Postgres under writers: no deadlock, no hang, nothing acknowledged lost, and a stuck writer is found and freed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psycopg
import pytest
import sqlalchemy as sa

from benchmarks.support.forked import Server
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.prepared import Prepared, prepare
from benchmarks.support.senders import nothing_lost_nothing_twice, progressed, sending
from benchmarks.support.server import migrate
from tests.service.api.conftest import SPEC, Service
from tests.service.api.test_ingest import batch, chunk
from tests.service.store.examples import a_job, a_run
from tula_service.domain import NewChunk, RunRecord
from tula_service.errors import NotFound, StoreUnavailable
from tula_service.store import Store, telemetry_writer
from tula_service.store.telemetry import chunk_row
from tula_service.store.telemetry_writer import TelemetryWriter
from tula_wire import MAX_STEPS, routes

SECONDS = float(os.environ.get("TULA_WRITERS_S", "2"))
WAYS = ("unix", "tcp")
WRITERS = 8


@pytest.fixture
def alone() -> Iterator[PostgresServer]:
    """A server whose log no other test writes."""
    folder = Path(tempfile.mkdtemp(prefix="tula-pg-"))
    postgres = PostgresServer.start(folder / "data")
    yield postgres
    postgres.stop()
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Traffic:
    """Requests that meet on the rows of jobs and runs, and what failed of them."""

    server: Server
    prepared: Prepared
    ends: float
    failed: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def repeat(self, work: Callable[[httpx.Client, int], None]) -> None:
        """Do this work until the end."""
        headers = {"Authorization": f"Bearer {self.prepared.token}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=60) as client:
            while time.monotonic() < self.ends:
                work(client, self.done[work.__name__])
                self.done[work.__name__] += 1

    def noted(self, answer: httpx.Response) -> httpx.Response:
        """The answer; a 5xx is kept."""
        if answer.status_code >= 500:
            self.failed.append(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")
        return answer

    def claim(self, client: httpx.Client, number: int) -> None:
        path = routes.JOB_CLAIM.format(job_id=self.prepared.job_id)
        self.noted(client.post(path, json={"holder": f"h{number}", "lease_s": 5}))

    def change(self, client: httpx.Client, _: int) -> None:
        self.noted(client.patch(routes.RUN.format(run_id=self.prepared.run_id), json={"state": "running"}))

    def come_and_go(self, client: httpx.Client, number: int) -> None:
        """Register a job, and delete it while two processes send for it."""
        spec = SPEC.model_dump(mode="json") | {"name": f"job {number}"}
        made = self.noted(client.post(routes.JOBS, json=spec)).json()
        run_id = made["runs"][0]["id"]
        sends = [threading.Thread(target=self.send, args=(client, run_id, boot)) for boot in ("a", "b")]
        for one in sends:
            one.start()
        self.noted(client.delete(routes.JOB.format(job_id=made["job"]["id"])))
        for one in sends:
            one.join()

    def send(self, client: httpx.Client, run_id: str, boot: str) -> None:
        for number in range(5):
            samples = batch(4, boot_id=boot, sequence=list(range(4 * number, 4 * number + 4)))
            self.noted(client.post(routes.RUN_SAMPLES.format(run_id=run_id), json=samples))
            telemetry = chunk(boot_id=boot, sequence=number)
            self.noted(client.post(routes.RUN_TELEMETRY.format(run_id=run_id), json=telemetry))


@pytest.mark.parametrize("way", WAYS if "TULA_WRITERS_S" in os.environ else WAYS[:1])
def test_writers_claims_changes_and_deletions_meet_without_deadlock(alone: PostgresServer, way: str) -> None:
    """Two workers; what was acknowledged is there, nothing fails with 5xx, and the server's log names no deadlock."""
    database = alone.create_database("writers")
    migrate(database)
    prepared = prepare(database, profile_runs=50)
    with (
        over_tcp(database) as tcp,
        Server(tcp if way == "tcp" else database, workers=2) as server,
        sending(prepared, lambda: server.url, WRITERS) as senders,
    ):
        traffic = Traffic(server, prepared, time.monotonic() + SECONDS)
        kinds = (traffic.claim, traffic.change, traffic.come_and_go)
        threads = [threading.Thread(target=traffic.repeat, args=(work,)) for work in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        progressed(senders, by=1)
    assert traffic.failed == []
    assert all(traffic.done[work.__name__] > 0 for work in kinds), traffic.done
    assert sum(sender.resent for sender in senders) == 0
    nothing_lost_nothing_twice(prepared, senders)
    logs = [log.read_text() for log in alone.folder.glob("*log*") if log.is_file()]
    assert logs
    assert not any("deadlock detected" in log for log in logs)


@contextmanager
def over_tcp(url: str) -> Iterator[str]:
    """The same database through a TCP port, which carries bytes to and from its Unix socket."""
    folder = sa.make_url(url).query["host"]
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(f"{folder}/.s.PGSQL.5432")
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port = listener.getsockname()[1]
    yield sa.make_url(url).set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
    listener.close()


def largest(sequence: int) -> NewChunk:
    """As many values as a chunk may hold, which do not compress: 5 MB."""
    values = np.random.default_rng(sequence).normal(size=(64, MAX_STEPS))
    return NewChunk(0, "boot", sequence, np.arange(MAX_STEPS), [f"c{number}" for number in range(64)], values)


@pytest.mark.parametrize("transport", WAYS)
def test_a_group_of_the_largest_chunks_is_stored(
    postgres_url: str, open_store: Callable[..., Store], transport: str
) -> None:
    """A pipeline of statements hung for ever on a few megabytes."""
    with over_tcp(postgres_url) as tcp:
        store = open_store(tcp if transport == "tcp" else postgres_url)
        run = a_run(store, a_job(store).id)
        rows = [chunk_row(run.key, largest(number)) for number in range(8)]
        writer = TelemetryWriter(store)

        async def at_once() -> list[bool]:
            return await asyncio.gather(*(writer.add(run.id, row) for row in rows))

        assert asyncio.run(asyncio.wait_for(at_once(), 60)) == [True] * len(rows)
        writer.close()
        with store.reading() as tx:
            assert tx.telemetry.read(run.key, "c63")[1].size == MAX_STEPS
        store.close()


def signal_backends(url: str, number: signal.Signals) -> None:
    """Send a signal to all processes of the server that now serve this database."""
    found = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        for (pid,) in connection.execute(found, (sa.make_url(url).database,)).fetchall():
            os.kill(pid, number)


def test_a_writer_that_waits_for_ever_is_found_and_freed(
    postgres_url: str, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness names it, its connection is cut off, and the next chunk is stored."""
    monkeypatch.setattr(telemetry_writer, "STUCK_S", 1.0)
    store = open_store(postgres_url)
    run = a_run(store, a_job(store).id)
    writer = TelemetryWriter(store)

    def row(sequence: int) -> Any:
        return chunk_row(run.key, NewChunk(0, "b", sequence, np.arange(3), ["loss"], np.ones((1, 3))))

    async def stuck() -> None:
        assert await writer.add(run.id, row(0))
        writer.check()
        signal_backends(postgres_url, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(writer.add(run.id, row(1)))
            await asyncio.sleep(1.2)  # the claim is about time itself
            assert not waiting.done()
            with pytest.raises(StoreUnavailable, match="writer of telemetry"):
                writer.check()
            with pytest.raises(StoreUnavailable):
                await waiting
            assert await writer.add(run.id, row(2))
            writer.check()
        finally:
            signal_backends(postgres_url, signal.SIGCONT)

    asyncio.run(asyncio.wait_for(stuck(), 30))
    writer.close()


def test_a_stuck_writer_is_not_freed_of_a_connection_that_another_thread_now_has(
    postgres_url: str, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that the database refuses is stored chunk by chunk, each with a connection of the pool."""
    store = open_store(postgres_url, connections=1)
    run, gone = a_run(store, a_job(store).id), a_run(store, a_job(store).id)
    with store.transaction() as tx:
        tx.connection.exec_driver_sql(f"DELETE FROM runs WHERE key = {gone.key}")
    writer, connect = TelemetryWriter(store), store.engine.connect
    again, go_on = threading.Event(), threading.Event()
    connects: list[str] = []

    def waits_the_second_time() -> sa.Connection:
        connects.append(threading.current_thread().name)
        if connects == ["tula-telemetry"] * 2:
            again.set()
            assert go_on.wait(10)
        return connect()

    def use_it() -> int | None:
        assert again.wait(10)
        try:
            with store.transaction() as tx:
                with pytest.raises(StoreUnavailable, match="writer of telemetry"):
                    writer.check()
                found: int | None = tx.connection.exec_driver_sql("SELECT 1").scalar()
                return found
        finally:
            go_on.set()

    def add(of: RunRecord) -> Coroutine[Any, Any, bool]:
        return writer.add(of.id, chunk_row(of.key, NewChunk(0, "b", 0, np.arange(3), ["loss"], np.ones((1, 3)))))

    async def both() -> list[Any]:
        stored = asyncio.gather(add(run), add(gone), return_exceptions=True)
        await asyncio.sleep(0)
        monkeypatch.setattr(telemetry_writer, "STUCK_S", 0.0)
        assert await asyncio.to_thread(use_it) == 1
        return await stored

    monkeypatch.setattr(store.engine, "connect", waits_the_second_time)
    stored, refused = asyncio.run(asyncio.wait_for(both(), 30))
    assert stored is True
    assert isinstance(refused, NotFound)
    writer.close()


def test_rows_that_refer_to_a_locked_job_are_written(postgres_url: str, open_store: Callable[..., Store]) -> None:
    """Else who holds the job waits for the lock of its events, and who writes an event for the job: a deadlock."""
    store = open_store(postgres_url)
    job = a_job(store)
    with store.transaction() as planning, store.transaction() as tx:
        planning.jobs.lock(job.id)
        tx.connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
        assert tx.events.append(job.id, "samples") > 0


def test_connections_to_postgres_wait_for_nothing_for_ever(postgres_url: str, open_store: Callable[..., Store]) -> None:
    with open_store(postgres_url).transaction() as tx:
        for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
            assert tx.connection.exec_driver_sql(f"SHOW {name}").scalar() == "1min"


def test_an_announcement_that_fails_leaves_its_chunk_acknowledged(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = service.tenant("red")

    def fails(*_: object, **__: object) -> int:
        raise sa.exc.OperationalError("INSERT", {}, Exception("deadlock detected"))

    monkeypatch.setattr("tula_service.store.events.Events.append", fails)
    with service.client(red.agent) as client:
        answer = client.post(routes.RUN_TELEMETRY.format(run_id=red.run_id), json=chunk())
    assert (answer.status_code, answer.json()["stored"]) == (202, 10)


def test_a_stuck_writer_and_a_full_disk_make_the_service_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service.client() as client:
        assert client.get(routes.READY).status_code == 200
        with monkeypatch.context() as full:
            full.setattr("tula_service.store.database.LEAST_FREE_BYTES", 2**62)
            assert "full" in client.get(routes.READY).json()["detail"]

        def stuck(_: object) -> None:
            raise StoreUnavailable("The writer of telemetry waits.")

        monkeypatch.setattr(TelemetryWriter, "check", stuck)
        assert client.get(routes.READY).status_code == 503


def test_a_full_disk_is_said_to_be_full(sqlite_url: str, open_store: Callable[..., Store]) -> None:
    def fill() -> None:
        with open_store(sqlite_url).transaction() as tx:
            pages = tx.connection.exec_driver_sql("PRAGMA page_count").scalar()
            tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            for number in range(10_000):
                tx.projects.create(f"{number}" + "x" * 200)

    with pytest.raises(StoreUnavailable, match="full"):
        fill()


def test_a_new_database_is_its_owners_alone(tmp_path: Path, open_store: Callable[..., Store]) -> None:
    path = tmp_path / "tula.db"
    migrate(str(path))
    store = open_store(str(path))
    with store.reading():
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert {"tula.db", "tula.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}
