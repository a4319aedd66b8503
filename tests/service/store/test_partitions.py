"""Tests that Postgres stores each telemetry chunk once, and drops whole months only after they are in the archive."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from pyarrow import parquet
from sqlalchemy import Engine, create_engine

from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk
from tests.support.clock import ManualClock
from tula_service.app import create_app
from tula_service.domain import NewChunk, RunRecord
from tula_service.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from tula_service.settings import Settings
from tula_service.store import Store, partitions
from tula_service.store.archive import Archive
from tula_service.store.migrations import upgrade_schema
from tula_service.usecases.access import ANONYMOUS, KnownRuns
from tula_service.usecases.jobs import Pruned, prune_store
from tula_service.usecases.telemetry import TelemetryIngest
from tula_wire import TelemetryChunk, routes
from tula_wire.enums import RunState

KEPT = timedelta(days=30)


def following(moment: datetime) -> datetime:
    """Return the start of the next month."""
    return (moment.replace(day=1) + timedelta(days=32)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


THIS = datetime.now(timezone.utc).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
NEXT = following(THIS)


def table(month: datetime) -> str:
    """Return the name of a month's partition."""
    return f"telemetry_chunks_{month:%Y%m}"


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    """Return a store whose clock is at the end of the retention time of this month."""
    made = Store.open(postgres_url, now=ManualClock(NEXT + KEPT))
    upgrade_schema(made.engine)
    yield made
    made.close()


def run_of(store: Store, month: datetime, **options: object) -> RunRecord:
    """Create a run that began in this month and has ended, with the key that Postgres would have given it then."""
    job = a_job(store, name=f"job-{month:%Y%m}")
    run = a_run(store, job.id, kind="train", **{"state": "succeeded", **options})
    key = int(f"{month:%Y%m}") * partitions.KEYS_OF_A_MONTH + 999
    if month != THIS:
        with store.transaction() as tx:
            tx.connection.exec_driver_sql("UPDATE runs SET key = %s WHERE id = %s", (key, run.id))
    with store.reading() as tx:
        return tx.runs.get(run.id)


def rows_of(store: Store, name: str) -> int:
    """Return the number of chunks in a table."""
    with store.reading() as tx:
        return int(tx.connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one())


def tables(store: Store) -> set[str]:
    """Return all telemetry tables, whether attached or not."""
    found = "SELECT relname FROM pg_class WHERE relname LIKE 'telemetry_chunks%%' AND relkind IN ('r', 'p')"
    with store.reading() as tx:
        return set(tx.connection.exec_driver_sql(found).scalars())


def prune(store: Store, archive: Path | str = "", **options: bool) -> Pruned:
    """Prune with the limit for telemetry; return what was removed."""
    age = {"older_than": timedelta(days=9999), "telemetry_older_than": KEPT}
    return prune_store(store, actor=ANONYMOUS, archive=str(archive), **age, **options)


def send(store: Store, run: RunRecord) -> bool:
    """Send a chunk of a run; return False if it was stored before."""
    chunk = TelemetryChunk(boot_id="boot", sequence=0, steps=[0, 1], columns={"loss": [1.0, 0.5]})
    return not TelemetryIngest(store, KnownRuns(store)).store(ANONYMOUS, run.id, chunk).duplicate


def test_a_chunk_sent_again_is_stored_once_whichever_month_its_run_began_in(store: Store) -> None:
    """The partition of a chunk depends on its run, not on the time of its arrival."""
    runs = [run_of(store, month) for month in (THIS, NEXT, following(NEXT))]
    assert [send(store, run) for run in runs * 2] == [True] * 3 + [False] * 3
    assert rows_of(store, "telemetry_chunks") == 3
    assert [rows_of(store, table(month)) for month in (THIS, NEXT, following(NEXT))] == [1, 1, 1]


def test_a_new_run_has_the_month_in_its_key(store: Store) -> None:
    month, number = divmod(a_run(store, a_job(store).id).key, partitions.KEYS_OF_A_MONTH)
    assert str(month) in (f"{THIS:%Y%m}", f"{NEXT:%Y%m}")
    assert number == 1


