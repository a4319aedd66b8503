"""Reads and writes the service's database, with one interface for SQLite and Postgres; `database.py` explains locks.

    store = Store.open("tula.db")                  # or a postgresql+psycopg:// URL
    with store.transaction() as tx:                # commits at the end of the block, or rolls back on an exception
        job, created = tx.jobs.create(project_id, spec)
        run = tx.runs.create(job.id, NewRun(...))
    with store.reading() as tx:                    # never writes
        page = tx.jobs.list(project_id=..., limit=50)
        summaries = tx.samples.summaries(job.id, summarise)   # one record per run, for a fit

A transaction has one repository for each kind of object (`tx.jobs`, `tx.runs`, ...; see `Transaction`). Repositories
accept and return models from `tula_wire`, such as tokens and events, or the frozen records in `domain.py`, and raise
`errors.NotFound` and `errors.Conflict`. The job's `data_version`, which is part of the key of every cached
recommendation, is incremented whenever a run is created or changes state and whenever a sample is stored.
"""

from tula_service.store.access import DEFAULT_PROJECT_ID
from tula_service.store.database import Store, Transaction, open_engine, utc_now

__all__ = ["DEFAULT_PROJECT_ID", "Store", "Transaction", "open_engine", "utc_now"]
