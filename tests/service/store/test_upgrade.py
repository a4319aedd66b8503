"""Tests that the schema of every release is upgraded with its data, and that a wrong schema is refused."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from benchmarks.support import clean_environment
from benchmarks.support.fork_server import SERVICE, ForkedProcess, ForkServer
from benchmarks.support.postgres import PostgresServer
from benchmarks.support.server import command
from tests.service.store.examples import a_job, a_specification
from tula_service.errors import InvalidInput, SchemaMismatch, StoreUnavailable
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, migrations, open_engine
from tula_service.store.migrations import check_schema, head_revision, is_empty, upgrade_schema
from tula_service.store.tables import METADATA
from tula_wire import Estimate

MIGRATIONS = Path(__file__).parents[3] / "migrations"
KILLS = int(os.environ.get("TULA_MIGRATION_KILLS", "6"))
ASSETS = Path(__file__).parent / "assets"
"""One dump for each released schema and engine, and one of the newest, which `python -m tests.service.store.make_asset`
writes again whenever the schema changes before it is released."""


def restored(asset: Path, url: str) -> sa.Engine:
    """Create a database with the schema and rows of the asset, from the asset's statements."""
    statements = [each for each in asset.read_text(encoding="utf-8").split(";\n-- next\n") if each.strip()]
    if "psycopg" not in url:
        connection = sqlite3.connect(url)  # plain, since a dump creates tables in no particular order
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()
        return open_engine(url)
    engine = open_engine(url)
    with engine.begin() as opened:
        for statement in statements:
            opened.exec_driver_sql(statement.replace("%", "%%"))
    return engine


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.sqlite.sql")), ids=lambda path: path.name)
def test_a_released_sqlite_database_is_upgraded_with_its_data(asset: Path, tmp_path: Path) -> None:
    engine = restored(asset, str(tmp_path / "old.db"))
    holds_the_examples(engine)


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.postgres.sql")), ids=lambda path: path.name)
def test_a_released_postgres_database_is_upgraded_with_its_data(asset: Path, postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database()
    engine = restored(asset, url)
    holds_the_examples(engine)
    postgres_server.drop_database(url)


def test_kills_in_the_middle_of_a_migration_leave_the_old_schema_or_the_new(tmp_path: Path, forks: ForkServer) -> None:
    """A migration of an empty file is killed at many points, and the next migration finishes."""
    for _ in range(2):  # the first waits for the imports of the parent
        began = time.monotonic()
        assert start_migration(forks, tmp_path / f"whole-{_}.db").wait(60) == 0
        whole_s = time.monotonic() - began
    killed = 0
    for number in range(10 * KILLS):
        if number >= KILLS and killed >= KILLS // 2:
            break
        database = tmp_path / f"{number}.db"
        process = start_migration(forks, database)
        time.sleep(whole_s * (number % KILLS + 0.5) / KILLS)
        process.send_signal(signal.SIGKILL)
        if process.wait(60) == -signal.SIGKILL:
            killed += 1
        else:
            whole_s *= 0.6  # it was faster than the one that was timed, as on a machine that has become idle
        engine = open_engine(str(database))
        assert is_empty(engine) or check_schema(engine) is None
        upgrade_schema(engine)
        check_schema(engine)
        engine.dispose()
    assert killed >= KILLS // 2, "most were killed before they had ended"


def test_a_migration_ends_with_a_sentence_if_another_session_holds_a_table(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the migration waited forever, every other request for the table would wait behind it."""
    monkeypatch.setattr(migrations, "LONGEST_WAIT_S", 0.1)
    url = postgres_server.create_database()
    engine = restored(min(ASSETS.glob("*.postgres.sql")), url)
    with engine.begin() as other:
        other.exec_driver_sql("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable, match=r"held a table's lock for 0\.1 s"):
            upgrade_schema(engine)
    holds_the_examples(engine)
    postgres_server.drop_database(url)


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    """Start a fork server with the service's imports, so that a kill hits the upgrade and not the imports before it."""
    made = ForkServer([*SERVICE, "alembic.command"])
    yield made
    made.close()


def start_migration(forks: ForkServer, database: Path) -> ForkedProcess:
    """Start `tula migrate`; return the process."""
    arguments = ["-m", "tula_service", "migrate", "--database", str(database)]
    return forks.start(arguments, clean_environment(), database.with_suffix(".log"))


def holds_the_examples(engine: sa.Engine) -> None:
    """Upgrade the database; then read what `make_asset` stored, and write more."""
    upgrade_schema(engine)
    check_schema(engine)
    store = Store(engine)
    with store.reading() as tx:
        (job,) = tx.jobs.list().jobs
        assert (job.name, job.spec) == ("kept", a_specification("kept"))
        (run,) = tx.runs.list(job.id)
        assert run.num_samples == 20
        (summary,) = tx.samples.summaries(job.id, summarise)
        assert summary.step_time_s == pytest.approx(0.55, rel=0.01)
        steps, values, _ = tx.telemetry.read(run.key, "loss")
        assert steps.tolist() == list(range(10))
        assert values[4] == 2.0
        assert tx.answers.get(job.id, "kept", data_version=1, model_version="1") == "{}"
        (entry,) = tx.ledger.list(job.id)
        assert entry.predicted_step_time_s == Estimate(value=0.5, low=0.4, high=0.6)
    assert a_job(store).cursor > job.cursor
    store.close()


def test_a_sqlite_without_trigrams_is_refused_with_its_version(tmp_path: Path) -> None:
    engine = open_engine(str(tmp_path / "tula.db"))
    sa.event.listen(engine, "connect", lambda opened, _: opened.create_function("sqlite_version", 0, lambda: "3.31.1"))
    with pytest.raises(InvalidInput, match=r"SQLite 3\.31\.1 .* SQLite 3\.34 or later"):
        upgrade_schema(engine)
    engine.dispose()


def test_the_newest_schema_has_an_asset_for_each_engine() -> None:
    """A new migration needs a stored database, so that the next migration is tested on it."""
    for engine in ("sqlite", "postgres"):
        assert (ASSETS / f"{head_revision()}.{engine}.sql").exists()


def test_the_newest_asset_has_the_schema_that_migrations_build(tmp_path: Path) -> None:
    """If the newest migration changes, run `python -m tests.service.store.make_asset`."""
    engine = restored(ASSETS / f"{head_revision()}.sqlite.sql", str(tmp_path / "asset.db"))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"include_name": queried}), METADATA) == []
    engine.dispose()


