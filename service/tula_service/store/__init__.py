"""Rows of the service's database, on SQLite or Postgres behind one interface. Locking rules: see `database.py`.

    store = Store.open("tula.db")                  # or postgresql+psycopg://...; schema: store/migrations.py
    with store.transaction() as tx:                # commits at the end of the block, rolls back on an exception
        job, created = tx.jobs.create(NewJob(...))
        run = tx.runs.create(job.id, NewRun(...))
    with store.reading() as tx:                    # never writes
        page = tx.jobs.list(project_id=..., limit=50)
        summaries = tx.samples.summaries(job.id, summarise)   # what a fit reads, one record per run

A transaction has one repository for each noun (`tx.jobs`, `tx.runs`, ...; see `Transaction`). Repositories take and
return the frozen records of `store/records.py`, and raise `errors.NotFound` and `errors.Conflict`. Creating a run,
changing its state and storing a sample increment the job's `data_version`, which keys every cached answer.
"""

from tula_service.store.access import DEFAULT_PROJECT_ID as DEFAULT_PROJECT_ID
from tula_service.store.database import Store as Store
from tula_service.store.database import Transaction as Transaction
from tula_service.store.database import open_engine as open_engine
from tula_service.store.database import utc_now as utc_now
from tula_service.store.records import (
    EarlierLessons as EarlierLessons,
)
from tula_service.store.records import (
    FabricRecord as FabricRecord,
)
from tula_service.store.records import (
    JobOrder as JobOrder,
)
from tula_service.store.records import (
    JobOutcome as JobOutcome,
)
from tula_service.store.records import (
    JobPage as JobPage,
)
from tula_service.store.records import (
    JobRecord as JobRecord,
)
from tula_service.store.records import (
    LedgerOutcome as LedgerOutcome,
)
from tula_service.store.records import (
    LedgerRecord as LedgerRecord,
)
from tula_service.store.records import (
    NewChunk as NewChunk,
)
from tula_service.store.records import (
    NewJob as NewJob,
)
from tula_service.store.records import (
    NewRun as NewRun,
)
from tula_service.store.records import (
    RunRecord as RunRecord,
)
