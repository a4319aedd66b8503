"""Opening a database so that an acknowledged write survives: SQLite in WAL with full sync, or Postgres."""

from __future__ import annotations

import json
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from tula_service.errors import InvalidInput

__all__ = ["POOL_SIZE", "WRITES", "is_sqlite", "open_engine"]

WRITES: Final = "tula_writes"
"""Execution option: the transaction will write, so SQLite takes its write lock at the start instead of half-way."""

BUSY_TIMEOUT_S: Final = 15.0
POOL_SIZE: Final = 16
POOL_TIMEOUT_S: Final = 10.0

_encode = partial(json.dumps, allow_nan=False, separators=(",", ":"))


def open_engine(url: str, *, pool_size: int = POOL_SIZE) -> sa.Engine:
    """An engine for `sqlite:///PATH`, a bare PATH, or `postgresql+psycopg://...`.

    Raises InvalidInput for any other URL; connects only when first used, and then raises InvalidInput for a Postgres
    database that cannot hold every text.
    """
    try:
        parsed = sa.make_url(url if "://" in url else f"sqlite:///{url}")
    except sa.exc.ArgumentError:
        raise InvalidInput("The database URL cannot be read: give a file path or postgresql+psycopg://...") from None
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        engine = sa.create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            json_serializer=_encode,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_pre_ping=False,
            pool_use_lifo=True,
            # What the database is encoded in is looked at; of SQL_ASCII the driver would read bytes where texts are.
            connect_args={"connect_timeout": 10, "prepare_threshold": 2, "client_encoding": "utf8"},
        )
        sa.event.listen(engine, "connect", _require_utf8)
        return engine
    if backend != "sqlite":
        raise InvalidInput(f"Database {backend!r} is not supported: use SQLite or postgresql+psycopg://...")
    if not parsed.database or parsed.database == ":memory:":
        raise InvalidInput("SQLite needs a file, since every worker and thread opens its own connection: give a path.")
    Path(parsed.database).expanduser().parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(
        parsed,
        json_serializer=_encode,
        poolclass=sa.pool.QueuePool,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def is_sqlite(engine: sa.Engine) -> bool:
    """True when the engine is the embedded one."""
    return engine.dialect.name == "sqlite"


def _require_utf8(connection: Any, _record: Any) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # a pooler between need not tell
        raise InvalidInput(
            f"The database is encoded as {encoding}, which does not hold every text: create another with "
            "CREATE DATABASE name ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0, and give that."
        )


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; `_begin_sqlite` does
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "journal_size_limit=67108864",
        "wal_autocheckpoint=4000",
        "cache_size=-32768",
        "temp_store=MEMORY",
        "secure_delete=OFF",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
