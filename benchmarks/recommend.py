"""Measures the latency of recommendations, lists and pages over HTTP, with 10,000 jobs and 1,000,000 samples stored.

    python -m benchmarks.recommend [--json OUT] [--jobs 10000] [--samples 1000000] [--smoke]

`cached` repeats requests about unchanged data; `fresh` sends one sample before each request, so that every request
needs a new fit. Each latency is measured with 100 jobs and with all jobs in the database; growth is the ratio of the
two p99 latencies. The keys of the figures contain the sizes of a full run. `--smoke` stores a few jobs; its figures
only show that the benchmark works.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import sqlalchemy as sa

from benchmarks.support.report import make_parser, percentile, print_table, write_json
from benchmarks.support.server import Server, make_token, migrate
from tula_service.domain import NewRun
from tula_service.store import DEFAULT_PROJECT_ID, Store, tables
from tula_wire import Configuration, JobSpec, SampleBatch, routes

FEW = 100
FLAT = ("cached", "fresh", "list", "job page", "front page")
"""Requests whose latency must not grow with the number of jobs; not a search, for which 100 jobs do not fill a page."""

RUNS = 5
COPIED_AT_ONCE = 500
INSERT_SAMPLES = (
    "INSERT INTO step_samples (source_key, sequence, run_key, rank, step, warmup, step_time_s)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
CONFIGURATIONS = [
    Configuration(num_nodes=nodes, ranks_per_node=4, local_batch_size=batch)
    for nodes, batch in ((1, 32), (1, 256), (8, 32), (8, 256), (4, 128))
]


def spec(name: str) -> JobSpec:
    """Return the specification of a job of ordinary size, with eight nodes, prices and a few hundred candidates."""
    return JobSpec.model_validate(
        {
            "name": name,
            "model": {"name": f"net-{name}", "parameters": 25_600_000},
            "dataset": {"size": 1_281_167},
            "epochs": 90,
            "cluster": {"max_nodes": 8, "ranks_per_node": 4, "price": {"usd_per_node_hour": 3.06}},
            "batch": {"max_local_batch_size": 512},
        }
    )


def step_times(configuration: Configuration, count: int, seed: int) -> np.ndarray:
    """Return `count` step times of an all-reduce ring over the configuration's nodes, with 2 % noise."""
    share = 1 - 1 / configuration.world_size
    truth = 0.02 + 0.0011 * configuration.local_batch_size + 0.06 * share
    return truth * np.random.default_rng(seed).lognormal(0, 0.02, count)


def fill(store: Store, jobs: range, samples_per_run: int) -> list[tuple[str, str]]:
    """Create jobs with profiled runs and their samples; return (job id, id of one of its runs) for each job.

    The service creates the first job. All other jobs are copies of the first job's rows with different names and times.
    Each transaction creates many copies, since one transaction per job would take longer than the whole measurement.
    """
    made = [made_by_the_service(store, jobs[0], samples_per_run)]
    for first in range(jobs[1], jobs.stop, COPIED_AT_ONCE) if len(jobs) > 1 else ():
        numbers = range(first, min(first + COPIED_AT_ONCE, jobs.stop))
        with store.transaction() as tx:
            made += copies(tx.connection, made[0][0], numbers, samples_per_run)
    return made


def made_by_the_service(store: Store, number: int, samples_per_run: int) -> tuple[str, str]:
    """Create a job with profiled runs and their samples; return the ids of the job and of one of its runs."""
    steps = list(range(samples_per_run))
    with store.transaction() as tx:
        specification = spec(f"job-{number}")
        job, _ = tx.jobs.create(DEFAULT_PROJECT_ID, specification.model_dump(mode="json") | {"objective": "knee"})
        run_id = ""
        for place, configuration in enumerate(CONFIGURATIONS):
            run = tx.runs.create(job.id, NewRun("profile", configuration))
            times = step_times(configuration, samples_per_run, number * RUNS + place).tolist()
            batch = SampleBatch(rank=0, boot_id="bench", sequence=steps, step=steps, step_time_s=times)
            tx.samples.add(run.key, job.id, batch)
            tx.runs.transition(run.id, expected=["pending"], to="succeeded")
            run_id = run.id
    return job.id, run_id


def copies(connection: sa.Connection, job_id: str, numbers: range, samples_per_run: int) -> list[tuple[str, str]]:
    """Create a copy of the job for each number; return (job id, id of one of its runs) for each copy."""

    def rows(table: sa.Table, condition: sa.ColumnElement[bool]) -> list[dict[str, Any]]:
        return [dict(row) for row in connection.execute(sa.select(table).where(condition)).mappings()]

    def next_key(table: sa.Table) -> int:
        return int(connection.execute(sa.select(sa.func.max(table.c.key))).scalar_one()) + 1

    (job,) = rows(tables.jobs, tables.jobs.c.id == job_id)
    runs = rows(tables.runs, tables.runs.c.job_id == job_id)
    sources = rows(tables.sample_sources, tables.sample_sources.c.run_key.in_([run["key"] for run in runs]))
    shift = {table: next_key(table) for table in (tables.jobs, tables.runs, tables.sample_sources)}
    new: dict[sa.Table, list[dict[str, Any]]] = {table: [] for table in shift}
    samples: list[tuple[object, ...]] = []
    made = []
    for place, number in enumerate(numbers):
        specification = spec(f"job-{number}")
        own: dict[str, object] = {
            "id": f"job-{number:016x}",
            "name": specification.name,
            "model_name": specification.model.name,
        }
        own |= {"key": shift[tables.jobs] + place, "spec": specification.model_dump(mode="json")}
        new[tables.jobs].append(job | own)
        for which, (run, source) in enumerate(zip(runs, sources, strict=True)):
            run_key = shift[tables.runs] + place * RUNS + which
            source_key = shift[tables.sample_sources] + place * RUNS + which
            run_id = f"run-{number:012x}{which:04x}"
            new[tables.runs].append(run | {"key": run_key, "id": run_id, "job_id": own["id"]})
            new[tables.sample_sources].append(source | {"key": source_key, "run_key": run_key})
            times = step_times(CONFIGURATIONS[which], samples_per_run, number * RUNS + which).tolist()
            samples += [(source_key, at, run_key, 0, at, False, taken) for at, taken in enumerate(times)]
        made.append((str(own["id"]), run_id))
    for table, values in new.items():
        connection.execute(sa.insert(table), values)
    connection.exec_driver_sql(INSERT_SAMPLES, samples)
    return made


