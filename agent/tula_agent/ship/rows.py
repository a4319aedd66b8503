"""Request bodies for samples and telemetry: rows in, columns out, grouped and bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from tula_agent.readings import StepTiming

MAX_ROWS = 5_000
"""Rows of one request; the wire allows twice as many."""


@dataclass(frozen=True)
class StepSplit:
    """One step over all ranks, seconds. `straggler_rank` is None where all ranks arrive at the same time."""

    compute_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float
    skew_s: float | None = None
    straggler_rank: int | None = None


@dataclass
class SampleRow:
    """One step as it is sent. `split` is None where communication was not measured."""

    timing: StepTiming
    warmup: bool
    method: str = "wall"
    split: StepSplit | None = None


_SPLIT = [field.name for field in fields(StepSplit)]


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
                "step_time_s": [_short(row.timing.step_time_s) for _, row in part],
                "input_time_s": [_short(row.timing.input_time_s) for _, row in part],
            }
            for name in _SPLIT:
                column = [getattr(row.split, name, None) for _, row in part]
                if any(value is not None for value in column):
                    body[name] = [None if value is None else _short(value) for value in column]
            bodies.append({name: value for name, value in body.items() if value is not None})
    return bodies


def telemetry_body(
    values: list[tuple[int, str, float]], identity: dict[str, Any], sequence: int
) -> dict[str, Any] | None:
    """Body of `POST .../telemetry`, or None without values; what is not finite becomes null."""
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
