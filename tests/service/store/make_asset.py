"""Writes a dump of the newest schema with a few rows: `python -m tests.service.store.make_asset`, once a release."""

from __future__ import annotations

import sqlite3
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import psycopg
import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from benchmarks.support.postgres import PostgresServer
from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk, samples
from tests.support.clock import ManualClock
from tula_service.store import LedgerRecord, Store
from tula_service.store.migrations import head_revision, upgrade_schema

ASSETS = Path(__file__).parent / "assets"
SEPARATOR = ";\n-- next\n"


def fill(store: Store) -> None:
    """A job with a run, samples, telemetry, a kept fit and a ledger entry."""
    upgrade_schema(store.engine)
    job = a_job(store, name="kept")
    run = a_run(store, job.id)
    with store.transaction() as tx:
        tx.samples.add(run.key, job.id, samples(20))
        tx.samples.refresh(run.key)
        add_chunk(tx, run.key, a_chunk(0, 10))
        tx.answers.put(job.id, "kept", data_version=1, model_version="1", body="{}")
        entry = LedgerRecord("", job.id, "knee", "profiled", None, {}, "1", 1, (0.5, 0.4, 0.6), None)
        tx.ledger.append(entry)


def sqlite_dump(folder: Path) -> str:
    """All statements that rebuild the database."""
    path = folder / "asset.db"
    store = Store.open(str(path), now=ManualClock())
    fill(store)
    store.close()
    connection = sqlite3.connect(path)
    statements = [line.rstrip(";") for line in connection.iterdump()]
    connection.close()
    return SEPARATOR.join(one for one in statements if one not in ("BEGIN TRANSACTION", "COMMIT"))


def postgres_dump(server: PostgresServer) -> str:
    """The same for Postgres: tables, rows and sequences of what the migrations built, as the server tells them."""
    url = server.create_database("asset")
    store = Store.open(url, now=ManualClock())
    fill(store)
    found = sa.MetaData()
    found.reflect(store.engine)
    statements: list[str] = []
    dialect = store.engine.dialect
    with psycopg.connect(sa.make_url(url).set(drivername="postgresql").render_as_string(False)) as raw:
        for table in found.sorted_tables:
            statements.append(str(CreateTable(table).compile(dialect=dialect)).strip())
            statements += [str(CreateIndex(index).compile(dialect=dialect)).strip() for index in table.indexes]
        for table in found.sorted_tables:
            columns = ", ".join(f'"{column.name}"' for column in table.columns)
            for row in raw.execute(f'SELECT {columns} FROM "{table.name}"'):  # type: ignore[arg-type]
                values = ", ".join(psycopg.sql.Literal(_plain(value)).as_string(raw) for value in row)
                statements.append(f'INSERT INTO "{table.name}" ({columns}) VALUES ({values})')
        for table in found.sorted_tables:
            for column in table.primary_key.columns:
                sequence = raw.execute("SELECT pg_get_serial_sequence(%s, %s)", (table.name, column.name)).fetchone()
                if sequence and sequence[0]:
                    top = f'(SELECT coalesce(max("{column.name}"), 0) + 1 FROM "{table.name}")'
                    statements.append(f"SELECT setval('{sequence[0]}', {top}, false)")
    store.close()
    return SEPARATOR.join(statements)


def _plain(value: object) -> object:
    if isinstance(value, (dict, list)):
        return psycopg.types.json.Jsonb(value)
    if isinstance(value, np.generic):
        return value.item()
    return value.astimezone(timezone.utc) if isinstance(value, datetime) else value


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
