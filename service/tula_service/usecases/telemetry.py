"""Reading telemetry back: one column of one rank, thinned so that its peaks and dips stay."""

from __future__ import annotations

import numpy as np
from tsdownsample import MinMaxDownsampler

from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.store.records import FloatArray, IntArray
from tula_service.usecases.access import Principal, visible_run
from tula_wire import TelemetrySeries

__all__ = ["downsample", "read_series"]

_STEP_TIME = "step_time_s"
_MOST_SAMPLES = 1_000_000


def read_series(
    store: Store,
    principal: Principal,
    run_id: str,
    column: str,
    *,
    rank: int = 0,
    max_points: int = 2000,
    first_step: int | None = None,
    last_step: int | None = None,
) -> TelemetrySeries:
    """A column of a run; step times fall back on its samples. Raises NotFound for an unknown run or column."""
    with store.reading() as tx:
        run = visible_run(tx, principal, run_id)
        available = tx.chunks.columns(run.key)
        steps, values = tx.chunks.read(run.key, column, rank=rank, first_step=first_step, last_step=last_step)
        if column == _STEP_TIME and column not in available and run.num_samples:
            samples = tx.samples.recent(run.key, limit=_MOST_SAMPLES, rank=rank)
            steps, values = samples.step, samples.step_time_s
    names = sorted({*available, *([_STEP_TIME] if run.num_samples else [])})
    if column not in names:
        known = ", ".join(names) or "none yet"
        raise NotFound(f"Run {run_id} has no column {column!r}: it has {known}.", field="column")
    thin_steps, thin_values = downsample(steps, values, max_points)
    return TelemetrySeries(
        run_id=run_id,
        column=column,
        rank=rank,
        steps=thin_steps.tolist(),
        values=[None if value != value else value for value in thin_values.tolist()],
        total_points=int(steps.size),
        downsampled=thin_steps.size < steps.size,
        available=names,
    )


def downsample(steps: IntArray, values: FloatArray, max_points: int) -> tuple[IntArray, FloatArray]:
    """At most `max_points` of the points, the least and the greatest of every stretch among them.

    Steps without a value go first: a column that is reported now and then (validation accuracy) keeps what it has.
    """
    if steps.size <= max_points:
        return steps, values
    known = ~np.isnan(values)
    if bool(known.any()) and not bool(known.all()):
        steps, values = steps[known], values[known]
    if steps.size <= max_points:
        return steps, values
    kept = MinMaxDownsampler().downsample(np.ascontiguousarray(values), n_out=max(2, max_points - max_points % 2))
    return steps[kept], values[kept]
