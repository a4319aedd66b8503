"""Upgrades a database's schema, and checks that the schema matches this version of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from tula_service.errors import InvalidInput, SchemaMismatch, StoreUnavailable
from tula_service.store.database import is_sqlite
from tula_service.store.partitions import create_ahead

_LOCK: Final = 0x74756C61  # "tula" in ASCII; replicas that start simultaneously migrate one after another
_LOCK_NOT_AVAILABLE: Final = "55P03"
LONGEST_WAIT_S: Final = 5.0
"""Seconds that a migration waits for a table's lock on Postgres."""
_VERSION: Final = sa.table("alembic_version", sa.column("version_num"))


def upgrade_schema(engine: sa.Engine) -> None:
    """Create or upgrade the schema in one transaction.

    Raises SchemaMismatch if the database's schema is unknown to this code, InvalidInput if SQLite is too old, and
    StoreUnavailable if the database cannot be reached or a table remains locked.
    """
    try:
        with engine.begin() as connection:
            if is_sqlite(engine):
                _require_trigrams(connection)
            else:
                connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                # A lock timeout is needed, because all later requests for a table wait while a migration waits for it.
                connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LONGEST_WAIT_S:g}s'"))
            _refuse_unknown(_current(connection))
            _run_migrations(connection)
        create_ahead(engine)
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
            raise StoreUnavailable(
                f"Another database session has held a table's lock for {LONGEST_WAIT_S:g} s, so nothing was changed: "
                "end that session (see pg_stat_activity), then run `tula migrate` again."
            ) from error
        raise StoreUnavailable(
            "The database cannot be reached: check --database, and check that the database is running."
        ) from error


def check_schema(engine: sa.Engine) -> None:
    """Raise SchemaMismatch unless the database has exactly the newest schema in this version of the code."""
    with engine.connect() as connection:
        current = _current(connection)
    if current == head_revision():
        return
    _refuse_unknown(current)
    raise SchemaMismatch(
        f"The database has schema {current or 'none'}, but this version requires {head_revision()}: back up the "
        "database, then run `tula serve --migrate` once."
    )


def is_empty(engine: sa.Engine) -> bool:
    """Return True if the database has no tables, as in a new SQLite file or a newly created Postgres database."""
    try:
        with engine.connect() as connection:
            return not sa.inspect(connection).get_table_names()
    except sa.exc.OperationalError as error:
        raise StoreUnavailable(
            "The database cannot be reached: check --database, and check that the database is running."
        ) from error


def head_revision() -> str:
    """Return the newest schema revision in this version of the code."""
    return max(_revisions())


def _revisions() -> set[str]:
    """Return the schema revisions of this version, which are the prefixes of file names such as `0001_first.py`.

    Alembic could also list them, but importing it takes a sixth of the service's start-up time.
    """
    return {path.stem.partition("_")[0] for path in (_migrations() / "versions").glob("[0-9]*_*.py")}


def _require_trigrams(connection: sa.Connection) -> None:
    """Raise InvalidInput if this SQLite version lacks the trigram index that job searches require."""
    query = "SELECT sqlite_version(), EXISTS (SELECT 1 FROM pragma_module_list WHERE name = 'fts5')"
    version, has_fts5 = connection.exec_driver_sql(query).one()
    if not has_fts5 or tuple(int(part) for part in version.split(".")[:2]) < (3, 34):
        raise InvalidInput(
            f"This Python's SQLite {version} has no trigram index: use a Python with SQLite 3.34 or later and FTS5, or "
            "use Postgres."
        )


def _current(connection: sa.Connection) -> str | None:
    """Return the schema revision that Alembic stored in the database, or None if no migration was run."""
    if not sa.inspect(connection).has_table(_VERSION.name):
        return None
    revision: str | None = connection.execute(sa.select(_VERSION.c.version_num)).scalar_one_or_none()
    return revision


def _refuse_unknown(current: str | None) -> None:
    if current is not None and current not in _revisions():
        raise SchemaMismatch(
            f"The database has schema {current}, which this version of Tula does not know (its newest is "
            f"{head_revision()}): run `pip install --upgrade tula` if a later version created the database, or set "
            "--database to a new database if this one was created before the first release."
        )


def _run_migrations(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _migrations() -> Path:
    """Return the folder with the migrations: inside the package in a wheel, but beside `service/` in a checkout."""
    packaged = Path(__file__).resolve().parents[1] / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "migrations"
