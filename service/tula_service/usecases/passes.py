"""Whether a training that ended had the epochs and the data of its job, in which time and cost were told."""

from __future__ import annotations

import tula_wire as wire
from tula_service.domain import RunKind
from tula_service.store import RunRecord, Transaction

__all__ = ["told_otherwise"]

_AMISS = 1.5


def told_otherwise(tx: Transaction, run: RunRecord, spec: wire.JobSpec) -> str | None:
    """A sentence on a training that read much more or less than `epochs * dataset.size`; None where nobody can tell.

    One that went on from a checkpoint may rightly be short, so that only a job's first training is told so.
    """
    last = tx.samples.recent(run.key, limit=1, rank=0).step
    if last.size == 0:
        return None
    passes = (int(last[-1]) + 1) * run.configuration.global_batch_size / spec.dataset.size
    short = passes * _AMISS < spec.epochs and len(tx.runs.list(run.job_id, kind=RunKind.TRAIN, limit=2)) == 1
    if not short and passes < _AMISS * spec.epochs:
        return None
    return (
        f"It ended after {passes:.3g} passes over the {spec.dataset.size} examples of dataset.size, and the job says "
        f"{spec.epochs:g} epochs, by which time and cost are told: correct epochs or dataset.size, or what the command "
        "trains."
    )
