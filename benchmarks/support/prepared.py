"""Prepares a database with a job, a run and a token for requests."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.support.server import make_token
from tula_service.domain import NewRun
from tula_service.store import DEFAULT_PROJECT_ID, Store
from tula_wire import Configuration

# A single statement reads one snapshot; between two statements, a server may commit.
_COUNTED_AND_STORED = (
    "SELECT runs.num_samples, step_samples.rank, step_samples.sequence"
    " FROM runs LEFT JOIN step_samples ON step_samples.run_key = runs.key WHERE runs.kind = 'train'"
)


@dataclass
class Prepared:
    """A database with a job and a run, and a token with access to the job."""

    database: str
    job_id: str
    run_id: str
    token: str

    def stored(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the (rank, sequence) of all sample rows, and of all chunks, in the database."""
        store = Store.open(self.database)
        try:
            with store.reading() as tx:
                rows = tx.connection.exec_driver_sql(_COUNTED_AND_STORED).all()
                chunks = tx.connection.exec_driver_sql("SELECT rank, sequence FROM telemetry_chunks").all()
        finally:
            store.close()
        samples = [(rank, number) for _, rank, number in rows if rank is not None]
        assert {count for count, *_ in rows} == {len(samples)}, "the run's counter and its rows are stored together"
        return samples, [(rank, number) for rank, number in chunks]


def prepare(database: str, *, profile_runs: int = 0) -> Prepared:
    """Register a job with a training run of 256 ranks and with `profile_runs` pending profiling runs."""
    store = Store.open(database)
    configuration = Configuration(num_nodes=1, ranks_per_node=256, local_batch_size=32)
    with store.transaction() as tx:
        job, _ = tx.jobs.create(DEFAULT_PROJECT_ID, {"name": "crash", "model": {"name": "net"}, "objective": "knee"})
        run = tx.runs.create(job.id, NewRun("train", configuration, "running"))
        for _ in range(profile_runs):
            tx.runs.create(job.id, NewRun("profile", configuration))
    store.close()
    return Prepared(database, job.id, run.id, make_token(database))
