"""The facts that a rank reports about its script and its host."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tula_wire._base import Name, Seconds, WireModel, optional


class HostFacts(WireModel):
    """Facts about a rank's script and host that step times do not reveal.

    `precision`, `compiled`, `checkpointing` and `sharded` were observed in one step of a profiling run with options,
    whatever the options say.
    """

    loader_workers: Annotated[int, Field(ge=0, le=2**16)] | None = optional("`num_workers` of the training's loader.")
    cores: Annotated[int, Field(ge=1, le=2**16)] | None = optional("CPU cores that the rank may use for itself.")
    operations: Annotated[int, Field(ge=1, le=2**31)] | None = optional(
        "Nodes of the autograd graphs of a step: its operations, those of the optimizer left out."
    )
    launch_time_s: Seconds | None = optional("Seconds that it takes to start one such operation, forward and backward.")
    precision: Name | None = optional("Types in which the forward pass computed, such as `bfloat16`.")
    compiled: bool | None = optional("True: a model is compiled; false: nothing is.")
    checkpointing: bool | None = optional("True: the backward pass repeated parts of the forward pass.")
    sharded: bool | None = optional("True: no rank holds all parameters whole (FSDP, tensor parallelism).")
