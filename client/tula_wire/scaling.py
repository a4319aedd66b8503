"""Thresholds of gradient scaling: set by users, tuned by the service, pulled by agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tula_wire._base import Count, Positive, WireModel

__all__ = ["Granularity", "ScalingPatch", "ScalingPolicy", "ScalingThresholds"]

ScalingPolicy = Literal["gain", "ags", "static", "none"]
Granularity = Literal["tensor", "channel", "element"]


class ScalingThresholds(WireModel):
    """How the optimizer wrapper scales; a number that is null stays what the training script made it."""

    version: int = Field(1, description="Grows with every change; also the ETag.")
    policy: ScalingPolicy = "gain"
    granularity: Granularity | None = None
    delta: Positive | None = Field(None, description="A step with gradient variability at or above it is sensitive.")
    small_batch_size: Count | None = Field(None, description="b_small, in examples.")
    static_scale: Positive | None = None
    s_min: Positive | None = None
    s_max: Positive | None = None
    refresh_steps: Count | None = None
    restore_step: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Settings taken back: a checkpoint at or before this step has the weights from before them."
    )
    restore_run_id: str | None = Field(None, description="The run that `restore_step` is a step of.")
    gradient_noise_scale: float | None = None
    gradient_noise_scale_error: float | None = None
    critical_batch_size: float | None = None
    reason: str = ""


class ScalingPatch(WireModel):
    """What a user wants of a job's scaling; fields left out stay, null hands one back to tuning and the script.

    `policy` is the one that the job's agents use, whatever their scripts say; the other fields belong to one policy:
    the one named in the query, else `policy`, else the job's.
    """

    policy: ScalingPolicy | None = None
    granularity: Granularity | None = None
    delta: Positive | None = None
    small_batch_size: Count | None = None
    static_scale: Positive | None = None
    s_min: Positive | None = None
    s_max: Positive | None = None
    refresh_steps: Count | None = None
