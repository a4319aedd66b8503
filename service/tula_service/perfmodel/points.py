"""What was measured, as columns: points of the configuration space, step times and memory readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

FloatArray = npt.NDArray[np.float64]


class ObservationError(ValueError):
    """A measurement or a request that no model can use; the message names the column, the row and the remedy."""


def column(
    name: str,
    values: Sequence[float] | FloatArray,
    rows: int | None = None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    nan_allowed: bool = False,
) -> FloatArray:
    """Check one column and return it as a read-only float array of shape (rows,).

    Raises ObservationError on a wrong length, NaN (unless allowed), infinity, or a value below its bound.
    """
    array = np.array(values, dtype=np.float64).reshape(-1)
    if rows is not None and array.size != rows:
        raise ObservationError(f"{name}: {array.size} values for {rows} observations; give one value for each.")
    bad = np.isinf(array) | (np.isnan(array) & (not nan_allowed))
    if at_least is not None:
        bad |= array < at_least
    if above is not None:
        bad |= array <= above
    if bad.any():
        row = int(np.argmax(bad))
        want = f"above {above:g}" if above is not None else f"at least {at_least:g}" if at_least is not None else "any"
        raise ObservationError(f"{name}[{row}] is {array[row]!r}; give a finite number, {want}.")
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Logarithms:
    """Natural logarithms of n points, and where there is anything to communicate, each of shape (n,)."""

    local_batch_size: FloatArray
    ranks_per_node: FloatArray
    pairs_of_ranks: FloatArray
    pairs_of_nodes: FloatArray
    earlier_micro_steps: FloatArray
    several_ranks: npt.NDArray[np.bool_]
    several_ranks_per_node: npt.NDArray[np.bool_]
    several_nodes: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Points:
    """Configurations as columns, each of shape (n,); `world_size` may be no multiple of `num_nodes`."""

    num_nodes: FloatArray
    world_size: FloatArray
    local_batch_size: FloatArray
    grad_accum_steps: FloatArray
    instance_type: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise ObservationError on columns that are not configurations."""
        rows = len(self.instance_type)
        for name in ("num_nodes", "world_size", "local_batch_size", "grad_accum_steps"):
            object.__setattr__(self, name, column(name, getattr(self, name), rows, at_least=1.0))

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Points:
        """The columns of a sequence of configurations, in its order."""
        return cls.columns(
            num_nodes=[float(c.num_nodes) for c in configurations],
            world_size=[float(c.world_size) for c in configurations],
            local_batch_size=[float(c.local_batch_size) for c in configurations],
            grad_accum_steps=[float(c.grad_accum_steps) for c in configurations],
            instance_type=[c.instance_type for c in configurations],
        )

    @classmethod
    def columns(
        cls,
        *,
        num_nodes: Sequence[float] | FloatArray,
        world_size: Sequence[float] | FloatArray,
        local_batch_size: Sequence[float] | FloatArray,
        grad_accum_steps: Sequence[float] | FloatArray | None = None,
        instance_type: Sequence[str] | None = None,
    ) -> Points:
        """The same from plain sequences; accumulation defaults to 1 and every point to the default instance type."""
        rows = len(num_nodes)
        return cls(
            num_nodes=np.asarray(num_nodes, dtype=np.float64),
            world_size=np.asarray(world_size, dtype=np.float64),
            local_batch_size=np.asarray(local_batch_size, dtype=np.float64),
            grad_accum_steps=np.ones(rows) if grad_accum_steps is None else np.asarray(grad_accum_steps, np.float64),
            instance_type=(DEFAULT_INSTANCE_TYPE,) * rows if instance_type is None else tuple(instance_type),
        )

    def __len__(self) -> int:
        """Number of points."""
        return len(self.instance_type)

    @cached_property
    def logarithms(self) -> Logarithms:
        """The natural logarithms that the step-time form needs; a fit asks for them a hundred times."""
        ranks = self.world_size / self.num_nodes
        return Logarithms(
            local_batch_size=np.log(self.local_batch_size),
            ranks_per_node=np.log(ranks),
            pairs_of_ranks=np.log(ranks / 2.0),
            pairs_of_nodes=np.log(self.num_nodes / 2.0),
            earlier_micro_steps=np.log(np.maximum(self.grad_accum_steps - 1.0, 1e-30)),
            several_ranks=self.world_size > 1.0,
            several_ranks_per_node=ranks > 1.0,
            several_nodes=self.num_nodes > 1.0,
        )

    def rows(self) -> list[tuple[str, float, float, float, float]]:
        """A key for each point that is equal for equal points."""
        columns = (self.num_nodes, self.world_size, self.local_batch_size, self.grad_accum_steps)
        return list(zip(self.instance_type, *(values.tolist() for values in columns), strict=True))

    def rows_of(self, instance_type: str) -> npt.NDArray[np.intp]:
        """Row numbers of the points on an instance type."""
        return np.flatnonzero([name == instance_type for name in self.instance_type])

    def take(self, rows: Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Points:
        """The points at these row numbers, or where this mask is true."""
        index = np.arange(len(self))[np.asarray(rows)] if len(self) else np.arange(0)
        return Points(
            num_nodes=self.num_nodes[index],
            world_size=self.world_size[index],
            local_batch_size=self.local_batch_size[index],
            grad_accum_steps=self.grad_accum_steps[index],
            instance_type=tuple(self.instance_type[int(i)] for i in index),
        )


@dataclass(frozen=True)
class StepTimeObservations:
    """Measured step times; every column has shape (n,), NaN means "not measured" where it is allowed.

    `relative_sd` is the standard error of that row's mean step time over the mean (0.02 = 2 %). Several rows of the
    same configuration are welcome; contradictions widen the intervals. `compute_time_s` is without the waits for data,
    `input_time_s`, which are a part of the step; `optimizer_time_s` is the part of it that micro-steps do not repeat.
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
        """Raise ObservationError on a step time that is zero, negative, NaN or infinite, and on ragged columns."""
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
        """Step times measured at these points; `columns` are of OPTIONAL, and those not measured are left out."""
        where = points if isinstance(points, Points) else Points.of(points)
        given = {name: values for name, values in columns.items() if values is not None}
        known = dict.fromkeys(cls.OPTIONAL, np.full(len(where), np.nan)) | given
        arrays = {name: np.asarray(values, dtype=np.float64) for name, values in known.items()}
        return cls(points=where, step_time_s=np.asarray(step_time_s, dtype=np.float64), **arrays)

    def __len__(self) -> int:
        """Number of measured step times."""
        return len(self.points)

    def take(self, rows: Sequence[int] | npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> StepTimeObservations:
        """The observations at these row numbers, or where this mask is true."""
        index = np.arange(len(self))[np.asarray(rows)] if len(self) else np.arange(0)
        columns = {name: getattr(self, name)[index] for name in ("step_time_s", *self.OPTIONAL)}
        return StepTimeObservations(points=self.points.take(index), **columns)


@dataclass(frozen=True)
class MemoryObservations:
    """Peak memory of one rank against its local batch, for one instance type; arrays of shape (n,) and (m,).

    `out_of_memory_batch_sizes` are local batches that did not fit into `capacity_bytes`. `static_bytes` is what does
    not grow with the batch (parameters, gradients, optimizer state), where the agent could count it.
    """

    local_batch_size: FloatArray
    peak_bytes: FloatArray
    out_of_memory_batch_sizes: FloatArray = field(default_factory=lambda: np.zeros(0))
    capacity_bytes: float | None = None
    static_bytes: float | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError on readings that are not positive and finite."""
        batches = column("local_batch_size", self.local_batch_size, at_least=1.0)
        object.__setattr__(self, "local_batch_size", batches)
        object.__setattr__(self, "peak_bytes", column("peak_bytes", self.peak_bytes, batches.size, above=0.0))
        failed = column("out_of_memory_batch_sizes", self.out_of_memory_batch_sizes, at_least=1.0)
        object.__setattr__(self, "out_of_memory_batch_sizes", failed)
        for name in ("capacity_bytes", "static_bytes"):
            value = getattr(self, name)
            if value is not None:
                column(name, [value], above=0.0)
