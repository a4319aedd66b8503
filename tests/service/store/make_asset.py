"""Writes a dump of the newest schema with a few rows: run `python -m tests.service.store.make_asset` after a change."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import sqlalchemy as sa

from benchmarks.support.postgres import PostgresServer
from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk, samples
from tests.support.clock import ManualClock
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store
from tula_service.store.ledger import LedgerRecord
from tula_service.store.migrations import head_revision, upgrade_schema

ASSETS = Path(__file__).parent / "assets"
SEPARATOR = ";\n-- next\n"


def fill(store: Store) -> None:
    """Store a job with a run, samples, telemetry, a fit and a ledger entry."""
    upgrade_schema(store.engine)
    job = a_job(store, name="kept")
    run = a_run(store, job.id)
    with store.transaction() as tx:
        tx.samples.add(run.key, job.id, samples(20))
        tx.samples.refresh(run.key, summarise)
        add_chunk(tx, run.key, a_chunk(0, 10))
        tx.answers.put(job.id, "kept", data_version=1, model_version="1", body="{}")
        facts = {"job_id": job.id, "objective": "knee", "basis": "profiled", "model_version": "1", "data_version": 1}
        step_time = {"value": 0.5, "low": 0.4, "high": 0.6}
        values = {"created_at": tx.now(), "configuration": None, "prices": {}, "predicted_step_time_s": step_time}
        tx.ledger.append(LedgerRecord.model_validate(facts | values))


def sqlite_dump(folder: Path) -> str:
    """Return all statements that rebuild the SQLite database."""
    path = folder / "asset.db"
    store = Store.open(str(path), now=ManualClock())
    fill(store)
    store.close()
    connection = sqlite3.connect(path)
    statements = [line.rstrip(";") for line in connection.iterdump()]
    # The index of names is built from the jobs: of its tables only the statement that made it is kept.
    (index,) = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'jobs_search'").fetchone()
    connection.close()
    left_out = ("BEGIN TRANSACTION", "COMMIT", "PRAGMA writable_schema")
    kept = [one for one in statements if not one.startswith(left_out) and not re.search(r"""['"]jobs_search""", one)]
    return SEPARATOR.join([*kept, index, "INSERT INTO jobs_search (jobs_search) VALUES ('rebuild')"])


def postgres_dump(server: PostgresServer) -> str:
    """Return the schema and rows of the Postgres database from `pg_dump`, without the session's settings."""
    url = server.create_database("asset")
    store = Store.open(url, now=ManualClock())
    fill(store)
    store.close()
    address = sa.make_url(url).set(drivername="postgresql").render_as_string(False)
    program = [str(server.programs / "pg_dump"), "--inserts", "--no-owner", "--no-privileges", "--dbname", address]
    dump = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    of_a_session = ("--", "SET ", "SELECT pg_catalog.set_config", "\\")
    kept = "\n".join(line for line in dump.splitlines() if not line.startswith(of_a_session))
    return SEPARATOR.join(one.strip() for one in re.split(r";\n", kept) if one.strip())


def main() -> None:
    """Write both dumps."""
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tula-asset-") as folder:
        Path(folder).chmod(0o755)
        (ASSETS / f"{head_revision()}.sqlite.sql").write_text(sqlite_dump(Path(folder)), encoding="utf-8")
        server = PostgresServer.start(Path(folder) / "pg")
        try:
            (ASSETS / f"{head_revision()}.postgres.sql").write_text(postgres_dump(server), encoding="utf-8")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
