"""Tests that concurrent writers on Postgres cause no deadlock, hang or loss, and that a full disk is reported."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from benchmarks.support.forked import Server
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.prepared import Prepared, prepare
from benchmarks.support.senders import nothing_lost_nothing_twice, progressed, sending
from benchmarks.support.server import migrate
from tests.service.api.conftest import SPEC, Service
from tests.service.api.test_ingest import batch, chunk
from tests.service.store.examples import a_job
from tula_service.errors import StoreUnavailable
from tula_service.store import Store
from tula_wire import routes

SECONDS = float(os.environ.get("TULA_WRITERS_S", "2"))
WAYS = ("unix", "tcp")
WRITERS = 8


@pytest.fixture
def alone() -> Iterator[PostgresServer]:
    """Start a Postgres server with a log to which no other test writes."""
    folder = Path(tempfile.mkdtemp(prefix="tula-pg-"))
    postgres = PostgresServer.start(folder / "data")
    yield postgres
    postgres.stop()
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Traffic:
    """Requests that change the same rows of jobs and runs concurrently, and the failures among them."""

    server: Server
    prepared: Prepared
    ends: float
    failed: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def repeat(self, work: Callable[[httpx.Client, int], None]) -> None:
        """Repeat this work until the end of the test."""
        headers = {"Authorization": f"Bearer {self.prepared.token}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=60) as client:
            while time.monotonic() < self.ends:
                work(client, self.done[work.__name__])
                self.done[work.__name__] += 1

    def noted(self, answer: httpx.Response) -> httpx.Response:
        """Return the response, and record it if it is a 5xx."""
        if answer.status_code >= 500:
            self.failed.append(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text}")
        return answer

    def claim(self, client: httpx.Client, number: int) -> None:
        path = routes.JOB_CLAIM.format(job_id=self.prepared.job_id)
        self.noted(client.post(path, json={"holder": f"h{number}", "lease_s": 5}))

    def change(self, client: httpx.Client, _: int) -> None:
        self.noted(client.patch(routes.RUN.format(run_id=self.prepared.run_id), json={"state": "running"}))

    def come_and_go(self, client: httpx.Client, number: int) -> None:
        """Register a job, and delete it while two processes send data for it."""
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
    """With two workers, acknowledged data are stored, no response is a 5xx, and the server logs no deadlock."""
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
    """Yield the URL of the same database through a TCP port that forwards bytes to its Unix socket."""
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


def test_rows_that_refer_to_a_locked_job_are_written(postgres_url: str, open_store: Callable[..., Store]) -> None:
    """Otherwise the holder of the job's lock and a writer of its events would wait for each other."""
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


def test_a_full_disk_makes_the_service_not_ready(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_service.api.operations.READY_CHECK_S", 0.0)
    with service.client() as client:
        assert client.get(routes.READY).status_code == 200
        monkeypatch.setattr("tula_service.store.database.LEAST_FREE_BYTES", 2**62)
        assert "full" in client.get(routes.READY).json()["detail"]


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
