"""Parses and checks a CSV file of steps that were measured without the agent. Pure."""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from pydantic import TypeAdapter, ValidationError

from tula_client._errors import UsageError
from tula_client._faults import faults
from tula_wire import DEFAULT_INSTANCE_TYPE, MAX_STEPS, Configuration, JobSpec, SampleBatch

REQUIRED: Final = {
    "num_nodes": "nodes of the run",
    "local_batch_size": "examples per rank and micro-step",
    "step_time_s": "wall time of one step, in seconds",
}
OPTIONAL: Final = {
    "ranks_per_node": "processes per node (1)",
    "grad_accum_steps": "micro-steps per step (1)",
    "instance_type": f"instance type of the nodes ({DEFAULT_INSTANCE_TYPE})",
    "compute_time_s": "forward, backward and optimizer, in seconds",
    "exposed_comm_time_s": "communication not hidden behind compute, in seconds",
    "input_time_s": "waiting for data, in seconds",
    "peak_bytes": "peak memory of a rank, in bytes",
}
COLUMNS: Final = REQUIRED | OPTIONAL
_FIELDS: Final = [one.name for one in fields(Configuration)]
_REMEDY: Final = ": correct the line or remove it"
TIMES: Final = ("compute_time_s", "exposed_comm_time_s", "input_time_s")


@dataclass
class Measured:
    """The steps of one configuration, in the file's order; an absent value is None."""

    configuration: Configuration
    step_time_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float | None]] = field(default_factory=lambda: {name: [] for name in TIMES})
    peak_bytes: int | None = None
    lines: list[int] = field(default_factory=list)
    """Line number of each step in the file, from 1."""
    peak_line: int = 0

    def batches(self, boot_id: str) -> list[SampleBatch]:
        """The batches to send; with the same `boot_id`, a repetition stores nothing twice."""
        return [self.batch(boot_id, start) for start in range(0, len(self.step_time_s), MAX_STEPS)]

    def batch(self, boot_id: str, start: int) -> SampleBatch:
        """The batch that starts at row `start`; raises `pydantic.ValidationError` if a value is out of range."""
        rows = slice(start, start + MAX_STEPS)
        sequence = list(range(len(self.step_time_s)))[rows]
        memory = None if self.peak_bytes is None else {"method": "reported", "peak_bytes": self.peak_bytes}
        parts = {name: values[rows] for name, values in self.parts_s.items()}
        known = {name: values for name, values in parts.items() if any(value is not None for value in values)}
        return SampleBatch.model_validate(
            {
                "rank": 0,
                "boot_id": boot_id,
                "world_size": self.configuration.world_size,
                "local_batch_size": self.configuration.local_batch_size,
                "grad_accum_steps": self.configuration.grad_accum_steps,
                "memory": memory,
                "sequence": sequence,
                "step": sequence,
                "step_time_s": self.step_time_s[rows],
                **known,
            }
        )


def parse(lines: Iterable[str]) -> list[Measured]:
    """The measurements of a CSV text, by configuration; raises `UsageError` with the line and column of an error."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    names = [name.strip().lstrip("\ufeff") for name in reader.fieldnames or []]
    _check_header(names)
    reader.fieldnames = names
    found: dict[Configuration, Measured] = {}
    for row in reader:
        if None in row or None in row.values():
            raise UsageError(f"line {reader.line_num}: give {len(names)} values, one for each name of the heading")
        configuration = _configuration(row, reader.line_num)
        measured = found.setdefault(configuration, Measured(configuration))
        step_time_s = _number(row, "step_time_s", reader.line_num)
        if not step_time_s:
            raise UsageError(f"line {reader.line_num}: step_time_s must be above 0{_REMEDY}")
        measured.step_time_s.append(step_time_s)
        measured.lines.append(reader.line_num)
        for name, values in measured.parts_s.items():
            values.append(_number(row, name, reader.line_num))
        peak = _number(row, "peak_bytes", reader.line_num)
        if peak is not None and (measured.peak_bytes is None or peak > measured.peak_bytes):
            measured.peak_bytes, measured.peak_line = int(peak), reader.line_num
    if not found:
        raise UsageError("the file has a heading but no measurements: add one line per step")
    for measured in found.values():
        _check_ranges(measured)
    return list(found.values())


def check(found: Iterable[Measured], spec: JobSpec) -> None:
    """Raise `UsageError` with the line of a configuration outside the job, which no recommendation can use."""
    clusters = {cluster.instance_type: cluster for cluster in spec.cluster}
    most_local = spec.batch.max_local_batch_size
    for one in found:
        line, configuration = one.lines[0], one.configuration
        cluster = clusters.get(configuration.instance_type)
        if cluster is None:
            problem = f"instance_type: the job has no {configuration.instance_type!r}: use {' or '.join(clusters)}"
        elif configuration.num_nodes > cluster.max_nodes:
            problem = f"num_nodes: {configuration.num_nodes} is more than the job's max_nodes of {cluster.max_nodes}"
        elif most_local is not None and configuration.local_batch_size > most_local:
            problem = f"local_batch_size: {configuration.local_batch_size} is above the job's maximum of {most_local}"
        else:
            continue
        raise UsageError(f"line {line}: {problem}{_REMEDY if cluster else ''}")


def _check_ranges(measured: Measured) -> None:
    """Raise `UsageError` with the line of the first value that the wire does not accept."""
    start = 0
    try:
        for start in range(0, len(measured.step_time_s), MAX_STEPS):
            measured.batch("check", start)
    except ValidationError as error:
        place, remedy = faults(error)[0]
        *_, name = (str(part) for part in place if isinstance(part, str))
        row = next((part for part in place if isinstance(part, int)), 0)
        line = measured.peak_line if name == "peak_bytes" else measured.lines[start + row]
        raise UsageError(f"line {line}: {name}: {remedy.rstrip('.')}, or remove the line") from None


def _check_header(names: list[str]) -> None:
    missing = [name for name in REQUIRED if name not in names]
    unknown = [name for name in names if name not in COLUMNS]
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or unknown or twice:
        wrong = [
            f"{what} {', '.join(which)}"
            for what, which in (
                ("lacks", [repr(name) for name in missing]),
                ("does not know", [_suggest(name) for name in unknown]),
                ("has twice", [repr(name) for name in twice]),
            )
            if which
        ]
        explained = "\n".join(
            f"  {name:<20} {meaning}{'' if name in REQUIRED else ', optional'}" for name, meaning in COLUMNS.items()
        )
        raise UsageError(f"the heading {' and '.join(wrong)}: the first line must name these columns\n{explained}")


def _suggest(name: str) -> str:
    """An unknown column, with a similar known one."""
    near = difflib.get_close_matches(name.lower().replace(" ", "_"), COLUMNS, n=1)
    return f"{name!r}" + (f" (did you mean {near[0]}?)" if near else "")


def _configuration(row: Mapping[str, str], line: int) -> Configuration:
    given = {name: row[name].strip() for name in _FIELDS if row.get(name, "").strip()}
    try:
        return TypeAdapter(Configuration).validate_strings(given)
    except ValidationError as error:
        place, remedy = faults(error)[0]
        raise UsageError(f"line {line}: {place[0]}: {remedy.rstrip('.')}, or remove the line") from None


def _number(row: Mapping[str, str], name: str, line: int) -> float | None:
    text = row.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"line {line}: {name}: {text!r} is not a number{_REMEDY}") from None
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"line {line}: {name}: {text!r} must be a finite number, 0 or above{_REMEDY}")
    return value
