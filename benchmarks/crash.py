"""`kill -9` of the service, and crashes of Postgres, in mid-ingest: is everything there that was acknowledged, once?

    python -m benchmarks.crash [--json OUT] [--kills 1000] [--smoke]

Four senders post batches of samples and chunks of telemetry without a pause, and each again until it is acknowledged.
`sqlite` and `postgres`: the whole service is killed and started again, `--kills` times in all, half on each engine.
`restarts`: Postgres itself ends as in a power cut (`pg_ctl -m immediate`), once for every twenty kills. In the end the
database is compared with the acknowledgements: `lost` are rows that were acknowledged and are not there, `doubled` are
rows that are there twice. Both have to be 0, else the exit status is 1.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.support.forked import Server
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.prepared import prepare
from benchmarks.support.report import parser_of, print_table, write_json
from benchmarks.support.senders import compare, progressed, sending
from benchmarks.support.server import migrate

KILLS_A_RESTART = 20
SMOKE_KILLS = 4


def kill_the_service(database: str, kills: int) -> dict[str, int]:
    """Kill and start the service again `kills` times under load."""
    migrate(database)
    prepared = prepare(database)
    server = Server(database)
    port = server.port
    try:
        with sending(prepared, lambda: f"http://127.0.0.1:{port}") as senders:
            for _ in range(kills):
                progressed(senders)
                server.kill()
                server = Server(database, port=port)
            progressed(senders)
    finally:
        server.stop()
    return {"kills": kills} | compare(prepared, senders)


def crash_postgres(postgres: PostgresServer, restarts: int) -> dict[str, int]:
    """Crash and start Postgres again `restarts` times under load."""
    database = postgres.create_database("restarts")
    migrate(database)
    prepared = prepare(database)
    with Server(database) as server:
        with sending(prepared, lambda: server.url) as senders:
            for _ in range(restarts):
                progressed(senders, by=1)
                postgres.restart_after("immediate")
            progressed(senders)
        return {"kills": restarts} | compare(prepared, senders)


def measure(kills: int) -> dict[str, dict[str, int]]:
    """All three cases, by name."""
    folder = Path(tempfile.mkdtemp(prefix="tula-crash-"))
    postgres = PostgresServer.start(folder / "postgres")
    try:
        return {
            "sqlite": kill_the_service(f"sqlite:///{folder}/crash.db", kills // 2),
            "postgres": kill_the_service(postgres.create_database("kills"), kills - kills // 2),
            "restarts": crash_postgres(postgres, max(1, kills // KILLS_A_RESTART)),
        }
    finally:
        postgres.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure, print and compare; 1 if anything was lost or doubled."""
    parser = parser_of("crash", __doc__)
    parser.add_argument("--kills", type=int, default=1000, help="kills of the service, half on each engine")
    options = parser.parse_args()
    found = measure(SMOKE_KILLS if options.smoke else options.kills)
    names = list(next(iter(found.values())))
    rows = [[case, *(str(figures[name]) for name in names)] for case, figures in found.items()]
    print_table("kills in mid-ingest", ["", *names], rows)
    write_json(
        options.json, {f"{case}.{name}": value for case, counts in found.items() for name, value in counts.items()}
    )
    return int(any(figures["lost"] or figures["doubled"] for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
