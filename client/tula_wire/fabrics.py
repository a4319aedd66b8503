"""Fabrics: how fast the ranks of an instance type reduce bytes among each other, as a probe measured it."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from tula_wire._base import Count, Name, Seconds, Timestamp, WireModel, optional
from tula_wire.bounds import MAX_BYTES_PER_S
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE
from tula_wire.jobs import Gbps
from tula_wire.recommendations import Estimate

Backend = Literal["gloo", "nccl"]
PROBE_MARK: Final = "TULA_PROBE "
"""What precedes the `FabricProbe` that the first rank of a probe prints."""


class AllReduceReading(WireModel):
    """All-reduces of one size, repeated."""

    size_bytes: Annotated[int, Field(ge=1, le=2**40)] = Field(description="Bytes that each rank holds.")
    time_s: Seconds = Field(description="Seconds of one all-reduce, the median.")
    relative_sd: Annotated[float, Field(ge=0, le=100)] = Field(
        0.0, description="Standard deviation of the repeats by their median deviation, as a share of the median."
    )
    repeats: Count = Field(1, description="How often it was measured.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.size_bytes > self.time_s * MAX_BYTES_PER_S:
            raise ValueError(f"time_s is less than {self.size_bytes} bytes take on any link: give seconds")
        return self


Readings = Annotated[list[AllReduceReading], Field(min_length=3, max_length=64)]


class AllReduces(WireModel):
    """What ranks measured together."""

    backend: Backend = Field(description="What reduced the bytes.")
    num_nodes: Count = Field(description="Nodes that took part.")
    ranks_per_node: Count = Field(description="Ranks of each of them.")
    all_ranks: Readings = Field(description="All-reduces over all ranks, by size.")
    in_node: Readings | None = optional("Over those of one node; null where there is one node, or one rank per node.")

    @model_validator(mode="after")
    def _several(self) -> Self:
        if self.num_nodes * self.ranks_per_node < 2:
            raise ValueError("one rank reduces nothing: probe with two ranks or more")
        if self.in_node is not None and 1 in (self.num_nodes, self.ranks_per_node):
            raise ValueError("in_node needs several nodes of several ranks: leave it out")
        return self


class FabricProbe(AllReduces):
    """What one probe measured of the nodes of an instance type; the newest of each number of nodes and ranks counts.

    A job uses it if `instance_type`, `accelerator` and `network_gbps` are those of its cluster; without an accelerator,
    `default` nodes are the same only with as many ranks.
    """

    instance_type: Name = Field(DEFAULT_INSTANCE_TYPE, description="As in the job's cluster.")
    accelerator: Name | None = optional("As in the job's cluster.")
    network_gbps: Gbps | None = optional("Gigabits per second, as in the job's cluster.")


class AllReduceCost(WireModel):
    """Seconds of an all-reduce of any size: `latency_s + seconds_per_byte * size`, with 90 % intervals."""

    latency_s: Estimate = Field(description="Seconds that any size takes.")
    seconds_per_byte: Estimate = Field(description="Seconds for each further byte of a rank.")


class Fabric(WireModel):
    """A stored probe and the line through its readings."""

    probe: FabricProbe = Field(description="What was measured.")
    all_ranks: AllReduceCost = Field(description="Over all ranks.")
    in_node: AllReduceCost | None = optional("Over the ranks of one node, where it was measured apart.")
    created_at: Timestamp = Field(description="When it was stored (RFC 3339, with time zone).")


class FabricList(WireModel):
    """The fabrics of a project, newest first."""

    fabrics: list[Fabric] = Field(description="Fabrics, newest first.")
