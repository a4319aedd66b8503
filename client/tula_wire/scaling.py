"""Thresholds of gradient scaling: set by users, tuned by the service, pulled by agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tula_wire._base import Count, WireModel
from tula_wire.bounds import MAX_DELTA, MAX_FACTOR, MAX_NUMBER, MIN_DELTA, MIN_FACTOR

Delta = Annotated[float, Field(ge=MIN_DELTA, le=MAX_DELTA)]
Factor = Annotated[float, Field(ge=MIN_FACTOR, le=MAX_FACTOR)]
ScalingPolicy = Literal["gain", "ags", "static", "none", "measure"]
Granularity = Annotated[
    Literal["tensor", "channel", "element"],
    AfterValidator(lambda value: "tensor" if value == "channel" else value),
    Field(
        description="Of `ags`: one factor per element (Algorithm 1) or per tensor. `channel` is deprecated: `tensor`."
    ),
]


class ScalingThresholds(WireModel):
    """How the optimizer wrapper scales; the training script decides what is null here or what it passed explicitly."""

    version: int = Field(1, ge=0, le=MAX_NUMBER, description="Grows with every change; also the ETag.")
    policy: ScalingPolicy = "gain"
    granularity: Granularity | None = None
    delta: Delta | None = Field(None, description="A step with gradient variability at or above it is sensitive.")
    small_batch_size: Count | None = Field(None, description="b_small, in examples.")
    static_scale: Factor | None = None
    s_min: Factor | None = None
    s_max: Factor | None = None
    refresh_steps: Count | None = None
    restore_step: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = Field(
        None, description="A setting was withdrawn: restore the weights of a checkpoint at or before this step."
    )
    restore_run_id: str | None = Field(None, description="The run that `restore_step` is a step of.")
    gradient_noise_scale: float | None = None
    gradient_noise_scale_error: float | None = None
    critical_batch_size: float | None = None
    reason: str = ""


class ScalingPatch(WireModel):
    """A user's change to a job's scaling; omitted fields stay, null returns a field to tuning and the script.

    Agents apply what their scripts did not pass explicitly. `policy` is the job's; the other fields belong to one
    policy: the one named in the query, else `policy`, else the job's.
    """

    policy: ScalingPolicy | None = None
    granularity: Granularity | None = None
    delta: Delta | None = None
    small_batch_size: Count | None = None
    static_scale: Factor | None = None
    s_min: Factor | None = None
    s_max: Factor | None = None
    refresh_steps: Count | None = None
