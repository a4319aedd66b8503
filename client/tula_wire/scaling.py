"""Defines models of the gradient-scaling values that users set for a job and a policy, and that agents read."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tula_wire._base import Count, WireModel, optional
from tula_wire.bounds import MAX_DELTA, MAX_FACTOR, MAX_NUMBER, MIN_DELTA, MIN_FACTOR, ScalingPolicy

Delta = Annotated[float, Field(ge=MIN_DELTA, le=MAX_DELTA)]
Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR)]


class ScalingPatch(WireModel):
    """A user's change to one policy's values; omitted fields keep their values, and null lets the script decide.

    Agents use only those values that their scripts do not pass explicitly.
    """

    delta: Delta | None = optional("Gradient variability at or above which a step counts as sensitive.")
    small_batch_size: Count | None = optional("The small batch b_small, in examples.")
    static_scale: Factor | None = optional("Factor that the `static` policy applies.")
    s_min: Factor | None = optional("Minimum factor.")
    s_max: Factor | None = optional("Maximum factor.")


class ScalingThresholds(ScalingPatch):
    """The values of one policy; the training script decides those that are null, and may override the others."""

    version: int = Field(
        1,
        ge=0,
        le=MAX_NUMBER,
        description="Version of the values, which increases with every change and is also the ETag.",
    )
    policy: ScalingPolicy = Field("gain", description="The policy to which the values belong.")
