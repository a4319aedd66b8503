"""The base of every repository: one connection inside one transaction, and a clock."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

import sqlalchemy as sa

from tula_wire import Configuration

Clock: TypeAlias = Callable[[], datetime]
RowMap: TypeAlias = sa.RowMapping


class Repository:
    """Access to some tables through one transaction's connection."""

    def __init__(self, connection: sa.Connection, now: Clock) -> None:
        self._connection = connection
        self._now = now

    @property
    def _postgres(self) -> bool:
        return self._connection.dialect.name == "postgresql"

    def _rows(self, statement: sa.Executable) -> list[RowMap]:
        return list(self._connection.execute(statement).mappings())

    def _row(self, statement: sa.Executable) -> RowMap | None:
        return self._connection.execute(statement).mappings().first()

    def _insert(self, table: sa.Table) -> Any:
        """An INSERT with ON CONFLICT, in the dialect of this database."""
        if self._postgres:
            from sqlalchemy.dialects.postgresql import insert as postgres_insert

            return postgres_insert(table)
        from sqlalchemy.dialects.sqlite import insert as sqlite_insert

        return sqlite_insert(table)


def new_id(prefix: str) -> str:
    """A random id with its kind as a prefix, such as `job-4f1c0a9be2d37758`."""
    return f"{prefix}-{secrets.token_hex(8)}"


def configuration_from(row: RowMap) -> Configuration:
    """The configuration in the columns of a run or a summary."""
    return Configuration(
        num_nodes=row["num_nodes"],
        ranks_per_node=row["ranks_per_node"],
        local_batch_size=row["local_batch_size"],
        grad_accum_steps=row["grad_accum_steps"],
        instance_type=row["instance_type"],
    )
