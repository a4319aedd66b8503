"""Runs the migrations. `[tool.alembic]` and `tula_service.store.migrations` tell Alembic where this folder is."""

from __future__ import annotations

import os

from alembic import context

from tula_service.store.database import open_engine
from tula_service.store.tables import METADATA


def run() -> None:
    """Migrate the database of the given connection or, on the command line, the database that TULA_DATABASE names."""
    connection = context.config.attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, target_metadata=METADATA, transaction_per_migration=False)
        with context.begin_transaction():
            context.run_migrations()
        return
    engine = open_engine(os.environ.get("TULA_DATABASE", "tula.db"))
    with engine.begin() as own:
        context.configure(connection=own, target_metadata=METADATA)
        context.run_migrations()
    engine.dispose()


run()