def test_a_month_past_its_time_is_archived_and_dropped_whole(store: Store, tmp_path: Path) -> None:
    """The file contains every value that the service had, and the other months remain unchanged."""
    old, new = run_of(store, THIS), run_of(store, NEXT)
    gaps = NewChunk(3, "boot", 7, np.array([5, 9, 6]), ["loss"], np.array([[1.5, np.nan, -0.0]]))
    with store.transaction() as tx:
        for run in (old, new):
            assert add_chunk(tx, run.key, a_chunk(0, 50))
        assert add_chunk(tx, old.key, gaps)
        steps, values, _ = tx.telemetry.read(old.key, "grad_norm")
    assert prune(store, tmp_path, dry_run=True).telemetry == [table(THIS)]
    assert rows_of(store, "telemetry_chunks") == 3
    assert prune(store, tmp_path / "new").telemetry == [table(THIS)]
    (file,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.name == f"{table(THIS)}-00001.parquet"
    stored = parquet.read_table(file).to_pylist()
    mine = [row for row in stored if (row["rank"], row["name"]) == (0, "grad_norm")]
    assert ([row["step"] for row in mine], [row["value"] for row in mine]) == (steps.tolist(), values.tolist())
    assert {(row["job_id"], row["run_id"], row["boot_id"]) for row in stored} == {(old.job_id, old.id, "boot")}
    late = [row for row in stored if row["rank"] == 3]
    assert [(row["sequence"], row["step"], row["name"]) for row in late] == [(7, at, "loss") for at in (5, 9, 6)]
    assert np.array_equal([row["value"] for row in late], [1.5, np.nan, -0.0], equal_nan=True)
    assert len(stored) == 103
    with store.reading() as tx:
        assert tx.telemetry.read(old.key, "loss").total == 0
        assert tx.telemetry.read(new.key, "loss")[1].size == 50
    assert table(THIS) not in tables(store)
    assert prune(store, tmp_path).telemetry == []


def test_a_chunk_for_a_dropped_month_is_refused(store: Store) -> None:
    old, new = run_of(store, THIS), run_of(store, NEXT)
    prune(store)
    with pytest.raises(NotFound, match="stop sending"):
        send(store, old)
    assert send(store, new)


def test_a_failed_export_drops_nothing_and_the_next_prune_finishes_it(store: Store, tmp_path: Path) -> None:
    old = run_of(store, THIS)
    with store.transaction() as tx:
        add_chunk(tx, old.key, a_chunk(0, 50))
    (tmp_path / f"{table(THIS)}-00001.parquet.0123.tmp").write_bytes(b"of a prune that was killed")
    in_the_way = tmp_path / f"{table(THIS)}-00001.parquet"
    in_the_way.mkdir()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"remains in the table {table(THIS)}"):
            prune(store, tmp_path)
        assert rows_of(store, table(THIS)) == 1
    in_the_way.rmdir()
    assert prune(store, tmp_path).telemetry == [table(THIS)]
    assert parquet.read_metadata(in_the_way).num_rows == 100
    assert list(tmp_path.iterdir()) == [in_the_way]
    assert table(THIS) not in tables(store)


@pytest.mark.parametrize("place", ["nowhere://bucket", "/dev/null/folder"])
def test_an_archive_that_cannot_be_written_is_refused_before_anything_changes(store: Store, place: str) -> None:
    old = run_of(store, THIS)
    with store.transaction() as tx:
        add_chunk(tx, old.key, a_chunk(0, 50))
    with pytest.raises(InvalidInput, match="TULA_ARCHIVE"):
        prune(store, place)
    assert rows_of(store, "telemetry_chunks") == 1


def test_a_month_stays_until_it_is_old_enough(store: Store) -> None:
    run_of(store, THIS)
    store.now.advance(-1)  # type: ignore[attr-defined] # the fixture's clock
    assert prune(store).telemetry == []
    store.now.advance(1)  # type: ignore[attr-defined] # the same
    assert prune(store).telemetry == [table(THIS)]


