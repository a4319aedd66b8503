"""Thresholds of gradient scaling: set by users, tuned by the service, pulled by agents."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tula_wire._base import Count, WireModel, optional
from tula_wire.bounds import MAX_DELTA, MAX_FACTOR, MAX_NUMBER, MIN_DELTA, MIN_FACTOR, Granularity, ScalingPolicy

Delta = Annotated[float, Field(ge=MIN_DELTA, le=MAX_DELTA)]
Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR)]


class _Numbers(WireModel):
    granularity: Granularity | None = optional("Of `ags`: one factor per `element` or per `tensor`.")
    delta: Delta | None = optional("A step with gradient variability at or above it is sensitive.")
    small_batch_size: Count | None = optional("b_small, in examples.")
    static_scale: Factor | None = optional("Factor of the policy `static`.")
    s_min: Factor | None = optional("Smallest factor.")
    s_max: Factor | None = optional("Largest factor.")
    refresh_steps: Count | None = optional("Optimizer steps between two updates of the statistics.")


class ScalingThresholds(_Numbers):
    """How the optimizer wrapper scales; the training script decides what is null here or what it passed explicitly."""

    version: int = Field(1, ge=0, le=MAX_NUMBER, description="Grows with every change; also the ETag.")
    policy: ScalingPolicy = Field("gain", description="How gradients are scaled.")
    gradient_noise_scale: float | None = optional("Estimated gradient noise scale, in examples.")
    gradient_noise_scale_error: float | None = optional("Standard error of it, in examples.")
    critical_batch_size: float | None = optional("Examples per step; a larger batch hardly improves one.")
    reason: str = Field("", description="Why the values are what they are, in one sentence.")


class ScalingPatch(_Numbers):
    """A user's change to a job's scaling; omitted fields stay, null returns a field to tuning and the script.

    Agents apply what their scripts did not pass explicitly. `policy` is the job's; the other fields belong to one
    policy: the one named in the query, else `policy`, else the job's.
    """

    policy: ScalingPolicy | None = optional("The job's policy.")
