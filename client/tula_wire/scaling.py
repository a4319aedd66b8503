"""Parameters of gradient scaling, set by users for a job and a policy, and pulled by agents."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tula_wire._base import Count, WireModel, optional
from tula_wire.bounds import MAX_DELTA, MAX_FACTOR, MAX_NUMBER, MIN_DELTA, MIN_FACTOR, ScalingPolicy

Delta = Annotated[float, Field(ge=MIN_DELTA, le=MAX_DELTA)]
Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR)]


class ScalingPatch(WireModel):
    """A user's change of one policy's numbers; omitted fields do not change, and null returns a field to the script.

    Agents use only the numbers that their scripts did not pass explicitly.
    """

    delta: Delta | None = optional("A step with gradient variability at or above it is sensitive.")
    small_batch_size: Count | None = optional("b_small, in examples.")
    static_scale: Factor | None = optional("Factor of the policy `static`.")
    s_min: Factor | None = optional("Smallest factor.")
    s_max: Factor | None = optional("Largest factor.")


class ScalingThresholds(ScalingPatch):
    """The numbers of one policy; the training script decides numbers that are null or that it passes explicitly."""

    version: int = Field(1, ge=0, le=MAX_NUMBER, description="Grows with every change; also the ETag.")
    policy: ScalingPolicy = Field("gain", description="The policy to which the numbers belong.")
