"""The most informative configurations to measure: greedy reduction of the model's own variance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tula_service.perfmodel.points import FloatArray, Points
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire.configurations import Configuration


def uncertainty(model: StepTimeModel, candidates: Sequence[Configuration]) -> FloatArray:
    """Covariance of log step time over the candidates, shape (n, n); instance types count as independent."""
    points = Points.of(candidates)
    types = np.array(points.instance_type, dtype=object)
    covariance = np.zeros((len(candidates), len(candidates)))
    for name in sorted(set(points.instance_type)):
        posterior = model.posterior_for(name)
        at = np.flatnonzero(types == name)
        covariance[np.ix_(at, at)] = posterior.covariance_at(points.take(at))
    return covariance


def greedy_design(
    covariance: FloatArray,
    noise_variance: float,
    wanted: int,
    *,
    allowed: Iterable[int],
    known: Iterable[int] = (),
    first: Iterable[Sequence[int]] = (),
    weights: FloatArray | None = None,
    costs: FloatArray | None = None,
) -> list[int]:
    """Row numbers of up to `wanted` runs, in order, that leave the least summed variance; deterministic.

    Each pick minimises the posterior variance summed over all rows, as if it were measured with this noise: no step
    time is needed, so the runs may go in parallel. `known` rows will be measured anyway; one row of each group in
    `first` comes before all others (the largest cluster of each instance type). `weights`, one a row, say how much the
    variance of each matters; all the same without. `costs`, one a row, divide what a run removes.
    """
    matters = np.ones(len(covariance)) if weights is None else weights
    remaining = np.array(covariance)
    for row in known:
        remaining = _condition(remaining, row, noise_variance)
    open_rows = sorted(set(allowed))
    opening = [group for group in (sorted(set(rows) & set(open_rows)) for rows in first) if group]
    chosen: list[int] = []
    while len(chosen) < wanted and open_rows:
        pool = np.array(opening.pop(0) if opening else open_rows)
        gain = matters @ remaining[:, pool] ** 2 / (np.diag(remaining)[pool] + noise_variance)
        if costs is not None:
            gain = gain / costs[pool]
        row = int(pool[int(np.argmax(np.round(gain / max(float(gain.max()), 1e-300), 9)))])
        chosen.append(row)
        open_rows.remove(row)
        remaining = _condition(remaining, row, noise_variance)
    return chosen


def corner_design(candidates: Sequence[Configuration], *, two: bool = False) -> list[int]:
    """Smallest and largest batch on the largest and the smallest cluster of each type.

    `two`: as the paper has it (IV-B), the largest batch on the largest and the smallest on the smallest cluster.
    """
    rows: list[int] = []
    for name in sorted({c.instance_type for c in candidates}):
        of_type = [row for row, c in enumerate(candidates) if c.instance_type == name]
        sizes = [candidates[row].world_size for row in of_type]
        for size in dict.fromkeys((max(sizes), min(sizes))):
            cluster = [row for row in of_type if candidates[row].world_size == size]
            ordered = sorted(cluster, key=lambda row: (candidates[row].local_batch_size, candidates[row]))
            ends = (ordered[-1], ordered[0])
            rows.extend(dict.fromkeys(ends if not two else ends[:1] if size == max(sizes) else ends[1:]))
    return rows


def _condition(covariance: FloatArray, row: int, noise_variance: float) -> FloatArray:
    column = covariance[:, row]
    return np.asarray(covariance - np.outer(column, column) / (covariance[row, row] + noise_variance))
