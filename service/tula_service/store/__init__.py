"""Rows of the service's database, on SQLite or Postgres behind one interface. Locking rules: see `database.py`.

    store = Store.open("tula.db")                  # or postgresql+psycopg://...; schema: store/migrations.py
    with store.transaction() as tx:                # commits at the end of the block, rolls back on an exception
        job, created = tx.jobs.create(project_id, spec)
        run = tx.runs.create(job.id, NewRun(...))
    with store.reading() as tx:                    # never writes
        page = tx.jobs.list(project_id=..., limit=50)
        summaries = tx.samples.summaries(job.id, summarise)   # what a fit reads, one record per run

A transaction has one repository for each noun (`tx.jobs`, `tx.runs`, ...; see `Transaction`). Repositories take and
return models of the wire, such as tokens and events, or the frozen records of `domain.py`, and raise
`errors.NotFound` and `errors.Conflict`. Creating a run, changing its state and storing a sample increment the
job's `data_version`, which keys every cached answer.
"""

from tula_service.store.access import DEFAULT_PROJECT_ID
from tula_service.store.database import Store, Transaction, open_engine, utc_now

__all__ = ["DEFAULT_PROJECT_ID", "Store", "Transaction", "open_engine", "utc_now"]
