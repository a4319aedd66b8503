"""Repeated measurements of one configuration become one row; what the rows together cannot tell becomes sentences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.predict.fit import Targets
from tula_service.perfmodel.predict.observations import FloatArray, Points, StepTimeObservations
from tula_service.perfmodel.predict.residual import ResidualScales

__all__ = ["Merged", "merge_repeats", "statements"]

_CONTRADICTION = 1.25
_IMPLAUSIBLE = 2.0  # in 69 of 72 public grids no pair of all their configurations differs so


@dataclass(frozen=True)
class Merged:
    """One row per configuration and how many measurements went into it, shape (n,)."""

    observations: StepTimeObservations
    repeats: FloatArray

    def targets(self, rows: npt.NDArray[np.bool_], scales: ResidualScales) -> Targets:
        """What the fit has to meet on these rows; a mean of k runs has 1/k of the run-to-run variance."""
        here, repeats = self.observations.take(rows), self.repeats[rows]
        within = np.nan_to_num(here.relative_sd, nan=0.0)
        compute = np.where(
            np.isfinite(here.compute_time_s), here.compute_time_s, here.step_time_s - here.exposed_comm_time_s
        )
        micro = compute / here.points.grad_accum_steps
        usable = np.isfinite(micro) & (micro > 0.0) & (compute <= here.step_time_s * 1.02)
        return Targets(
            points=here.points,
            log_step=np.log(here.step_time_s),
            noise_variance=scales.noise**2 / repeats + within**2,
            log_compute=np.log(np.where(usable, micro, np.nan)),
        )


def merge_repeats(observations: StepTimeObservations) -> tuple[Merged, tuple[str, ...]]:
    """Merge rows of equal configuration by the median of three or more and by the geometric mean of two."""
    points = observations.points
    keys: dict[tuple[object, ...], list[int]] = {}
    for row in range(len(points)):
        key = (
            points.instance_type[row],
            points.num_nodes[row],
            points.world_size[row],
            points.local_batch_size[row],
            points.grad_accum_steps[row],
        )
        keys.setdefault(key, []).append(row)
    if len(keys) == len(points):
        return Merged(observations, np.ones(len(points))), ()
    groups = list(keys.values())
    notes = []
    for group in groups:
        times = observations.step_time_s[group]
        if times.max() > _CONTRADICTION * times.min():
            first = group[0]
            notes.append(
                f"Repeats at {points.world_size[first]:.0f} ranks and local batch {points.local_batch_size[first]:.0f} "
                f"contradict one another ({times.min():.4g} s to {times.max():.4g} s); their median is used."
            )
    with np.errstate(all="ignore"):
        middle = [float(np.exp(np.median(np.log(observations.step_time_s[group])))) for group in groups]
        sds = [_middle(observations.relative_sd[group]) / np.sqrt(len(group)) for group in groups]
    merged = StepTimeObservations(
        points=points.take([group[0] for group in groups]),
        step_time_s=np.array(middle),
        relative_sd=np.array(sds),
        compute_time_s=np.array([_middle(observations.compute_time_s[group]) for group in groups]),
        exposed_comm_time_s=np.array([_middle(observations.exposed_comm_time_s[group]) for group in groups]),
    )
    return Merged(merged, np.array([float(len(group)) for group in groups])), tuple(notes)


def statements(observations: StepTimeObservations) -> tuple[str, ...]:
    """Sentences about what these measurements cannot tell, one per gap, and on the pair that cannot both be true."""
    points = observations.points
    found = _implausible(observations)
    if len(points) == 1:
        found.append("One configuration was measured: only the scale is known, all else rests on the prior.")
        return tuple(found)
    if np.unique(points.local_batch_size).size == 1:
        found.append("Every run had the same local batch: the effect of the batch rests on the prior.")
    if np.unique(points.world_size).size == 1:
        found.append("Every run had the same cluster size: the effect of the cluster rests on the prior.")
    return tuple(found)


def _implausible(observations: StepTimeObservations) -> list[str]:
    """On the worst pair in which less took far longer: fewer nodes at one local batch, or a smaller one on as many."""
    points, seconds = observations.points, observations.step_time_s
    alike = (
        (np.array(points.instance_type, dtype=object)[:, None] == np.array(points.instance_type, dtype=object)[None, :])
        & (points.grad_accum_steps[:, None] == points.grad_accum_steps[None, :])
        & np.isclose((points.world_size / points.num_nodes)[:, None], (points.world_size / points.num_nodes)[None, :])
    )
    nodes, batch = (values[:, None] - values[None, :] for values in (points.num_nodes, points.local_batch_size))
    less = alike & (((nodes < 0) & (batch == 0)) | ((nodes == 0) & (batch < 0)))
    ratio = np.where(less, seconds[:, None] / seconds[None, :], 0.0)
    slow, fast = (int(row) for row in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    if ratio[slow, fast] <= _IMPLAUSIBLE:
        return []
    return [
        f"A step of {_shown(points, slow)} took {ratio[slow, fast]:.3g} times as long as one of "
        f"{_shown(points, fast)}, which has more to do: one of them ran under other conditions (threads of a process, "
        "other work on the node); measure both again."
    ]


def _shown(points: Points, row: int) -> str:
    nodes = int(points.num_nodes[row])
    return f"{nodes} node{'s' if nodes > 1 else ''} at local batch {points.local_batch_size[row]:.0f}"


def _middle(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")