@pytest.mark.parametrize("state", ["pending", "claimed", "running"])
def test_a_month_stays_while_a_run_of_it_may_send(store: Store, state: RunState) -> None:
    """The run may be planned, or have an expired lease; without the month, its telemetry would be refused for good."""
    run = run_of(store, THIS, state=state, lease_s=None if state == "pending" else 60.0)
    store.now.advance(61)  # type: ignore[attr-defined] # the fixture's clock
    assert prune(store).telemetry == []
    with store.transaction() as tx:
        tx.jobs.update(run.job_id, state="archived")
    if state != "pending":
        assert prune(store).telemetry == []
        store.now.advance(KEPT.total_seconds())  # type: ignore[attr-defined] # the same
    assert table(THIS) in prune(store).telemetry


def test_a_run_that_begins_before_the_detaching_keeps_its_month(store: Store) -> None:
    """The check is repeated while `runs` is locked."""
    assert partitions.due(store.engine, before=NEXT) == [table(THIS)]
    run_of(store, THIS, state="pending")
    assert not partitions.drop(store.engine, table(THIS), None, before=NEXT)
    assert table(THIS) in tables(store)


def test_of_two_that_prune_one_drops_months_and_the_other_says_so(store: Store, tmp_path: Path) -> None:
    """Afterwards, the lock is free again."""
    with partitions.dropping(store.engine), pytest.raises(Conflict, match="Another `tula prune --yes`"):
        prune(store, tmp_path)
    assert table(THIS) in tables(store)
    assert prune(store, tmp_path).telemetry == [table(THIS)]


