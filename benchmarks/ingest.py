"""Measures how fast the service stores telemetry and samples sent over HTTP, compared with the database driver alone.

    python -m benchmarks.ingest [--json OUT] [--seconds 6] [--smoke]

Requests carry tokens, and commits are durable. A step value is the value of one column at one step. The requests come
from separate processes on the same machine, so the service and its clients share the cores. `raw` writes the same rows
with the database driver alone, with one commit per chunk, before and after each case; fractions are relative to the
mean of the two rates. `cpu_s_per_million` is the user and system time of the service's processes per million step
values; other work on the machine affects this time less than it affects rates. `agents` sends requests as agents do,
alternately with samples and with telemetry of ten steps; a service that handles N requests per second can serve N
agents that each send one request per second. This case is measured with one, two and four workers, and with two
replicas on one Postgres. `alone` and `beside_fits` measure an agent that sends one request after another, first alone
and then while four users constantly ask what-if questions about 924 candidates (`--only fits` measures only these
cases). `--smoke` sends a few requests of every case to one worker, which only shows that the benchmark works.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import psycopg
import sqlalchemy as sa

from benchmarks.support.load import Load, Measured, Request, drive
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.report import make_parser, print_table, write_json
from benchmarks.support.server import Server, make_token, migrate
from tula_service.domain import NewChunk, NewRun
from tula_service.store import DEFAULT_PROJECT_ID, Store
from tula_service.store.telemetry import INSERT, chunk_row
from tula_wire import Configuration, routes

COLUMNS = ("step_time_s", "loss", "grad_norm", "lr")
VARIANTS = 8
RUNS = 8
SAMPLES, AGENT_STEPS = 500, 10
SMOKE = Load(processes=1, connections=1, measure_s=0.4, requests=4)


def wide_job(name: str, instance_types: int) -> dict[str, object]:
    """Return the specification of a job with 77 candidates for each instance type."""
    types = [
        {"instance_type": f"type-{place}", "max_nodes": 64, "ranks_per_node": 8} for place in range(instance_types)
    ]
    return {
        "name": name,
        "model": {"name": "wide"},
        "dataset": {"size": 100_000},
        "cluster": types,
        "batch": {"min_local_batch_size": 1, "max_local_batch_size": 4096, "max_grad_accum_steps": 64},
    }


def series(steps: int, seed: int) -> np.ndarray:
    """Return columns that resemble those of a training run, with noise in every digit, as float64 (columns, steps)."""
    noise = np.random.default_rng(seed)
    at = np.arange(steps)
    return np.stack(
        [
            noise.lognormal(-1.5, 0.05, steps),
            3.0 * np.exp(-at / 500) + noise.normal(0, 0.05, steps) + 0.5,
            noise.lognormal(0.0, 0.4, steps),
            0.1 * 0.5 * (1 + np.cos(np.pi * at / steps)),
        ]
    )


def telemetry_requests(run_ids: list[str], steps: int) -> list[Request]:
    """Return requests with telemetry as agents send it, in columnar JSON with six significant digits."""
    requests = []
    for variant in range(VARIANTS):
        columns = ",".join(
            f'"{name}":[{",".join(f"{value:.6g}" for value in column.tolist())}]'
            for name, column in zip(COLUMNS, series(steps, variant), strict=True)
        )
        numbers = ",".join(map(str, range(steps)))
        body = f'"rank":0,"steps":[{numbers}],"columns":{{{columns}}},"sequence":@number,"boot_id":"bench-@sender"'
        path = f"/v1/runs/{run_ids[variant % len(run_ids)]}/telemetry"
        requests.append(Request(path, f"{{{body}}}".encode()))
    return requests


def sample_requests(run_ids: list[str], samples: int) -> list[Request]:
    """Return requests with batches of step samples as JSON, with five measured columns and increasing step numbers."""
    requests = []
    for variant in range(VARIANTS):
        noise = np.random.default_rng(variant)
        names = ("step_time_s", "compute_time_s", "exposed_comm_time_s", "input_time_s", "skew_s")
        columns = ",".join(f'"{name}":{noise.lognormal(-2, 0.1, samples).round(6).tolist()}' for name in names)
        numbers = ",".join(f"@number{row:03d}" for row in range(samples))
        body = f'"rank":{variant},{columns},"sequence":[{numbers}],"step":[{numbers}],"boot_id":"bench-@sender"'
        path = f"/v1/runs/{run_ids[variant % len(run_ids)]}/samples"
        requests.append(Request(path, f"{{{body}}}".encode()))
    return requests


def agent_requests(run_ids: list[str], steps: int) -> list[Request]:
    """Return requests as agents send them, alternately with samples and with telemetry; each covers `steps` steps."""
    pairs = zip(sample_requests(run_ids, steps), telemetry_requests(run_ids, steps), strict=True)
    return [request for pair in pairs for request in pair]


def prepare(database: str) -> tuple[list[str], str]:
    """Migrate the database; create a job with training runs, and a token; return run ids and authorization header."""
    migrate(database)
    store = Store.open(database)
    with store.transaction() as tx:
        job, _ = tx.jobs.create(DEFAULT_PROJECT_ID, {"name": "bench", "model": {"name": "bench"}, "objective": "knee"})
        new = NewRun("train", Configuration(num_nodes=1, ranks_per_node=VARIANTS, local_batch_size=32), "running")
        runs = [tx.runs.create(job.id, new).id for _ in range(RUNS)]
    store.close()
    return runs, f"Authorization: Bearer {make_token(database)}\r\n"


class Databases:
    """The databases of one engine, which are copies of the database that `prepare` has filled."""

    def __init__(self, folder: Path, postgres: PostgresServer | None) -> None:
        self._folder, self._postgres = folder, postgres
        self._numbers = itertools.count()
        self._template = postgres.create_database("template") if postgres else f"sqlite:///{folder}/template.db"
        self.run_ids, self.header = prepare(self._template)

    def copy(self) -> str:
        """Create another copy of the database, and return its URL for Tula."""
        name = f"copy_{next(self._numbers)}"
        if self._postgres:
            return self._postgres.create_database(name, template="template")
        shutil.copy(self._folder / "template.db", self._folder / f"{name}.db")
        return f"sqlite:///{self._folder}/{name}.db"

    def serve(self, workers: int) -> Server:
        """Start a service on another copy of the database."""
        return Server(self.copy(), workers=workers, ingest_per_minute=10**9)


def measure(databases: Databases, server: Server, load: Load, kind: str, steps: int) -> tuple[Measured, float]:
    """Send load to the service; return the measurements and the CPU seconds per request."""
    requests = KINDS[kind](databases.run_ids, steps)
    before = cpu_s(server)
    measured = drive("127.0.0.1", server.port, databases.header, requests, load)
    return measured, (cpu_s(server) - before) / max(1, measured.answered)


KINDS = {"telemetry": telemetry_requests, "samples": sample_requests, "agents": agent_requests}


@contextmanager
def questions(server: Server, header: str, instance_types: int) -> Iterator[list[int]]:
    """Simulate four users who ask what-if questions about three jobs with many candidates; yield the status codes."""
    headers = dict([header.strip().split(": ", 1)])
    statuses: list[int] = []
    ended = threading.Event()
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client, ThreadPoolExecutor(4) as users:
        jobs = []
        for number in range(3):
            made = client.post(routes.JOBS, json=wide_job(f"wide-{number}", instance_types)).raise_for_status().json()
            jobs.append(routes.JOB_PREDICTIONS.format(job_id=made["job"]["id"]))

        def ask(user: int) -> None:
            while not ended.is_set():
                statuses.append(client.get(jobs[user % len(jobs)]).status_code)

        asked = [users.submit(ask, user) for user in range(4)]
        try:
            yield statuses
        finally:
            ended.set()
        for user in asked:
            user.result()


def beside_fits(
    engine: str, databases: Databases, load: Load, figures: dict[str, float], rows: list[tuple[str, ...]]
) -> None:
    """Measure one agent alone, and again while users ask questions, each of which requires a fit."""
    single = replace(load, processes=1, connections=1)
    with databases.serve(1) as server:
        alone, _ = measure(databases, server, single, "agents", AGENT_STEPS)
        with questions(server, databases.header, 12 if load.requests is None else 1) as statuses:
            busy, _ = measure(databases, server, single, "agents", AGENT_STEPS)
    for name, measured in (("alone", alone), ("beside_fits", busy)):
        figures[f"{engine}.{name}.p50_ms"], figures[f"{engine}.{name}.p99_ms"] = measured.p50_ms, measured.p99_ms
        _show(f"{engine}, one agent, {name}", measured, measured.per_s * AGENT_STEPS, "", rows)
    figures[f"{engine}.beside_fits.ratio"] = busy.p50_ms / alone.p50_ms
    figures[f"{engine}.beside_fits.answers"] = statuses.count(200)


def replicas(databases: Databases, servers: Sequence[Server], load: Load) -> list[Measured]:
    """Send the requests of agents to several services at the same time; return the measurements."""
    requests = agent_requests(databases.run_ids, AGENT_STEPS)
    load = replace(load, processes=max(1, load.processes // len(servers)))
    with ThreadPoolExecutor() as threads:
        ports = [server.port for server in servers]
        return list(threads.map(lambda port: drive("127.0.0.1", port, databases.header, requests, load), ports))


def cpu_s(server: Server) -> float:
    """Return the user and system CPU seconds of the processes that handle requests."""
    times = [psutil.Process(worker).cpu_times() for worker in server.worker_ids()]
    return float(sum(cpu.user + cpu.system for cpu in times))


def raw_commits_per_s(databases: Databases, steps: int, seconds: float) -> float:
    """Write the service's rows with the driver alone, one statement and one commit per chunk; return commits per
    second.
    """
    database = databases.copy()
    store = Store.open(database)
    with store.reading() as tx:
        key = tx.runs.get(databases.run_ids[0]).key
    names, at = list(COLUMNS), np.arange(steps)
    rows = [chunk_row(key, NewChunk(0, "raw", 0, at, names, series(steps, variant))) for variant in range(VARIANTS)]
    done, ends = 0, time.perf_counter() + seconds
    if store.engine.dialect.name == "sqlite":
        store.close()
        connection = sqlite3.connect(sa.make_url(database).database or "", isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        while time.perf_counter() < ends:
            connection.execute("BEGIN IMMEDIATE")
            row = rows[done % VARIANTS]
            connection.execute(INSERT["sqlite"], (*row[:3], done, *row[4:], key, databases.run_ids[0]))
            connection.execute("COMMIT")
            done += 1
        connection.close()
        return done / seconds
    store.close()
    plain = sa.make_url(database).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as postgres:
        while time.perf_counter() < ends:
            row = rows[done % VARIANTS]
            postgres.execute(INSERT["postgresql"], (*row[:3], done, *row[4:]))
            postgres.commit()
            done += 1
    return done / seconds


@contextmanager
def all_databases(engines: Sequence[str]) -> Iterator[dict[str, Databases]]:
    """Yield the `Databases` of each engine by name."""
    with tempfile.TemporaryDirectory(prefix="tula-bench-") as name, ExitStack() as stack:
        folder, databases = Path(name), {}
        if "sqlite" in engines:
            databases["sqlite"] = Databases(folder, None)
        if "postgres" in engines:
            postgres = PostgresServer.start(folder / "pg")
            folder.chmod(0o755)
            stack.callback(postgres.stop)
            databases["postgres"] = Databases(folder, postgres)
        yield databases


def main() -> None:
    """Measure all cases, print a table, and write the figures."""
    parser = make_parser("ingest", __doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--engines", nargs="*", default=["sqlite", "postgres"], choices=["sqlite", "postgres"])
    parser.add_argument("--only", default="all", choices=["all", "fits"])
    options = parser.parse_args()
    load = SMOKE if options.smoke else Load(measure_s=options.seconds)
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    with all_databases(options.engines) as by_engine:
        for engine, databases in by_engine.items():
            if options.only == "all":
                _engine(engine, databases, load, 1 if options.smoke else 2, figures, rows)
            beside_fits(engine, databases, load, figures, rows)
    print_table("Ingest", ("case", "requests/s", "step values/s", "p50 ms", "p99 ms", "failed", "CPU us/request"), rows)
    for key, value in figures.items():
        print(f"{key} = {value:,.3f}")
    write_json(options.json, figures)


def _show(name: str, measured: Measured, values_per_s: float, cpu_us: str, rows: list[tuple[str, ...]]) -> None:
    cells = (f"{measured.per_s:,.0f}", f"{values_per_s:,.0f}", f"{measured.p50_ms:.2f}", f"{measured.p99_ms:.2f}")
    rows.append((name, *cells, str(measured.failed), cpu_us))
    print(" ", rows[-1], flush=True)


def _engine(
    engine: str, databases: Databases, load: Load, workers: int, figures: dict[str, float], rows: list[tuple[str, ...]]
) -> None:
    def case(server: Server, key: str, name: str, kind: str, steps: int) -> Measured:
        result, cpu_s_per_request = measure(databases, server, load, kind, steps)
        values_per_request = steps * (1 if kind in ("samples", "agents") else len(COLUMNS))
        values = result.per_s * values_per_request
        figures[f"{key}.cpu_s_per_million"] = cpu_s_per_request / values_per_request * 1e6
        _show(f"{engine}, {name}", result, values, f"{cpu_s_per_request * 1e6:,.0f}", rows)
        return result

    def agents(server: Server, key: str, name: str) -> None:
        result = case(server, f"{engine}.agents{key}", f"an agent's requests, {name}", "agents", AGENT_STEPS)
        figures[f"{engine}.agents{key}.requests_per_s"] = result.per_s
        figures[f"{engine}.agents{key}.p99_ms"] = result.p99_ms

    def raw(steps: int = 1000) -> float:
        return raw_commits_per_s(databases, steps, load.measure_s / 2)

    with databases.serve(1) as single:
        limits = [raw()]  # the driver alone between and around the cases, since the machine's speed changes
        measured = {engine: case(single, engine, "1,000 x 4, 1 worker", "telemetry", 1000)}
        limits.append(raw())
        with nullcontext(single) if workers == 1 else databases.serve(workers) as two:
            key = f"{engine}.workers_2"
            measured[key] = case(two, key, "1,000 x 4, 2 workers", "telemetry", 1000)
            agents(two, ".workers_2", "2 workers")
        limits.append(raw())
        rows += [
            (f"{engine}, driver alone, 1,000 x 4", f"{limit:,.0f}", f"{limit * 4000:,.0f}", "", "", "", "")
            for limit in limits
        ]
        for (key, result), around in zip(measured.items(), itertools.pairwise(limits), strict=True):
            figures[f"{key}.step_values_per_s"] = result.per_s * 4000
            figures[f"{key}.p50_ms"], figures[f"{key}.p99_ms"] = result.p50_ms, result.p99_ms
            figures[f"{key}.fraction_of_raw"] = 2 * result.per_s / sum(around)
        figures[f"{engine}.raw_step_values_per_s"] = sum(limits) / len(limits) * 4000
        large = case(single, f"{engine}.large", "10,000 x 4, 1 worker", "telemetry", 10_000)
        figures[f"{engine}.large.step_values_per_s"] = large.per_s * 40_000
        figures[f"{engine}.large.fraction_of_raw"] = large.per_s / raw(10_000)
        stored = case(single, f"{engine}.samples", f"samples, {SAMPLES} a request", "samples", SAMPLES)
        figures[f"{engine}.samples_per_s"] = stored.per_s * SAMPLES
        agents(single, "", "1 worker")
        if workers > 1 and engine == "postgres":
            with Server(single.database, ingest_per_minute=10**9) as other:
                both = replicas(databases, (single, other), load)
            figures[f"{engine}.agents.replicas_2.requests_per_s"] = sum(replica.per_s for replica in both)
            figures[f"{engine}.agents.replicas_2.p99_ms"] = max(replica.p99_ms for replica in both)
    if workers > 1:
        with databases.serve(4) as four:
            agents(four, ".workers_4", "4 workers")


if __name__ == "__main__":
    main()
