"""Gradient scaling for large batches: the optimizer wrapper, its thresholds, and the baselines it is compared with."""

from __future__ import annotations

from tula_agent.scaling.large_batch import LargeBatch, Method, large_batch
from tula_agent.scaling.optimizer import TulaOptimizer
from tula_agent.scaling.thresholds import Granularity, PolicyName, ScalingThresholds

__all__ = [
    "Granularity",
    "LargeBatch",
    "Method",
    "PolicyName",
    "ScalingThresholds",
    "TulaOptimizer",
    "large_batch",
]