def latencies_ms(ask: Callable[[int], None], times: int) -> list[float]:
    """Return the milliseconds that each of `times` requests takes, after a few requests that are not counted."""
    for number in range(5):
        ask(number)
    times_ms = []
    for number in range(times):
        began = time.perf_counter()
        ask(5 + number)
        times_ms.append((time.perf_counter() - began) * 1e3)
    return times_ms


def measure(client: httpx.Client, made: list[tuple[str, str]], times: int) -> dict[str, list[float]]:
    """Measure the latency of each kind of request in milliseconds, with jobs from all parts of the table."""
    chosen = [made[place] for place in np.linspace(0, len(made) - 1, 20).astype(int)]
    numbers = itertools.count(10**6)

    def get(path: str) -> None:
        answer = client.get(path, headers={"Accept": "application/json, text/html"})
        assert answer.status_code == 200, answer.text

    def disturb(number: int) -> None:
        sequence = next(numbers)
        body = {"rank": 0, "boot_id": "more", "sequence": [sequence], "step": [sequence], "step_time_s": [0.31]}
        answer = client.post(routes.RUN_SAMPLES.format(run_id=chosen[number % len(chosen)][1]), json=body)
        assert answer.status_code == 202, answer.text

    def job(number: int, route: str) -> str:
        return route.format(job_id=chosen[number % len(chosen)][0])

    for number in range(len(chosen)):
        get(job(number, routes.JOB_RECOMMENDATION))
    latencies = {"cached": latencies_ms(lambda number: get(job(number, routes.JOB_RECOMMENDATION)), times)}
    fresh = []
    for number in range(times // 2):
        disturb(number)
        began = time.perf_counter()
        get(job(number, routes.JOB_RECOMMENDATION))
        fresh.append((time.perf_counter() - began) * 1e3)
    latencies["fresh"] = fresh
    latencies["list"] = latencies_ms(lambda _: get(routes.JOBS + "?limit=50"), times)
    latencies["search"] = latencies_ms(lambda number: get(f"{routes.JOBS}?search=job-{number}"), times // 2)
    latencies["job page"] = latencies_ms(lambda number: get(f"/jobs/{chosen[number % len(chosen)][0]}"), times // 2)
    latencies["front page"] = latencies_ms(lambda _: get("/"), times // 2)
    return latencies


def main() -> None:
    """Fill the database, measure with few jobs and with all jobs, and print and write the figures."""
    parser = make_parser("recommend", __doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=300)
    options = parser.parse_args()
    few = min(FEW, options.jobs)
    if options.smoke:
        few, options.jobs, options.samples, options.times = 5, 10, 500, 4
    per_run = max(1, options.samples // (options.jobs * RUNS))
    rows: list[tuple[str, ...]] = []
    p99: dict[tuple[str, str], float] = {}
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tula-bench-") as folder:
        database = f"sqlite:///{folder}/tula.db"
        migrate(database)
        store = Store.open(database)
        made: list[tuple[str, str]] = []
        token = make_token(database)
        for size, jobs in ((f"{FEW}", few), ("10000", options.jobs)):
            made += fill(store, range(len(made), jobs), per_run)
            headers = {"Authorization": f"Bearer {token}"}
            with Server(database, requests_per_minute=10**9) as server, httpx.Client(base_url=server.url) as client:
                client.headers.update(headers)
                client.timeout = httpx.Timeout(60)
                for name, latencies in measure(client, made, options.times).items():
                    p99[name, size] = percentile(latencies, 0.99)
                    row = (name, f"{jobs:,}", f"{percentile(latencies, 0.5):.2f}", f"{p99[name, size]:.2f}")
                    rows.append(row)
                    key = name.replace(" ", "_")
                    figures[f"{key}.p50_ms"], figures[f"{key}.p99_ms"] = percentile(latencies, 0.5), p99[name, size]
                    figures[f"{key}.p50_ms_at_{size}"] = percentile(latencies, 0.5)
        store.close()
    growth = {name: p99[name, "10000"] / p99[name, f"{FEW}"] for name, _ in p99}
    figures |= {f"{name.replace(' ', '_')}.growth_100_to_10000": ratio for name, ratio in growth.items()}
    figures["growth_100_to_10000"] = max(growth[name] for name in FLAT)
    print_table("Recommendation", ("question", "jobs", "p50 ms", "p99 ms"), rows)
    print(f"cached.p99_ms = {figures['cached.p99_ms']:.2f}\nfresh.p99_ms = {figures['fresh.p99_ms']:.2f}")
    for name, ratio in growth.items():
        print(f"{name.replace(' ', '_')}.growth_100_to_10000 = {ratio:.3f}")
    print(f"growth_100_to_10000 = {figures['growth_100_to_10000']:.3f}")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
