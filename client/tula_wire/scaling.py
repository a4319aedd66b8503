"""Thresholds of gradient scaling, pulled by agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tula_wire._base import Count, Positive, WireModel

__all__ = ["Granularity", "ScalingPolicy", "ScalingThresholds"]

ScalingPolicy = Literal["gain", "ags", "static", "none"]
Granularity = Literal["tensor", "channel", "element"]


class ScalingThresholds(WireModel):
    """How the optimizer wrapper scales; every field has a safe default so that a partial answer still works."""

    version: int = Field(1, description="Grows with every change; also the ETag.")
    policy: ScalingPolicy = "gain"
    granularity: Granularity = "tensor"
    delta: Positive = Field(0.5, description="A step with gradient variability at or above it is sensitive.")
    small_batch_size: Count | None = Field(None, description="b_small; None: the batch of one rank or micro-step.")
    static_scale: Positive = 1.0
    s_min: Annotated[float, Field(gt=0)] = 1e-3
    s_max: Positive | None = Field(None, description="None: sqrt(B / b_small), as Algorithm 1 has it.")
    refresh_steps: Count | None = Field(None, description="None: once an epoch.")
    gradient_noise_scale: float | None = None
    gradient_noise_scale_error: float | None = None
    critical_batch_size: float | None = None
    reason: str = ""
