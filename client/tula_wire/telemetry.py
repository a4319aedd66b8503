"""Raw per-step series of a training run, as columnar chunks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator
from typing_extensions import Self

from tula_wire._base import Name, WireModel
from tula_wire.samples import Column, Number, Rank

ColumnName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]

COLUMNS = (
    "step_time_s", "grad_norm", "gradient_variability", "scale", "scaled_share", "gradient_noise_scale", "loss",
    "accuracy", "validation_accuracy", "lr", "memory_bytes", "skew_s",
)  # fmt: skip
"""Columns that the service interprets; it stores and charts any other column too."""


class ChunkIdentity(WireModel):
    """Which chunk of which process: a chunk with an identity that is stored already counts as a resend."""

    rank: Rank = 0
    boot_id: Name
    sequence: Number


class TelemetryChunk(ChunkIdentity):
    """Steps and named float columns of one rank; a missing value is null."""

    steps: Annotated[Column[Number], Field(min_length=1)]
    columns: Annotated[dict[ColumnName, Column[float | None]], Field(min_length=1, max_length=64)]

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

    stored: int
    duplicate: bool = False


class TelemetrySeries(WireModel):
    """One column, down-sampled if it is longer than requested."""

    run_id: str
    column: str
    rank: int
    steps: list[int]
    values: list[float | None]
    total_points: int
    downsampled: bool
    available: list[str] = []
