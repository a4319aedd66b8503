"""Creates small jobs, runs, samples and chunks for tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from tula_service.domain import NewChunk, NewRun, RunRecord
from tula_service.store import DEFAULT_PROJECT_ID, Store, Transaction
from tula_service.store.jobs import JobRecord
from tula_service.store.tables import runs
from tula_service.store.telemetry import chunk_row
from tula_wire import Configuration, SampleBatch
from tula_wire.enums import RunKind

CONFIGURATION = Configuration(num_nodes=2, ranks_per_node=4, local_batch_size=32, options=(("precision", "bf16"),))


def a_job(
    store: Store, *, name: str = "job", model_name: str = "digits", project_id: str = DEFAULT_PROJECT_ID
) -> JobRecord:
    """Register a job."""
    with store.transaction() as tx:
        return tx.jobs.create(project_id, a_specification(name, model_name))[0]


def a_specification(name: str, model_name: str = "digits") -> dict[str, Any]:
    """Return the part of a specification that the store reads."""
    return {"name": name, "model": {"name": model_name}, "objective": "knee"}


def a_run(store: Store, job_id: str, *, kind: RunKind = "profile", **options: Any) -> RunRecord:
    """Add a run."""
    options.setdefault("configuration", CONFIGURATION)
    with store.transaction() as tx:
        return tx.runs.create(job_id, NewRun(kind, **options))


def samples(
    count: int,
    *,
    rank: int = 0,
    boot_id: str = "boot",
    warmup: bool = False,
    step_time_s: Sequence[float] | None = None,
    **facts: Any,
) -> SampleBatch:
    """Return `count` rows from sequence 0 on; the first has neither a compute time nor a straggler."""
    return SampleBatch(
        rank=rank,
        boot_id=boot_id,
        sequence=list(range(count)),
        step=list(range(count)),
        step_time_s=np.linspace(0.5, 0.6, count).tolist() if step_time_s is None else list(step_time_s),
        compute_time_s=[None] + [0.25] * (count - 1),
        optimizer_time_s=[0.05] * count,
        straggler_rank=[None] + [1] * (count - 1),
        warmup=warmup,
        **facts,
    )


def a_chunk(sequence: int, steps: int, *, boot_id: str = "boot", shift: float = 0.0) -> NewChunk:
    """Return a chunk of two columns that follows chunk `sequence` - 1."""
    numbers = np.arange(sequence * steps, (sequence + 1) * steps)
    return NewChunk(0, boot_id, sequence, numbers, ["loss", "grad_norm"], np.stack([np.sqrt(numbers) + shift, numbers]))


def add_chunk(tx: Transaction, run_key: int, chunk: NewChunk) -> bool:
    """Store a chunk in this transaction; return False if it was stored before."""
    run_id = tx.connection.execute(sa.select(runs.c.id).where(runs.c.key == run_key)).scalar_one()
    return tx.telemetry.add(run_id, chunk, chunk_row(run_key, chunk))
