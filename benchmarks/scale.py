"""100,000 jobs and a billion telemetry values in Postgres: what users and agents wait for, and pruning, as they grow.

    python -m benchmarks.scale [--json OUT] [--jobs 100 10000 100000] [--values 10000] [--times 100] [--smoke]

Each job has five profiled runs and a training run whose telemetry has `--values` values: packed chunks of 50 steps with
five columns, noise in every digit, as ingest stores them. The database makes the rows itself from those of one job that
the service made, spread over the partitions of twelve months, which are not vacuumed meanwhile. At each number of jobs
one client asks a worker through HTTP; then jobs are deleted and two months dropped, the second after it was written to
an archive, unless it is large. Keys of the figures name the sizes of a full run. A billion values need 25 GB of disk.
`--smoke` stores a few jobs: it only shows that the benchmark works.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgpack
import numpy as np
import psycopg
import sqlalchemy as sa
from pyarrow import parquet

from benchmarks.disk import CHUNK, COLUMNS, chunks
from benchmarks.recommend import RUNS, latencies_ms, made_by_the_service
from benchmarks.recommend import measure as ask_questions
from benchmarks.support.postgres import databases
from benchmarks.support.report import parser_of, percentile, print_table, write_json
from benchmarks.support.server import Server, make_token, migrate
from tula_service.domain import NewRun
from tula_service.store import Store, partitions, tables
from tula_service.store.archive import Archive
from tula_service.store.telemetry import chunk_row
from tula_service.usecases.access import ANONYMOUS
from tula_service.usecases.jobs import delete_job
from tula_service.usecases.telemetry import chunk_from_packed
from tula_wire import Configuration, routes

SIZES = (100, 10_000, 100_000)
MONTHS = 12
SAMPLES = 4
"""Of each profiled run; how samples grow is measured by `recommend`."""
DELETED = 5
MOST_ARCHIVED = 20_000_000
"""Values of a month that is written to an archive: more take minutes at the same pace."""
VARIANTS = 25
"""Telemetry that differs: jobs beside each other in a month do not repeat it, which an archive would compress."""

COPIES = {
    "jobs": {
        "key": "1000000 + n",
        "id": "'job-' || lpad(to_hex(n), 16, '0')",
        "name": "'job-' || n",
        "model_name": "'net-job-' || n",
    },
    "runs": {
        "key": "{run}",
        "id": "'run-' || lpad(to_hex(n), 12, '0') || lpad(to_hex(place), 4, '0')",
        "job_id": "'job-' || lpad(to_hex(n), 16, '0')",
    },
    "sample_sources": {"key": "1000000 + n * 10 + place", "run_key": "{run}"},
    "step_samples": {"source_key": "1000000 + n * 10 + place", "run_key": "{run}"},
    "telemetry_chunks": {"run_key": "{run}"},
}
"""What differs between the rows of one job and those of its copy number `n`; `place` numbers the runs of a job."""
OF_THE_JOB = {
    "jobs": "SELECT 0 AS place, jobs.* FROM jobs",
    "runs": "SELECT places.place, runs.* FROM runs JOIN places USING (key)",
    "sample_sources": "SELECT place, sample_sources.* FROM sample_sources JOIN places ON run_key = places.key",
    "step_samples": "SELECT place, step_samples.* FROM step_samples JOIN places ON run_key = places.key",
    "telemetry_chunks": "SELECT place, telemetry_chunks.* FROM telemetry_chunks JOIN places ON run_key = places.key",
}


@dataclass
class Filler:
    """Copies one job's rows within the database, job by job."""

    database: str
    values: int
    job_id: str = ""
    """The job that is copied, and that no question touches."""
    made: list[tuple[str, str]] = field(default_factory=list)
    """Job and its last profiled run; the training run follows that."""
    newest: Sequence[tuple[str, str]] = ()
    """Those of the last growth, whose months are all there."""
    jobs: int = 1
    months: list[int] = field(default_factory=list)

    @property
    def address(self) -> str:
        """The database as the driver takes it."""
        return sa.make_url(self.database).set(drivername="postgresql").render_as_string(hide_password=False)

    def begin(self, store: Store) -> None:
        """The first job, as the service makes it, and partitions of the twelve months before it."""
        self.job_id, _ = made_by_the_service(store, 0, SAMPLES)
        with store.transaction() as tx:
            configuration = Configuration(num_nodes=8, ranks_per_node=4, local_batch_size=128)
            run = tx.runs.create(self.job_id, NewRun("train", configuration))
        each = max(1, self.values // (CHUNK * len(COLUMNS)))
        rows = []
        for number, body in enumerate(itertools.islice(chunks(10**9), each * VARIANTS)):
            at = np.arange(CHUNK) + CHUNK * (number % each)
            own = {"boot_id": f"boot-{number // each}", "sequence": number % each, "steps": at.tobytes()}
            rows.append(chunk_row(run.key, chunk_from_packed(msgpack.unpackb(body) | own)))
        self.months = [int(run.key // partitions.KEYS_OF_A_MONTH)]
        while len(self.months) < MONTHS:
            month = self.months[0]
            self.months.insert(0, month - 1 if month % 100 > 1 else month - 89)
        partitions.drop(store.engine, f"telemetry_chunks_{self.months[-1]}", None)
        with psycopg.connect(self.address) as connection:
            for month, following in itertools.pairwise([*self.months, 999912]):
                high = partitions.KEYS_OF_A_MONTH * (following if following < 999912 else month + 1)
                low = partitions.KEYS_OF_A_MONTH * month
                connection.execute(
                    f"CREATE TABLE telemetry_chunks_{month} PARTITION OF telemetry_chunks"
                    f" FOR VALUES FROM ({low}) TO ({high}) WITH (autovacuum_enabled = off)".encode()
                )
            with connection.cursor() as cursor:
                marks = ", ".join(["%s"] * len(rows[0]))
                cursor.executemany(f"INSERT INTO telemetry_chunks VALUES ({marks})", rows)
            for table in ("jobs", "runs", "sample_sources"):
                connection.execute(f"SELECT setval('{table}_key_seq', 5000000)".encode())

    def grow(self, jobs: int) -> None:
        """Copies until there are so many jobs; foreign keys are not checked row by row."""
        numbers = range(self.jobs, jobs)
        run = (
            f"(ARRAY{self.months})[n % {len(self.months)} + 1] * {partitions.KEYS_OF_A_MONTH}::bigint + n * 10 + place"
        )
        with psycopg.connect(self.address) as connection:
            connection.execute("SET session_replication_role = replica")
            connection.execute(
                "CREATE TEMP TABLE places AS SELECT key, row_number() OVER (ORDER BY key) - 1 AS place"
                " FROM runs WHERE job_id = %s",
                (self.job_id,),
            )
            for table, own in COPIES.items():
                names = [column.name for column in tables.METADATA.tables[table].columns]
                values = ", ".join(own.get(name, name).format(run=run) for name in names)
                which = f" WHERE id = '{self.job_id}'" if table == "jobs" else ""
                variant = f" WHERE boot_id = 'boot-' || n % {VARIANTS}" if table == "telemetry_chunks" else ""
                connection.execute(f"CREATE TEMP TABLE one_{table} AS {OF_THE_JOB[table]}{which}".encode())
                connection.execute(
                    f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM generate_series"
                    f"({numbers.start}, {numbers.stop - 1}) AS n, one_{table}{variant}".encode()
                )
        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE) jobs, runs, sample_sources, step_samples")  # as autovacuum soon would
            connection.execute("ANALYZE telemetry_chunks")
        self.newest = [(f"job-{n:016x}", f"run-{n:012x}{RUNS - 1:04x}") for n in numbers]
        self.made += self.newest
        self.jobs = jobs

    def stored(self) -> tuple[int, int]:
        """Values of telemetry, and bytes of their partitions with indices."""
        with psycopg.connect(self.address) as connection:
            steps = f"SELECT coalesce(sum(num_steps), 0) * {len(COLUMNS)} FROM telemetry_chunks"
            size = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('telemetry_chunks') WHERE isleaf"
            (values,), (size_bytes,) = (connection.execute(each.encode()).fetchone() or (0,) for each in (steps, size))
            return int(values), int(size_bytes)

    def values_of(self, month: str) -> int:
        """Values in one partition."""
        with psycopg.connect(self.address) as connection:
            steps = f"SELECT coalesce(sum(num_steps), 0) * {len(COLUMNS)} FROM {month}"
            (values,) = connection.execute(steps.encode()).fetchone() or (0,)
            return int(values)


def ask(filler: Filler, times: int) -> dict[str, list[float]]:
    """Milliseconds of each question to one worker, by one client."""
    made = filler.made
    newest = [filler.newest[place][1] for place in np.linspace(0, len(filler.newest) - 1, 20).astype(int)]
    training = [f"{run[:-4]}{RUNS:04x}" for run in newest]
    bodies = chunks(10**9)
    token = make_token(filler.database)
    headers = {"Authorization": f"Bearer {token}"}
    with (
        Server(filler.database, requests_per_minute=10**9) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as client,
    ):

        def get(path: str) -> None:
            answer = client.get(path, headers={"Accept": "application/json, text/html"})
            assert answer.status_code == 200, answer.text

        def send(number: int) -> None:
            body = msgpack.unpackb(next(bodies)) | {"boot_id": f"size-{filler.jobs}"}
            path = routes.RUN_TELEMETRY.format(run_id=training[number % len(training)])
            kind = {"Content-Type": "application/msgpack"}
            answer = client.post(path, content=msgpack.packb(body), headers=kind)
            assert answer.status_code == 202, answer.text

        found = ask_questions(client, made, times)
        found["search for one"] = latencies_ms(
            lambda number: get(f"{routes.JOBS}?search=net-job-{filler.jobs - 1 - number}"), times // 2
        )
        found["run page"] = latencies_ms(lambda number: get(f"/runs/{training[number % len(training)]}"), times)
        found["series"] = latencies_ms(
            lambda number: get(routes.RUN_TELEMETRY.format(run_id=training[number % len(training)]) + "?column=loss"),
            times,
        )
        found["ingest"] = latencies_ms(send, times)
    return found


def prune(store: Store, filler: Filler, folder: Path) -> dict[str, float]:
    """Milliseconds to delete a job and to drop a month, and what the archive of another takes."""
    deleted = []
    for _ in range(min(DELETED, len(filler.made) - 1)):
        job_id, _ = filler.made.pop(0)
        began = time.perf_counter()
        delete_job(store, ANONYMOUS, job_id)
        deleted.append((time.perf_counter() - began) * 1e3)
    dropped = f"telemetry_chunks_{filler.months.pop(0)}"
    values = filler.values_of(dropped)
    began = time.perf_counter()
    partitions.drop(store.engine, dropped, None)
    drop_ms = (time.perf_counter() - began) * 1e3
    found = {"delete_job.p50_ms": percentile(deleted, 0.5), "drop.values": float(values), "drop.ms": drop_ms}
    if values > MOST_ARCHIVED:
        return found
    archived = f"telemetry_chunks_{filler.months.pop(0)}"
    began = time.perf_counter()
    partitions.drop(store.engine, archived, Archive(str(folder)))
    archive_s = time.perf_counter() - began
    rows = sum(parquet.read_metadata(file).num_rows for file in folder.glob(f"{archived}-*.parquet"))
    return found | {"archive.values_per_s": rows / archive_s}


def main() -> None:
    """Grow, ask and prune at each size; print and write."""
    parser = parser_of("scale", __doc__)
    parser.add_argument("--jobs", type=int, nargs=3, default=SIZES)
    parser.add_argument("--values", type=int, default=10_000, help="of each job's training run")
    parser.add_argument("--times", type=int, default=100)
    wanted = parser.parse_args()
    if wanted.smoke:
        wanted.jobs, wanted.values, wanted.times = (24, 48, 72), 500, 4
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    for _, database in databases(["postgres"]):
        migrate(database)
        store = Store.open(database)
        filler = Filler(database, wanted.values)
        filler.begin(store)
        for size, jobs in zip(SIZES, wanted.jobs, strict=True):
            began = time.perf_counter()
            filler.grow(jobs)
            values, size_bytes = filler.stored()
            print(f"{jobs:,} jobs, {values:,} values, {time.perf_counter() - began:.0f} s", flush=True)
            found = {f"telemetry.values_at_{size}": float(values)}
            found[f"telemetry.bytes_per_million_values_at_{size}"] = size_bytes / values * 1e6
            for name, latencies in ask(filler, wanted.times).items():
                for share in (50, 99):
                    key = f"{name.replace(' ', '_')}.p{share}_ms_at_{size}"
                    found[key] = percentile(latencies, share / 100)
            with tempfile.TemporaryDirectory(prefix="tula-archive-") as folder:
                found |= {f"{key}_at_{size}": value for key, value in prune(store, filler, Path(folder)).items()}
            for key, value in found.items():
                print(f"{key} = {value:,.2f}", flush=True)
            figures |= found
        store.close()
    names = dict.fromkeys(key.rpartition("_at_")[0] for key in figures)
    rows = [(name, *(f"{figures.get(f'{name}_at_{size}', math.nan):,.2f}" for size in SIZES)) for name in names]
    print_table("Scale", ("figure", *(f"{jobs:,} jobs" for jobs in wanted.jobs)), rows)
    for name in names:
        if name.endswith("p50_ms"):
            few, most = (figures[f"{name}_at_{size}"] for size in (SIZES[0], SIZES[-1]))
            figures[f"{name.partition('.')[0]}.growth"] = most / few
    write_json(wanted.json, figures)


if __name__ == "__main__":
    main()
