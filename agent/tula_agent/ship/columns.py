"""From rows that training appends to the bodies that the wire wants: columns, grouped and bounded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tula_agent.measure.later import Later
from tula_agent.measure.step_timer import StepTiming

__all__ = ["MAX_ROWS", "Rows", "SampleRow", "sample_bodies", "telemetry_body"]

MAX_ROWS = 5_000
"""Rows of one request; the wire allows twice as many."""


@dataclass
class SampleRow:
    """One step as it will be sent; seconds. `split` columns stay None where nothing could be told."""

    timing: StepTiming
    warmup: bool
    method: str = "wall"
    step_time_s: float | None = None  # a device's own clock, where it is better than the host's
    compute_time_s: float | None = None
    comm_time_s: float | None = None
    exposed_comm_time_s: float | None = None
    skew_s: float | None = None
    straggler_rank: int | None = None


class Rows:
    """Two bounded queues between the training thread, which only appends, and the shipping thread, which only takes.

    `deque.append` and `popleft` are atomic, so the hot path holds no lock. Over the bound a row is dropped and counted.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._steps: deque[tuple[StepTiming, bool, bool]] = deque()
        self._values: deque[tuple[int, str, float | Later]] = deque()

    def add_step(self, timing: StepTiming, warmup: bool, sampled: bool = True) -> None:
        """A step has ended; only a sampled one is more than a point of the step-time series."""
        if len(self._steps) >= self._limit:
            self.dropped += 1
        else:
            self._steps.append((timing, warmup, sampled))

    def add_value(self, step: int, name: str, value: float | Later) -> None:
        """A named number of a step."""
        if len(self._values) >= self._limit:
            self.dropped += 1
        else:
            self._values.append((step, name, value))

    def take_steps(self) -> list[tuple[StepTiming, bool, bool]]:
        """All steps so far, oldest first."""
        return list(_drain(self._steps))

    def take_values(self) -> list[tuple[int, str, float]]:
        """All numbers that have arrived; those still on a device stay for the next time."""
        arrived: list[tuple[int, str, float]] = []
        for step, name, value in _drain(self._values):
            if isinstance(value, Later):
                if not value.ready:
                    self._values.append((step, name, value))
                    continue
                value = value.value
            arrived.append((step, name, value))
        return arrived


def _drain(rows: deque[Any]) -> Iterator[Any]:
    for _ in range(len(rows)):
        yield rows.popleft()


def sample_bodies(rows: list[SampleRow], identity: dict[str, Any], sequence: int) -> list[dict[str, Any]]:
    """Bodies of `POST .../samples`: one per batch size, accumulation, phase and method; row 0 is number `sequence`.

    `identity` holds rank, boot_id and world_size. A row keeps its number however rows are grouped.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, SampleRow]]] = {}
    for number, row in enumerate(rows, start=sequence):
        key = (row.timing.local_batch_size, row.timing.micro_steps, row.warmup, row.method)
        groups.setdefault(key, []).append((number, row))
    bodies = []
    for (size, accumulation, warmup, method), members in groups.items():
        for start in range(0, len(members), MAX_ROWS):
            part = members[start : start + MAX_ROWS]
            body = {
                **identity,
                "local_batch_size": size,
                "grad_accum_steps": accumulation,
                "timing_method": method,
                "warmup": warmup,
                "sequence": [number for number, _ in part],
                "step": [row.timing.step for _, row in part],
                "step_time_s": [_short(row.step_time_s or row.timing.step_time_s) for _, row in part],
                "input_time_s": [_short(row.timing.input_time_s) for _, row in part],
            }
            for name in ("compute_time_s", "comm_time_s", "exposed_comm_time_s", "skew_s", "straggler_rank"):
                column = [getattr(row, name) for _, row in part]
                if any(value is not None for value in column):
                    body[name] = [None if value is None else _short(value) for value in column]
            bodies.append({name: value for name, value in body.items() if value is not None})
    return bodies


def telemetry_body(
    values: list[tuple[int, str, float]], identity: dict[str, Any], sequence: int
) -> dict[str, Any] | None:
    """Body of `POST .../telemetry`, or None when there is nothing; what is not finite becomes null."""
    by_step: dict[int, dict[str, float]] = {}
    names: dict[str, None] = {}
    for step, name, value in values:
        by_step.setdefault(step, {})[name] = value
        names[name] = None
    if not by_step:
        return None
    steps = sorted(by_step)
    columns = {name: [_finite(by_step[step].get(name)) for step in steps] for name in names}
    return {
        "rank": identity["rank"],
        "boot_id": identity["boot_id"],
        "sequence": sequence,
        "steps": steps,
        "columns": columns,
    }


def _short(value: float) -> float:
    """Six significant digits: a tenth of a microsecond on a 100 ms step, in half the bytes."""
    return value if isinstance(value, int) else float(f"{max(value, 1e-9) if value > 0 else 0.0:.6g}")


def _finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
