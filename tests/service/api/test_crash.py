"""Tests with real servers, processes and kills that acknowledged data are stored exactly once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.support.forked import Server
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.prepared import Prepared, prepare
from benchmarks.support.senders import nothing_lost_nothing_twice, progressed, sending, unhurried
from benchmarks.support.server import Server as StartedServer
from benchmarks.support.server import migrate
from tula_service.store import Store
from tula_wire import routes

Workers = tuple[Prepared, Server]
SERVICE_KILLS, KILLS = 5, 2
"""Ten in all with a worker's, most of what is started again fastest."""


def test_kills_of_the_service_lose_nothing(sqlite_url: str) -> None:
    """The whole service, which uses one SQLite file, is killed (SIGKILL) repeatedly under load."""
    prepared = prepare(sqlite_url)
    server = Server(sqlite_url)
    port = server.port
    try:
        with sending(prepared, lambda: f"http://127.0.0.1:{port}") as senders:
            for _ in range(SERVICE_KILLS):
                progressed(senders)
                server.kill()
                server = Server(sqlite_url, port=port)
            progressed(senders)
    finally:
        server.stop()
    assert sum(sender.resent for sender in senders) > 0, "the kills were felt"
    nothing_lost_nothing_twice(prepared, senders)


def test_kills_of_a_replica_lose_nothing(postgres_url: str) -> None:
    """Two replicas on one Postgres are killed (SIGKILL) in turn under load; senders continue with the other replica."""
    prepared = prepare(postgres_url)
    replicas = [Server(postgres_url), Server(postgres_url)]
    turn = itertools.count()
    try:
        with sending(prepared, lambda: replicas[next(turn) % 2].url) as senders:
            for number in range(KILLS):
                progressed(senders)
                killed = replicas[number % 2]
                killed.kill()
                progressed(senders)
                with unhurried(senders):
                    replicas[number % 2] = Server(postgres_url, port=killed.port)
            progressed(senders)
    finally:
        for replica in replicas:
            replica.stop()
    assert sum(sender.resent for sender in senders) > 0, "the kills were felt"
    nothing_lost_nothing_twice(prepared, senders)


