"""Defines the base class of all repositories, which holds a transaction's connection and a clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, TypeAlias

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tula_service.store.tables import jobs, runs

Clock: TypeAlias = Callable[[], datetime]
RowMap: TypeAlias = sa.RowMapping
WRITES: Final = "tula_writes"
"""The execution option that marks transactions that may write, for which SQLite takes its write lock at the start."""
_BUMP: Final = sa.update(jobs).where(jobs.c.id == sa.bindparam("job")).values(data_version=jobs.c.data_version + 1)


class Repository:
    """The base class of repositories, each of which accesses some of the tables through a transaction's connection.

    Statements that every request from an agent executes are module constants with named parameters, since SQLAlchemy
    takes longer to build such a statement and find it in its cache than the database takes to execute it.
    """

    def __init__(self, connection: sa.Connection, now: Clock) -> None:
        self._connection = connection
        self._now = now

    @property
    def _postgres(self) -> bool:
        return self._connection.dialect.name == "postgresql"

    def _rows(self, statement: sa.Executable) -> list[RowMap]:
        return list(self._connection.execute(statement).mappings())

    def _row(self, statement: sa.Executable, **parameters: object) -> RowMap | None:
        return self._connection.execute(statement, parameters).mappings().first()

    def _scalar(self, statement: sa.Executable, **parameters: object) -> Any:
        return self._connection.execute(statement, parameters).scalar()

    def bump(self, job_id: str) -> None:
        """Increment the job's data version; call this method after changing any data that a fit reads."""
        self._connection.execute(_BUMP, {"job": job_id})

    def _purge(self, table: sa.Table, job_id: str, limit: int) -> int:
        """Delete at most `limit` rows of a job's runs, so that other writers wait only briefly; return the count."""
        keys = self._connection.execute(sa.select(runs.c.key).where(runs.c.job_id == job_id)).scalars().all()
        chosen = sa.select(*table.primary_key).where(table.c.run_key.in_(keys)).limit(limit).subquery("chosen")
        statement = sa.delete(table).where(sa.tuple_(*table.primary_key).in_(sa.select(*chosen.c)))
        return int(self._connection.execute(statement).rowcount)

    def _insert(self, table: sa.Table) -> Any:
        """Return an INSERT statement in this database's dialect, which supports ON CONFLICT."""
        return postgresql.insert(table) if self._postgres else sqlite.insert(table)

    def _put(
        self, table: sa.Table, key: Mapping[str, Any], values: Mapping[str, Any], *, where: Any = None, **new: Any
    ) -> None:
        """Insert a row with `key`, `values` and `new`.

        If the key exists, only set `values`, provided that the existing row satisfies `where`.
        """
        insert = self._insert(table).values(**key, **values, **new)
        self._connection.execute(insert.on_conflict_do_update(index_elements=list(key), set_=values, where=where))


def new_id(prefix: str) -> str:
    """Return a random id that begins with `prefix`, such as `job-4f1c0a9be2d37758`."""
    return f"{prefix}-{secrets.token_hex(8)}"


def same_fields(record: type, row: RowMap) -> dict[str, Any]:
    """Return a dictionary of the row's columns whose names are also fields of `record`."""
    return {field.name: row[field.name] for field in fields(record) if field.name in row}
