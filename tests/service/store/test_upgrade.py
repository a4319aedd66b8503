"""Schemas: forward from every released one with its data, equal to the tables, and refused when they do not fit."""

from __future__ import annotations

import json
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
from tests.service.store.examples import a_job
from tula_service.analysis.monitoring import Alarm, Monitor
from tula_service.analysis.scaling import in_force
from tula_service.errors import InvalidInput, SchemaMismatch, StoreUnavailable
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, migrations, open_engine
from tula_service.store.migrations import check_schema, head_revision, is_empty, upgrade_schema
from tula_service.store.tables import METADATA, scaling_versions
from tula_wire import Estimate

MIGRATIONS = Path(__file__).parents[3] / "migrations"
KILLS = int(os.environ.get("TULA_MIGRATION_KILLS", "6"))
ASSETS = Path(__file__).parent / "assets"
"""One dump for each released schema: what `python -m tests.service.store.make_asset` wrote when it was the newest.

Users have databases of released schemas only, so a schema that no release had needs none. The newest has one at once:
the release that comes next will write it."""


def restored(asset: Path, url: str) -> sa.Engine:
    """A database with the asset's schema and rows, built by its own statements."""
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
    """What was stored then is read now."""
    engine = restored(asset, str(tmp_path / "old.db"))
    holds_the_examples(engine)


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.postgres.sql")), ids=lambda path: path.name)
def test_a_released_postgres_database_is_upgraded_with_its_data(asset: Path, postgres_server: PostgresServer) -> None:
    """What was stored then is read now."""
    url = postgres_server.create_database()
    engine = restored(asset, url)
    holds_the_examples(engine)
    postgres_server.drop_database(url)


def test_kills_in_the_middle_of_an_upgrade_leave_the_old_schema_or_the_new(tmp_path: Path, forks: ForkServer) -> None:
    """`kill -9` at every point of an upgrade of the oldest schema: the next `tula migrate` finishes, with all data."""
    old = tmp_path / "old.db"
    restored(min(ASSETS.glob("*.sqlite.sql")), str(old)).dispose()
    for _ in range(2):  # the first waits for the imports of the parent
        began = time.monotonic()
        assert start_upgrade(forks, old, tmp_path / "whole.db").wait(60) == 0
        whole_s = time.monotonic() - began
    killed = 0
    for number in range(KILLS):
        database = tmp_path / f"{number}.db"
        process = start_upgrade(forks, old, database)
        time.sleep(whole_s * (number + 0.5) / KILLS)
        process.send_signal(signal.SIGKILL)
        if process.wait(60) == -signal.SIGKILL:
            killed += 1
        else:
            whole_s *= 0.8  # it was faster than the one that was timed, as on a machine that has become idle
        holds_the_examples(open_engine(str(database)))
    assert killed >= KILLS // 2, "most were killed before they had ended"


