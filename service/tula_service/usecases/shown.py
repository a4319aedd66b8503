"""Records of the store as the wire's models."""

from __future__ import annotations

import tula_wire as wire
from tula_service.domain import configuration_mismatch
from tula_service.store import EventRecord, JobRecord, RunRecord
from tula_service.usecases.job_data import spec_of

__all__ = ["event", "job", "job_summary", "run"]


def run(record: RunRecord) -> wire.Run:
    """A run as everybody sees it."""
    mismatch = configuration_mismatch(
        record.id,
        record.configuration,
        world_size=record.observed_world_size,
        local_batch_size=record.observed_local_batch_size,
        grad_accum_steps=record.observed_grad_accum_steps,
    )
    instruction = None if record.instruction is None else wire.read(wire.Instruction, record.instruction)
    return wire.Run(
        id=record.id,
        job_id=record.job_id,
        kind=record.kind.value,
        state=record.state.value,
        configuration=record.configuration,
        origin=record.origin.value,
        purpose=record.purpose,
        instruction=instruction,
        message=record.message,
        end_cause=None if record.end_cause is None else record.end_cause.value,
        configuration_mismatch=mismatch,
        method=record.method,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        lease_expires_at=record.lease_expires_at,
        num_samples=record.num_samples,
        step_time_s=record.step_time_s,
        predicted_step_time_s=record.predicted_step_time_s,
        dropped=record.dropped,
        straggler_rank=record.straggler_rank,
        drifted=record.drifted,
    )


def job_summary(record: JobRecord) -> wire.JobSummary:
    """A job as a row of a list."""
    return wire.JobSummary.model_validate(_summary(record))


def job(record: JobRecord, plan: list[RunRecord]) -> wire.Job:
    """A job with its specification and its profiling runs, in the order of the plan."""
    fields = _summary(record)
    fields |= {"spec": spec_of(record), "plan": [run(each) for each in plan], "plan_reason": record.plan_reason}
    return wire.Job.model_validate(fields)


def event(record: EventRecord) -> wire.Event:
    """Something that happened."""
    return wire.Event.model_validate(
        {
            "id": record.id,
            "kind": record.kind,
            "job_id": record.job_id,
            "run_id": record.run_id,
            "at": record.at,
            "data": record.data,
        }
    )


def _summary(record: JobRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "name": record.name,
        "model_name": record.model_name,
        "state": record.state,
        "objective": record.objective,
        "created_at": record.created_at,
        "runs_done": record.runs_done,
        "runs_planned": record.runs_planned,
        "recommended": record.recommended,
        "predicted_time_s": record.predicted_time_s,
        "predicted_cost_usd": record.predicted_cost_usd,
        "saving_vs_smallest_batch": record.saving_vs_smallest_batch,
        "saving_vs_largest_batch": record.saving_vs_largest_batch,
        "prediction_error": record.prediction_error,
    }
