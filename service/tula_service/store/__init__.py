"""Durable state on SQLite or Postgres, behind one face.

    store = Store.open("tula.db")                  # or postgresql+psycopg://...; schema: store/schema.py
    with store.transaction() as tx:                # commits at the end of the block, rolls back on an exception
        job, created = tx.jobs.create(NewJob(...))
        run = tx.runs.create(job.id, NewRun(...))
    with store.reading() as tx:                    # never writes, waits for nobody
        page = tx.jobs.list(project_id=..., limit=50)
        summaries = tx.samples.summaries(job.id)   # what a fit needs, one record per run

Repositories: tx.jobs, tx.runs, tx.samples, tx.sample_pages, tx.chunks, tx.ledger, tx.fits, tx.scaling, tx.events,
tx.projects, tx.tokens, tx.audit. They take and give the frozen records of `store/records.py`, and raise
`errors.NotFound` and `errors.Conflict`. Creating a run, moving its state or storing a sample bumps the job's
`data_version` by itself.
"""

from tula_service.store.access import DEFAULT_PROJECT_ID
from tula_service.store.engine import open_engine
from tula_service.store.records import (
    AuditRecord,
    ChunkRecord,
    EventRecord,
    JobPage,
    JobRecord,
    LedgerRecord,
    MemoryReading,
    NewChunk,
    NewJob,
    NewRun,
    NewSamples,
    Outcome,
    ProjectRecord,
    RunRecord,
    RunSummary,
    SampleColumns,
    ScalingRecord,
    Stored,
    TokenRecord,
)
from tula_service.store.store import Store, Transaction, utc_now

__all__ = [
    "DEFAULT_PROJECT_ID",
    "AuditRecord",
    "ChunkRecord",
    "EventRecord",
    "JobPage",
    "JobRecord",
    "LedgerRecord",
    "MemoryReading",
    "NewChunk",
    "NewJob",
    "NewRun",
    "NewSamples",
    "Outcome",
    "ProjectRecord",
    "RunRecord",
    "RunSummary",
    "SampleColumns",
    "ScalingRecord",
    "Store",
    "Stored",
    "TokenRecord",
    "Transaction",
    "open_engine",
    "utc_now",
]
