"""Parses and checks a CSV file of steps that were measured without the agent. Pure."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields

from pydantic import Field, ValidationError

from tula_client._errors import UsageError
from tula_client._faults import faults
from tula_wire import DEFAULT_INSTANCE_TYPE, MAX_STEPS, Configuration, JobSpec, MemoryBreakdown, SampleBatch, WireModel
from tula_wire._base import Count, Name
from tula_wire.samples import Seconds, StepTime

CORRECT = "correct the line or remove it"
TIMES = ("step_time_s", "compute_time_s", "exposed_comm_time_s", "input_time_s")


class Row(WireModel):
    """The columns of the file."""

    num_nodes: Count = Field(description="nodes of the run")
    local_batch_size: Count = Field(description="examples per rank and micro-step")
    step_time_s: StepTime = Field(description="wall time of one step, in seconds")
    ranks_per_node: Count = Field(1, description="processes per node (1)")
    grad_accum_steps: Count = Field(1, description="micro-steps per step (1)")
    instance_type: Name = Field(
        DEFAULT_INSTANCE_TYPE, description=f"instance type of the nodes ({DEFAULT_INSTANCE_TYPE})"
    )
    compute_time_s: Seconds | None = Field(None, description="forward, backward and optimizer, in seconds")
    exposed_comm_time_s: Seconds | None = Field(None, description="communication not hidden behind compute, in seconds")
    input_time_s: Seconds | None = Field(None, description="waiting for data, in seconds")
    peak_bytes: float | None = Field(None, ge=0, le=2**60, description="peak memory of a rank, in bytes")


@dataclass
class Measured:
    """The steps of one configuration, in the file's order; `line` is that of the first."""

    configuration: Configuration
    rows: list[Row]
    line: int

    def batches(self, boot_id: str) -> list[SampleBatch]:
        """The batches to send; with the same `boot_id`, a repetition stores nothing twice."""
        peak = max((row.peak_bytes for row in self.rows if row.peak_bytes is not None), default=None)
        memory = None if peak is None else MemoryBreakdown(method="reported", peak_bytes=int(peak))
        batches = []
        for start in range(0, len(self.rows), MAX_STEPS):
            rows = self.rows[start : start + MAX_STEPS]
            sequence = list(range(start, start + len(rows)))
            columns = {name: [getattr(row, name) for row in rows] for name in TIMES}
            batches.append(
                SampleBatch.model_validate(
                    {
                        "rank": 0,
                        "boot_id": boot_id,
                        "world_size": self.configuration.world_size,
                        "local_batch_size": self.configuration.local_batch_size,
                        "grad_accum_steps": self.configuration.grad_accum_steps,
                        "memory": memory,
                        "sequence": sequence,
                        "step": sequence,
                        **{name: column for name, column in columns.items() if set(column) != {None}},
                    }
                )
            )
        return batches


def parse(lines: Iterable[str]) -> list[Measured]:
    """The measurements of a CSV text, by configuration; raises `UsageError` with the line and column of an error."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    names = [name.strip().lstrip("\ufeff") for name in reader.fieldnames or []]
    _check_header(names)
    reader.fieldnames = names
    found: dict[Configuration, Measured] = {}
    for texts in reader:
        line = reader.line_num
        if None in texts or None in texts.values():
            raise UsageError(f"line {line}: give {len(names)} values, one for each name of the heading")
        try:
            row = Row.model_validate_strings({name: text.strip() for name, text in texts.items() if text.strip()})
        except ValidationError as error:
            (name, *_), remedy = faults(error)[0]
            raise UsageError(f"line {line}: {name}: {remedy.rstrip('.')}, or remove the line") from None
        configuration = Configuration(**{one.name: getattr(row, one.name) for one in fields(Configuration)})
        found.setdefault(configuration, Measured(configuration, [], line)).rows.append(row)
    if not found:
        raise UsageError("the file has a heading but no measurements: add one line per step")
    return list(found.values())


def check(found: Iterable[Measured], spec: JobSpec) -> None:
    """Raise `UsageError` with the line of a configuration outside the job, which no recommendation can use."""
    clusters = {cluster.instance_type: cluster for cluster in spec.cluster}
    most_local = spec.batch.max_local_batch_size
    for one in found:
        configuration = one.configuration
        cluster = clusters.get(configuration.instance_type)
        if cluster is None:
            known = " or ".join(clusters)
            problem = f"instance_type: the job has no {configuration.instance_type!r}: use {known}, or remove the line"
        elif configuration.num_nodes > cluster.max_nodes:
            most = cluster.max_nodes
            problem = f"num_nodes: {configuration.num_nodes} is more than the job's max_nodes of {most}: {CORRECT}"
        elif most_local is not None and configuration.local_batch_size > most_local:
            batch = configuration.local_batch_size
            problem = f"local_batch_size: {batch} is above the job's maximum of {most_local}: {CORRECT}"
        else:
            continue
        raise UsageError(f"line {one.line}: {problem}")


def _check_header(names: list[str]) -> None:
    """Raise `UsageError` with what is wrong in the heading, and the meaning of every column."""
    wrong = []
    try:
        Row.model_validate_strings(dict.fromkeys(names, "1"))
    except ValidationError as error:
        wrong = [f"{name}: {remedy}" for (name, *_), remedy in faults(error, Row)]
    wrong += [f"{name}: stands there twice; remove one." for name in sorted(set(names)) if names.count(name) > 1]
    if wrong:
        explained = "\n".join(
            f"  {name:<20} {column.description}{'' if column.is_required() else ', optional'}"
            for name, column in Row.model_fields.items()
        )
        raise UsageError(f"the heading is wrong: {' '.join(wrong)} The first line must name these columns\n{explained}")
