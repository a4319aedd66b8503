"""Gradient scaling for large batches: the optimizer wrapper, its options and its thresholds."""

from __future__ import annotations

from tula_agent.scaling.gain import GainRule
from tula_agent.scaling.optimizer import TulaOptimizer
from tula_agent.scaling.thresholds import PolicyName, ScalingThresholds
from tula_wire.bounds import Granularity

__all__ = ["GainRule", "Granularity", "PolicyName", "ScalingThresholds", "TulaOptimizer"]
