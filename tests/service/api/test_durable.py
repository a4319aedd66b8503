"""Tests, by the order of system calls, that the service acknowledges data only once it is on disk or in Postgres."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.forked import Server
from benchmarks.support.prepared import Prepared, prepare
from benchmarks.support.senders import Sender, progressed, sending
from tests.service.api.conftest import SPEC
from tula_wire import routes

_CALLS = "read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg,pwrite64,fsync,fdatasync"
_WHOLE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (-?\d+)")
_CHANGES = re.compile(r'"(POST|PATCH|DELETE) /v1/')


@dataclass(frozen=True)
class Call:
    """A system call as `strace` shows it, with the numbers of the trace lines at which it began and ended."""

    name: str
    arguments: str
    result: int
    began: int
    ended: int

    @property
    def file(self) -> str:
        """Return the descriptor and its file, such as `12</tmp/tula.db-wal>`."""
        return self.arguments.partition(",")[0]


def calls_of(trace: str) -> Iterator[Call]:
    """Yield the calls of all threads in the order in which they finished."""
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(trace.splitlines()):
        if found := _WHOLE.fullmatch(line.partition(" (")[0]) or _WHOLE.match(line):
            yield Call(found[2], found[3], int(found[4]), number, number)
        elif found := _BEGUN.match(line):
            begun[found[1]] = (number, found[3])
        elif (found := _ENDED.match(line)) and found[1] in begun:
            at, arguments = begun.pop(found[1])
            yield Call(found[2], arguments + found[3], int(found[4]), at, number)


def acknowledged(calls: list[Call]) -> Iterator[tuple[str, int, int]]:
    """Yield (first line, end of reading, start of the response) for each request that changes data and got a 2xx."""
    asked: dict[str, tuple[str, int]] = {}
    for call in sorted(calls, key=lambda one: one.ended):
        if call.name.startswith(("read", "recv")) and call.result > 0:
            if (found := _CHANGES.search(call.arguments)) is not None:
                asked[call.file] = (call.arguments[found.start() : found.start() + 40], call.ended)
            elif call.file in asked:  # its body, received separately
                asked[call.file] = (asked[call.file][0], call.ended)
        elif '"HTTP/1.1 2' in call.arguments and call.file in asked:
            yield (*asked.pop(call.file), call.began)


def test_an_answer_is_sent_after_the_write_is_durable(database_url: str, tmp_path: Path) -> None:
    """Before a 2xx, the service has written and synced SQLite's log, or Postgres has confirmed the commit."""
    prepared = prepare(database_url)
    calls = list(calls_of(traced(prepared, tmp_path)))
    answers = list(acknowledged(calls))
    assert len({what for what, *_ in answers}) >= 5, "samples, telemetry, a job, a run and its state"
    assert len(answers) >= 40
    kept = confirmed(calls) if "psycopg" in database_url else synchronised(calls)
    for what, asked, answered in answers:
        assert any(asked < began and ended < answered for began, ended in kept), f"{what} was answered too early"


def synchronised(calls: list[Call]) -> list[tuple[int, int]]:
    """Return, for each sync of SQLite's log, the start of the last write before the sync and the end of the sync."""
    logged = [call for call in calls if call.name == "pwrite64" and "-wal>" in call.file]
    synced = [call for call in calls if call.name in ("fsync", "fdatasync") and "-wal>" in call.file]
    before = [(max((one.began for one in logged if one.ended < sync.began), default=-1), sync) for sync in synced]
    return [(began, sync.ended) for began, sync in before if sync.result == 0]


def confirmed(calls: list[Call]) -> list[tuple[int, int]]:
    """Return the start and end of each read of a COMMIT, which Postgres sends once the transaction is durable."""
    read = [call for call in calls if call.name.startswith(("read", "recv")) and "COMMIT\\0" in call.arguments]
    return [(call.began, call.ended) for call in read]


def traced(prepared: Prepared, folder: Path) -> str:
    """Return the trace of a service that receives changes of every kind, one at a time and many at once."""
    trace = folder / "trace.txt"
    python = folder / "python"  # the service's own process stays the one that is started: -D traces from beside
    python.write_text(
        f'#!/bin/sh\nexec strace -D -f --seccomp-bpf -y -s 4096 -e trace={_CALLS} -o {trace} {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    with Server(prepared.database, python=str(python)) as server:
        one = Sender(prepared, rank=100)
        with one.client() as client:
            for _ in range(4):
                assert one.samples(client, server.url)
                assert one.chunk(client, server.url)
                one.acknowledged += 1
            job = client.post(server.url + routes.JOBS, json=SPEC.model_dump(mode="json"))
            job_id = job.json()["job"]["id"]
            claimed = client.post(server.url + routes.JOB_CLAIM.format(job_id=job_id), json={"holder": "h"})
            run = routes.RUN.format(run_id=claimed.json()["run"]["id"])
            moved = client.patch(server.url + run, json={"state": "running", "holder": "h"})
            gone = client.delete(server.url + routes.JOB.format(job_id=job_id))
            assert [each.status_code for each in (job, claimed, moved, gone)] == [201, 200, 200, 204]
        with sending(prepared, lambda: server.url) as senders:
            progressed(senders, by=5)
    return trace.read_text(encoding="utf-8")