def test_the_lock_is_free_as_soon_as_it_is_released(store: Store) -> None:
    """The next prune once found the lock held, since Postgres notices some time later that a connection is closed."""
    held = []

    @sa.event.listens_for(store.engine, "close_detached")
    def before_closing(_: object) -> None:
        with store.engine.connect() as connection:
            held.append(connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")))

    with partitions.dropping(store.engine):
        before_closing(None)
    assert held == [1, 0]


def test_an_attempt_that_fails_leaves_the_files_of_one_that_finished(store: Store, tmp_path: Path) -> None:
    """The second attempt fails because the first has dropped the table."""
    old = run_of(store, THIS)
    with store.transaction() as tx:
        add_chunk(tx, old.key, a_chunk(0, 50))
    prune(store, tmp_path)
    with pytest.raises(StoreUnavailable, match="Could not write"):
        Archive(str(tmp_path)).write(store.engine, table(THIS))
    (file,) = tmp_path.iterdir()
    assert parquet.read_metadata(file).num_rows == 100


def test_a_month_is_on_disk_before_it_is_dropped(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the file and its name in the folder are synchronised."""
    old = run_of(store, THIS)
    with store.transaction() as tx:
        add_chunk(tx, old.key, a_chunk(0, 50))
    synced = []

    def fsync(opened: int, really: Callable[[int], None] = os.fsync) -> None:
        assert table(THIS) in tables(store)
        synced.append(os.fstat(opened).st_ino)
        really(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    prune(store, tmp_path)
    (file,) = tmp_path.iterdir()
    assert synced == [file.stat().st_ino, tmp_path.stat().st_ino]


def test_a_long_month_has_several_files_and_a_finished_one_is_not_written_again(store: Store, tmp_path: Path) -> None:
    """Surplus files of an earlier attempt are removed."""
    runs = [run_of(store, THIS) for _ in range(3)]
    with store.transaction() as tx:
        for run in runs:
            for sequence in range(150):  # more than a page
                add_chunk(tx, run.key, a_chunk(sequence, 5))
    archive = Archive(str(tmp_path), values_per_file=1000)
    archive.write(store.engine, table(THIS))
    files = sorted(tmp_path.iterdir())
    assert [parquet.read_metadata(file).num_rows for file in files] == [1000, 1000, 1000, 1000, 500]
    stored = [row for file in files for row in parquet.read_table(file).to_pylist()]
    assert len({(row["run_id"], row["step"], row["name"]) for row in stored}) == len(stored) == 4500
    written_at = [file.stat().st_mtime_ns for file in files]
    archive.write(store.engine, table(THIS))
    assert [file.stat().st_mtime_ns for file in files] == written_at
    with store.transaction() as tx:
        tx.connection.exec_driver_sql(f"DELETE FROM {table(THIS)} WHERE run_key = {runs[0].key}")
    archive.write(store.engine, table(THIS))
    assert [parquet.read_metadata(file).num_rows for file in sorted(tmp_path.iterdir())] == [1000, 1000, 1000]


def test_a_backup_that_begins_meanwhile_keeps_no_archived_month(store: Store, tmp_path: Path) -> None:
    """The backup reads `runs` until its end, but the detached table no longer refers to `runs`."""
    with ExitStack() as backup:

        class During(Archive):
            def write(self, _engine: Engine, _table: str) -> None:
                reading = backup.enter_context(store.reading()).connection
                reading.exec_driver_sql("LOCK TABLE runs IN ACCESS SHARE MODE")

        assert partitions.drop(store.engine, table(THIS), During(str(tmp_path)))
    assert table(THIS) not in tables(store)


def test_a_month_in_use_is_dropped_once_its_reader_has_finished(store: Store) -> None:
    """Dropping the month ends neither its reader nor a writer of another month."""
    old, new = run_of(store, THIS), run_of(store, NEXT)
    with store.transaction() as tx:
        assert add_chunk(tx, old.key, a_chunk(0, 5))
    with ThreadPoolExecutor(1) as pool:
        with store.transaction() as tx:
            assert tx.telemetry.read(old.key, "loss")[1].size == 5
            dropped = pool.submit(prune, store)
            with pytest.raises(TimeoutError):
                dropped.result(1.5)
            assert add_chunk(tx, new.key, a_chunk(0, 5))
        assert dropped.result(20).telemetry == [table(THIS)]
    with store.reading() as tx:
        assert tx.telemetry.read(new.key, "loss")[1].size == 5


def test_sqlite_refuses_the_limit_instead_of_ignoring_it(sqlite_store: Store) -> None:
    with pytest.raises(InvalidInput, match="TULA_TELEMETRY_DAYS"):
        prune(sqlite_store)


def test_the_service_makes_the_partitions_of_the_next_months(
    postgres_url: str, open_store: Callable[[str], Store]
) -> None:
    """The service creates them at its start, without a migration, since it may have been stopped for months."""
    store = open_store(postgres_url)
    months = {table(NEXT), table(following(NEXT))}
    assert months <= tables(store)
    for name in months:
        partitions.drop(store.engine, name, None)
    with TestClient(create_app(Settings(database=postgres_url))):
        assert months <= tables(store)


def test_a_service_without_the_partition_of_this_month_is_not_ready(
    postgres_url: str, open_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tula_service.api.operations.READY_CHECK_S", 0.0)
    app = create_app(Settings(database=postgres_url, read_only=True))
    with TestClient(app) as client:
        assert client.get(routes.READY).status_code == 200
        partitions.drop(open_store(postgres_url).engine, table(THIS), None)
        answer = client.get(routes.READY)
    assert (answer.status_code, "partition" in answer.json()["detail"]) == (503, True)


def test_a_chunk_before_its_partition_is_sent_again_and_not_given_up(store: Store) -> None:
    """The chunk is stored once the partition exists, which may be later if the database user may not create it."""
    run = run_of(store, following(NEXT))
    partitions.drop(store.engine, table(following(NEXT)), None)
    with pytest.raises(StoreUnavailable, match="no telemetry partition"):
        send(store, run)
    partitions.create_ahead(store.engine)
    assert send(store, run)


def test_a_database_user_who_may_make_no_partition_gets_one_sentence(store: Store) -> None:
    partitions.drop(store.engine, table(NEXT), None)
    limited = store.engine.url.update_query_dict({"options": "-c role=pg_read_all_data"})
    other = create_engine(limited)
    with pytest.raises(StoreUnavailable, match="the owner of the tables"):
        partitions.create_ahead(other)
    other.dispose()
