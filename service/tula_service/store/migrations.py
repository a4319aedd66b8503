"""Upgrades a database's schema, and refuses a database with another version."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import sqlalchemy as sa

from tula_service.errors import InvalidInput, SchemaMismatch, StoreUnavailable
from tula_service.store.database import is_sqlite
from tula_service.store.partitions import create_ahead

_LOCK: Final = 0x74756C61  # "tula": replicas that start at the same time migrate one after another
_LOCK_NOT_AVAILABLE: Final = "55P03"
LONGEST_WAIT_S: Final = 5.0
"""Seconds to wait for the lock of a table on Postgres."""
_VERSION: Final = sa.table("alembic_version", sa.column("version_num"))


def upgrade_schema(engine: sa.Engine) -> None:
    """Create or upgrade the schema, in one transaction.

    Raises SchemaMismatch if this code does not know the database's schema, InvalidInput if SQLite is too old, and
    StoreUnavailable if the database cannot be reached or a table stays locked.
    """
    try:
        with engine.begin() as connection:
            if is_sqlite(engine):
                _require_trigrams(connection)
            else:
                connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
                # While a migration waits for a table, all later requests for that table wait too.
                connection.execute(sa.text(f"SET LOCAL lock_timeout = '{LONGEST_WAIT_S:g}s'"))
            _refuse_unknown(_current(connection))
            _run_migrations(connection)
        create_ahead(engine)
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE:
            raise StoreUnavailable(
                f"Another session has held a table's lock for {LONGEST_WAIT_S:g} s, and nothing was changed: end it "
                "(pg_stat_activity lists it), then run `tula migrate` again."
            ) from error
        raise StoreUnavailable("The database cannot be reached: check --database, and that it is running.") from error


def check_schema(engine: sa.Engine) -> None:
    """Raise SchemaMismatch unless the database has exactly the newest schema of this code."""
    with engine.connect() as connection:
        current = _current(connection)
    if current == head_revision():
        return
    _refuse_unknown(current)
    raise SchemaMismatch(
        f"The database has schema {current or 'none'} but this version needs {head_revision()}: "
        "back it up, then run `tula serve --migrate` once."
    )


def is_empty(engine: sa.Engine) -> bool:
    """Return True for a database without tables: a new file, or a newly created Postgres database."""
    try:
        with engine.connect() as connection:
            return not sa.inspect(connection).get_table_names()
    except sa.exc.OperationalError as error:
        raise StoreUnavailable("The database cannot be reached: check --database, and that it is running.") from error


def head_revision() -> str:
    """Return the newest schema revision that this code knows."""
    return max(_revisions())


def _revisions() -> set[str]:
    """Return the revisions, read from the file names of the migrations, such as `0001_first.py`.

    Alembic could list them too, but its import takes a sixth of the service's start-up time.
    """
    return {path.stem.partition("_")[0] for path in (_migrations() / "versions").glob("[0-9]*_*.py")}


def _require_trigrams(connection: sa.Connection) -> None:
    """Raise InvalidInput if this SQLite lacks the features that a search for jobs needs."""
    query = "SELECT sqlite_version(), EXISTS (SELECT 1 FROM pragma_module_list WHERE name = 'fts5')"
    version, has_fts5 = connection.exec_driver_sql(query).one()
    if not has_fts5 or tuple(int(part) for part in version.split(".")[:2]) < (3, 34):
        raise InvalidInput(
            f"The SQLite {version} of this Python has no trigram index: use one from 3.34 on with FTS5, or Postgres."
        )


def _current(connection: sa.Connection) -> str | None:
    """Return the revision that Alembic wrote into the database, or None before the first."""
    if not sa.inspect(connection).has_table(_VERSION.name):
        return None
    revision: str | None = connection.execute(sa.select(_VERSION.c.version_num)).scalar_one_or_none()
    return revision


def _refuse_unknown(current: str | None) -> None:
    if current is not None and current not in _revisions():
        raise SchemaMismatch(
            f"The database has schema {current}, which this version of Tula (up to {head_revision()}) does not know: "
            "run `pip install --upgrade tula` if a later version made it, and give --database a new place if it was "
            "made before the first release."
        )


def _run_migrations(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _migrations() -> Path:
    """Return the folder of migrations: inside the package in a wheel, next to `service/` in a checkout."""
    packaged = Path(__file__).resolve().parents[1] / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[3] / "migrations"
