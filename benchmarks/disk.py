"""Bytes on disk of a million steps of telemetry and of a million samples, and the memory of the worker that took them.

    python -m benchmarks.disk [--json OUT] [--engines sqlite postgres] [--smoke]

A tenth of each is sent through HTTP as an agent sends it: chunks of 50 steps with five columns whose values have noise
in every digit, and batches of 500 samples with five measured columns. What the database then takes more is counted ten
times. `memory_bytes` is resident memory of the one worker afterwards. `--smoke` sends little: it only shows that the
benchmark works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import msgpack
import numpy as np
import psutil
import sqlalchemy as sa

from benchmarks.support.postgres import databases
from benchmarks.support.prepared import prepare
from benchmarks.support.report import parser_of, print_table, write_json
from benchmarks.support.server import Server, migrate
from tula_service.store import Store
from tula_wire import routes

COLUMNS = ("step_time_s", "loss", "grad_norm", "lr", "gradient_noise_scale")
TIMES = ("step_time_s", "compute_time_s", "exposed_comm_time_s", "input_time_s", "skew_s")
CHUNK, BATCH, MILLION = 50, 500, 1_000_000


def chunks(steps: int) -> Iterator[bytes]:
    """Telemetry of one rank, packed."""
    noise = np.random.default_rng(0)
    for number in range(steps // CHUNK):
        at = np.arange(number * CHUNK, (number + 1) * CHUNK)
        columns = {name: noise.lognormal(0.0, 0.3, CHUNK).tobytes() for name in COLUMNS}
        facts = {"rank": 0, "boot_id": "disk", "sequence": number}
        yield msgpack.packb(facts | {"steps": at.tobytes(), "columns": columns})


def batches(samples: int) -> Iterator[bytes]:
    """Samples of one rank, as JSON."""
    noise = np.random.default_rng(1)
    for number in range(samples // BATCH):
        at = list(range(number * BATCH, (number + 1) * BATCH))
        times = {name: noise.lognormal(-2.0, 0.1, BATCH).tolist() for name in TIMES}
        yield json.dumps({"rank": 0, "boot_id": "disk", "sequence": at, "step": at, **times}).encode()


def size_of(database: str) -> int:
    """Bytes of a database, with its indices; of SQLite with the journal written back."""
    store = Store.open(database)
    try:
        with store.engine.connect() as connection:
            if store.engine.dialect.name == "sqlite":
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.exec_driver_sql("BEGIN")
                return Path(str(sa.make_url(database).database)).stat().st_size
            return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
    finally:
        store.close()


def measure(database: str, rows: int) -> dict[str, float]:
    """The figures of one database, from so many steps and samples."""
    migrate(database)
    made = prepare(database)
    headers = {"Authorization": f"Bearer {made.token}"}
    sizes = [size_of(database)]
    kinds: Sequence[tuple[str, str, Callable[[int], Iterator[bytes]]]] = (
        (routes.RUN_TELEMETRY, "application/msgpack", chunks),
        (routes.RUN_SAMPLES, "application/json", batches),
    )
    with Server(database) as server, httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        for route, kind, bodies in kinds:
            for body in bodies(rows):
                path = route.format(run_id=made.run_id)
                client.post(path, content=body, headers={"Content-Type": kind}).raise_for_status()
            sizes.append(size_of(database))
        memory = sum(psutil.Process(each).memory_info().rss for each in server.worker_ids())
    telemetry, samples = np.diff(sizes) * (MILLION / rows)
    return {
        "telemetry.bytes_per_million_steps": float(telemetry),
        "samples.bytes_per_million": float(samples),
        "memory_bytes": float(memory),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = parser_of("disk", __doc__)
    parser.add_argument("--engines", nargs="*", default=["sqlite", "postgres"], choices=["sqlite", "postgres"])
    options = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    for engine, database in databases(options.engines):
        found = measure(database, 2_000 if options.smoke else MILLION // 10)
        figures |= {f"{engine}.{key}": value for key, value in found.items()}
    print_table("Disk", ("figure", "MB"), [(key, f"{value / 1e6:.1f}") for key, value in figures.items()])
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