@pytest.fixture(scope="module")
def two_workers(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Start a service of two workers, with a job; `test_writers.py` has two workers on Postgres."""
    path = tmp_path_factory.mktemp("workers") / "tula.db"
    shutil.copy(sqlite_template, path)
    database = f"sqlite:///{path}"
    prepared = prepare(database, profile_runs=24)
    with Server(database, workers=2) as server:
        yield prepared, server


def test_a_kill_of_a_worker_loses_nothing(two_workers: Workers) -> None:
    """One of two workers is killed under load; the other answers, and the supervisor replaces the killed one."""
    prepared, server = two_workers
    with sending(prepared, lambda: server.url) as senders:
        progressed(senders)
        os.kill(server.worker_ids()[0], signal.SIGKILL)
        progressed(senders)
        ends = time.monotonic() + 60
        with unhurried(senders):
            while len(server.worker_ids()) < 2:
                assert time.monotonic() < ends, f"a killed worker is replaced: {server.log()[-3000:]}"
                time.sleep(0.05)
    nothing_lost_nothing_twice(prepared, senders)


def test_crashes_of_postgres_lose_nothing() -> None:
    """`pg_ctl stop -m immediate` under load makes Postgres recover from its log, as after a power cut."""
    folder = Path(tempfile.mkdtemp(prefix="tula-pg-"))
    postgres = PostgresServer.start(folder / "data")
    try:
        database = postgres.create_database("crash")
        migrate(database)
        prepared = prepare(database)
        with Server(database) as server:
            with sending(prepared, lambda: server.url) as senders:
                for _ in range(KILLS):
                    progressed(senders)
                    postgres.restart_after("immediate")
                progressed(senders)
            assert server.process.poll() is None, "the service outlives its database"
        nothing_lost_nothing_twice(prepared, senders)
    finally:
        postgres.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_an_acknowledgement_lost_after_commit_is_harmless(database_url: str) -> None:
    """The client disconnects after the commit without reading the response, and sends again; no row is stored twice."""
    prepared = prepare(database_url)
    with Server(database_url) as server:
        begins = json.loads(server.log().splitlines()[0])["message"]
        assert begins.startswith("Dashboard: "), "the log begins with where dashboard and database are"
        assert f"/{database_url.rpartition('/')[2]}." in begins
        body = b'{"rank":0,"boot_id":"b","sequence":[0,1],"step":[0,1],"step_time_s":[0.1,0.1]}'
        head = (
            f"POST {routes.RUN_SAMPLES.format(run_id=prepared.run_id)} HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {prepared.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", server.port)) as wire:
                wire.sendall(head + body)
                ends = time.monotonic() + 30
                while len(prepared.stored()[0]) < 2:
                    assert time.monotonic() < ends, "the batch is never stored"
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {prepared.token}"}) as client:
            path = routes.RUN_SAMPLES.format(run_id=prepared.run_id)
            last = client.post(path, content=body, headers={"Content-Type": "application/json"}).json()
    assert (last["stored"], last["duplicates"]) == (0, 2)
    assert sorted(prepared.stored()[0]) == [(0, 0), (0, 1)]


def test_workers_never_give_one_run_to_two_claimants(two_workers: Workers) -> None:
    """Eight launchers claim from two workers over HTTP at once; every run of the plan is leased to only one of them."""
    prepared, server = two_workers
    claims: list[tuple[str, str]] = []
    headers = {"Authorization": f"Bearer {prepared.token}"}
    begin = threading.Barrier(8)

    def claim_all(url: str, holder: str) -> None:
        begin.wait()
        while True:  # a connection for each request, so that both workers are met
            path = url + routes.JOB_CLAIM.format(job_id=prepared.job_id)
            answer = httpx.post(path, json={"holder": holder, "lease_s": 600}, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            run = answer.json()["run"]
            if run is None:
                return
            claims.append((run["id"], holder))

    threads = [threading.Thread(target=claim_all, args=(server.url, f"h{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = Store.open(prepared.database)
    with store.reading() as tx:
        held = {(run.id, run.holder) for run in tx.runs.list(prepared.job_id, kind="profile")}
    store.close()
    assert len(claims) == len({run_id for run_id, _ in claims}) == 24
    assert len({holder for _, holder in claims}) > 1, "they competed"
    assert held == set(claims), "the database names the holder of each answer"


def test_two_hundred_agents_at_once_are_all_served(sqlite_url: str) -> None:
    """200 agents each send one batch after another for 3 s; each batch is acknowledged or gets a Retry-After."""
    prepared = prepare(sqlite_url)
    seconds, statuses = 3.0, []
    with Server(sqlite_url, max_in_flight=150) as server:
        start = threading.Barrier(200)

        def agent(rank: int) -> None:
            headers = {"Authorization": f"Bearer {prepared.token}"}
            sequence = 0
            with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
                start.wait()
                ends = time.monotonic() + seconds
                while time.monotonic() < ends:
                    body = {
                        "rank": rank,
                        "boot_id": "b",
                        "sequence": [sequence],
                        "step": [sequence],
                        "step_time_s": [0.1],
                    }
                    answer = client.post(routes.RUN_SAMPLES.format(run_id=prepared.run_id), json=body)
                    statuses.append(answer.status_code)
                    if answer.status_code == 503:
                        assert int(answer.headers["retry-after"]) >= 1
                        time.sleep(0.2)
                        continue
                    sequence += 1

        threads = [threading.Thread(target=agent, args=(rank,)) for rank in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert httpx.get(server.url + routes.READY).status_code == 200
    assert set(statuses) <= {202, 503}
    assert statuses.count(202) >= 200
    assert len(prepared.stored()[0]) == statuses.count(202)


def test_shutdown_finishes_what_was_accepted(sqlite_url: str) -> None:
    """After SIGTERM under load, every acknowledged batch is stored, and the process ends by itself."""
    prepared = prepare(sqlite_url)
    server = StartedServer(sqlite_url)
    with sending(prepared, lambda: server.url) as senders:
        progressed(senders, by=5)
        server.process.terminate()
        server.process.wait(30)
    nothing_lost_nothing_twice(prepared, senders)
    server.stop()