def queried(name: str | None, kind: str, _parents: object) -> bool:
    """Return False for what `tables.py` leaves out: partitions, and the tables and indexes for searches."""
    return kind not in ("table", "index") or not str(name).startswith(
        ("telemetry_chunks_", "jobs_search", "ix_jobs_trigrams")
    )


def test_the_files_of_migrations_are_named_by_their_revisions_in_order() -> None:
    """The service reads the newest revision from the file names, without alembic."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    chain = [script.revision for script in scripts.walk_revisions()][::-1]
    assert chain == sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
    assert chain[-1] == scripts.get_current_head() == head_revision()


def test_migrations_build_exactly_the_tables_that_queries_use(store: Store) -> None:
    """Only Alembic creates the schema, and the schema equals `tables.py`."""
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"include_name": queried}), METADATA) == []


class TestRefusals:
    """Tests that a wrong schema is refused with the command to run."""

    def test_an_unknown_schema_names_the_upgrade_of_the_code_and_a_new_database(self, store: Store) -> None:
        """A later or an unreleased version created the schema."""
        with store.transaction() as tx:
            tx.connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        for attempt in (check_schema, upgrade_schema):
            with pytest.raises(SchemaMismatch, match=r"9999.*pip install --upgrade tula.*--database to a new database"):
                attempt(store.engine)

    def test_a_missing_schema_names_the_migration(self, store: Store) -> None:
        with store.transaction() as tx:
            tx.connection.execute(sa.text("DELETE FROM alembic_version"))
        with pytest.raises(SchemaMismatch, match="tula serve --migrate"):
            check_schema(store.engine)

    def test_serve_ends_with_that_sentence(self, sqlite_url: str, open_store: Callable[..., Store]) -> None:
        with open_store(sqlite_url).transaction() as tx:
            tx.connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        done = command("serve", "--database", sqlite_url, "--port", "0")
        assert done.returncode == 2
        assert "9999" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_new_file_is_empty_and_a_migrated_one_is_not(tmp_path: Path, sqlite_template: Path) -> None:
    """In an empty database, `tula serve` may create the schema without being asked."""
    new = open_engine(str(tmp_path / "new.db"))
    assert is_empty(new)
    new.dispose()
    shutil.copy(sqlite_template, tmp_path / "old.db")
    old = open_engine(str(tmp_path / "old.db"))
    assert not is_empty(old)
    old.dispose()


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://", "sqlite:///:memory:", "postgresql//nonsense://"])
def test_other_databases_are_refused_with_what_to_give(url: str) -> None:
    """The URL is refused before anything is opened."""
    with pytest.raises(InvalidInput, match=r"path|SQLite|postgresql"):
        open_engine(url)


def test_sqlite_is_opened_so_that_an_acknowledgement_survives_a_power_cut(sqlite_store: Store) -> None:
    """With WAL and full synchronisation, a commit returns after fsync."""
    with sqlite_store.engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
