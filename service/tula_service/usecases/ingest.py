"""Ingest of samples and telemetry: each row is stored once and committed before the answer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread

from tula_service.domain import MemoryReading, RunKind, RunState
from tula_service.errors import InvalidInput, NotFound
from tula_service.perfmodel.step_summary import measured_precisely_enough
from tula_service.store import NewChunk, NewSamples, RunRecord, SampleColumns, Store, Transaction
from tula_service.store.records import FloatArray, IntArray
from tula_service.store.telemetry import chunk_row
from tula_service.store.telemetry_writer import TelemetryWriter
from tula_service.usecases.access import BoundedDict, Principal
from tula_service.usecases.background import BackgroundQueue, Work
from tula_wire import SampleBatch, SamplesAccepted, TelemetryAccepted, TelemetryChunk

SamplesObserver = Callable[[Transaction, RunRecord, NewSamples], Work | None]
"""Called in the transaction that stores new samples, after their insert; monitoring is one. The work that it returns is
done after the commit, in the background."""

KNOWN_RUNS: Final = 20_000
EVENT_EVERY_S: Final = 1.0


class Ingest:
    """Caches what never changes of a run (its key, job and project), and when samples of a run were last announced.

    Request threads and the event loop share an instance: writes to its caches hold `_lock`.
    """

    def __init__(
        self,
        store: Store,
        *,
        observers: Sequence[SamplesObserver] = (),
        threads: CapacityLimiter | None = None,
        background: BackgroundQueue | None = None,
    ) -> None:
        self._store = store
        self._background = background or BackgroundQueue(store)
        self._threads = threads
        self._observers = tuple(observers)
        self._writer = TelemetryWriter(store)
        self._lock = threading.Lock()
        self._runs: BoundedDict[str, tuple[int, str, str]] = BoundedDict(KNOWN_RUNS)
        self._announced: BoundedDict[str, float] = BoundedDict(KNOWN_RUNS)

    def samples(self, principal: Principal, run_id: str, batch: SampleBatch) -> SamplesAccepted:
        """Store a batch of samples; the answer says whether the run may stop. A resent row counts as a duplicate.

        Raises NotFound, and InvalidInput for a rank beyond both the run's world size and the one its process saw.
        """
        run_key, job_id = self._authorised(principal, run_id)
        new = samples_from_wire(batch)
        pending: list[Work] = []
        with self._store.transaction() as tx:
            try:
                counted = tx.samples.add(run_key, job_id, new)
            except sa.exc.IntegrityError:  # deleted since its key was cached
                raise NotFound.of("run", run_id) from None
            run = tx.runs.get(run_id)  # raises if the run was deleted and SQLite reused its key
            if batch.rank >= (world_size := max(batch.world_size or 0, run.configuration.world_size)):
                raise _no_such_rank(batch.rank, world_size)
            if counted.stored:
                pending = [work for observer in self._observers if (work := observer(tx, run, new)) is not None]
            stop, reason = self._may_stop(tx, run)
            tx.runs.renew(run_id)
            if counted.stored and self._may_announce(run_id):
                tx.events.append(job_id, "samples", run_id=run_id, data={"num_samples": run.num_samples})
        for work in pending:
            self._background.enqueue(run_id, work)
        return SamplesAccepted(stored=counted.stored, duplicates=counted.duplicates, stop=stop, reason=reason)

    async def telemetry(self, principal: Principal, run_id: str, chunk: NewChunk) -> TelemetryAccepted:
        """Store a chunk of telemetry in one commit with other waiting chunks. Raises NotFound, Busy, StoreUnavailable.

        Asynchronous, unlike other use cases: at a thousand requests a second a thread for each would cost more.
        """
        if run_id not in self._runs:
            await to_thread.run_sync(self._load, run_id, limiter=self._threads)
        run_key, job_id = self._authorised(principal, run_id)
        try:
            new = await self._writer.add(run_id, chunk_row(run_key, chunk))
        except NotFound:  # deleted since its key was cached
            self._runs.pop(run_id, None)
            raise NotFound.of("run", run_id) from None
        if new and self._may_announce(run_id):
            await to_thread.run_sync(self._announce, job_id, run_id, int(chunk.steps[-1]), limiter=self._threads)
        return TelemetryAccepted(stored=int(chunk.values.size) if new else 0, duplicate=not new)

    def close(self) -> None:
        """Store chunks that wait, then end the threads."""
        self._writer.close()
        self._background.close()

    def _announce(self, job_id: str, run_id: str, last_step: int) -> None:
        with (
            contextlib.suppress(sa.exc.IntegrityError),
            self._store.transaction() as tx,
        ):  # raised if the job was deleted meanwhile
            tx.events.append(job_id, "samples", run_id=run_id, data={"last_step": last_step})

    def _load(self, run_id: str) -> tuple[int, str, str]:
        with self._store.reading() as tx:
            known = tx.telemetry.run_key(run_id)
        with self._lock:
            self._runs[run_id] = known
        return known

    def _authorised(self, principal: Principal, run_id: str) -> tuple[int, str]:
        run_key, job_id, project_id = self._runs.get(run_id) or self._load(run_id)
        if not principal.may_touch(job_id=job_id, project_id=project_id):
            raise NotFound.of("run", run_id)
        return run_key, job_id

    def _may_announce(self, run_id: str) -> bool:
        now = time.monotonic()
        if now - self._announced.get(run_id, -EVENT_EVERY_S) < EVENT_EVERY_S:
            return False
        with self._lock:
            self._announced[run_id] = now
        return True

    @staticmethod
    def _may_stop(tx: Transaction, run: RunRecord) -> tuple[bool, str | None]:
        if run.state is RunState.CANCELLED:
            return True, "The run was cancelled."
        if run.state.is_final:
            return True, f"The run has ended already ({run.state.value})."
        if run.kind is not RunKind.PROFILE or run.instruction is None:
            return False, None
        tx.samples.refresh(run.key)
        recent = tx.samples.recent(run.key, rank=0)
        wanted = int(run.instruction["measuring_steps"])
        if recent.step.size >= wanted:
            return True, f"All {wanted} measuring steps are in."
        precision = float(run.instruction["precision"])
        if recent.step.size and precision > 0 and measured_precisely_enough(recent.step_time_s, precision):
            return True, f"The step time is known to within {precision:.1%} after {recent.step.size} steps."
        return False, None


def _no_such_rank(rank: int, world_size: int) -> InvalidInput:
    return InvalidInput(
        f"rank is {rank}, but a run of {world_size} rank{'s' if world_size != 1 else ''} has 0 to {world_size - 1}: "
        "send the rank as torch.distributed counts it, or the world_size that the process saw.",
        field="rank",
    )


def samples_from_wire(batch: SampleBatch) -> NewSamples:
    """The wire's batch as the store's columns; null becomes NaN."""
    return NewSamples(
        rank=batch.rank,
        boot_id=batch.boot_id,
        columns=SampleColumns(
            sequence=np.asarray(batch.sequence, np.int64),
            step=np.asarray(batch.step, np.int64),
            step_time_s=np.asarray(batch.step_time_s, np.float64),
            compute_time_s=_column(batch.compute_time_s),
            comm_time_s=_column(batch.comm_time_s),
            exposed_comm_time_s=_column(batch.exposed_comm_time_s),
            input_time_s=_column(batch.input_time_s),
            skew_s=_column(batch.skew_s),
            straggler_rank=_ranks(batch.straggler_rank),
        ),
        warmup=batch.warmup,
        world_size=batch.world_size,
        local_batch_size=batch.local_batch_size,
        grad_accum_steps=batch.grad_accum_steps,
        timing_method=batch.timing_method,
        memory=None if batch.memory is None else MemoryReading(**batch.memory.model_dump()),
        epochs_before=batch.epochs_before,
    )


def chunk_from_wire(chunk: TelemetryChunk) -> NewChunk:
    """The wire's chunk as the store's; null becomes NaN."""
    return NewChunk(
        rank=chunk.rank,
        boot_id=chunk.boot_id,
        sequence=chunk.sequence,
        steps=np.asarray(chunk.steps, np.int64),
        names=list(chunk.columns),
        values=np.array(list(chunk.columns.values()), np.float64),
    )


def _column(values: Sequence[float | None] | None) -> FloatArray | None:
    return None if values is None else np.array(values, np.float64)


def _ranks(values: Sequence[int | None] | None) -> IntArray | None:
    return None if values is None else np.array([-1 if value is None else value for value in values], np.int64)
