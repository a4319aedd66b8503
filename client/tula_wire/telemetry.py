"""Raw per-step series of a training run, as columnar chunks."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from tula_wire._base import Name, WireModel
from tula_wire.samples import Column, Number, Rank

ColumnName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]

COLUMNS = (
    "step_time_s", "grad_norm", "gradient_variability", "scale", "scaled_share", "gradient_noise_scale", "loss",
    "accuracy", "validation_accuracy", "lr", "memory_bytes", "skew_s", "tokens_per_example",
)  # fmt: skip
"""Columns that the service interprets; it stores and charts any other column too."""


class ChunkIdentity(WireModel):
    """Which chunk of which process: a chunk with an identity that is stored already counts as a resend."""

    rank: Rank = Field(0, description="Global rank of the process.")
    boot_id: Name = Field(description="Random per process start, so that a restart never collides.")
    sequence: Number = Field(description="Number of the chunk of this process; identifies it when resent.")


class TelemetryChunk(ChunkIdentity):
    """Steps and named float columns of one rank; a missing value is null."""

    steps: Annotated[Column[Number], Field(min_length=1)] = Field(description="Optimizer step of each row.")
    columns: Annotated[dict[ColumnName, Column[float | None]], Field(min_length=1, max_length=64)] = Field(
        description="Values by name of the metric, one per step; units are in the names."
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        for name, column in self.columns.items():
            if len(column) != len(self.steps):
                raise ValueError(
                    f"columns.{name} has {len(column)} values but steps has {len(self.steps)}: send one value per step"
                )
        return self


class TelemetryAccepted(WireModel):
    """Step values stored (one number of one column of one step), or 0 for a resend."""

    stored: int = Field(description="Number of step values stored.")
    duplicate: bool = Field(False, description="True: the chunk was stored before.")


class TelemetrySeries(WireModel):
    """One column, down-sampled if it is longer than requested."""

    run_id: str = Field(description="The run.")
    column: str = Field(description="Name of the metric.")
    rank: int = Field(description="Global rank of the process.")
    steps: list[int] = Field(description="Optimizer step of each point.")
    values: list[float | None] = Field(description="Value of each point, in the unit of the column's name.")
    total_points: int = Field(description="Number of points before downsampling.")
    downsampled: bool = Field(description="True: points were left out.")
    available: list[str] = Field([], description="Names of all metrics of the run.")