def test_an_upgrade_ends_with_a_sentence_if_another_session_holds_a_table(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one that waits for ever, every request for the table would wait as well."""
    monkeypatch.setattr(migrations, "LONGEST_WAIT_S", 0.1)
    url = postgres_server.create_database()
    engine = restored(min(ASSETS.glob("*.postgres.sql")), url)
    with engine.begin() as other:
        other.exec_driver_sql("LOCK TABLE runs IN ACCESS SHARE MODE")
        with pytest.raises(StoreUnavailable, match=r"held a table's lock for 0\.1 s"):
            upgrade_schema(engine)
    holds_the_examples(engine)
    postgres_server.drop_database(url)


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    """Starts commands of the service at once, so that a kill meets the upgrade and not the imports before it."""
    made = ForkServer([*SERVICE, "alembic.command"])
    yield made
    made.close()


def start_upgrade(forks: ForkServer, old: Path, database: Path) -> ForkedProcess:
    """`tula migrate` of a copy of `old`, under way."""
    shutil.copy(old, database)
    arguments = ["-m", "tula_service", "migrate", "--database", str(database)]
    return forks.start(arguments, clean_environment(), database.with_suffix(".log"))


def holds_the_examples(engine: sa.Engine) -> None:
    """Upgrade, then read what `make_asset` once stored, and write on."""
    upgrade_schema(engine)
    check_schema(engine)
    store = Store(engine)
    with store.reading() as tx:
        (job,) = tx.jobs.list().jobs
        assert (job.name, job.spec) == ("kept", {"name": "kept"})
        (run,) = tx.runs.list(job.id)
        assert run.num_samples == 20
        (summary,) = tx.samples.summaries(job.id, summarise)
        assert summary.step_time_s == pytest.approx(0.55, rel=0.01)
        steps, values = tx.telemetry.read(run.key, "loss")
        assert steps.tolist() == list(range(10))
        assert values[4] == 2.0
        assert tx.answers.get(job.id, "kept", data_version=1, model_version="1") == "{}"
        (entry,) = tx.ledger.list(job.id)
        assert entry.predicted_step_time_s == Estimate(value=0.5, low=0.4, high=0.6)
    assert a_job(store).cursor > job.cursor
    store.close()


def test_sentences_of_stored_runs_become_columns(tmp_path: Path) -> None:
    """Origin and end cause are read from purpose and message once, by the migration."""
    engine = restored(ASSETS / "0003.sqlite.sql", str(tmp_path / "old.db"))
    rows = {
        "planned": ("profile", "succeeded", "Largest cluster.", None),
        "own": ("profile", "pending", "Asked for by the user.", None),
        "lost": ("train", "failed", "Training.", "Nothing was heard of this training since its lease ran out."),
        "next": ("train", "cancelled", "Training.", "It ended without saying so: another run followed."),
        "mute": ("profile", "failed", "", "No sample arrived: the command ended without calling the agent. Call x."),
        "spoken": ("train", "failed", "Training.", "No sample arrived at the tape station."),
    }
    with engine.begin() as opened:
        (name,) = opened.exec_driver_sql("SELECT job_id FROM runs").one()
        for run_id, (kind, state, purpose, message) in rows.items():
            opened.exec_driver_sql(
                "INSERT INTO runs (id, job_id, project_id, kind, state, num_nodes, ranks_per_node, local_batch_size, "
                "grad_accum_steps, instance_type, purpose, message, position, created_at, num_samples, dropped, "
                "drifted) "
                "VALUES (?, ?, 'default', ?, ?, 1, 1, 1, 1, 'default', ?, ?, 0, '2026-01-01 00:00:00', 0, 0, 0)",
                (run_id, name, kind, state, purpose, message),
            )
    upgrade_schema(engine)
    with Store(engine).reading() as tx:
        found = {run.id: (run.origin, run.end_cause and run.end_cause) for run in tx.runs.list(name)}
    engine.dispose()
    assert {run_id: found[run_id] for run_id in rows} == {
        "planned": ("plan", None),
        "own": ("user", None),
        "lost": ("user", "vanished"),
        "next": ("user", "superseded"),
        "mute": ("plan", "no_samples"),
        "spoken": ("user", None),
    }


def test_stored_thresholds_keep_their_numbers(tmp_path: Path) -> None:
    """What users set stays by policy, what was tuned is kept once, and the mark of tuning is on its run."""
    engine = restored(ASSETS / "0003.sqlite.sql", str(tmp_path / "old.db"))
    free = {"delta": None, "small_batch_size": None}
    own = free | {"set": {"delta": 0.7, "granularity": "channel"}}
    policies = {"gain": free, "none": free, "ags": own, "static": free}
    set_by_user = {"policies": policies, "policy": "ags", "reason": "set by a user"}
    found = {"delta": 0.1, "small_batch_size": 32, "from_step": 200, "run_id": "run"}
    tuned = {**policies, "ags": own | found, "static": found}
    bodies = [set_by_user, {**set_by_user, "policies": tuned, "gradient_noise_scale": 500.0}]
    bodies.append({**bodies[-1], "policies": {p: own | {"settled_by": "run"} for p, own in policies.items()}})
    with engine.begin() as opened:
        (run_id, job_id) = opened.exec_driver_sql("SELECT id, job_id FROM runs").one()
        mark = json.dumps({"run_id": run_id, "step": 300})
        statement = "INSERT INTO fits VALUES (?, 'tuning', 0, '1', ?, '2026-01-01 00:00:00')"
        opened.exec_driver_sql(statement, (job_id, mark))
        for version, body in enumerate(bodies, start=2):
            statement = "INSERT INTO scaling_versions VALUES (?, ?, ?, '2026-01-01 00:00:00')"
            opened.exec_driver_sql(statement, (job_id, version, json.dumps(body)))
    upgrade_schema(engine)
    bodies_in_order = sa.select(scaling_versions.c.body).order_by(scaling_versions.c.version)
    with Store(engine).reading() as tx:
        assert tx.runs.get(run_id).scaling_step == 300
        kept = [body for (body,) in tx.connection.execute(bodies_in_order).all()]
    engine.dispose()
    assert all("policies" not in body for body in kept)
    assert kept[0]["set"] == {"ags": {"delta": 0.7, "granularity": "tensor"}}
    assert [in_force(body, "static") for body in kept] == [{"delta": None}, {"delta": 0.1}, {"delta": None}]
    assert in_force(kept[1], "ags")["delta"] == 0.7
    assert kept[1]["tuned"]["before"] == free
    assert (kept[1]["gradient_noise_scale"], kept[2]["rolled_back"]) == (500.0, "run")


def test_facts_that_were_kept_among_cached_answers_move_to_their_columns(tmp_path: Path) -> None:
    """Plan state, validation error and lessons leave the cache, which keeps its answers."""
    engine = restored(ASSETS / "0003.sqlite.sql", str(tmp_path / "old.db"))
    posterior = {"mean": [0.0], "sd": [1.0], "reference_batch_size": 32.0}
    facts = {
        "plan due": "out of memory",
        "cross-validation": json.dumps({"error": 0.04, "runs": ["run-1", "run-2"]}),
        "lesson": json.dumps({"types": {"default": posterior}, "pairs": [[1.0, 0.9, 1.1, 1.05]]}),
    }
    with engine.begin() as opened:
        (job_id,) = opened.exec_driver_sql("SELECT id FROM jobs").one()
        for name, body in facts.items():
            statement = "INSERT INTO fits VALUES (?, ?, 0, '1', ?, '2026-01-01 00:00:00')"
            opened.exec_driver_sql(statement, (job_id, name, body))
    upgrade_schema(engine)
    store = Store(engine)
    with store.reading() as tx:
        job = tx.jobs.get(job_id)
        assert job.plan_state == "stale_out_of_memory"
        assert (job.cross_validated_error, list(job.cross_validated_runs)) == (0.04, ["run-1", "run-2"])
        assert job.cross_validated_model == "1"
        assert tx.lessons.prediction_pairs(job_id) == [[1.0, 0.9, 1.1, 1.05]]
        assert [row.name for row in tx.connection.exec_driver_sql("SELECT name FROM answers")] == ["kept"]
    second = a_job(store)
    with store.reading() as tx:
        (earlier,) = tx.lessons.of_earlier_jobs(second.project_id, before=second.cursor, limit=10)
    assert earlier.posteriors == {"default": posterior}
    store.close()


def test_facts_in_the_state_of_a_monitor_move_to_columns_of_the_run(tmp_path: Path) -> None:
    """Also from snapshots that knew less; the state then opens the monitor as it was. Runs are changed all at once."""
    engine = restored(ASSETS / "0003.sqlite.sql", str(tmp_path / "old.db"))
    alarm = Alarm("slower", 40, 9, from_start=False, level_s=0.2, compute_s=None, examples_left=None)
    stored = Monitor(alarm=alarm, spent_s=3.0).to_json() | {"sentence": "Slower", "said": ["deadline"]}
    stored |= {"ratios": {"run": 2.0}, "time_limit_s": 60.0}
    stored["alarm"]["explained"] = False
    del stored["announced"], stored["changed"]
    with engine.begin() as opened:
        ((kept, job_id),) = opened.exec_driver_sql("SELECT id, job_id FROM runs").all()
        opened.exec_driver_sql("UPDATE runs SET drift_state = ?, drifted = 1", (json.dumps(stored),))
        for run_id in ("drifted", "steady", "stateful"):
            state = json.dumps({"spent_s": 5.0}) if run_id == "stateful" else None
            opened.exec_driver_sql(
                "INSERT INTO runs (id, job_id, project_id, kind, state, num_nodes, ranks_per_node, local_batch_size, "
                "grad_accum_steps, instance_type, purpose, position, created_at, num_samples, dropped, drifted, "
                "drift_state) VALUES "
                "(?, ?, 'default', 'train', 'failed', 1, 1, 1, 1, '', '', 0, '2026-01-01 00:00:00', 0, 0, ?, ?)",
                (run_id, job_id, run_id == "drifted", state),
            )
    updates: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *called: updates.append(called[2]))
    upgrade_schema(engine)
    with Store(engine).reading() as tx:
        run, *others = (tx.runs.get(each) for each in (kept, "drifted", "steady", "stateful"))
    engine.dispose()
    assert sum("unsteady" in each for each in updates if each.startswith("UPDATE runs")) == 2
    assert [(each.unsteady, each.drift_state) for each in others[:2]] == [(True, None), (False, None)]
    assert (others[2].unsteady, Monitor.read(dict(others[2].drift_state or {})).spent_s) == (False, 5.0)
    assert (run.drift_sentence, run.unsteady, run.time_limit_s) == ("Slower", True, 60.0)
    assert run.drift_state is not None
    found = Monitor.read(dict(run.drift_state))
    assert (found.alarm, found.announced, found.changed, found.spent_s) == (alarm, ["deadline"], True, 3.0)


def test_a_run_that_a_replica_of_an_earlier_snapshot_stores_opens_the_monitor_after_the_upgrade() -> None:
    """During a rolling upgrade, in the form that it knows."""
    former = {"sentence": "Slower", "unsteady": True, "time_limit_s": 60.0, "spent_s": 3.0}
    assert Monitor.read(former) == Monitor(spent_s=3.0)


def test_a_sqlite_without_trigrams_is_refused_with_its_version(tmp_path: Path) -> None:
    engine = open_engine(str(tmp_path / "tula.db"))
    sa.event.listen(engine, "connect", lambda opened, _: opened.create_function("sqlite_version", 0, lambda: "3.31.1"))
    with pytest.raises(InvalidInput, match=r"SQLite 3\.31\.1 .* use one from 3\.34 on"):
        upgrade_schema(engine)
    engine.dispose()


def test_the_newest_schema_has_an_asset_for_each_engine() -> None:
    """A new migration comes with a stored database, so that the next one is tested on it."""
    for engine in ("sqlite", "postgres"):
        assert (ASSETS / f"{head_revision()}.{engine}.sql").exists()


def test_the_files_of_migrations_are_named_by_their_revisions_in_order() -> None:
    """The service reads the newest revision from the names, without alembic."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    chain = [script.revision for script in scripts.walk_revisions()][::-1]
    assert chain == sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
    assert chain[-1] == scripts.get_current_head() == head_revision()


def test_migrations_build_exactly_the_tables_that_queries_use(store: Store) -> None:
    """Nothing but Alembic creates the schema, and it has not drifted from `tables.py`."""

    def queried(name: str | None, kind: str, _parents: object) -> bool:
        beside = ("telemetry_chunks_", "jobs_search", "ix_jobs_trigrams")  # partitions, and what a search looks up
        return kind not in ("table", "index") or not str(name).startswith(beside)

    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": queried})
        assert compare_metadata(context, METADATA) == []


class TestRefusals:
    """The wrong schema is refused with the command to run."""

    def test_a_newer_schema_names_the_upgrade_of_the_code(self, store: Store) -> None:
        with store.transaction() as tx:
            tx.connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        for attempt in (check_schema, upgrade_schema):
            with pytest.raises(SchemaMismatch, match=r"9999.*pip install --upgrade tula"):
                attempt(store.engine)

    def test_an_older_schema_names_the_migration(self, store: Store) -> None:
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
    """Which is how `tula serve` knows that it may create the schema unasked."""
    new = open_engine(str(tmp_path / "new.db"))
    assert is_empty(new)
    new.dispose()
    shutil.copy(sqlite_template, tmp_path / "old.db")
    old = open_engine(str(tmp_path / "old.db"))
    assert not is_empty(old)
    old.dispose()


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://", "sqlite:///:memory:", "postgresql//nonsense://"])
def test_other_databases_are_refused_with_what_to_give(url: str) -> None:
    """Before anything is opened."""
    with pytest.raises(InvalidInput, match=r"path|SQLite|postgresql"):
        open_engine(url)


def test_sqlite_is_opened_so_that_an_acknowledgement_survives_a_power_cut(sqlite_store: Store) -> None:
    """WAL with full sync: a commit returns after fsync."""
    with sqlite_store.engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
