"""Stores step samples of runs and lists them. If a sample is sent twice, the first value is kept."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

import sqlalchemy as sa
from pydantic import Field

from tula_service.domain import RunRecord
from tula_service.errors import InvalidInput, NotFound
from tula_service.perfmodel.step_summary import summarise
from tula_service.store import Store, Transaction
from tula_service.store.samples import SampleCursor, SampleFilter
from tula_service.usecases import fabrics, monitoring
from tula_service.usecases.access import KnownRuns, Principal, visible_job
from tula_wire import SampleBatch, SamplePage, SamplesAccepted, StepSample
from tula_wire.enums import FINAL_STATES
from tula_wire.format import percent
from tula_wire.precision import is_known, is_long_enough

_CURSOR: Final = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)


class SampleIngest:
    """Stores batches of samples, and passes the samples of training runs on to `monitoring`."""

    def __init__(self, store: Store, runs: KnownRuns) -> None:
        self._store = store
        self._runs = runs

    def store(self, principal: Principal, run_id: str, batch: SampleBatch, lease: int | None = None) -> SamplesAccepted:
        """Store and commit a batch of samples; the result states whether the run may stop, and counts resent rows.

        Raises NotFound, Conflict if `lease` is not the run's current lease, and InvalidInput for a rank that exceeds
        both the run's world size and the world size that its process observed.
        """
        run_key, job_id = self._runs.authorise(principal, run_id)
        with self._store.transaction() as tx:
            try:
                stored = tx.samples.add(run_key, job_id, batch)
            except sa.exc.IntegrityError:  # the run was deleted after its key was cached
                raise NotFound.of("run", run_id) from None
            tx.leases.check(run_id, lease)  # the insert has locked the run's row, so no claim can intervene
            run = tx.runs.get(run_id)  # raises NotFound if the run was deleted and SQLite reused its key
            if batch.rank >= (world_size := max(batch.world_size or 0, run.configuration.world_size)):
                raise _no_such_rank("rank", batch.rank, world_size)
            highest = max(filter(None, batch.straggler_rank or ()), default=0)
            if highest >= world_size:
                raise _no_such_rank("straggler_rank", highest, world_size)
            if stored:
                monitoring.observe_samples(tx, run, batch, stored)
            ended, (stop, reason) = run.state in FINAL_STATES, _stop_advice(tx, run)
            tx.leases.renew(run_id)
            if stored and self._runs.should_emit_event(run_id):
                tx.events.append(job_id, "samples", run_id=run_id, data={"num_samples": run.num_samples})
        if batch.all_reduces is not None and stored:
            # This is a separate transaction, since it changes other jobs, which the transaction above must not lock.
            with suppress(NotFound):  # the run was deleted in the meantime
                fabrics.add_of_run(self._store, run_id, batch.all_reduces)
        duplicates = len(batch.sequence) - stored
        return SamplesAccepted(stored=stored, duplicates=duplicates, stop=stop, run_ended=ended, reason=reason)


class SampleQuery(SampleFilter):
    """A query for one page of the samples that match a filter."""

    cursor: str | None = Field(
        None,
        json_schema_extra={"pattern": r"^[0-9]{1,18}-[0-9]{1,18}$"},
        description="`next_cursor` of the previous page.",
    )
    limit: int = Field(500, ge=1, le=5000, description="Maximum number of samples on a page.")


def list_samples(store: Store, principal: Principal, job_id: str, query: SampleQuery) -> SamplePage:
    """List samples of a job's runs, ordered by process. Raises NotFound, and InvalidInput for a malformed cursor."""
    after = None if query.cursor is None else _parsed(query.cursor)
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        rows, following = tx.samples.page(job_id, query, cursor=after, limit=query.limit)
    samples = [StepSample(**{name: row[name] for name in StepSample.model_fields}) for row in rows]
    return SamplePage(samples=samples, next_cursor=None if following is None else f"{following[0]}-{following[1]}")


def _parsed(cursor: str) -> SampleCursor:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidInput(
            "The cursor is not the next_cursor of a page: omit it to start from the first page.", field="cursor"
        )
    return int(match[1]), int(match[2])


def _stop_advice(tx: Transaction, run: RunRecord) -> tuple[bool, str | None]:
    """Return advice on whether the run should end, with a reason; for a profiling run, also refresh the summary.

    The agent uses this advice only to detect that the run has ended, since it decides for itself when to stop
    (`Profiling.ends`).
    """
    if run.state == "cancelled":
        return True, "The run was cancelled."
    if run.state in FINAL_STATES:
        return True, f"The run has already ended ({run.state})."
    if run.kind != "profile" or run.instruction is None:
        return False, None
    tx.samples.refresh(run.key, summarise)
    recent = tx.samples.recent(run.key, rank=0)
    measuring_steps = int(run.instruction["measuring_steps"])
    precision, times = float(run.instruction["precision"]), recent.step_time_s.tolist()
    if is_long_enough(times, len(times), measuring_steps, precision):
        return True, f"All {len(times)} measuring steps were received."
    elapsed_s = 0.0 if run.started_at is None else (tx.now() - run.started_at).total_seconds()
    if is_known(times, precision, start_up_s=elapsed_s - sum(times)):
        return True, f"The step time is known to within {percent(precision)} after {recent.step.size} steps."
    return False, None


def _no_such_rank(field: str, rank: int, world_size: int) -> InvalidInput:
    return InvalidInput(
        f"{field} is {rank}, but the run has {world_size} rank{'s' if world_size != 1 else ''}: 0 to {world_size - 1}; "
        "send the process's rank and world_size as torch.distributed reports them.",
        field=field,
    )
