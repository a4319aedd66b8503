"""Defines the model of the facts that a rank reports about its script and host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tula_wire._base import Name, Seconds, WireModel, optional


class HostFacts(WireModel):
    """Facts about a rank's script and host that step times do not reveal.

    `precision`, `compiled`, `checkpointing` and `sharded` are what the agent observed in one step of a profiling run
    with options; they may differ from the options' values.
    """

    loader_workers: Annotated[int, Field(ge=0, le=2**16)] | None = optional("`num_workers` of the training DataLoader.")
    cores: Annotated[int, Field(ge=1, le=2**16)] | None = optional("Number of CPU cores that only this rank may use.")
    operations: Annotated[int, Field(ge=1, le=2**31)] | None = optional(
        "Number of nodes in a step's autograd graphs, which represent all operations except those of the optimizer."
    )
    launch_time_s: Seconds | None = optional(
        "Seconds needed to launch one operation counted in `operations`, in the forward and backward pass together."
    )
    precision: Name | None = optional("Data types in which the forward pass computed, such as `bfloat16`.")
    compiled: bool | None = optional("Whether any model is compiled.")
    checkpointing: bool | None = optional("Whether the backward pass recomputed parts of the forward pass.")
    sharded: bool | None = optional("Whether parameters are sharded across ranks (FSDP, tensor parallelism).")
