"""Represents measurements as columns: points in the configuration space, and the step times measured there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from tula_wire.configurations import Configuration, Variant

FloatArray = npt.NDArray[np.float64]
_LEAST_REST = 0.02  # of a step
_SD_PER_DEVIATION = 1.48  # ratio of the standard deviation to the median absolute deviation for a normal distribution
PointKey: TypeAlias = tuple[Variant, float, float, float, float]
"""The values that identify a point: variant, number of nodes, world size, local batch and micro-steps."""


class ObservationError(ValueError):
    """Raised if a measurement or a request cannot be used; the message names the column, the row and the remedy."""


def column(
    name: str,
    values: Sequence[float] | FloatArray,
    rows: int | None = None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    nan_allowed: bool = False,
) -> FloatArray:
    """Return a checked column as a read-only float array of shape (rows,).

    Raises ObservationError if the length is wrong, or if a value is infinite, outside its bound, or NaN although
    `nan_allowed` is False.
    """
    array = np.array(values, dtype=np.float64).reshape(-1)
    if rows is not None and array.size != rows:
        raise ObservationError(
            f"{name} has {array.size} values for {rows} observations; provide one value for each observation."
        )
    bad = np.isinf(array) | (np.isnan(array) & (not nan_allowed))
    if at_least is not None:
        bad |= array < at_least
    if above is not None:
        bad |= array <= above
    if bad.any():
        row = int(np.argmax(bad))
        want = f" above {above:g}" if above is not None else f", at least {at_least:g}" if at_least is not None else ""
        raise ObservationError(f"{name}[{row}] is {array[row]!r}; provide a finite number{want}.")
    array.flags.writeable = False
    return array


class Points:
    """Configurations as columns of shape (n,); `world_size` does not have to be a multiple of `num_nodes`."""

    COLUMNS: ClassVar = ("num_nodes", "world_size", "local_batch_size", "grad_accum_steps")

    def __init__(
        self,
        num_nodes: Sequence[float] | FloatArray,
        world_size: Sequence[float] | FloatArray,
        local_batch_size: Sequence[float] | FloatArray,
        grad_accum_steps: Sequence[float] | FloatArray | None = None,
        variant: Sequence[Variant] | None = None,
    ) -> None:
        """Check the columns; by default, points have one micro-step and the default instance type without options.

        Raises ObservationError if the columns are not valid configurations.
        """
        rows = len(num_nodes)
        steps = np.ones(rows) if grad_accum_steps is None else grad_accum_steps
        self.num_nodes = column("num_nodes", num_nodes, at_least=1.0)
        self.world_size = column("world_size", world_size, rows, at_least=1.0)
        self.local_batch_size = column("local_batch_size", local_batch_size, rows, at_least=1.0)
        self.grad_accum_steps = column("grad_accum_steps", steps, rows, at_least=1.0)
        self.variant = tuple(variant or (Variant(),) * rows)

    @classmethod
    def of(cls, configurations: Points | Sequence[Configuration]) -> Points:
        """Return the columns of the configurations, in the same order."""
        if isinstance(configurations, Points):
            return configurations
        columns = {name: [float(getattr(c, name)) for c in configurations] for name in cls.COLUMNS}
        return cls(**columns, variant=[c.variant for c in configurations])

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.variant)

    @cached_property
    def logarithms(self) -> FloatArray:
        """Return the natural logarithms of the points' columns, shape (5, n), cached because a fit uses them often.

        The rows are: local batch, ranks per node, nodes, micro-steps, and micro-steps before the last (-69 if none).
        """
        ranks, earlier = self.world_size / self.num_nodes, np.maximum(self.grad_accum_steps - 1.0, 1e-30)
        return np.asarray(np.log([self.local_batch_size, ranks, self.num_nodes, self.grad_accum_steps, earlier]))

    def rows(self) -> list[PointKey]:
        """Return the key of each point."""
        return list(zip(self.variant, *(getattr(self, name).tolist() for name in self.COLUMNS), strict=True))

    def find_rows(self, variant: Variant) -> npt.NDArray[np.intp]:
        """Return the row numbers of the points of a variant."""
        return self._rows_by_variant.get(variant, np.empty(0, np.intp))

    @cached_property
    def _rows_by_variant(self) -> dict[Variant, npt.NDArray[np.intp]]:
        """Return the row numbers of each variant; scanning all rows once per variant would be slow."""
        rows = defaultdict[Variant, list[int]](list)
        for row, variant in enumerate(self.variant):
            rows[variant].append(row)
        return {variant: np.array(numbers, np.intp) for variant, numbers in rows.items()}

    def take(self, rows: Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Points:
        """Return the points at these row numbers, or the points for which the mask is true."""
        columns = {name: getattr(self, name)[rows] for name in self.COLUMNS}
        chosen = np.arange(len(self))[rows].tolist()
        return Points(**columns, variant=[self.variant[row] for row in chosen])


@dataclass(frozen=True)
class StepTimeObservations:
    """Measured step times as columns of shape (n,); in optional columns, NaN means "not measured".

    `relative_sd` is the standard error of a row's mean step time divided by the mean (0.02 means 2 %). A configuration
    may have several rows; if they contradict one another, intervals become wider. `input_time_s` is the part of a step
    that waits for data, which `compute_time_s` does not include. `optimizer_time_s` is the part of the compute that
    occurs once per step.
    """

    OPTIONAL: ClassVar = ("relative_sd", "compute_time_s", "exposed_comm_time_s", "input_time_s", "optimizer_time_s")

    points: Points
    step_time_s: FloatArray
    relative_sd: FloatArray
    compute_time_s: FloatArray
    exposed_comm_time_s: FloatArray
    input_time_s: FloatArray
    optimizer_time_s: FloatArray

    def __post_init__(self) -> None:
        """Raise ObservationError if a step time is not positive and finite, or if columns have different lengths."""
        rows = len(self.points)
        object.__setattr__(self, "step_time_s", column("step_time_s", self.step_time_s, rows, above=0.0))
        for name in self.OPTIONAL:
            checked = column(name, getattr(self, name), rows, at_least=0.0, nan_allowed=True)
            object.__setattr__(self, name, checked)

    @classmethod
    def at(
        cls,
        points: Points | Sequence[Configuration],
        step_time_s: Sequence[float] | FloatArray,
        **columns: Sequence[float] | FloatArray | None,
    ) -> StepTimeObservations:
        """Return the observations of step times at these points; `columns` may contain any columns of OPTIONAL."""
        where = Points.of(points)
        given = {name: values for name, values in columns.items() if values is not None}
        filled = dict.fromkeys(cls.OPTIONAL, np.full(len(where), np.nan)) | given
        arrays = {name: np.asarray(values, dtype=np.float64) for name, values in filled.items()}
        return cls(points=where, step_time_s=np.asarray(step_time_s, dtype=np.float64), **arrays)

    def __len__(self) -> int:
        """Return the number of measured step times."""
        return len(self.points)

    def take(self, rows: Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> StepTimeObservations:
        """Return the observations at these row numbers, or the observations for which the mask is true."""
        columns = {name: getattr(self, name)[rows] for name in ("step_time_s", *self.OPTIONAL)}
        return StepTimeObservations(points=self.points.take(rows), **columns)

    def without_waits(self) -> StepTimeObservations:
        """Return the observations without the time spent waiting for data, because the forms do not describe this time.

        The absolute errors of the step times stay the same, so the relative errors increase.
        """
        rest_s = self.step_time_s - np.nan_to_num(self.input_time_s)
        step_s = np.maximum(rest_s, _LEAST_REST * self.step_time_s)
        return replace(self, step_time_s=step_s, relative_sd=self.relative_sd * self.step_time_s / step_s)

    def merge_repeats(self) -> tuple[StepTimeObservations, FloatArray, FloatArray]:
        """Return the observations with the rows of each configuration merged, and two arrays about the original rows.

        The merged step time is the median of three or more rows, or the geometric mean of two. The second result is the
        number of original rows per merged row, shape (n,). The third is the shortest and the longest step time of the
        original rows in seconds, shape (n, 2).
        """
        groups = defaultdict[PointKey, list[int]](list)
        for row, key in enumerate(self.points.rows()):
            groups[key].append(row)
        extremes, columns = [], defaultdict[str, list[float]](list)
        for group in groups.values():
            times = self.step_time_s[group]
            extremes.append((times.min(), times.max()))
            for name in self.OPTIONAL:
                values = getattr(self, name)[group]
                values = values[np.isfinite(values)]
                columns[name].append(float(np.median(values)) if values.size else math.nan)
            # The error of the merged value combines the errors within the runs with the spread between the runs.
            middle = float(np.median(np.log(times)))
            between = _SD_PER_DEVIATION * float(np.median(np.abs(np.log(times) - middle)))
            within = float(np.nan_to_num(columns["relative_sd"].pop()))
            columns["relative_sd"].append(math.hypot(within, between) / math.sqrt(len(group)))
            columns["step_time_s"].append(math.exp(middle))
        merged = StepTimeObservations.at(self.points.take([group[0] for group in groups.values()]), **columns)
        return merged, np.array([float(len(group)) for group in groups.values()]), np.array(extremes)

    def by_variant(self) -> dict[Variant, StepTimeObservations]:
        """Return the observations of each variant, sorted by variant."""
        return {variant: self.take(self.points.find_rows(variant)) for variant in sorted(set(self.points.variant))}
